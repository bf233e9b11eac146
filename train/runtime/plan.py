"""The phases of a run, read from `--phases`, and the plan of each, computed before the run starts."""

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from mlm_common.cli.command_line import typed_settings
from mlm_common.cli.settings import flag_of, require
from mlm_common.errors import InputError
from train.config.learning import SOURCE_SETTINGS, OptimizationConfig
from train.config.presets import about_preset, read_preset
from train.config.settings import EPOCH, SUBJECTS, RunConfig, RunSettings, TrainingConfig, read_phases_file

logger = logging.getLogger(__name__)

# Size of a weight or moment, in memory and in checkpoints.
FLOAT32_BYTES = 4
# Defaults of intervals: evaluations per run, the fraction of its time that they may take, and lines of the log.
MAX_EVALUATIONS = 10
MAX_EVALUATION_SHARE = 0.1
NUM_LOG_LINES = 50
MAX_LOG_STEPS = 50
# Cost of evaluating a row, relative to training on it: no backward pass, which costs twice as much as the forward pass.
EVALUATION_COST = 1 / 3
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
# Settings of a model's configuration that affect no weights.
OVERRIDES_PER_PHASE = frozenset({"rope_theta", "global_rope_theta", "local_rope_theta", "local_attention"})


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of a phase.

    Attributes:
        name: human-readable; empty in a run without `--phases`, which is a single phase.
        config: the settings of the run, as they apply in this phase.
        has_separate_schedule: the learning rate schedule starts and ends with the phase. Otherwise one schedule spans
            the whole run.
    """

    name: str
    config: TrainingConfig
    has_separate_schedule: bool = False


def phases_of(config: TrainingConfig) -> tuple[PhaseSettings, ...]:
    """Return the phases of a run, in order; a single one without `--phases`."""
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
    require(has_length, "or --num-epochs, one of them, is required in each phase", "--max-steps", sorted(settings))
    has_separate_schedule = not SCHEDULE.isdisjoint(settings)
    if index and has_separate_schedule and "warmup_ratio" not in settings:
        settings.setdefault("warmup_steps", 0)
    if "warmup_ratio" in settings:
        settings.setdefault("warmup_steps", None)
    if "global_batch_size" in settings:  # accumulation then follows from it, not from the run's setting
        settings.setdefault("gradient_accumulation_steps", 1)
    if overrides := settings.get("config_overrides"):
        names = {pair.partition("=")[0].strip() for pair in overrides.split(",")}
        rule = f"of a phase may only set what does not affect weights: {', '.join(sorted(OVERRIDES_PER_PHASE))}"
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


@dataclass(frozen=True)
class PastPhase:
    """An earlier phase, in the plan of a later phase.

    Attributes:
        num_steps: number of steps of the run up to the end of the phase.
        global_batch_rows: rows per step.
        max_length: tokens per row.
    """

    num_steps: int
    global_batch_rows: int
    max_length: int


@dataclass(frozen=True)
class Plan:
    """The numbers of a run or of one of its phases. A step is one update of the weights. Stored in records as JSON.

    Attributes:
        num_replicas: number of replicas.
        global_batch_rows: rows per step, over all replicas.
        num_rows: rows of the training data.
        max_length: tokens per row, at most.
        num_steps: number of steps of the run up to the end of the phase.
        num_warmup_steps: length of the learning rate's warmup, in steps.
        num_decay_steps: number of last steps of the schedule in which `wsd` decays.
        eval_steps: steps between evaluations.
        save_steps: steps between checkpoints.
        save_minutes: minutes between additional checkpoints; None for none.
        num_micro_batches: number of micro-batches of a replica per step.
        first_schedule_step: step at which the learning rate's schedule starts.
        last_schedule_step: step at which the learning rate's schedule ends.
        before: the earlier phases.
        num_phases: number of phases of the run.
        first_row: first row of the shards that this phase reads; earlier phases read the rows before it.
        first_step_of_rows: step after which the run started to read these shards.
        mean_length: average number of tokens per row, including padding, if rows differ in length.
    """

    num_replicas: int
    global_batch_rows: int
    num_rows: int
    max_length: int
    num_steps: int
    num_warmup_steps: int
    num_decay_steps: int
    eval_steps: int
    save_steps: int
    save_minutes: float | None
    num_micro_batches: int
    first_schedule_step: int
    last_schedule_step: int
    before: tuple[PastPhase, ...] = ()
    num_phases: int = 1
    first_row: int = 0
    first_step_of_rows: int = 0
    mean_length: float | None = None

    @property
    def first_step(self) -> int:
        """Number of steps of the run before the phase."""
        return self.before[-1].num_steps if self.before else 0

    @property
    def num_phase_steps(self) -> int:
        return self.num_steps - self.first_step

    @property
    def num_tokens(self) -> int:
        return self.num_phase_steps * self.batch_tokens

    @property
    def batch_tokens(self) -> int:
        """Number of tokens per step, including padding; the average if rows differ in length."""
        return batch_tokens(vars(self))

    @property
    def num_epochs(self) -> float:
        return self.num_phase_steps * self.global_batch_rows / self.num_rows

    @property
    def schedule_steps(self) -> dict[str, int]:
        return schedule_steps(vars(self))

    def log_steps(self, setting: str | int | None = None) -> int:
        """Return the number of steps between lines of the log: `--log-steps`, by default a fiftieth of the phase."""
        by_default = max(1, min(MAX_LOG_STEPS, self.num_phase_steps // NUM_LOG_LINES))
        return _steps(setting, self.num_rows, self.global_batch_rows) or by_default

    def evaluation_cost(self, num_eval_rows: int) -> float:
        """Return the estimated duration of an evaluation, in training steps."""
        return EVALUATION_COST * num_eval_rows / self.global_batch_rows

    def num_evaluations_after(self, step: int) -> int:
        """Return the number of evaluations after a step of the phase: at `eval_steps`, and at the last step."""
        return -(-self.num_steps // self.eval_steps) - step // self.eval_steps if step < self.num_steps else 0

    def evaluation_share(self, num_eval_rows: int) -> float:
        """Return the estimated fraction of the phase's time that evaluations take."""
        num_steps = self.num_evaluations_after(self.first_step) * self.evaluation_cost(num_eval_rows)
        return num_steps / (num_steps + self.num_phase_steps)

    def row_after(self, step: int, num_skipped_rows: int = 0) -> int:
        """Return the next row to read after a step, counted across epochs and including skipped rows."""
        return self.first_row + (step - self.first_step) * self.global_batch_rows + num_skipped_rows

    def describe(self, num_parameters: int, num_eval_rows: int = 0, num_with_one_moment: int = 0) -> dict[str, Any]:
        num_with_gradients = num_parameters + num_in_checkpoint(num_parameters, num_with_one_moment)
        state_gib = num_with_gradients * FLOAT32_BYTES / 2**30
        replicas = f", on {self.num_replicas} replicas" if self.num_replicas > 1 else ""
        steps = f"{self.num_steps:,}"
        if self.num_phases > 1:
            steps = f"{self.first_step:,} to {self.num_steps:,}"
        has_warmup = self.num_warmup_steps and self.first_schedule_step + self.num_warmup_steps > self.first_step
        warmup = f", the first {self.num_warmup_steps:,} of them warmup" if has_warmup else ""
        return {
            "parameters": f"{num_parameters:,}",
            "rows": f"{self.num_rows:,} of {self.max_length} tokens",
            "global batch": f"{self.global_batch_rows:,} rows = {self.batch_tokens:,} tokens{replicas}",
            "steps": f"{steps}{warmup}",
            "epochs": f"{self.num_epochs:.2f}",
            "tokens": f"{self.num_tokens:,}",
            **self._describe_intervals(num_eval_rows),
            "memory": f"{state_gib:.2f} GiB per device for weights and optimizer, plus activations",
        }

    def _describe_intervals(self, num_eval_rows: int) -> dict[str, str]:

        def every(num_steps: int) -> str:
            if num_steps >= self.num_phase_steps:
                return "at the end"
            return f"every {num_steps:,} steps" if num_steps > 1 else "every step"

        by_the_clock = f", and every {self.save_minutes:g} minutes" if self.save_minutes else ""
        save = f"{every(self.save_steps)}{by_the_clock}"
        if not num_eval_rows:
            return {"save": save}
        share = f"{every(self.eval_steps)}, about {self.evaluation_share(num_eval_rows):.0%} of the time"
        if self.eval_steps == self.save_steps and not by_the_clock:
            return {"evaluate and save": share}
        return {"evaluate": share, "save": save}


