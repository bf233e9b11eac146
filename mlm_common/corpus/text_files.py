"""Find the text files, local or `gs://`, that patterns name, and read the texts of a file or of a byte range of it."""

import codecs
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
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, TextIO

from mlm_common.cli.local_paths import did_you_mean, short_path
from mlm_common.corpus import text_formats
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.config import OnBadRow
from mlm_common.corpus.identity import with_checksums
from mlm_common.corpus.text_formats import BadRowHandler, BadRows
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
    """Make a name or glob absolute."""
    if is_gcs(pattern) or Path(pattern).is_absolute():
        return pattern
    folder = str(Path.cwd())
    is_glob = glob.has_magic(pattern) and not Path(pattern).is_file()
    return str(Path(glob.escape(folder) if is_glob else folder, pattern))


def find_files(patterns: list[str], flag: str) -> list[StoredFile]:
    """Find the files that the patterns name, with their checksums; in order, those of a glob sorted.

    A file that links or several patterns name again is listed once, under its first name.

    Raises:
        InputError: a pattern without a match, a link to nothing, or a file whose ending is not one that can be read;
            names `flag`.
    """
    files: dict[str, StoredFile] = {}
    num_found = 0
    for pattern in patterns:
        found = find_stored_files(pattern)
        if not found:
            shown = short_path(pattern)
            raise InputError(f"{flag}: no file matches {shown}{did_you_mean(shown, 'file') or '.'}")
        num_found += len(found)
        for file in found:
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

    Args:
        byte_range: rows of a file.
        text_column: the column with the text.
        sample_by: what a row of a .txt file is.
        on_bad_row: whether an unreadable row is an error, or is skipped.
        bad_rows: skipped rows are added to it.

    Raises:
        InputError: the file is not what its ending says, is not UTF-8, or lacks the text column. Texts before the
            error may have been yielded.
        CloudStorageError: Cloud Storage did not answer.
    """
    name = byte_range.file.name
    file_format = _format_of(name, "--data-files")
    place = "row {:,}".format if file_format == "parquet" else _LinePlaces(byte_range)
    handler = (bad_rows or BadRows()).handler(on_bad_row, name, place)
    try:
        if file_format == "parquet":
            with byte_range.file.open() as raw:
                # Reading further ahead than to the end of the range would be for nothing.
                block_bytes = min(raw.read_ahead_bytes, max(byte_range.num_bytes, text_formats.PARQUET_BUFFER_BYTES))
                file: io.BufferedReader[Any] = io.BufferedReader(raw, block_bytes)
                bounds = byte_range.start, _stop(byte_range)
                yield from text_formats.parquet_texts(file, text_column, name, handler, *bounds)
        else:
            errors = "surrogateescape" if on_bad_row == "skip" else "strict"
            with _open_text(byte_range, errors, newline="" if file_format == "csv" else None) as text:
                yield from _read_text(text, byte_range.file, file_format, text_column, sample_by, handler)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        if isinstance(error, UnicodeDecodeError) and file_format != "parquet":
            _check_utf8(byte_range)
        kind = "gzip" if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) else file_format
        raise text_formats.unreadable_file(name, kind, error) from error


def _format_of(name: str, flag: str) -> str:
    file_format = FORMAT_OF_ENDING.get(PurePath(name.removesuffix(".gz")).suffix)
    if file_format is None or name.endswith(".parquet.gz"):
        raise InputError(
            f"{flag} takes files ending in {', '.join(FORMAT_OF_ENDING)} (also .gz, but for .parquet); got {name!r}."
        )
    return file_format


def _read_text(
    text: TextIO, stored: StoredFile, file_format: str, text_column: str, sample_by: str, on_bad_row: BadRowHandler
) -> Iterator[str]:
    if file_format == "text":
        return text_formats.txt_texts(text, sample_by, on_bad_row)
    if file_format == "csv":
        return text_formats.csv_texts(text, text_column, stored.name, on_bad_row)
    check_column = partial(_check_json_column, stored, text_column)
    return text_formats.json_texts(text, text_column, stored.name, on_bad_row, check_column)


@contextmanager
def _open_text(byte_range: ByteRange, errors: str, newline: str | None = None) -> Iterator[TextIO]:
    """Open the rows as text, without a byte-order mark at the start of the file."""
    with _open_rows(byte_range) as binary:
        yield io.TextIOWrapper(binary, "utf-8" if byte_range.start else "utf-8-sig", errors, newline)


@contextmanager
def _open_rows(byte_range: ByteRange) -> Iterator[Any]:
    """Open the uncompressed bytes of the rows, after a check of the start of their file."""
    file = byte_range.file
    with file.open() as raw:
        if file.name.endswith(".gz"):
            unzipped = gzip.GzipFile(fileobj=io.BufferedReader(raw, raw.read_ahead_bytes))
            _check_start(file.name, unzipped.peek(NUM_BYTES_CHECKED)[:NUM_BYTES_CHECKED])
            yield unzipped
        else:
            _check_start(file.name, raw.read(NUM_BYTES_CHECKED) or b"")
            blocks = row_blocks(raw, byte_range.start, _stop(byte_range), raw.read_ahead_bytes)
            yield io.BufferedReader(_BlockReader(blocks))


def _stop(byte_range: ByteRange) -> int:
    return sys.maxsize if byte_range.stop is None else byte_range.stop


def row_blocks(file: io.RawIOBase, start: int, stop: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of all rows that begin in bytes [start, stop), in blocks of at most `block_bytes`.

    The last row is read to its end, in blocks of other sizes.
    """
    position = first_row(file, start, stop)
    if position >= stop:
        return
    file.seek(position)
    while position < stop:
        block = file.read(min(block_bytes, stop - position))
        if not block:
            return
        position += len(block)
        yield block
    yield from _rest_of_row(file, stop)


