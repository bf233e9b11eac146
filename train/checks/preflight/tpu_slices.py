"""Slices of TPU by the names they are ordered under (`v5e-8`, `v3-32`), as TPUStrategy and libtpu see them."""

import difflib
import math
from dataclasses import dataclass

from mlm_common.errors import InputError
from train.runtime.machines import Chip, chip_of, num_replicas_of

# The sizes that Google offers, as in the names: cores up to v5p, else chips (cloud.google.com/tpu/docs/v2 to v6e).
SIZES = {
    "v2": (8, 32, 128, 256, 512),
    "v3": (8, 32, 64, 128, 256, 512, 1024, 2048),
    "v4": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    "v5e": (1, 4, 8, 16, 32, 64, 128, 256),
    "v5p": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    "v6e": (1, 4, 8, 16, 32, 64, 128, 256),
}
SLICES = ", ".join(f"{generation}-{'/'.join(map(str, sizes))}" for generation, sizes in SIZES.items())
# Chips of these are linked in three dimensions, those of the others in two.
GENERATIONS_IN_THREE_DIMENSIONS = ("v4", "v5p")
# Two cores of a chip are two replicas.
GENERATIONS_OF_TWO_REPLICAS = ("v2", "v3")


@dataclass(frozen=True)
class TpuSlice:
    """A slice.

    compiler_name: what libtpu calls its topology, as in `v5e:2x4`.
    chip_config: libtpu's name for how the cores of a chip work together; "megacore" makes one replica of two.
    """

    name: str
    chip: Chip
    num_replicas: int
    num_chips: int
    compiler_name: str
    chip_config: str

    @property
    def replica_unit(self) -> str:
        """What has a replica's memory: a `core` of a v2 or v3, else a whole `chip`."""
        return "core" if self.chip.generation in GENERATIONS_OF_TWO_REPLICAS else "chip"


def tpu_slice(name: str) -> TpuSlice:
    """Look up the slice of that name.

    Raises:
        InputError: no slice has that name.
    """
    chip, num_replicas = chip_of(name), num_replicas_of(name)
    if chip is None or num_replicas is None or _size(name) not in SIZES[chip.generation]:
        raise InputError(
            f"--topology: there is no TPU slice {name}; did you mean {_nearest(name, chip)}? The slices are {SLICES}."
        )
    num_chips = num_replicas // (2 if chip.generation in GENERATIONS_OF_TWO_REPLICAS else 1)
    return TpuSlice(
        name=name,
        chip=chip,
        num_replicas=num_replicas,
        num_chips=num_chips,
        compiler_name=f"{chip.generation}:{_shape(chip.generation, num_chips)}",
        chip_config="megacore" if chip.generation == "v4" else "default",
    )


def _size(name: str) -> int:
    """Read the number at the end of a name, 0 without one."""
    digits = name.strip().rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _nearest(name: str, chip: Chip | None) -> str:
    """Find the slice of the most similar name: where the generation is known, of the nearest size."""
    size = _size(name)
    if chip is not None and size:
        # Of two as near as each other, the larger.
        nearest = min(reversed(SIZES[chip.generation]), key=lambda one: abs(math.log(one / size)))
        return f"{chip.generation}-{nearest}"
    names = [f"{generation}-{one}" for generation, sizes in SIZES.items() for one in sizes]
    return (difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5) or ["v5e-8"])[0]


def _shape(generation: str, num_chips: int) -> str:
    """Lay the chips out in each dimension: the nearest to a square or a cube, as Google's slices are."""
    num_doublings = int(math.log2(num_chips))
    if generation not in GENERATIONS_IN_THREE_DIMENSIONS:
        doublings = [num_doublings // 2, num_doublings - num_doublings // 2]
    elif num_doublings <= 2:
        doublings = [num_doublings - num_doublings // 2, num_doublings // 2, 0]  # one host: 2x2x1
    else:
        doublings = [(num_doublings + axis) // 3 for axis in range(3)]
    return "x".join(str(2**count) for count in doublings)
