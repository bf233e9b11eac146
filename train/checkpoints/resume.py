"""Where training starts or resumes: the identity of the run (its fingerprint), the step and row, and what changed."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED
from train.checkpoints.store import CheckpointRecord, SkippedRows
from train.config.learning import ADDED, MAY_CHANGE, ROUNDING
from train.config.settings import RunSettings, default_of, settings_marked
from train.data.inputs import Inputs
from train.runtime.plan import Plan, phase_index, schedule_steps
from train.runtime.run_folder import phase_prefix

LIBRARIES = ("tensorflow", "tensorflow-tpu", "jaxlib", "libtpu", "tf-keras", "transformers", "tokenizers", "numpy")
# Those whose versions decide how numbers are rounded, or which random ones are drawn.
ROUNDING_LIBRARIES = ("tensorflow", "tensorflow-tpu", "jaxlib", "libtpu", "tf-keras")


@dataclass(frozen=True)
class ResumePoint:
    """Where training begins or resumes.

    logged_step: the last step before it with a line of training in the log.
    skipped: rows left out so far.
    checkpoint: record of the checkpoint it resumes from; None where it begins with fresh weights.
    first_step_of_rows: of the plan.
    """

    step: int = 0
    logged_step: int = 0
    skipped: tuple[SkippedRows, ...] = ()
    checkpoint: CheckpointRecord | None = None
    first_step_of_rows: int = 0

    @property
    def num_skipped_rows(self) -> int:
        """Rows left out so far of the shards that are read."""
        return sum(rows.num_rows for rows in self.skipped if rows.after_step >= self.first_step_of_rows)


def resume_point(checkpoint: CheckpointRecord | None, plan: Plan) -> ResumePoint:
    """Make the point that a checkpoint is, for the phase of the plan; the beginning of a run without one."""
    if checkpoint is None:
        return ResumePoint()
    point = (checkpoint.step, checkpoint.logged_step, checkpoint.skipped, checkpoint)
    return ResumePoint(*point, plan.first_step_of_rows)


def check_checkpoint(checkpoint: CheckpointRecord, plan: Plan) -> None:
    """Check that the run can resume from a checkpoint of its fingerprint, by the plan of its phase.

    InputError if its global batch or an earlier phase was another one, or it is past the end of the run or phase.
    """
    for index, (behind, now) in enumerate(zip(checkpoint.plan.get("before", ()), plan.before, strict=True)):
        if behind != asdict(now):
            raise InputError(
                f"--phases must keep the phases that are over; phase {index + 1} ended after step "
                f"{behind['num_steps']} with steps of {behind['global_batch_rows']} rows of {behind['max_length']} "
                f"tokens, and now would after step {now.num_steps} with {now.global_batch_rows} rows of "
                f"{now.max_length}. Change only later phases, or name another --output-dir."
            )
    there = checkpoint.plan["global_batch_rows"]
    if there != plan.global_batch_rows:
        raise InputError(
            f"A run must resume with its global batch of {there} rows; received {plan.global_batch_rows} "
            f"(--per-replica-batch-size x --gradient-accumulation-steps x {plan.num_replicas} replicas). Change one of "
            "the two."
        )
    if checkpoint.step > plan.num_steps:
        raise InputError(
            f"The run ends after step {plan.num_steps}, before the newest checkpoint, that of step {checkpoint.step}. "
            f"Raise --num-epochs or --max-steps{f' of phase {len(plan.before) + 1}' if plan.num_phases > 1 else ''}."
        )


def describe_resume_point(
    point: ResumePoint,
    plan: Plan,
    config: RunSettings,
    versions: dict[str, str],
    computation: dict[str, Any],
    made_by: dict[str, str],
) -> Iterator[str]:
    """Yield what a person should know of where training starts or resumes, in sentences.

    `versions`, `computation` and `made_by` are those of now, as a checkpoint's record has them.
    """
    checkpoint = point.checkpoint
    if checkpoint is None:
        init_from = config.model.init_from
        yield f"from the weights of {init_from}" if init_from else "from scratch"
        return
    epoch = plan.row_after(point.step, point.num_skipped_rows) / plan.num_rows
    yield f"resuming at step {point.step:,} of {plan.num_steps:,} (epoch {epoch:.2f})"
    if phase_index(checkpoint.plan) < len(plan.before):
        return  # what differs from the phase before is meant to
    changes = dict(_changes(checkpoint.settings, config))
    if changes:
        yield f"changed since then: {', '.join(changes.values())}"
    yield from _changed_length(point.step, checkpoint.plan, plan, config)
    before = checkpoint.computation
    # What was decided counts instead of the settings that leave it open.
    decided = {f"hardware.{name}" for name in before}
    inexact = [text for name, text in changes.items() if name in settings_marked(ROUNDING, type(config)) - decided]
    inexact += [
        f"{flag_of(name)} {old} -> {computation[name]}" for name, old in before.items() if old != computation[name]
    ]
    if checkpoint.plan["num_replicas"] != plan.num_replicas:
        inexact.append(f"replicas {checkpoint.plan['num_replicas']} -> {plan.num_replicas}")
    for name in ROUNDING_LIBRARIES:
        is_used = {"libtpu": config.hardware.wants_tpu, "jaxlib": config.hardware.runtime == "jax"}.get(name, True)
        if not is_used:
            continue
        if checkpoint.versions.get(name) != versions.get(name):
            inexact.append(f"{name} {checkpoint.versions.get(name)} -> {versions.get(name)}")
    for name, now in made_by.items():
        if (before_now := checkpoint.made_by.get(name, "unknown")) != now:
            shown = " → ".join(one.replace("+changes", " + local changes") for one in (before_now, now))
            what = "code" if name == "commit" else name
            yield f"note: the {what} has changed since this run started ({shown}), so the result may differ slightly"
    if config.hardware.bfloat16 and before.get("jit_compile") != computation["jit_compile"]:
        yield (
            "note: the precision changes from here on: on a CPU, --bfloat16 computes the whole model in bfloat16 with "
            "--jit-compile true, and only matrix products with false"
        )
    if inexact:
        yield (
            f"note: results may differ in the last bits from an uninterrupted run: {', '.join(inexact)}. Sums are "
            "rounded in another order; rows, masks and dropout are the same"
        )


def _changed_length(step: int, before: dict[str, Any], plan: Plan, config: RunSettings) -> Iterator[str]:
    from train.step.schedule import build_schedule

    old, new = schedule_steps(before), plan.schedule_steps
    if old == new:
        return
    old_rate, new_rate = (float(build_schedule(config.optimization, **numbers)(step)) for numbers in (old, new))
    yield (
        f"the run's length changed from {old['num_steps']:,} to {new['num_steps']:,} steps: the learning rate resumes "
        f"at {new_rate:.3g}, by the schedule of the new length. The steps so far followed the schedule of the old "
        f"length, by which it would resume at {old_rate:.3g}"
    )


def _changes(before: dict[str, dict[str, Any]], config: RunSettings) -> Iterator[tuple[str, str]]:
    now = json.loads(json.dumps(config.as_dict()))
    for subject, values in now.items():
        for name, value in values.items():
            there = before[subject].get(name, value)
            if there not in (value, REDACTED):
                yield f"{subject}.{name}", f"{flag_of(name)} {there} -> {value}"


def installed_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def fingerprint(config: RunSettings, inputs: Inputs, model_config: dict[str, Any]) -> dict[str, Any]:
    """Collect the settings, rows and architecture that identify a run: {name: value}.

    Settings that may change are left out, since something else identifies the run instead: the shards for their
    folders, the resolved configuration for the model's name, the global batch of a checkpoint's plan for its factors.
    So are the version of transformers, which every configuration has, and settings marked ADDED that are off, so that
    adding a setting changes no fingerprint.
    """
    settings = config.without(MAY_CHANGE)
    kind = type(config)
    added = {name for name in settings_marked(ADDED, kind) if settings[name] == default_of(name, kind)}
    model = {f"model.{key}": value for key, value in model_config.items()}
    model.pop("model.transformers_version", None)
    content = {name: value for name, value in settings.items() if name not in added} | inputs.identities() | model
    return json.loads(json.dumps(content))  # as it is read again


def fingerprint_of_phases(fingerprints: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the fingerprints of a run's phases: the first, and under the names of others what differs from it.

    So a run whose later phases are not begun yet is the same as one without them.
    """
    first, *others = fingerprints
    joined = dict(first)
    for index, one in enumerate(others, start=1):
        names = sorted(name for name in one.keys() | first.keys() if one.get(name) != first.get(name))
        joined |= {phase_prefix(index) + name: one.get(name) for name in names}
    return joined


def fingerprint_sha256(fingerprint: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
