"""The order of training rows: a pure function of (seed, epoch, position), without a shuffle buffer.

In each epoch the shards are permuted by a hash of (seed, epoch, name); consecutive shards form a window, which is
permuted as a whole. So the row at any position is found by arithmetic, and a run resumes by opening one window.
"""

import hashlib
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Shards that are read together and permuted with `seed`; the first `num_skipped_rows` rows are left out."""

    shard_indices: tuple[int, ...]
    seed: tuple[int, int]
    num_rows: int
    num_skipped_rows: int = 0


@dataclass(frozen=True)
class SampleOrder:
    """The order over shards given as paths and rows; `window_rows` bounds the rows in memory from below.

    A window is closed as soon as it holds `window_rows`, so it has at most that many and one shard more.
    """

    shard_paths: Sequence[str]
    num_rows_per_shard: Sequence[int]
    seed: int
    window_rows: int

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_per_shard)

    def windows(self, epoch: int) -> list[Window]:
        """Make the windows of one epoch, in the order they are read."""
        names = [posixpath.basename(path) for path in self.shard_paths]
        order = sorted(range(len(names)), key=lambda index: self._digest(epoch, names[index]))
        windows: list[Window] = []
        members: list[int] = []
        for position, index in enumerate(order):
            members.append(index)
            num_rows = sum(self.num_rows_per_shard[member] for member in members)
            if num_rows >= self.window_rows or position == len(order) - 1:
                digest = self._digest(epoch, f"window {len(windows)}")
                seed = tuple(int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4))
                windows.append(Window(tuple(members), (seed[0], seed[1]), num_rows))
                members = []
        return windows

    def from_row(self, start_row: int, num_rows: int) -> Iterator[Window]:
        """Yield the windows that hold rows `start_row` to `start_row + num_rows` of the endless stream of epochs.

        Rows before `start_row` are skipped in the first window; the last may hold more than is needed.
        """
        epoch, skip = divmod(start_row, self.num_rows)
        while num_rows > 0:
            for window in self.windows(epoch):
                if skip >= window.num_rows:
                    skip -= window.num_rows
                    continue
                yield Window(window.shard_indices, window.seed, window.num_rows, skip)
                num_rows -= window.num_rows - skip
                skip = 0
                if num_rows <= 0:
                    return
            epoch += 1

    def _digest(self, epoch: int, name: str) -> bytes:
        return hashlib.sha256(f"{self.seed}/{epoch}/{name}".encode()).digest()
