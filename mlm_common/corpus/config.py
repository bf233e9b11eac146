"""The settings of a corpus: which text to read, and how to divide it into documents and splits."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from mlm_common.cli.settings import Bounded, Public, flag
from mlm_common.corpus.csv_rows import parse_delimiter
from mlm_common.errors import InputError

BUILTIN = "builtin"
VALIDATION = "validation"
TEST = "test"
# The splits that models are not trained on, in the order in which documents are drawn for them.
HELD_OUT_SPLITS = (VALIDATION, TEST)
SampleBy = Literal["line", "paragraph", "document"]
DEFAULT_SAMPLE_BY: SampleBy = "line"
OnBadRow = Literal["fail", "skip"]


@dataclass(frozen=True)
class CorpusConfig(Bounded):
    """Which text to read, and how to divide it into documents and splits. Each field is a flag with a help text.

    Raises:
        InputError: two settings contradict each other, or a setting is out of range.
    """

    FLAG_GROUP = "Corpus"

    dataset_name: str | None = flag(
        None,
        "Data set on the Hub (USER/NAME), or a folder that `datasets` can load. builtin needs no download: it is about "
        "25 MB of docstrings of Python's standard library and the installed packages.",
        is_usual=True,
    )
    dataset_config: Public[str | None] = flag(None, "Configuration of the Hub data set.")
    dataset_revision: Public[str | None] = flag(
        None, "Commit, tag or branch of the Hub data set. The commit is recorded. Default: the main branch."
    )
    data_files: list[str] = flag(
        list,
        "Files or quoted globs (*, ?, **), local or gs://, with the endings .txt, .jsonl, .json, .csv or .parquet. All "
        "but .parquet may also be .gz. The matches of a glob are read in sorted order.",
        is_usual=True,
    )
    validation_files: list[str] = flag(list, "Files or globs of the validation split, local or gs://.", is_usual=True)
    test_files: list[str] = flag(list, "Files or globs of the test split, local or gs://.")
    text_column: Public[str] = flag("text", "Column or JSON key with the text.")
    delimiter: Public[str | None] = flag(
        None,
        "Character between the columns of .csv files: ',', ';', '|' or tab. Default: detected from the first rows.",
        metavar="TEXT",
    )
    sample_by: SampleBy | None = flag(
        None,
        "What counts as one document in a .txt file. line: each line (as in `datasets`). paragraph: text between blank "
        "lines. document: the whole file. Required if lines are wrapped, as in books. Default: line.",
        is_usual=True,
    )
    split: Public[str] = flag(
        "train", "Split of the Hub data set to read. For other corpora, the name of the split to write."
    )
    validation_split: Public[str | None] = flag(None, "Split of the Hub data set to use for validation.")
    test_split: Public[str | None] = flag(None, "Split of the Hub data set to use for testing.")
    streaming: bool = flag(
        False, "Stream the Hub data set instead of copying it to disk. Local files are always streamed."
    )
    limit: int | None = flag(
        None,
        "Read only the first N documents of --split, to try things out. The splits of --validation-percent and "
        "--test-percent shrink in proportion. Default: all.",
        at_least=1,
    )
    validation_percent: float = flag(
        0.0,
        "Percentage of the documents to set aside for validation. They are chosen by a hash of seed and text, so equal "
        "documents are always in the same split.",
        is_usual=True,
        at_least=0,
        below=100,
    )
    test_percent: float = flag(
        0.0,
        "Percentage of the documents to set aside for testing, chosen in the same way. It does not change which "
        "documents are for validation.",
        at_least=0,
        below=100,
    )
    on_bad_row: OnBadRow = flag(
        "fail",
        "What to do with a record that cannot be read. fail: stop and say where it is. skip: leave it out and list it "
        "in the output.",
    )
    trust_remote_code: bool = flag(False, "Accepted for compatibility; the code of a data set is never run.")
    seed: int = flag(0, "Seed of --validation-percent and --test-percent, and of other draws from the corpus.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_name and self.data_files:
            raise InputError("--dataset-name cannot be combined with --data-files; received both. Drop one of them.")
        if self.dataset_name in (None, BUILTIN) and (self.dataset_config or self.dataset_revision):
            raise InputError("--dataset-config and --dataset-revision need a Hub data set in --dataset-name.")
        parse_delimiter(self.delimiter)
        flags = {"--split": self.split} | {f"--{split}-split": self.hub_split_of(split) for split in HELD_OUT_SPLITS}
        for flag_name, name in flags.items():
            if name is not None and not re.fullmatch(r"\w+([.-]\w+)*", name):
                raise InputError(
                    f"{flag_name} must be a plain name; received {name!r}. For a part of a split, use --limit."
                )
        self._check_held_out_splits()

    def _check_held_out_splits(self) -> None:
        for split in HELD_OUT_SPLITS:
            ways = [f"--{split}-percent"] * (self.percent_of(split) > 0)
            ways += [f"--{split}-files"] * bool(self.files_of(split))
            ways += [f"--{split}-split"] * bool(self.hub_split_of(split))
            if len(ways) > 1:
                raise InputError(f"The split `{split}` must come from a single origin; received {' and '.join(ways)}.")
            if self.split == split and ways:
                raise InputError(
                    f"--split {split} cannot be combined with {ways[0]}, because both name the split `{split}`. Drop "
                    "one of them."
                )
            if self.hub_split_of(split) and self.dataset_name in (None, BUILTIN):
                raise InputError(
                    f"--{split}-split needs a Hub data set in --dataset-name. For files use --{split}-files."
                )
        if self.validation_percent + self.test_percent >= 100:
            percents = f"{self.validation_percent} and {self.test_percent}"
            raise InputError(
                f"The sum of --validation-percent and --test-percent must be below 100; received {percents}."
            )
        hub_splits = [self.split, *filter(None, map(self.hub_split_of, HELD_OUT_SPLITS))]
        if self.dataset_name and len(set(hub_splits)) < len(hub_splits):
            raise InputError(
                "--split, --validation-split and --test-split must be different splits; received "
                f"{', '.join(hub_splits)}."
            )

    def percent_of(self, split: str) -> float:
        """Return the percentage of documents drawn for a split; 0 for all splits except `validation` and `test`."""
        return {VALIDATION: self.validation_percent, TEST: self.test_percent}.get(split, 0.0)

    def drawn_percents_of(self, split: str) -> tuple[float, float]:
        """Return the range of percentages that a split occupies in the draw; (0, 100) if the split is not drawn.

        Two splits drawn with the same seed share no document if their ranges do not overlap.
        """
        if split != self.split and not self.percent_of(split):
            return 0.0, 100.0
        stop = 0.0
        for held_out in HELD_OUT_SPLITS:
            start, stop = stop, stop + self.percent_of(held_out)
            if held_out == split != self.split:
                return start, stop
        return stop, 100.0

    def files_of(self, split: str) -> list[str]:
        return {VALIDATION: self.validation_files, TEST: self.test_files}[split]

    def hub_split_of(self, split: str) -> str | None:
        return {VALIDATION: self.validation_split, TEST: self.test_split}[split]

    def has_separate_source(self, split: str) -> bool:
        """Return whether a split is `validation` or `test` and has separate files or a separate split of the Hub."""
        return (
            split in HELD_OUT_SPLITS and split != self.split and bool(self.files_of(split) or self.hub_split_of(split))
        )

    def of_split(self, split: str) -> "CorpusConfig":
        """Return a copy in which all settings that do not affect the documents of a split have their defaults."""
        unused = ["streaming", "trust_remote_code"]
        unused += [f"{other}_{origin}" for other in HELD_OUT_SPLITS if other != split for origin in ("files", "split")]
        if self.has_separate_source(split):
            unused += ["data_files", "limit"] + [f"{other}_percent" for other in HELD_OUT_SPLITS]
            if self.files_of(split):
                unused += ["dataset_name", "dataset_config", "dataset_revision"]
        if self.has_separate_source(split) or not any(map(self.percent_of, HELD_OUT_SPLITS)):
            unused.append("seed")
        defaults = CorpusConfig()
        return dataclasses.replace(self, **{name: getattr(defaults, name) for name in unused})

    @property
    def txt_unit(self) -> SampleBy:
        """The unit of text that counts as one document in a .txt file."""
        return self.sample_by or DEFAULT_SAMPLE_BY

    @property
    def is_given(self) -> bool:
        return bool(self.dataset_name or self.data_files)

    @property
    def settings_given(self) -> dict[str, Any]:
        settings = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {field.name: value for field, value in settings.items() if value not in (field.default, [])}


@dataclass(frozen=True)
class SourcesConfig(Bounded):
    """Several corpora, such as languages, instead of one."""

    FLAG_GROUP = "Corpus"

    sources: str | None = flag(
        None,
        "Several sources of text, such as languages, instead of one corpus: NAME=FILE NAME=FILE …, where FILE is a "
        "file, a quoted glob or hub:USER/NAME (a data set on the Hub), and names may be repeated. Or a YAML file that "
        "maps each name to its data_files, validation_files and other flags of a corpus, and optionally a `weight`. "
        "Corpus flags on the command line are defaults for sources that do not set them.",
        metavar="FILE",
        is_usual=True,
        takes_several=True,
    )
    source_weights: list[str] = flag(
        list, "How often to read each of the --sources, relative to the others: NAME=X NAME=X …", metavar="NAME=X"
    )


@dataclass(frozen=True)
class SourceWeight(Bounded):
    """The setting that a source has in addition to the settings of a corpus."""

    weight: float | None = flag(None, "How often to read this source, relative to the others.", above=0)


def corpus_config_from_record(record: dict[str, Any]) -> CorpusConfig:
    """Read the settings from a `Corpus.record`, which may have been read from JSON.

    Raises:
        InputError: the record has settings that this version does not know.
    """
    settings = record["settings"]
    unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(CorpusConfig)})
    if unknown:
        raise InputError(f"The recorded corpus has settings unknown to this version: {', '.join(unknown)}.")
    return CorpusConfig(**settings)
