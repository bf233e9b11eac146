r"""Fine-tune a model on a custom task: a class in a Python file, with its data, head and metric.

Examples:
    python finetuning/run_task.py --task recipes/star_ratings.py:StarRatings \
        --init-from work/model --train-file recipes/reviews/train.csv \
        --validation-file recipes/reviews/validation.csv --output-dir work/stars
"""

try:
    import mlm_common.cli  # noqa: F401  (from here on Ctrl-C is one line)
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None

from finetuning.config.settings import CustomConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(CustomConfig, "finetuning.tasks.custom:CustomJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
