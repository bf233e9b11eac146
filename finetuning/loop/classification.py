"""A run of classification: its examples and model opened, its results written."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from transformers import PretrainedConfig

from finetuning.config.settings import ClassificationConfig, ClassificationData
from finetuning.data.examples import Examples, read_parts
from finetuning.data.glue import GLUE_TASKS
from finetuning.data.inputs import ExampleInputs
from finetuning.data.labels import Labels, find_labels
from finetuning.data.rows import EncodedRows, encode_texts
from finetuning.loop.model import open_model, source_of, starting_model
from finetuning.loop.results import named, train_results, write_predictions, write_results
from finetuning.loop.training import Job, Predict
from finetuning.scores.classification import COMBINED, OWN_METRICS, baseline, check_packages, scores
from finetuning.scores.pictures import MAX_CLASSES, confusion_counts, draw_confusion
from finetuning.tasks.classification import TextClassification
from mlm_common.storage import open_folder
from tokenizer_training.tokenizer import special_ids
from train.loop.run import Run
from train.model.architectures import uses_token_types
from train.model.config import resolve_model_config
from train.model.from_pretrained import set_labels
from train.runtime.cluster import Cluster
from train.runtime.run_folder import CONFUSION_NAME

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Examples as the model takes them, and their labels; None where they have none."""

    rows: EncodedRows
    labels: NDArray[Any] | None


class Classification(Job[ClassificationConfig]):
    """The job of `run_classification.py`."""

    def open_run(self, config: ClassificationConfig, cluster: Cluster) -> Run:
        """Read and encode the examples, and make task and model configuration of them.

        Raises:
            InputError: whatever is wrong with examples, labels, tokenizer or model.
        """
        check_packages()
        init_from = starting_model(str(config.model.init_from))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, init_from=init_from))
        data = config.data
        model_config, tokenizer, source = open_model(config)
        parts = read_parts(data)
        labels = _labels(data, parts.train, model_config)

        def part(examples: Examples) -> Part:
            encoded = None if examples.labels is None else labels.encode(examples.labels, examples.name)
            rows = encode_texts(
                tokenizer,
                examples.texts,
                max_length=data.max_seq_length,
                token_types=uses_token_types(model_config),
                labels=labels.nothing(examples.num_rows) if encoded is None else encoded,
            )
            return Part(rows, encoded)

        train = part(parts.train)
        self.labels = labels
        self.validation = {ending: part(examples) for ending, examples in parts.validation.items()}
        self.tests = {name: part(examples) for name, examples in parts.tests.items()}
        first = next(iter(self.validation.values()), None)
        inputs = ExampleInputs(
            train.rows, first.rows if first else None, tokenizer, source, data.lengths, source_of(data)
        )
        metrics = GLUE_TASKS[data.task_name].metrics if data.task_name else OWN_METRICS[labels.problem_type]
        guess = {}
        if first is not None and first.labels is not None and train.labels is not None:
            guess = scores(metrics, baseline(labels, train.labels, len(first.labels)), first.labels)
        task = TextClassification(
            labels,
            first.labels if first else None,
            metrics,
            data.metric_name or (COMBINED if data.task_name and len(metrics) > 1 else None),
            pad_token_id=special_ids(tokenizer)["pad"],
            token_types=uses_token_types(model_config),
            guess=guess,
        )
        resolved = resolve_model_config(config.model, inputs)
        set_labels(resolved, labels.by_id)
        resolved.problem_type = labels.problem_type
        return Run(config, inputs, task, resolved, cluster)

    def write_results(self, trainer: "Trainer", figures: dict[str, float] | None, step: int, predict: Predict) -> None:
        """Write the scores, and the predictions of the test parts."""
        run, task = trainer.run, trainer.run.task
        assert isinstance(task, TextClassification)
        train = train_results(trainer, step)
        evaluated: dict[str, Any] = {}
        for ending, part in self.validation.items():
            of_part = figures if ending == "" else None
            if of_part is None and part.labels is not None:
                of_part = task.figures_of(predict(part.rows), part.labels)
            evaluated |= {f"{name}{ending}": value for name, value in named(of_part or {}).items()}
        if evaluated:
            evaluated |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        predicted: dict[str, Any] = {}
        predictions = {}
        for name, part in self.tests.items():
            totals = predict(part.rows)
            predictions[name] = [_shown(one, self.labels) for one in task.predictions(totals)]
            if part.labels is not None:
                predicted |= named(task.figures_of(totals, part.labels))
        picture = self._confusion(predict, task)
        if not run.cluster.is_chief:
            return
        if picture is not None:
            open_folder(run.output_dir).write_bytes(CONFUSION_NAME, picture)
        write_results(run.output_dir, {"train": train, "eval": evaluated, "predict": predicted})
        for name, lines in predictions.items():
            write_predictions(run.output_dir, name, lines)
        if figures and figures["is_degenerate"]:
            logger.warning("All rows to evaluate on are predicted alike: nothing was learned.")

    def _confusion(self, predict: Predict, task: TextClassification) -> bytes | None:
        """Draw which classes are taken for which, of the rows to evaluate on; None where that says nothing."""
        part = self.validation.get("")
        if part is None or part.labels is None or not task.is_one_class or len(self.labels.names) > MAX_CLASSES:
            return None
        counts = confusion_counts(part.labels, task.predictions(predict(part.rows)), len(self.labels.names))
        return draw_confusion(counts, self.labels.names)


def _labels(data: ClassificationData, train: Examples, model_config: PretrainedConfig) -> Labels:
    assert train.labels is not None
    problem_type = data.problem_type
    if data.task_name is not None:
        task = GLUE_TASKS[data.task_name]
        problem_type = "regression" if task.is_regression else "single_label_classification"
        if task.label_names:
            return Labels(problem_type, task.label_names)
    is_classifier = any("ForSequenceClassification" in name for name in model_config.architectures or ())
    known = model_config.id2label if is_classifier else None
    return find_labels(train.labels, train.name, problem_type, known)


def _shown(prediction: Any, labels: Labels) -> str:
    """Write a prediction: the names of its classes, divided by commas, or its number."""
    if labels.problem_type == "regression":
        return f"{prediction:.3f}"
    if labels.problem_type == "multi_label_classification":
        return ",".join(name for name, holds in zip(labels.names, prediction, strict=True) if holds)
    return labels.names[int(prediction)]
