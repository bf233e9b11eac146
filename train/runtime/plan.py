"""The phases of a run, read from `--phases`, and what each will do, worked out before it starts."""

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

# Of weights and moments in memory, and in checkpoints.
FLOAT32_BYTES = 4
# Where the intervals are left open: evaluations in a run and what fraction of its time they may take, lines of the log.
MAX_EVALUATIONS = 10
MAX_EVALUATION_SHARE = 0.1
NUM_LOG_LINES = 50
MAX_LOG_STEPS = 50
# What evaluating a row costs of training on it: the pass forward, without the one backward, which costs twice as much.
EVALUATION_COST = 1 / 3
# Settings in which phases may differ.
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
# Of a model's configuration: what it has no weights for.
OVERRIDES_PER_PHASE = frozenset({"rope_theta", "global_rope_theta", "local_rope_theta", "local_attention"})


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of a part of a run.

    name: human-readable; empty in a run without `--phases`, which is one phase.
    has_separate_schedule: its learning rate begins and ends with it; else it is that of a schedule over the whole run.
    """

    name: str
    config: TrainingConfig
    has_separate_schedule: bool = False


def phases_of(config: TrainingConfig) -> tuple[PhaseSettings, ...]:
    """Read the phases of a run, in their order; one without `--phases`."""
    if config.run.phases is None:
        return (PhaseSettings("", config),)
    max_steps, num_epochs = config.optimization.max_steps, config.optimization.num_epochs
    rule = "must be left out with --phases, of which each has its own"
    require(max_steps is None, rule, "--max-steps", max_steps)
    require(num_epochs == 1, rule, "--num-epochs", num_epochs)
    _, listed = read_phases_file(config.run.phases)
    phases = []
    for index, settings in enumerate(listed):
        name = settings.pop("name", f"phase {index + 1}")
        is_text = isinstance(name, str | int | float) and not isinstance(name, bool) and str(name).strip()
        require(bool(is_text), "must have text for the `name` of a phase", f"--phases {config.run.phases}", repr(name))
        with naming_phase(str(name)):
            phases.append(_phase(config, str(name), index, settings, config.run.phases))
    return tuple(phases)


@contextmanager
def naming_phase(name: str) -> Iterator[None]:
    """Name the phase in the errors within it; an empty name stays unsaid."""
    try:
        yield
    except InputError as error:
        if not name:
            raise
        raise type(error)(f"Phase `{name}`: {error}") from error


def _phase(config: TrainingConfig, name: str, index: int, settings: dict[str, Any], path: str) -> PhaseSettings:
    settings = typed_settings(SUBJECTS, settings, path)
    for one in settings:
        rule = f"must be the same in all phases; of these a phase may have its own: {', '.join(sorted(PER_PHASE))}"
        require(one in PER_PHASE, rule, flag_of(one), settings[one])
    has_length = ("max_steps" in settings) != ("num_epochs" in settings)
    require(has_length, "or --num-epochs, one of them, is required in each phase", "--max-steps", sorted(settings))
    has_separate_schedule = not SCHEDULE.isdisjoint(settings)
    if index and has_separate_schedule and "warmup_ratio" not in settings:
        settings.setdefault("warmup_steps", 0)
    if "warmup_ratio" in settings:
        settings.setdefault("warmup_steps", None)
    if "global_batch_size" in settings:  # from which it follows, in place of that of the run
        settings.setdefault("gradient_accumulation_steps", 1)
    if overrides := settings.get("config_overrides"):
        names = {pair.partition("=")[0].strip() for pair in overrides.split(",")}
        rule = f"of a phase may hold what needs no other weights: {', '.join(sorted(OVERRIDES_PER_PHASE))}"
        require(names <= OVERRIDES_PER_PHASE, rule, "--config-overrides", overrides)
        settings["config_overrides"] = ",".join(filter(None, (config.model.config_overrides, overrides)))
    if not settings.keys().isdisjoint(SOURCE_SETTINGS):  # in place of those of the run
        settings = {"source_weights": [], "sampling_alpha": None, "source_passes": []} | settings
    subjects = {}
    for subject in fields(config):
        values = getattr(config, subject.name)
        given = {one.name: settings[one.name] for one in fields(values) if one.name in settings}
        subjects[subject.name] = replace(values, **given)
    changed = replace(config, **subjects)
    require(bool(changed.data.train_dataset), "is required: a folder of shards", "--train-dataset", "nothing")
    return PhaseSettings(name, changed, has_separate_schedule)


@dataclass(frozen=True)
class PastPhase:
    """A phase before another.

    num_steps: steps of the run up to its end.
    """

    num_steps: int
    global_batch_rows: int
    max_length: int


@dataclass(frozen=True)
class Plan:
    """The numbers of a run, or of one of its phases; a step is one update of the weights.

    num_steps: steps of the run up to the end of the phase.
    num_warmup_steps, num_decay_steps: the first and the last steps of the learning rate's schedule.
    num_micro_batches: into which a replica's share of a step is cut.
    before: the phases before this one.
    num_phases: of the run.
    first_row: the row of the phase's shards that it begins with; others before it were used by the phases before.
    first_step_of_rows: the step after which the first of these rows was used.
    mean_length: tokens of a row on average, padding included, where rows differ in length.
    first_schedule_step, last_schedule_step: steps between which the learning rate's schedule runs.
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
        """Steps of the run before the phase."""
        return self.before[-1].num_steps if self.before else 0

    @property
    def num_phase_steps(self) -> int:
        return self.num_steps - self.first_step

    @property
    def num_tokens(self) -> int:
        return self.num_phase_steps * self.batch_tokens

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step, padding included; on average where rows differ in length."""
        return batch_tokens(vars(self))

    @property
    def num_epochs(self) -> float:
        return self.num_phase_steps * self.global_batch_rows / self.num_rows

    @property
    def schedule_steps(self) -> dict[str, int]:
        return schedule_steps(vars(self))

    def log_steps(self, setting: str | int | None = None) -> int:
        """Steps between two lines of the log, by `--log-steps`; a fiftieth of the phase where that is left open."""
        by_default = max(1, min(MAX_LOG_STEPS, self.num_phase_steps // NUM_LOG_LINES))
        return _steps(setting, self.num_rows, self.global_batch_rows) or by_default

    def evaluation_cost(self, num_eval_rows: int) -> float:
        return EVALUATION_COST * num_eval_rows / self.global_batch_rows

    def num_evaluations_after(self, step: int) -> int:
        """Count the evaluations after a step of the phase: those of `eval_steps`, and that of the last step."""
        return -(-self.num_steps // self.eval_steps) - step // self.eval_steps if step < self.num_steps else 0

    def evaluation_share(self, num_eval_rows: int) -> float:
        num_steps = self.num_evaluations_after(self.first_step) * self.evaluation_cost(num_eval_rows)
        return num_steps / (num_steps + self.num_phase_steps)

    def row_after(self, step: int, num_skipped_rows: int = 0) -> int:
        """Count the rows up to the last one of a step, over all epochs, with those that were left out so far."""
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
    """Count the weights and the optimizer's moments: two of each weight, but for those with one moment."""
    return 3 * num_parameters - num_with_one_moment


