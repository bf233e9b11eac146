"""Find the text files, local or `gs://`, that match patterns, cut them into byte ranges, and read the ranges.

A byte range is a unit of work for a worker. Byte ranges are also used to sample a corpus at a cost that does not depend
on its size. Other functions cut documents into passages and groups.
"""

import glob
import gzip
import io
import logging
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.csv_rows import DELIMITERS, CsvRows, parse_delimiter
from mlm_common.corpus.identity import with_checksums
from mlm_common.corpus.text_formats import (
    PARQUET_BUFFER_BYTES,
    BadRows,
    csv_texts,
    json_texts,
    parquet_texts,
    row_group_starts,
    row_group_text_bytes,
    txt_texts,
)
from mlm_common.errors import InputError
from mlm_common.storage import did_you_mean, is_gcs, missing, short_path
from mlm_common.storage.encodings import codec_of, conversion_hint, encoding_of_mark
from mlm_common.storage.guard import LFS_POINTER_START, guarded_read, start_of_file
from mlm_common.storage.reading import LocalReader, StoredFile, find_stored_files

if TYPE_CHECKING:
    from mlm_common.storage.gcs import GcsReader

logger = logging.getLogger(__name__)

# Size of the blocks of a sample. With blocks of this size, only a small part of the time is spent on seeking or sending
# requests.
SAMPLE_BLOCK_BYTES = 8 << 20
# If there are fewer groups than this, and one of them is too large, some workers would run out of work.
MIN_GROUPS = 16
# A sample has at least this number of blocks, so that even a small sample, or a sample of large row groups, comes from
# all parts of the corpus.
MIN_SAMPLE_BLOCKS = 64
MAX_PASSAGE_CHARACTERS = 4096

FORMAT_OF_ENDING = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
KINDS = {"text": "a text file", "json": "a JSON file", "csv": "a CSV file", "parquet": "a Parquet file"}
# Number of bytes at the start of a file that are searched for a zero byte, which text does not have. `git` has the same
# check.
NUM_BYTES_CHECKED = 8000
MAX_FORMS_READ = 20
MAX_LFS_POINTER_BYTES = 1024  # limit of Git LFS
# Number of bytes to read at once to find the end of a row. Most rows are shorter.
ROW_END_BYTES = 1 << 16
# A `\r` at the end of a block does not match, because only the next block shows whether a `\n` follows it.
_ROW_END = re.compile(rb"\r\n|\r(?!\Z)|\n")

Item = TypeVar("Item")


@dataclass(frozen=True)
class ByteRange:
    """The rows of a file that start in bytes [start, stop), each up to its end.

    A row of Parquet counts as starting where its row group starts.

    Attributes:
        file: the file.
        start: first byte of the range.
        stop: byte after the range; None for the end of the file.
    """

    file: StoredFile
    start: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        return (self.file.num_bytes if self.stop is None else self.stop) - self.start


def can_be_cut(file: StoredFile, sample_by: str) -> bool:
    """Return whether rows of a file can be read without the rows before them, because they are lines or Parquet."""
    return file.name.endswith((".jsonl", ".parquet")) or (file.name.endswith(".txt") and sample_by == "line")


