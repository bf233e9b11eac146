"""The corpus, read the same way by every stage: a Hub data set, files, or the built-in text, in one to three splits."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, pairwise
from pathlib import Path, PurePath
from typing import Any

from mlm_common.corpus.builtin import describe_builtin_corpus, read_builtin_corpus
from mlm_common.corpus.config import BUILTIN, HELD_OUT_SPLITS, CorpusConfig
from mlm_common.corpus.hub_dataset import Dataset, dataset_texts
from mlm_common.corpus.identity import (
    FILES_KEYS,
    Part,
    describe_possibly_shared_text,
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

# Byte ranges of files, which whoever works on the partition reads, or the documents themselves.
Partition = list[ByteRange] | list[str]

# Files of wrapped lines are recognized by the first lines of the first .txt files, and by widths in characters.
NUM_FILES_CHECKED = 4
NUM_LINES_CHECKED = 500  # per file
# What is read to find files without blank lines, and to see that each drawn split has text.
NUM_FILES_SEARCHED, NUM_LINES_SEARCHED, NUM_NAMES = 64, 2000, 3
NUM_DOCUMENTS_DRAWN = 100_000
MIN_LINES = 20  # fewer are no evidence
MIN_WIDTH, MAX_WIDTH = 40, 100
# The fraction of the lines to which the first word of the next line could not have been added.
MIN_FULL_FRACTION = 0.7
MAX_WORD_CHARACTERS = 15


@dataclass(frozen=True)
class Source:
    """Where documents come from; `files` is empty unless it reads text files.

    `read` starts from the first document each time, and adds the rows that it skips to the `BadRows` it is given.
    """

    read: Callable[[BadRows], Iterable[str]]
    files: tuple[StoredFile, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """An opened corpus. Made by `open_corpus`.

    `config` and `record` name what was found: absolute paths, the commit of a data set, what a document of a .txt file
    is. `record`, of values that JSON has, has the settings and identifies the text (see `identity.py`).
    `sources` has the main split under `config.split`, and `validation` and `test` where they are not drawn from it.
    """

    config: CorpusConfig
    record: dict[str, Any]
    sources: dict[str, Source]

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits: `config.split`, then `validation` and `test` if requested."""
        held_out = [split for split in HELD_OUT_SPLITS if self.config.percent_of(split) or split in self.sources]
        return (self.config.split, *(split for split in held_out if split != self.config.split))

    def files(self, split_name: str) -> tuple[StoredFile, ...]:
        """List the text files that are read for a split, if any."""
        return self._source(split_name).files

    def documents(self, split_name: str, bad_rows: BadRows | None = None) -> Iterator[str]:
        """Read the documents of a split, some perhaps blank; each call reads again, in the same order.

        With `on_bad_row="skip"` unreadable rows are skipped and added to `bad_rows`; also in the methods below.

        Raises:
            InputError: no such split, or, while iterating, a file that cannot be read.
        """
        limit = self.config.limit if self._has_limit(split_name) else None
        return _documents_of_split(self.config, split_name, self._source(split_name).read(bad_rows or BadRows()), limit)

    def partitions(self, split_name: str, partition_bytes: int, bad_rows: BadRows | None = None) -> Iterator[Partition]:
        """Cut a split into units of work, in order; `read_partition` gives the documents of each.

        Where workers can read the files, they are byte ranges of at most `partition_bytes` as stored; a file that
        cannot be cut, and a row group of Parquet, stays whole, and small files come together. Without files, with few
        that cannot be cut, or where documents must be counted (`limit`), they are documents, at most `partition_bytes`
        of text.
        """
        if not self.has_byte_ranges(split_name, partition_bytes):
            return grouped_by_size(self.documents(split_name, bad_rows), partition_bytes)
        return group_byte_ranges(self.files(split_name), self.config.txt_unit, partition_bytes)

    def has_byte_ranges(self, split_name: str, partition_bytes: int) -> bool:
        """Return whether the partitions are byte ranges of files, which workers read."""
        files = self._files_to_cut(split_name)
        return bool(files) and not is_for_few_workers(files, self.config.txt_unit, partition_bytes)

    def sampled_documents(self, split_name: str, max_bytes: int, bad_rows: BadRows | None = None) -> Iterator[str]:
        """Read documents from all over a split, about twice `max_bytes`; all of a split that has no more.

        Of files that can be cut only the sample is read; `config.seed` decides it.
        """
        byte_ranges = self._sample(split_name, max_bytes)
        if byte_ranges is None:
            return self.documents(split_name, bad_rows)
        return read_partition(self.config, split_name, byte_ranges, bad_rows)

    def num_sampled_bytes(self, split_name: str, max_bytes: int) -> int | None:
        """Estimate how many bytes of text `sampled_documents` reads; None if the sizes of the files do not tell."""
        files = self._files_to_cut(split_name)
        if not files or any(file.name.endswith((".gz", ".parquet")) for file in files):
            return None
        byte_ranges = self._sample(split_name, max_bytes) or [ByteRange(file) for file in files]
        num_bytes = sum(byte_range.num_bytes for byte_range in byte_ranges)
        return int(num_bytes * _fraction_of_split(self.config, split_name))

    def sampled_fraction(self, split_name: str, max_bytes: int) -> float:
        """Return which fraction of the split's bytes, as stored, `sampled_documents` reads; 1 for all of it."""
        byte_ranges = self._sample(split_name, max_bytes)
        if byte_ranges is None:
            return 1.0
        return sum(one.num_bytes for one in byte_ranges) / sum(file.num_bytes for file in self.files(split_name))

    def _sample(self, split_name: str, max_bytes: int) -> list[ByteRange] | None:
        """Draw the byte ranges to read for a sample; None for all of the split."""
        num_bytes = int(2 * max_bytes / _fraction_of_split(self.config, split_name))
        return draw_byte_ranges(self._files_to_cut(split_name), self.config, num_bytes)

    def _files_to_cut(self, split_name: str) -> tuple[StoredFile, ...]:
        """List the files of a split; none if its documents must be counted from the first on."""
        return () if self._has_limit(split_name) else self.files(split_name)

    def _has_limit(self, split_name: str) -> bool:
        is_main_or_drawn = split_name == self.config.split or split_name not in self.sources
        return self.config.limit is not None and is_main_or_drawn

    def _source(self, split_name: str) -> Source:
        if split_name not in self.split_names:
            raise InputError(f"The corpus has the splits {', '.join(self.split_names)}; got {split_name!r}.")
        return self.sources.get(split_name, self.sources[self.config.split])


