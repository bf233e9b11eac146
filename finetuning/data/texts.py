"""Rows of several texts: a query and its passages, encoded apart, in batches of a few lengths."""

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

# Begins the names of the passages' features; those of the query have none.
PASSAGE = "passage_"


@dataclass(frozen=True)
class TextRows(EncodedRows):
    """Queries as `EncodedRows` holds them, and their passages.

    passages: all different ones.
    members: int32 (rows, passages of a row), which of them belong to each row, the positive one first.
    """

    passages: EncodedRows
    members: NDArray[np.int32]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the longest text of each row, (rows,)."""
        return np.maximum(np.diff(self.starts), self.passages.lengths[self.members].max(axis=1))

    @property
    def groups(self) -> NDArray[np.int32]:
        return self.members[:, 0]

    @functools.cached_property
    def sha256(self) -> str:
        queries = EncodedRows(self.starts, self.of_tokens, self.of_rows)
        parts = (queries.sha256, self.passages.sha256, hashlib.sha256(self.members.tobytes()).hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class TextInputs(ExampleInputs):
    """Rows of several texts to train on, and single texts to evaluate on."""

    train_rows: TextRows

    fits_lengths: ClassVar[bool] = False  # each pair of a query's and a passage's length is a program

    @functools.cached_property
    def mean_length(self) -> float:  # type: ignore[override]
        """Tokens of all texts of a row, on average, with the padding up to the longest text."""
        return super().mean_length * (1 + self.train_rows.members.shape[1])

    def describe_rows(self) -> dict[str, str]:
        tokens = f"{self.mean_length:.1f} on average, of all {1 + self.train_rows.members.shape[1]} texts, with padding"
        return super().describe_rows() | {"tokens per row": tokens}

    def rows_to_train_on(
        self, batches: buckets.Batches, features: Mapping[str, Feature], context: "tf.distribute.InputContext"
    ) -> "tf.data.Dataset":
        """Fill passages up to the bucket of the longest text of a batch, queries to that of the longest query."""
        import tensorflow as tf

        rows, members = self.train_rows, self.train_rows.members
        is_padding = batches.rows < 0
        longest = np.where(is_padding, 0, np.diff(rows.starts)[batches.rows]).max(axis=1)
        query_lengths = np.asarray(self.lengths, np.int32)[buckets.bucket_of_rows(longest, self.lengths)]
        chosen = np.where(is_padding[..., np.newaxis], buckets.PADDING, members[batches.rows])
        passages = buckets.Batches(chosen.reshape(len(batches), -1).astype(np.int32), batches.lengths)
        of_query = {name: one for name, one in features.items() if not name.startswith(PASSAGE)}
        of_passage = {
            name.removeprefix(PASSAGE): replace(one, shape=one.shape[1:])
            for name, one in features.items()
            if name not in of_query
        }

        @tf.autograph.experimental.do_not_convert
        def join(queries: dict[str, tf.Tensor], passages: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            shape = (queries[INDEX].shape[0], members.shape[1])
            return queries | {
                f"{PASSAGE}{name}": tf.reshape(one, (*shape, *[-1] * (one.shape.rank - 1)))  # (rows, passages, length)
                for name, one in passages.items()
            }

        return tf.data.Dataset.zip(
            batches_of_rows(rows, buckets.Batches(batches.rows, query_lengths), of_query, context),
            batches_of_rows(rows.passages, passages, of_passage, context),
        ).map(join)
