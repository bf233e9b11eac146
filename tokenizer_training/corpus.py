"""The corpus, read the same way by every stage: a Hub data set, local files, or the built-in text."""

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Literal, get_args

from tokenizer_training.command_line import InputError
from tokenizer_training.text_files import find_files, read_file, rows_to_texts

logger = logging.getLogger(__name__)

BUILTIN = "builtin"
VALIDATION = "validation"
SampleBy = Literal["line", "paragraph", "document"]


@dataclass(frozen=True)
class CorpusConfig:
    """Which text is read, and how it is divided into documents and parts.

    Raises:
        InputError: two settings contradict each other, or one is out of its range.
    """

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Data set on the Hugging Face Hub (USER/NAME), or a folder that `datasets` can load. `builtin` "
            "needs no download: the docstrings of Python's standard library and of the installed packages, about 25 MB."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the Hub data set, for one that has several."}
    )
    dataset_revision: str | None = field(
        default=None,
        metadata={"help": "Commit, tag or branch of the Hub data set. Default: its main branch, which may change."},
    )
    data_files: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Local files or quoted globs, in place of --dataset-name: .txt, .jsonl, .json, .csv, .parquet; all "
            "but the last also with .gz. Each glob's matches are read in sorted order."
        },
    )
    validation_files: list[str] = field(
        default_factory=list, metadata={"help": "Local files or globs of the part `validation`."}
    )
    text_column: str = field(default="text", metadata={"help": "Column or JSON key that holds the text."})
    sample_by: SampleBy = field(
        default="line",
        metadata={
            "help": "What is one document of a .txt file: a line (default, as in `datasets`), a paragraph (between "
            "blank lines), or the whole file (document)."
        },
    )
    split: str = field(
        default="train",
        metadata={"help": "Split of the Hub data set to read; for other corpora the name given to the part read."},
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Stream the Hub data set, without a copy on disk. Local files are always streamed."},
    )
    limit: int | None = field(
        default=None,
        metadata={
            "help": "Read only the first so many documents of --split, for trying things out. With "
            "--validation-percent, the part `validation` comes from the same stretch. Default: all."
        },
    )
    validation_percent: float = field(
        default=0.0,
        metadata={
            "help": "Percentage of the documents set apart as the part `validation`, for a corpus without one. Drawn "
            "by a hash of seed and text, so equal documents are never on both sides. Default: none."
        },
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Accepted and without effect: data sets are never run as code."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the draws from the corpus, such as --validation-percent."})

    def __post_init__(self) -> None:
        if self.dataset_name and self.data_files:
            raise InputError(
                f"The corpus is one of --dataset-name and --data-files; both were given: {self.dataset_name} and "
                f"{' '.join(self.data_files)}."
            )
        if self.dataset_name in (None, BUILTIN) and (self.dataset_config or self.dataset_revision):
            raise InputError("--dataset-config and --dataset-revision need a Hub data set in --dataset-name.")
        if self.sample_by not in get_args(SampleBy):
            raise InputError(f"--sample-by is one of {', '.join(get_args(SampleBy))}; got {self.sample_by!r}.")
        if not re.fullmatch(r"\w+([.-]\w+)*", self.split):
            raise InputError(f"--split must be a plain name (for a part of it, --limit); got {self.split!r}.")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit must be 1 or more documents; got {self.limit}.")
        if not 0 <= self.validation_percent < 100:
            raise InputError(f"--validation-percent must be at least 0 and under 100; got {self.validation_percent}.")
        if self.validation_percent and self.validation_files:
            raise InputError("The part `validation` comes from --validation-percent or --validation-files, not both.")
        if self.split == VALIDATION and (self.validation_percent or self.validation_files):
            raise InputError("--split validation leaves no name for a second validation part; drop one of the two.")

    @property
    def is_given(self) -> bool:
        """Whether a corpus was named at all."""
        return bool(self.dataset_name or self.data_files)


def corpus_config_from_record(record: dict[str, Any]) -> CorpusConfig:
    """Return the settings kept in a `Corpus.description` (also after a round trip through JSON).

    Raises:
        InputError: the record has settings that this version does not know.
    """
    settings = record.get("settings", {})
    unknown = sorted(set(settings) - {known.name for known in dataclasses.fields(CorpusConfig)})
    if unknown:
        raise InputError(f"The recorded corpus has settings unknown to this version: {', '.join(unknown)}.")
    return CorpusConfig(**settings)


