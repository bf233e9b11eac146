"""The settings of each phase of a run, read from the file of `--phases`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from mlm_common.cli.command_line import typed_settings
from mlm_common.cli.settings import flag_of, require
from mlm_common.errors import InputError
from train.config.learning import SOURCE_SETTINGS
from train.config.settings import SUBJECTS, TrainingConfig, read_phases_file

# Settings of the learning rate's schedule, and all settings in which phases may differ.
SCHEDULE = frozenset(
    {
        "learning_rate", "muon_learning_rate", "schedule", "warmup_ratio", "warmup_steps", "decay_ratio",
        "min_learning_rate_ratio",
    }
)  # fmt: skip
PER_PHASE = SCHEDULE | {
    "train_dataset", "eval_dataset", *SOURCE_SETTINGS, "max_length", "config_overrides", "block_attention", "dropout",
    "gradient_checkpointing", "masking", "mlm_probability", "mask_token_rate", "random_token_rate",
    "per_replica_batch_size", "gradient_accumulation_steps", "global_batch_size", "num_epochs", "max_steps",
    "weight_decay_rate", "max_grad_norm", "eval_steps", "save_steps",
}  # fmt: skip
# Settings of a model's configuration that do not affect weights.
OVERRIDES_PER_PHASE = frozenset({"rope_theta", "global_rope_theta", "local_rope_theta", "local_attention"})


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of a phase.

    Attributes:
        name: a human-readable name; empty in a run without `--phases`, which is a single phase.
        config: the settings of the run, as they apply in this phase.
        has_separate_schedule: the learning rate schedule starts and ends with the phase. Otherwise one schedule spans
            the whole run.
    """

    name: str
    config: TrainingConfig
    has_separate_schedule: bool = False


def phases_of(config: TrainingConfig) -> tuple[PhaseSettings, ...]:
    """Return the phases of a run, in order; a single phase without `--phases`."""
    if config.run.phases is None:
        return (PhaseSettings("", config),)
    max_steps, num_epochs = config.optimization.max_steps, config.optimization.num_epochs
    rule = "must be left out with --phases: each phase sets it"
    require(max_steps is None, rule, "--max-steps", max_steps)
    require(num_epochs == 1, rule, "--num-epochs", num_epochs)
    _, phase_settings = read_phases_file(config.run.phases)
    phases = []
    for index, settings in enumerate(phase_settings):
        name = settings.pop("name", f"phase {index + 1}")
        is_text = isinstance(name, str | int | float) and not isinstance(name, bool) and str(name).strip()
        require(bool(is_text), "must have text for the `name` of a phase", f"--phases {config.run.phases}", repr(name))
        with naming_phase(str(name)):
            phases.append(_phase(config, str(name), index, settings, config.run.phases))
    return tuple(phases)


@contextmanager
def naming_phase(name: str) -> Iterator[None]:
    """Add the phase's name, if it is not empty, to every InputError that is raised in the context."""
    try:
        yield
    except InputError as error:
        if not name:
            raise
        raise type(error)(f"Phase `{name}`: {error}") from error


def _phase(config: TrainingConfig, name: str, index: int, settings: dict[str, Any], path: str) -> PhaseSettings:
    settings = typed_settings(SUBJECTS, settings, path)
    for setting in settings:
        rule = f"must be the same in all phases; only these may differ: {', '.join(sorted(PER_PHASE))}"
        require(setting in PER_PHASE, rule, flag_of(setting), settings[setting])
    has_length = ("max_steps" in settings) != ("num_epochs" in settings)
    require(has_length, "or --num-epochs, but not both, is required in each phase", "--max-steps", sorted(settings))
    has_separate_schedule = not SCHEDULE.isdisjoint(settings)
    if index and has_separate_schedule and "warmup_ratio" not in settings:
        settings.setdefault("warmup_steps", 0)
    if "warmup_ratio" in settings:
        settings.setdefault("warmup_steps", None)
    if "global_batch_size" in settings:  # accumulation then follows from it, not from the run's setting
        settings.setdefault("gradient_accumulation_steps", 1)
    if overrides := settings.get("config_overrides"):
        names = {pair.partition("=")[0].strip() for pair in overrides.split(",")}
        rule = (
            f"of a phase may only change settings that do not affect weights: {', '.join(sorted(OVERRIDES_PER_PHASE))}"
        )
        require(names <= OVERRIDES_PER_PHASE, rule, "--config-overrides", overrides)
        settings["config_overrides"] = ",".join(filter(None, (config.model.config_overrides, overrides)))
    if not settings.keys().isdisjoint(SOURCE_SETTINGS):  # these replace the run's settings of sources
        settings = {"source_weights": [], "sampling_alpha": None, "source_passes": []} | settings
    subjects = {}
    for subject in fields(config):
        values = getattr(config, subject.name)
        given = {setting.name: settings[setting.name] for setting in fields(values) if setting.name in settings}
        subjects[subject.name] = replace(values, **given)
    changed = replace(config, **subjects)
    require(bool(changed.data.train_dataset), "is required: a folder of shards", "--train-dataset", "nothing")
    return PhaseSettings(name, changed, has_separate_schedule)
