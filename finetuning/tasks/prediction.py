"""Open a fine-tuned model and predict with it, with the code, the settings and the row lengths of its training run."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.prediction import PredictionConfig
from finetuning.config.settings import (
    ChoiceData,
    ClassificationData,
    CustomData,
    ExamplesConfig,
    QuestionData,
    TaggingData,
)
from finetuning.data.examples import Examples, read_table
from finetuning.data.inputs import run_on_rows
from finetuning.data.labels import Labels, ProblemType
from finetuning.loop.model import ReadModel
from finetuning.loop.task import ExampleTask, RowTask, Split
from finetuning.tasks.choice import (
    Choices,
    MultipleChoice,
    check_num_choices,
    columns_of,
    encode_choices,
    numbers_from_0,
    read_choices,
)
from finetuning.tasks.classification import TextClassification, read_examples_to_predict
from finetuning.tasks.custom import load_task
from finetuning.tasks.metrics import DEFAULT_METRICS, probabilities
from finetuning.tasks.questions import QuestionAnswering
from finetuning.tasks.squad import Question, read_questions_to_predict
from finetuning.tasks.tagging import Sentences, Tagging, encode_sentences, read_sentences_to_predict, values_of_words
from finetuning.tasks.windows import make_windows
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED
from mlm_common.storage import check_folder_or_hub, local_or_hub
from mlm_common.tokenizer import load_tokenizer
from train import load_tensorflow
from train.model.architectures import check_architecture, max_positions
from train.model.pretrained_files import class_name_of, find_file, read_config
from train.runtime.run_folder import EXPORT_FOLDER, RunFolder, exported_model

# Rows per batch for a model whose training run, and so its batch size, is unknown.
BATCH_ROWS = 32
# Maximum number of tokens per row, for a model without a limit.
DEFAULT_LENGTH = 512
# Maximum number of answers and classes that are printed for each text.
NUM_SHOWN = 5
# Name of the first label in a configuration that does not name its labels.
DEFAULT_LABEL = "LABEL_0"

# The results of `ExampleTask.prediction_outputs` for all rows.
Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class OpenedModel(ReadModel):
    """A fine-tuned model to predict with.

    Attributes:
        name: name of the model, as the user gave it.
        folder: local folder or Hub id that transformers can load.
        record: content of the training run's `run.json`; empty for an export without its run.
    """

    name: str
    folder: str
    record: Mapping[str, Any]

    @property
    def class_name(self) -> str:
        return class_name_of(self.model_config)

    @property
    def label_names(self) -> tuple[str, ...]:
        names = self.model_config.id2label
        return tuple(names[index] for index in sorted(names))

    @property
    def run_info(self) -> Mapping[str, Any]:
        """The facts about its examples that the training run stored."""
        return self.record.get("train_data") or {}

    def settings(self, data_class: type[ExamplesConfig], **changes: Any) -> Any:
        """Return the `data` settings of the training run with changes.

        Args:
            data_class: class of the settings.
            changes: {setting: value}. None leaves a setting unchanged.

        Raises:
            InputError: the model does not take rows as long as `max_seq_length`.
        """
        settings = self.record["settings"]["data"] if self.record else {}
        names = {field.name for field in dataclasses.fields(data_class) if field.init}
        settings = {name: value for name, value in settings.items() if name in names and value != REDACTED}
        settings.pop("delimiter", None)  # the delimiter describes the training files
        longest = max_positions(self.model_config)
        if changes.get("max_seq_length") is not None or not settings:
            settings["length_buckets"] = []
            limits = [limit for limit in (longest, self.tokenizer.model_max_length) if limit is not None]
            settings["max_seq_length"] = min(limits) if min(limits) < 1e9 else DEFAULT_LENGTH
        data = data_class(**settings | {name: value for name, value in changes.items() if value is not None})
        if longest is not None and data.max_seq_length > longest:
            rule = f"must be at most {longest}, the longest row that {self.name} can take"
            raise InputError(f"--max-seq-length {rule}; received {data.max_seq_length}.")
        return data


class Predictor(ABC):
    """Predicts for texts on the command line, or for a file. Each kind of model has a subclass.

    Attributes:
        flag: the flag with the texts to make predictions for.
        task, data: task and settings, as in the training run.
        split: all rows to make predictions for.
    """

    flag = "--text"
    task: ExampleTask
    data: ExamplesConfig
    split: Split

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        self.model = model
        optimization = model.record.get("settings", {}).get("optimization", {})
        self.batch_rows = config.per_replica_batch_size or optimization.get("per_replica_batch_size", BATCH_ROWS)
        self.reads_file = config.file is not None
        if not self.reads_file and not getattr(config, self.flag.removeprefix("--")):
            raise InputError(f"--model: {model.name} is a {model.class_name}, which needs {self.flag}, or --file.")

    def predict(self) -> Outputs:
        """Run the model on all rows, in batches of a few static lengths, as evaluations in training do."""
        load_tensorflow()
        import tensorflow as tf

        from train.model.from_pretrained import load_model

        network = load_model(self.model.folder, self.task.model_class, adapt_network=self.task.adapt_network)
        rows = self.split.rows
        batch_rows = self.batch_rows if self.reads_file else min(self.batch_rows, rows.num_rows)
        step = tf.function(functools.partial(self.task.prediction_outputs, network), autograph=False)
        features = self.task.prediction_features(self.data.max_seq_length)
        return run_on_rows(step, rows, features, self.data.lengths, batch_rows)

    @abstractmethod
    def format_outputs(self, outputs: Outputs) -> list[str]:
        """Format each text given on the command line, with its predictions and their probabilities."""

    def file_text(self, outputs: Outputs) -> tuple[str, int]:
        """Format the predictions as in the training command's file; also return the number of predictions."""
        predictions = self.task.predictions(outputs, self.split)
        return self.task.format_predictions(predictions, self.split), len(predictions)


