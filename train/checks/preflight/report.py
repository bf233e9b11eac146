"""The part of a preflight that needs no TensorFlow: open a run, with or without shards, plan it, and print the report.

All times in the report are estimates of the compiler.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.cli.console import about, counted, two_digits
from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tfrecord_prep.manifest import ShardSet
from train.checks.preflight.hlo_costs import INTERCONNECT_BYTES_PER_SECOND, StepCosts, sent_bytes
from train.checks.preflight.tpu_compiler import CompiledStep, DoesNotFitError, TpuSlice
from train.config.settings import TrainingConfig
from train.data.shards import TrainingInputs, open_inputs
from train.loop.lifecycle import open_pretraining
from train.loop.phase import make_plans
from train.loop.run import Run
from train.runtime.machines import GIB, Cluster

NUM_OPERATIONS = 10
# Used in place of the tokenizer's folder if there are no shards.
SYNTHETIC = "(synthetic)"
# Assumed number of rows if there are no shards, larger than any batch. This number affects the schedule, but not the
# cost of a step.
ASSUMED_NUM_ROWS = 10**12
# docs/tpu/preflight.md has the comparison.
KNOWN_ERROR = (
    "For two programs on a v4, published times are within about 20% of such estimates, one above and one below; on a "
    "v6e the estimates may be off by a factor of two."
)


def open_run(config: TrainingConfig, vocab_size: int | None, num_replicas: int) -> Run:
    run = open_pretraining(config, Cluster(), functools.partial(_inputs, vocab_size=vocab_size))
    return dataclasses.replace(run, plans=make_plans(run.phases, num_replicas))


def print_plan(run: Run, tpu: TpuSlice) -> None:
    for phase, plan in zip(run.phases, run.plans, strict=True):
        if phase.name:
            print(f"\n{phase.name}\n")
        optimization = phase.config.optimization
        lines = step_lines(tpu, optimization.per_replica_batch_size, plan.max_length, plan.num_micro_batches)
        if phase.inputs.tokenizer_source != SYNTHETIC or optimization.max_steps:
            lines["run"] = f"{counted(plan.num_phase_steps, 'step')}, {plan.num_tokens:,} tokens"
        for title, text in lines.items():
            print(f"{title:<20} {text}")
    print("\nNothing was compiled. Without --dry-run, the TPU's compiler says whether it fits and how long it takes.")


def synthetic_inputs(*, max_length: int, vocab_size: int) -> TrainingInputs:
    """Return inputs with this row length and vocabulary size, but without rows.

    The tokenizer has the project's special tokens, and made-up words for the rest of its vocabulary.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise InputError(f"--vocab-size must be above the {len(SPECIAL_TOKENS)} special tokens; received {vocab_size}.")
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    vocabulary |= {f"▁word{index}": index for index in range(len(vocabulary), vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # makes each token a word, so that whole-word masking works
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return TrainingInputs(
        train_shards=ShardSet("", (), (), num_rows=ASSUMED_NUM_ROWS, manifest=None, tokenizer_folder=None),
        eval_shards=None,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, **names),
        tokenizer_source=SYNTHETIC,
        max_length=max_length,
    )


def _inputs(config: TrainingConfig, vocab_size: int | None) -> TrainingInputs:
    max_length = config.data.max_length
    if config.data.train_dataset is not None and (vocab_size is None or config.run.phases is None):
        if vocab_size is not None:
            raise InputError(
                f"--vocab-size is only for a preflight without shards; received {vocab_size} and --train-dataset, "
                "whose vocabulary is known. Leave out one of them."
            )
        return open_inputs(config.data)
    if max_length is None or vocab_size is None:
        raise InputError(
            "Pass --train-dataset or, before you have shards, --max-length and --vocab-size; received --max-length "
            f"{max_length}, --vocab-size {vocab_size} and no --train-dataset."
        )
    return synthetic_inputs(max_length=max_length, vocab_size=vocab_size)


@dataclass(frozen=True)
class StepReport:
    """The compiled step of a slice.

    Attributes:
        tpu: the slice.
        compiled: the result of the compiler.
        costs: estimated cycles of the step.
        rows: rows of a micro-batch on one replica.
        length: length of the rows, in tokens.
        num_micro_batches: number of micro-batches in a step.
        needed_flops: floating-point operations that the model needs for a step on one replica; None if unknown.
        num_steps: number of steps of the planned run; None if unknown.
        collectives: result of `collective_bytes`.
        num_epochs: number of epochs of the planned run, if it determines the number of steps.
    """

    tpu: TpuSlice
    compiled: CompiledStep
    costs: StepCosts
    rows: int
    length: int
    num_micro_batches: int
    needed_flops: int | None
    num_steps: int | None
    collectives: dict[str, int] = field(default_factory=dict)
    num_epochs: int | None = None

    @property
    def seconds(self) -> float:
        return self.costs.num_cycles / self.tpu.chip.clock_hertz

    @property
    def num_flops(self) -> float:
        """Floating-point operations of one replica's step as compiled."""
        # The compiler counts the body of the loop over micro-batches only once.
        return self.compiled.num_flops * self.num_micro_batches

    @property
    def replica_tokens(self) -> int:
        return self.rows * self.num_micro_batches * self.length

    @property
    def slice_tokens_per_second(self) -> float:
        return self.tpu.num_replicas * self.replica_tokens / self.seconds

    @property
    def peak_fraction(self) -> float | None:
        """Estimated model FLOPs utilization (MFU), as a fraction of the chip's peak speed; None if unknown."""
        if self.needed_flops is None:
            return None
        return self.needed_flops / self.seconds / self.tpu.chip.peak_flops_per_second


def print_report(report: StepReport, answer: str = "", *, with_operations: bool = False) -> None:
    """Print the report on a step: whether it fits, the time of the run, memory, speed, and cycles by kind of layer.

    Args:
        report: the compiled step.
        answer: printed first, instead of whether the step fits.
        with_operations: whether to print the most expensive operations as well.
    """
    versions = ", ".join(f"{name} {version}" for name, version in report.compiled.versions.items())
    print(f"{answer or fits(report)} {planned_time(report)}")
    print(f"Modelled by the TPU's compiler ({versions}); nothing here was measured on a TPU.")
    print(f"{KNOWN_ERROR}\n")
    for title, text in report_lines(report).items():
        print(f"{title:<20} {text}")
    costs = report.costs
    print("\nmodelled cycles per kind of layer, forward and backward")
    for kind, num_cycles in costs.cycles_by_kind.items():
        print(f"{_percent(num_cycles, costs)}  {num_cycles / 1e6:8.2f} M  {kind}")
    if not with_operations:
        return
    print(f"\nthe {NUM_OPERATIONS} most expensive operations, over all layers, each with the operations fused into it")
    for kind in costs.cycles_by_kind:
        for operation in costs.operations[:NUM_OPERATIONS]:
            if operation.kind == kind:
                print(f"{_percent(operation.num_cycles, costs)}  {kind:<14} {short_name(operation.name)}")


def fits(report: StepReport) -> str:
    compiled, limit_bytes, unit = report.compiled, report.tpu.chip.usable_memory_bytes, report.tpu.replica_unit
    if compiled.memory_bytes <= limit_bytes:
        used = max(compiled.memory_bytes / GIB, 0.1)  # "0.0" would look like an error
        return f"It fits: {used:.1f} of {limit_bytes / GIB:.1f} GiB per {unit}."
    # Parts that are in use at different times can share memory, so their sum can exceed the chip's memory.
    return f"It only just fits into the {limit_bytes / GIB:.1f} GiB per {unit}: leave some room."


def planned_time(report: StepReport) -> str:
    num_steps = report.num_steps or 1000
    run = f"{num_steps:,} steps"
    if report.num_epochs is not None:
        run = f"{counted(report.num_epochs, 'epoch')} ({run})"
    return f"{run} would take {about(num_steps * report.seconds)} (modelled)."


def step_lines(tpu: TpuSlice, rows: int, length: int, num_micro_batches: int) -> dict[str, str]:
    num_tokens = rows * length * num_micro_batches * tpu.num_replicas
    return {
        "slice": f"{tpu.name}: {counted(tpu.num_chips, 'chip')}, {counted(tpu.num_replicas, 'replica')}",
        "step": f"{rows} rows x {length:,} tokens x {counted(num_micro_batches, 'micro-batch')} x "
        f"{counted(tpu.num_replicas, 'replica')} = {num_tokens:,} tokens",
    }


def report_lines(report: StepReport) -> dict[str, str]:
    tpu, compiled, costs = report.tpu, report.compiled, report.costs
    limit_bytes = tpu.chip.usable_memory_bytes
    free_bytes = limit_bytes - compiled.memory_bytes
    in_use = f": at most {compiled.peak_bytes / GIB:.2f} are in use at one time" if compiled.peak_bytes else ""
    room = f"{free_bytes / GIB:.2f} free" if free_bytes >= 0 else f"which the compiler accepts{in_use}"
    needed = f", {report.needed_flops / 1e12:.3g} that the model needs" if report.needed_flops else ""
    lines = {
        **step_lines(tpu, report.rows, report.length, report.num_micro_batches),
        f"memory per {tpu.replica_unit}": f"{compiled.memory_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB, {room}",
        "  of which": f"arguments {compiled.argument_bytes / GIB:.2f} (weights, optimizer, rows), "
        f"temporaries {compiled.temp_bytes / GIB:.2f}, program {compiled.generated_code_bytes / GIB:.2f}",
        "operations": f"{report.num_flops / 1e12:.3g} TFLOP per replica and step as compiled{needed}",
        "modelled step time": f"{two_digits(report.seconds * 1e3)} ms: {costs.num_cycles / 1e6:.1f} million cycles at "
        f"{tpu.chip.clock_hertz / 1e9:.2f} GHz",
        "  not in it": "communication between chips, waiting for input, "
        f"{costs.num_not_estimated} operations without an estimate (mostly table lookups)",
        "between chips": between_chips(report),
        "modelled tokens/s": f"{two_digits(report.slice_tokens_per_second / tpu.num_chips)} per chip, "
        f"{two_digits(report.slice_tokens_per_second)} for the slice",
        "modelled MFU": "not known for this architecture"
        if report.peak_fraction is None
        else f"{two_digits(100 * report.peak_fraction)}% of {tpu.chip.peak_flops_per_second / 1e12:.1f} TFLOP/s per "
        "replica",
    }
    if costs.num_loops_of_unknown_length:
        number = costs.num_loops_of_unknown_length
        lines["loops"] = f"{number} of unknown length count as one repetition, so the time is too low"
    return lines


def between_chips(report: StepReport) -> str:
    sizes = ", ".join(f"{name.replace('_', '-')} of {size / 1e9:.2f} GB" for name, size in report.collectives.items())
    if report.tpu.num_chips == 1 or not sizes:
        return "nothing"
    num_bytes = sent_bytes(report.collectives, report.tpu)
    bytes_per_second = INTERCONNECT_BYTES_PER_SECOND[report.tpu.chip.generation]
    return (
        f"{num_bytes / 1e9:.2f} GB sent by each chip ({sizes}): at least "
        f"{two_digits(num_bytes / bytes_per_second * 1e3)} ms at the published {bytes_per_second / 1e9:.0f} GB/s, "
        "modelled"
    )


def print_without_sharding(outcome: StepReport | DoesNotFitError) -> None:
    """Print the report of the step without `--shard-optimizer`; leave out the lines that the flag does not change."""
    print("\nthe same step without --shard-optimizer")
    if isinstance(outcome, DoesNotFitError):
        print(outcome)
        return
    lines = report_lines(outcome)
    for title in list(lines)[list(lines).index("step") + 1 :]:
        print(f"{title:<20} {lines[title]}")


def print_batches(outcomes: Mapping[int, StepReport | DoesNotFitError]) -> None:
    """Print a line for each batch that was compiled, and name the fastest batch.

    Args:
        outcomes: {rows per replica: report, or the error of a batch that does not fit}; at least one batch fits.
    """
    print("\nrows per replica   GiB   modelled ms   modelled tokens/s per chip")
    for rows, outcome in sorted(outcomes.items()):
        if isinstance(outcome, DoesNotFitError):
            print(f"{rows:16d} {outcome.needed_bytes / GIB:5.2f}   does not fit")
        else:
            tokens_per_second = outcome.slice_tokens_per_second / outcome.tpu.num_chips
            memory_gib, milliseconds = outcome.compiled.memory_bytes / GIB, outcome.seconds * 1e3
            print(f"{rows:16d} {memory_gib:5.2f} {two_digits(milliseconds):>13} {two_digits(tokens_per_second):>28}")
    reports = [outcome for outcome in outcomes.values() if isinstance(outcome, StepReport)]
    fastest = max(reports, key=lambda report: report.slice_tokens_per_second)
    if fastest.rows < max(report.rows for report in reports):
        print(
            f"\nThe largest batch is not the fastest: close to the memory limit, the compiler recomputes what it "
            f"cannot keep in memory. {fastest.rows} rows are the fastest of these; raise --gradient-accumulation-steps "
            "to keep the global batch."
        )


def short_name(name: str) -> str:
    """Shorten an operation's name to its last parts, and prefix it with "gradient of" if it belongs to the gradient."""
    first = name.split(";")[0]
    return ("gradient of " if "gradient_tape" in first else "") + "/".join(first.split("/")[-4:])


def _percent(num_cycles: int, costs: StepCosts) -> str:
    return f"{100 * num_cycles / costs.num_cycles:5.1f}%"
