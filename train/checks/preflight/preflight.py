"""The preflight of a run: build its train step as `run_mlm.py` does, lower it, compile it for a TPU, and report.

Lowering translates the step to StableHLO, the compiler's input. TensorFlow can do this on a machine without a TPU.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, cast

import tensorflow as tf

from mlm_common.errors import RunFailedError
from train.checks.preflight.hlo_costs import collective_bytes, step_costs
from train.checks.preflight.report import SYNTHETIC, StepReport, print_batches, print_report, print_without_sharding
from train.checks.preflight.tpu_compiler import (
    ROWS_UNIT,
    DoesNotFitError,
    MemoryUse,
    TpuSlice,
    compile_for_tpu,
    largest_fitting,
)
from train.config.settings import RunSettings
from train.data.pipeline import batch_spec
from train.loop.phase import Phase
from train.model.computation import step_flops
from train.runtime.lowering import empty, give_memory_back, lower
from train.runtime.plan import Plan
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.step.train_step import PretrainingModel, build_model

logger = logging.getLogger(__name__)

SAVE_MEMORY = "--gradient-checkpointing, --bfloat16 and, on several replicas, --shard-optimizer also save memory."


@dataclass(frozen=True)
class Preflight:
    """A phase of a run, whose step can be compiled for a TPU slice with any number of rows."""

    phase: Phase
    plan: Plan
    model: PretrainingModel
    tpu: TpuSlice
    compiler_python: str

    def num_micro_batches(self, rows: int) -> int:
        """Return the number of batches of `rows` rows whose gradients are summed in one step."""
        optimization = self.phase.config.optimization
        if optimization.global_batch_size is None:
            return optimization.gradient_accumulation_steps
        return -(-optimization.global_batch_size // (rows * self.tpu.num_replicas))

    @property
    def state_bytes(self) -> int:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return sum(variable.dtype.size * variable.shape.num_elements() for variable in variables)

    def step_report(self, rows: int) -> StepReport:
        logger.info("lowering the step of %d rows", rows)
        optimization, length = self.phase.config.optimization, self.phase.inputs.max_length
        num_micro_batches = self.model.num_micro_batches = self.num_micro_batches(rows)
        num_rows = rows * num_micro_batches
        stablehlo = lower_train_step(self.model, num_rows=num_rows, length=length, num_replicas=self.tpu.num_replicas)
        compiled = compile_for_tpu(stablehlo, self.tpu, python=self.compiler_python, what=f"the step of {rows} rows")
        num_steps = self._num_steps(rows)
        follows_from_epochs = num_steps is not None and optimization.max_steps is None
        return StepReport(
            tpu=self.tpu,
            compiled=compiled,
            costs=step_costs(compiled.hlo),
            rows=rows,
            length=length,
            num_micro_batches=num_micro_batches,
            needed_flops=step_flops(
                self.phase.model_config,
                num_rows=num_rows,
                length=length,
                num_predictions=self.model.task.num_predictions(rows * length) * num_micro_batches,
                num_micro_batches=num_micro_batches,
            ),
            num_steps=num_steps,
            collectives=collective_bytes(stablehlo),
            num_epochs=optimization.num_epochs if follows_from_epochs else None,
        )

    def _num_steps(self, rows: int) -> int | None:
        """Return the number of steps of the planned run; None if unknown, or if the rows do not fill one batch."""
        optimization, inputs = self.phase.config.optimization, self.phase.inputs
        if optimization.max_steps is not None:
            return optimization.max_steps
        batch_rows = rows * self.num_micro_batches(rows) * self.tpu.num_replicas
        if inputs.tokenizer_source == SYNTHETIC or batch_rows > inputs.num_rows:
            return None
        return max(1, optimization.num_epochs * inputs.num_rows // batch_rows)


def build_preflight(phase: Phase, plan: Plan, tpu: TpuSlice, compiler_python: str, **hardware: Any) -> Preflight:
    """Return a `Preflight` that compiles the steps of a phase, with the model built as on a TPU.

    Args:
        phase: the phase.
        plan: the plan of the phase on this slice.
        tpu: the slice.
        compiler_python: a Python interpreter that has jax and libtpu.
        hardware: settings of `HardwareConfig` that override the phase's.
    """
    tf.config.set_visible_devices([], "GPU")  # a step lowered on a GPU would contain operations for GPUs
    settings = phase.config.hardware
    on_tpu = replace(settings, tpu_name=settings.tpu_name or "local", no_tpu=False, **hardware)
    config: RunSettings = replace(cast(Any, phase.config), hardware=on_tpu)
    runtime = TensorFlowRuntime(tf.distribute.get_strategy())
    model = build_model(config, phase.inputs, phase.task, phase.model_config, plan, runtime)
    return Preflight(replace(phase, config=config), plan, model, tpu, compiler_python)


def print_step(preflight: Preflight, *, with_operations: bool = False) -> None:
    """Compile the step as configured, and print the report.

    If the optimizer is sharded, also compile the step without sharding, and print its report for comparison.

    Raises:
        RunFailedError: the step does not fit, or does not compile.
    """
    rows = preflight.phase.config.optimization.per_replica_batch_size
    try:
        report = preflight.step_report(rows)
    except DoesNotFitError as error:
        raise RunFailedError(_does_not_fit(preflight, rows, error)) from error
    print_report(report, with_operations=with_operations)
    print(
        f"\nWith --modelled-step-ms {report.seconds * 1e3:.3g} the run compares the measured time with this estimate."
    )
    if preflight.model.optimizer.sharding:
        print_without_sharding(_step_without_sharding(preflight, rows))


def _step_without_sharding(preflight: Preflight, rows: int) -> StepReport | DoesNotFitError:
    parts = (preflight.phase, preflight.plan, preflight.tpu, preflight.compiler_python)
    try:
        return build_preflight(*parts, shard_optimizer=False).step_report(rows)
    except DoesNotFitError as error:
        return error


def print_largest_batch(preflight: Preflight, *, with_operations: bool = False) -> None:
    """Search for the largest batch per replica that fits. Print its report, and list all batches that were compiled.

    Raises:
        RunFailedError: not even the smallest batch fits, or the step does not compile.
    """
    outcomes: dict[int, StepReport | DoesNotFitError] = {}

    def measure(rows: int) -> MemoryUse:
        try:
            report = outcomes[rows] = preflight.step_report(rows)
        except DoesNotFitError as error:
            outcomes[rows] = error
            logger.info("%d rows: %s", rows, error)
            return MemoryUse(False, error.needed_bytes, preflight.state_bytes, error.limit_bytes)
        logger.info("%d rows fit: %.2f GiB", rows, report.compiled.memory_bytes / 2**30)
        limit_bytes = preflight.tpu.chip.usable_memory_bytes
        return MemoryUse(True, report.compiled.memory_bytes, preflight.state_bytes, limit_bytes)

    largest = largest_fitting(measure, preflight.phase.config.optimization.per_replica_batch_size)
    report = outcomes.get(largest or 0)
    if not isinstance(report, StepReport):
        raise RunFailedError(
            f"Not even {ROWS_UNIT} rows of {preflight.phase.inputs.max_length} tokens fit into a "
            f"{preflight.tpu.replica_unit} of {preflight.tpu.name}. {outcomes[ROWS_UNIT]} Use a smaller model or "
            f"shorter rows. {SAVE_MEMORY}"
        )
    answer = f"The largest batch that fits is --per-replica-batch-size {largest}."
    print_report(report, answer, with_operations=with_operations)
    print_batches(outcomes)


def _does_not_fit(preflight: Preflight, rows: int, error: DoesNotFitError) -> str:
    """Return a message that says how much memory the step needs, and which batch would fit by linear extrapolation."""
    gib, unit = 2**30, preflight.tpu.replica_unit
    needs = f"It does not fit: {error.needed_bytes / gib:.1f} of {error.limit_bytes / gib:.1f} GiB per {unit}"
    room_bytes, state_bytes = error.limit_bytes - preflight.state_bytes, preflight.state_bytes
    largest = int(rows * room_bytes / max(1, error.needed_bytes - state_bytes)) if room_bytes > 0 else 0
    largest = min(largest, rows - 1) // ROWS_UNIT * ROWS_UNIT
    if not largest:
        return f"{needs}, and a smaller batch hardly helps: use a smaller model or shorter rows. {SAVE_MEMORY}"
    total = rows * preflight.num_micro_batches(rows)
    divisor = max(fewer for fewer in range(1, largest + 1) if total % fewer == 0)
    accumulation = f" --gradient-accumulation-steps {total // divisor}"
    if preflight.phase.config.optimization.global_batch_size is not None:
        accumulation = ""  # accumulation follows from --global-batch-size
    return (
        f"{needs}; the largest per-replica batch that fits is about {largest} rows (--find-batch-size finds it). "
        f"--per-replica-batch-size {divisor}{accumulation} keeps the global batch. {SAVE_MEMORY}"
    )


def lower_train_step(model: PretrainingModel, *, num_rows: int, length: int, num_replicas: int) -> str:
    """Lower `model.train_step` for one replica of `num_replicas` to StableHLO text.

    Variables become arguments. The variables that the step assigns are also results, stored in the argument's memory.
    The values of the model's variables are discarded, because the compiler that runs next needs the memory.

    Args:
        model: the model.
        num_rows: number of rows of the replica.
        length: length of the rows, in tokens.
        num_replicas: number of replicas.
    """
    empty([*model.variables, *model.optimizer.variables])
    give_memory_back()
    return lower(model.train_step, (batch_spec(model.task.features(length), num_rows),), num_replicas).stablehlo
