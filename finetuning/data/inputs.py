"""Encoded examples in memory, and their batches as tf.data.

Rows have different lengths, and are stored one after another in a single array. Each input pipeline (one per host)
yields the batches of its replicas, which are slices of the global batches: for each step, one batch per replica in the
order of the replicas. The pipelines use only TensorFlow operations, so that any host can run them.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetuning.data import buckets
from mlm_common.errors import InputError
from mlm_common.tokenizer import tokenizer_sha256
from train.data.inputs import Feature, Inputs

if TYPE_CHECKING:
    import tensorflow as tf

# Number of texts that the tokenizer encodes per call, on all cores.
TEXTS_AT_ONCE = 10_000
# If a text of a pair has more characters than this number per token of the row, it is cut before the pair is encoded.
LONG_TEXT = 64
INPUT_IDS, TOKEN_TYPES, INDEX = "input_ids", "token_type_ids", "index"
# 1 for tokens, 0 for padding. The mask is derived from the length of the row, because the padding token may occur in a
# text.
ATTENTION_MASK = "attention_mask"


@dataclass(frozen=True)
class EncodedRows:
    """Rows of tokens, stored one after another, with the features of the tokens and of the rows.

    Attributes:
        starts: int64 (texts + 1,), index of the first token of each text, and at the end the total number of tokens.
        token_values: features of tokens, {feature: int32 (tokens,)}; one feature is `INPUT_IDS`.
        row_values: features of rows, {feature: (rows, …)}; one feature is the number of the row, `INDEX`.
        texts_per_row: number of consecutive texts that form a row. If there are several, batches have the shape
            (rows, texts, length).
    """

    starts: NDArray[np.int64]
    token_values: Mapping[str, NDArray[np.int32]]
    row_values: Mapping[str, NDArray[np.generic]]
    texts_per_row: int = field(default=1, kw_only=True)

    @property
    def num_rows(self) -> int:
        return (len(self.starts) - 1) // self.texts_per_row

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the longest text of each row, (rows,)."""
        return np.diff(self.starts).reshape(-1, self.texts_per_row).max(axis=1)

    @property
    def groups(self) -> NDArray[np.int32] | None:
        """Group number of each row, (rows,): rows of the same group share a batch only if unavoidable."""
        return None

    @functools.cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.starts.tobytes())
        for columns in (self.token_values, self.row_values):
            for name in sorted(columns):
                digest.update(f"{name} {columns[name].dtype} {columns[name].shape}".encode())
                digest.update(np.ascontiguousarray(columns[name]).tobytes())
        return digest.hexdigest()


def join_rows(
    token_values: Mapping[str, Sequence[Sequence[int] | NDArray[np.int32]]],
    row_values: Mapping[str, NDArray[np.generic]],
) -> EncodedRows:
    """Concatenate and number rows.

    Args:
        token_values: {feature: for each row, the values of its tokens}.
        row_values: {feature: (rows, …)}.
    """
    ids = token_values[INPUT_IDS]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    joined = {name: np.concatenate([np.asarray(row, np.int32) for row in rows]) for name, rows in token_values.items()}
    return EncodedRows(starts, joined, {**row_values, INDEX: np.arange(len(ids), dtype=np.int32)})


def check_room(tokenizer: PreTrainedTokenizerFast, max_length: int, *, is_pair: bool = False) -> None:
    """Check that a row of `max_length` tokens has room for more than the special tokens, which are never cut."""
    num_special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length <= num_special:
        rule = f"must be above {num_special}, the number of special tokens per row"
        raise InputError(f"--max-seq-length {rule}; received {max_length}.")


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[Sequence[str]],
    *,
    max_length: int,
    token_types: bool,
    labels: NDArray[np.generic] | None = None,
) -> EncodedRows:
    """Encode one or two columns of text with special tokens.

    Args:
        tokenizer: encodes the texts.
        texts: the columns.
        max_length: maximum number of tokens per row. Longer rows are cut; in a pair, the longer text is cut first.
        token_types: whether to return token type ids.
        labels: labels (rows, …) to store as the feature "label".
    """
    check_room(tokenizer, max_length, is_pair=len(texts) == 2)
    columns: dict[str, list[NDArray[np.int32]]] = {INPUT_IDS: [], **({TOKEN_TYPES: []} if token_types else {})}
    for start in range(0, len(texts[0]), TEXTS_AT_ONCE):
        chunk = [list(column[start : start + TEXTS_AT_ONCE]) for column in texts]
        if len(chunk) == 2:
            chunk = [[_without_end(tokenizer, text, max_length) for text in column] for column in chunk]
        encoded = tokenizer(
            *chunk,
            truncation="longest_first",
            max_length=max_length,
            return_token_type_ids=token_types,
            return_attention_mask=False,
        )
        for name, rows in columns.items():
            rows += [np.array(row, np.int32) for row in encoded[name]]
    return join_rows(columns, {} if labels is None else {"label": labels})


