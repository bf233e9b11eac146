"""Fine-tune a model to find answers to questions in a text: SQuAD 1.1, SQuAD 2.0, or files in their format."""

import sys
from collections.abc import Sequence

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from finetuning.config.settings import QuestionConfig
from finetuning.config.sources import parse_finetuning_config
from train.runtime.supervisor import supervise_if_asked


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check all that can be checked, print the plan, connect; build, restore, fit; score, predict, export, push."""
    config = parse_finetuning_config(QuestionConfig, argv, __doc__)
    supervise_if_asked(config.run, __file__, argv)
    log_start(__file__)
    from finetuning.loop.questions import QuestionJob  # transformers, not for --help
    from finetuning.loop.seeds import finetune_seeds

    finetune_seeds(config, QuestionJob)


if __name__ == "__main__":
    sys.exit(main())
