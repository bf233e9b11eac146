"""A fine-tuned model opened to predict: with the code, the settings and the row lengths of its training run."""

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
from finetuning.loop.task import ExampleTask, Part, RowTask
from finetuning.tasks.choice import (
    Choices,
    MultipleChoice,
    check_number,
    columns_of,
    encode_choices,
    places,
    read_choices,
)
from finetuning.tasks.classification import TextClassification, read_examples_to_predict
from finetuning.tasks.custom import load_task
from finetuning.tasks.metrics import DEFAULT_METRICS, probabilities
from finetuning.tasks.questions import QuestionAnswering
from finetuning.tasks.squad import Question, read_questions_to_predict
from finetuning.tasks.tagging import Sentences, Tagging, encode_sentences, of_words, read_sentences_to_predict
from finetuning.tasks.windows import make_windows
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED
from mlm_common.storage import check_folder_or_hub, local_or_hub
from mlm_common.tokenizer import load_tokenizer
from train.model.architectures import check_architecture, max_positions
from train.model.pretrained_files import class_name_of, find_file, read_config
from train.runtime.run_folder import EXPORT_FOLDER, RunFolder, exported_model

# Rows that are computed at once where no run says how many.
BATCH_ROWS = 32
# Tokens of the longest row of a model without a limit.
DEFAULT_LENGTH = 512
# Answers and classes that are shown for each text.
NUM_SHOWN = 5
# The first label of a configuration without labels.
DEFAULT_LABEL = "LABEL_0"

