"""Encoded examples in memory, rows of differing length laid end to end, and their batches as tf.data.

Each input pipeline (one a host) gives the batches of its replicas, cut out of the global batches: those of a step
follow each other in the order of the replicas. All is made by operations of TensorFlow, which any host can run.
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

# Texts that are encoded at once; those of a batch go over all cores.
TEXTS_AT_ONCE = 10_000
# Characters by token of a row, from which on the texts of a pair are cut before they are encoded together.
LONG_TEXT = 64
INPUT_IDS, TOKEN_TYPES, INDEX = "input_ids", "token_type_ids", "index"
# 1 at the tokens of a row, 0 at its padding: by its length, since the padding token may also occur in a text.
ATTENTION_MASK = "attention_mask"


@dataclass(frozen=True)
class EncodedRows:
    """Rows of token ids, and what belongs to their tokens and to them.

    starts: int64 (texts + 1,), where each text begins among the tokens, and where the last ends.
    of_tokens: {feature: int32 (tokens,)}.
    of_rows: {feature: (rows, …)}; among them the number of the row, `INDEX`.
    texts_per_row: texts that a row has, which follow each other; batches of several are (rows, texts, length).
    """

    starts: NDArray[np.int64]
    of_tokens: Mapping[str, NDArray[np.int32]]
    of_rows: Mapping[str, NDArray[np.generic]]
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
        """A number for each row, (rows,); a batch has two rows of one number only where that cannot be avoided."""
        return None

    @functools.cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.starts.tobytes())
        for columns in (self.of_tokens, self.of_rows):
            for name in sorted(columns):
                digest.update(f"{name} {columns[name].dtype} {columns[name].shape}".encode())
                digest.update(np.ascontiguousarray(columns[name]).tobytes())
        return digest.hexdigest()


def join_rows(
    of_tokens: Mapping[str, Sequence[Sequence[int] | NDArray[np.int32]]], of_rows: Mapping[str, NDArray[np.generic]]
) -> EncodedRows:
    """Lay rows end to end, and number them: of tokens {feature: rows of int32}, of rows {feature: (rows, …)}."""
    ids = of_tokens[INPUT_IDS]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    joined = {name: np.concatenate([np.asarray(row, np.int32) for row in rows]) for name, rows in of_tokens.items()}
    return EncodedRows(starts, joined, {**of_rows, INDEX: np.arange(len(ids), dtype=np.int32)})


def check_room(tokenizer: PreTrainedTokenizerFast, max_length: int, *, is_pair: bool = False) -> None:
    """Check that a row has room for more than special tokens, which are never cut."""
    num_special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length <= num_special:
        raise InputError(
            f"--max-seq-length must be above {num_special}, the special tokens of a row; {max_length} is not."
        )


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[Sequence[str]],
    *,
    max_length: int,
    token_types: bool,
    labels: NDArray[np.generic] | None = None,
) -> EncodedRows:
    """Encode one or two columns of text with special tokens, cut to `max_length`, of a pair the longer text first."""
    check_room(tokenizer, max_length, is_pair=len(texts) == 2)
    columns: dict[str, list[NDArray[np.int32]]] = {INPUT_IDS: [], **({TOKEN_TYPES: []} if token_types else {})}
    for start in range(0, len(texts[0]), TEXTS_AT_ONCE):
        some = [list(column[start : start + TEXTS_AT_ONCE]) for column in texts]
        if len(some) == 2:
            some = [[_without_end(tokenizer, text, max_length) for text in column] for column in some]
        encoded = tokenizer(
            *some,
            truncation="longest_first",
            max_length=max_length,
            return_token_type_ids=token_types,
            return_attention_mask=False,
        )
        for name, rows in columns.items():
            rows += [np.array(row, np.int32) for row in encoded[name]]
    return join_rows(columns, {} if labels is None else {"label": labels})


def _without_end(tokenizer: PreTrainedTokenizerFast, text: str, max_length: int) -> str:
    """Cut a long text after a word, where it has `max_length` tokens or more.

    Of two long texts, `tokenizers` would make a row of each piece of the one with each piece of the other.
    """
    if len(text) <= LONG_TEXT * max_length:
        return text
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    words = encoded.word_ids()
    place = next((one for one in range(max_length, len(words)) if words[one] != words[one - 1]), None)
    return text if place is None else text[: encoded["offset_mapping"][place - 1][1]]


@dataclass(frozen=True)
class ExampleInputs(Inputs):
    """Rows to train on, rows to evaluate on, and the lengths that they are filled up to.

    lengths: of the buckets, ascending.
    sources: what `run.json` says of where they come from; `source` in words.
    more_identities: what else makes the run this one, {name: value}.
    described: what the plan says of the examples, {title: text}.
    """

    train_rows: EncodedRows
    eval_rows: EncodedRows | None
    tokenizer: PreTrainedTokenizerFast
    tokenizer_source: str
    lengths: tuple[int, ...]
    sources: Mapping[str, Any]
    more_identities: Mapping[str, str] = field(default_factory=dict)
    described: Mapping[str, str] = field(default_factory=dict)

    fills_passes: ClassVar[bool] = True
    # Whether by default the lengths are fitted to the rows.
    fits_lengths: ClassVar[bool] = True

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """Tokens of the longest row, those it is filled up to included."""
        return self.lengths[-1]

    @property
    def num_rows(self) -> int:
        return self.train_rows.num_rows

    @property
    def num_eval_rows(self) -> int:
        return self.eval_rows.num_rows if self.eval_rows else 0

    @functools.cached_property
    def mean_length(self) -> float:  # type: ignore[override]
        """Tokens of a row to train on, on average, those it is filled up to included."""
        of_text = np.asarray(self.lengths)[buckets.bucket_of_rows(self.train_rows.lengths, self.lengths)]
        return float(np.mean(of_text)) * self.train_rows.texts_per_row

    def identities(self) -> dict[str, Any]:
        return {
            "max_length": self.max_length,
            "train_rows": self.train_rows.sha256,
            "eval_rows": self.eval_rows.sha256 if self.eval_rows else None,
            "tokenizer": tokenizer_sha256(self.tokenizer),
            **self.more_identities,
        }

    def describe(self) -> dict[str, Any]:
        parts = {"train_data": self.train_rows, "eval_data": self.eval_rows}
        return {
            name: None if rows is None else {**self.sources, "totals": {"num_rows": rows.num_rows}}
            for name, rows in parts.items()
        }

    def describe_rows(self) -> dict[str, str]:
        """Describe what was read as texts and labels, the first example, and how many rows are of which length."""
        counts = np.bincount(buckets.bucket_of_rows(self.train_rows.lengths, self.lengths), minlength=len(self.lengths))
        counted = [f"{count:,} up to {length}" for count, length in zip(counts, self.lengths, strict=True) if count]
        evaluated = self.eval_rows.num_rows if self.eval_rows else 0
        first_row = self.train_rows.of_tokens[INPUT_IDS][: self.train_rows.starts[1]]
        num_tokens = self.train_rows.starts[-1]
        rows = f"{self.num_rows:,} to train on, {evaluated:,} to evaluate on"
        return {
            **self.described,
            "first example": self.tokenizer.decode(first_row),
            "rows": self.described.get("rows", rows),
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
        """Read the rows of batches; each becomes {feature: (rows of a replica, …)}."""
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
    """Make batches {feature: (rows of a replica, …)}; features of tokens are filled up to the length of their batch.

    `ATTENTION_MASK` follows from the lengths of the rows.

    Args:
        features: that are read; those of rows of padding are their `padding`.
        prepare_row: makes each row what the task wants it to be.
    """
    import tensorflow as tf

    from train.data.pipeline import prefetched

    def with_padding(values: np.ndarray, feature: Feature) -> tf.Tensor:
        """Put a row of padding after the last."""
        values = values.astype(feature.batch_dtype)
        return tf.constant(np.concatenate([values, np.full((1, *values.shape[1:]), feature.padding, values.dtype)]))

    num_replicas = context.num_replicas_in_sync // context.num_input_pipelines
    rows = batches.rows.reshape(len(batches), context.num_input_pipelines, num_replicas, -1)
    pipeline_rows = rows[:, context.input_pipeline_id].reshape(len(batches) * num_replicas, -1)
    replica_rows = pipeline_rows.shape[1]
    of_tokens = {name: tf.constant(encoded.of_tokens[name]) for name in features if name in encoded.of_tokens}
    of_rows = {
        name: with_padding(encoded.of_rows[name], feature)
        for name, feature in features.items()
        if name in encoded.of_rows
    }
    num_texts = encoded.texts_per_row
    shape = (replica_rows, *([num_texts] if num_texts > 1 else []), None)
    # After the last row one of no tokens: padding.
    starts = tf.constant(np.append(encoded.starts, np.repeat(encoded.starts[-1], num_texts)))

    @tf.autograph.experimental.do_not_convert
    def make(rows: tf.Tensor, length: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = tf.where(rows < 0, encoded.num_rows, rows)
        texts = rows if num_texts == 1 else rows[:, tf.newaxis] * num_texts + tf.range(num_texts)
        begins, ends = tf.gather(starts, texts), tf.gather(starts, texts + 1)
        places = begins[..., tf.newaxis] + tf.cast(tf.range(length), tf.int64)  # (rows, length)
        is_token = places < ends[..., tf.newaxis]
        places = tf.where(is_token, places, 0)
        batch = {}
        for name, feature in features.items():
            if name == ATTENTION_MASK:
                batch[name] = tf.ensure_shape(tf.cast(is_token, feature.batch_dtype), shape)
            elif name in of_tokens:
                padding = tf.constant(feature.padding, feature.batch_dtype)
                values = tf.where(is_token, tf.gather(of_tokens[name], places), padding)
                batch[name] = tf.ensure_shape(values, shape)
            elif name in of_rows:
                batch[name] = tf.ensure_shape(tf.gather(of_rows[name], rows), (replica_rows, *feature.shape))
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
    """Call `step` on all rows in the batches of an evaluation, and join what it returns, also of rows of padding."""
    import tensorflow as tf

    batches = buckets.evaluation_batches(encoded.lengths, lengths, batch_rows=batch_rows)
    kept = [step(batch) for batch in batches_of_rows(encoded, batches, features, tf.distribute.InputContext())]
    return {name: np.concatenate([one[name].numpy() for one in kept]) for name in kept[0]}
