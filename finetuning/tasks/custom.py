"""A custom task: a class in a file of its author, with its data, head and metric.

`recipes/star_ratings.py` is one; `finetuning/run_task.py` runs it.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import CustomConfig, CustomData, ExamplesConfig
from finetuning.data.examples import SPLITS, Examples, num_samples
from finetuning.data.inputs import ATTENTION_MASK
from finetuning.data.shared_rows import check_shared_rows
from finetuning.loop.model import open_start
from finetuning.loop.task import EVAL_NAME, ON_ROWS, Part, RowTask, finetuned_card
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

This opens the encoder alone. The predictions of the task need its file, and the project that trained it:
`python finetuning/predict.py --model {model} --task FILE.py:CLASS --text "A text."`"""
LIMITS = """`AutoModel` opens the encoder. The head of the custom task is in `model.safetensors` as well, under names
  that start with `custom_head.`; no class of transformers has it. It takes texts of at most {max_length} tokens."""


class CustomTask(RowTask):
    """Learns the labels that a subclass reads, by the head that it puts on the encoder.

    A subclass has five methods: `read`, `head`, `losses`, `predict` and `scores`. A run is checked before TensorFlow
    starts, so those that compute import it themselves.
    """

    model_class = "TFAutoModel"
    adds_weights = True

    @abstractmethod
    def read(self, data: ExamplesConfig) -> Mapping[str, Examples]:
        """Read {train, validation or test: examples}; each label is a number, or a list of numbers of one length."""

    @abstractmethod
    def head(self, config: "PretrainedConfig") -> "Sequence[tf_keras.layers.Layer]":
        """Make the layers of the head, in their order; the first takes `pooled`, the last gives the outputs."""

    def pooled(self, states: "tf.Tensor", attended: "tf.Tensor") -> "tf.Tensor":
        """Make what the head takes of the encoder's states: their mean over the tokens, (rows, hidden).

        Args:
            states: (rows, length, hidden).
            attended: int32 (rows, length), 0 at padding.
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
        """Learn from the labels their form, which metrics there are, and what a guess without the text would score.

        The guess is the most frequent label, of fractions the mean.
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
    return load_class(task, CustomTask)  # type: ignore[type-abstract]


class CustomJob(FinetuningJob[CustomConfig]):
    """The job of `run_task.py`."""

    def open_run(self, config: CustomConfig, cluster: Cluster) -> Run:
        task_class = load_task(str(config.data.task))
        start, data = open_start(config), config.data
        task = task_class(**start.of_rows)
        examples = read_examples(task, data)
        labels = read_labels(examples)
        check_shared_rows(
            {split: list(zip(*one.texts, strict=True)) for split, one in examples.items()},
            {split: one.name for split, one in examples.items()},
            [split for split in examples if split not in labels],
        )
        task.see_labels(labels["train"], labels.get("validation"), data.metric_name)

        def part(split: str, file: str = "") -> Part:
            one = examples[split]
            shape, dtype = labels["train"].shape[1:], labels["train"].dtype
            of_rows = labels[split] if split in labels else np.zeros((one.num_rows, *shape), dtype)
            rows = start.encode_texts(one.texts, data.max_seq_length, of_rows)
            return Part(rows, of_rows, file, is_scored=split in labels)

        self.validation = {"": part("validation", f"{EVAL_NAME}.txt")} if "validation" in examples else {}
        self.tests = [part("test", "predict_results_test.txt")] if "test" in examples else []
        identities = {"task": identity_of(str(data.task))}
        described = _describe(examples["train"], labels["train"]) | {"first label": task.shown(labels["train"][0])}
        rows, validation = part("train").rows, self.validation.get("")
        return start.run(task, rows, validation, cluster, identities=identities, described=described)


def _describe(examples: Examples, labels: NDArray[np.generic]) -> dict[str, str]:
    kind = "fractions" if labels.dtype.kind == "f" else "whole numbers"
    each = f"{' x '.join(map(str, labels.shape[1:]))} a row" if labels.ndim > 1 else "one a row"
    values = np.asarray(labels, np.float64)
    return {
        "texts": f"{len(examples.texts)} of each row of {examples.name}",
        "labels": f"{kind}, {each}, {values.min():.6g} to {values.max():.6g}, mean {values.mean():.6g}",
    }


def read_examples(task: CustomTask, data: CustomData) -> dict[str, Examples]:
    """Let a task read its examples, {train, validation or test: examples}, cut to the numbers of the flags.

    Raises:
        InputError: they are no examples, or there are none to train on, or to predict with --do-predict.
    """
    name, read = type(task).__name__, task.read(data)
    parts = {split: read[split] for split in SPLITS if split in read}
    if "train" not in parts:
        raise InputError(f"read of {name} must give examples under train; received {', '.join(read) or 'nothing'}.")
    if data.predicts and "test" not in parts:
        raise InputError(f"--do-predict needs a part to predict; read of {name} gives {', '.join(parts)}.")
    if not data.predicts:
        parts.pop("test", None)
    for split, one in parts.items():
        is_text = all(isinstance(text, str) for column in one.texts for text in column)
        sizes = {len(column) for column in one.texts} | ({len(one.labels)} if one.labels is not None else set())
        if not is_text or len(sizes) != 1 or 0 in sizes:
            raise InputError(
                f"read of {name} must give columns of text, and a label for each row; under {split} are "
                f"{' and '.join(f'{size:,}' for size in sorted(sizes))} of them."
            )
        if one.labels is None and split != "test":
            raise InputError(f"read of {name} must give labels to train and evaluate on; under {split} are none.")
    limits = num_samples(data)
    return {split: one.first(limits[split]) for split, one in parts.items()}


def read_labels(examples: Mapping[str, Examples]) -> dict[str, NDArray[np.generic]]:
    """Make the labels of each part that has some arrays, (rows, …): all int32, or float32 where one is a fraction.

    Raises:
        InputError: they are not numbers, not of one shape, or do not fit into 32 bits.
    """
    arrays = {}
    for split, one in examples.items():
        if one.labels is None:
            continue
        try:
            array = np.array(list(one.labels))
        except ValueError:
            array = np.array(None)
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise InputError(
                f"Labels of a task must be numbers, the same number of them for each row; those of {one.name} are not."
            )
        arrays[split] = array
    for split, array in arrays.items():
        if array.shape[1:] != arrays["train"].shape[1:]:
            raise InputError(
                f"Labels must be of one form: of {examples['train'].name} each is {arrays['train'].shape[1:]}, of "
                f"{examples[split].name} {array.shape[1:]}."
            )
    has_fractions = any(array.dtype.kind == "f" for array in arrays.values())
    dtype = np.float32 if has_fractions else np.int32
    return {split: _cast(array, dtype, examples[split].name) for split, array in arrays.items()}


def _cast(array: NDArray[Any], dtype: Any, name: str) -> NDArray[np.generic]:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    for first in map(tuple, np.argwhere(~np.isclose(cast, array, rtol=1e-6, atol=0))):
        raise InputError(
            f"Labels of a task must fit into 32 bits ({np.dtype(dtype)}); row {first[0] + 1:,} of {name} has "
            f"{array[first]}, which would become {cast[first]}. Use smaller numbers."
        )
    return cast
