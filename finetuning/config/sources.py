"""Where settings of fine-tuning come from: the command line, over a configuration file and the defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from finetuning.config.settings import CustomData, ExamplesConfig, FinetuningConfig
from mlm_common.cli.command_line import parse_arguments
from mlm_common.cli.local_paths import check_file
from mlm_common.cli.settings import flag_of, require
from train.config.settings import saved_on_tpus

Settings = TypeVar("Settings", bound=FinetuningConfig)


def parse_finetuning_config(config_class: type[Settings], argv: Sequence[str] | None, description: str) -> Settings:
    """Read the settings of a task given on the command line, over `--config-file` and the defaults.

    Raises:
        InputError: a setting is not what it must be, or a required one is missing.
    """
    subjects = config_class.subjects()
    settings: dict[str, Any] = dict(
        zip(
            subjects,
            parse_arguments(tuple(subjects.values()), argv, description, needed=_needed(subjects)),
            strict=True,
        )
    )
    config = config_class(**settings)
    require(bool(config.model.init_from), "is required: the model to start from", "--init-from", "nothing")
    require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    if isinstance(config.data, CustomData):
        require(bool(config.data.task), "is required: FILE.py:CLASS, the task", "--task", "nothing")
    else:  # a custom task may read a folder, or nothing, by these names
        _check_files(config.data)
    run: Any = saved_on_tpus(config)
    return replace(config, run=run)


def _needed(subjects: dict[str, type]) -> tuple[str, ...]:
    source = "task" if hasattr(subjects["data"], "task") else "train_file"
    return ("init_from", source, "output_dir")


def _check_files(data: ExamplesConfig) -> None:
    """Check that the files exist, before anything else is said about them or the model."""
    for name in ("train_file", "validation_file", "test_file"):
        path = getattr(data, name)
        if path is not None:
            check_file(path, flag_of(name))
