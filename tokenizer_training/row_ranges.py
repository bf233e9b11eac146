"""The rows of a text file that begin in a range of its bytes, so that several processes can read one file.

A row ends with `\\n`, `\\r\\n` or `\\r`. Ranges that share no byte share no row, wherever a file is cut.
"""

import io
import re
from collections.abc import Iterator
from typing import Any

# Looked through for the end of a row that has begun before; most rows are shorter.
ROW_END_BYTES = 1 << 16

# A last `\r` is left out: whether a `\n` belongs to it is seen with the next piece.
_ROW_END = re.compile(rb"\r\n|\r(?!\Z)|\n")


def first_row(file: io.RawIOBase, start: int, stop: int) -> int:
    """Return the position at which the first row begins in bytes [start, stop), or one from `stop` on where none."""
    position = start
    for piece in _rest_of_row(file, start):
        position += len(piece)
        if position >= stop:
            break
    return position


def row_bytes(file: io.RawIOBase, start: int, stop: int, piece_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of all rows that begin in bytes [start, stop), the last of them to its end, in pieces.

    A piece has at most `piece_bytes`, but for what is read of the last row.
    """
    position = first_row(file, start, stop)
    if position >= stop:
        return
    file.seek(position)
    while position < stop:
        piece = file.read(min(piece_bytes, stop - position))
        if not piece:
            return
        position += len(piece)
        yield piece
    yield from _rest_of_row(file, stop)


def _rest_of_row(file: io.RawIOBase, position: int) -> Iterator[bytes]:
    """Yield the bytes from `position` to where the next row begins: none, should one begin there."""
    if position == 0:
        return
    file.seek(position - 1)
    num_skipped = 1  # the byte before, which may end a row
    may_end_here = False
    while piece := file.read(num_skipped + ROW_END_BYTES):
        if may_end_here:
            yield piece[: piece.startswith(b"\n")]
            return
        row_end = _ROW_END.search(piece)
        yield piece[num_skipped : row_end.end() if row_end else None]
        if row_end:
            return
        num_skipped, may_end_here = 0, piece.endswith(b"\r")


class PiecesReader(io.RawIOBase):
    """A file whose content is that of the pieces, one after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or a part of it, and return the number of bytes; 0 at the end."""
        if not self._left:
            self._left = memoryview(next(self._pieces, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size
