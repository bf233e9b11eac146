"""The preflight of one run: its train step built as `run_mlm.py` builds it, lowered, compiled for a TPU, reported."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from mlm_common.errors import InputError, RunFailedError
from train.checks.preflight.batch_search import ROWS_UNIT, MemoryUse, largest_fitting
from train.checks.preflight.hlo_costs import step_costs
from train.checks.preflight.report import StepReport, print_batches, print_report
from train.checks.preflight.synthetic_inputs import synthetic_inputs
from train.checks.preflight.tpu_compiler import DoesNotFitError, check_compiler, compile_for_tpu
from train.checks.preflight.tpu_slices import TpuSlice, tpu_slice
from train.config import TrainingConfig
from train.data.shards import TrainingInputs, open_inputs
from train.model.config import resolve_model_config
from train.model.flops import step_flops
from train.runtime.plan import Plan, make_plan
from train.tasks.masked_lm import MaskedLanguageModeling

if TYPE_CHECKING:
    from train.train_step import PretrainingModel

logger = logging.getLogger(__name__)

# Only for the schedule, which does not change what a step costs.
ASSUMED_NUM_STEPS = 1_000_000
CURES = (
    "Cures: a smaller --per-replica-batch-size with as many times more --gradient-accumulation-steps (the same global "
    "batch), --gradient-checkpointing, --bfloat16. --find-batch-size tells the largest batch that fits."
)


@dataclass(frozen=True)
class Preflight:
    """A run whose step can be compiled for a slice, at any number of rows."""

    config: TrainingConfig
    inputs: TrainingInputs
    model_config: PretrainedConfig
    model: "PretrainingModel"
    tpu: TpuSlice
    compiler_python: str

    @property
    def num_micro_batches(self) -> int:
        """Batches whose gradients are summed in one step."""
        return self.config.optimization.gradient_accumulation_steps

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
        stablehlo = lower_train_step(
            self.model,
            num_rows=rows * self.num_micro_batches,
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
            num_micro_batches=self.num_micro_batches,
            needed_flops=self._needed_flops(rows),
            num_steps=self._num_steps(rows),
        )

    def _needed_flops(self, rows: int) -> int | None:
        num_predictions = self.model.task.num_predictions(rows * self.inputs.max_length)
        if num_predictions is None:
            return None
        return step_flops(
            self.model_config,
            num_rows=rows * self.num_micro_batches,
            length=self.inputs.max_length,
            num_predictions=num_predictions * self.num_micro_batches,
            num_micro_batches=self.num_micro_batches,
        )

    def _num_steps(self, rows: int) -> int | None:
        """Count the steps of the planned run; None where nothing tells, or the shards do not fill a batch."""
        optimization, num_rows = self.config.optimization, self.inputs.train_shards.num_rows
        if optimization.max_steps is not None:
            return optimization.max_steps
        if rows * self.num_micro_batches * self.tpu.num_replicas > num_rows:
            return None
        return _plan(self.config, self.inputs, self.tpu, rows).num_steps


def open_preflight(config: TrainingConfig, topology: str, vocab_size: int | None, compiler_python: str) -> Preflight:
    """Make all checks that come before the compiler, and build the model on the CPU.

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
    inputs = _inputs(config, vocab_size)
    model_config = resolve_model_config(config.model, inputs)
    plan = _plan(config, inputs, tpu, config.optimization.per_replica_batch_size)

    import tensorflow as tf

    from train.train_step import build_model

    tf.config.set_visible_devices([], "GPU")  # a step that is lowered on a GPU holds the GPU's operations
    config = _on_tpu(config)
    task = MaskedLanguageModeling.of(inputs, config.masking)
    model = build_model(config, inputs, task, model_config, plan, tf.distribute.get_strategy())
    return Preflight(config, inputs, model_config, model, tpu, compiler_python)


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
    if config.data.train_dataset is not None:
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


def _on_tpu(config: TrainingConfig) -> TrainingConfig:
    """Give the run a TPU: the model computes there in the ways that suit it."""
    hardware = dataclasses.replace(config.hardware, tpu_name=config.hardware.tpu_name or "local", no_tpu=False)
    return dataclasses.replace(config, hardware=hardware)


def _plan(config: TrainingConfig, inputs: TrainingInputs, tpu: TpuSlice, rows: int) -> Plan:
    """Plan the run on the slice, at this batch."""
    optimization = dataclasses.replace(config.optimization, per_replica_batch_size=rows)
    num_rows = inputs.train_shards.num_rows
    if config.data.train_dataset is None:
        num_rows = ASSUMED_NUM_STEPS * rows * optimization.gradient_accumulation_steps * tpu.num_replicas
    return make_plan(
        optimization, config.run, num_rows=num_rows, max_length=inputs.max_length, num_replicas=tpu.num_replicas
    )
