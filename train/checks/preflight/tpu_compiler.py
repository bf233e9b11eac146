"""Compile a train step with the TPU's compiler, without a TPU, for any slice; find the largest batch that fits.

The package `libtpu` on PyPI contains the compiler that a TPU VM uses. JAX's ahead-of-time interface
(https://docs.jax.dev/en/latest/aot.html) runs it for a TPU given only by its description. The results are estimates:
memory is what the compiler allocates, and cycles come from its cost model.
"""

import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlm_common.errors import InputError, RunFailedError
from train.checks.preflight.tpu_compiler_process import HLO_NAME, RESULT_NAME
from train.runtime.machines import Chip, chip_of, num_replicas_of

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 30
# A TPU pads the rows of a batch to a multiple of eight, the sublanes of its registers.
ROWS_UNIT = 8
FIX_MISSING = (
    "Install it (Linux on x86-64): python3 install.py --extra preflight, then source .venv-preflight/bin/activate and "
    "run this again; or name an interpreter that has both with --compiler-python."
)
# Messages of libtpu for a program that is too large, with the memory that it needs and the memory of the chip.
OUT_OF_MEMORY = (
    re.compile(
        r"total memory required[^(]*\((?P<needed>[\d.]+[KMGT]?)\) exceeds available HBM \((?P<limit>[\d.]+\w?)\)"
    ),
    re.compile(r"Used (?P<needed>[\d.]+[KMGT]?) of (?P<limit>[\d.]+[KMGT]?) hbm"),
)
# Keep libtpu from looking for a TPU, on this machine or through the metadata server: here it only compiles.
COMPILER_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The sizes that Google offers, by generation, as in the names of slices: cores for v2, v3, v4 and v5p, chips for v5e
# and v6e (cloud.google.com/tpu/docs/v2 to v6e).
SIZES = {
    "v2": (8, 32, 128, 256, 512),
    "v3": (8, 32, 64, 128, 256, 512, 1024, 2048),
    "v4": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    "v5e": (1, 4, 8, 16, 32, 64, 128, 256),
    "v5p": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    "v6e": (1, 4, 8, 16, 32, 64, 128, 256),
}
SLICES = ", ".join(f"{generation}-{'/'.join(map(str, sizes))}" for generation, sizes in SIZES.items())
# Generations in which the two cores of a chip are two replicas.
GENERATIONS_OF_TWO_REPLICAS = ("v2", "v3")


@dataclass(frozen=True)
class TpuSlice:
    """A slice: a group of TPU chips that is rented together.

    Attributes:
        name: Google's name, such as `v5e-8`.
        chip: the kind of its chips.
        num_replicas: number of replicas.
        num_chips: number of chips.
        compiler_name: libtpu's name of the topology, such as `v5e:2x4`.
        chip_config: libtpu's name for how the cores of a chip work together; `megacore` combines two cores into one
        replica.
    """

    name: str
    chip: Chip
    num_replicas: int
    num_chips: int
    compiler_name: str
    chip_config: str

    @property
    def replica_unit(self) -> str:
        """The unit that a replica runs on and whose memory it has: a `core` for v2 and v3, otherwise a `chip`."""
        return "core" if self.chip.generation in GENERATIONS_OF_TWO_REPLICAS else "chip"


def tpu_slice(name: str) -> TpuSlice:
    chip, num_replicas = chip_of(name), num_replicas_of(name)
    if chip is None or num_replicas is None or int(name.rpartition("-")[2]) not in SIZES[chip.generation]:
        raise InputError(f"--topology: there is no TPU slice {name}. The slices are {SLICES}.")
    num_chips = num_replicas // (2 if chip.generation in GENERATIONS_OF_TWO_REPLICAS else 1)
    return TpuSlice(
        name=name,
        chip=chip,
        num_replicas=num_replicas,
        num_chips=num_chips,
        compiler_name=f"{chip.generation}:{_shape(chip.generation, num_chips)}",
        chip_config="megacore" if chip.generation == "v4" else "default",
    )


