"""The corpus, read the same way by every stage: a Hub data set, files, or the built-in text."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mlm_common.errors import InputError
from mlm_common.storage.files import is_remote
from mlm_common.storage.stored_files import StoredFile, fingerprint
from tokenizer_training.corpus.byte_ranges import (
    draw_stretches,
    grouped_stretches,
    is_for_few_workers,
    num_stretch_bytes,
)
from tokenizer_training.corpus.config import BUILTIN, HELD_OUT_PARTS, CorpusConfig, corpus_config_from_record
from tokenizer_training.corpus.passages import grouped_by_size
from tokenizer_training.corpus.text_files import Stretch, find_files, read_stretch
from tokenizer_training.corpus.text_formats import dataset_texts

__all__ = [
    "Corpus",
    "CorpusConfig",
    "Partition",
    "Source",
    "corpus_config_from_record",
    "open_corpus",
    "read_partition",
]

logger = logging.getLogger(__name__)

# Stretches of files, which whoever works on the partition reads, or the documents themselves.
Partition = list[Stretch] | list[str]


@dataclass(frozen=True)
class Source:
    """Where documents come from: `read` starts anew each time; `files` is None for what does not come from files."""

    read: Callable[[], Iterable[str]]
    files: tuple[StoredFile, ...] | None = None


@dataclass(frozen=True)
class Corpus:
    """An opened corpus. Made by `open_corpus`.

    `description` is a record, fit for JSON, of what is read: the settings, and the files with sizes and fingerprints.
    `sources` has the main part under `config.split`, and `validation` and `test` where they are not drawn from it.
    """

    config: CorpusConfig
    description: dict[str, Any]
    sources: dict[str, Source]

    @property
    def split_names(self) -> tuple[str, ...]:
        """The parts: `config.split`, then `validation` and `test`, as far as they were asked for."""
        held_out = [part for part in HELD_OUT_PARTS if self.config.percent_of(part) or part in self.sources]
        return (self.config.split, *(part for part in held_out if part != self.config.split))

    def documents(self, split_name: str) -> Iterator[str]:
        """Return the documents of a part, some perhaps blank; each call reads again, in the same order.

        Raises:
            InputError: no such part, or, while iterating, a file that cannot be read.
        """
        return self._part_of(split_name, self._source(split_name).read())

    def partitions(self, split_name: str, partition_bytes: int) -> Iterator[Partition]:
        """Yield a part of the corpus in pieces of work, in order; `read_partition` gives the documents of each.

        They are stretches of files, at most `partition_bytes` as stored, where a worker can read them by itself: a
        file that cannot be cut is one whole, small files come together. Where there are no files, where these are few
        and cannot be cut, or where documents must be counted (`limit`), they are documents, at most `partition_bytes`
        of text.

        Raises:
            InputError: as `documents`.
        """
        files = self._source(split_name).files
        if files is None or not self.has_stretches(split_name, partition_bytes):
            return grouped_by_size(self.documents(split_name), partition_bytes)
        return grouped_stretches(files, self.config.sample_by, partition_bytes)

    def has_stretches(self, split_name: str, partition_bytes: int) -> bool:
        """Return whether the partitions are stretches of files, which workers read by themselves."""
        files = self._source(split_name).files
        if files is None or self._has_limit(split_name):
            return False
        return not is_for_few_workers(files, self.config.sample_by, partition_bytes)

    def sampled_documents(self, split_name: str, max_bytes: int, seed: int) -> Iterator[str]:
        """Return documents of a part from all over it, about twice `max_bytes`: all, where that is about all there is.

        The reading takes a time that `max_bytes` bounds, where the part comes from files that can be cut.
        """
        stretches = self._sample(split_name, max_bytes, seed)
        if stretches is None:
            return self.documents(split_name)
        return read_partition(self.config, split_name, stretches)

    def num_sampled_bytes(self, split_name: str, max_bytes: int, seed: int) -> int | None:
        """Return about how many bytes of text `sampled_documents` reads; None where the files do not tell."""
        stretches = self._sample(split_name, max_bytes, seed)
        if stretches is not None:
            return int(num_stretch_bytes(stretches) * part_share(self.config, split_name))
        files = self._source(split_name).files
        if not files or any(file.name.endswith((".gz", ".parquet")) for file in files) or self._has_limit(split_name):
            return None
        return int(sum(file.num_bytes for file in files) * part_share(self.config, split_name))

    def _sample(self, split_name: str, max_bytes: int, seed: int) -> list[Stretch] | None:
        """Return the stretches to read for a sample, None for all of the part."""
        files = self._source(split_name).files
        if files is None or self._has_limit(split_name):
            return None
        num_bytes = int(2 * max_bytes / part_share(self.config, split_name))
        return draw_stretches(files, self.config.sample_by, num_bytes, seed)

    def _source(self, split_name: str) -> Source:
        if split_name not in self.split_names:
            raise InputError(f"The corpus has the parts {', '.join(self.split_names)}; got {split_name!r}.")
        return self.sources.get(split_name, self.sources[self.config.split])

    def _part_of(self, split_name: str, documents: Iterable[str]) -> Iterator[str]:
        limit = self.config.limit if self._has_limit(split_name) else None
        return documents_of_part(self.config, split_name, documents, limit)

    def _has_limit(self, split_name: str) -> bool:
        is_main_or_drawn = split_name == self.config.split or split_name not in self.sources
        return self.config.limit is not None and is_main_or_drawn


def read_partition(config: CorpusConfig, split_name: str, partition: Partition) -> Iterator[str]:
    """Yield the documents of a partition of the corpus with these settings: its files are read, and nothing else.

    Raises:
        InputError: a file cannot be read, or a `gs://` one has changed since the corpus was opened.
    """
    for item in partition:
        if isinstance(item, Stretch):
            yield from documents_of_part(config, split_name, read_stretch(item, config.text_column, config.sample_by))
        else:
            yield item


def open_corpus(config: CorpusConfig) -> Corpus:
    """Return the corpus after the checks that are cheap: its files, columns, and a first document that is not blank.

    Raises:
        InputError: no corpus given; no files match, or one is in two parts; an unknown file ending; no such data set,
            split or column; a part without any text.
    """
    if not config.is_given:
        raise InputError("A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files.")
    if config.trust_remote_code:
        logger.warning("--trust-remote-code has no effect: `datasets` does not run code from data sets any more.")
    description: dict[str, Any] = {"settings": dataclasses.asdict(config)}
    sources = {config.split: _open_main(config, description)}
    for part in HELD_OUT_PARTS:
        if config.files_of(part):
            sources[part] = _open_files(config, f"{part}_files", description)
        elif split := config.split_of(part):
            sources[part] = _open_hub_split(config, split, f"--{part}-split")
    _check_files_are_in_one_part(sources)
    return Corpus(config, description, sources)


def _open_main(config: CorpusConfig, description: dict[str, Any]) -> Source:
    if config.data_files:
        return _open_files(config, "data_files", description)
    if config.dataset_name == BUILTIN:
        from tokenizer_training.corpus.builtin import describe_builtin_corpus, read_builtin_corpus

        description["builtin"] = describe_builtin_corpus()
        return Source(read_builtin_corpus)
    return _open_hub_split(config, config.split, "--split")


def _open_files(config: CorpusConfig, setting: str, description: dict[str, Any]) -> Source:
    patterns = getattr(config, setting)
    files = tuple(find_files(patterns, flag=f"--{setting.replace('_', '-')}"))
    description[setting] = [
        {"name": file.name, "num_bytes": file.num_bytes, "fingerprint": fingerprint(file)} for file in files
    ]

    def read() -> Iterator[str]:
        stretches = (Stretch(file.name, generation=file.generation) for file in files)
        return chain.from_iterable(read_stretch(file, config.text_column, config.sample_by) for file in stretches)

    _check_not_blank(read(), " ".join(patterns))
    return Source(read, files)


def _open_hub_split(config: CorpusConfig, split: str, flag: str) -> Source:
    from datasets import load_dataset

    try:
        rows = load_dataset(
            config.dataset_name,
            config.dataset_config,
            revision=config.dataset_revision,
            split=split,
            streaming=config.streaming,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--dataset-name {config.dataset_name} (--dataset-config {config.dataset_config}, {flag} {split}) "
            f"cannot be loaded: {' '.join(str(error).split())}"
        ) from error

    def read() -> Iterator[str]:
        return dataset_texts(rows, config.text_column, str(config.dataset_name))

    _check_not_blank(read(), f"{config.dataset_name}, {flag} {split},")
    return Source(read)


def _check_files_are_in_one_part(sources: dict[str, Source]) -> None:
    part_of: dict[str, str] = {}
    for part, source in sources.items():
        for file in source.files or ():
            path = file.name if is_remote(file.name) else str(Path(file.name).resolve())
            if part_of.setdefault(path, part) != part:
                raise InputError(f"A file belongs to one part; {file.name} is named for {part_of[path]} and {part}.")


def _check_not_blank(texts: Iterable[str], source: str) -> None:
    if not any(text.strip() for text in texts):
        raise InputError(f"A corpus must hold text; every document of {source} is blank (see --text-column).")


def documents_of_part(
    config: CorpusConfig, part: str, documents: Iterable[str], limit: int | None = None
) -> Iterator[str]:
    """Return those of the documents that belong to a part: all, for a part that is not drawn.

    Args:
        config: the settings of the draw.
        part: `config.split`, or one of `validation` and `test`.
        documents: of the main part before the draw or, for a part that has documents of its own, these.
        limit: read no further than to this many documents of `config.split`.
    """
    is_drawn = part == config.split or config.percent_of(part) > 0
    if not is_drawn:
        return iter(documents)
    if not any(map(config.percent_of, HELD_OUT_PARTS)):
        return islice(documents, limit)
    return _drawn(config, part, documents, limit)


def part_share(config: CorpusConfig, part: str) -> float:
    """Return which share of the documents that are read for a part belong to it, about."""
    if part == config.split:
        return 1 - sum(map(config.percent_of, HELD_OUT_PARTS)) / 100
    return config.percent_of(part) / 100 or 1.0


def drawn_part(config: CorpusConfig, text: str) -> str:
    """Return the part of a document of the main files: a function of its text, the seed and the percentages."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(config.seed).encode()).digest()
    draw = int.from_bytes(digest, "little")
    percent = 0.0
    for part in HELD_OUT_PARTS:
        percent += config.percent_of(part)
        if draw < percent / 100 * 2**64:
            return part
    return config.split


def _drawn(config: CorpusConfig, part: str, documents: Iterable[str], limit: int | None) -> Iterator[str]:
    num_main_documents = 0
    for text in documents:
        drawn = drawn_part(config, text)
        if drawn == part:
            yield text
        if drawn == config.split:
            num_main_documents += 1
            if num_main_documents == limit:
                return
