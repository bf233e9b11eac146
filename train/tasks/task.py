"""The interface of a task, so that loop, step, pipelines and evaluation work for every task, custom ones included."""

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

    from train.config.learning import MaskingConfig, ModelConfig
    from train.data.shards import TrainingInputs

# Begins the names of the figures that are the loss of one source of a mixture.
SOURCE_LOSS = "loss_"
# Of the file of a custom task.
MODULE_NAME = "task_of_the_user"
Kind = TypeVar("Kind")


class Mean(NamedTuple):
    """A figure that is one sum, `total`, divided by another, `weight`, by their names; 0 where that is 0."""

    name: str
    total: str
    weight: str


class CardFigure(NamedTuple):
    """A figure of evaluations, as the card of a model shows it; `metric_type` and `metric_name` are the Hub's words."""

    name: str
    title: str
    metric_type: str
    metric_name: str
    num_decimals: int = 4


@dataclass(frozen=True)
class TaskCard:
    """The task's part of a model card. Plain data: `run.json` records it, and export needs no task.

    Texts are templates of `str.format`.

    model_kind, training_verb: what the model is, and what was done to it, as within a sentence.
    start_words: the words after the verb where the model did not start from scratch.
    pipeline_tag, library: the Hub's words for the task (https://huggingface.co/tasks) and for what opens the model.
    predicts_tokens: the loss compares with that of a guess from the frequencies of the tokens.
    usage: lines that use the {model}, at its {revision}, on the {sentence} of `--hub-example` or on an example in them,
        of at most {max_length} tokens; without them the card has lines that load it.
    procedure: {title: text} of the training, of {the sections of the settings}.
    evaluation: what was evaluated, of {the figures}.
    limits: what the model is not for, of {max_length}.
    files: {name: content} of further files of text in the export.
    weight_files: {name: {name of a weight in it: that of the exported model}} of further files of weights.
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
        """Read the card of a `task_record`, from JSON or not."""
        return cls(**{**record, "figures": tuple(CardFigure(*figure) for figure in record["figures"])})


class Task(ABC):
    """What is learned: its features, class of model, losses and figures, and what a model's card says of it.

    model_class: the class of transformers that is built, by name.
    means: figures of training and evaluation. The first is the loss that is minimised: its total, summed over the
        rows of the whole global batch, divided by its weight.
    card: the task for the readers of a model's card.
    metric: the figure by which evaluations are compared.
    guess: what a guess without the text would score, by figure.
    identity: what identifies a custom task, for the fingerprint of a run.
    errors: figures of which lower values are better.
    allows_new_head: weights of the head that the checkpoint to start from lacks, or has in another shape, are
        initialized randomly; else such a checkpoint is refused.
    adds_weights: `adapt_network` puts weights on the network, which are counted once it is built.
    couples_rows: the loss of a row depends on the other rows. Then `sums` in training is `sums_of_outputs` of
        `outputs`, so that a batch that is cut into micro-batches keeps its loss.
    """

    metric: str = "loss"
    guess: Mapping[str, float] = MappingProxyType({})
    identity: Mapping[str, str] = MappingProxyType({})
    errors: tuple[str, ...] = ()
    allows_new_head: bool = False
    adds_weights: bool = False
    couples_rows: bool = False
    model_class: str
    means: tuple[Mean, ...]
    card: TaskCard

    @abstractmethod
    def features(self, length: int) -> dict[str, Feature]:
        """Name what is read from each record of a row of `length` tokens."""

    def adapt_network(self, network: Any) -> Any:
        """Change a network of `model_class` in place as `sums` needs it, and return it."""
        return network

    def prepare_batch(self, batch: dict[str, "tf.Tensor"], row_keys: "tf.Tensor") -> Any:  # noqa: ARG002
        """Make the rows that `sums` takes from a training batch, in-graph: all random draws are here.

        Args:
            batch: {feature: (rows, …)}.
            row_keys: uint32 (rows, KEY_WORDS) for `train.layers.random_bits`, others at each step. A row depends on
                its key alone, so that it does not matter how the global batch is cut.

        Returns:
            A structure of tensors (rows, …).
        """
        return batch

    def prepare_row(self, row: dict[str, "tf.Tensor"]) -> Any:
        """Make from one row of evaluation what `prepare_batch` makes from many; a function of the row alone."""
        return row

    def apply_global_weights(self, rows: Any, add_up: Callable[["tf.Tensor"], "tf.Tensor"]) -> Any:  # noqa: ARG002
        """Put into rows of `prepare_batch` what needs sums over the global batch, such as weights of several losses.

        `add_up` adds up a tensor over all replicas; the rows are those of one.
        """
        return rows

    @abstractmethod
    def sums(self, network: Any, rows: Any, *, training: bool) -> dict[str, "tf.Tensor"]:
        """Run the network on rows of `prepare_batch` or `prepare_row`, and add up losses, hits and counts.

        Batches and replicas must add up exactly, so these are float32 sums over the rows, those that `means` names
        among them, as scalars. Rows of padding must count for nothing. In an evaluation there may also be values for
        each row, (rows, …), for figures that are not sums.
        """

    def outputs(self, network: Any, rows: Any, *, training: bool) -> "tf.Tensor":
        """Compute what the loss of training needs of each row, float32 (rows, …), where `couples_rows`."""
        raise NotImplementedError

    def sums_of_outputs(self, outputs: "tf.Tensor", rows: Any) -> dict[str, "tf.Tensor"]:
        """Add up, from `outputs` of all rows of this replica, what `sums` does in training, where `couples_rows`."""
        raise NotImplementedError

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute the figures of an evaluation from what `sums` gave, over all rows, in float64; `loss` is one of them.

        Values for each row come batch after batch, those of padding too.
        """
        means = {name: float(sums[total] / sums[weight]) if sums[weight] else 0.0 for name, total, weight in self.means}
        return means | self.derived_figures(means)

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Compute the figures that follow from the means, of training or of evaluation."""
        return {}

    def score(self, figures: Mapping[str, float]) -> float:
        """Compute the score by which evaluations are compared, higher is better; the best checkpoint is kept."""
        return -figures["loss"]

    def summarize(self, figures: Mapping[str, float]) -> str:
        """Summarize an evaluation in a few words, as in `loss 5.92  accuracy 14.5 %`."""
        return f"loss {shown_loss(figures['loss'])}"

    def next_command(self, model: str) -> str | None:  # noqa: ARG002
        """Return the command that tries out the exported model in the folder `model`; None where there is none."""
        return None

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Describe the figures of the last evaluation, human-readable: {title: text}."""
        return {f"validation {name.replace('_', ' ')}": f"{value:.4f}" for name, value in figures.items()}

    def describe_row(self, rows: Any, tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Show the first of the rows that `prepare_batch` made: {title: text}."""
        return {"first row": tokenizer.decode(rows["input_ids"][0])}

    def num_predictions(self, num_tokens: int) -> int:  # noqa: ARG002
        """Count the positions of a batch of `num_tokens` that go through a masked-LM head.

        They enter the count of operations; those of other heads, which are few, do not.
        """
        return 0


class PretrainingTask(Task):
    """What `run_mlm.py` learns from rows of shards; a custom one is a subclass in a file of its author."""

    @classmethod
    @abstractmethod
    def of(cls, inputs: "TrainingInputs", masking: "MaskingConfig") -> "PretrainingTask":
        """Make the task of a run, or of one of its phases; InputError if its inputs do not suit it."""

    def score(self, figures: Mapping[str, float]) -> float:
        return -figures.get(self.metric, figures["loss"])

    def check_model(self, model_config: "PretrainedConfig", settings: "ModelConfig") -> None:
        """Raise InputError where a model, or a setting of one, does not suit the task; by default all do."""


def source_losses(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses of the sources of a mixture among the figures of an evaluation, by source."""
    return {name.removeprefix(SOURCE_LOSS): value for name, value in figures.items() if name.startswith(SOURCE_LOSS)}


def shown_loss(loss: float) -> str:
    return f"{loss:.2f}" if loss >= 0.1 else f"{loss:.2g}"


def task_record(task: Task | type[Task]) -> dict[str, Any]:
    """Collect the task's part of `run.json`: all that is needed to export a checkpoint and to plot its metric."""
    guess = task.guess.get(task.metric)
    return {
        "model_class": task.model_class,
        "card": asdict(task.card),
        "metric": task.metric,
        "guess": None if guess is None else float(guess),
        "lower_is_better": task.metric in ("loss", *task.errors),
    }


def load_class(task: str, base: type[Kind], needed: tuple[str, ...] = ()) -> type[Kind]:
    """Run the file of `FILE.py:CLASS`, and return that class.

    The file's folder is not searched for modules, so that only its code and installed packages are run. InputError if
    there is no such class, or it is not a subclass of `base` with all its methods and the `needed` attributes.
    """
    path, _, name = task.rpartition(":")
    if not Path(path).is_file():
        raise missing(path, "--task", "file")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"--task: running {path} failed with {reason}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == MODULE_NAME)
        known = ", ".join(one.__name__ for one in classes) or "no classes"
        raise InputError(f"--task: {path} has no class {name}; it has {known}.")
    if not issubclass(found, base):
        raise InputError(f"--task: {name} in {path} is not a subclass of {base.__module__}.{base.__name__}.")
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise InputError(f"--task: {name} in {path} lacks these methods: {', '.join(lacking)}.")
    if lacking := [one for one in needed if not hasattr(found, one)]:
        raise InputError(f"--task: {name} in {path} lacks these attributes: {', '.join(lacking)}.")
    return found


def identity_of(task: str) -> str:
    """Name the class and the content of its file, by which a run is known; the file itself may move."""
    path, _, name = task.rpartition(":")
    return f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
