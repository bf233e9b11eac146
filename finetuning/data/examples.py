"""Read tables (.tsv, .csv, .jsonl, .parquet and .conll files, or data sets on the Hub) and the examples in them."""

import functools
import gzip
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from finetuning.config.settings import ExamplesConfig
from finetuning.data.table_formats import ENDINGS, LINE_READERS, read_csv, read_parquet, read_tsv
from mlm_common.cli.settings import nearest_name
from mlm_common.corpus.csv_rows import DELIMITERS, parse_delimiter
from mlm_common.corpus.hub_dataset import find_builder, loading_explained, saved_splits
from mlm_common.errors import InputError
from mlm_common.storage import folder_and_name, missing, read_file
from mlm_common.storage.encodings import UTF8, decode_text
from mlm_common.storage.guard import guarded_read

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        name: name of the file, or of the data set and its split, used in error messages.
        columns: {name: values}, in the order of the file.
        form: description of the file's delimiter and encoding; empty for commas and UTF-8.
    """

    name: str
    columns: Mapping[str, Sequence[Any]]
    form: str = ""

    def column(self, name: str, flag: str) -> Sequence[Any]:
        """Return the values of the column that `flag` names; raise InputError if the column does not exist."""
        if name not in self.columns:
            near = nearest_name(name, self.columns)
            hint = f" Did you mean {near}?" if near else ""
            existing = ", ".join(
                column if column.strip() == column and column.isprintable() and column else repr(column)
                for column in self.columns
            )
            raise InputError(f"{flag} must name a column of {self.name}, which has {existing}, but no {name}.{hint}")
        return self.columns[name]

    def first(self, num_rows: int | None) -> "Table":
        """Return a table of the first rows, or of all rows if `num_rows` is None."""
        columns = {name: values[:num_rows] for name, values in self.columns.items()}
        return Table(self.name, columns, self.form)


def check_data_file(path: str, flag: str) -> None:
    """Check that the file that was given with `flag` exists."""
    folder, name = folder_and_name(path)
    if not folder.exists(name):
        raise missing(path, flag, "file")


def read_table(
    path: str,
    flag: str,
    columns: Sequence[str] | None = None,
    *,
    skips_short_rows: bool = False,
    delimiter: str | None = None,
) -> Table:
    """Read a table from a file.

    In a .tsv file only tabs and line feeds separate fields, as in GLUE; quotation marks are text. In a .csv file,
    fields may be quoted. In both formats, blank lines are skipped if there are several columns. Text files must be
    UTF-8, unless they have the byte-order mark of a different encoding.

    Args:
        path: local or `gs://`, optionally compressed as .gz.
        flag: the flag that names the file, used in error messages.
        columns: names of the columns of a .tsv file without a header.
        skips_short_rows: whether to skip lines of a .tsv file that have too few columns.
        delimiter: delimiter of a .csv file; None to detect it.

    Raises:
        InputError: the file cannot be read, has no rows, has rows with different numbers of columns, or has two columns
            with the same name.
    """
    endings = [ending.lower() for ending in PurePath(path).suffixes]
    is_compressed = endings[-1:] == [".gz"]
    ending = "".join(endings[-2:-1] if is_compressed else endings[-1:])
    if ending not in ENDINGS:
        hint = " Save the sheet as .csv." if ending in (".xlsx", ".xls", ".ods", ".numbers") else ""
        endings_text = ", ".join(ENDINGS)
        raise InputError(f"{flag} takes files ending in {endings_text}, optionally with .gz; received {path}.{hint}")
    check_data_file(path, flag)
    form = []
    with guarded_read(path, f"a readable {ending} file", flag=flag):
        content = read_file(path)
        if is_compressed:
            content = gzip.decompress(content)
        if ending == ".parquet":
            columns_read = read_parquet(path, content)
        else:
            text, encoding = decode_text(content)
            if ending == ".csv":
                columns_read, used = read_csv(path, text, parse_delimiter(delimiter))
                form += [] if used == "," else [f"{DELIMITERS.get(used, repr(used))} between columns"]
            elif ending == ".tsv":
                columns_read = read_tsv(path, text, columns, skips_short_rows=skips_short_rows)
            else:
                columns_read = LINE_READERS[ending](path, text.replace("\r\n", "\n").replace("\r", "\n"))
            form += [] if encoding == UTF8 else [encoding]
    if not columns_read or not len(next(iter(columns_read.values()))):
        raise InputError(f"{flag} must name a file with rows; {path} has none.")
    return Table(path, columns_read, ", ".join(form))


def read_hub_tables(name: str, config: str | None, revision: str | None) -> dict[str, Table]:
    """Read all splits of a data set on the Hub or in a folder; class ids become the names of the classes.

    Returns:
        {split: table}.

    Raises:
        InputError: the data set does not exist or cannot be read.
        HubAwayError: the Hub cannot be reached.
    """
    from datasets import ClassLabel, LargeList, List

    splits = saved_splits(name, "--dataset-name")
    if splits is None:
        rule = "--dataset-name must be a data set of the Hub, or a folder with one"
        with loading_explained(f"{rule}; {name} cannot be read"):
            builder = find_builder(name, config, revision)
            builder.download_and_prepare()
            splits = builder.as_dataset()
    tables = {}
    for split, rows in splits.items():
        columns: dict[str, Sequence[Any]] = {column: list(rows[column]) for column in rows.column_names}
        for column, kind in rows.features.items():
            if isinstance(kind, ClassLabel):
                columns[column] = [_class_name(kind.names, value) for value in columns[column]]
            elif isinstance(kind, List | LargeList) and isinstance(kind.feature, ClassLabel):
                names = kind.feature.names
                columns[column] = [row and [_class_name(names, value) for value in row] for row in columns[column]]
        tables[split] = Table(f"{name}, split {split}", columns)
    return tables


def _class_name(names: Sequence[str], value: int | None) -> str | None:
    return None if value in (None, -1) else names[value]  # -1 means no label


@dataclass(frozen=True)
class Examples:
    """Texts with their labels, as in a table.

    Attributes:
        name: name of the table, used in error messages.
        texts: one or two columns.
        labels: one label per row; None if the table has no labels.
    """

    name: str
    texts: tuple[Sequence[str], ...]
    labels: Sequence[Any] | None

    @property
    def num_rows(self) -> int:
        return len(self.texts[0])

    def first(self, num_rows: int | None) -> "Examples":
        """Return the first examples, or all examples if `num_rows` is None."""
        labels = None if self.labels is None else self.labels[:num_rows]
        return Examples(self.name, tuple(column[:num_rows] for column in self.texts), labels)


@dataclass(frozen=True)
class Splits:
    """All examples of a run.

    Attributes:
        train: examples to train on.
        columns: the columns that were read, as {title: text} in the printed plan.
        text_columns: names of the columns of text.
        validation: {suffix of the result keys: examples}. The first of these splits decides which checkpoint is best.
        tests: {name in the file names of the predictions: examples}.
    """

    train: Examples
    columns: dict[str, str]
    text_columns: Sequence[str]
    validation: dict[str, Examples] = field(default_factory=dict)
    tests: dict[str, Examples] = field(default_factory=dict)


def read_tables(data: ExamplesConfig, read: Callable[[str, str], Table] | None = None) -> dict[str, Table]:
    """Read the files or the data set that the flags name, up to the limits such as `--max-train-samples`.

    Args:
        data: the flags.
        read: reads a file, given its path and the flag that names it; by default `read_table`.

    Returns:
        {"train", "validation" or "test": table}.

    Raises:
        InputError: there is no training split, or `--do-predict` is given without a test split.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is not None:
        tables = read_hub_tables(data.dataset_name, data.dataset_config_name, data.dataset_revision)
        tables = {split: tables[split] for split in SPLITS if split in tables}
    else:
        read = read or functools.partial(read_table, delimiter=data.delimiter)
        files = {split: getattr(data, f"{split}_file") for split in SPLITS}
        tables = {split: read(path, f"--{split}-file") for split, path in files.items() if path is not None}
    if "train" not in tables:
        rule = "--train-file is required, or a --dataset-name with a train split"
        or_glue = ", or --task-name for a GLUE task" if hasattr(data, "task_name") else ""
        raise InputError(f"{rule}{or_glue}; received {data.dataset_name or 'nothing'}.")
    if data.predicts and "test" not in tables:
        raise InputError(
            f"--do-predict needs --test-file, or a data set with a test split; received {', '.join(tables)}."
        )
    if not data.predicts:
        tables.pop("test", None)
    limits = num_samples(data)
    return {split: tables[split].first(limits[split]) for split in SPLITS if split in tables}


def num_samples(data: ExamplesConfig) -> dict[str, int | None]:
    """Return the maximum number of examples of each split; None means all examples."""
    return {"train": data.max_train_samples, "validation": data.max_eval_samples, "test": data.max_predict_samples}


def texts_of(table: Table, names: Sequence[str], flag: str = "--text-column-names") -> tuple[Sequence[str], ...]:
    """Return the text columns that `flag` names; raise InputError if one is missing or has a value that is not text."""
    columns = tuple(table.column(name, flag) for name in names)
    for name, column in zip(names, columns, strict=True):
        for row, text in enumerate(column, start=1):
            if not isinstance(text, str):
                raise InputError(f"Column {name} of {table.name} must hold text; row {row:,} has {text!r}.")
    return columns


def warn_of_empty_texts(splits: Iterable[Examples]) -> None:
    """Warn of splits that have rows with an empty text."""
    for examples in splits:
        num_empty = sum(not all(text.strip() for text in row) for row in zip(*examples.texts, strict=True))
        if num_empty:
            logger.warning(
                "%s of %s rows of %s have an empty text. They are used as they are; remove them if the text is missing "
                "by mistake.",
                *(f"{num_empty:,}", f"{examples.num_rows:,}", examples.name),
            )
