"""Settings of the run itself and of the Hub, `TrainingConfig` with all settings, and the parsing of flags and files."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast, get_type_hints

from mlm_common.cli.command_line import as_settings, parse_arguments, read_yaml_file
from mlm_common.cli.settings import Bounded, Mark, Public, fields_marked, flag, flag_of, require
from mlm_common.errors import InputError
from mlm_common.hub.push import MAIN_BRANCH, HubRepository
from train.config import ADDED, MAY_CHANGE, Changeable, PerWorker
from train.config.hardware import HardwareConfig, PretrainingHardware
from train.config.learning import (
    BATCH,
    CHECKPOINTS,
    EVALUATION,
    FAULTS,
    DataConfig,
    MaskingConfig,
    ModelConfig,
    OptimizationConfig,
    PretrainedModel,
)
from train.config.presets import names_set_by_presets, preset_table, read_preset

MASK = "[MASK]"
# This word may be given instead of a number of steps.
EPOCH = "epoch"
# What the Hub accepts as a language: an ISO 639 code, perhaps with a script or region, or no single language.
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code")
# A TPU may be lost without notice, and losing a day of training costs more than a checkpoint every 15 minutes.
TPU_SAVE_MINUTES = 15.0
# Settings multiplied by the `scale` of a `--phases` file: lengths of the schedule, but not intervals between
# evaluations.
SCALED = ("max_steps", "warmup_steps")
MAX_SCALE = 1000
LIST_PRESETS = "list"
TRACKERS = ("wandb", "mlflow", "trackio")  # the names that transformers uses


@dataclass(frozen=True)
class RunConfig(Bounded):
    """Where and how often the run writes, its seed, and its reaction to faults."""

    FLAG_GROUP = "Output"

    output_dir: PerWorker[str | None] = flag(
        None,
        "Folder for everything the run writes, local or gs://: metrics.jsonl, checkpoints/, export/ …",
        metavar="DIR",
        is_usual=True,
    )
    seed: int = flag(0, "Random seed of initial weights, order of rows and masks.", at_least=0, below=2**31)
    log_steps: Changeable[Public[str | int | None]] = flag(
        None,
        "Write a line to metrics.jsonl every N steps, or with `epoch` once per epoch. Default: a fiftieth of the run, "
        "at most 50 steps.",
        or_word=EPOCH,
        group=EVALUATION,
        at_least=1,
    )
    eval_steps: Changeable[Public[str | int | None]] = flag(
        None,
        "Evaluate every N steps, or with `epoch` after each pass over the training rows, rounded up to whole steps. "
        "Default: at most ten times per run, and in at most a tenth of its time.",
        or_word=EPOCH,
        group=EVALUATION,
        at_least=1,
    )
    save_steps: Changeable[Public[str | int | None]] = flag(
        None,
        "Save a checkpoint every N steps, or with `epoch` once per epoch. Default: at each evaluation if --eval-steps "
        "is given, else ten times per run.",
        or_word=EPOCH,
        group=CHECKPOINTS,
        at_least=1,
    )
    save_minutes: Changeable[float | None] = flag(
        None,
        "Also save a checkpoint every X minutes; 0 turns it off. Default: 15 on a TPU, otherwise off.",
        group=CHECKPOINTS,
        at_least=0,
    )
    keep_checkpoints: Changeable[int] = flag(
        2,
        "Number of newest checkpoints to keep. The best one is always kept, too.",
        group=CHECKPOINTS,
        at_least=1,
    )
    resume: Changeable[Literal["auto", "must", "never"]] = flag(
        "auto",
        "What to do with a run in --output-dir. auto: continue it if it is the same run. must: fail if there is "
        "nothing to resume. never: fail if there is a run.",
        group=CHECKPOINTS,
    )
    overwrite_output_dir: Changeable[bool] = flag(
        False, "Delete the run in --output-dir and start over. Other files in it are kept.", group=CHECKPOINTS
    )
    on_nonfinite: Changeable[Literal["stop", "skip"]] = flag(
        "stop",
        "What to do if a loss or gradient is not finite, or the loss rises by --max-loss-rise. stop: end the run. "
        "skip: return to the last good checkpoint and skip the rows read since then.",
        group=FAULTS,
    )
    max_loss_rise: Changeable[float | None] = flag(
        None,
        "Treat a logged loss as diverged if it exceeds the median of the previous five by more than X nats. Default: "
        "no limit.",
        group=FAULTS,
        above=0,
    )
    max_rollbacks: Changeable[int] = flag(
        3, "With --on-nonfinite skip: stop after N returns to a checkpoint.", group=FAULTS, at_least=0
    )
    supervise: Changeable[bool] = flag(
        False,
        "Train in a child process and restart it after a crash, a lost TPU or maintenance. It resumes from the "
        "newest checkpoint.",
        group=FAULTS,
    )
    stall_minutes: Changeable[float] = flag(
        30.0, "With --supervise: restart training if it shows no activity for X minutes.", group=FAULTS, above=0
    )
    max_retries: Changeable[int] = flag(
        5, "With --supervise: give up after N restarts in a row without a new step.", group=FAULTS, at_least=0
    )
    retry_seconds: Changeable[float] = flag(
        10.0,
        "With --supervise: wait X seconds before the first restart; the wait doubles with each further one in a row.",
        group=FAULTS,
        above=0,
    )
    profile: Changeable[str | None] = flag(
        None,
        "Trace the steps from START to STOP for TensorBoard's profiler, such as 100:105.",
        metavar="START:STOP",
        group=EVALUATION,
    )
    report_to: Changeable[Public[list[str]]] = flag(
        list,
        f"Also send the log to these trackers: {', '.join(TRACKERS)}. Their usual environment variables apply.",
        metavar="TRACKER",
        group=EVALUATION,
    )
    run_name: Changeable[str | None] = flag(
        None, "Name of the run in the trackers. Default: the name of --output-dir.", metavar="NAME", group=EVALUATION
    )
    dry_run: Changeable[bool] = flag(False, "Check everything, print the plan, and exit.", is_usual=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overwrite_output_dir and self.resume == "must":
            raise InputError("--overwrite-output-dir cannot be combined with --resume must.")
        start, _, stop = (self.profile or "0:1").partition(":")
        is_right = start.isdecimal() and stop.isdecimal() and int(start) < int(stop)
        require(is_right, "must be START:STOP, two steps with START below STOP", "--profile", self.profile)
        is_right = set(self.report_to) <= set(TRACKERS) and len(set(self.report_to)) == len(self.report_to)
        rule = f"must be among {', '.join(TRACKERS)}, each once (TensorBoard's files are always written)"
        require(is_right, rule, "--report-to", " ".join(self.report_to))

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The steps after which a trace starts and ends; None without `--profile`."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        return int(start), int(stop)


@dataclass(frozen=True)
class PretrainingRun(RunConfig):
    """The settings of every run, and the phases of a pretraining run."""

    phases: PerWorker[str | None] = flag(
        None,
        "YAML file for a run in phases: the settings of the whole run, and for each phase its shards, its number of "
        "steps and other settings that change (examples in recipes/).",
        metavar="FILE",
        group=BATCH,
    )


@dataclass(frozen=True)
class HubConfig(Bounded):
    """Where and how often the export is pushed to the Hub, and facts that only the user can add to the model card."""

    FLAG_GROUP = "Hub"

    hub_model_id: Changeable[Public[str | None]] = flag(
        None, "Push the export to this repository on the Hub.", metavar="USER/NAME"
    )
    hub_private: Changeable[bool] = flag(False, "Make the repository private when it is created.")
    hub_revision: Changeable[Public[str | None]] = flag(
        None, "Branch to push to; created if it does not exist. Default: main."
    )
    hub_tag: Changeable[Public[str | None]] = flag(None, "Tag for the commit of the last push.")
    hub_strategy: Changeable[Literal["end", "epoch", "steps", "checkpoint"]] = flag(
        "end",
        "When to push. end: after the last step. epoch: also after each epoch. steps: also every --push-steps "
        "steps. checkpoint: like steps, and also push the newest training checkpoint to the branch `checkpoints`. "
        "Training continues during a push; if pushes fall behind, only the newest is made.",
    )
    push_steps: Changeable[int | None] = flag(
        None, "Push every N steps with --hub-strategy steps or checkpoint. Default: at each checkpoint.", at_least=1
    )
    resume_from_hub: Changeable[bool] = flag(
        False, "If --output-dir has no run, resume from the checkpoint that --hub-strategy checkpoint pushed."
    )
    publish_details: Changeable[bool] = flag(
        False,
        "Do not redact the records that --hub-strategy checkpoint pushes. Default: paths of shards, run and corpus, "
        "names of buckets, and the TPU's project, name and zone are redacted.",
    )
    hub_license: Changeable[Public[str | None]] = flag(
        None, "License for the model card, as the Hub spells it: apache-2.0, mit, cc-by-4.0 …"
    )
    hub_language: Changeable[Public[list[str]]] = flag(
        list, "Languages for the model card: ISO 639 codes such as en de, or multilingual.", metavar="CODE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [code for code in self.hub_language if not LANGUAGE_CODE.fullmatch(code)]
        rule = "must be ISO 639 codes of two or three letters, such as en de, or multilingual"
        require(not wrong, rule, "--hub-language", " ".join(wrong))
        is_by_steps = self.push_steps is None or self.hub_strategy in ("steps", "checkpoint")
        require(is_by_steps, "needs --hub-strategy steps or checkpoint", "--push-steps", self.hub_strategy)
        if self.hub_model_id is None:
            for name in ("hub_private", "hub_revision", "hub_tag", "hub_strategy", "resume_from_hub"):
                value = getattr(self, name)
                require(value in (None, "end", False), "needs --hub-model-id", flag_of(name), value)

    def repository(self) -> HubRepository | None:
        if self.hub_model_id is None:
            return None
        branch, private = self.hub_revision or MAIN_BRANCH, self.hub_private
        return HubRepository(self.hub_model_id, private=private, branch=branch, tag=self.hub_tag)


@dataclass(frozen=True)
class PretrainingHub(HubConfig):
    """Where and how often a pretrained model is pushed, and facts for its card."""

    hub_example: Changeable[Public[str | None]] = flag(
        None,
        f"Example sentence for the model card, with one {MASK}. Default: a sentence of the validation text; none if "
        "the card is pushed and the corpus is not a public data set of the Hub.",
        metavar="TEXT",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_one_mask = self.hub_example is None or self.hub_example.count(MASK) == 1
        require(has_one_mask, f"must have exactly one {MASK}", "--hub-example", repr(self.hub_example))


class RunSettings:
    """All settings of a run, one dataclass per subject. This class declares the subjects that every run has."""

    model: ModelConfig
    optimization: OptimizationConfig
    hardware: HardwareConfig
    run: RunConfig
    hub: HubConfig

    def folders(self) -> dict[str, str | None]:
        """Return the folders that the hosts of a TPU read and write, {flag: folder}."""
        return {"--output-dir": self.run.output_dir}

    @classmethod
    def subjects(cls) -> dict[str, type]:
        """Return the dataclass of each subject's settings, in order."""
        types = get_type_hints(cls)
        return {subject.name: types[subject.name] for subject in fields(cast(Any, cls))}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return asdict(cast(Any, self))

    def without(self, mark: Mark) -> dict[str, Any]:
        """Return the settings without this mark, {subject.name: value}."""
        named = {
            f"{subject}.{name}": value for subject, values in self.as_dict().items() for name, value in values.items()
        }
        marked = settings_marked(mark, type(self))
        return {name: value for name, value in named.items() if name not in marked}

    def identity(self) -> dict[str, Any]:
        """Return the settings that identify the run, {subject.name: value}.

        Settings that were added later and have their defaults are left out, so that adding a setting does not change
        the identity of existing runs.
        """
        kinds, added = self.subjects().items(), settings_marked(ADDED, type(self))
        defaults = {f"{subject}.{setting.name}": setting.default for subject, kind in kinds for setting in fields(kind)}
        settings = self.without(MAY_CHANGE).items()
        return {name: value for name, value in settings if name not in added or value != defaults[name]}


