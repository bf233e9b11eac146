"""The rows that a run trains on and is evaluated on, in shards or in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Feature:
    """A feature that every record has.

    shape: of one row's.
    padding: value in the rows that fill up the last batch of an evaluation.
    dtype: in the record, int64 or float32; batches hold int32 or float32.
    """

    shape: tuple[int, ...] = ()
    padding: float = 0
    dtype: str = "int64"

    @property
    def batch_dtype(self) -> str:
        return "int32" if self.dtype == "int64" else self.dtype


class Inputs(ABC):
    """Rows of token ids to train on and to evaluate on, by one tokenizer.

    They are checked before TensorFlow is imported, so methods that read batches import it themselves.

    tokenizer: that made the rows.
    tokenizer_source: the folder or Hub id that it was loaded from.
    max_length: tokens of the longest row.
    mean_length: tokens of a row on average, padding included, where rows differ in length; else None.
    fills_passes: the last batch of each pass over the rows is filled up with rows of padding; else batches run on over
        the end of a pass.
    """

    tokenizer: "PreTrainedTokenizerFast"
    tokenizer_source: str
    max_length: int
    mean_length: float | None = None
    fills_passes: ClassVar[bool] = False

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows to train on."""

    @property
    @abstractmethod
    def num_eval_rows(self) -> int:
        """Rows to evaluate on; 0 where nothing is evaluated."""

    @property
    def unigram_entropy_nats(self) -> float | None:
        """Entropy of the token frequencies of the rows to evaluate on, where it is known."""
        return None

    @property
    def cuts_words(self) -> bool:
        """Whether a row may begin or end within a word of the text."""
        return False

    @property
    def num_words(self) -> int:
        """Words of the rows to train on, by white space; 0 where they were not counted, and of several sources."""
        return 0

    def describe_sources(self, first_row: int, num_rows: int) -> dict[str, str]:  # noqa: ARG002
        """Describe the sources of a mixture, {title: text}, at a row and `num_rows` later; warn of many passes."""
        return {}

    def evaluated(self) -> "Mapping[str, tuple[Inputs, float]]":
        """Return what is evaluated apart, by source, with the weight of its loss; if nothing is, all rows as ""."""
        return {"": (self, 1.0)} if self.num_eval_rows else {}

    def rows_used(self, num_rows: int) -> dict[str, int]:  # noqa: ARG002
        """Count the rows of each source, by what identifies it, that are used in the first `num_rows`."""
        return {}

    def after(self, rows_used: Mapping[str, int]) -> "Inputs":  # noqa: ARG002
        """Return the inputs whose sources begin after the rows that earlier phases used, by what `rows_used` gives."""
        return self

    def has_rows_of(self, other: "Inputs") -> bool:  # noqa: ARG002
        """Return whether a phase would continue in the rows of the one before it."""
        return False

    @abstractmethod
    def identities(self) -> dict[str, Any]:
        """Collect what identifies these rows, for the fingerprint of a run."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Collect what `run.json` records: `train_data`, and `eval_data`, None without rows to evaluate on."""

    def describe_rows(self) -> dict[str, str]:
        """Describe the rows in the plan of a run, {title: text}, beyond their number and length."""
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
        """Read the batches of `num_steps` steps from `start_step` on for the replicas of one input pipeline.

        The rows of the steps before `start_step` are skipped, and `num_left_out_rows` more. Each batch is {feature:
        (global_batch_rows / replicas, …)}; those of a step follow each other in the order of the replicas.
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
        """Read every row once, over all pipelines, as batches for the replicas of one, each row made by `prepare_row`.

        There are `num_evaluation_batches` global batches; those that are not full are filled up with rows of padding.
        """

    @abstractmethod
    def num_evaluation_batches(self, global_batch_rows: int) -> int:
        """Count the global batches of `evaluation_batches`; 0 where nothing is evaluated."""
