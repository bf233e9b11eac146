"""`Plan`: the numbers of a phase of a run, computed before the run starts and stored in its records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.config.settings import EPOCH

# Size of a weight or moment, in memory and in checkpoints.
FLOAT32_BYTES = 4
# Default number of lines of the log, and default maximum number of steps between lines.
NUM_LOG_LINES = 50
MAX_LOG_STEPS = 50
# Cost of evaluating a row, relative to training on it. Evaluation needs no backward pass, which costs twice as much as
# the forward pass.
EVALUATION_COST = 1 / 3


@dataclass(frozen=True)
class PastPhase:
    """An earlier phase, in the plan of a later phase.

    Attributes:
        num_steps: number of steps from the start of the run to the end of the phase.
        global_batch_rows: rows per step.
        max_length: tokens per row.
    """

    num_steps: int
    global_batch_rows: int
    max_length: int


@dataclass(frozen=True)
class Plan:
    """The numbers of a run or of one of its phases, stored as JSON in records. A step is one update of the weights.

    Attributes:
        num_replicas: number of replicas.
        global_batch_rows: rows per step, over all replicas.
        num_rows: rows of the training data.
        max_length: maximum number of tokens per row.
        num_steps: number of steps from the start of the run to the end of the phase.
        num_warmup_steps: length of the learning rate's warmup, in steps.
        num_decay_steps: number of steps at the end of the schedule over which `wsd` decays.
        eval_steps: steps between evaluations.
        save_steps: steps between checkpoints.
        save_minutes: minutes between additional checkpoints; None for no additional checkpoints.
        num_micro_batches: number of micro-batches that each replica processes per step.
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

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Plan":
        """Return the plan that a record contains as JSON.

        Raises:
            KeyError, TypeError: the record is damaged, or another version of this project wrote it.
        """
        return cls(**{**record, "before": tuple(PastPhase(**phase) for phase in record["before"])})

    @property
    def phase_index(self) -> int:
        """Index of the phase in its run, counted from 0."""
        return len(self.before)

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
        return round(self.global_batch_rows * (self.mean_length or self.max_length))

    @property
    def longest_row(self) -> int:
        """Maximum number of tokens per row, over all phases up to this one."""
        return max([self.max_length, *(phase.max_length for phase in self.before)])

    @property
    def num_epochs(self) -> float:
        return self.num_phase_steps * self.global_batch_rows / self.num_rows

    @property
    def schedule_steps(self) -> dict[str, int]:
        """The arguments of `train.step.schedule.build_schedule` that are numbers of steps."""
        return {
            "first_step": self.first_schedule_step,
            "num_steps": self.last_schedule_step,
            "num_warmup_steps": self.num_warmup_steps,
            "num_decay_steps": self.num_decay_steps,
        }

    def tokens_after(self, step: int) -> int:
        """Return the number of tokens of all steps of the run up to `step`, including padding."""
        num_tokens = num_counted = 0
        for phase in self.before:
            num_steps = min(step, phase.num_steps) - num_counted
            num_tokens += num_steps * phase.global_batch_rows * phase.max_length
            num_counted += num_steps
        return num_tokens + (step - num_counted) * self.batch_tokens

    def log_steps(self, setting: str | int | None = None) -> int:
        """Return the number of steps between log lines.

        This is `--log-steps`, or by default a fiftieth of the phase, but at most 50 steps.
        """
        by_default = max(1, min(MAX_LOG_STEPS, self.num_phase_steps // NUM_LOG_LINES))
        return steps_of_setting(setting, self.num_rows, self.global_batch_rows) or by_default

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


def num_in_checkpoint(num_parameters: int, num_with_one_moment: int) -> int:
    """Count weights and the optimizer's moments: two moments per weight, or one for `num_with_one_moment` weights."""
    return 3 * num_parameters - num_with_one_moment


def steps_of_setting(setting: str | int | None, num_rows: int, batch_rows: int) -> int | None:
    """Return a setting's number of steps; `epoch` means one pass over the rows, rounded up. None if it is not set."""
    return -(-num_rows // batch_rows) if setting == EPOCH else int(setting) if setting else None
