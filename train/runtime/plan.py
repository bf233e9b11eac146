"""What a run will do, worked out before it starts: batches, steps, tokens, memory."""

import functools
from dataclasses import dataclass
from typing import Any

from mlm_common.errors import InputError
from train.config import OptimizationConfig, RunConfig

# float32 weights, gradients, and the optimizer's two moments.
STATE_BYTES_PER_PARAMETER = 4 * 4
NUM_EVALUATIONS = 10


@dataclass(frozen=True)
class Plan:
    """The numbers of a run; a step is one update of the weights."""

    num_replicas: int
    global_batch_rows: int
    num_rows: int
    max_length: int
    num_steps: int
    num_warmup_steps: int
    num_decay_steps: int
    eval_steps: int
    save_steps: int
    save_minutes: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the run goes through, padding included."""
        return self.num_steps * self.global_batch_rows * self.max_length

    @property
    def num_epochs(self) -> float:
        """Passes over the rows."""
        return self.num_steps * self.global_batch_rows / self.num_rows

    def row_after(self, step: int, num_skipped_rows: int = 0) -> int:
        """Count the rows up to the last one of a step, over all epochs, with those that were left out so far."""
        return step * self.global_batch_rows + num_skipped_rows

    def describe(self, num_parameters: int) -> dict[str, Any]:
        """Describe the plan as {title: text}, for people."""
        by_the_clock = f", and every {self.save_minutes:g} minutes" if self.save_minutes else ""
        state_gib = num_parameters * STATE_BYTES_PER_PARAMETER / 2**30
        return {
            "parameters": f"{num_parameters:,}",
            "rows": f"{self.num_rows:,} of {self.max_length} tokens",
            "global batch": f"{self.global_batch_rows:,} rows = {self.global_batch_rows * self.max_length:,} tokens, "
            f"on {self.num_replicas} replica(s)",
            "steps": f"{self.num_steps:,}, of which warmup {self.num_warmup_steps:,}",
            "epochs": f"{self.num_epochs:.2f}",
            "tokens": f"{self.num_tokens:,}",
            "evaluation, checkpoint": f"every {self.eval_steps:,}, every {self.save_steps:,} steps{by_the_clock}",
            "memory": f"{state_gib:.2f} GiB a replica for weights, gradients and moments; activations come on top",
        }


@functools.cache
def make_plan(
    optimization: OptimizationConfig, run: RunConfig, *, num_rows: int, max_length: int, num_replicas: int
) -> Plan:
    """Plan a run on `num_replicas`.

    Raises:
        InputError: a batch larger than the data set; a warmup, decay or profile longer than the run.
    """
    batch_rows = optimization.per_replica_batch_size * optimization.gradient_accumulation_steps * num_replicas
    if batch_rows > num_rows:
        raise InputError(
            f"The global batch of {batch_rows} rows (--per-replica-batch-size {optimization.per_replica_batch_size} x "
            f"--gradient-accumulation-steps {optimization.gradient_accumulation_steps} x {num_replicas} replicas) must "
            f"not exceed the data set's {num_rows} rows; lower one of the two."
        )
    num_steps = optimization.max_steps or max(1, optimization.num_epochs * num_rows // batch_rows)
    num_warmup_steps, num_decay_steps = _warmup_and_decay(optimization, num_steps)
    if run.profiled_steps and run.profiled_steps[1] > num_steps:
        raise InputError(f"--profile must end within the run's {num_steps} steps; received {run.profile}.")
    eval_steps = run.eval_steps or max(1, num_steps // NUM_EVALUATIONS)
    return Plan(
        num_replicas=num_replicas,
        global_batch_rows=batch_rows,
        num_rows=num_rows,
        max_length=max_length,
        num_steps=num_steps,
        num_warmup_steps=num_warmup_steps,
        num_decay_steps=num_decay_steps,
        eval_steps=eval_steps,
        save_steps=run.save_steps or eval_steps,
        save_minutes=run.save_minutes or None,
    )


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
