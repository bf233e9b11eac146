"""`Inputs`: the interface to a run's training and validation rows, in shards or in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Feature:
    """A feature of every record.

    Attributes:
        shape: shape of a row's value.
        padding: value in the rows of padding that fill the last batch of an evaluation.
        dtype: type in the record, int64 or float32. In batches the type is int32 or float32.
    """

    shape: tuple[int, ...] = ()
    padding: float = 0
    dtype: str = "int64"

    @property
    def batch_dtype(self) -> str:
        return "int32" if self.dtype == "int64" else self.dtype


class Inputs(ABC):
    """Rows of token ids for training and validation, all from the same tokenizer.

    Rows are checked before TensorFlow is imported, so methods that read batches import it themselves.

    Attributes:
        tokenizer: the tokenizer that produced the ids.
        tokenizer_source: folder or Hub id that the tokenizer was loaded from.
        max_length: number of tokens of the longest row.
        mean_length: average number of tokens per row, including padding, if rows differ in length; else None.
        fills_passes: whether the last batch of each pass over the rows is filled with rows of padding. Otherwise a
            batch may contain rows of two passes.
    """

    tokenizer: "PreTrainedTokenizerFast"
    tokenizer_source: str
    max_length: int
    mean_length: float | None = None
    fills_passes: ClassVar[bool] = False

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of training rows."""

    @property
    @abstractmethod
    def num_eval_rows(self) -> int:
        """Number of validation rows; 0 if nothing is evaluated."""

    @property
    def unigram_entropy_nats(self) -> float | None:
        """Entropy of the token frequencies of the validation rows, in nats; None if unknown."""
        return None

    @property
    def cuts_words(self) -> bool:
        """Whether a row may start or end inside a word of the text."""
        return False

    @property
    def num_words(self) -> int:
        """Number of words (split at white space) in the training rows; 0 if not counted, or with several sources."""
        return 0

    def describe_sources(self, first_row: int, num_rows: int) -> dict[str, str]:  # noqa: ARG002
        """Describe a mixture's sources at `first_row` and at `first_row + num_rows`, as {title: text}.

        Warn if a source is read too often.
        """
        return {}

    def evaluated(self) -> "Mapping[str, tuple[Inputs, float]]":
        """Return the sources that are evaluated separately, {name: (validation rows, weight of the loss)}.

        Without separate sources, all validation rows are in one entry with an empty name.
        """
        return {"": (self, 1.0)} if self.num_eval_rows else {}

    def rows_used(self, num_rows: int) -> dict[str, int]:  # noqa: ARG002
        """Return how many of the first `num_rows` rows come from each source, {identity of the source: number}."""
        return {}

    def after(self, rows_used: Mapping[str, int]) -> "Inputs":  # noqa: ARG002
        """Return inputs that continue each source after the rows that earlier phases used, as given by `rows_used`."""
        return self

    def has_rows_of(self, other: "Inputs") -> bool:  # noqa: ARG002
        """Return whether a phase with these inputs continues to read the rows of the previous phase, `other`."""
        return False

    @abstractmethod
    def identities(self) -> dict[str, Any]:
        """Return the values that identify these rows, for a run's fingerprint."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return entries for `run.json`: `train_data`, and `eval_data`, which is None without validation rows."""

    def describe_rows(self) -> dict[str, str]:
        """Return extra lines for a run's plan that describe its rows, as {title: text}."""
        return {}

    @abstractmethod
    def training_batches(
        self,
        features: Mapping[str, Feature],
        context: "tf.distribute.InputContext",
        *,
        seed: int,
        global_batch_rows: int,
        start_step: int,
        num_steps: int,
        num_left_out_rows: int = 0,
    ) -> "tf.data.Dataset":
        """Return the batches of an input pipeline's replicas for `num_steps` steps.

        Args:
            features: features to read.
            context: the input pipeline.
            seed: seed of the order of rows.
            global_batch_rows: rows per step, over all replicas.
            start_step: number of steps whose rows are skipped.
            num_steps: number of steps.
            num_left_out_rows: number of further rows to skip.

        Returns:
            Batches {feature: (global_batch_rows / replicas, …)}. For each step there is a batch for each replica of the
            pipeline, in order.
        """

    @abstractmethod
    def evaluation_batches(
        self,
        features: Mapping[str, Feature],
        prepare_row: Callable[[dict[str, "tf.Tensor"]], Any],
        context: "tf.distribute.InputContext",
        *,
        global_batch_rows: int,
    ) -> "tf.data.Dataset":
        """Return the batches of an input pipeline's replicas; together the pipelines read each validation row once.

        There are `num_evaluation_batches` global batches. Incomplete batches are filled with rows of padding.

        Args:
            features: features to read.
            prepare_row: applied to each row.
            context: the input pipeline.
            global_batch_rows: rows per batch, over all replicas.
        """

    @abstractmethod
    def num_evaluation_batches(self, global_batch_rows: int) -> int:
        """Return the number of global batches of `evaluation_batches`; 0 if nothing is evaluated."""