def _shape(generation: str, num_chips: int) -> str:
    """Return the number of chips in each dimension, as near to a square or a cube as possible, like Google's slices."""
    num_doublings = int(math.log2(num_chips))
    if generation not in ("v4", "v5p"):  # chips of v4 and v5p are linked in three dimensions, all others in two
        doublings = [num_doublings // 2, num_doublings - num_doublings // 2]
    elif num_doublings <= 2:
        doublings = [num_doublings - num_doublings // 2, num_doublings // 2, 0]  # one host: 2x2x1
    else:
        doublings = [(num_doublings + axis) // 3 for axis in range(3)]
    return "x".join(str(2**count) for count in doublings)


@dataclass(frozen=True)
class CompiledStep:
    """The compiler's results for the program of one replica; all numbers are estimates.

    Attributes:
        argument_bytes: weights, optimizer and input rows.
        output_bytes: the results.
        alias_bytes: results that are written to the memory of an argument.
        temp_bytes: temporary arrays.
        generated_code_bytes: the program.
        peak_bytes: the most memory in use at one time. In a tiny program it exceeds the sum of the parts; in a large
            program it is less. None if jax does not report it, as on Python 3.10.
        num_flops: floating-point operations, with the body of a loop counted once.
        num_bytes_accessed: bytes read and written, counted in the same way.
        hlo: text of the compiled program.
        versions: versions of jax and libtpu.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int
    peak_bytes: int | None
    num_flops: float
    num_bytes_accessed: float
    hlo: str
    versions: dict[str, str]

    @property
    def memory_bytes(self) -> int:
        """The total memory of all parts of the step."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.generated_code_bytes


class DoesNotFitError(RunFailedError):
    """The program needs `needed_bytes` of memory, more than the chip's `limit_bytes`."""

    def __init__(self, needed_bytes: int, limit_bytes: int):
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        super().__init__(
            f"It does not fit: the step needs {needed_bytes / 2**30:.2f} GiB of memory per replica, "
            f"{(needed_bytes - limit_bytes) / 2**30:.2f} GiB more than the {limit_bytes / 2**30:.2f} GiB available."
        )


def check_compiler(python: str) -> None:
    try:
        done = subprocess.run(
            [python, "-c", "import jax, libtpu"], env=_environment(), capture_output=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise InputError(f"--compiler-python: {python} is not a Python interpreter ({error.strerror}).") from error
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise InputError(
            f"The preflight needs the TPU's compiler (the packages jax and libtpu); {python} says: {last_line}. "
            f"{FIX_MISSING}"
        )


def compile_for_tpu(
    stablehlo: str, tpu: TpuSlice, *, python: str = sys.executable, what: str = "the step"
) -> CompiledStep:
    """Compile the program of one replica, which takes minutes; log the progress.

    Args:
        stablehlo: text of the module, whose `main` is the program.
        tpu: the slice to compile for.
        python: a Python interpreter that has jax and libtpu.
        what: name of the program in the log.

    Raises:
        DoesNotFitError: the program needs more memory than the chip has.
        RunFailedError: the program does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-compiler-") as name:
        folder = Path(name)
        step = folder / "step.mlir"
        step.write_text(stablehlo, encoding="utf-8")
        program = str(Path(__file__).with_name("tpu_compiler_process.py"))
        slice_arguments = (tpu.compiler_name, tpu.chip_config, str(tpu.num_replicas))
        command = [python, program, *slice_arguments, str(step), str(folder)]
        result = _run_compiler(command, folder, f"{what} for {tpu.name}")
        if "error" in result:
            raise _error(result["error"])
        return CompiledStep(hlo=(folder / HLO_NAME).read_text(encoding="utf-8"), **result)


def _environment() -> dict[str, str]:
    """Return this process's environment without the path of TensorFlow's libtpu, for the compiler."""
    inherited = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    return inherited | COMPILER_ENVIRONMENT


def _run_compiler(command: list[str], folder: Path, what: str) -> dict:
    started_seconds = time.monotonic()
    logger.info("compiling %s; for a roberta-base, this takes 3 to 6 minutes on two cores", what)
    with (folder / "messages").open("w+", encoding="utf-8", errors="replace") as messages:
        process = subprocess.Popen(command, stdout=messages, stderr=messages, env=_environment())
        try:
            while True:
                try:
                    status = process.wait(timeout=PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    logger.info("compiling %s: %.0f s", what, time.monotonic() - started_seconds)
        finally:
            process.kill()  # if this process was interrupted
            process.wait()
        result_path = folder / RESULT_NAME
        if status or not result_path.exists():
            messages.seek(0)
            output = messages.read().strip()[-2000:]
            logger.warning("The last messages of the TPU's compiler:\n%s", output)
            reason = "it was killed; this machine may have too little memory for it" if status < 0 else ""
            reason = reason or output.rpartition("\n")[2] or "it printed nothing"
            raise RunFailedError(f"The TPU's compiler ended with status {status}: {reason}")
    return json.loads(result_path.read_text(encoding="utf-8"))


def _error(message: str) -> RunFailedError:
    for pattern in OUT_OF_MEMORY:
        match = pattern.search(message)
        if match:
            return DoesNotFitError(_num_bytes(match["needed"]), _num_bytes(match["limit"]))
    return RunFailedError(f"The step does not compile for this TPU: {message[:2000]}")


def _num_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([KMGT]?)", text).groups()  # type: ignore[union-attr]  # matched before
    return int(float(number) * UNITS[unit])


@dataclass(frozen=True)
class MemoryUse:
    """The memory that a batch needs.

    Attributes:
        fits: whether the batch fits.
        used_bytes: all memory that the batch needs.
        fixed_bytes: the part of `used_bytes` that does not grow with the batch (weights, optimizer).
        limit_bytes: the memory available.
    """

    fits: bool
    used_bytes: int
    fixed_bytes: int
    limit_bytes: int


def largest_fitting(measure: Callable[[int], MemoryUse], first_rows: int) -> int | None:
    """Find the largest multiple of `ROWS_UNIT` rows that fits; None if not even `ROWS_UNIT` rows fit.

    Memory grows by nearly the same amount with every row, so each guess extrapolates from the two largest batches known
    to fit. The search ends when a batch fits and the next larger batch is known not to fit.

    Args:
        measure: compiles the step for a number of rows, and returns its memory; called once for each number.
        first_rows: number of rows to try first.
    """
    fitting: dict[int, MemoryUse] = {}
    too_large: int | None = None
    stride = 1
    guess = max(1, first_rows // ROWS_UNIT)
    while True:
        use = measure(guess * ROWS_UNIT)
        if use.fits:
            fitting[guess] = use
        else:
            too_large, stride = guess, 1
        largest = max(fitting, default=0)
        if too_large is not None and too_large - largest == 1:
            return largest * ROWS_UNIT or None
        guess = _predict(fitting, use, guess)
        if guess <= largest:
            # Near the limit the compiler recomputes to save memory, so more may fit than predicted.
            guess = largest + stride
            stride *= 2
        if too_large is None:
            guess = min(guess, 4 * largest)  # an extrapolation is not reliable far from the known batches
        elif guess >= too_large:
            guess = (largest + too_large) // 2


def _predict(fitting: dict[int, MemoryUse], latest: MemoryUse, latest_guess: int) -> int:
    """Predict the largest batch that fits, in units of `ROWS_UNIT` rows, by linear extrapolation."""
    largest = max(fitting, default=latest_guess)
    use = fitting.get(largest, latest)
    slope_bytes = (use.used_bytes - use.fixed_bytes) / largest
    if len(fitting) >= 2:
        smaller = sorted(fitting)[-2]
        # At least a quarter of the average slope: if the compiler recomputes, a larger batch may even need less memory.
        slope_bytes = max((use.used_bytes - fitting[smaller].used_bytes) / (largest - smaller), slope_bytes / 4)
    if slope_bytes <= 0:
        return 2 * largest
    return largest + int((latest.limit_bytes - use.used_bytes) // slope_bytes)