def num_in_checkpoint(num_parameters: int, num_with_one_moment: int) -> int:
    """Count weights and the optimizer's moments: two moments per weight, or one for `num_with_one_moment` weights."""
    return 3 * num_parameters - num_with_one_moment


@dataclass(frozen=True)
class PhaseToPlan:
    """Everything needed to compute a phase's `Plan`.

    Attributes:
        optimization: settings of batch, length and optimizer.
        run: settings of the run.
        num_rows: rows of the training data.
        max_length: tokens per row, at most.
        continues_rows: the phase continues to read the shards of the previous phase.
        has_separate_schedule: see `PhaseSettings`.
        name: name of the phase, for error messages.
        mean_length: see `Plan`.
        fills_passes: the last batch of each pass over the rows is filled with rows of padding, which count as rows.
        num_eval_rows: rows of the validation data.
    """

    optimization: OptimizationConfig
    run: RunConfig
    num_rows: int
    max_length: int
    continues_rows: bool = False
    has_separate_schedule: bool = False
    name: str = ""
    mean_length: float | None = None
    fills_passes: bool = False
    num_eval_rows: int = 0


@functools.cache
def make_plans(phases: tuple[PhaseToPlan, ...], num_replicas: int) -> tuple[Plan, ...]:
    """Plan the phases of a run on `num_replicas` replicas.

    Raises:
        InputError: batch, warmup, decay or `--profile` does not fit.
    """
    batches = []
    num_steps = []
    for phase in phases:
        with naming_phase(phase.name):
            num_micro_batches, batch_rows = _batch(phase, num_replicas)
        num_rows = -(-phase.num_rows // batch_rows) * batch_rows if phase.fills_passes else phase.num_rows
        optimization = phase.optimization
        num_steps.append(optimization.max_steps or max(1, optimization.num_epochs * num_rows // batch_rows))
        batches.append((num_micro_batches, batch_rows, num_rows))
    run = phases[0].run
    if run.profiled_steps and run.profiled_steps[1] > sum(num_steps):
        raise InputError(f"--profile must end within the run's {sum(num_steps)} steps; received {run.profile}.")
    plans: list[Plan] = []
    for index, (phase, (num_micro_batches, batch_rows, num_rows)) in enumerate(zip(phases, batches, strict=True)):
        first_step, last_step = sum(num_steps[:index]), sum(num_steps[: index + 1])
        schedule = (first_step, last_step) if phase.has_separate_schedule else (0, sum(num_steps))
        with naming_phase(phase.name):
            num_warmup_steps, num_decay_steps = _warmup_and_decay(phase.optimization, schedule[1] - schedule[0])
        eval_steps, save_steps = _intervals(num_steps[index], EVALUATION_COST * phase.num_eval_rows / batch_rows)
        settings = {"eval": phase.run.eval_steps, "save": phase.run.save_steps}
        given_steps = {name: _steps(setting, num_rows, batch_rows) for name, setting in settings.items()}
        continues_rows = phase.continues_rows and plans
        plans.append(
            Plan(
                num_replicas=num_replicas,
                global_batch_rows=batch_rows,
                num_rows=num_rows,
                max_length=phase.max_length,
                num_steps=last_step,
                num_warmup_steps=num_warmup_steps,
                num_decay_steps=num_decay_steps,
                eval_steps=given_steps["eval"] or eval_steps,
                save_steps=given_steps["save"] or given_steps["eval"] or save_steps,
                save_minutes=phase.run.save_minutes or None,
                num_micro_batches=num_micro_batches,
                first_schedule_step=schedule[0],
                last_schedule_step=schedule[1],
                before=tuple(PastPhase(plan.num_steps, plan.global_batch_rows, plan.max_length) for plan in plans),
                num_phases=len(phases),
                first_row=plans[-1].row_after(first_step) if continues_rows else 0,
                first_step_of_rows=plans[-1].first_step_of_rows if continues_rows else first_step,
                mean_length=phase.mean_length,
            )
        )
    return tuple(plans)


def _steps(setting: str | int | None, num_rows: int, batch_rows: int) -> int | None:
    """Return a number of steps for a setting that may be `epoch`, one pass over the rows, rounded up; None if unset."""
    return -(-num_rows // batch_rows) if setting == EPOCH else int(setting) if setting else None


def _intervals(num_steps: int, evaluation_cost: float) -> tuple[int, int]:
    """Return the default numbers of steps between evaluations and between checkpoints.

    There are ten of each, but only so many evaluations that they take at most a tenth of the time (at least one). A
    checkpoint is saved at each evaluation.

    Args:
        num_steps: number of steps of the phase.
        evaluation_cost: duration of an evaluation, in training steps.
    """
    save_steps = -(-num_steps // MAX_EVALUATIONS)
    num_affordable = MAX_EVALUATIONS
    if evaluation_cost > 0:
        affordable = MAX_EVALUATION_SHARE / (1 - MAX_EVALUATION_SHARE) * num_steps / evaluation_cost
        num_affordable = max(1, int(min(MAX_EVALUATIONS, affordable)))
    return save_steps * -(-MAX_EVALUATIONS // num_affordable), save_steps


def phase_index(plan: Mapping[str, Any]) -> int:
    """Return the index of the phase of a recorded plan."""
    return len(plan.get("before", ()))


def schedule_steps(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the arguments of `train.step.schedule.build_schedule` for a recorded plan."""
    return {
        "first_step": plan.get("first_schedule_step", 0),
        "num_steps": plan.get("last_schedule_step", plan["num_steps"]),
        "num_warmup_steps": plan["num_warmup_steps"],
        "num_decay_steps": plan["num_decay_steps"],
    }


def batch_tokens(plan: Mapping[str, Any]) -> int:
    """Return the number of tokens per step of a recorded plan, including padding."""
    return round(plan["global_batch_rows"] * (plan.get("mean_length") or plan["max_length"]))


def tokens_after(plan: Mapping[str, Any], step: int) -> int:
    """Return the number of tokens of all steps up to `step` of a recorded plan, including padding."""
    num_tokens = num_counted = 0
    for phase in plan.get("before", ()):
        num_steps = min(step, phase["num_steps"]) - num_counted
        num_tokens += num_steps * phase["global_batch_rows"] * phase["max_length"]
        num_counted += num_steps
    return num_tokens + (step - num_counted) * batch_tokens(plan)


def longest_row(plan: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens per row, over all phases up to that of a recorded plan."""
    lengths: list[int] = [phase["max_length"] for phase in (*plan.get("before", ()), plan)]
    return max(lengths)


def _batch(phase: PhaseToPlan, num_replicas: int) -> tuple[int, int]:
    optimization = phase.optimization
    micro_batch_rows = optimization.per_replica_batch_size * num_replicas
    num_micro_batches = optimization.gradient_accumulation_steps
    if optimization.global_batch_size is not None:
        num_micro_batches, remainder = divmod(optimization.global_batch_size, micro_batch_rows)
        if remainder or not num_micro_batches:
            raise InputError(
                f"--global-batch-size must be a multiple of the {micro_batch_rows} rows that {num_replicas} replicas "
                f"take at once (--per-replica-batch-size {optimization.per_replica_batch_size} x {num_replicas}); "
                f"received {optimization.global_batch_size}."
            )
    batch_rows = micro_batch_rows * num_micro_batches
    if batch_rows > phase.num_rows and not phase.fills_passes:
        raise InputError(
            f"The global batch of {batch_rows:,} rows (--per-replica-batch-size {optimization.per_replica_batch_size} "
            f"x --gradient-accumulation-steps {num_micro_batches} x {num_replicas} "
            f"replica{'s' * (num_replicas > 1)}) must not exceed the data set's {phase.num_rows:,} rows; lower one of "
            "the flags, or prepare more rows."
        )
    return num_micro_batches, batch_rows


def _warmup_and_decay(optimization: OptimizationConfig, num_steps: int) -> tuple[int, int]:
    """Return the number of warmup steps, and the number of last steps in which `wsd` decays."""
    flag, num_warmup_steps = "--warmup-steps", optimization.warmup_steps
    if num_warmup_steps is None:
        flag, num_warmup_steps = "--warmup-ratio", _share(num_steps, optimization.warmup_ratio)
    if num_warmup_steps >= num_steps and num_warmup_steps > 0:
        raise InputError(f"{flag} must be below the run's {num_steps} steps; received {num_warmup_steps}.")
    num_decay_steps = _share(num_steps, optimization.decay_ratio) if optimization.schedule == "wsd" else 0
    if num_warmup_steps + num_decay_steps > num_steps:
        raise InputError(
            f"{flag} and --decay-ratio must fit into the run's {num_steps} steps; received {num_warmup_steps} and "
            f"{num_decay_steps} steps."
        )
    return num_warmup_steps, num_decay_steps


def _share(num_steps: int, ratio: float) -> int:
    return int(round(num_steps * ratio, 6))  # 0.29 of 100 is a little less than 29


def warn_of_other_batch(config: RunSettings, plan: Plan) -> None:
    """Warn if the preset's batch flags, unchanged, give another global batch on this number of replicas."""
    preset, optimization = config.model.preset, config.optimization
    preset_replicas = about_preset(preset).replicas if preset else None
    if preset_replicas is None or preset_replicas == plan.num_replicas or optimization.global_batch_size is not None:
        return
    names = ("per_replica_batch_size", "gradient_accumulation_steps")
    preset_values = {name: getattr(OptimizationConfig, name) for name in names} | read_preset(preset)["settings"]
    if any(preset_values[name] != getattr(optimization, name) for name in names):
        return
    preset_rows = plan.global_batch_rows // plan.num_replicas * preset_replicas
    # Advise flags that give the preset's number of rows per step, if there are any.
    num_micro_batches, remainder = divmod(preset_rows, optimization.per_replica_batch_size * plan.num_replicas)
    rows_at_once, remainder_at_once = divmod(preset_rows, plan.num_replicas)
    advice = ""
    if num_micro_batches and not remainder:
        advice = f" Pass --gradient-accumulation-steps {num_micro_batches} to keep it."
    elif rows_at_once and not remainder_at_once:
        advice = f" Pass --per-replica-batch-size {rows_at_once} --gradient-accumulation-steps 1 to keep it."
    logger.warning(
        "%s is tuned for %d replica%s; on %d the global batch is %s rows instead of %s.%s",
        *(preset, preset_replicas, "s" * (preset_replicas > 1), plan.num_replicas),
        *(f"{plan.global_batch_rows:,}", f"{preset_rows:,}", advice),
    )
