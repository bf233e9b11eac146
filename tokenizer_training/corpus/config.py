"""The settings of a corpus: which text is read, and how it is divided into documents and parts."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mlm_common.errors import InputError

BUILTIN = "builtin"
VALIDATION = "validation"
TEST = "test"
# The parts that are not trained on, in the order in which they are drawn.
HELD_OUT_PARTS = (VALIDATION, TEST)
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
            "help": "Files or quoted globs (*, ?, **), local or gs://, in place of --dataset-name: .txt, .jsonl, "
            ".json, .csv, .parquet; all but the last also with .gz. Each glob's matches are read in sorted order."
        },
    )
    validation_files: list[str] = field(
        default_factory=list, metadata={"help": "Files or globs of the part `validation`, local or gs://."}
    )
    test_files: list[str] = field(
        default_factory=list, metadata={"help": "Files or globs of the part `test`, local or gs://."}
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
    validation_split: str | None = field(
        default=None, metadata={"help": "Split of the Hub data set that becomes the part `validation`."}
    )
    test_split: str | None = field(
        default=None, metadata={"help": "Split of the Hub data set that becomes the part `test`."}
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Stream the Hub data set, without a copy on disk. Local files are always streamed."},
    )
    limit: int | None = field(
        default=None,
        metadata={
            "help": "Read only the first so many documents of --split, for trying things out. Parts drawn by "
            "--validation-percent and --test-percent come from the same stretch. Default: all."
        },
    )
    validation_percent: float = field(
        default=0.0,
        metadata={
            "help": "Percentage of the documents set apart as the part `validation`, for a corpus without one. Drawn "
            "by a hash of seed and text, so equal documents are never on both sides. Default: none."
        },
    )
    test_percent: float = field(
        default=0.0,
        metadata={
            "help": "Percentage of the documents set apart as the part `test`, by the same draw; --validation-percent "
            "draws the same documents with it and without. Default: none."
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
        splits = {"--split": self.split} | {f"--{part}-split": self.split_of(part) for part in HELD_OUT_PARTS}
        for flag, split in splits.items():
            if split is not None and not re.fullmatch(r"\w+([.-]\w+)*", split):
                raise InputError(f"{flag} must be a plain name (for a part of it, --limit); got {split!r}.")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit must be 1 or more documents; got {self.limit}.")
        self._check_held_out_parts()

    def _check_held_out_parts(self) -> None:
        for part in HELD_OUT_PARTS:
            if not 0 <= self.percent_of(part) < 100:
                raise InputError(f"--{part}-percent must be at least 0 and under 100; got {self.percent_of(part)}.")
            ways = [f"--{part}-percent"] * (self.percent_of(part) > 0)
            ways += [f"--{part}-files"] * bool(self.files_of(part)) + [f"--{part}-split"] * bool(self.split_of(part))
            if len(ways) > 1:
                raise InputError(f"The part `{part}` comes from {' or '.join(ways)}, not both.")
            if self.split == part and ways:
                raise InputError(f"--split {part} leaves no name for another part `{part}`; drop it or {ways[0]}.")
            if self.split_of(part) and self.dataset_name in (None, BUILTIN):
                raise InputError(f"--{part}-split needs a Hub data set in --dataset-name; for files, --{part}-files.")
        if self.validation_percent + self.test_percent >= 100:
            raise InputError(
                "--validation-percent and --test-percent must be under 100 together, to leave something to train on; "
                f"got {self.validation_percent} and {self.test_percent}."
            )
        splits = [self.split, *filter(None, map(self.split_of, HELD_OUT_PARTS))]
        if self.dataset_name and len(set(splits)) < len(splits):
            raise InputError(
                f"--split, --validation-split and --test-split must be different splits; got {', '.join(splits)}."
            )

    def percent_of(self, part: str) -> float:
        """Return the percentage of documents drawn for a part: 0 for all but `validation` and `test`."""
        return {VALIDATION: self.validation_percent, TEST: self.test_percent}.get(part, 0.0)

    def files_of(self, part: str) -> list[str]:
        """Return the patterns of the files of `validation` or `test`, if it has any."""
        return {VALIDATION: self.validation_files, TEST: self.test_files}[part]

    def split_of(self, part: str) -> str | None:
        """Return which split of the Hub data set `validation` or `test` is, if any."""
        return {VALIDATION: self.validation_split, TEST: self.test_split}[part]

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
