"""The tasks of GLUE (Wang et al. 2018): their files, columns and metrics, and the format of submissions.

The files are from the download at https://gluebenchmark.com/tasks, and are .tsv files without quoting.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetuning.config.settings import ClassificationData
from finetuning.data.examples import Examples, Splits, Table, read_hub_tables, read_table, texts_of

# Id of GLUE on the Hub.
HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Attributes:
        folder: name of the task's folder in the download.
        texts: columns of text in the download.
        label: column of labels in the download.
        metrics: one or two metrics. The task's score is the first metric, or the mean of both.
        hub_texts: columns of text on the Hub.
        columns: names of all columns, if the training and validation files have no header.
        label_names: names of the classes, indexed by the digit in the files; empty if the files contain the names.
        validation: {suffix of the result keys: file}. The first file decides which checkpoint is best.
        tests: {suffix in the predictions' file name: (file of the download, name in a submission)}; empty for the usual
            single test file. A file name with a slash includes its folder.
        skips_short_rows: whether the labelled files have incomplete lines, which are not examples.
        is_regression: whether the label is a number.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    metrics: tuple[str, ...]
    hub_texts: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    label_names: tuple[str, ...] = ()
    validation: Mapping[str, str] = field(default_factory=lambda: {"": "dev"})
    tests: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    skips_short_rows: bool = False
    is_regression: bool = False

    @property
    def all_tests(self) -> Mapping[str, tuple[str, str]]:
        """The files in `tests`, or by default the usual single test file."""
        return self.tests or {"": ("test", self.folder)}


SENTENCE, PAIR = ("sentence",), ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
# GLUE's diagnostic pairs, which are predicted with models for MNLI. These pairs show which kinds of inference a model
# has learned.
DIAGNOSTIC = "diagnostic/diagnostic"

GLUE_TASKS = {
    "cola": GlueTask(
        "CoLA", SENTENCE, "label", ("matthews_correlation",), SENTENCE, columns=("source", "label", "mark", "sentence"),
        label_names=("unacceptable", "acceptable"),
    ),
    "mnli": GlueTask(
        "MNLI", PAIR, "gold_label", ("accuracy",), ("premise", "hypothesis"),
        validation={"": "dev_matched", "_mm": "dev_mismatched"},
        tests={
            "": ("test_matched", "MNLI-m"), "-mm": ("test_mismatched", "MNLI-mm"), "-ax": (DIAGNOSTIC, "AX"),
        },
    ),
    "mrpc": GlueTask(
        "MRPC", ("#1 String", "#2 String"), "Quality", ("accuracy", "f1"), PAIR,
        label_names=("not_equivalent", "equivalent"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", ("accuracy",), ("question", "sentence")),
    "qqp": GlueTask(
        "QQP", ("question1", "question2"), "is_duplicate", ("accuracy", "f1"), ("question1", "question2"),
        label_names=("not_duplicate", "duplicate"), skips_short_rows=True,
    ),
    "rte": GlueTask("RTE", PAIR, "label", ("accuracy",), PAIR),
    "sst2": GlueTask("SST-2", SENTENCE, "label", ("accuracy",), SENTENCE, label_names=("negative", "positive")),
    "stsb": GlueTask("STS-B", PAIR, "score", ("pearson", "spearmanr"), PAIR, is_regression=True),
    "wnli": GlueTask("WNLI", PAIR, "label", ("accuracy",), PAIR, label_names=ENTAILMENT[::-1]),
}  # fmt: skip


def read_glue(data: ClassificationData, task: GlueTask) -> Splits:
    """Read a task from the download or from the Hub."""
    texts, label = (task.hub_texts, "label") if data.glue_dir is None else (task.texts, task.label)

    @functools.cache
    def hub(config: str) -> dict[str, Table]:
        return read_hub_tables(HUB_NAME, config, data.dataset_revision)

    def read_split(file: str, limit: int | None, *, has_labels: bool) -> Examples:
        if data.glue_dir is None:
            # The diagnostics are a separate configuration of the Hub's data set. The Hub's other splits have the names
            # of the download's files, except that dev is called validation.
            config, split = ("ax", "test") if file == DIAGNOSTIC else (str(data.task_name), file)
            table = hub(config)[split.replace("dev", "validation")].first(limit)
        else:
            path = f"{data.glue_dir.rstrip('/')}/{file if '/' in file else f'{task.folder}/{file}'}.tsv"
            columns = task.columns if has_labels else None
            skips = task.skips_short_rows and has_labels  # a submission needs a prediction for every test row
            table = read_table(path, "--glue-dir", columns, skips_short_rows=skips).first(limit)
        labels = table.column(label, "--task-name") if has_labels else None
        if labels is not None and task.label_names:
            labels = [task.label_names[int(value)] if value in ("0", "1") else value for value in labels]
        return Examples(table.name, texts_of(table, texts), labels)

    tests = task.all_tests if data.predicts else {}
    train = read_split("train", data.max_train_samples, has_labels=True)
    return Splits(
        train,
        {"texts": " and ".join(texts), "labels": f"{label} of {train.name}"},
        texts,
        {ending: read_split(file, data.max_eval_samples, has_labels=True) for ending, file in task.validation.items()},
        {
            f"{data.task_name}{ending}": read_split(file, data.max_predict_samples, has_labels=False)
            for ending, (file, _) in tests.items()
        },
    )
