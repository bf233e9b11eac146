"""Rows of several texts: a query and its passages. The texts are encoded separately, in batches of a few lengths."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetuning.data import buckets
from finetuning.data.inputs import INDEX, EncodedRows, ExampleInputs, batches_of_rows
from train.data.inputs import Feature

if TYPE_CHECKING:
    import tensorflow as tf

# Prefix of the names of the passages' features; the query's features have no prefix.
PASSAGE = "passage_"


@dataclass(frozen=True)
class TextRows(EncodedRows):
    """Queries, encoded as in `EncodedRows`, and their passages.

    Attributes:
        passages: all distinct passages.
        members: int32 (rows, passages of a row), the indices in `passages` of each row's passages; the positive
            passage comes first.
    """

    passages: EncodedRows
    members: NDArray[np.int32]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the longest text of each row, (rows,)."""
        return np.maximum(np.diff(self.starts), self.passages.lengths[self.members].max(axis=1))

    @property
    def groups(self) -> NDArray[np.int32]:
        """The positive passage of each row, (rows,): rows that share this passage are not negatives of each other."""
        return self.members[:, 0]

    @functools.cached_property
    def sha256(self) -> str:
        queries = EncodedRows(self.starts, self.token_values, self.row_values)
        digests = (queries.sha256, self.passages.sha256, hashlib.sha256(self.members.tobytes()).hexdigest())
        return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclass(frozen=True)
class TextInputs(ExampleInputs):
    """Rows of several texts to train on, and single texts to evaluate on."""

    train_rows: TextRows

    # A program is compiled for each combination of a query length and a passage length, so more lengths would cost more
    # time.
    fits_lengths: ClassVar[bool] = False

    @functools.cached_property
    def mean_length(self) -> float:  # type: ignore[override]
        """Mean number of tokens of all texts of a row, if each is padded to the row's longest text."""
        return super().mean_length * (1 + self.train_rows.members.shape[1])

    def describe_rows(self) -> dict[str, str]:
        tokens = (
            f"{self.mean_length:.1f} on average, counting all {1 + self.train_rows.members.shape[1]} texts and padding"
        )
        return super().describe_rows() | {"tokens per row": tokens}

    def rows_to_train_on(
        self, batches: buckets.Batches, features: Mapping[str, Feature], context: "tf.distribute.InputContext"
    ) -> "tf.data.Dataset":
        """Make batches. Passages are padded to the bucket of the batch, queries to the bucket of the longest query."""
        import tensorflow as tf

        rows, members = self.train_rows, self.train_rows.members
        is_padding = batches.rows < 0
        longest = np.where(is_padding, 0, np.diff(rows.starts)[batches.rows]).max(axis=1)
        query_lengths = np.asarray(self.lengths, np.int32)[buckets.bucket_of_rows(longest, self.lengths)]
        chosen = np.where(is_padding[..., np.newaxis], buckets.PADDING, members[batches.rows])
        passages = buckets.Batches(chosen.reshape(len(batches), -1).astype(np.int32), batches.lengths)
        query_features = {name: feature for name, feature in features.items() if not name.startswith(PASSAGE)}
        passage_features = {
            name.removeprefix(PASSAGE): replace(feature, shape=feature.shape[1:])
            for name, feature in features.items()
            if name not in query_features
        }

        @tf.autograph.experimental.do_not_convert
        def join(queries: dict[str, tf.Tensor], passages: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            shape = (queries[INDEX].shape[0], members.shape[1])
            return queries | {
                f"{PASSAGE}{name}": tf.reshape(values, (*shape, *[-1] * (values.shape.rank - 1)))
                for name, values in passages.items()
            }  # passages: (rows, passages of a row, length)

        return tf.data.Dataset.zip(
            batches_of_rows(rows, buckets.Batches(batches.rows, query_lengths), query_features, context),
            batches_of_rows(rows.passages, passages, passage_features, context),
        ).map(join)
