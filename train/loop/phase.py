"""`Phase`: a part of a run with its own settings, inputs and task; `make_plans` plans the phases of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from mlm_common.errors import InputError
from train.config.learning import OptimizationConfig, words_of
from train.config.phases import naming_phase
from train.config.settings import RunSettings, TrainingConfig
from train.data.inputs import Inputs
from train.data.shards import TrainingInputs
from train.runtime.plan import EVALUATION_COST, PastPhase, Plan, steps_of_setting
from train.tasks.task import Task

if TYPE_CHECKING:
    from train.scoring.sample import Sample

# --save-at-words may exceed the number of words of a run by this factor.
WORDS_TOLERANCE = 1.02
# Limits for the default evaluation interval: number of evaluations per phase, and the fraction of its time that they
# take.
MAX_EVALUATIONS = 10
MAX_EVALUATION_SHARE = 0.1


@dataclass(frozen=True)
class Phase:
    """A part of a run with its own settings, inputs and task. Without `--phases` a run is a single unnamed phase.

    Attributes:
        config: the settings of the run, as they apply in this phase.
        has_separate_schedule: the learning rate schedule starts and ends with this phase. Otherwise one schedule spans
            all phases.
        index: counted from 0.
        sample: text that the model scores at each evaluation; None if the flags ask for no scores.
    """

    config: RunSettings
    inputs: Inputs
    task: Task
    model_config: PretrainedConfig
    name: str = ""
    has_separate_schedule: bool = False
    index: int = 0
    sample: "Sample | None" = None

    def num_predictions(self, plan: Plan) -> int:
        return self.task.num_predictions(self.config.optimization.per_replica_batch_size * plan.max_length)

    def steps_at_words(self, plan: Plan) -> dict[int, str]:
        """Return the steps that reach the numbers of words of `--save-at-words`, as {step: number as given}.

        Every row is assumed to contain the average number of words per row, since rows are shuffled.

        Raises:
            InputError: the run has fewer words, several phases, or shards whose manifest has no `num_words`.
        """
        wanted = self.config.data.save_at_words if isinstance(self.config, TrainingConfig) else []
        if not wanted:
            return {}
        if not self.inputs.num_words or plan.num_phases > 1:
            raise InputError(
                "--save-at-words needs a run of one phase and one --train-dataset, with num_words in its manifest. "
                "If older shards lack it, prepare them again."
            )
        words_per_step = self.inputs.num_words * plan.global_batch_rows / plan.num_rows
        num_words = plan.num_steps * words_per_step
        steps = {}
        for text in wanted:
            # BabyLM's corpus of "10 million words" has about 1% fewer words.
            if words_of(text) > num_words * WORDS_TOLERANCE:
                raise InputError(
                    f"--save-at-words must be at most the {num_words:,.0f} words of the run; received {text}."
                )
            steps[min(max(1, round(words_of(text) / words_per_step)), plan.num_steps)] = text
        return steps


def read_sample(config: RunSettings, inputs: Inputs) -> "Sample | None":
    """Draw the text to score at each evaluation; None if the flags ask for no scores.

    Raises:
        InputError: the file of `--score-pairs` is invalid.
    """
    if not isinstance(config, TrainingConfig) or not config.data.is_scored:
        return None
    from train.scoring.pairs import read_pairs  # only needed if the flags ask for scores
    from train.scoring.sample import draw_sample

    assert isinstance(inputs, TrainingInputs)
    data = config.data
    pairs = read_pairs([data.score_pairs], "--score-pairs") if data.score_pairs else []
    return draw_sample(pairs, data.score_words, inputs.eval_shards, inputs.tokenizer, inputs.max_length)


def make_plans(phases: Sequence[Phase], num_replicas: int) -> tuple[Plan, ...]:
    """Plan the phases of a run on `num_replicas` replicas.

    Raises:
        InputError: batch, warmup, decay or `--profile` does not fit the run.
    """
    batches = []
    num_steps = []
    for phase in phases:
        with naming_phase(phase.name):
            num_micro_batches, batch_rows = _batch(phase, num_replicas)
        num_rows = phase.inputs.num_rows
        if phase.inputs.fills_passes:
            num_rows = -(-num_rows // batch_rows) * batch_rows
        optimization = phase.config.optimization
        num_steps.append(optimization.max_steps or max(1, optimization.num_epochs * num_rows // batch_rows))
        batches.append((num_micro_batches, batch_rows, num_rows))
    run = phases[0].config.run
    if run.profiled_steps and run.profiled_steps[1] > sum(num_steps):
        raise InputError(f"--profile must end within the run's {sum(num_steps)} steps; received {run.profile}.")
    plans: list[Plan] = []
    for index, (phase, (num_micro_batches, batch_rows, num_rows)) in enumerate(zip(phases, batches, strict=True)):
        first_step, last_step = sum(num_steps[:index]), sum(num_steps[: index + 1])
        schedule = (first_step, last_step) if phase.has_separate_schedule else (0, sum(num_steps))
        with naming_phase(phase.name):
            num_warmup_steps, num_decay_steps = _warmup_and_decay(phase.config.optimization, schedule[1] - schedule[0])
        eval_steps, save_steps = _intervals(num_steps[index], EVALUATION_COST * phase.inputs.num_eval_rows / batch_rows)
        settings = {"eval": phase.config.run.eval_steps, "save": phase.config.run.save_steps}
        given_steps = {name: steps_of_setting(setting, num_rows, batch_rows) for name, setting in settings.items()}
        continues_rows = index > 0 and phase.inputs.has_rows_of(phases[index - 1].inputs)
        plans.append(
            Plan(
                num_replicas=num_replicas,
                global_batch_rows=batch_rows,
                num_rows=num_rows,
                max_length=phase.inputs.max_length,
                num_steps=last_step,
                num_warmup_steps=num_warmup_steps,
                num_decay_steps=num_decay_steps,
                eval_steps=given_steps["eval"] or eval_steps,
                save_steps=given_steps["save"] or given_steps["eval"] or save_steps,
                save_minutes=phase.config.run.save_minutes or None,
                num_micro_batches=num_micro_batches,
                first_schedule_step=schedule[0],
                last_schedule_step=schedule[1],
                before=tuple(PastPhase(plan.num_steps, plan.global_batch_rows, plan.max_length) for plan in plans),
                num_phases=len(phases),
                first_row=plans[-1].row_after(first_step) if continues_rows else 0,
                first_step_of_rows=plans[-1].first_step_of_rows if continues_rows else first_step,
                mean_length=phase.inputs.mean_length,
            )
        )
    return tuple(plans)


def _intervals(num_steps: int, evaluation_cost: float) -> tuple[int, int]:
    """Return the default numbers of steps between evaluations and between checkpoints.

    A phase has ten evaluations and ten checkpoints, but fewer evaluations (at least one) if ten would take more than a
    tenth of the time. A checkpoint is saved at each evaluation.

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