@dataclass(frozen=True)
class PhaseToPlan:
    """What a phase's plan follows from.

    continues_rows: it has the shards of the phase before.
    has_separate_schedule: see `PhaseSettings`.
    name: for errors.
    mean_length: as of a plan.
    fills_passes: the last batch of each pass over the rows is filled up with rows of padding, which count as rows.
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
    """Plan the phases of a run on `num_replicas`, checking batch, warmup, decay and profile."""
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
        asked = {name: _steps(setting, num_rows, batch_rows) for name, setting in settings.items()}
        goes_on = phase.continues_rows and plans
        plans.append(
            Plan(
                num_replicas=num_replicas,
                global_batch_rows=batch_rows,
                num_rows=num_rows,
                max_length=phase.max_length,
                num_steps=last_step,
                num_warmup_steps=num_warmup_steps,
                num_decay_steps=num_decay_steps,
                eval_steps=asked["eval"] or eval_steps,
                save_steps=asked["save"] or asked["eval"] or save_steps,
                save_minutes=phase.run.save_minutes or None,
                num_micro_batches=num_micro_batches,
                first_schedule_step=schedule[0],
                last_schedule_step=schedule[1],
                before=tuple(PastPhase(one.num_steps, one.global_batch_rows, one.max_length) for one in plans),
                num_phases=len(phases),
                first_row=plans[-1].row_after(first_step) if goes_on else 0,
                first_step_of_rows=plans[-1].first_step_of_rows if goes_on else first_step,
                mean_length=phase.mean_length,
            )
        )
    return tuple(plans)


def _steps(setting: str | int | None, num_rows: int, batch_rows: int) -> int | None:
    """Resolve a setting that is a number of steps or `epoch`: the steps of one pass over the rows, rounded up."""
    return -(-num_rows // batch_rows) if setting == EPOCH else int(setting) if setting else None


def _intervals(num_steps: int, evaluation_cost: float) -> tuple[int, int]:
    """Choose how many steps lie between two evaluations, and between two checkpoints, where the flags leave it open.

    Ten of each, but only as many evaluations, each of `evaluation_cost` steps, as fit into a tenth of the time, and one
    at least. Each is also saved.
    """
    save_steps = -(-num_steps // MAX_EVALUATIONS)
    num_affordable = MAX_EVALUATIONS
    if evaluation_cost > 0:
        affordable = MAX_EVALUATION_SHARE / (1 - MAX_EVALUATION_SHARE) * num_steps / evaluation_cost
        num_affordable = max(1, int(min(MAX_EVALUATIONS, affordable)))
    return save_steps * -(-MAX_EVALUATIONS // num_affordable), save_steps


def phase_index(plan: Mapping[str, Any]) -> int:
    """Count the phases before that of a recorded plan."""
    return len(plan.get("before", ()))


def schedule_steps(plan: Mapping[str, Any]) -> dict[str, int]:
    """Collect, from a plan as it is recorded, the numbers of steps that `train.step.schedule.build_schedule` takes."""
    return {
        "first_step": plan.get("first_schedule_step", 0),
        "num_steps": plan.get("last_schedule_step", plan["num_steps"]),
        "num_warmup_steps": plan["num_warmup_steps"],
        "num_decay_steps": plan["num_decay_steps"],
    }


def batch_tokens(plan: Mapping[str, Any]) -> int:
    """Count the tokens of a step, padding included; by a plan as it is recorded."""
    return round(plan["global_batch_rows"] * (plan.get("mean_length") or plan["max_length"]))


def tokens_after(plan: Mapping[str, Any], step: int) -> int:
    """Count the tokens, padding included, that the steps up to `step` took; by a plan as it is recorded."""
    num_tokens = num_counted = 0
    for phase in plan.get("before", ()):
        num_steps = min(step, phase["num_steps"]) - num_counted
        num_tokens += num_steps * phase["global_batch_rows"] * phase["max_length"]
        num_counted += num_steps
    return num_tokens + (step - num_counted) * batch_tokens(plan)


def longest_row(plan: Mapping[str, Any]) -> int:
    """Find the most tokens of a row up to the phase of a plan as it is recorded."""
    lengths: list[int] = [phase["max_length"] for phase in (*plan.get("before", ()), plan)]
    return max(lengths)


def _batch(phase: PhaseToPlan, num_replicas: int) -> tuple[int, int]:
    optimization = phase.optimization
    micro_batch_rows = optimization.per_replica_batch_size * num_replicas
    num_micro_batches = optimization.gradient_accumulation_steps
    if optimization.global_batch_size is not None:
        num_micro_batches, rest = divmod(optimization.global_batch_size, micro_batch_rows)
        if rest or not num_micro_batches:
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
    """Count the first steps, over which the rate rises, and the last ones, over which `wsd` falls."""
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
    """Warn if a preset's batch flags, left as they are, give another global batch on this number of replicas."""
    preset, optimization = config.model.preset, config.optimization
    num_meant = about_preset(preset).replicas if preset else None
    if num_meant is None or num_meant == plan.num_replicas or optimization.global_batch_size is not None:
        return
    names = ("per_replica_batch_size", "gradient_accumulation_steps")
    of_preset = {name: getattr(OptimizationConfig, name) for name in names} | read_preset(preset)["settings"]
    if any(of_preset[name] != getattr(optimization, name) for name in names):
        return
    meant_rows = plan.global_batch_rows // plan.num_replicas * num_meant
    # The flags that give as many rows per step; nothing where none do.
    num_micro_batches, rest = divmod(meant_rows, optimization.per_replica_batch_size * plan.num_replicas)
    rows_at_once, rest_at_once = divmod(meant_rows, plan.num_replicas)
    advice = ""
    if num_micro_batches and not rest:
        advice = f" Pass --gradient-accumulation-steps {num_micro_batches} to keep it."
    elif rows_at_once and not rest_at_once:
        advice = f" Pass --per-replica-batch-size {rows_at_once} --gradient-accumulation-steps 1 to keep it."
    logger.warning(
        "%s is tuned for %d replica%s; on %d the global batch is %s rows instead of %s.%s",
        *(preset, num_meant, "s" * (num_meant > 1), plan.num_replicas),
        *(f"{plan.global_batch_rows:,}", f"{meant_rows:,}", advice),
    )