# What `ExampleTask.predicted` keeps of all rows.
Kept = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class OpenedModel(ReadModel):
    """A fine-tuned model on this machine.

    name: as it was given.
    folder: local folder or Hub id that transformers can load.
    record: `run.json` of the run that made it; empty where only the export is known.
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
    def recorded(self) -> Mapping[str, Any]:
        return self.record.get("train_data") or {}

    def settings(self, data_class: type[ExamplesConfig], **changes: Any) -> Any:
        """Make the `data` settings of its run, with these changes; None changes nothing."""
        settings = self.record["settings"]["data"] if self.record else {}
        names = {one.name for one in dataclasses.fields(data_class) if one.init}
        settings = {name: value for name, value in settings.items() if name in names and value != REDACTED}
        settings.pop("delimiter", None)  # that of another file
        longest = max_positions(self.model_config)
        if changes.get("max_seq_length") is not None or not settings:
            settings["length_buckets"] = []
            limits = [one for one in (longest, self.tokenizer.model_max_length) if one is not None]
            settings["max_seq_length"] = min(limits) if min(limits) < 1e9 else DEFAULT_LENGTH
        data = data_class(**settings | {name: value for name, value in changes.items() if value is not None})
        if longest is not None and data.max_seq_length > longest:
            rule = f"must be at most {longest}, the longest row that {self.name} can take"
            raise InputError(f"--max-seq-length {rule}; received {data.max_seq_length}.")
        return data


class Predictor(ABC):
    """Predicts for what was given on the command line, or for a file; one subclass per kind of model.

    task, data: as in the training run.
    part: all rows to predict.
    """

    flag = "--text"
    task: ExampleTask
    data: ExamplesConfig
    part: Part

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        self.model = model
        optimization = model.record.get("settings", {}).get("optimization", {})
        self.batch_rows = config.per_replica_batch_size or optimization.get("per_replica_batch_size", BATCH_ROWS)
        self.reads_file = config.file is not None
        if not self.reads_file and not getattr(config, self.flag.removeprefix("--")):
            raise InputError(f"--model: {model.name} is a {model.class_name}: it needs {self.flag}, or --file.")

    def predict(self) -> Kept:
        """Run the model on all rows, in batches of a few static lengths, as in the evaluations of training."""
        import tensorflow as tf

        from train.model.from_pretrained import load_model

        network = load_model(self.model.folder, self.task.model_class, adapt_network=self.task.adapt_network)
        rows = self.part.rows
        batch_rows = self.batch_rows if self.reads_file else min(self.batch_rows, rows.num_rows)
        step = tf.function(functools.partial(self.task.predicted, network), autograph=False)
        features = self.task.predicted_features(self.data.max_seq_length)
        return run_on_rows(step, rows, features, self.data.lengths, batch_rows)

    @abstractmethod
    def shown(self, kept: Kept) -> list[str]:
        """Format each text of the command line with its predictions and their probabilities."""

    def file_text(self, kept: Kept) -> tuple[str, int]:
        """Format the predictions as the training command writes them to a file; return also how many they are."""
        predictions = self.task.predictions(kept, self.part)
        return self.task.text_of(predictions, self.part), len(predictions)


class RowPredictor(Predictor):
    """Predicts one label, number or set of labels for each text or pair of texts."""

    task: RowTask

    def encode(self, config: PredictionConfig, examples: Examples | None) -> None:
        given = (config.text, config.text_pair) if config.text_pair else (config.text,)
        self.texts: tuple[Sequence[str], ...] = given if examples is None else examples.texts
        labels = np.zeros(len(self.texts[0]), np.int32)
        self.part = Part(self.model.encode_texts(self.texts, self.data.max_seq_length, labels), labels)

    def shown(self, kept: Kept) -> list[str]:
        outputs = self.task.in_order(kept, "outputs")
        titles = map(" | ".join, zip(*self.texts, strict=True))
        return ["\n".join([title, *self.lines(one)]) for title, one in zip(titles, outputs, strict=True)]

    def lines(self, outputs: NDArray[Any]) -> list[str]:
        return [f"    {self.task.shown(self.task.predict(outputs[np.newaxis])[0])}"]


class ClassificationPredictor(RowPredictor):
    """Predicts classes, or a number."""

    task: TextClassification
    data: ClassificationData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        known = model.recorded.get("text_columns")
        columns = config.text_column_names or known or None
        self.data = model.settings(
            ClassificationData,
            max_seq_length=config.max_seq_length,
            text_column_names=columns,
            delimiter=config.delimiter,
        )
        needs_pair = known is not None and len(known) == 2
        if config.text and needs_pair != bool(config.text_pair):
            verb = "needs --text-pair as well: it was trained on pairs" if needs_pair else "takes single texts"
            raise InputError(f"--model: {model.name} {verb}.")
        problem_type: ProblemType = model.model_config.problem_type or (
            "regression" if len(model.label_names) == 1 else "single_label_classification"
        )
        labels = Labels(problem_type, model.label_names)
        self.task = TextClassification(labels, DEFAULT_METRICS[problem_type], **model.of_rows)
        self.encode(config, read_examples_to_predict(config.file, self.data) if config.file else None)

    def lines(self, outputs: NDArray[Any]) -> list[str]:
        """Format the most likely classes; where there may be several all that are likelier than not; or the number."""
        labels = self.task.labels
        if labels.problem_type == "regression":
            return [f"{outputs[0]:8.4g}"]
        values = probabilities(outputs[np.newaxis], labels.problem_type)[0]
        found = [f"{values[index]:8.1%}  {labels.names[index]}" for index in np.argsort(-values, kind="stable")]
        if labels.problem_type == "single_label_classification":
            return found[:NUM_SHOWN]
        return found[: int((outputs > 0).sum())] or [f"{'none':>8}  the most likely: {found[0].strip()}"]


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
                check_number(self.choices, len(names))
            elif len(names) != self.choices.num_choices or names[0] == DEFAULT_LABEL:
                names = places(self.choices.num_choices)  # labels of other models are rarely those of choices
        else:
            rule = "for one --text: the texts to choose from"
            require(len(config.choices) > 1, f"must be two or more {rule}", "--choices", len(config.choices))
            self.choices = Choices("--choices", config.text, [config.choices], None)
            names = places(len(config.choices))
        self.task = MultipleChoice(names, **model.of_rows)
        labels = np.zeros(len(self.choices.contexts), np.int32)
        self.part = Part(encode_choices(model, self.choices, self.data.max_seq_length, labels), labels)

    def shown(self, kept: Kept) -> list[str]:
        """Format the choices, the most likely first, under the text before them."""
        (outputs,), (choices,) = self.task.in_order(kept, "outputs"), self.choices.choices
        values = probabilities(outputs[np.newaxis], self.task.labels.problem_type)[0]
        order = np.argsort(-values, kind="stable")
        return ["\n".join([self.choices.contexts[0], *(f"{values[one]:8.1%}  {choices[one]}" for one in order)])]


class CustomPredictor(RowPredictor):
    """Predicts what a custom task makes of its outputs."""

    data: CustomData

    def __init__(self, model: OpenedModel, config: PredictionConfig):
        super().__init__(model, config)
        self.data = model.settings(
            CustomData, max_seq_length=config.max_seq_length, task=config.task, delimiter=config.delimiter
        )
        if self.data.task is None:
            hint = "for a custom task, name its class with --task FILE.py:CLASS"
            what = f"is a {model.class_name}" if model.class_name else "does not say what its head is (`architectures`)"
            raise InputError(f"--model: {model.name} {what}: {hint}.")
        self.task = load_task(self.data.task)(**model.of_rows)
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
        self.task = Tagging(labels, max_length=length, **model.of_rows)
        if config.file is not None:
            sentences = read_sentences_to_predict(config.file, self.data)
        else:
            sentences = Sentences("--text", [text.split() for text in config.text], None)
        rows = encode_sentences(model.tokenizer, sentences, labels, max_length=length, token_types=model.token_types)
        self.part = Part(rows, sentences)

    def shown(self, kept: Kept) -> list[str]:
        """Format each sentence as one line per word: probability, tag, word."""
        sentences = self.part.examples
        tags, likely = self.task.predictions(kept, self.part), of_words(kept, "probability", sentences, np.nan)
        width = max(map(len, self.task.labels.names))
        return [
            "\n".join(
                f"{'cut off' if np.isnan(probability) else f'{probability:.1%}':>8}  {tag:<{width}}  {word}"
                for word, tag, probability in zip(*sentence, strict=True)
            )
            for sentence in zip(sentences.words, tags, likely, strict=True)
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
        may_have_no_answer = threshold is not None or model.recorded.get("may_have_no_answer", False)
        self.task = QuestionAnswering(self.data, may_have_no_answer=may_have_no_answer, **model.of_rows)
        if config.file is not None:
            questions = read_questions_to_predict(config.file, "--file")
        else:
            given = enumerate(config.question, start=1)
            questions = [Question(str(number), one.strip(), str(config.context), None) for number, one in given]
        windows = make_windows(model.tokenizer, questions, self.data, token_types=model.token_types)
        self.part = Part(windows.rows, windows)

    def shown(self, kept: Kept) -> list[str]:
        blocks = []
        answers = self.task.predictions(kept, self.part)
        for question, answer in zip(self.part.examples.questions, answers, strict=True):
            found = [f"{one['probability']:8.1%}  {one['text']}" for one in answer.best[:NUM_SHOWN]]
            blocks.append(
                "\n".join([question.question, *(found if answer.text else [f"{'none':>8}  no answer found"])])
            )
        return blocks


# By how the names of the classes of transformers end.
PREDICTORS: dict[str, type[Predictor]] = {
    "ForSequenceClassification": ClassificationPredictor,
    "ForMultipleChoice": ChoicePredictor,
    "ForTokenClassification": TaggingPredictor,
    "ForQuestionAnswering": QuestionPredictor,
}


@contextmanager
def open_predictor(config: PredictionConfig) -> Iterator[Predictor]:
    """Open the model of `--model`, and what is to be predicted.

    Raises:
        InputError: there is no such model, file, column or task; the model is of another kind than what is given.
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
        kind = next((one for ending, one in PREDICTORS.items() if model.class_name.endswith(ending)), CustomPredictor)
        if config.choices and kind is not ChoicePredictor:
            raise InputError(f"--model: {config.model} is a {model.class_name}, which takes no --choices.")
        yield kind(model, config)
