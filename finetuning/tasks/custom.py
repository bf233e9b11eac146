"""A task of one's own: a class in a file of its author's, with own data, head and metric.

`recipes/star_ratings.py` is one; `finetuning/run_task.py` runs it.
"""

import importlib.util
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import ExamplesConfig
from finetuning.data.examples import Examples
from finetuning.data.rows import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPES
from finetuning.scores.classification import chosen_metric
from finetuning.tasks.rows import ON_ROWS, RowTask
from mlm_common.cli.local_paths import missing
from mlm_common.errors import InputError
from mlm_common.hub.retries import one_line
from train.data.inputs import Feature
from train.tasks.task import CardFigure, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    import tf_keras
    from transformers import PretrainedConfig

MODULE_NAME = "task_of_the_user"
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

    @abstractmethod
    def read(self, data: ExamplesConfig) -> Mapping[str, Examples]:
        """Read {train, validation or test: examples}, whose labels are numbers, or as many of them for each row."""

    @abstractmethod
    def head(self, config: "PretrainedConfig") -> "Sequence[tf_keras.layers.Layer]":
        """Make the layers of the head, in their order; the first takes `pooled`, the last gives the outputs."""

    def pooled(self, states: "tf.Tensor", attended: "tf.Tensor") -> "tf.Tensor":
        """Make what the head takes of the encoder's states: their mean over the tokens, (rows, hidden).

        Args:
            states: (rows, length, hidden).
            attended: int32 (rows, length), 0 at padding.
        """
        import tensorflow as tf

        weights = tf.cast(attended, tf.float32)[..., tf.newaxis]  # (rows, length, 1)
        totals = tf.reduce_sum(tf.cast(states, tf.float32) * weights, axis=1)
        return totals / tf.maximum(tf.reduce_sum(weights, axis=1), 1)

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute what the head says of each row, (rows, …)."""
        inputs = self.network_inputs(rows)
        states = network(inputs, training=training).last_hidden_state
        return network.custom_head(self.pooled(states, inputs[ATTENTION_MASK]), training=training)

    def adapt_network(self, network: Any) -> Any:
        """Put the head on the encoder."""
        import tensorflow as tf

        from finetuning.tasks.custom_head import put_head

        ids = tf.cast(network.dummy_inputs[INPUT_IDS], tf.int32)
        rows = {INPUT_IDS: ids, ATTENTION_MASK: tf.ones_like(ids), TOKEN_TYPES: tf.zeros_like(ids)}
        return put_head(network, lambda: self.head(network.config), lambda: self.outputs(network, rows, training=False))

    def see_labels(self, train: NDArray[Any], validation: NDArray[Any] | None, metric: str | None) -> None:
        """Learn from the labels their form, which metrics there are, and what a guess without the text would score.

        The guess is the most frequent label, of fractions the mean.

        Raises:
            InputError: there is no such metric.
        """
        self.label = Feature(train.shape[1:], dtype="int64" if train.dtype == np.int32 else "float32")
        self.references = validation
        self.metrics = tuple(self.scores(train, train))
        self.metric = chosen_metric(self.metrics, metric)
        self.guess = {}
        if validation is not None:
            self.guess = self.scores(np.repeat(_guess(train)[np.newaxis], len(validation), axis=0), validation)
        figures = [CardFigure(one, one.replace("_", " "), one, one) for one in self.metrics]
        self.card = TaskCard(
            model_kind="model for a custom task",
            task_name=type(self).__name__,
            pipeline_tag="feature-extraction",
            figures=(CardFigure("loss", "loss", "loss", "Loss"), *figures),
            training_verb="fine-tuned",
            start_words="from",
            usage=USAGE,
            evaluation=ON_ROWS,
            limits=LIMITS,
        )


def _guess(labels: NDArray[Any]) -> NDArray[Any]:
    if labels.dtype.kind == "f":
        return labels.mean(axis=0)
    values, counts = np.unique(labels, axis=0, return_counts=True)
    return values[counts.argmax()]


def load_task(task: str) -> type[CustomTask]:
    """Run the file of `FILE.py:CLASS`, and return that class.

    The file's folder is not searched for modules, so that no code is run but its own and what is installed.

    Raises:
        InputError: no such file or class, a file that fails, or a class that is no task or lacks a method of one.
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
        classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == MODULE_NAME]
        known = ", ".join(one.__name__ for one in classes) or "no classes"
        raise InputError(f"--task: {path} has no class {name}; it has {known}.")
    if not issubclass(found, CustomTask):
        raise InputError(f"--task: {name} in {path} is not a subclass of {CustomTask.__module__}.CustomTask.")
    lacking = sorted(getattr(found, "__abstractmethods__", ()))
    if lacking:
        raise InputError(f"--task: {name} in {path} lacks these methods: {', '.join(lacking)}.")
    return found
