"""Where training starts or resumes: the run's fingerprint, the step and the row, and changes since the last start."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED
from train.checkpoints.store import CheckpointRecord, SkippedRows
from train.config import ROUNDING
from train.config.settings import RunSettings, settings_marked
from train.data.inputs import Inputs
from train.runtime.plan import Plan
from train.runtime.run_folder import phase_prefix

LIBRARIES = ("tensorflow", "tensorflow-tpu", "jaxlib", "libtpu", "tf-keras", "transformers", "tokenizers", "numpy")
# The versions of these libraries affect how results are rounded, or which random numbers are drawn.
ROUNDING_LIBRARIES = ("tensorflow", "tensorflow-tpu", "jaxlib", "libtpu", "tf-keras")


@dataclass(frozen=True)
class ResumePoint:
    """Where training starts or resumes.

    Attributes:
        step: number of steps taken so far.
        logged_step: the last step up to `step` that has a training line in the log.
        skipped: the rows skipped so far.
        checkpoint: record of the checkpoint to resume from; None if training starts with new weights.
        first_step_of_rows: see `Plan.first_step_of_rows`.
    """

    step: int = 0
    logged_step: int = 0
    skipped: tuple[SkippedRows, ...] = ()
    checkpoint: CheckpointRecord | None = None
    first_step_of_rows: int = 0

    @property
    def num_skipped_rows(self) -> int:
        """Number of rows skipped so far in the current shards."""
        return sum(rows.num_rows for rows in self.skipped if rows.after_step >= self.first_step_of_rows)


def resume_point(checkpoint: CheckpointRecord | None, plan: Plan) -> ResumePoint:
    """Return where a checkpoint resumes in the phase of `plan`; without a checkpoint, return the start of the run."""
    if checkpoint is None:
        return ResumePoint()
    point = (checkpoint.step, checkpoint.logged_step, checkpoint.skipped, checkpoint)
    return ResumePoint(*point, plan.first_step_of_rows)


def check_checkpoint(checkpoint: CheckpointRecord, plan: Plan) -> None:
    """Check that the run, with the plan of the checkpoint's phase, can resume from the checkpoint.

    Raises:
        InputError: the global batch or an earlier phase differs, or the checkpoint is past the end of the run or phase.
    """
    for index, (saved, planned) in enumerate(zip(checkpoint.plan.before, plan.before, strict=True)):
        if saved != planned:
            raise InputError(
                f"--phases must not change completed phases; phase {index + 1} ended after step {saved.num_steps} with "
                f"steps of {saved.global_batch_rows} rows of {saved.max_length} tokens, and now would end after step "
                f"{planned.num_steps} with steps of {planned.global_batch_rows} rows of {planned.max_length}. Change "
                "only later phases, or use another --output-dir."
            )
    saved_rows = checkpoint.plan.global_batch_rows
    if saved_rows != plan.global_batch_rows:
        raise InputError(
            f"A run must resume with its global batch of {saved_rows} rows; received {plan.global_batch_rows} "
            f"(--per-replica-batch-size x --gradient-accumulation-steps x {plan.num_replicas} replicas). Change one of "
            "the two flags."
        )
    if checkpoint.step > plan.num_steps:
        raise InputError(
            f"The run would end after step {plan.num_steps}, but its newest checkpoint is from step "
            f"{checkpoint.step}. Raise --num-epochs or --max-steps"
            f"{f' of phase {len(plan.before) + 1}' if plan.num_phases > 1 else ''}."
        )


def describe_resume_point(
    point: ResumePoint,
    plan: Plan,
    config: RunSettings,
    versions: dict[str, str],
    computation: dict[str, Any],
    made_by: dict[str, str],
) -> Iterator[str]:
    """Yield human-readable lines about the start or resume point, and about changes since the checkpoint.

    Args:
        point: where training starts or resumes.
        plan: the current plan.
        config: the current settings.
        versions: the installed versions. Like `computation` and `made_by`, they have the form of a checkpoint's record.
        computation: how steps are computed now.
        made_by: the current device and commit.
    """
    checkpoint = point.checkpoint
    if checkpoint is None:
        init_from = config.model.init_from
        yield f"from the weights of {init_from}" if init_from else "from scratch"
        return
    epoch = plan.row_after(point.step, point.num_skipped_rows) / plan.num_rows
    yield f"resuming at step {point.step:,} of {plan.num_steps:,} (epoch {epoch:.2f})"
    if checkpoint.plan.phase_index < plan.phase_index:
        return  # the settings of a new phase are meant to differ
    changes = dict(_changes(checkpoint.settings, config))
    if changes:
        yield f"changed since then: {', '.join(changes.values())}"
    yield from _changed_length(point.step, checkpoint.plan, plan, config)
    saved_computation = checkpoint.computation
    # Compare how steps were actually computed rather than the flags, which may leave it open.
    decided = {f"hardware.{name}" for name in saved_computation}
    inexact = [text for name, text in changes.items() if name in settings_marked(ROUNDING, type(config)) - decided]
    inexact += [
        f"{'parallel streams' if name == 'num_streams' else flag_of(name)} {old} -> {computation[name]}"
        for name, old in saved_computation.items()
        if old != computation[name]
    ]
    if checkpoint.plan.num_replicas != plan.num_replicas:
        inexact.append(f"replicas {checkpoint.plan.num_replicas} -> {plan.num_replicas}")
    for name in ROUNDING_LIBRARIES:
        is_used = {"libtpu": config.hardware.wants_tpu, "jaxlib": config.hardware.runtime == "jax"}.get(name, True)
        if not is_used:
            continue
        if checkpoint.versions.get(name) != versions.get(name):
            inexact.append(f"{name} {checkpoint.versions.get(name)} -> {versions.get(name)}")
    for name, current in made_by.items():
        if (saved := checkpoint.made_by.get(name, "unknown")) != current:
            shown = " → ".join(value.replace("+changes", " + local changes") for value in (saved, current))
            what = "code" if name == "commit" else name
            yield f"note: the {what} has changed since this run started ({shown}), so the result may differ slightly"
    if config.hardware.bfloat16 and saved_computation.get("jit_compile") != computation["jit_compile"]:
        yield (
            "note: the precision changes from here on: on a CPU, --bfloat16 computes the whole model in bfloat16 if "
            "--jit-compile is true, but only the matrix products if it is false"
        )
    if inexact:
        yield (
            f"note: results may differ in the last bits from an uninterrupted run: {', '.join(inexact)}. Sums may be "
            "rounded differently; rows, masks and dropout are the same"
        )


def _changed_length(step: int, saved_plan: Plan, plan: Plan, config: RunSettings) -> Iterator[str]:
    from train.step.schedule import build_schedule

    old, new = saved_plan.schedule_steps, plan.schedule_steps
    if old == new:
        return
    old_rate, new_rate = (float(build_schedule(config.optimization, **numbers)(step)) for numbers in (old, new))
    yield (
        f"the run's length changed from {old['num_steps']:,} to {new['num_steps']:,} steps: the learning rate resumes "
        f"at {new_rate:.3g}, following the schedule of the new length. With the schedule of the old length, which the "
        f"steps so far followed, it would resume at {old_rate:.3g}"
    )


def _changes(saved_settings: dict[str, dict[str, Any]], config: RunSettings) -> Iterator[tuple[str, str]]:
    current_settings = json.loads(json.dumps(config.as_dict()))
    for subject, values in current_settings.items():
        for name, value in values.items():
            saved_value = saved_settings[subject].get(name, value)
            if saved_value not in (value, REDACTED):
                yield f"{subject}.{name}", f"{flag_of(name)} {saved_value} -> {value}"


def installed_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def fingerprint(config: RunSettings, inputs: Inputs, model_config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, rows and architecture that identify a run: {name: value}.

    Settings that may change are left out. Some of them are replaced: the folders of shards by the content of the
    shards, the model's name by its resolved configuration, and the factors of the global batch by the global batch
    itself, which is in a checkpoint's plan. The version of transformers in a model's configuration is also left out.
    """
    model = {f"model.{key}": value for key, value in model_config.items()}
    model.pop("model.transformers_version", None)
    content = config.identity() | inputs.identities() | model
    return json.loads(json.dumps(content))  # has the same types as content read from a file


def fingerprint_of_phases(fingerprints: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the fingerprints of a run's phases: the first fingerprint, plus the values that differ in later phases.

    The names of a later phase's values get a prefix. The fingerprint up to a phase thus does not depend on later
    phases.
    """
    first, *others = fingerprints
    joined = dict(first)
    for index, other in enumerate(others, start=1):
        names = sorted(name for name in other.keys() | first.keys() if other.get(name) != first.get(name))
        joined |= {phase_prefix(index) + name: other.get(name) for name in names}
    return joined


def fingerprint_sha256(fingerprint: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
