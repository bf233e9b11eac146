"""Text files, local or `gs://`: which ones a pattern names, how they are cut, and the texts in one or a part of it."""

import codecs
import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import PurePath
from typing import Any

from mlm_common.errors import InputError
from mlm_common.storage.stored_files import StoredFile, find_stored_files, open_stored, read_ahead_bytes
from tokenizer_training.corpus import text_formats

FORMAT_OF_ENDING = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# The start of a file that is searched for what no text has (as `git` does).
NUM_BYTES_CHECKED = 8000


@dataclass(frozen=True)
class Stretch:
    """Part of a file: the rows that begin in bytes [start, stop); the whole file where `stop` is None.

    `generation` is the state of a `gs://` object that is meant; one read in another is an error.
    """

    name: str
    start: int = 0
    stop: int | None = None
    generation: int | None = None


def find_files(patterns: list[str], flag: str) -> list[StoredFile]:
    """Return the files that the patterns name, each once, in the patterns' order, each glob's sorted.

    Raises:
        InputError: a pattern without a match, or a file whose ending is not one that can be read; names `flag`.
    """
    files: dict[str, StoredFile] = {}
    for pattern in patterns:
        found = find_stored_files(pattern)
        if not found:
            raise InputError(f"{flag} must name files, local or gs://; no file matches {pattern!r}.")
        for file in found:
            _format_of(file.name, flag)
            files[file.name] = file
    return list(files.values())


def can_be_cut(name: str, sample_by: str) -> bool:
    """Return whether a part of the file can be read without the rest: its rows end with its lines."""
    return name.endswith(".jsonl") or (name.endswith(".txt") and sample_by == "line")


