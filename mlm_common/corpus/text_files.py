"""Find the text files, local or `gs://`, that patterns name, and read the texts of a file or of a byte range of it."""

import csv
import glob
import gzip
import io
import logging
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from mlm_common.cli.local_paths import did_you_mean, short_path
from mlm_common.corpus import text_formats
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.config import OnBadRow
from mlm_common.corpus.identity import with_checksums
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from mlm_common.storage import is_gcs
from mlm_common.storage.reading import StoredFile, find_stored_files

logger = logging.getLogger(__name__)

FORMAT_OF_ENDING = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# Bytes at the start of a file that are searched for a zero byte, which no text has (as `git` does).
NUM_BYTES_CHECKED = 8000
# Looked through for the end of a row that has begun before; most rows are shorter.
ROW_END_BYTES = 1 << 16
# A last `\r` is left out: whether a `\n` belongs to it is seen with the next read.
_ROW_END = re.compile(rb"\r\n|\r(?!\Z)|\n")


def absolute_pattern(pattern: str) -> str:
    if is_gcs(pattern) or Path(pattern).is_absolute():
        return pattern
    folder = str(Path.cwd())
    is_glob = glob.has_magic(pattern) and not Path(pattern).is_file()
    return str(Path(glob.escape(folder) if is_glob else folder, pattern))


def find_files(patterns: list[str], flag: str, *, is_text: bool = True) -> list[StoredFile]:
    """Find the files that the patterns name, with their checksums; in order, those of a glob sorted.

    A file that links or several patterns name again is listed once, under its first name.

    Raises:
        InputError: a pattern without a match, a link to nothing, or a file of text whose ending is not one that can
            be read; names `flag`.
    """
    files: dict[str, StoredFile] = {}
    num_found = 0
    for pattern in patterns:
        found = find_stored_files(pattern)
        if not found:
            shown = short_path(pattern)
            raise InputError(f"{flag}: no file matches {shown}{did_you_mean(shown) or '.'}")
        num_found += len(found)
        for file in found:
            if is_text:
                _format_of(file.name, flag)
            files.setdefault(os.path.realpath(file.name) if file.is_local else file.name, file)
    if num_found > len(files):
        logger.info("%s: %s names are of files named before; each is read once.", flag, f"{num_found - len(files):,}")
    return with_checksums(files.values())


def read_byte_range(
    byte_range: ByteRange,
    text_column: str,
    sample_by: str,
    on_bad_row: OnBadRow = "fail",
    bad_rows: BadRows | None = None,
) -> Iterator[str]:
    """Yield the texts of a file or of a range of it, in the file's order; an empty one for a row without text.

    With `on_bad_row="skip"` unreadable rows are skipped and added to `bad_rows`.

    Raises:
        InputError: the file is not what its ending says, is not UTF-8, or lacks the text column. Texts before the
            error may have been yielded.
        CloudStorageError: Cloud Storage did not answer.
    """
    name = byte_range.file.name
    stop = sys.maxsize if byte_range.stop is None else byte_range.stop
    file_format = _format_of(name, "--data-files")
    after = f" after byte {byte_range.start:,}" if byte_range.start else ""
    place = "row {:,}".format if file_format == "parquet" else lambda number: f"line {number:,}{after}"
    handler = (bad_rows or BadRows()).handler(on_bad_row, name, place)
    try:
        with byte_range.file.open() as raw:
            if file_format == "parquet":
                # Reading further ahead than to the end of the range would be for nothing.
                block_bytes = min(raw.read_ahead_bytes, max(byte_range.num_bytes, text_formats.PARQUET_BUFFER_BYTES))
                table: io.BufferedReader[Any] = io.BufferedReader(raw, block_bytes)
                yield from text_formats.parquet_texts(table, text_column, name, handler, byte_range.start, stop)
                return
            if name.endswith(".gz"):
                rows: Any = gzip.GzipFile(fileobj=io.BufferedReader(raw, raw.read_ahead_bytes))
                _check_start(name, rows.peek(NUM_BYTES_CHECKED)[:NUM_BYTES_CHECKED])
            else:
                _check_start(name, raw.read(NUM_BYTES_CHECKED) or b"")
                rows = io.BufferedReader(_BlockReader(row_blocks(raw, byte_range.start, stop, raw.read_ahead_bytes)))
            encoding, newline = "utf-8" if byte_range.start else "utf-8-sig", "" if file_format == "csv" else None
            text = io.TextIOWrapper(rows, encoding, "surrogateescape", newline)
            if file_format == "text":
                yield from text_formats.txt_texts(text, sample_by, handler)
            elif file_format == "csv":
                yield from text_formats.csv_texts(text, text_column, name, handler)
            else:
                part = byte_range.start, byte_range.stop
                yield from text_formats.json_texts(text, text_column, name, handler, part)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        kind = "gzip" if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) else file_format
        raise text_formats.unreadable_file(name, kind, error) from error


def _format_of(name: str, flag: str) -> str:
    file_format = FORMAT_OF_ENDING.get(PurePath(name.removesuffix(".gz")).suffix)
    if file_format is None or name.endswith(".parquet.gz"):
        raise InputError(
            f"{flag} takes files ending in {', '.join(FORMAT_OF_ENDING)} (also .gz, but for .parquet); got {name!r}."
        )
    return file_format


def _check_start(name: str, start: bytes) -> None:
    """Raise InputError for a start with a zero byte: a binary file, or UTF-16, which can pass for UTF-8."""
    if b"\0" in start:
        raise InputError(
            f"{name} must be UTF-8 text; byte {start.index(0)} is zero (counted from 0): a binary file, or one in "
            "UTF-16. Convert it with `iconv -f UTF-16 -t UTF-8`, or leave it out of --data-files."
        )


def row_blocks(file: io.RawIOBase, start: int, stop: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of all rows that begin in bytes [start, stop), in blocks of at most `block_bytes`.

    The last row is read to its end, in blocks of other sizes.
    """
    position = start
    for block in _rest_of_row(file, start):
        position += len(block)
        if position >= stop:
            return
    file.seek(position)
    while position < stop:
        rows = file.read(min(block_bytes, stop - position))
        if not rows:
            return
        position += len(rows)
        yield rows
    yield from _rest_of_row(file, stop)


def _rest_of_row(file: io.RawIOBase, position: int) -> Iterator[bytes]:
    """Yield the bytes from `position` to the start of the next row; none if a row begins there."""
    if position == 0:
        return
    file.seek(position - 1)
    num_skipped = 1  # the byte before, which may end a row
    may_end_here = False
    while block := file.read(num_skipped + ROW_END_BYTES):
        if may_end_here:
            yield block[: block.startswith(b"\n")]
            return
        row_end = _ROW_END.search(block)
        yield block[num_skipped : row_end.end() if row_end else None]
        if row_end:
            return
        num_skipped, may_end_here = 0, block.endswith(b"\r")


class _BlockReader(io.RawIOBase):
    """A file made of blocks of bytes."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = filter(None, blocks)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size
