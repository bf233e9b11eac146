"""Pretrain a masked language model on TFRecord shards, on TPU, GPU or CPU, and export it for transformers."""

import sys
from collections.abc import Sequence

from tokenizer_training.command_line import command, log_start
from train.config import parse_training_config


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check all that can be checked, print the plan, connect, build, restore, fit, export, push."""
    config = parse_training_config(argv, __doc__)
    log_start(__file__)
    from train.run import prepare_run, print_plan, train_and_export  # transformers and datasets, not for --help

    run = prepare_run(config)
    if config.run.dry_run:
        print_plan(run)
        return
    train_and_export(run)


if __name__ == "__main__":
    sys.exit(main())
