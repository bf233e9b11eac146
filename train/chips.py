"""The TPU generations by replica of TensorFlow's TPUStrategy: a core up to v3, a whole chip from v4 on.

Peaks, memory and bandwidth are those of Google's documentation (cloud.google.com/tpu/docs/v3 to v6e), halved for a core
of v3. v2's, and the clocks of v2 and v3, are of Jouppi et al. 2020, "A Domain-Specific Supercomputer for Training Deep
Neural Networks"; v4's clock is of Jouppi et al. 2023 (arXiv 2304.01433). The other clocks follow from the peak and the
matrix units. `usable_memory_bytes` is what the TPU compiler (libtpu 0.0.42) leaves to a program: it names the figure
when it refuses one that is too large.
"""

import os
import re
from dataclasses import dataclass

from train.machine_metadata import read_metadata

GIB = 2**30
ACCELERATOR_TYPE_VARIABLE = "TPU_ACCELERATOR_TYPE"


@dataclass(frozen=True)
class Chip:
    """What one replica has of a TPU generation.

    cores_per_replica: TensorCores that work as one.
    names_count_cores: whether the number in `v3-8` is of cores, as up to v5p, or of chips.
    """

    generation: str
    peak_flops_per_second: float  # bfloat16
    memory_bytes: int
    usable_memory_bytes: int
    memory_bytes_per_second: float
    clock_hertz: float
    cores_per_replica: int
    names_count_cores: bool


CHIPS = {
    chip.generation: chip
    for chip in (
        Chip("v2", 23e12, 8 * GIB, int(7.48 * GIB), 350e9, 0.70e9, 1, True),
        Chip("v3", 61.5e12, 16 * GIB, int(15.48 * GIB), 450e9, 0.94e9, 1, True),
        Chip("v4", 275e12, 32 * GIB, int(30.75 * GIB), 1200e9, 1.05e9, 2, True),
        Chip("v5e", 197e12, 16 * GIB, int(15.75 * GIB), 819e9, 1.50e9, 1, False),
        Chip("v5p", 459e12, 96 * GIB, int(95.73 * GIB), 2765e9, 1.75e9, 2, True),
        Chip("v6e", 918e12, 32 * GIB, int(31.25 * GIB), 1640e9, 1.75e9, 1, False),
    )
}
# What the TPU runtime and the TPU API call them besides.
OTHER_NAMES = {"v5litepod": "v5e", "v5 lite": "v5e", "v5lite": "v5e", "v5": "v5p", "v6 lite": "v6e", "v6lite": "v6e"}
NAME = re.compile(r"(?:TPU )?(?P<generation>v\d+(?: ?lite(?:pod)?|[ep])?)(?:-(?P<count>\d+))?", re.IGNORECASE)


def chip_of(name: str | None) -> Chip | None:
    """Return the chip of an accelerator type (`v3-8`, `v5litepod-8`, `v5e-8`) or device kind (`TPU v5 lite`).

    None for a CPU, a GPU, a generation not in the table, or None.
    """
    match = NAME.fullmatch((name or "").strip())
    if match is None:
        return None
    generation = match["generation"].lower()
    return CHIPS.get(OTHER_NAMES.get(generation, generation))


def num_replicas_of(accelerator_type: str) -> int | None:
    """Return the replicas of TPUStrategy on an accelerator type: 8 on `v3-8` and `v5e-8`, 4 on `v4-8`.

    None where type or count is not known.
    """
    chip, match = chip_of(accelerator_type), NAME.fullmatch(accelerator_type.strip())
    if chip is None or match is None or match["count"] is None:
        return None
    count = int(match["count"])
    return max(1, count // chip.cores_per_replica) if chip.names_count_cores else count


def local_accelerator_type(timeout_seconds: float = 2.0) -> str | None:
    """Return the accelerator type of the TPU VM this runs on, from environment or metadata server; None elsewhere."""
    named = os.environ.get(ACCELERATOR_TYPE_VARIABLE)
    if named:
        return named
    return read_metadata("instance/attributes/accelerator-type", timeout_seconds) or None
