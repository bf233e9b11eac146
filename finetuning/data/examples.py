"""The parts of a task of classification: texts, or pairs of texts, with what stands for their labels."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetuning.config.settings import ClassificationData, ExamplesConfig
from finetuning.data.glue import GLUE_TASKS, HUB_CONFIGS, HUB_NAME, HUB_SPLITS, GlueTask
from finetuning.data.labels import is_missing
from finetuning.data.tables import Table, read_hub_tables, read_table
from mlm_common.cli.settings import require
from mlm_common.errors import InputError

NO_TEXT = ("id", "idx", "index")
# What pandas calls the column that it writes its index to: in .csv, where that is read and written again, in .parquet.
INDEX_OF_PANDAS = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Examples:
    """Texts with labels as they stand in a table.

    name: where they stand.
    texts: one or two columns.
    labels: None where there are none.
    """

    name: str
    texts: tuple[Sequence[str], ...]
    labels: Sequence[Any] | None

    @property
    def num_rows(self) -> int:
        """Number of examples."""
        return len(self.texts[0])

    def first(self, num_rows: int | None) -> "Examples":
        """Keep the first examples; all by default."""
        labels = None if self.labels is None else self.labels[:num_rows]
        return Examples(self.name, tuple(column[:num_rows] for column in self.texts), labels)


@dataclass(frozen=True)
class Parts:
    """All examples of a run.

    columns: which columns were read as what, {title: text}, for the plan.
    text_columns: those of the texts.
    validation: {ending of the names of the figures: examples}; the first is the one that checkpoints are chosen by.
    tests: {name of the predictions: examples}.
    """

    train: Examples
    columns: dict[str, str]
    text_columns: Sequence[str]
    validation: dict[str, Examples] = field(default_factory=dict)
    tests: dict[str, Examples] = field(default_factory=dict)


def read_parts(data: ClassificationData) -> Parts:
    """Read the examples to train on, to evaluate on and to predict.

    Raises:
        InputError: a file, a column, a text or a label is not there.
        HubAwayError: the Hub cannot be reached.
    """
    if data.task_name is not None:
        return _read_glue(data, GLUE_TASKS[data.task_name])
    tables = your_tables(data)
    texts = data.text_column_names or _text_columns(tables["train"], data)
    left_out = [repr(name) for name in tables["train"].columns if name not in (*texts, data.label_column_name)]
    note = f"; not read: {', '.join(left_out)}" if left_out else ""
    columns = {"texts": " and ".join(texts) + note, "labels": f"{data.label_column_name} of {tables['train'].name}"}

    def examples(split: str) -> dict[str, Examples]:
        return {"": _examples(tables[split], texts, data, needs_labels=split != "test")} if split in tables else {}

    tests = examples("test") if data.predicts else {}
    return Parts(
        examples("train")[""],
        columns,
        texts,
        examples("validation"),
        {f"test{key}": one for key, one in tests.items()},
    )


def read_examples_to_predict(path: str, data: ClassificationData) -> Examples:
    """Read the texts of a file, which `--file` names, without their labels.

    Raises:
        InputError: there is no such file, column or text.
    """
    is_cut = data.task_name is not None and GLUE_TASKS[data.task_name].skips_short_rows
    table = read_table(path, "--file", skips_short_rows=is_cut)
    return Examples(table.name, _texts(table, data.text_column_names or _text_columns(table, data)), None)


def your_tables(data: ExamplesConfig) -> dict[str, Table]:
    """Read files or splits, {train, validation or test: table}, of those that are named, cut to as many rows as asked.

    Raises:
        InputError: there is nothing to train on, or to predict where that is asked for.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is not None:
        tables = read_hub_tables(data.dataset_name, data.dataset_config_name, data.dataset_revision)
        tables = {split: tables[split] for split in SPLITS if split in tables}
    else:
        files = {split: getattr(data, f"{split}_file") for split in SPLITS}
        tables = {split: read_table(path, f"--{split}-file") for split, path in files.items() if path is not None}
    if "train" not in tables:
        rule = "--train-file is required, or a --dataset-name with a split train, or --task-name for a task of GLUE"
        raise InputError(f"{rule}; received {data.dataset_name or 'nothing'}.")
    if data.predicts and "test" not in tables:
        raise InputError(
            f"--do-predict needs a part to predict: --test-file, or a split test; received {', '.join(tables)}."
        )
    if not data.predicts:
        tables.pop("test", None)
    limits = num_samples(data)
    return {split: tables[split].first(limits[split]) for split in SPLITS if split in tables}