def cut_file(file: StoredFile, sample_by: str, max_bytes: int) -> list[ByteRange]:
    """Cut a file into ranges of at most `max_bytes`. A larger row group, or a file that cannot be cut, is one range.

    Raises:
        InputError: the name of the file ends in .parquet, but it is not Parquet.
    """
    if file.num_bytes <= max_bytes or not can_be_cut(file, sample_by):
        return [ByteRange(file)]
    if _is_parquet(file):
        groups = grouped(((group, group.num_bytes) for group in _row_groups(file)), max_bytes)
        return [ByteRange(file, group[0].start, group[-1].stop) for group in groups]
    num_ranges = -(-file.num_bytes // max_bytes)
    borders = [file.num_bytes * number // num_ranges for number in range(num_ranges + 1)]
    return [ByteRange(file, start, stop) for start, stop in pairwise(borders)]


def _is_parquet(file: StoredFile) -> bool:
    return file.name.endswith(".parquet")


def _row_groups(file: StoredFile) -> list[ByteRange]:
    """Return a range for each row group of a Parquet file. Together they cover all of its bytes."""
    return [ByteRange(file, *borders) for borders in pairwise([0, *row_group_starts(file)[1:], file.num_bytes])]


def group_byte_ranges(files: Sequence[StoredFile], sample_by: str, max_bytes: int) -> Iterator[list[ByteRange]]:
    """Yield the byte ranges of files, in order, in groups of at most `max_bytes`.

    Each range of a large file is a group. Small files share a group. A file that is larger than `max_bytes` and cannot
    be cut is a group by itself.
    """
    ranges = (byte_range for file in files for byte_range in cut_file(file, sample_by, max_bytes))
    return grouped(((byte_range, byte_range.num_bytes) for byte_range in ranges), max_bytes)


def is_for_few_workers(files: Sequence[StoredFile], sample_by: str, max_bytes: int) -> bool:
    """Return whether there are few groups, one of which is larger than `max_bytes` because its file cannot be cut."""
    groups = list(islice(group_byte_ranges(files, sample_by, max_bytes), MIN_GROUPS))
    is_too_large = any(sum(byte_range.num_bytes for byte_range in group) > max_bytes for group in groups)
    return is_too_large and len(groups) < MIN_GROUPS


def draw_byte_ranges(files: Sequence[StoredFile], config: CorpusConfig, num_bytes: int) -> list[ByteRange] | None:
    """Draw a sample of about `num_bytes` from all parts of the files.

    The concatenated files are cut into sections of equal length, and a block is drawn from each section. If there are
    Parquet files, the sample consists of row groups and of blocks of the other files instead, and the size of a row
    group is the size of its text.

    Args:
        files: files of the corpus.
        config: settings of the corpus. The same seed gives the same sample.
        num_bytes: size of the sample.

    Returns:
        The ranges in order; None if the files are not larger than the sample, or if one of them cannot be cut.

    Raises:
        InputError: the name of a file ends in .parquet, but it is not Parquet or has no text column.
    """
    if not all(can_be_cut(file, config.txt_unit) for file in files):
        return None
    if any(map(_is_parquet, files)):
        return _draw_row_groups(files, config, num_bytes)
    total_bytes = sum(file.num_bytes for file in files)
    if total_bytes <= num_bytes:
        return None
    block_bytes = max(1, min(SAMPLE_BLOCK_BYTES, num_bytes // MIN_SAMPLE_BLOCKS))
    num_blocks = -(-total_bytes // block_bytes)
    num_drawn = min(num_blocks, -(-num_bytes // block_bytes))
    generator = random.Random(config.seed)
    sections = [num_blocks * number // num_drawn for number in range(num_drawn + 1)]
    blocks = [generator.randrange(first, after) for first, after in pairwise(sections)]
    return list(_ranges_of_blocks(files, blocks, block_bytes))


def _ranges_of_blocks(files: Sequence[StoredFile], blocks: Sequence[int], block_bytes: int) -> Iterator[ByteRange]:
    """Yield the byte ranges of blocks of the concatenated files. The numbers in `blocks` must be in order."""
    ends = list(accumulate(file.num_bytes for file in files))
    index = 0
    for block in blocks:
        position, block_end = block * block_bytes, (block + 1) * block_bytes
        while position < block_end and index < len(files):
            file, file_start = files[index], ends[index] - files[index].num_bytes
            stop = min(block_end, ends[index])
            if position < stop:
                start = max(position, file_start)
                yield ByteRange(file, start - file_start, stop - file_start)
                position = stop
            if position >= ends[index]:
                index += 1


def _draw_row_groups(files: Sequence[StoredFile], config: CorpusConfig, num_bytes: int) -> list[ByteRange] | None:
    """Draw row groups of Parquet files, and blocks of other files: `num_bytes` of text, but at least 64 units."""
    units: list[tuple[ByteRange, int]] = []  # each with its number of bytes of text
    for file in files:
        if _is_parquet(file):
            # A file without rows has one range, but no sizes.
            units += zip(_row_groups(file), row_group_text_bytes(file, config.text_column), strict=False)
        else:
            units += [(block, block.num_bytes) for block in cut_file(file, config.txt_unit, SAMPLE_BLOCK_BYTES)]
    order = random.Random(config.seed).sample(range(len(units)), len(units))
    sums = accumulate(units[index][1] for index in order)
    num_drawn = max(MIN_SAMPLE_BLOCKS, sum(1 for drawn_bytes in sums if drawn_bytes <= num_bytes))
    return None if num_drawn >= len(units) else [units[index][0] for index in sorted(order[:num_drawn])]


def cut_passages(documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents in order, cut into passages of at most 4,096 characters, at white space if possible."""
    for document in documents:
        start = 0
        while len(document) - start > MAX_PASSAGE_CHARACTERS:
            end = start + MAX_PASSAGE_CHARACTERS
            space = max(document.rfind(" ", start, end), document.rfind("\n", start, end))
            end = space + 1 if space >= start else end
            yield document[start:end]
            start = end
        yield document[start:] if start else document


def grouped(sized_items: Iterable[tuple[Item, int]], max_size: int) -> Iterator[list[Item]]:
    """Group items, given as (item, size), in order. The sum of a group's sizes is at most `max_size`.

    An item that is larger than `max_size` is a group by itself.
    """
    group: list[Item] = []
    group_size = 0
    for item, size in sized_items:
        if group and group_size + size > max_size:
            yield group
            group, group_size = [], 0
        group.append(item)
        group_size += size
    if group:
        yield group


def grouped_by_size(documents: Iterable[str], max_bytes: int) -> Iterator[list[str]]:
    """Group documents, in order. A group has at most `max_bytes` of UTF-8, or is a single larger document."""
    # One byte is added to each size, so that blank documents have a size, too.
    return grouped(((document, len(document.encode()) + 1) for document in documents), max_bytes)


def absolute_pattern(pattern: str) -> str:
    """Make a local path or glob absolute. An empty pattern stays empty."""
    if not pattern or is_gcs(pattern) or Path(pattern).is_absolute():
        return pattern
    folder = str(Path.cwd())
    is_glob = glob.has_magic(pattern) and not Path(pattern).is_file()
    return str(Path(glob.escape(folder) if is_glob else folder, pattern))


def find_files(patterns: list[str], flag: str, *, is_text: bool = True) -> list[StoredFile]:
    """Find the files that match the patterns, with their checksums, in order. The matches of a glob are sorted.

    A file that is found again, through a link or another pattern, is listed once, under its first name.

    Args:
        patterns: paths and globs.
        flag: flag that sets the patterns, for errors.
        is_text: whether the files must have the ending of a text format that can be read.

    Raises:
        InputError: a pattern is empty or has no match, a link points to nothing, or a file has a different ending.
    """
    files: dict[str, StoredFile] = {}
    num_found = 0
    for pattern in patterns:
        if not pattern:
            raise InputError(f"{flag} has an empty name. If the command uses a shell variable there, set it first.")
        matches = find_stored_files(pattern)
        if not matches:
            shown = short_path(pattern)
            if not is_gcs(pattern) and os.path.lexists(pattern):
                hint = f" Name its files, such as '{shown}/*.txt'." if Path(pattern).is_dir() else ""
                raise InputError(f"{missing(shown, flag, 'file')}{hint}")
            raise InputError(f"{flag}: no file matches {shown}{did_you_mean(shown) or '.'}")
        num_found += len(matches)
        for file in matches:
            if is_text:
                _format_of(file.name, flag)
            files.setdefault(os.path.realpath(file.name) if file.is_local else file.name, file)
    if num_found > len(files):
        logger.info(
            "%s: %s names refer to files that were already named; each file is read once.",
            flag,
            f"{num_found - len(files):,}",
        )
    return with_checksums(files.values())


def read_byte_range(byte_range: ByteRange, config: CorpusConfig, bad_rows: BadRows | None = None) -> Iterator[str]:
    """Yield the texts of a byte range, in order. A row whose text is missing gives an empty string.

    Args:
        byte_range: a file or a range of it.
        config: settings of the corpus. Only `text_column`, `sample_by`, `delimiter` and `on_bad_row` are used.
        bad_rows: collects the unreadable rows that are skipped with `on_bad_row="skip"`, and counts oddities.

    Raises:
        InputError: the content does not match the ending of the file, is not UTF-8, or lacks the text column. Texts
            before the error may have been yielded.
        CloudStorageError: Cloud Storage did not answer.
    """
    name, text_column = byte_range.file.name, config.text_column
    bad_rows = bad_rows or BadRows()
    stop = sys.maxsize if byte_range.stop is None else byte_range.stop
    file_format = _format_of(name, "--data-files")
    after = f" after byte {byte_range.start:,}" if byte_range.start else ""
    place = "row {:,}".format if file_format == "parquet" else lambda number: f"line {number:,}{after}"
    handler = bad_rows.handler(config.on_bad_row, name, place)
    with guarded_read(name, _kind(name)), byte_range.file.open() as raw:
        if file_format == "parquet":
            # Reading ahead past the end of the range would be a waste.
            block_bytes = min(raw.read_ahead_bytes, max(byte_range.num_bytes, PARQUET_BUFFER_BYTES))
            table: io.BufferedReader[Any] = io.BufferedReader(raw, block_bytes)
            texts: Iterator[str | None] = parquet_texts(table, text_column, name, handler, byte_range.start, stop)
        else:
            file = _open_text(raw, byte_range)  # closes the file when it is garbage-collected
            if file_format == "text":
                texts = txt_texts(file, config.txt_unit, handler)
            elif file_format == "csv":
                texts = csv_texts(file, text_column, name, handler, config.delimiter)
            else:
                texts = json_texts(file, text_column, name, handler, (byte_range.start, byte_range.stop))
        yield from bad_rows.note_oddities(texts, name, after)


def _open_text(raw: "LocalReader | GcsReader", byte_range: ByteRange) -> io.TextIOWrapper:
    """Open the rows of a range as text. Bytes that are not UTF-8 become surrogates.

    Raises:
        InputError: the start of the file is not text.
    """
    name, is_csv = byte_range.file.name, _format_of(byte_range.file.name, "--data-files") == "csv"
    if name.endswith(".gz"):
        rows: Any = gzip.GzipFile(fileobj=io.BufferedReader(raw, raw.read_ahead_bytes))
        start = rows.peek(NUM_BYTES_CHECKED)[:NUM_BYTES_CHECKED]
    else:
        start = raw.read(NUM_BYTES_CHECKED) or b""
        stop = sys.maxsize if byte_range.stop is None else byte_range.stop
        rows = io.BufferedReader(_BlockReader(row_blocks(raw, byte_range.start, stop, raw.read_ahead_bytes)))
    if not (is_csv and encoding_of_mark(start)):  # Excel writes UTF-16; a .csv file is never cut, so it can be decoded
        _check_start(name, start)
    codec = "utf-8" if byte_range.start else codec_of(start)
    return io.TextIOWrapper(rows, codec, "surrogateescape", "" if is_csv else None)


def describe_csv_forms(files: Iterable[StoredFile], delimiter: str | None) -> str:
    """Describe the delimiters of the first .csv files, if they are not commas; return "" if all are commas.

    Raises:
        InputError: two delimiters are possible for a file, or it cannot be read.
    """
    names: dict[str, list[str]] = {}
    for file in islice((file for file in files if _format_of(file.name, "--data-files") == "csv"), MAX_FORMS_READ):
        with guarded_read(file.name, _kind(file.name)), file.open() as raw:
            rows = CsvRows(_open_text(raw, ByteRange(file)), file.name, parse_delimiter(delimiter))
            names.setdefault(DELIMITERS.get(rows.delimiter, f"`{rows.delimiter}`"), []).append(file.name)
    descriptions = [
        f"{words} between the columns of {short_path(file_names[0])}"
        + (f" and {len(file_names) - 1:,} more" if file_names[1:] else "")
        for words, file_names in names.items()
        if words != DELIMITERS[","]
    ]
    return "; ".join(descriptions)


def _kind(name: str) -> str:
    return KINDS[_format_of(name, "--data-files")] + (" in gzip" if name.endswith(".gz") else "")


def has_known_ending(name: str) -> bool:
    ending = PurePath(name.removesuffix(".gz")).suffix
    return ending in FORMAT_OF_ENDING and not name.endswith(".parquet.gz")


def _format_of(name: str, flag: str) -> str:
    if not has_known_ending(name):
        raise InputError(
            f"{flag} needs files that end in {', '.join(FORMAT_OF_ENDING)} (all but .parquet also with .gz); received "
            f"{name!r}."
        )
    return FORMAT_OF_ENDING[PurePath(name.removesuffix(".gz")).suffix]


def _check_start(name: str, start: bytes) -> None:
    """Check the start of a file. UTF-16 is also rejected, because it could be mistaken for UTF-8.

    Raises:
        InputError: the bytes are the start of a Git LFS pointer, of a binary file, or of UTF-16.
    """
    if start.startswith(LFS_POINTER_START):
        raise lfs_pointer(name)
    if encoding_of_mark(start) or b"\0" in start:
        place = "it has a byte-order mark" if encoding_of_mark(start) else f"byte {start.index(0):,} is zero"
        raise InputError(f"{name} must be UTF-8 text; {place}. {conversion_hint(start)} Or drop it from --data-files.")


def check_no_pointers(files: Iterable[StoredFile]) -> None:
    """Check that no local file is a Git LFS pointer. Otherwise, a few pointers among many files would go unnoticed.

    Raises:
        InputError: a file is a pointer.
    """
    small = [file.name for file in files if file.is_local and file.num_bytes < MAX_LFS_POINTER_BYTES]
    if pointers := [name for name in small if (start_of_file(name) or b"").startswith(LFS_POINTER_START)]:
        raise lfs_pointer(pointers[0], len(pointers))


def lfs_pointer(name: str, num_files: int = 1) -> InputError:
    others = f" (one of {num_files:,} pointers)" if num_files > 1 else ""
    return InputError(
        f"{name} is a Git LFS pointer, not the text{others}. Fetch the files themselves with `git lfs pull`."
    )


def row_blocks(file: io.RawIOBase, start: int, stop: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of all rows that start in bytes [start, stop), in blocks of at most `block_bytes`.

    The remainder of the last row, after `stop`, comes in blocks of other sizes.
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
    """Yield the bytes from `position` to the start of the next row; none if a row starts at `position`."""
    if position == 0:
        return
    file.seek(position - 1)
    num_skipped = 1  # the byte before `position` is only read because it may end a row
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