def _batch(phase: Phase, num_replicas: int) -> tuple[int, int]:
    optimization = phase.config.optimization
    micro_batch_rows = optimization.per_replica_batch_size * num_replicas
    num_micro_batches = optimization.gradient_accumulation_steps
    if optimization.global_batch_size is not None:
        num_micro_batches, remainder = divmod(optimization.global_batch_size, micro_batch_rows)
        if remainder or not num_micro_batches:
            raise InputError(
                f"--global-batch-size must be a multiple of the {micro_batch_rows} rows that {num_replicas} replicas "
                f"process at once (--per-replica-batch-size {optimization.per_replica_batch_size} x {num_replicas}); "
                f"received {optimization.global_batch_size}."
            )
    batch_rows = micro_batch_rows * num_micro_batches
    if batch_rows > phase.inputs.num_rows and not phase.inputs.fills_passes:
        raise InputError(
            f"The global batch of {batch_rows:,} rows (--per-replica-batch-size {optimization.per_replica_batch_size} "
            f"x --gradient-accumulation-steps {num_micro_batches} x {num_replicas} "
            f"replica{'s' * (num_replicas > 1)}) must not exceed the data set's {phase.inputs.num_rows:,} rows; "
            "lower one of the flags, or prepare more rows."
        )
    return num_micro_batches, batch_rows


def _warmup_and_decay(optimization: OptimizationConfig, num_steps: int) -> tuple[int, int]:
    """Return the number of warmup steps and the number of final steps over which `wsd` decays."""
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