def num_samples(data: ExamplesConfig) -> dict[str, int | None]:
    """Map each part to the number of its examples that are used; None where all are."""
    return {
        "train": data.max_train_samples,
        "validation": data.max_eval_samples,
        "test": data.max_predict_samples,
    }


def _text_columns(table: Table, data: ClassificationData) -> list[str]:
    names = [
        name
        for name in table.columns
        if name != data.label_column_name and name.lower() not in NO_TEXT and not INDEX_OF_PANDAS.fullmatch(name)
    ]
    require(
        1 <= len(names) <= 2,
        f"must name the columns of {table.name} with text, unless there are one or two besides "
        f"{data.label_column_name}",
        "--text-column-names",
        f"nothing, with the columns {', '.join(table.columns)}",
    )
    for name in names:
        if all(str(value).strip().isdecimal() for value in table.columns[name]):
            others = " ".join(one for one in names if one != name)
            raise InputError(
                f"Column {name} of {table.name} holds whole numbers, which are rarely texts. Use --text-column-names "
                f"{' '.join(names)} if it is one" + (f", --text-column-names {others} if not." if others else ".")
            )
    return names


def _examples(table: Table, texts: Sequence[str], data: ClassificationData, *, needs_labels: bool) -> Examples:
    labels: Sequence[Any] | None = None
    if needs_labels or data.label_column_name in table.columns:
        labels = table.column(data.label_column_name, "--label-column-name")
        if not needs_labels and all(map(is_missing, labels)):
            labels = None
    return Examples(table.name, _texts(table, texts), labels)


def _texts(table: Table, names: Sequence[str]) -> tuple[Sequence[str], ...]:
    columns = tuple(table.column(name, "--text-column-names") for name in names)
    for name, column in zip(names, columns, strict=True):
        for row, text in enumerate(column, start=1):
            if not isinstance(text, str):
                raise InputError(f"Column {name} of {table.name} must hold text; row {row:,} has {text!r}.")
    return columns


def _read_glue(data: ClassificationData, task: GlueTask) -> Parts:
    @functools.cache
    def hub(config: str) -> dict[str, Table]:
        return read_hub_tables(HUB_NAME, config, data.dataset_revision)

    def part(file: str, limit: int | None, *, has_labels: bool) -> Examples:
        if data.glue_dir is None:
            table = hub(HUB_CONFIGS.get(file, str(data.task_name)))[HUB_SPLITS[file]].first(limit)
            texts, label = task.hub_texts, "label"
        else:
            path = f"{data.glue_dir.rstrip('/')}/{file if '/' in file else f'{task.folder}/{file}'}.tsv"
            columns = task.columns if has_labels else None
            table = read_table(path, "--glue-dir", columns, skips_short_rows=task.skips_short_rows).first(limit)
            texts, label = task.texts, task.label
        labels = table.column(label, "--task-name") if has_labels else None
        if labels is not None and task.label_names:
            labels = [task.label_names[int(value)] if value in ("0", "1") else value for value in labels]
        return Examples(table.name, _texts(table, texts), labels)

    tests = task.all_tests if data.predicts else {}
    texts, label = (task.hub_texts, "label") if data.glue_dir is None else (task.texts, task.label)
    train = part("train", data.max_train_samples, has_labels=True)
    return Parts(
        train,
        {"texts": " and ".join(texts), "labels": f"{label} of {train.name}"},
        texts,
        {ending: part(file, data.max_eval_samples, has_labels=True) for ending, file in task.validation.items()},
        {
            f"{data.task_name}{ending}": part(file, data.max_predict_samples, has_labels=False)
            for ending, (file, _) in tests.items()
        },
    )