def read_partition(
    config: CorpusConfig, split_name: str, partition: Partition, bad_rows: BadRows | None = None
) -> Iterator[str]:
    """Yield the documents of a partition of the corpus with these settings; no other files are read.

    Raises:
        InputError: a file cannot be read, or a `gs://` one has changed since the corpus was opened.
    """
    for item in partition:
        if isinstance(item, ByteRange):
            yield from _documents_of_split(config, split_name, read_byte_range(item, config, bad_rows))
        else:
            yield item


def open_corpus(config: CorpusConfig) -> Corpus:
    """Open the corpus after the checks that are cheap: its files, columns, and a first document that is not blank.

    Raises:
        InputError: no corpus given; no files match; an unknown file ending; no such data set, split or column; a split
            without any text; splits that share text; wrapped lines without a `sample_by` that says what a document is.
    """
    if not config.is_given:
        raise InputError("A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files.")
    if config.trust_remote_code:
        logger.warning("--trust-remote-code has no effect: `datasets` does not run code from data sets any more.")
    is_sample_by_chosen = config.sample_by is not None
    # Absolute paths name the same files wherever the record is read.
    patterns: dict[str, Any] = {key: [absolute_pattern(one) for one in getattr(config, key)] for key in FILES_KEYS}
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
    if config.txt_unit == "paragraph" and (found := describe_unbroken_files(files)):
        logger.warning("%s", found)
    for names in combinations(corpus.split_names, 2):
        parts = [Part(record, name) for name in names]
        splits = " and ".join(f"`{name}`" for name in names)
        if shared := describe_shared_text(*parts):
            raise InputError(f"The splits {splits} must not share text; {shared}. Name each file for one split only.")
        if reason := describe_possibly_shared_text(*parts):
            logger.warning("The splits %s may share text, since %s.", splits, reason)
    return corpus


def _open_source(config: CorpusConfig, split: str, dataset: Dataset | None, record: dict[str, Any]) -> Source:
    """Open the source of a split, and add what identifies it to the record."""
    is_main = split == config.split
    key = "data_files" if is_main else f"{split}_files"
    if getattr(config, key):
        return _open_files(config, key, record)
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
            yield from dataset_texts(rows, config.text_column, source, handler)
        for file in files:
            with file.open():  # which fails if it has changed meanwhile
                pass

    _check_not_blank(read, f"{config.dataset_name}, {flag} {name},")
    return Source(read)


