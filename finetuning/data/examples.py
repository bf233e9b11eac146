"""Examples: texts, or pairs of texts, and the values of their labels in a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetuning.config.settings import ExamplesConfig
from finetuning.data.tables import Table, read_hub_tables, read_table
from mlm_common.errors import InputError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Examples:
    """Texts with labels as in a table.

    name: of the table.
    texts: one or two columns.
    labels: None where there are none.
    """

    name: str
    texts: tuple[Sequence[str], ...]
    labels: Sequence[Any] | None

    @property
    def num_rows(self) -> int:
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


def read_tables(data: ExamplesConfig, read: Callable[[str, str], Table] = read_table) -> dict[str, Table]:
    """Read the files or splits that the flags name, {train, validation or test: table}, cut to --max-train-samples etc.

    Args:
        data: names them.
        read: reads a file, which a flag names.

    Raises:
        InputError: there is nothing to train on, or to predict with --do-predict.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is not None:
        tables = read_hub_tables(data.dataset_name, data.dataset_config_name, data.dataset_revision)
        tables = {split: tables[split] for split in SPLITS if split in tables}
    else:
        files = {split: getattr(data, f"{split}_file") for split in SPLITS}
        tables = {split: read(path, f"--{split}-file") for split, path in files.items() if path is not None}
    if "train" not in tables:
        rule = "--train-file is required, or a --dataset-name with a split train"
        of_glue = ", or --task-name for a task of GLUE" if hasattr(data, "task_name") else ""
        raise InputError(f"{rule}{of_glue}; received {data.dataset_name or 'nothing'}.")
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


def texts_of(table: Table, names: Sequence[str], flag: str = "--text-column-names") -> tuple[Sequence[str], ...]:
    """Look up the columns of text, which `flag` names."""
    columns = tuple(table.column(name, flag) for name in names)
    for name, column in zip(names, columns, strict=True):
        for row, text in enumerate(column, start=1):
            if not isinstance(text, str):
                raise InputError(f"Column {name} of {table.name} must hold text; row {row:,} has {text!r}.")
    return columns
