"""The preflight of one run: its train step built as `run_mlm.py` builds it, lowered, compiled for a TPU, reported."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from transformers import PretrainedConfig

from mlm_common.errors import InputError, RunFailedError
from train.checks.preflight.batch_search import ROWS_UNIT, MemoryUse, largest_fitting
from train.checks.preflight.hlo_costs import step_costs
from train.checks.preflight.report import StepReport, print_batches, print_report
from train.checks.preflight.synthetic_inputs import synthetic_inputs
from train.checks.preflight.tpu_compiler import DoesNotFitError, check_compiler, compile_for_tpu
from train.checks.preflight.tpu_slices import TpuSlice, tpu_slice
from train.config.settings import RunSettings, TrainingConfig
from train.data.inputs import Inputs
from train.data.shards import TrainingInputs, check_phases, open_inputs
from train.model.config import resolve_model_config
from train.model.flops import step_flops
from train.runtime.phases import Phase, naming_phase, phases_of
from train.runtime.plan import PhaseToPlan, Plan, make_plans
from train.tasks.objectives import task_of
from train.tasks.task import Task

if TYPE_CHECKING:
    from train.step.train_step import PretrainingModel

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=RunSettings)

# Without shards: more than any batch has, and steps for the schedule, which does not change what a step costs.
ASSUMED_NUM_ROWS = 10**12
CURES = (
    "Cures: a smaller --per-replica-batch-size with as many times more --gradient-accumulation-steps (the same global "
    "batch), --gradient-checkpointing, --bfloat16. --find-batch-size tells the largest batch that fits."
)


@dataclass(frozen=True)
class Preflight:
    """A run whose step can be compiled for a slice, at any number of rows."""

    config: RunSettings
    inputs: Inputs
    model_config: PretrainedConfig
    model: "PretrainingModel"
    tpu: TpuSlice
    compiler_python: str

    def num_micro_batches(self, rows: int) -> int:
        """Count the batches of so many rows whose gradients are summed in one step."""
        optimization = self.config.optimization
        if optimization.global_batch_size is None:
            return optimization.gradient_accumulation_steps
        return -(-optimization.global_batch_size // (rows * self.tpu.num_replicas))

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer, in bytes."""
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return sum(variable.dtype.size * variable.shape.num_elements() for variable in variables)

    def step_report(self, rows: int) -> StepReport:
        """Ask the compiler about the step that takes `rows` rows at once.

        Raises:
            DoesNotFitError: it needs more memory than the chip has.
            RunFailedError: it does not compile.
        """
        from train.checks.preflight.step_lowering import lower_train_step

        logger.info("lowering the step of %d rows", rows)
        num_micro_batches = self.model.num_micro_batches = self.num_micro_batches(rows)
        stablehlo = lower_train_step(
            self.model,
            num_rows=rows * num_micro_batches,
            length=self.inputs.max_length,
            num_replicas=self.tpu.num_replicas,
        )
        compiled = compile_for_tpu(stablehlo, self.tpu, python=self.compiler_python, what=f"the step of {rows} rows")
        return StepReport(
            tpu=self.tpu,
            compiled=compiled,
            costs=step_costs(compiled.hlo),
            rows=rows,
            length=self.inputs.max_length,
            num_micro_batches=num_micro_batches,
            needed_flops=self._needed_flops(rows),
            num_steps=self._num_steps(rows),
        )

    def _needed_flops(self, rows: int) -> int | None:
        num_predictions = self.model.task.num_predictions(rows * self.inputs.max_length)
        return step_flops(
            self.model_config,
            num_rows=rows * self.num_micro_batches(rows),
            length=self.inputs.max_length,
            num_predictions=num_predictions * self.num_micro_batches(rows),
            num_micro_batches=self.num_micro_batches(rows),
        )

    def _num_steps(self, rows: int) -> int | None:
        """Count the steps of the planned run; None where nothing tells, or the rows do not fill a batch."""
        optimization, num_rows = self.config.optimization, self.inputs.num_rows
        if optimization.max_steps is not None:
            return optimization.max_steps
        batch_rows = rows * self.num_micro_batches(rows) * self.tpu.num_replicas
        return max(1, optimization.num_epochs * num_rows // batch_rows) if batch_rows <= num_rows else None


def open_preflights(
    config: TrainingConfig, topology: str, vocab_size: int | None, compiler_python: str
) -> Iterator[tuple[str, Preflight]]:
    """Make all checks that come before the compiler; yield the name of each phase and, its model built, its preflight.

    Args:
        config: the settings of the run.
        topology: name of the slice.
        vocab_size: ids of the vocabulary, where there are no shards to tell them.
        compiler_python: interpreter that has the compiler.

    Raises:
        InputError: an unknown slice, no compiler, neither shards nor numbers in their place, or whatever
            `run_mlm.py` would refuse of shards, model and plan.
    """
    tpu = tpu_slice(topology)
    check_compiler(compiler_python)
    phases = phases_of(config)
    inputs = [_inputs(phase.config, vocab_size) for phase in phases]
    check_phases(inputs)
    plans = _plans(phases, inputs, tpu)
    max_length = max(one.max_length for one in inputs)
    for phase, own, plan in zip(phases, inputs, plans, strict=True):
        with naming_phase(phase.name):
            model_config = resolve_model_config(phase.config.model, own, max_length)
        task = task_of(phase.config, own)
        yield phase.name, build_preflight(phase.config, own, task, model_config, plan, tpu, compiler_python)


def build_preflight(
    config: RunSettings,
    inputs: Inputs,
    task: Task,
    model_config: PretrainedConfig,
    plan: Plan,
    tpu: TpuSlice,
    compiler_python: str,
) -> Preflight:
    """Build the model of a run as it is on a TPU, and make its preflight."""
    import tensorflow as tf

    from train.step.train_step import build_model

    tf.config.set_visible_devices([], "GPU")  # a step that is lowered on a GPU holds the GPU's operations
    on_tpu = _on_tpu(config)
    model = build_model(on_tpu, inputs, task, model_config, plan, tf.distribute.get_strategy())
    return Preflight(on_tpu, inputs, model_config, model, tpu, compiler_python)


def print_step(preflight: Preflight) -> None:
    """Print what the compiler says of the step as configured.

    Raises:
        RunFailedError: it does not fit, with what would help, or does not compile.
    """
    try:
        report = preflight.step_report(preflight.config.optimization.per_replica_batch_size)
    except DoesNotFitError as error:
        raise RunFailedError(f"{error} {CURES}") from error
    print_report(report)


def print_largest_batch(preflight: Preflight) -> None:
    """Print what the compiler says of the largest batch that fits, and of those tried on the way.

    Raises:
        RunFailedError: not even the smallest fits, or a step does not compile.
    """
    tried: dict[int, StepReport | DoesNotFitError] = {}

    def measure(rows: int) -> MemoryUse:
        try:
            report = tried[rows] = preflight.step_report(rows)
        except DoesNotFitError as error:
            tried[rows] = error
            logger.info("%d rows: %s", rows, error)
            return MemoryUse(False, error.needed_bytes, preflight.state_bytes, error.limit_bytes)
        logger.info("%d rows fit: %.2f GiB", rows, report.compiled.memory_bytes / 2**30)
        limit_bytes = preflight.tpu.chip.usable_memory_bytes
        return MemoryUse(True, report.compiled.memory_bytes, preflight.state_bytes, limit_bytes)

    largest = largest_fitting(measure, preflight.config.optimization.per_replica_batch_size)
    report = tried.get(largest or 0)
    if not isinstance(report, StepReport):
        raise RunFailedError(
            f"Not even {ROWS_UNIT} rows of {preflight.inputs.max_length} tokens fit a replica of {preflight.tpu.name}: "
            f"{tried[ROWS_UNIT]} {CURES}"
        )
    print_report(report)
    print_batches(tried)
    print(f"\nlargest batch that fits: --per-replica-batch-size {largest}")


def _inputs(config: TrainingConfig, vocab_size: int | None) -> TrainingInputs:
    """Open the run's inputs, or make some of --max-length and --vocab-size."""
    max_length = config.data.max_length
    if config.data.train_dataset is not None and (vocab_size is None or config.run.phases is None):
        if vocab_size is not None:
            raise InputError(
                f"--vocab-size stands in the place of shards; received {vocab_size} beside --train-dataset, which "
                "tells it. Leave one of them out."
            )
        return open_inputs(config.data)
    if max_length is None or vocab_size is None:
        raise InputError(
            "--train-dataset, or --max-length and --vocab-size in its place, tell the step's sizes; received "
            f"--max-length {max_length}, --vocab-size {vocab_size} and no --train-dataset."
        )
    return synthetic_inputs(max_length=max_length, vocab_size=vocab_size)


def _on_tpu(config: Settings) -> Settings:
    """Give the run a TPU: the model computes there in the ways that suit it."""
    hardware = dataclasses.replace(config.hardware, tpu_name=config.hardware.tpu_name or "local", no_tpu=False)
    return dataclasses.replace(cast(Any, config), hardware=hardware)


def _plans(phases: Sequence[Phase], inputs: Sequence[TrainingInputs], tpu: TpuSlice) -> tuple[Plan, ...]:
    """Plan the run on the slice; without shards there are rows enough."""
    has_shards = [own.train_shards.num_rows > 0 for own in inputs]
    numbers = [
        PhaseToPlan(
            phase.config.optimization,
            phase.config.run,
            num_rows=own.train_shards.num_rows if has_rows else ASSUMED_NUM_ROWS,
            max_length=own.max_length,
            has_own_schedule=phase.has_own_schedule,
            name=phase.name,
        )
        for phase, own, has_rows in zip(phases, inputs, has_shards, strict=True)
    ]
    return make_plans(tuple(numbers), tpu.num_replicas)
