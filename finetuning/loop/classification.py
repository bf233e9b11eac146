"""A run of classification: its examples and model opened, and a picture of its results."""

import logging
from typing import Any

from numpy.typing import NDArray
from transformers import PretrainedConfig

from finetuning.config.settings import ClassificationConfig, ClassificationData
from finetuning.data.examples import Examples, read_parts
from finetuning.data.glue import GLUE_TASKS
from finetuning.data.labels import LabelReading, Labels, find_labels
from finetuning.data.rows import encode_texts
from finetuning.loop.model import open_start
from finetuning.loop.rows import Part, RowsJob
from finetuning.scores.classification import COMBINED, DEFAULT_METRICS, baseline, check_packages, scores
from finetuning.scores.plots import MAX_CLASSES, confusion_counts, draw_confusion
from finetuning.tasks.classification import TextClassification
from mlm_common.storage import Folder
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.runtime.run_folder import CONFUSION_NAME

logger = logging.getLogger(__name__)


class Classification(RowsJob[ClassificationConfig]):
    """The job of `run_classification.py`."""

    def open_run(self, config: ClassificationConfig, cluster: Cluster) -> Run:
        """Read and encode the examples, and make task and model configuration of them.

        Raises:
            InputError: whatever is wrong with examples, labels, tokenizer or model.
        """
        check_packages()
        start, data = open_start(config), config.data
        parts = read_parts(data)
        labels = _labels(data, parts.train, start.model_config)

        def part(examples: Examples, *, is_test: bool = False) -> Part:
            encoded, is_labelled = None, None
            if examples.labels is not None and is_test:
                encoded, is_labelled = labels.encode_known(examples.labels, examples.name)
                if not is_labelled.all():
                    logger.warning(
                        "%s of %s rows of %s have a label that occurs in training; the others are not scored.",
                        f"{is_labelled.sum():,}",
                        f"{len(is_labelled):,}",
                        examples.name,
                    )
                    encoded = encoded if is_labelled.any() else None
            elif examples.labels is not None:
                encoded = labels.encode(examples.labels, examples.name)
            rows = encode_texts(
                start.tokenizer,
                examples.texts,
                max_length=data.max_seq_length,
                token_types=start.token_types,
                labels=labels.nothing(examples.num_rows) if encoded is None else encoded,
            )
            return Part(rows, encoded, is_labelled)

        train = part(parts.train)
        self.validation = {ending: part(examples) for ending, examples in parts.validation.items()}
        self.tests = {name: part(examples, is_test=True) for name, examples in parts.tests.items()}
        first = next(iter(self.validation.values()), None)
        metrics = GLUE_TASKS[data.task_name].metrics if data.task_name else DEFAULT_METRICS[labels.problem_type]
        guess = {}
        if first is not None and first.labels is not None and train.labels is not None:
            guess = scores(metrics, baseline(labels, train.labels, len(first.labels)), first.labels)
        task = TextClassification(
            labels,
            first.labels if first else None,
            metrics,
            data.metric_name or (COMBINED if data.task_name and len(metrics) > 1 else None),
            guess=guess,
            num_texts=len(parts.text_columns),
            **start.of_rows,
        )
        assert train.labels is not None
        described = parts.columns | labels.describe(train.labels)
        described["first label"] = task.shown(train.labels[0]) or "none of the classes"
        eval_rows = first.rows if first else None
        task.takes_pairs = len(parts.text_columns) == 2
        recorded = {"text_columns": list(parts.text_columns)}
        run = start.run(task, train.rows, eval_rows, cluster, labels.by_id, described=described, recorded=recorded)
        run.phases[0].model_config.problem_type = labels.problem_type
        return run

    def write_more(self, folder: Folder, task: TextClassification, predictions: NDArray[Any]) -> None:
        """Draw which classes are taken for which, where each row has one of a few."""
        names = task.labels.names
        if not task.is_one_class or len(names) > MAX_CLASSES or task.references is None:
            return
        counts = confusion_counts(task.references, predictions, len(names))
        folder.write_bytes(CONFUSION_NAME, draw_confusion(counts, names))


def _labels(data: ClassificationData, train: Examples, model_config: PretrainedConfig) -> Labels:
    assert train.labels is not None
    reading = LabelReading(
        data.problem_type, data.label_separator, data.decimal_separator, data.label_lists, data.similar_labels
    )
    if data.task_name is not None:
        task = GLUE_TASKS[data.task_name]
        reading = LabelReading("regression" if task.is_regression else "single_label_classification")
        if task.label_names:
            return Labels("single_label_classification", task.label_names)
    is_classifier = any("ForSequenceClassification" in name for name in model_config.architectures or ())
    known = model_config.id2label if is_classifier else None
    return find_labels(train.labels, train.name, reading, known)
