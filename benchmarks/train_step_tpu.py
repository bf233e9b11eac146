"""Compare our train step with that of transformers' TPU tutorial by the TPU compiler's cost model, without a TPU.

    python benchmarks/train_step_tpu.py
    python benchmarks/train_step_tpu.py --find-batch-size      # hours, because each step is compiled several times

The model is RoBERTa-base with a vocabulary of 32,000, and the batch has 16 rows of 512 tokens on each of 8 replicas.
Lowering and compiling a step takes minutes. Needs the extra `preflight`, or --compiler-python. The tutorial's steps
also need the extra `legacy`. The cycles do not include the sum over replicas, nor operations for which the compiler has
no estimate.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.tables import print_table
from benchmarks.peers.tpu_step_contenders import CONTENDERS, add_size_flags
from train.checks.preflight.hlo_costs import StepCosts, step_costs
from train.checks.preflight.tpu_compiler import (
    CompiledStep,
    DoesNotFitError,
    MemoryUse,
    TpuSlice,
    check_compiler,
    compile_for_tpu,
    largest_fitting,
    tpu_slice,
)

PROGRAM = str(Path(__file__).resolve().parent / "peers" / "tpu_step_contenders.py")
GIB = 2**30
HEADER = "step|Mcycles|ms|of the tutorial's bf16|GB moved|temporaries GiB|of the tutorial's bf16|all memory GiB|TFLOP"
BASELINE = "tutorial-bf16"

Compiled = tuple[CompiledStep, StepCosts]


def compiled(name: str, rows: int, tpu: TpuSlice, arguments: argparse.Namespace) -> CompiledStep:
    """Compile a contender's step.

    Raises:
        DoesNotFitError: the step needs more memory than the chip has.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        path = Path(folder, "step.mlir")
        flags = [f"--rows={rows}", f"--num-replicas={tpu.num_replicas}", f"--output={path}"]
        sizes = ((size, getattr(arguments, size)) for size in ("length", "vocab_size", "num_layers"))
        flags += [f"--{size.replace('_', '-')}={value}" for size, value in sizes if value is not None]
        logging.info("lowering %s, %d rows", name, rows)
        run = subprocess.run(
            [sys.executable, PROGRAM, name, *flags], capture_output=True, encoding="utf-8", check=False
        )
        if run.returncode:
            sys.exit(f"{name} failed:\n{run.stderr[-3000:]}")
        stablehlo = path.read_text(encoding="utf-8")
        return compile_for_tpu(stablehlo, tpu, python=arguments.compiler_python, what=f"{name}, {rows} rows,")


def compiled_at(tpu: TpuSlice, arguments: argparse.Namespace) -> dict[str, Compiled]:
    """Compile the step of each contender with `--rows` rows; leave out contenders whose step does not fit."""
    results: dict[str, Compiled] = {}
    for name in arguments.contenders:
        try:
            step = compiled(name, arguments.rows, tpu, arguments)
        except DoesNotFitError as error:
            print(f"{name}: {error}")
            continue
        results[name] = step, step_costs(step.hlo)
        if arguments.keep_hlo:
            Path(arguments.keep_hlo, f"{tpu.name}-{name}.hlo").write_text(step.hlo, encoding="utf-8")
    return results


def print_steps(results: Mapping[str, Compiled], tpu: TpuSlice) -> None:
    """Print the table, with ratios to the tutorial's step in bfloat16."""
    base = results.get(BASELINE)

    def row(name: str) -> list[str]:
        step, costs = results[name]
        return [
            name,
            f"{costs.num_cycles / 1e6:.1f}",
            f"{1e3 * costs.num_cycles / tpu.chip.clock_hertz:.1f}",
            f"{costs.num_cycles / base[1].num_cycles:.3f}" if base else "",
            f"{step.num_bytes_accessed / 1e9:.1f}",
            f"{step.temp_bytes / GIB:.2f}",
            f"{step.temp_bytes / base[0].temp_bytes:.3f}" if base and base[0].temp_bytes else "",
            f"{step.memory_bytes / GIB:.2f}",
            f"{step.num_flops / 1e12:.2f}",
        ]

    print_table(HEADER, [row(name) for name in results])


def print_kinds(results: Mapping[str, Compiled]) -> None:
    """Print the cycles of each kind of layer, in millions."""
    kinds = list(dict.fromkeys(kind for _, costs in results.values() for kind in costs.cycles_by_kind))
    rows = [[kind] for kind in kinds]
    for _, costs in results.values():
        for cells in rows:
            cells.append(f"{costs.cycles_by_kind.get(cells[0], 0) / 1e6:.1f}")
    print_table("|".join(["Mcycles of", *results]), rows)


def largest_batch(name: str, step: CompiledStep, tpu: TpuSlice, arguments: argparse.Namespace) -> int | None:
    """Find the largest multiple of 8 rows that fits.

    The compiled `step` shows how much memory is independent of the number of rows.
    """

    def measure(rows: int) -> MemoryUse:
        limit_bytes = tpu.chip.usable_memory_bytes
        try:
            used = step if rows == arguments.rows else compiled(name, rows, tpu, arguments)
        except DoesNotFitError as error:
            return MemoryUse(False, error.needed_bytes, step.argument_bytes, error.limit_bytes)
        return MemoryUse(True, used.memory_bytes, used.argument_bytes, limit_bytes)

    return largest_fitting(measure, arguments.rows)


def main() -> None:
    """Print the tables of each slice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=["v5e-8", "v3-8"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rows", type=int, default=16, help="Rows per replica.")
    parser.add_argument(
        "--find-batch-size", action="store_true", help="Also search for the largest batch of each step."
    )
    parser.add_argument("--keep-hlo", help="Folder for the compiled programs, which is created if it is missing.")
    parser.add_argument("--compiler-python", default=sys.executable, help="Interpreter that has jax and libtpu.")
    add_size_flags(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if arguments.keep_hlo:
        Path(arguments.keep_hlo).mkdir(parents=True, exist_ok=True)  # before the compiler runs for minutes
    check_compiler(arguments.compiler_python)
    for tpu in map(tpu_slice, arguments.topologies):
        results = compiled_at(tpu, arguments)
        versions = ", ".join(f"{k} {v}" for k, v in next(iter(results.values()))[0].versions.items()) if results else ""
        print(f"\n{tpu.name}, {arguments.rows} x {arguments.length} per replica, modelled by the compiler ({versions})")
        print_steps(results, tpu)
        print_kinds(results)
        if arguments.find_batch_size:
            for name, (step, _) in results.items():
                largest = largest_batch(name, step, tpu, arguments)
                print(f"{name}: the largest batch that fits has {largest} rows per replica")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