@dataclass(frozen=True)
class Corpus:
    """An opened corpus. Made by `open_corpus`.

    `description` is a record, fit for JSON, of what is read: the settings, and the files with their sizes in bytes.
    """

    config: CorpusConfig
    description: dict[str, Any]
    _read_main: Callable[[], Iterable[str]]
    _read_validation: Callable[[], Iterable[str]] | None = None

    @property
    def split_names(self) -> tuple[str, ...]:
        """The parts: `config.split`, then `validation` if files or a percentage were given for it."""
        has_validation = self._read_validation is not None or self.config.validation_percent > 0
        return (self.config.split, VALIDATION) if has_validation else (self.config.split,)

    @property
    def num_text_bytes(self) -> int | None:
        """About how many bytes of text the main part has; None where its files do not tell."""
        files = self.description.get("data_files", ())
        if not files or any(file["name"].endswith((".gz", ".parquet")) for file in files) or self.config.limit:
            return None
        return sum(file["num_bytes"] for file in files)

    def documents(self, split_name: str) -> Iterator[str]:
        """Return the documents of a part, some perhaps blank; each call reads again, in the same order.

        Raises:
            InputError: no such part, or, while iterating, a file that cannot be read.
        """
        if split_name not in self.split_names:
            raise InputError(f"The corpus has the parts {', '.join(self.split_names)}; got {split_name!r}.")
        if split_name == self.config.split:
            return islice(self._train_documents(), self.config.limit)
        if self._read_validation is not None:
            return iter(self._read_validation())
        return self._drawn_validation_documents()

    def _train_documents(self) -> Iterator[str]:
        if not self.config.validation_percent:
            return iter(self._read_main())
        return (text for text in self._read_main() if not self._is_validation(text))

    def _drawn_validation_documents(self) -> Iterator[str]:
        num_train_documents = 0
        for text in self._read_main():
            if self._is_validation(text):
                yield text
            elif (num_train_documents := num_train_documents + 1) == self.config.limit:
                return

    def _is_validation(self, text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(self.config.seed).encode()).digest()
        return int.from_bytes(digest, "little") < self.config.validation_percent / 100 * 2**64


def open_corpus(config: CorpusConfig) -> Corpus:
    """Return the corpus after the checks that are cheap: its files, columns, and a first document that is not blank.

    Raises:
        InputError: no corpus given; no files match; an unknown file ending; no such data set, split or column; a part
            without any text.
    """
    if not config.is_given:
        raise InputError("A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files.")
    if config.trust_remote_code:
        logger.warning("--trust-remote-code has no effect: `datasets` does not run code from data sets any more.")
    description: dict[str, Any] = {"settings": dataclasses.asdict(config)}
    read_main = _open_main(config, description)
    read_validation = None
    if config.validation_files:
        read_validation = _open_files(config, config.validation_files, "validation_files", description)
    corpus = Corpus(config, description, read_main, read_validation)
    if config.dataset_name != BUILTIN:
        _check_not_blank(read_main(), config.dataset_name or " ".join(config.data_files))
    if read_validation is not None:
        _check_not_blank(read_validation(), " ".join(config.validation_files))
    return corpus


def _open_main(config: CorpusConfig, description: dict[str, Any]) -> Callable[[], Iterable[str]]:
    if config.data_files:
        return _open_files(config, config.data_files, "data_files", description)
    if config.dataset_name == BUILTIN:
        from tokenizer_training.builtin_corpus import describe_builtin_corpus, read_builtin_corpus

        description["builtin"] = describe_builtin_corpus()
        return read_builtin_corpus
    rows = _load_hub_dataset(config)
    return lambda: rows_to_texts(rows, config.text_column, str(config.dataset_name))


def _open_files(
    config: CorpusConfig, patterns: list[str], setting: str, description: dict[str, Any]
) -> Callable[[], Iterable[str]]:
    files = find_files(patterns, flag=f"--{setting.replace('_', '-')}")
    description[setting] = [{"name": name, "num_bytes": num_bytes} for name, num_bytes in files.items()]
    return lambda: chain.from_iterable(read_file(name, config.text_column, config.sample_by) for name in files)


def _load_hub_dataset(config: CorpusConfig) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(
            config.dataset_name,
            config.dataset_config,
            revision=config.dataset_revision,
            split=config.split,
            streaming=config.streaming,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--dataset-name {config.dataset_name} (--dataset-config {config.dataset_config}, --split {config.split}) "
            f"cannot be loaded: {' '.join(str(error).split())}"
        ) from error


def _check_not_blank(texts: Iterable[str], source: str) -> None:
    if not any(text.strip() for text in texts):
        raise InputError(f"A corpus must hold text; every document of {source} is blank (see --text-column).")
