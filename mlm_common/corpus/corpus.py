"""The corpus (a Hub data set, files or the built-in text) and its splits, which every stage reads in the same way."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, pairwise
from pathlib import Path, PurePath
from typing import Any

from mlm_common.cli.console import counted
from mlm_common.corpus.builtin import describe_builtin_corpus, read_builtin_corpus
from mlm_common.corpus.config import BUILTIN, HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.hub_dataset import Dataset, dataset_texts
from mlm_common.corpus.identity import (
    FILES_KEYS,
    Part,
    describe_shared_text,
    file_record,
)
from mlm_common.corpus.text_files import (
    ByteRange,
    absolute_pattern,
    check_no_pointers,
    describe_csv_forms,
    draw_byte_ranges,
    find_files,
    group_byte_ranges,
    grouped_by_size,
    is_for_few_workers,
    read_byte_range,
)
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from mlm_common.storage.reading import StoredFile

logger = logging.getLogger(__name__)

# Either byte ranges of files, which a worker reads, or the documents themselves.
Partition = list[ByteRange] | list[str]

# Only the first lines of the first .txt files are checked for wrapped lines.
NUM_FILES_CHECKED = 4
NUM_LINES_CHECKED = 500  # per file
# How many files, and how many lines of each file, are searched for blank lines; how many files the warning names.
NUM_FILES_SEARCHED, NUM_LINES_SEARCHED, NUM_NAMES = 64, 2000, 3
# Maximum number of documents that are read to check that each drawn split has text.
NUM_DOCUMENTS_DRAWN = 100_000
MIN_LINES = 20  # fewer lines are too few to judge
MIN_WIDTH, MAX_WIDTH = 40, 100  # characters
# Lines look wrapped if at least this fraction of them has no room for the first word of the next line.
MIN_FULL_FRACTION = 0.7
MAX_WORD_CHARACTERS = 15


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        read: function that yields all documents, from the first to the last, and adds the rows that it skips to its
            argument.
        files: the text files that `read` reads; empty if it reads something else.
    """

    read: Callable[[BadRows], Iterable[str]]
    files: tuple[StoredFile, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """An opened corpus. Made by `open_corpus`.

    Attributes:
        config: the settings, completed with absolute paths, the commit of a data set, and `sample_by`.
        record: the settings and the facts that identify the text (see `identity.py`), as JSON values.
        sources: {name of a split: its source}, for the main split `config.split`, and for `validation` and `test` if
            they are requested but not drawn from the main source.
    """

    config: CorpusConfig
    record: dict[str, Any]
    sources: dict[str, Source]

    @property
    def split_names(self) -> tuple[str, ...]:
        """Names of the splits: `config.split`, then `validation` and `test` if requested."""
        held_out = [split for split in HELD_OUT_SPLITS if self.config.percent_of(split) or split in self.sources]
        return (self.config.split, *(split for split in held_out if split != self.config.split))

    def files(self, split_name: str) -> tuple[StoredFile, ...]:
        """Return the text files that are read for a split; none if it does not come from text files."""
        return self._source(split_name).files

    def documents(self, split_name: str, bad_rows: BadRows | None = None) -> Iterator[str]:
        """Read the documents of a split, some of which may be blank. Each call reads them again, in the same order.

        With `on_bad_row="skip"` unreadable rows are skipped and added to `bad_rows`, here and in the methods below.

        Raises:
            InputError: there is no such split or, while iterating, a file cannot be read.
        """
        limit = self.config.limit if self._has_limit(split_name) else None
        return _documents_of_split(self.config, split_name, self._source(split_name).read(bad_rows or BadRows()), limit)

    def partitions(self, split_name: str, partition_bytes: int, bad_rows: BadRows | None = None) -> Iterator[Partition]:
        """Yield the partitions of a split in order. They are units of work, whose documents `read_partition` reads.

        Usually workers can read the files, and a partition is a list of byte ranges with at most `partition_bytes`
        bytes as stored. A file that cannot be cut and a row group of Parquet stay whole, and small files share a
        partition. A partition is a list of documents with at most `partition_bytes` bytes of text if there are no
        files, if there are only a few files and they cannot be cut, or if documents must be counted for `limit`.
        """
        if not self.has_byte_ranges(split_name, partition_bytes):
            return grouped_by_size(self.documents(split_name, bad_rows), partition_bytes)
        return group_byte_ranges(self.files(split_name), self.config.txt_unit, partition_bytes)

    def has_byte_ranges(self, split_name: str, partition_bytes: int) -> bool:
        """Return whether the partitions are byte ranges of files rather than documents."""
        files = self._files_to_cut(split_name)
        return bool(files) and not is_for_few_workers(files, self.config.txt_unit, partition_bytes)

    def sampled_documents(self, split_name: str, max_bytes: int, bad_rows: BadRows | None = None) -> Iterator[str]:
        """Read about twice `max_bytes` of documents from all parts of a split, or the whole split if it is smaller.

        If a file can be cut, only its sampled ranges are read. `config.seed` determines the sample.
        """
        byte_ranges = self._sample(split_name, max_bytes)
        if byte_ranges is None:
            return self.documents(split_name, bad_rows)
        return read_partition(self.config, split_name, byte_ranges, bad_rows)

    def num_sampled_bytes(self, split_name: str, max_bytes: int) -> int | None:
        """Estimate how many bytes of text `sampled_documents` reads; None if the file sizes do not suffice for this."""
        files = self._files_to_cut(split_name)
        if not files or any(file.name.endswith((".gz", ".parquet")) for file in files):
            return None
        byte_ranges = self._sample(split_name, max_bytes) or [ByteRange(file) for file in files]
        num_bytes = sum(byte_range.num_bytes for byte_range in byte_ranges)
        return int(num_bytes * _fraction_of_split(self.config, split_name))

    def sampled_fraction(self, split_name: str, max_bytes: int) -> float:
        """Return the fraction of the split's bytes, as stored, that `sampled_documents` reads."""
        byte_ranges = self._sample(split_name, max_bytes)
        if byte_ranges is None:
            return 1.0
        num_sampled_bytes = sum(byte_range.num_bytes for byte_range in byte_ranges)
        return num_sampled_bytes / sum(file.num_bytes for file in self.files(split_name))

    def _sample(self, split_name: str, max_bytes: int) -> list[ByteRange] | None:
        """Draw the byte ranges to read for a sample; None to read the whole split."""
        num_bytes = int(2 * max_bytes / _fraction_of_split(self.config, split_name))
        return draw_byte_ranges(self._files_to_cut(split_name), self.config, num_bytes)

    def _files_to_cut(self, split_name: str) -> tuple[StoredFile, ...]:
        """Return the files of a split; none if a limit requires counting the documents from the first one on."""
        return () if self._has_limit(split_name) else self.files(split_name)

    def _has_limit(self, split_name: str) -> bool:
        is_main_or_drawn = split_name == self.config.split or split_name not in self.sources
        return self.config.limit is not None and is_main_or_drawn

    def _source(self, split_name: str) -> Source:
        if split_name not in self.split_names:
            raise InputError(
                f"The split must be one of {', '.join(self.split_names)}, which the corpus has; received "
                f"{split_name!r}."
            )
        return self.sources.get(split_name, self.sources[self.config.split])


def read_partition(
    config: CorpusConfig, split_name: str, partition: Partition, bad_rows: BadRows | None = None
) -> Iterator[str]:
    """Yield the documents of a partition. No other files are read.

    Args:
        config: settings of the corpus.
        split_name: split that the partition belongs to.
        partition: byte ranges or documents.
        bad_rows: collects the rows that are skipped with `on_bad_row="skip"`.

    Raises:
        InputError: a file cannot be read, or a `gs://` file has changed since the corpus was opened.
    """
    for item in partition:
        if isinstance(item, ByteRange):
            yield from _documents_of_split(config, split_name, read_byte_range(item, config, bad_rows))
        else:
            yield item


def open_corpus(config: CorpusConfig) -> Corpus:
    """Open a corpus after cheap checks: its files and columns must exist, and at least one document must not be blank.

    Raises:
        InputError: no corpus is given, no files match, a file ending is unknown, there is no such data set, split or
            column, a split has no text, splits share text, or lines are wrapped and `sample_by` is not set.
    """
    if not config.is_given:
        raise InputError("No corpus was given. Pass --data-files or --dataset-name (`builtin` needs no download).")
    if config.trust_remote_code:
        logger.warning("--trust-remote-code has no effect: `datasets` does not run code from data sets any more.")
    is_sample_by_chosen = config.sample_by is not None
    # The record must name the same files in any working directory, so paths become absolute.
    patterns: dict[str, Any] = {key: list(map(absolute_pattern, getattr(config, key))) for key in FILES_KEYS}
    config = dataclasses.replace(config, sample_by=config.txt_unit, **patterns)
    dataset = None
    if config.dataset_name not in (None, BUILTIN):
        dataset = Dataset(config)
        name = str(Path(str(config.dataset_name)).absolute()) if dataset.is_local else config.dataset_name
        config = dataclasses.replace(config, dataset_name=name, dataset_revision=dataset.commit)
    record: dict[str, Any] = {"settings": dataclasses.asdict(config)}
    sources = {
        split: _open_source(config, split, dataset, record)
        for split in (config.split, *HELD_OUT_SPLITS)
        if split == config.split or config.has_separate_source(split)
    }
    corpus = Corpus(config, record, sources)
    if forms := describe_csv_forms((file for source in sources.values() for file in source.files), config.delimiter):
        logger.info("CSV: %s.", forms)
    files = [file for source in sources.values() for file in source.files]
    if not is_sample_by_chosen:
        check_lines(files)
    if config.txt_unit == "paragraph" and (description := describe_unbroken_files(files)):
        logger.warning("%s", description)
    for names in combinations(corpus.split_names, 2):
        parts = [Part(record, name) for name in names]
        splits = " and ".join(f"`{name}`" for name in names)
        if shared := describe_shared_text(*parts):
            raise InputError(f"The splits {splits} must not share text; {shared}. Name each file for one split only.")
    return corpus


def _open_source(config: CorpusConfig, split: str, dataset: Dataset | None, record: dict[str, Any]) -> Source:
    """Open the source of a split, and add to `record` the facts that identify its text."""
    is_main = split == config.split
    key = "data_files" if is_main else f"{split}_files"
    if patterns := getattr(config, key):
        files = tuple(find_files(patterns, flag=f"--{key.replace('_', '-')}"))
        return _source_of_files(config, files, key, record, " ".join(patterns))
    if dataset is None:
        record[BUILTIN] = describe_builtin_corpus()
        return Source(lambda _: read_builtin_corpus())
    flag, name = ("--split", split) if is_main else (f"--{split}-split", str(config.hub_split_of(split)))
    if files := tuple(dataset.text_files(name, flag)):
        return _source_of_files(config, files, key, record, f"{config.dataset_name}, {flag} {name},")
    rows, files = dataset.rows(name, flag), tuple(dataset.files(name))
    if dataset.is_local:
        record[key] = [file_record(file) for file in files]

    def read(bad_rows: BadRows) -> Iterator[str]:
        source = str(config.dataset_name)
        handler = bad_rows.handler(config.on_bad_row, source, "row {:,}".format)
        with dataset.explained(f", {flag} {name}"):
            yield from bad_rows.note_oddities(dataset_texts(rows, config.text_column, source, handler), source)
        for file in files:
            with file.open():  # fails if the file has changed in the meantime
                pass

    _check_not_blank(read, f"{config.dataset_name}, {flag} {name},")
    return Source(read)


def _source_of_files(
    config: CorpusConfig, files: tuple[StoredFile, ...], key: str, record: dict[str, Any], shown_name: str
) -> Source:
    check_no_pointers(files)
    record[key] = [file_record(file) for file in files]

    def read(bad_rows: BadRows) -> Iterator[str]:
        return chain.from_iterable(read_byte_range(ByteRange(file), config, bad_rows) for file in files)

    _check_not_blank(read, shown_name)
    return Source(read, files)


def _check_not_blank(read: Callable[[BadRows], Iterable[str]], source: str) -> None:
    bad_rows = BadRows()
    if not any(text.strip() for text in read(bad_rows)):
        skipped = f" Rows that cannot be read: {bad_rows.describe()}." if bad_rows.num_rows else ""
        raise InputError(f"A corpus must have text; every document of {source} is blank. Check --text-column.{skipped}")


def _documents_of_split(
    config: CorpusConfig, split_name: str, documents: Iterable[str], limit: int | None = None
) -> Iterator[str]:
    """Yield the documents that belong to a split: all documents, unless they are divided among splits at random.

    Args:
        config: settings of the corpus.
        split_name: name of the split.
        documents: documents of the source that the split is read from.
        limit: number of documents of `config.split` after which to stop; None to read all documents.
    """
    is_drawn = split_name == config.split or config.percent_of(split_name) > 0
    if not is_drawn or not any(map(config.percent_of, HELD_OUT_SPLITS)):
        yield from islice(documents, limit)
        return
    num_main_documents = 0
    for text in documents:
        drawn = draw_split(config, text)
        if drawn == split_name:
            yield text
        if drawn == config.split:
            num_main_documents += 1
            if num_main_documents == limit:
                return


def draw_split(config: CorpusConfig, text: str) -> str:
    """Draw the split of a document of the main source. The draw depends only on text, seed and percentages."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(config.seed).encode()).digest()
    draw = int.from_bytes(digest, "little")
    percent = 0.0
    for split in HELD_OUT_SPLITS:
        percent += config.percent_of(split)
        if draw < percent / 100 * 2**64:
            return split
    return config.split


def _fraction_of_split(config: CorpusConfig, split_name: str) -> float:
    """Return the expected fraction of the source's documents that belong to the split."""
    if split_name == config.split:
        return 1 - sum(map(config.percent_of, HELD_OUT_SPLITS)) / 100
    return config.percent_of(split_name) / 100 or 1.0


def check_lines(files: Iterable[StoredFile]) -> None:
    """Check that the lines of the first .txt files look like whole documents.

    Raises:
        InputError: the lines look like lines of wrapped paragraphs, as in books.
    """
    texts = [file for file in files if file.name.removesuffix(".gz").endswith(".txt")]
    for file in texts[:NUM_FILES_CHECKED]:
        lines = read_byte_range(ByteRange(file), CorpusConfig(on_bad_row="skip"))
        if are_wrapped(list(islice(lines, NUM_LINES_CHECKED))):
            raise InputError(
                f"The lines of {file.name} look like wrapped paragraphs, but by default each line of a .txt file is a "
                "document, so the model would see one line at a time. Pass --sample-by paragraph if blank lines "
                "separate documents, --sample-by document if each file is a document, or --sample-by line if each line "
                "really is a document."
            )


def describe_unbroken_files(files: Iterable[StoredFile]) -> str:
    """Return a warning that names .txt files without blank lines, which are one document each; "" if there are none."""
    texts = [file for file in files if file.name.removesuffix(".gz").endswith(".txt")][:NUM_FILES_SEARCHED]
    unbroken = []
    for file in texts:
        lines = list(islice(read_byte_range(ByteRange(file), CorpusConfig(on_bad_row="skip")), NUM_LINES_SEARCHED))
        if len(lines) >= MIN_LINES and all(map(str.strip, lines)):
            unbroken.append(file)
    if not unbroken:
        return ""
    names = ", ".join(PurePath(file.name).name for file in unbroken[:NUM_NAMES]) + ", …" * (len(unbroken) > NUM_NAMES)
    return (
        f"{len(unbroken)} of {len(texts)} .txt files have no blank line ({names}), so each is one document, of up to "
        f"{max(file.num_bytes for file in unbroken) / 1e6:,.1f} MB. If each of their lines is a paragraph, use "
        "--sample-by line for these files (--sources)."
    )


def check_drawn_splits(corpus: Corpus) -> None:
    """Check that each split that is drawn from the main source has text, if the source is small.

    Raises:
        InputError: a split has no text.
    """
    config, source = corpus.config, corpus.sources[corpus.config.split]
    empty = [split for split in HELD_OUT_SPLITS if split != config.split and config.percent_of(split)]
    num_read = num_documents = num_main = 0
    for text in islice(source.read(BadRows()) if empty else (), NUM_DOCUMENTS_DRAWN):
        num_read += 1
        num_documents += bool(text.strip())
        drawn = draw_split(config, text)
        num_main += drawn == config.split
        empty = [split for split in empty if split != drawn or not text.strip()]
        if not empty or num_main == config.limit:
            break
    if num_read == NUM_DOCUMENTS_DRAWN:
        return  # there are too many documents to read all of them for this check
    if empty:
        flag = f"--{empty[0]}-percent"
        raise InputError(
            f"A split must have text; `{empty[0]}` has none, because {flag} {config.percent_of(empty[0]):g} drew none "
            f"of {counted(num_documents, 'document')}. Raise {flag}, or cut text files into more documents with "
            "--sample-by."
        )


def are_wrapped(lines: Sequence[str]) -> bool:
    """Return whether lines look wrapped, because most of them have no room for the first word of the next line."""
    widths = sorted(len(line) for line in lines if line.strip())
    if len(widths) < MIN_LINES:
        return False
    width = widths[int(0.95 * len(widths))]  # a few lines may be longer, such as headings
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        return False
    followed = [(line, after.split()[0]) for line, after in pairwise(lines) if line.strip() and after.strip()]
    num_full = sum(len(line.rstrip()) + 1 + min(len(word), MAX_WORD_CHARACTERS) > width for line, word in followed)
    return len(followed) >= len(widths) / 2 and num_full >= MIN_FULL_FRACTION * len(followed)