class RowPredictor(Predictor):
    """Predicts one label, number or set of labels for each text or pair of texts."""

    task: RowTask

    def encode(self, config: PredictionConfig, examples: Examples | None) -> None:
        """Encode the examples of a file, or without a file the texts on the command line."""
        texts = (config.text, config.text_pair) if config.text_pair else (config.text,)
        self.texts: tuple[Sequence[str], ...] = texts if examples is None else examples.texts
        labels = np.zeros(len(self.texts[0]), np.int32)
        self.split = Split(self.model.encode_texts(self.texts, self.data.max_seq_length, labels), labels)

    def format_outputs(self, outputs: Outputs) -> list[str]:
        rows = self.task.in_order(outputs, "outputs")
        titles = map(" | ".join, zip(*self.texts, strict=True))
        return ["\n".join([title, *self.lines(row)]) for title, row in zip(titles, rows, strict=True)]

    def lines(self, outputs: NDArray[Any]) -> list[str]:
        """Format the outputs of a row as lines."""
        return [f"    {self.task.format_label(self.task.predict(outputs[np.newaxis])[0])}"]


class ClassificationPredictor(RowPredictor):
    """Predicts classes, or a number."""

    task: TextClassification
    data: ClassificationData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        columns_of_run = model.run_info.get("text_columns")
        self.data = model.settings(
            ClassificationData,
            max_seq_length=config.max_seq_length,
            text_column_names=config.text_column_names or columns_of_run or None,
            delimiter=config.delimiter,
        )
        needs_pair = columns_of_run is not None and len(columns_of_run) == 2
        if config.text and needs_pair != bool(config.text_pair):
            rule = "was trained on pairs and needs --text-pair" if needs_pair else "takes single texts, not --text-pair"
            raise InputError(f"--model: {model.name} {rule}.")
        problem_type: ProblemType = model.model_config.problem_type or (
            "regression" if len(model.label_names) == 1 else "single_label_classification"
        )
        labels = Labels(problem_type, model.label_names)
        self.task = TextClassification(labels, DEFAULT_METRICS[problem_type], **model.task_arguments)
        self.encode(config, read_examples_to_predict(config.file, self.data) if config.file else None)

    def lines(self, outputs: NDArray[Any]) -> list[str]:
        """Format the number or the most likely classes; if rows may have several, all with a probability above 0.5."""
        labels = self.task.labels
        if labels.problem_type == "regression":
            return [f"{outputs[0]:8.4g}"]
        values = probabilities(outputs[np.newaxis], labels.problem_type)[0]
        ranked = [f"{values[index]:8.1%}  {labels.names[index]}" for index in np.argsort(-values, kind="stable")]
        if labels.problem_type == "single_label_classification":
            return ranked[:NUM_SHOWN]
        return ranked[: int((outputs > 0).sum())] or [f"{'none':>8}  the most likely: {ranked[0].strip()}"]


