"""Pretrain a masked language model on TFRecord shards, on TPU, GPU or CPU, and export it for transformers."""

import sys
from collections.abc import Sequence

from mlm_common.command_line import command, log_start
from train.config import parse_training_config
from train.runtime.supervisor import supervise_if_asked


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check all that can be checked, print the plan, connect, build, restore, fit, export, push."""
    config = parse_training_config(argv, __doc__)
    supervise_if_asked(config.run, __file__, argv)
    log_start(__file__)
    from train import run as stages  # transformers, not for --help

    run = stages.prepare_run(config)
    if config.run.dry_run:
        stages.print_plan(run)
        return
    with stages.own_run_folder(run):
        from train.trainer import build_trainer  # TensorFlow, not for bad input

        strategy = stages.connect(run)
        with stages.explained_and_stoppable(run, strategy) as stop:
            plan = run.plan(strategy.num_replicas_in_sync)
            stages.check_workers(run, strategy)
            trainer = build_trainer(run, plan, strategy)
            trainer.load_initial_weights()
            stages.clear_folder_if_asked(run, strategy)
            trainer.restore()
            record = stages.record_run(run, plan, strategy)
            publisher = stages.build_publisher(run, record)
            if publisher is not None:
                trainer.print_start()
            with stages.push_while_training(run, plan, publisher, trainer.log) as pushing:
                figures = trainer.fit(stop, pushing)
        if publisher is not None:
            trainer.publish(publisher, figures)


if __name__ == "__main__":
    sys.exit(main())
