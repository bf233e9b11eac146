"""`Task`: the interface between a task and the training loop, which works for every task, including custom ones."""

import hashlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mlm_common.errors import InputError
from mlm_common.hub.retries import one_line
from mlm_common.storage import missing
from train.data.inputs import Feature

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    from train.config.learning import MaskingConfig, PretrainedModel
    from train.data.shards import TrainingInputs

# Metrics that are the loss of one source of a mixture have names that start with this.
SOURCE_LOSS = "loss_"
# Name of the module made from the file of a custom task.
MODULE_NAME = "task_of_the_user"
Kind = TypeVar("Kind")


class Mean(NamedTuple):
    """A metric that is the quotient of two sums; 0 if the weight is 0.

    Attributes:
        name: name of the metric.
        total: name of the sum that is divided.
        weight: name of the sum by which `total` is divided.
    """

    name: str
    total: str
    weight: str


class CardFigure(NamedTuple):
    """How a model card shows a metric of evaluations.

    Attributes:
        name: name of the metric.
        title: title in the table of the card.
        metric_type: the Hub's type of the metric, for the card's metadata.
        metric_name: name in the card's metadata.
        num_decimals: number of decimals shown.
    """

    name: str
    title: str
    metric_type: str
    metric_name: str
    num_decimals: int = 4


@dataclass(frozen=True)
class TaskCard:
    """The task's part of a model card, stored in `run.json` as plain data, so that an export does not need the task.

    `usage`, `procedure`, `evaluation` and `limits` are templates for `str.format`.

    Attributes:
        model_kind: the kind of model, such as "masked language model"; used within a sentence.
        task_name: name of the task.
        pipeline_tag: the Hub's name of the task (https://huggingface.co/tasks).
        figures: metrics that the card shows.
        loss_unit: unit of the loss.
        predicts_tokens: whether the loss can be compared with the loss of guessing from token frequencies.
        training_verb: verb for the training, such as "pretrained"; used within a sentence.
        start_words: words between the verb and the base model, such as "from", if training did not start from scratch.
        tags: tags on the Hub.
        usage: code that uses {model} at {revision}, with {sentence} (from `--hub-example`) or another example, of at
            most {max_length} tokens. If None, the card shows code that only loads the model.
        procedure: {title: text} about the training; template fields are sections of the settings, such as {masking}.
        evaluation: how the model was evaluated; template fields are metrics.
        limits: limits of the model; the template field is {max_length}.
        library: the Hub's name of the library that opens the model.
        files: {name: content} of additional text files in the export.
        weight_files: {name: {name of a weight in the file: its name in the exported model}} of additional weight files.
    """

    model_kind: str
    task_name: str
    pipeline_tag: str
    figures: tuple[CardFigure, ...]
    loss_unit: str = "nats"
    predicts_tokens: bool = False
    training_verb: str = "pretrained"
    start_words: str = "further, starting from"
    tags: tuple[str, ...] = ()
    usage: str | None = None
    procedure: dict[str, str] = field(default_factory=dict)
    evaluation: str = "Over rows that were not trained on."
    limits: str = "It takes texts of at most {max_length} tokens."
    library: str = "transformers"
    files: dict[str, str] = field(default_factory=dict)
    weight_files: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TaskCard":
        """Return the card from the dictionary in a `task_record`, which may come from JSON."""
        return cls(**{**record, "figures": tuple(CardFigure(*figure) for figure in record["figures"])})


