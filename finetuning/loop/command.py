"""The shared part of all fine-tuning commands: parse the settings, and then run the job of the task."""

from collections.abc import Callable, Sequence
from importlib import import_module

from finetuning.config.settings import FinetuningConfig, parse_finetuning_config
from mlm_common.cli.command_line import command, log_start
from train.runtime.supervisor import supervise_if_asked


def finetuning_command(
    config_class: type[FinetuningConfig], job: str, file: str, description: str | None
) -> Callable[..., int]:
    """Make the `main` function of a command, which returns the exit status.

    Args:
        config_class: class of the settings.
        job: MODULE:CLASS of the `FinetuningJob`. The class is imported after the settings are parsed, so that `--help`
            does not import transformers.
        file: path of the command's script.
        description: text at the top of `--help`.
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