def first_row(file: io.RawIOBase, start: int, stop: int) -> int:
    """Find where the first row in bytes [start, stop) begins; `stop` or more if none does."""
    position = start
    for block in _rest_of_row(file, start):
        position += len(block)
        if position >= stop:
            break
    return position


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


class _LinePlaces:
    """Says where lines of a range are: their numbers, or after the start of a file their bytes. Called in order."""

    def __init__(self, byte_range: ByteRange) -> None:
        self._byte_range = byte_range
        self._first_bytes = self._read_first_bytes()
        self._num_read = 0

    def __call__(self, line_number: int) -> str:
        if not self._byte_range.start:
            return f"line {line_number:,}"
        first_byte = next(islice(self._first_bytes, line_number - self._num_read - 1, None))
        self._num_read = line_number
        return f"the line at byte {first_byte}"

    def _read_first_bytes(self) -> Iterator[int]:
        first_byte = _first_byte(self._byte_range)
        # Line ends stay as they are, and invalid UTF-8 does not matter here.
        with _open_text(self._byte_range, "surrogateescape", newline="") as lines:
            for line in lines:
                yield first_byte
                first_byte += len(line.encode("utf-8", "surrogateescape"))


def _first_byte(byte_range: ByteRange) -> int:
    with byte_range.file.open() as raw:
        return first_row(raw, byte_range.start, _stop(byte_range))


def _check_json_column(stored: StoredFile, text_column: str) -> None:
    """Raise InputError if the first rows of the whole file lack the column; later ones may."""
    with _open_text(ByteRange(stored), "surrogateescape") as text:
        text_formats.check_json_column(text, text_column, stored.name)


def _check_start(name: str, start: bytes) -> None:
    """Raise InputError for a start with a zero byte: a binary file, or UTF-16, which can pass for UTF-8."""
    before, zero, _ = start.partition(b"\0")
    if zero:
        _check_decoding(name, io.BytesIO(before), 0, has_zero=True)
        raise _not_text(name, len(before), 0, has_zero=True)


def _check_utf8(byte_range: ByteRange) -> None:
    """Raise InputError for the first byte of a range that is not UTF-8, if there is one."""
    with _open_rows(byte_range) as binary:
        _check_decoding(byte_range.file.name, binary, _first_byte(byte_range) if byte_range.start else 0)


def _check_decoding(name: str, file: Any, num_bytes_before: int, *, has_zero: bool = False) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = num_bytes_before
    block = b"-"
    while block:
        block = file.read(1 << 20)  # in blocks, to save memory
        num_bytes += len(block)
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            offset = num_bytes - len(error.object) + error.start
            raise _not_text(name, offset, error.object[error.start], has_zero=has_zero) from error


def _not_text(name: str, offset: int, byte: int, *, has_zero: bool) -> InputError:
    """Describe the first byte that is not text; `has_zero` if a zero byte shows that no row is text."""
    is_utf16 = byte == 0 or (offset == 0 and byte in codecs.BOM_UTF16)
    where = f"byte {offset} of its uncompressed content" if name.endswith(".gz") else f"byte {offset}"
    rows = "; or leave out the rows that cannot be read: --on-bad-row skip."
    if has_zero:
        rows = f". --on-bad-row skip does not help: the first {NUM_BYTES_CHECKED:,} must have no zero byte."
    return InputError(
        f"{name} must be UTF-8 text; {where} is 0x{byte:02x} (counted from 0). It may be a binary file or in another "
        f"encoding: convert it, for instance with `iconv -f {'UTF-16' if is_utf16 else 'ISO-8859-1'} -t UTF-8`, or "
        f"leave it out of --data-files{rows}"
    )