class Task(ABC):
    """The task to learn: the features, the class of the model, losses and metrics, and its part of a model card.

    Attributes:
        model_class: name of the transformers class to build.
        means: metrics of training and evaluation. The first is the loss to minimize: its total, summed over the rows of
            the whole global batch, divided by its weight.
        card: the task's part of a model card.
        metric: the metric by which evaluations are compared.
        guess: {metric: value that guessing without reading the text would reach}.
        identity: identifies a custom task in the fingerprint of a run.
        errors: metrics for which lower is better.
        allows_new_head: if the checkpoint to start from lacks weights of the head, or has them in other shapes, these
            weights are initialized randomly. Otherwise such a checkpoint is an error.
        adds_weights: `adapt_network` adds weights to the network, so the weights can be counted only after the network
            is built.
        layer_lr_decay: learning rate of a layer, divided by the learning rate of the layer above it. With 1, all layers
            have the same rate.
        couples_rows: the loss of a row depends on other rows. Then the loss in training is computed with `outputs` and
            `sums_of_outputs`, so that it does not depend on the division into micro-batches.
    """

    metric: str = "loss"
    guess: Mapping[str, float] = MappingProxyType({})
    identity: Mapping[str, str] = MappingProxyType({})
    errors: tuple[str, ...] = ()
    allows_new_head: bool = False
    adds_weights: bool = False
    couples_rows: bool = False
    layer_lr_decay: float = 1.0
    model_class: str
    means: tuple[Mean, ...]
    card: TaskCard

    @abstractmethod
    def features(self, length: int) -> dict[str, Feature]:
        """Return the features to read from each record, for rows of `length` tokens."""

    def adapt_network(self, network: Any) -> Any:
        """Change a network of `model_class` in place so that `sums` can use it, and return it."""
        return network

    def prepare_batch(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> Any:  # noqa: ARG002
        """Prepare a training batch for `sums`, in-graph. All random draws of a task are made here.

        Args:
            batch: {feature: (rows, …)}.
            row_keys: random keys for `train.layers.random_bits`, uint32 (rows, KEY_WORDS), different at each step. The
                draws for a row must depend only on its key, so that the division of the global batch does not matter.

        Returns:
            A structure of tensors (rows, …).
        """
        return batch

    def prepare_row(self, row: dict[str, "tf.Tensor"]) -> Any:
        """Prepare a validation row for `sums`. The result must depend only on the row."""
        return row

    def apply_global_weights(self, rows: Any, add_up: Callable[["tf.Tensor"], "tf.Tensor"]) -> Any:  # noqa: ARG002
        """Add values that depend on the whole global batch, such as weights of losses, to the rows of `prepare_batch`.

        Args:
            rows: rows of one replica.
            add_up: sums a tensor over all replicas.
        """
        return rows

    @abstractmethod
    def sums(self, network: Any, rows: Any, *, training: bool) -> dict[str, "tf.Tensor"]:
        """Run the network on rows of `prepare_batch` or `prepare_row`, and add up losses, correct answers and counts.

        Returns:
            Sums over the rows, float32 scalars, which can be added up over batches and replicas. The result must
            include all sums named in `means`, and rows of padding must not contribute. An evaluation may also return
            values for each row, (rows, …), for metrics that are not sums.
        """

    def outputs(self, network: Any, rows: Any, *, training: bool) -> "tf.Tensor":
        """Return the outputs that the training loss needs for each row, float32 (rows, …). Used if `couples_rows`."""
        raise NotImplementedError

    def sums_of_outputs(self, outputs: "tf.Tensor", rows: Any) -> dict[str, "tf.Tensor"]:
        """Return the values of `sums`, given the `outputs` of all rows of this replica. Used if `couples_rows`."""
        raise NotImplementedError

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of an evaluation. `loss` must be one of them.

        Args:
            sums: results of `sums`, added up over all rows in float64. Values for each row are concatenated, including
                the values for rows of padding.
        """
        means = {name: float(sums[total] / sums[weight]) if sums[weight] else 0.0 for name, total, weight in self.means}
        return means | self.derived_figures(means)

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Return metrics that can be computed from the means of training or evaluation."""
        return {}

    def score(self, figures: Mapping[str, float]) -> float:
        """Return the score by which evaluations are compared; higher is better. The best checkpoint is kept."""
        return -figures["loss"]

    def summarize(self, figures: Mapping[str, float]) -> str:
        """Summarize an evaluation in a few words, such as `loss 5.92  accuracy 14.5%`."""
        return f"loss {shown_loss(figures['loss'])}"

    def next_command(self, model: str) -> str | None:  # noqa: ARG002
        """Return a command that tries the exported model in the folder `model`; None if no command does so."""
        return None

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Return human-readable lines about the metrics of the last evaluation, {title: text}."""
        return {f"validation {name.replace('_', ' ')}": f"{value:.4f}" for name, value in figures.items()}

    def describe_row(self, rows: Any, tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Return human-readable lines about the first row of `prepare_batch`, {title: text}."""
        return {"first row": tokenizer.decode(rows["input_ids"][0])}

    def num_predictions(self, num_tokens: int) -> int:  # noqa: ARG002
        """Return how many positions go through a masked-LM head, in a batch of `num_tokens` tokens.

        The number is used to count operations. Other heads need few operations, which are not counted.
        """
        return 0


class PretrainingTask(Task):
    """A task of `run_mlm.py`, which learns from rows of shards. Custom tasks are subclasses in the user's file."""

    @classmethod
    @abstractmethod
    def of(cls, inputs: "TrainingInputs", masking: "MaskingConfig") -> "PretrainingTask":
        """Return the task of a run, or of one of its phases.

        Raises:
            InputError: the task does not fit the inputs.
        """

    def score(self, figures: Mapping[str, float]) -> float:
        return -figures.get(self.metric, figures["loss"])

    def check_model(self, model_config: "PretrainedConfig", settings: "PretrainedModel") -> None:
        """Check that a model and its settings fit the task. By default all models and settings fit.

        Raises:
            InputError: they do not fit.
        """


def source_losses(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses of a mixture's sources from the metrics of an evaluation, {source: loss}."""
    return {name.removeprefix(SOURCE_LOSS): value for name, value in figures.items() if name.startswith(SOURCE_LOSS)}


def shown_loss(loss: float) -> str:
    return f"{loss:.2f}" if loss >= 0.1 else f"{loss:.2g}"


def task_record(task: Task | type[Task]) -> dict[str, Any]:
    """Return the task's part of `run.json`: the data needed to export a checkpoint and to plot the task's metric."""
    guess = task.guess.get(task.metric)
    return {
        "model_class": task.model_class,
        "card": asdict(task.card),
        "metric": task.metric,
        "guess": None if guess is None else float(guess),
        "lower_is_better": task.metric in ("loss", *task.errors),
    }


def load_class(task: str, base: type[Kind], needed: tuple[str, ...] = ()) -> type[Kind]:
    """Execute the file of `FILE.py:CLASS`, and return the class.

    The file's folder is not searched for modules, so that only the file and installed packages are executed.

    Args:
        task: value of `--task`.
        base: required base class.
        needed: required attributes.

    Raises:
        InputError: there is no such class, it is not a subclass of `base`, or it lacks methods or attributes.
    """
    path, _, name = task.rpartition(":")
    if not Path(path).is_file():
        raise missing(path, "--task", "file")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"--task: running {path} failed with {reason}") from error
    task_class = getattr(module, name, None)
    if not isinstance(task_class, type):
        classes = (
            value for value in vars(module).values() if isinstance(value, type) and value.__module__ == MODULE_NAME
        )
        class_names = ", ".join(value.__name__ for value in classes) or "no classes"
        raise InputError(f"--task: {path} has no class {name}; it has {class_names}.")
    if not issubclass(task_class, base):
        raise InputError(f"--task: {name} in {path} is not a subclass of {base.__module__}.{base.__name__}.")
    if lacking := sorted(getattr(task_class, "__abstractmethods__", ())):
        raise InputError(f"--task: {name} in {path} lacks these methods: {', '.join(lacking)}.")
    if lacking := [attribute for attribute in needed if not hasattr(task_class, attribute)]:
        raise InputError(f"--task: {name} in {path} lacks these attributes: {', '.join(lacking)}.")
    return task_class


def identity_of(task: str) -> str:
    """Return a string that identifies a custom task: the class, and the hash of its file, but not the file's path."""
    path, _, name = task.rpartition(":")
    return f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
