r"""Fine-tune a model to choose one of several texts, as in SWAG, RACE and COPA.

Examples:
    python finetuning/run_multiple_choice.py --init-from work/model \
        --train-file swag/train.csv --validation-file swag/val.csv --output-dir work/swag
    python finetuning/run_multiple_choice.py --init-from work/model \
        --dataset-name ehovy/race --dataset-config-name middle --output-dir work/race
"""

try:
    import mlm_common.cli  # noqa: F401  (from here on Ctrl-C is one line)
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None

from finetuning.config.settings import ChoiceConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(ChoiceConfig, "finetuning.tasks.choice:ChoiceJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
