"""Rows that cannot be read: the first ends the reading, or they are left out, counted, and the first of them listed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from mlm_common.errors import InputError

OnBadRow = Literal["fail", "skip"]
MAX_LISTED = 100

# Called for a row that cannot be read: with the number of its line (or row), the rule it breaks, and what it is.
BadRowHandler = Callable[[int, str, str], None]


@dataclass(frozen=True)
class BadRow:
    """Where a row that cannot be read is, and why it cannot."""

    source: str
    place: str
    problem: str


@dataclass
class BadRows:
    """How many rows could not be read, and the first 100 of them."""

    num_rows: int = 0
    listed: list[BadRow] = field(default_factory=list)

    def add(self, num_rows: int, listed: Iterable[BadRow]) -> None:
        """Add rows that come after those before."""
        self.num_rows += num_rows
        self.listed = [*self.listed, *listed][:MAX_LISTED]

    def handler(self, on_bad_row: OnBadRow, source: str, place: Callable[[int], str]) -> BadRowHandler:
        """Make what adds a row of `source`, or raises InputError for it; `place` says where line (or row) N is."""

        def handle(number: int, rule: str, problem: str) -> None:
            if on_bad_row == "fail":
                raise InputError(
                    f"{source} must hold {rule}; {place(number)}: {problem}. Mend it, or leave out all rows that "
                    "cannot be read: --on-bad-row skip."
                )
            self.num_rows += 1
            if len(self.listed) < MAX_LISTED:
                self.listed.append(BadRow(source, place(number), problem))

        return handle

    def describe(self, num_shown: int = 1) -> str:
        """Say how many were left out, and of the first where they are and why."""
        shown = "; ".join(f"{row.source}, {row.place}: {row.problem}" for row in self.listed[:num_shown])
        return f"{self.num_rows:,} left out, such as {shown}"


def bad_rows_from_record(record: dict[str, Any]) -> BadRows:
    """Read back what `dataclasses.asdict` made."""
    return BadRows(record["num_rows"], [BadRow(**row) for row in record["listed"]])