def _without_end(tokenizer: PreTrainedTokenizerFast, text: str, max_length: int) -> str:
    """Cut a long text at the end of a word, after at least `max_length` tokens.

    Otherwise `tokenizers` would make a row for each combination of an overflowing chunk of one text with an overflowing
    chunk of the other.
    """
    if len(text) <= LONG_TEXT * max_length:
        return text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    words = encoded.word_ids()
    cut = next((token for token in range(max_length, len(words)) if words[token] != words[token - 1]), None)
    return text if cut is None else text[: encoded["offset_mapping"][cut - 1][1]]


@dataclass(frozen=True)
class ExampleInputs(Inputs):
    """Rows to train on, rows to evaluate on, and the lengths to which they are padded.

    Attributes:
        lengths: lengths of the buckets, ascending.
        sources: origin of the examples, for `run.json`; its `source` is the text for the model card.
        extra_identities: further values that distinguish this run from other runs, {name: value}.
        plan_lines: lines about the examples for the printed plan, {title: text}.
    """

    train_rows: EncodedRows
    eval_rows: EncodedRows | None
    tokenizer: PreTrainedTokenizerFast
    tokenizer_source: str
    lengths: tuple[int, ...]
    sources: Mapping[str, Any]
    extra_identities: Mapping[str, str] = field(default_factory=dict)
    plan_lines: Mapping[str, str] = field(default_factory=dict)

    fills_passes: ClassVar[bool] = True
    # Whether the default lengths are fitted to the rows.
    fits_lengths: ClassVar[bool] = True

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """Number of tokens of the longest row, including padding."""
        return self.lengths[-1]

    @property
    def num_rows(self) -> int:
        return self.train_rows.num_rows

    @property
    def num_eval_rows(self) -> int:
        return self.eval_rows.num_rows if self.eval_rows else 0

    @functools.cached_property
    def mean_length(self) -> float:  # type: ignore[override]
        """Mean number of tokens of a training row, including padding."""
        padded = np.asarray(self.lengths)[buckets.bucket_of_rows(self.train_rows.lengths, self.lengths)]
        return float(np.mean(padded)) * self.train_rows.texts_per_row

    def identities(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length,
            "train_rows": self.train_rows.sha256,
            "eval_rows": self.eval_rows.sha256 if self.eval_rows else None,
            "tokenizer": tokenizer_sha256(self.tokenizer),
            **self.extra_identities,
        }

    def describe(self) -> dict[str, Any]:
        splits = {"train_data": self.train_rows, "eval_data": self.eval_rows}
        return {
            name: None if rows is None else {**self.sources, "totals": {"num_rows": rows.num_rows}}
            for name, rows in splits.items()
        }

    def describe_rows(self) -> dict[str, str]:
        """Describe the columns that were read, the first example, and the numbers and lengths of rows."""
        counts = np.bincount(buckets.bucket_of_rows(self.train_rows.lengths, self.lengths), minlength=len(self.lengths))
        counted = [f"{count:,} up to {length}" for count, length in zip(counts, self.lengths, strict=True) if count]
        evaluated = self.eval_rows.num_rows if self.eval_rows else 0
        first_row = self.train_rows.token_values[INPUT_IDS][: self.train_rows.starts[1]]
        num_tokens = self.train_rows.starts[-1]
        rows = f"{self.num_rows:,} to train on, {evaluated:,} to evaluate on"
        return {
            **self.plan_lines,
            "first example": self.tokenizer.decode(first_row),
            "rows": self.plan_lines.get("rows", rows),
            "tokens per row": f"{num_tokens / self.num_rows:.1f} on average, {self.mean_length:.1f} with padding; "
            f"rows by length: {', '.join(counted)}",
        }

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
        batches = buckets.training_batches(
            self.train_rows.lengths,
            self.lengths,
            batch_rows=global_batch_rows,
            seed=seed,
            first=start_step + num_left_out_rows // global_batch_rows,
            num_batches=num_steps,
            groups=self.train_rows.groups,
        )
        return self.rows_to_train_on(batches, features, context)

    def rows_to_train_on(
        self, batches: buckets.Batches, features: Mapping[str, Feature], context: "tf.distribute.InputContext"
    ) -> "tf.data.Dataset":
        """Make batches {feature: (rows of a replica, …)}."""
        return batches_of_rows(self.train_rows, batches, features, context)

    def evaluation_batches(
        self,
        features: Mapping[str, Feature],
        prepare_row: "Callable[[dict[str, tf.Tensor]], Any]",
        context: "tf.distribute.InputContext",
        *,
        global_batch_rows: int,
    ) -> "tf.data.Dataset":
        assert self.eval_rows is not None
        batches = self._evaluation(global_batch_rows)
        return batches_of_rows(self.eval_rows, batches, features, context, prepare_row)

    def num_evaluation_batches(self, global_batch_rows: int) -> int:
        return len(self._evaluation(global_batch_rows)) if self.eval_rows else 0

    def _evaluation(self, global_batch_rows: int) -> buckets.Batches:
        assert self.eval_rows is not None
        return buckets.evaluation_batches(self.eval_rows.lengths, self.lengths, batch_rows=global_batch_rows)


