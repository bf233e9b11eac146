"""Where settings come from: the command line, over a configuration file, `--phases`, a preset and the defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlm_common.cli.command_line import as_settings, parse_arguments, read_yaml_file, under_current_names
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from train.config.preset_table import preset_table
from train.config.presets import names_set_by_presets, preset_settings
from train.config.settings import SUBJECTS, RunConfig, RunSettings, TrainingConfig

# A TPU may be lost without a notice, and a day of it costs more than a checkpoint each quarter of an hour.
TPU_SAVE_MINUTES = 15.0
# Numbers of steps by which a schedule is as long as it is; those between evaluations and checkpoints are not.
SCALED = ("max_steps", "warmup_steps")
MAX_SCALE = 1000
LIST_PRESETS = "list"


def read_phases_file(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a file of `--phases`: {flag: value} of the whole run, and of each phase, steps multiplied by its `scale`.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    content = read_yaml_file(path, "--phases")
    content = {"phases": content} if isinstance(content, list) else content
    is_right = isinstance(content, dict) and content.keys() <= {"scale", "settings", "phases"}
    phases = content.get("phases") if is_right else None
    if not (isinstance(phases, list) and phases):
        rule = "must name a list of phases, or `settings` and `phases`, with a `scale` for their steps"
        raise InputError(f"--phases {rule}; {path} holds {content!r}.")
    scale = content.get("scale", 1)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    rule = f"must have a `scale` above 0 and at most {MAX_SCALE:,}"
    require(is_number and 0 < scale <= MAX_SCALE, rule, f"--phases {path}", scale)
    parts = (content.get("settings") or {}, *phases)
    settings, *own = (_scaled(as_settings(part, path), scale, path) for part in parts)
    return settings, own


def _scaled(settings: dict[str, Any], scale: float, path: str) -> dict[str, Any]:
    """Multiply the numbers of steps of a file of `--phases`; what is above 0 stays so."""
    if scale != 1 and "num_epochs" in settings:
        raise InputError(
            f"--phases {path} must give the length of each phase in max_steps for a `scale`, which does not multiply "
            f"num_epochs; received a scale of {scale} and num_epochs: {settings['num_epochs']}."
        )

    def scaled(name: str, value: Any) -> Any:
        if scale == 1 or name not in SCALED or not str(value).isdecimal() or int(value) == 0:
            return value
        return max(1, round(int(value) * scale))

    return {name: scaled(name, value) for name, value in settings.items()}


def phases_settings(path: str) -> dict[str, Any]:
    """Read the flags that a file of `--phases` sets for the whole run, {field name: value}."""
    return read_phases_file(path)[0]


def settings_of_preset(name: str) -> dict[str, Any]:
    """Read the flags that a preset sets, {field name: value}; `list` prints all presets and ends the process.

    Raises:
        InputError: there is no such preset.
        SystemExit: after the list.
    """
    if name == LIST_PRESETS:
        print(preset_table())
        raise SystemExit(0)
    return preset_settings(name)


# What stands behind the value of a flag, in the order in which it wins.
LAYERS = {"preset": settings_of_preset, "phases": phases_settings}


def parse_run_flags(
    argv: Sequence[str] | None, description: str | None, *more_types: type, needed: Sequence[str] = ()
) -> tuple[TrainingConfig, Any]:
    """Read the flags of a run of pretraining, all optional, over `--config-file`, `--phases`, the preset, the defaults.

    Args:
        argv: the words of the command line; those of the process by default.
        description: of the command.
        more_types: at most one dataclass of more flags.
        needed: names of the fields that the usage line shows.

    Returns:
        The settings, and an instance of the dataclass of more flags; None without one.

    Raises:
        InputError: a setting is not what it must be.
        SystemExit: after `--help`, and after `--preset list`.
    """
    other_defaults = dict.fromkeys(names_set_by_presets(), "the preset's")
    types = (*SUBJECTS, *more_types)
    parsed = parse_arguments(types, argv, description, LAYERS, needed=needed, other_defaults=other_defaults)
    return TrainingConfig(*parsed[: len(SUBJECTS)]), next(iter(parsed[len(SUBJECTS) :]), None)


def parse_training_config(argv: Sequence[str] | None, description: str | None) -> TrainingConfig:
    """Read the settings of a run; see `parse_run_flags`.

    Raises:
        InputError: a setting is not what it must be, or a required one is missing.
    """
    config, _ = parse_run_flags(argv, description, needed=("train_dataset", "output_dir"))
    if config.run.phases is None:
        require(bool(config.data.train_dataset), "is required: a folder of shards", "--train-dataset", "nothing")
    require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    return replace(config, run=saved_on_tpus(config))


def saved_on_tpus(config: RunSettings) -> RunConfig:
    """Fill in how often a run on a TPU saves, where that was left open."""
    if config.run.save_minutes is None and config.hardware.wants_tpu:
        return replace(config.run, save_minutes=TPU_SAVE_MINUTES)
    return config.run


def current_settings(
    recorded: dict[str, dict[str, Any]], config_class: type[RunSettings] = TrainingConfig
) -> dict[str, dict[str, Any]]:
    """Give settings that a run recorded, by subject, the names and values that their flags have now."""
    classes = tuple(config_class.subjects().values())
    settings = {subject: under_current_names(values, classes) for subject, values in recorded.items()}
    hardware = settings.get("hardware", {})
    former = {None: "auto", True: "on", False: "off"}
    if "tpu_layers" in hardware:
        settings["hardware"] = hardware | {"tpu_layers": former.get(hardware["tpu_layers"], hardware["tpu_layers"])}
    return settings
