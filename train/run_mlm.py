"""Pretrain a masked language model on TFRecord shards, on TPU, GPU or CPU, and export it for transformers."""

import sys
from collections.abc import Sequence

try:
    from mlm_common.cli.command_line import command, log_start
except ModuleNotFoundError:
    sys.exit("error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)")
from train.config.sources import parse_training_config
from train.runtime.supervisor import supervise_if_asked


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Check all that can be checked, print the plan, connect; phase by phase build, restore, fit; export, push."""
    config = parse_training_config(argv, __doc__)
    supervise_if_asked(config.run, __file__, argv)
    log_start(__file__)
    from train.loop import run as stages  # transformers, not for --help
    from train.loop.run_record import print_plan, record_run

    run = stages.prepare_run(config)
    if config.run.dry_run:
        print_plan(run)
        return
    with stages.locked_run_folder(run):
        from train.loop.fitting import fit  # TensorFlow, not for bad input
        from train.loop.trainer import restored_trainers

        strategy = stages.connect(run)
        with stages.failure_handling(run, strategy) as stop:
            run.plan(strategy.num_replicas_in_sync)
            stages.check_workers(run, strategy)
            for trainer in restored_trainers(run, strategy):
                record = record_run(
                    trainer.run, trainer.plan, strategy, trainer.computation, trainer.model.network.count_params()
                )
                publisher = stages.build_publisher(trainer.run, record)
                if publisher is not None:
                    trainer.print_start()
                with stages.push_while_training(trainer.run, trainer.plan, publisher, trainer.log) as pushing:
                    figures = fit(trainer, stop, pushing)
        if publisher is not None:
            trainer.publish(publisher, figures)


if __name__ == "__main__":
    sys.exit(main())