def batches_of_rows(
    encoded: EncodedRows,
    batches: buckets.Batches,
    features: Mapping[str, Feature],
    context: "tf.distribute.InputContext",
    prepare_row: "Callable[[dict[str, tf.Tensor]], Any] | None" = None,
) -> "tf.data.Dataset":
    """Make batches {feature: (rows of a replica, …)}, in which features of tokens are padded to the batch's length.

    Args:
        encoded: the rows.
        batches: the row numbers and the length of each global batch.
        features: the features to read, with the values for padding. `ATTENTION_MASK` is computed from the row lengths.
        context: the input pipeline.
        prepare_row: converts each row, as `Task.prepare_row` does.
    """
    import tensorflow as tf

    from train.data.pipeline import prefetched

    def with_padding(values: np.ndarray, feature: Feature) -> tf.Tensor:
        """Append a row of padding."""
        values = values.astype(feature.batch_dtype)
        return tf.constant(np.concatenate([values, np.full((1, *values.shape[1:]), feature.padding, values.dtype)]))

    num_replicas = context.num_replicas_in_sync // context.num_input_pipelines
    rows = batches.rows.reshape(len(batches), context.num_input_pipelines, num_replicas, -1)
    pipeline_rows = rows[:, context.input_pipeline_id].reshape(len(batches) * num_replicas, -1)
    replica_rows = pipeline_rows.shape[1]
    token_values = {name: tf.constant(encoded.token_values[name]) for name in features if name in encoded.token_values}
    row_values = {
        name: with_padding(encoded.row_values[name], feature)
        for name, feature in features.items()
        if name in encoded.row_values
    }
    num_texts = encoded.texts_per_row
    shape = (replica_rows, *([num_texts] if num_texts > 1 else []), None)
    # After the last row, add a row of padding without tokens.
    starts = tf.constant(np.append(encoded.starts, np.repeat(encoded.starts[-1], num_texts)))

    @tf.autograph.experimental.do_not_convert
    def make(rows: tf.Tensor, length: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = tf.where(rows < 0, encoded.num_rows, rows)
        texts = rows if num_texts == 1 else rows[:, tf.newaxis] * num_texts + tf.range(num_texts)
        begins, ends = tf.gather(starts, texts), tf.gather(starts, texts + 1)
        positions = begins[..., tf.newaxis] + tf.cast(tf.range(length), tf.int64)  # (rows, length)
        is_token = positions < ends[..., tf.newaxis]
        positions = tf.where(is_token, positions, 0)
        batch = {}
        for name, feature in features.items():
            if name == ATTENTION_MASK:
                batch[name] = tf.ensure_shape(tf.cast(is_token, feature.batch_dtype), shape)
            elif name in token_values:
                padding = tf.constant(feature.padding, feature.batch_dtype)
                values = tf.where(is_token, tf.gather(token_values[name], positions), padding)
                batch[name] = tf.ensure_shape(values, shape)
            elif name in row_values:
                batch[name] = tf.ensure_shape(tf.gather(row_values[name], rows), (replica_rows, *feature.shape))
        return batch

    @tf.autograph.experimental.do_not_convert
    def prepare_rows(batch: dict[str, tf.Tensor]) -> Any:
        rows = tf.data.Dataset.from_tensor_slices(batch).map(prepare_row).batch(replica_rows, drop_remainder=True)
        return rows.get_single_element()

    lengths = np.repeat(batches.lengths, num_replicas)
    dataset = tf.data.Dataset.from_tensor_slices((pipeline_rows, lengths))
    dataset = dataset.map(make, num_parallel_calls=tf.data.AUTOTUNE)
    if prepare_row is not None:
        dataset = dataset.map(prepare_rows)
    return prefetched(dataset, context)


def run_on_rows(
    step: "Callable[[dict[str, tf.Tensor]], dict[str, tf.Tensor]]",
    encoded: EncodedRows,
    features: Mapping[str, Feature],
    lengths: Sequence[int],
    batch_rows: int,
) -> dict[str, NDArray[Any]]:
    """Call `step` on the batches of an evaluation, and concatenate its results, including results for padding.

    Args:
        step: takes a batch {feature: (rows, …)} and returns {name: (rows, …)}.
        encoded: the rows.
        features: the features to read.
        lengths: lengths of the buckets, ascending.
        batch_rows: rows per batch.
    """
    import tensorflow as tf

    batches = buckets.evaluation_batches(encoded.lengths, lengths, batch_rows=batch_rows)
    results = [step(batch) for batch in batches_of_rows(encoded, batches, features, tf.distribute.InputContext())]
    return {name: np.concatenate([result[name].numpy() for result in results]) for name in results[0]}
