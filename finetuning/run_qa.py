r"""Fine-tune a model to find answers to questions in a text: SQuAD 1.1, SQuAD 2.0, or files in their format.

Examples:
    python finetuning/run_qa.py --init-from work/model --num-epochs 2 \
        --learning-rate 3e-5 --train-file squad/train-v1.1.json.gz \
        --validation-file squad/dev-v1.1.json.gz --output-dir work/squad
"""

try:
    import mlm_common.cli  # noqa: F401  (from here on Ctrl-C is one line)
    from finetuning.loop.command import finetuning_command
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None

from finetuning.config.settings import QuestionConfig
from mlm_common.cli.process import run_as_script

main = finetuning_command(QuestionConfig, "finetuning.tasks.questions:QuestionJob", __file__, __doc__)

if __name__ == "__main__":
    run_as_script(main)
