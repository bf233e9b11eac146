"""Where training begins or goes on: which step, which row, and whether that is the run it was."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mlm_common.errors import InputError
from train.checkpoints.record import CheckpointRecord, SkippedRows
from train.config import TrainingConfig, current_settings
from train.runtime.plan import Plan

# Settings of what the run computes on and how its batch is cut: the same numbers, up to the order of sums.
ROUNDING_SETTINGS = {
    "optimization": ("per_replica_batch_size", "gradient_accumulation_steps"),
    "hardware": ("jit_compile", "tpu_layers"),
    "model": ("gradient_checkpointing",),
}
# Libraries whose versions decide how numbers are rounded, or which random ones are drawn.
ROUNDING_LIBRARIES = ("tensorflow", "tensorflow-tpu", "tf-keras")


@dataclass(frozen=True)
class Start:
    """Where training begins or goes on.

    Attributes:
        step: updates made.
        logged_step: the last of them with a line of training in the log.
        skipped: rows left out so far.
        checkpoint: record of the checkpoint it goes on from; None where it begins with fresh weights.
    """

    step: int = 0
    logged_step: int = 0
    skipped: tuple[SkippedRows, ...] = ()
    checkpoint: CheckpointRecord | None = None

    @property
    def num_skipped_rows(self) -> int:
        """Rows left out so far."""
        return sum(rows.num_rows for rows in self.skipped)

    def row(self, step: int, global_batch_rows: int) -> int:
        """Return the row after the last one used by update `step`, counted over all epochs."""
        return step * global_batch_rows + self.num_skipped_rows


def start_of(checkpoint: CheckpointRecord | None) -> Start:
    """Return the start that a checkpoint is."""
    if checkpoint is None:
        return Start()
    return Start(checkpoint.step, checkpoint.logged_step, checkpoint.skipped, checkpoint)


def check_checkpoint(checkpoint: CheckpointRecord, plan: Plan) -> None:
    """Check that the run can go on from a checkpoint of its fingerprint.

    Raises:
        InputError: its global batch was another one, or it is past the end of the run.
    """
    there = checkpoint.plan["global_batch_rows"]
    if there != plan.global_batch_rows:
        raise InputError(
            f"A run must go on with its global batch of {there} rows; received {plan.global_batch_rows} "
            f"(--per-replica-batch-size x --gradient-accumulation-steps x {plan.num_replicas} replicas). Change one of "
            "the two."
        )
    if checkpoint.step > plan.num_steps:
        raise InputError(
            f"A run must be longer than the way that is behind it; received {plan.num_steps} steps, and the newest "
            f"checkpoint is that of step {checkpoint.step}. Raise --num-epochs or --max-steps."
        )


def describe_start(
    start: Start, plan: Plan, config: TrainingConfig, versions: dict[str, str], checkpoint_path: str
) -> Iterator[str]:
    """Yield what a person should know of the start, in sentences."""
    checkpoint = start.checkpoint
    row = start.row(start.step, plan.global_batch_rows)
    place = f"row {row:,} (epoch {row / plan.num_rows:.2f})"
    if checkpoint is None:
        yield f"step 0 of {plan.num_steps:,}, with the initial weights, at {place}"
        return
    yield f"after step {start.step:,} of {plan.num_steps:,}, from {checkpoint_path}, at {place}"
    changes = list(_changes(current_settings(checkpoint.settings), config.as_dict()))
    if changes:
        yield f"changed since then: {', '.join(text for _, text in changes)}"
    yield from _changed_length(start.step, checkpoint.plan, plan, config)
    inexact = [text for name, text in changes if name in _rounding_names()]
    if checkpoint.plan["num_replicas"] != plan.num_replicas:
        inexact.append(f"replicas {checkpoint.plan['num_replicas']} -> {plan.num_replicas}")
    for name in ROUNDING_LIBRARIES:
        if checkpoint.versions.get(name) != versions.get(name):
            inexact.append(f"{name} {checkpoint.versions.get(name)} -> {versions.get(name)}")
    if inexact:
        yield (
            f"not bit for bit the run it would have been, because of {', '.join(inexact)}: sums are rounded in "
            "another order. Rows, masks and dropout are the same"
        )


def _changed_length(step: int, before: dict[str, Any], plan: Plan, config: TrainingConfig) -> Iterator[str]:
    from train.optimizer import build_schedule

    names = ("num_steps", "num_warmup_steps", "num_decay_steps")
    old, new = ({name: numbers[name] for name in names} for numbers in (before, asdict(plan)))
    if old == new:
        return
    old_rate, new_rate = (float(build_schedule(config.optimization, **numbers)(step)) for numbers in (old, new))
    yield (
        f"the run's length changed from {old['num_steps']:,} to {new['num_steps']:,} steps: the learning rate goes on "
        f"at {new_rate:.3g}, by the schedule of the new length; by that of the old one, with which the updates so far "
        f"were made, it would at {old_rate:.3g}"
    )


def _changes(before: dict[str, dict[str, Any]], settings: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (subject.name, text) of the settings that differ."""
    now = json.loads(json.dumps(settings))
    for subject, values in now.items():
        for name, value in values.items():
            there = before.get(subject, {}).get(name)
            if there != value:
                yield f"{subject}.{name}", f"--{name.replace('_', '-')} {there} -> {value}"


def _rounding_names() -> set[str]:
    return {f"{subject}.{name}" for subject, names in ROUNDING_SETTINGS.items() for name in names}
