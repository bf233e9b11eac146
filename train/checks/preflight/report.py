"""What the preflight prints of a step that was compiled for a TPU; every time in it is modelled by the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass

from train.checks.preflight.hlo_costs import StepCosts
from train.checks.preflight.tpu_compiler import CompiledStep, DoesNotFitError
from train.checks.preflight.tpu_slices import TpuSlice

GIB = 2**30
NUM_OPERATIONS = 10


@dataclass(frozen=True)
class StepReport:
    """One step, compiled, of `num_micro_batches` times (rows, length) a replica.

    needed_flops: operations that a replica's share of the model needs; None if not known.
    num_steps: of the planned run; None where nothing tells.
    """

    tpu: TpuSlice
    compiled: CompiledStep
    costs: StepCosts
    rows: int
    length: int
    num_micro_batches: int
    needed_flops: int | None
    num_steps: int | None

    @property
    def seconds(self) -> float:
        """Modelled seconds of a step."""
        return self.costs.num_cycles / self.tpu.chip.clock_hertz

    @property
    def num_flops(self) -> float:
        """Operations of a replica's step as compiled: the compiler counts the loop over micro-batches as one turn."""
        return self.compiled.num_flops * self.num_micro_batches

    @property
    def replica_tokens(self) -> int:
        """Tokens that a replica takes in a step."""
        return self.rows * self.num_micro_batches * self.length

    @property
    def slice_tokens_per_second(self) -> float:
        """Modelled tokens a second of all replicas."""
        return self.tpu.num_replicas * self.replica_tokens / self.seconds

    @property
    def peak_share(self) -> float | None:
        """Modelled share of the peak that goes into what the model needs (MFU)."""
        if self.needed_flops is None:
            return None
        return self.needed_flops / self.seconds / self.tpu.chip.peak_flops_per_second


def print_report(report: StepReport) -> None:
    """Print the figures of a step, its cycles by kind of layer, and its most expensive operations."""
    versions = ", ".join(f"{name} {version}" for name, version in report.compiled.versions.items())
    print(f"Modelled by the TPU's compiler ({versions}); nothing here was measured on a TPU.\n")
    for title, text in report_lines(report).items():
        print(f"{title:<20} {text}")
    costs = report.costs
    print("\nmodelled cycles of each kind of layer, forward and backward")
    for kind, num_cycles in costs.cycles_by_kind.items():
        print(f"{_percent(num_cycles, costs)}  {num_cycles / 1e6:8.2f} M  {kind}")
    print(f"\nthe {NUM_OPERATIONS} most expensive operations, each with what is fused into it, over all layers")
    for kind in costs.cycles_by_kind:
        for operation in costs.operations[:NUM_OPERATIONS]:
            if operation.kind == kind:
                print(f"{_percent(operation.num_cycles, costs)}  {kind:<14} {short_name(operation.name)}")


def report_lines(report: StepReport) -> dict[str, str]:
    """Write the figures of a step as {title: text}, for people."""
    tpu, compiled, costs = report.tpu, report.compiled, report.costs
    limit_bytes = tpu.chip.usable_memory_bytes
    free_bytes = limit_bytes - compiled.memory_bytes
    # Near the limit the parts together can be more than the chip has.
    in_use = f": at most {compiled.peak_bytes / GIB:.2f} are in use at one time" if compiled.peak_bytes else ""
    accepted = f"which the compiler accepts{in_use}"
    room = f"head-room {free_bytes / GIB:.2f}" if free_bytes >= 0 else accepted
    needed = f", {report.needed_flops / 1e12:.3g} that the model needs" if report.needed_flops else ""
    lines = {
        "slice": f"{tpu.name}: {tpu.num_chips} chip(s), {tpu.num_replicas} replica(s)",
        "step": f"{report.rows} rows x {report.length} tokens x {report.num_micro_batches} micro-batch(es) x "
        f"{tpu.num_replicas} replica(s) = {report.replica_tokens * tpu.num_replicas:,} tokens",
        "memory a replica": f"{compiled.memory_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB, {room}",
        "  of which": f"arguments {compiled.argument_bytes / GIB:.2f} (weights, optimizer, rows), "
        f"temporaries {compiled.temp_bytes / GIB:.2f}, program {compiled.generated_code_bytes / GIB:.2f}",
        "operations": f"{report.num_flops / 1e12:.3g} TFLOP a replica and step as compiled{needed}",
        "modelled step time": f"{report.seconds * 1e3:.2f} ms: {costs.num_cycles / 1e6:.1f} million cycles at "
        f"{tpu.chip.clock_hertz / 1e9:.2f} GHz",
        "  not in it": f"summing {costs.summed_bytes / 1e9:.2f} GB over the replicas, waiting for input, "
        f"{costs.num_not_estimated} operations without an estimate (most are lookups in tables)",
        "modelled tokens/s": f"{report.slice_tokens_per_second / tpu.num_chips:,.0f} a chip, "
        f"{report.slice_tokens_per_second:,.0f} for the slice",
        "modelled MFU": "not known for this architecture"
        if report.peak_share is None
        else f"{100 * report.peak_share:.1f} % of {tpu.chip.peak_flops_per_second / 1e12:.1f} TFLOP/s a replica",
        "planned run": "unknown: give --max-steps, or shards of at least a batch"
        if report.num_steps is None
        else f"{report.num_steps:,} steps, {report.num_steps * report.seconds / 86400:.2f} days as modelled",
    }
    if costs.num_loops_of_unknown_length:
        lines["loops"] = f"{costs.num_loops_of_unknown_length} of unknown length count as one turn: the time is too low"
    return lines


def print_batches(tried: Mapping[int, StepReport | DoesNotFitError]) -> None:
    """Print a line for each batch that was compiled, by its rows, and which was the fastest; one of them fits."""
    print("\nrows a replica   GiB   modelled ms   modelled tokens/s a chip")
    for rows, outcome in sorted(tried.items()):
        if isinstance(outcome, DoesNotFitError):
            print(f"{rows:14d} {outcome.needed_bytes / GIB:5.2f}   does not fit")
        else:
            tokens_per_second = outcome.slice_tokens_per_second / outcome.tpu.num_chips
            memory_gib, milliseconds = outcome.compiled.memory_bytes / GIB, outcome.seconds * 1e3
            print(f"{rows:14d} {memory_gib:5.2f} {milliseconds:13.1f} {tokens_per_second:26,.0f}")
    reports = [outcome for outcome in tried.values() if isinstance(outcome, StepReport)]
    fastest = max(reports, key=lambda report: report.slice_tokens_per_second)
    if fastest.rows < max(report.rows for report in reports):
        print(
            f"\n{fastest.rows} rows, with as many times more --gradient-accumulation-steps, are faster than more: near "
            "the limit the compiler computes again what it has no room to keep"
        )


def short_name(name: str) -> str:
    """Shorten an operation's name to its end, and whether it belongs to the gradient."""
    first = name.split(";")[0]
    return ("gradient of " if "gradient_tape" in first else "") + "/".join(first.split("/")[-4:])


def _percent(num_cycles: int, costs: StepCosts) -> str:
    return f"{100 * num_cycles / costs.num_cycles:5.1f} %"