class ChoicePredictor(RowPredictor):
    """Chooses one of several texts."""

    task: MultipleChoice
    data: ChoiceData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        self.data = model.settings(ChoiceData, max_seq_length=config.max_seq_length)
        names: Sequence[str] = model.label_names
        if config.file is not None:
            table = read_table(config.file, "--file", delimiter=config.delimiter)
            columns = columns_of(table.columns, table.name, self.data)
            self.choices = read_choices(table, columns, needs_labels=False)
            if model.record:
                check_num_choices(self.choices, len(names))
            elif len(names) != self.choices.num_choices or names[0] == DEFAULT_LABEL:
                # The labels of models that were trained with other programs rarely name the choices.
                names = numbers_from_0(self.choices.num_choices)
        else:
            require(
                len(config.choices) > 1, "must be two or more texts to choose from", "--choices", len(config.choices)
            )
            self.choices = Choices("--choices", config.text, [config.choices], None)
            names = numbers_from_0(len(config.choices))
        self.task = MultipleChoice(names, **model.task_arguments)
        labels = np.zeros(len(self.choices.contexts), np.int32)
        self.split = Split(encode_choices(model, self.choices, self.data.max_seq_length, labels), labels)

    def format_outputs(self, outputs: Outputs) -> list[str]:
        """Format the text, and below the text the choices, the most likely choice first."""
        (logits,), (choices,) = self.task.in_order(outputs, "outputs"), self.choices.choices
        values = probabilities(logits[np.newaxis], self.task.labels.problem_type)[0]
        ranked = [f"{values[number]:8.1%}  {choices[number]}" for number in np.argsort(-values, kind="stable")]
        return ["\n".join([self.choices.contexts[0], *ranked])]


class CustomPredictor(RowPredictor):
    """Predicts with a custom task."""

    data: CustomData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        self.data = model.settings(
            CustomData, max_seq_length=config.max_seq_length, task=config.task, delimiter=config.delimiter
        )
        if self.data.task is None:
            hint = "If it belongs to a custom task, name the task's class with --task FILE.py:CLASS."
            kind = f"is a {model.class_name}" if model.class_name else "does not say what its head is (`architectures`)"
            raise InputError(f"--model: {model.name} {kind}. {hint}")
        self.task = load_task(self.data.task)(**model.task_arguments)
        examples = None
        if config.file is not None:
            files: dict[str, Any] = {"train_file": config.file, "validation_file": None, "test_file": config.file}
            examples = self.task.read(dataclasses.replace(self.data, dataset_name=None, **files))["test"]
        self.encode(config, examples)


class TaggingPredictor(Predictor):
    """Predicts a tag for each word."""

    task: Tagging
    data: TaggingData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        column = config.text_column_names[0] if config.text_column_names else None
        self.data = model.settings(
            TaggingData, max_seq_length=config.max_seq_length, text_column_name=column, delimiter=config.delimiter
        )
        length, labels = self.data.max_seq_length, Labels("single_label_classification", model.label_names)
        self.task = Tagging(labels, max_length=length, **model.task_arguments)
        if config.file is not None:
            sentences = read_sentences_to_predict(config.file, self.data)
        else:
            sentences = Sentences("--text", [text.split() for text in config.text], None)
        rows = encode_sentences(model.tokenizer, sentences, labels, max_length=length, token_types=model.token_types)
        self.split = Split(rows, sentences)

    def format_outputs(self, outputs: Outputs) -> list[str]:
        """Format each sentence with one line per word: probability, tag, word."""
        sentences, tags = self.split.examples, self.task.predictions(outputs, self.split)
        likelihoods = values_of_words(outputs, "probability", sentences, np.nan)
        width = max(map(len, self.task.labels.names))
        return [
            "\n".join(
                f"{'cut off' if np.isnan(probability) else f'{probability:.1%}':>8}  {tag:<{width}}  {word}"
                for word, tag, probability in zip(*sentence, strict=True)
            )
            for sentence in zip(sentences.words, tags, likelihoods, strict=True)
        ]


