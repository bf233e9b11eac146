"""What the commands of fine-tuning have in common: the settings are read, then a job makes the run."""

from collections.abc import Callable, Sequence
from importlib import import_module

from finetuning.config.settings import FinetuningConfig, parse_finetuning_config
from mlm_common.cli.command_line import command, log_start
from train.runtime.supervisor import supervise_if_asked


def finetuning_command(
    config_class: type[FinetuningConfig], job: str, file: str, description: str | None
) -> Callable[..., int]:
    """Make the `main` of a command, which returns the exit status.

    `job`, MODULE:CLASS, is imported only once the settings are read: `--help` needs no transformers.
    """

    @command
    def main(argv: Sequence[str] | None = None) -> None:
        config = parse_finetuning_config(config_class, argv, description or "")
        supervise_if_asked(config.run, file, argv)
        log_start(file)
        from finetuning.loop.training import finetune

        module, _, name = job.partition(":")
        finetune(config, getattr(import_module(module), name))

    return main
