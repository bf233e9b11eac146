"""Print the machine, plain-text tables, and medians with their ranges, in all benchmarks."""

import os
import platform
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.measuring.rounds import Times


def print_machine() -> None:
    print(f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}")


def print_table(header: str, rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells below a header whose titles are separated by `|`. Only the first column is left-aligned."""
    table = [header.split("|"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def median_and_range(values: Sequence[float], form: str) -> list[str]:
    """Return two cells: the median, and the lowest and highest value, in a format such as `.2f`."""
    return [f"{statistics.median(values):{form}}", f"({min(values):{form}}-{max(values):{form}})"]


def ratios_of_rounds(first: Sequence[Times], second: Sequence[Times]) -> list[str]:
    """Return three cells: how many times as fast `first` is as `second`, the range, and the ratio of CPU seconds."""
    pairs = list(zip(first, second, strict=True))
    cpu_ratio = statistics.median(theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs)
    return [*median_and_range([theirs.seconds / ours.seconds for ours, theirs in pairs], ".2f"), f"{cpu_ratio:.2f}"]
