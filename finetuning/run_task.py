"""Fine-tune a model on a custom task: a class in a Python file, with its data, head and metric."""

import sys
from collections.abc import Sequence

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from finetuning.config.settings import CustomConfig
from finetuning.config.sources import parse_finetuning_config
from mlm_common.cli.settings import require
from train.runtime.supervisor import supervise_if_asked


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check all that can be checked, print the plan, connect; build, restore, fit; score, predict, export, push."""
    config = parse_finetuning_config(CustomConfig, argv, __doc__)
    require(bool(config.data.task), "is required: FILE.py:CLASS, the task", "--task", "nothing")
    supervise_if_asked(config.run, __file__, argv)
    log_start(__file__)
    from finetuning.loop.custom import OwnJob  # transformers, not for --help
    from finetuning.loop.seeds import finetune_seeds

    finetune_seeds(config, OwnJob)


if __name__ == "__main__":
    sys.exit(main())
