"""Tables of plain text."""

from collections.abc import Iterable, Sequence


def print_table(header: str, rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells below their header, divided at `|`: the first column to the left, the others to the right."""
    table = [header.split("|"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
