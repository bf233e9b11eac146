"""The largest batch that fits, found with few compilations."""

from collections.abc import Callable
from dataclasses import dataclass

# The rows of a batch are padded to the eight sublanes of a TPU's registers.
ROWS_UNIT = 8


@dataclass(frozen=True)
class MemoryUse:
    """The memory that a batch needs.

    fixed_bytes: the part that does not grow with the batch (weights, optimizer); used_bytes: all.
    """

    fits: bool
    used_bytes: int
    fixed_bytes: int
    limit_bytes: int


def largest_fitting(measure: Callable[[int], MemoryUse], first_rows: int, unit: int = ROWS_UNIT) -> int | None:
    """Find the largest multiple of `unit` rows that fits; None when not even `unit` rows do.

    Memory grows nearly by the same amount with every row, so each guess follows the line through the two largest
    batches known to fit; the answer is the one that fits while the next larger one has been seen not to.

    Args:
        measure: compiles the step of a number of rows; called once for each number.
        unit: rows between two candidates.
    """
    fitting: dict[int, MemoryUse] = {}
    too_large: int | None = None
    stride = 1
    guess = max(1, first_rows // unit)
    while True:
        use = measure(guess * unit)
        if use.fits:
            fitting[guess] = use
        else:
            too_large, stride = guess, 1
        largest = max(fitting, default=0)
        if too_large is not None and too_large - largest == 1:
            return largest * unit or None
        guess = _predict(fitting, use, guess)
        if guess <= largest:
            # Near the limit the compiler recomputes to save memory, so more may fit than the line says.
            guess = largest + stride
            stride *= 2
        if too_large is None:
            guess = min(guess, 4 * largest)  # far from what is known the line is not
        elif guess >= too_large:
            guess = (largest + too_large) // 2


def _predict(fitting: dict[int, MemoryUse], latest: MemoryUse, latest_guess: int) -> int:
    known = max(fitting, default=latest_guess)
    use = fitting.get(known, latest)
    slope_bytes = (use.used_bytes - use.fixed_bytes) / known
    if len(fitting) >= 2:
        small = sorted(fitting)[-2]
        # At least a quarter of the average: where the compiler recomputes, a larger batch may even take less.
        slope_bytes = max((use.used_bytes - fitting[small].used_bytes) / (known - small), slope_bytes / 4)
    if slope_bytes <= 0:
        return 2 * known
    return known + int((latest.limit_bytes - use.used_bytes) // slope_bytes)