def cut_file(name: str, num_bytes: int, sample_by: str, max_bytes: int, generation: int | None = None) -> list[Stretch]:
    """Return the file in stretches of about equal size, at most `max_bytes` each, or whole where it cannot be cut."""
    if num_bytes <= max_bytes or not can_be_cut(name, sample_by):
        return [Stretch(name, generation=generation)]
    num_stretches = -(-num_bytes // max_bytes)
    borders = [num_bytes * number // num_stretches for number in range(num_stretches + 1)]
    return [Stretch(name, start, stop, generation) for start, stop in pairwise(borders)]


def read_file(name: str, text_column: str, sample_by: str) -> Iterator[str]:
    """Yield the texts of one file, as `read_stretch` those of a part."""
    return read_stretch(Stretch(name), text_column, sample_by)


def read_stretch(stretch: Stretch, text_column: str, sample_by: str) -> Iterator[str]:
    """Yield the texts of a file or a part of it, in the file's order; an empty one for a row without text.

    Raises:
        InputError: the file is not what its ending says, is not UTF-8, or lacks the text column. Texts that come
            before the mistake may have been yielded.
        RunFailedError: Cloud Storage did not answer.
    """
    file_format = _format_of(stretch.name, "--data-files")
    try:
        if file_format == "parquet":
            with open_stored(stretch.name, stretch.generation) as raw:
                num_bytes = read_ahead_bytes(stretch.name)
                yield from text_formats.parquet_texts(io.BufferedReader(raw, num_bytes), text_column, stretch.name)
        else:
            yield from _read_text(stretch, file_format, text_column, sample_by)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        if isinstance(error, UnicodeDecodeError) and file_format != "parquet":
            _check_utf8(stretch)
        kind = "gzip" if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) else file_format
        raise InputError(
            f"{stretch.name} must be a readable {kind} file; {' '.join(str(error).split()).rstrip('.')}. "
            "Make or fetch it again, or leave it out of --data-files."
        ) from error


def _read_text(stretch: Stretch, file_format: str, text_column: str, sample_by: str) -> Iterator[str]:
    with _open(stretch) as binary:
        # Without its byte-order mark, should it have one.
        encoding = "utf-8" if stretch.start else "utf-8-sig"
        file = io.TextIOWrapper(binary, encoding, newline="" if file_format == "csv" else None)
        if file_format == "text":
            yield from text_formats.plain_texts(file, sample_by)
        elif file_format == "csv":
            yield from text_formats.csv_texts(file, text_column, stretch.name)
        else:
            check_column = partial(_check_json_column, stretch, text_column)
            place = partial(_place, stretch)
            yield from text_formats.json_texts(file, text_column, stretch.name, place, check_column)


@contextmanager
def _open(stretch: Stretch) -> Iterator[Any]:
    """Give the uncompressed bytes of a stretch, after a look at how its file starts."""
    with open_stored(stretch.name, stretch.generation) as raw:
        if stretch.name.endswith(".gz"):
            unzipped = gzip.GzipFile(fileobj=io.BufferedReader(raw, read_ahead_bytes(stretch.name)))
            _check_start(stretch.name, unzipped.peek(NUM_BYTES_CHECKED)[:NUM_BYTES_CHECKED])
            yield unzipped
        else:
            _check_start(stretch.name, raw.read(NUM_BYTES_CHECKED) or b"")
            if stretch.generation is None and raw.seek(0, io.SEEK_END) < (stretch.stop or 0):
                raise InputError(f"{stretch.name} must stay as it is while it is read; it became shorter. Start again.")
            pieces = row_bytes(raw, stretch.start, _stop(stretch), read_ahead_bytes(stretch.name))
            yield io.BufferedReader(PiecesReader(pieces))


def _stop(stretch: Stretch) -> int:
    return sys.maxsize if stretch.stop is None else stretch.stop


def _place(stretch: Stretch, line_number: int) -> str:
    """Return where a line of a stretch is: its number in the file, or the byte at which it begins."""
    if not stretch.start:
        return f"line {line_number}"
    with _open(stretch) as binary:
        # Line ends as they are, and what is no UTF-8 further down is no concern here.
        lines = io.TextIOWrapper(binary, "utf-8", "surrogateescape", newline="")
        num_bytes = sum(len(line.encode("utf-8", "surrogateescape")) for line in islice(lines, line_number - 1))
    return f"the line at byte {_first_byte(stretch) + num_bytes}"


def _first_byte(stretch: Stretch) -> int:
    with open_stored(stretch.name, stretch.generation) as raw:
        return first_row(raw, stretch.start, _stop(stretch))


def _check_json_column(stretch: Stretch, text_column: str) -> None:
    """Raise InputError where the first rows of the whole file lack the column; later ones may."""
    with _open(replace(stretch, start=0, stop=None)) as binary:
        file = io.TextIOWrapper(binary, "utf-8-sig")
        text_formats.check_json_column(file, text_column, stretch.name)


def _check_start(name: str, start: bytes) -> None:
    """Raise InputError for a start with a zero byte: that of a binary file or of UTF-16, which can pass for UTF-8."""
    before, zero, _ = start.partition(b"\0")
    if zero:
        _check_decoding(name, io.BytesIO(before), 0)
        raise _not_text(name, len(before), 0)


def _check_utf8(stretch: Stretch) -> None:
    """Raise InputError for the first byte of a stretch that is not UTF-8, should there be one."""
    with _open(stretch) as binary:
        _check_decoding(stretch.name, binary, _first_byte(stretch) if stretch.start else 0)


def _check_decoding(name: str, file: Any, num_bytes_before: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = num_bytes_before
    piece = b"-"
    while piece:
        piece = file.read(1 << 20)  # in pieces, to save memory
        num_bytes += len(piece)
        try:
            decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            offset = num_bytes - len(error.object) + error.start
            raise _not_text(name, offset, error.object[error.start]) from error


def _not_text(name: str, offset: int, byte: int) -> InputError:
    is_utf16 = byte == 0 or (offset == 0 and byte in codecs.BOM_UTF16)
    where = f"byte {offset} of its uncompressed content" if name.endswith(".gz") else f"byte {offset}"
    return InputError(
        f"{name} must be UTF-8 text; {where} is 0x{byte:02x} (counted from 0). It may be a binary file or in another "
        f"encoding: convert it, for instance with `iconv -f {'UTF-16' if is_utf16 else 'ISO-8859-1'} -t UTF-8`, or "
        "leave it out of --data-files."
    )


def _format_of(name: str, flag: str) -> str:
    file_format = FORMAT_OF_ENDING.get(PurePath(name.removesuffix(".gz")).suffix)
    if file_format is None or name.endswith(".parquet.gz"):
        raise InputError(
            f"{flag} takes files ending in {', '.join(FORMAT_OF_ENDING)} (also .gz, but for .parquet); got {name!r}."
        )
    return file_format


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
