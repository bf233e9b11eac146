r"""Fine-tune a model to classify texts or pairs of texts, or to rate them with a number: GLUE tasks or your data.

Examples:
    python finetuning/run_classification.py --init-from work/model \
        --train-file recipes/reviews/train.csv \
        --validation-file recipes/reviews/validation.csv --text-column-names review \
        --output-dir work/reviews
    python finetuning/run_classification.py --init-from work/model --task-name sst2 \
        --output-dir work/sst2
    python finetuning/run_classification.py --init-from work/mnli --task-name mrpc \
        --seeds 1 2 3 --output-dir work/mrpc
"""

try:
    import mlm_common.cli  # noqa: F401  (from here on Ctrl-C is one line)
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None

from finetuning.config.settings import ClassificationConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(ClassificationConfig, "finetuning.tasks.classification:ClassificationJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