@dataclass(frozen=True)
class TrainingConfig(RunSettings):
    """All settings of a pretraining run."""

    data: DataConfig
    model: PretrainedModel
    masking: MaskingConfig
    optimization: OptimizationConfig
    hardware: PretrainingHardware
    run: PretrainingRun
    hub: PretrainingHub = field(default_factory=PretrainingHub)

    def folders(self) -> dict[str, str | None]:
        return self.data.folders() | super().folders()


SUBJECTS = tuple(TrainingConfig.subjects().values())


def settings_marked(mark: Mark, config_class: type[RunSettings] = TrainingConfig) -> set[str]:
    """Return the names of the settings with this mark, as `subject.name`."""
    subjects = config_class.subjects().items()
    return {f"{subject}.{name}" for subject, config in subjects for name in fields_marked(config, mark)}


def read_phases_file(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a `--phases` file, with its numbers of steps multiplied by its `scale`.

    Returns:
        The settings of the whole run, and of each phase, {flag: value}.

    Raises:
        InputError: the file is not a valid `--phases` file.
    """
    content = read_yaml_file(path, "--phases")
    content = {"phases": content} if isinstance(content, list) else content
    is_right = isinstance(content, dict) and content.keys() <= {"scale", "settings", "phases"}
    phases = content.get("phases") if is_right else None
    if not (isinstance(phases, list) and phases):
        rule = (
            "must contain a list of phases, or a mapping with `phases` and optionally `settings` and `scale`, by which "
            "all numbers of steps are multiplied"
        )
        raise InputError(f"--phases {rule}; {path} contains {content!r}.")
    scale = content.get("scale", 1)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    rule = f"must have a `scale` above 0 and at most {MAX_SCALE:,}"
    require(is_number and 0 < scale <= MAX_SCALE, rule, f"--phases {path}", scale)
    parts = (content.get("settings") or {}, *phases)
    settings, *phase_settings = (_scaled(as_settings(part, path), scale, path) for part in parts)
    return settings, phase_settings


def _scaled(settings: dict[str, Any], scale: float, path: str) -> dict[str, Any]:
    """Multiply the numbers of steps in a `--phases` file by its scale. Numbers above 0 stay above 0."""
    if scale != 1 and "num_epochs" in settings:
        raise InputError(
            f"--phases {path} must give the length of each phase in max_steps if it has a `scale`, which does not "
            f"multiply num_epochs; received a scale of {scale} and num_epochs: {settings['num_epochs']}."
        )

    def scaled(name: str, value: Any) -> Any:
        if scale == 1 or name not in SCALED or not str(value).isdecimal() or int(value) == 0:
            return value
        return max(1, round(int(value) * scale))

    return {name: scaled(name, value) for name, value in settings.items()}


def settings_of_preset(name: str) -> dict[str, Any]:
    """Read the flags that a preset sets, {field name: value}. The name `list` prints all presets and exits."""
    if name == LIST_PRESETS:
        try:
            print(preset_table(), flush=True)
        except BrokenPipeError:  # the output was piped to `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    return dict(read_preset(name)["settings"])


# Flags whose value names further settings, {field name: function that reads them}; a later flag overrides an earlier
# one.
LAYERS = {"preset": settings_of_preset, "phases": lambda path: read_phases_file(path)[0]}


def parse_run_flags(
    argv: Sequence[str] | None, description: str | None, *extra_types: type, needed: Sequence[str] = ()
) -> tuple[TrainingConfig, Any]:
    """Parse the flags of a pretraining run.

    Flags take precedence over `--config-file`, then `--phases`, then the preset, then the defaults.

    Args:
        argv: the command line; None means this process's command line.
        description: shown by `--help`.
        extra_types: at most one dataclass with further flags.
        needed: names of the fields that the usage line shows as required. This function does not check them.

    Returns:
        The settings, and an instance of the extra dataclass (None without one).
    """
    other_defaults = dict.fromkeys(names_set_by_presets(), "the preset's")
    types = (*SUBJECTS, *extra_types)
    parsed = parse_arguments(types, argv, description, LAYERS, needed=needed, other_defaults=other_defaults)
    return TrainingConfig(*parsed[: len(SUBJECTS)]), next(iter(parsed[len(SUBJECTS) :]), None)


def parse_training_config(argv: Sequence[str] | None, description: str | None) -> TrainingConfig:
    config, _ = parse_run_flags(argv, description, needed=("train_dataset", "output_dir"))
    if config.run.phases is None:
        require(bool(config.data.train_dataset), "is required: a folder of shards", "--train-dataset", "nothing")
    require(bool(config.run.output_dir), "is required: the folder of the run", "--output-dir", "nothing")
    return config


def saved_on_tpus(config: RunConfig, hardware: HardwareConfig) -> RunConfig:
    """Set `save_minutes` to the default for TPUs, if the run uses a TPU and the flag was not given."""
    if config.save_minutes is None and hardware.wants_tpu:
        return replace(config, save_minutes=TPU_SAVE_MINUTES)
    return config
