"""Slices of TPU by the names they are ordered under (`v5e-8`, `v3-32`), as TPUStrategy and libtpu see them."""

import math
from dataclasses import dataclass

from mlm_common.errors import InputError
from train.runtime.tpu import CHIPS, Chip, chip_of, num_replicas_of

EXAMPLES = "v2-8, v3-8, v4-8, v5e-8, v5p-8, v6e-8"
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


def tpu_slice(name: str) -> TpuSlice:
    """Look up the slice of that name.

    Raises:
        InputError: an unknown generation, or a number that is not a power of two with whole chips.
    """
    chip, num_replicas = chip_of(name), num_replicas_of(name)
    if chip is None or num_replicas is None:
        raise InputError(
            f"--topology must be a TPU generation ({', '.join(CHIPS)}) and its size, as in {EXAMPLES}; received {name}."
        )
    num_chips, rest = divmod(num_replicas, 2 if chip.generation in GENERATIONS_OF_TWO_REPLICAS else 1)
    if rest or num_chips < 1 or num_chips.bit_count() != 1:
        raise InputError(f"--topology must be of 1, 2, 4, 8, 16 … whole chips, as in {EXAMPLES}; received {name}.")
    return TpuSlice(
        name=name,
        chip=chip,
        num_replicas=num_replicas,
        num_chips=num_chips,
        compiler_name=f"{chip.generation}:{_shape(chip.generation, num_chips)}",
        chip_config="megacore" if chip.generation == "v4" else "default",
    )


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