class QuestionPredictor(Predictor):
    """Finds the answers to questions in texts."""

    flag = "--question"
    task: QuestionAnswering
    data: QuestionData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        threshold = config.null_score_diff_threshold
        self.data = model.settings(
            QuestionData,
            max_seq_length=config.max_seq_length,
            doc_stride=config.doc_stride,
            null_score_diff_threshold=threshold,
        )
        may_have_no_answer = threshold is not None or model.run_info.get("may_have_no_answer", False)
        self.task = QuestionAnswering(self.data, may_have_no_answer=may_have_no_answer, **model.task_arguments)
        if config.file is not None:
            questions = read_questions_to_predict(config.file, "--file")
        else:
            questions = [
                Question(str(number), question.strip(), str(config.context), None)
                for number, question in enumerate(config.question, start=1)
            ]
        windows = make_windows(model.tokenizer, questions, self.data, token_types=model.token_types)
        self.split = Split(windows.rows, windows)

    def format_outputs(self, outputs: Outputs) -> list[str]:
        blocks = []
        answers = self.task.predictions(outputs, self.split)
        for question, answer in zip(self.split.examples.questions, answers, strict=True):
            lines = [f"{best['probability']:8.1%}  {best['text']}" for best in answer.best[:NUM_SHOWN]]
            if not answer.text:
                lines = [f"{'none':>8}  no answer found"]
            blocks.append("\n".join([question.question, *lines]))
        return blocks


# {end of the name of the transformers class: predictor}
PREDICTORS: dict[str, type[Predictor]] = {
    "ForSequenceClassification": ClassificationPredictor,
    "ForMultipleChoice": ChoicePredictor,
    "ForTokenClassification": TaggingPredictor,
    "ForQuestionAnswering": QuestionPredictor,
}


@contextmanager
def open_predictor(config: PredictionConfig) -> Iterator[Predictor]:
    """Open the model of `--model`, and read the examples to make predictions for.

    Raises:
        InputError: the model, a file, a column or a task does not exist, or the flags do not suit the kind of model.
        HubAwayError: the Hub cannot be reached.
    """
    check_folder_or_hub(config.model, "--model")
    parent, _, name = config.model.rstrip("/").rpartition("/")
    folders = (config.model, parent or ".") if name == EXPORT_FOLDER else (config.model,)
    record = next((run.read_record() for run in map(RunFolder, folders) if run.has_run()), {})
    with local_or_hub(exported_model(config.model)) as folder:
        model_config = read_config(folder)
        check_architecture(model_config)
        model = OpenedModel(model_config, load_tokenizer(folder), config.model, folder, record)
        if model.class_name.endswith(("ForMaskedLM", "ForPreTraining")):
            hint = "Use python train/fill_mask.py, or fine-tune it first."
            raise InputError(f"--model: {config.model} is a masked language model. {hint}")
        if find_file(folder, "modules.json") is not None:
            raise InputError(f"--model: {config.model} embeds texts. Use finetuning/search.py, or SentenceTransformer.")
        suitable = (predictor for ending, predictor in PREDICTORS.items() if model.class_name.endswith(ending))
        predictor_class = next(suitable, CustomPredictor)
        if config.choices and predictor_class is not ChoicePredictor:
            raise InputError(f"--model: {config.model} is a {model.class_name}, which takes no --choices.")
        yield predictor_class(model, config)
