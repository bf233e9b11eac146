"""Pretrain a masked language model on TFRecord shards, on TPU, GPU or CPU, and export it for transformers."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mlm_common.command_line import command, log_start
from train.config import TrainingConfig, parse_training_config
from train.runtime.supervisor import Supervisor, supervision


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check all that can be checked, print the plan, connect, build, restore, fit, export, push."""
    config = parse_training_config(argv, __doc__)
    if config.run.supervise and supervision() is None and not config.run.dry_run:
        sys.exit(supervise(argv, config))
    log_start(__file__)
    from train.run import prepare_run, print_plan, train_and_export  # transformers and datasets, not for --help

    run = prepare_run(config)
    if config.run.dry_run:
        print_plan(run)
        return
    train_and_export(run)


def supervise(argv: Sequence[str] | None, config: TrainingConfig) -> int:
    """Run this command in processes of its own until it has come to its end, and return its exit status."""
    command_line = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
    return Supervisor(
        command_line,
        stall_seconds=config.run.stall_minutes * 60,
        max_retries=config.run.max_retries,
        retry_seconds=config.run.retry_seconds,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