def _open_files(config: CorpusConfig, key: str, record: dict[str, Any]) -> Source:
    patterns = getattr(config, key)
    files = tuple(find_files(patterns, flag=f"--{key.replace('_', '-')}"))
    return _source_of_files(config, files, key, record, " ".join(patterns))


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
        left_out = f"; of rows that cannot be read {bad_rows.describe()}" if bad_rows.num_rows else ""
        raise InputError(f"A corpus must hold text; every document of {source} is blank (see --text-column{left_out}).")


def _documents_of_split(
    config: CorpusConfig, split_name: str, documents: Iterable[str], limit: int | None = None
) -> Iterator[str]:
    """Pick the documents of the main files, or of the split's own, that belong to a split: all if it is not drawn.

    With a limit it stops after this many documents of `config.split`.
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
    """Draw the split of a document of the main files: a function of its text, the seed and the percentages."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(config.seed).encode()).digest()
    draw = int.from_bytes(digest, "little")
    percent = 0.0
    for split in HELD_OUT_SPLITS:
        percent += config.percent_of(split)
        if draw < percent / 100 * 2**64:
            return split
    return config.split


def _fraction_of_split(config: CorpusConfig, split_name: str) -> float:
    """Estimate which fraction of the documents that are read for a split belong to it."""
    if split_name == config.split:
        return 1 - sum(map(config.percent_of, HELD_OUT_SPLITS)) / 100
    return config.percent_of(split_name) / 100 or 1.0


def check_lines(files: Iterable[StoredFile]) -> None:
    """Check that the lines of the first .txt files may be documents.

    Raises:
        InputError: they are lines of wrapped paragraphs, as in books.
    """
    texts = [file for file in files if file.name.removesuffix(".gz").endswith(".txt")]
    for file in texts[:NUM_FILES_CHECKED]:
        lines = read_byte_range(ByteRange(file), CorpusConfig(on_bad_row="skip"))
        if are_wrapped(list(islice(lines, NUM_LINES_CHECKED))):
            raise InputError(
                f"The lines of {file.name} are those of wrapped paragraphs, and by default each line of a .txt file is "
                "a document: the model would see one line at a time. Pass --sample-by paragraph (blank lines separate "
                "documents) or --sample-by document (one per file). If each line really is a document, pass "
                "--sample-by line."
            )


def describe_unbroken_files(files: Iterable[StoredFile]) -> str:
    """Name .txt files without blank lines, each of which is one document; empty if there are none."""
    texts = [file for file in files if file.name.removesuffix(".gz").endswith(".txt")][:NUM_FILES_SEARCHED]
    found = []
    for file in texts:
        lines = list(islice(read_byte_range(ByteRange(file), CorpusConfig(on_bad_row="skip")), NUM_LINES_SEARCHED))
        if len(lines) >= MIN_LINES and all(map(str.strip, lines)):
            found.append(file)
    if not found:
        return ""
    names = ", ".join(PurePath(file.name).name for file in found[:NUM_NAMES]) + ", …" * (len(found) > NUM_NAMES)
    return (
        f"{len(found)} of {len(texts)} .txt files have no blank line ({names}), so each is one document, of up to "
        f"{max(file.num_bytes for file in found) / 1e6:,.1f} MB. If each line is a paragraph, use --sample-by line for "
        "them (--sources)."
    )


def check_drawn_splits(corpus: Corpus) -> None:
    """Check that each split that is drawn from the main source has text, as far as the first documents tell.

    Raises:
        InputError: the source is so small that a split has none.
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
        return  # too many documents to read them all for this
    if empty:
        flag = f"--{empty[0]}-percent"
        raise InputError(
            f"A split must hold text; `{empty[0]}` has none: {flag} {config.percent_of(empty[0]):g} drew none of "
            f"{num_documents:,} documents. Raise {flag}, or cut files of text into more documents with --sample-by."
        )


def are_wrapped(lines: Sequence[str]) -> bool:
    """Return whether most lines end where the first word of the next line would not have fit."""
    widths = sorted(len(line) for line in lines if line.strip())
    if len(widths) < MIN_LINES:
        return False
    width = widths[int(0.95 * len(widths))]  # a few lines may be longer, such as headings
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        return False
    followed = [(line, after.split()[0]) for line, after in pairwise(lines) if line.strip() and after.strip()]
    num_full = sum(len(line.rstrip()) + 1 + min(len(word), MAX_WORD_CHARACTERS) > width for line, word in followed)
    return len(followed) >= len(widths) / 2 and num_full >= MIN_FULL_FRACTION * len(followed)
