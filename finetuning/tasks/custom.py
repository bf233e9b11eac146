"""The base class of custom tasks: a user's class in a Python file, with its data, head and metric.

`recipes/star_ratings.py` is an example of such a file; pass it to `finetuning/run_task.py`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import CustomConfig, CustomData, ExamplesConfig
from finetuning.data.examples import SPLITS, Examples, num_samples, warn_of_empty_texts
from finetuning.data.inputs import ATTENTION_MASK
from finetuning.data.shared_rows import check_shared_rows
from finetuning.loop.model import open_start
from finetuning.loop.task import EVAL_NAME, ON_ROWS, RowTask, Split, finetuned_card
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.metrics import chosen_metric
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.tasks.task import identity_of, load_class

if TYPE_CHECKING:
    import tensorflow as tf
    import tf_keras
    from transformers import PretrainedConfig

USAGE = """```python
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model}{revision})
encoder = AutoModel.from_pretrained({model}{revision})
```

This opens the encoder alone. To predict with this model, you need the Python file of its task, and the code of the
project that trained the model: `python finetuning/predict.py --model {model} --task FILE.py:CLASS --text "A text."`"""
LIMITS = """`AutoModel` opens the encoder. The head of the custom task is in `model.safetensors` as well, under names
  that start with `custom_head.`; no class of transformers has it. It takes texts of at most {max_length} tokens."""


class CustomTask(RowTask):
    """A task with custom data, head, loss and metrics.

    A subclass defines five methods: `read`, `head`, `losses`, `predict` and `scores`. A run is checked before
    TensorFlow is imported, so methods that need TensorFlow must import it themselves.
    """

    model_class = "TFAutoModel"
    adds_weights = True

    @abstractmethod
    def read(self, data: ExamplesConfig) -> Mapping[str, Examples]:
        """Read the examples.

        Returns:
            {"train", "validation" or "test": examples}. Either each label is a number, or each label is a list of
            numbers, and all lists have the same length.
        """

    @abstractmethod
    def head(self, config: "PretrainedConfig") -> "Sequence[tf_keras.layers.Layer]":
        """Return the head's layers, in order. The first layer takes the result of `pooled`; the last makes the outputs.

        Args:
            config: configuration of the model.
        """

    def pooled(self, states: "tf.Tensor", attended: "tf.Tensor") -> "tf.Tensor":
        """Compute the input of the head from the encoder's states, by default as the mean over the tokens.

        Args:
            states: (rows, length, hidden).
            attended: int32 (rows, length), 1 for tokens and 0 for padding.

        Returns:
            Vectors (rows, hidden).
        """
        from train.tasks.heads import mean_state

        return mean_state(states, attended)

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        inputs = self.network_inputs(rows)
        states = network(inputs, training=training).last_hidden_state
        return network.custom_head(self.pooled(states, inputs[ATTENTION_MASK]), training=training)

    def adapt_network(self, network: Any) -> Any:
        from train.tasks.heads import put_head

        return put_head(
            network, lambda: self.head(network.config), lambda rows: self.outputs(network, rows, training=False)
        )

    def see_labels(self, train: NDArray[Any], validation: NDArray[Any] | None, metric: str | None) -> None:
        """Set the attributes that depend on the labels: their form, the metrics, and the scores of a constant guess.

        The guess is the most frequent label, or the mean if labels have fractions.

        Args:
            train: labels to train on, (rows, …).
            validation: labels to evaluate on, (rows, …); None without such labels.
            metric: the value of `--metric-name`.
        """
        values, counts = np.unique(train, axis=0, return_counts=True)
        received = f"{len(train):,} times {values[0].tolist()!s:.200}"
        require(len(values) > 1, "must differ", "Labels to train on", received)
        self.label = Feature(train.shape[1:], dtype="int64" if train.dtype == np.int32 else "float32")
        self.metrics = tuple(self.scores(train, train))
        self.metric = chosen_metric(self.metrics, metric)
        if validation is not None:
            guess = train.mean(axis=0) if train.dtype.kind == "f" else values[counts.argmax()]
            self.guess = self.scores(np.repeat(guess[np.newaxis], len(validation), axis=0), validation)
        self.card = finetuned_card(
            "model for a custom task",
            type(self).__name__,
            "feature-extraction",
            dict(zip(self.metrics, self.metrics, strict=True)),
            usage=USAGE,
            evaluation=ON_ROWS,
            limits=LIMITS,
        )


def load_task(task: str) -> type[CustomTask]:
    """Load the class that `--task FILE.py:CLASS` names."""
    return load_class(task, CustomTask)  # type: ignore[type-abstract]


class CustomJob(FinetuningJob[CustomConfig]):
    """The job of `run_task.py`."""

    def open_run(self, config: CustomConfig, cluster: Cluster) -> Run:
        task_class = load_task(str(config.data.task))
        start, data = open_start(config), config.data
        task = task_class(**start.task_arguments)
        examples = read_examples(task, data)
        labels = read_labels(examples)
        check_shared_rows(
            {split: list(zip(*read.texts, strict=True)) for split, read in examples.items()},
            {split: read.name for split, read in examples.items()},
            [split for split in examples if split not in labels],
        )
        warn_of_empty_texts(examples.values())
        task.see_labels(labels["train"], labels.get("validation"), data.metric_name)

        def make_split(split: str, file: str = "") -> Split:
            read = examples[split]
            shape, dtype = labels["train"].shape[1:], labels["train"].dtype
            encoded = labels[split] if split in labels else np.zeros((read.num_rows, *shape), dtype)
            rows = start.encode_texts(read.texts, data.max_seq_length, encoded)
            return Split(rows, encoded, file, is_scored=split in labels)

        self.validation = {"": make_split("validation", f"{EVAL_NAME}.txt")} if "validation" in examples else {}
        self.tests = [make_split("test", "predict_results_test.txt")] if "test" in examples else []
        identities = {"task": identity_of(str(data.task))}
        plan_lines = _describe(examples["train"], labels["train"]) | {
            "first label": task.format_label(labels["train"][0])
        }
        rows, validation = make_split("train").rows, self.validation.get("")
        return start.run(task, rows, validation, cluster, identities=identities, plan_lines=plan_lines)


def _describe(examples: Examples, labels: NDArray[np.generic]) -> dict[str, str]:
    kind = "fractions" if labels.dtype.kind == "f" else "whole numbers"
    each = f"{' x '.join(map(str, labels.shape[1:]))} per row" if labels.ndim > 1 else "one per row"
    values = np.asarray(labels, np.float64)
    return {
        "texts": f"{len(examples.texts)} per row of {examples.name}",
        "labels": f"{kind}, {each}, {values.min():.6g} to {values.max():.6g}, mean {values.mean():.6g}",
    }


def read_examples(task: CustomTask, data: CustomData) -> dict[str, Examples]:
    """Let a task read its examples, and apply limits such as `--max-train-samples`.

    Returns:
        {"train", "validation" or "test": examples}.

    Raises:
        InputError: the examples are invalid, there are no examples to train on, or `--do-predict` is given and there
            are no examples to predict.
    """
    method, read = f"{type(task).__name__}.read", task.read(data)
    splits = {split: read[split] for split in SPLITS if split in read}
    if "train" not in splits:
        raise InputError(f"{method} must return a train split; it returned {', '.join(read) or 'nothing'}.")
    if data.predicts and "test" not in splits:
        raise InputError(f"--do-predict needs a test split; {method} returned {', '.join(splits)}.")
    if not data.predicts:
        splits.pop("test", None)
    for split, examples in splits.items():
        is_text = all(isinstance(text, str) for column in examples.texts for text in column)
        sizes = {len(column) for column in examples.texts}
        sizes |= {len(examples.labels)} if examples.labels is not None else set()
        if not is_text or len(sizes) != 1 or 0 in sizes:
            raise InputError(
                f"{method} must return columns of text, and a label for each row; columns and labels of its split "
                f"{split} have {' and '.join(f'{size:,}' for size in sorted(sizes))} values."
            )
        if examples.labels is None and split != "test":
            raise InputError(f"{method} must return labels to train and evaluate on; its split {split} has none.")
    limits = num_samples(data)
    return {split: examples.first(limits[split]) for split, examples in splits.items()}


def read_labels(examples: Mapping[str, Examples]) -> dict[str, NDArray[np.generic]]:
    """Convert the labels of each labelled split to an array (rows, …): int32, or float32 if any label has a fraction.

    Raises:
        InputError: labels are not numbers, differ in shape, or do not fit into 32 bits.
    """
    arrays = {}
    for split, read in examples.items():
        if read.labels is None:
            continue
        try:
            array = np.array(list(read.labels))
        except ValueError:
            array = np.array(None)
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise InputError(
                "Labels of a custom task must be numbers, or lists of numbers that all have the same length; labels "
                f"of {read.name} are not."
            )
        arrays[split] = array
    for split, array in arrays.items():
        if array.shape[1:] != arrays["train"].shape[1:]:
            raise InputError(
                f"Labels of all splits must have the same shape; in {examples['train'].name} it is "
                f"{arrays['train'].shape[1:]}, in {examples[split].name} {array.shape[1:]}."
            )
    has_fractions = any(array.dtype.kind == "f" for array in arrays.values())
    dtype = np.float32 if has_fractions else np.int32
    return {split: _cast(array, dtype, examples[split].name) for split, array in arrays.items()}


def _cast(array: NDArray[Any], dtype: Any, name: str) -> NDArray[np.generic]:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    for first in map(tuple, np.argwhere(~np.isclose(cast, array, rtol=1e-6, atol=0))):
        raise InputError(
            f"Labels of a custom task must fit into 32 bits ({np.dtype(dtype)}); row {first[0] + 1:,} of {name} has "
            f"{array[first]}, which would become {cast[first]}. Use smaller numbers."
        )
    return cast
