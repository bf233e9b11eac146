"""Rows as tf.data: filled up to their bucket, shared out over hosts and replicas, each made by the task."""

import random

import numpy as np
import pytest
import tensorflow as tf

from finetuning.data.buckets import Batches
from finetuning.data.inputs import EncodedRows, batches_of_rows, encode_texts
from tests.fixtures.tiny_corpus import wrapped
from tests.fixtures.tiny_tokenizers import marks_every_space, wordpiece
from train.data.inputs import Feature

ROWS = EncodedRows(
    np.array([0, 2, 5, 6]),
    {"input_ids": np.array([10, 11, 20, 21, 22, 30], np.int32)},
    {"label": np.array([1, 0, 1], np.int32), "index": np.arange(3, dtype=np.int32)},
)
FEATURES = {
    "input_ids": Feature((None,), padding=1),  # type: ignore[arg-type]
    "label": Feature(),
    "index": Feature(padding=-1),
}
BATCHES = Batches(np.array([[2, 0, -1, -1], [1, 2, 0, -1]], np.int32), np.array([2, 4], np.int32))


def test_rows_are_filled_up():
    first, second = batches_of_rows(ROWS, BATCHES, FEATURES, tf.distribute.InputContext()).as_numpy_iterator()
    assert first["input_ids"].tolist() == [[30, 1], [10, 11], [1, 1], [1, 1]]
    assert second["input_ids"].tolist() == [[20, 21, 22, 1], [30, 1, 1, 1], [10, 11, 1, 1], [1, 1, 1, 1]]
    assert second["index"].tolist() == [1, 2, 0, -1]
    assert second["label"].tolist() == [0, 1, 1, 0]
    assert first["input_ids"].dtype == np.int32


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_replicas_share_a_batch(num_hosts):
    """Host after host, replica after replica, the rows of the global batches are all there."""
    hosts = []
    for host in range(num_hosts):
        context = tf.distribute.InputContext(num_hosts, host, num_replicas_in_sync=2)
        hosts.append(list(batches_of_rows(ROWS, BATCHES, FEATURES, context).as_numpy_iterator()))
    for step in range(2):
        of_step = [batch for host in hosts for batch in host[step * len(host) // 2 : (step + 1) * len(host) // 2]]
        assert len(of_step) == 2
        assert np.concatenate([batch["index"] for batch in of_step]).tolist() == BATCHES.rows[step].tolist()


def test_the_mask_follows_from_the_length_of_a_row():
    """Not from the ids: a text may hold the padding token."""
    rows = EncodedRows(ROWS.starts, {"input_ids": np.array([10, 1, 20, 1, 22, 1], np.int32)}, ROWS.row_values)
    features = {**FEATURES, "attention_mask": Feature((None,))}  # type: ignore[arg-type]
    first, second = batches_of_rows(rows, BATCHES, features, tf.distribute.InputContext()).as_numpy_iterator()
    assert first["attention_mask"].tolist() == [[1, 0], [1, 1], [0, 0], [0, 0]]
    assert second["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert second["attention_mask"].dtype == np.int32


def test_a_row_may_have_several_texts():
    """All are filled up to one length; in rows of padding all are empty."""
    rows = EncodedRows(
        np.array([0, 2, 3, 5, 6]),
        {"input_ids": np.array([10, 11, 12, 20, 21, 22], np.int32)},
        {"label": np.array([1, 0], np.int32), "index": np.arange(2, dtype=np.int32)},
        texts_per_row=2,
    )
    assert (rows.num_rows, rows.lengths.tolist()) == (2, [2, 2])
    features = {**FEATURES, "attention_mask": Feature((2, None))}  # type: ignore[arg-type]
    batches, padded = Batches(np.array([[1, -1, 0, -1]], np.int32), np.array([3], np.int32)), []
    for host in range(2):
        context = tf.distribute.InputContext(2, host, num_replicas_in_sync=2)
        padded += list(batches_of_rows(rows, batches, features, context).as_numpy_iterator())
    ids, masks = (np.concatenate([batch[name] for batch in padded]) for name in ("input_ids", "attention_mask"))
    padding = [[1, 1, 1], [1, 1, 1]]
    assert ids.tolist() == [[[20, 21, 1], [22, 1, 1]], padding, [[10, 11, 1], [12, 1, 1]], padding]
    none = [[0, 0, 0], [0, 0, 0]]
    assert masks.tolist() == [[[1, 1, 0], [1, 0, 0]], none, [[1, 1, 0], [1, 0, 0]], none]
    assert np.concatenate([batch["index"] for batch in padded]).tolist() == [1, -1, 0, -1]


def test_a_task_makes_its_rows():
    def prepare(row: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        return row["input_ids"] + 1, row["index"] * 2

    first, _ = batches_of_rows(ROWS, BATCHES, FEATURES, tf.distribute.InputContext(), prepare).as_numpy_iterator()
    assert first[0].tolist() == [[31, 2], [11, 12], [2, 2], [2, 2]]
    assert first[1].tolist() == [4, 0, -2, -2]


def test_no_thread_tunes_the_input():
    """It can miss the end of its iterator, which then waits for it, up to a minute, when a run is stopped."""
    batches = batches_of_rows(ROWS, BATCHES, FEATURES, tf.distribute.InputContext())
    assert batches.options().autotune.enabled is False


class Watched:
    """A tokenizer, and the lengths of the pairs of texts that it was given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.pairs = tokenizer, []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, first, *second, **options):
        self.pairs += [tuple(map(len, pair)) for texts in second for pair in zip(first, texts, strict=True)]
        return self._tokenizer(first, *second, **options)


@pytest.mark.parametrize("make", [wordpiece, marks_every_space])
def test_long_pairs_are_cut_to_the_same_tokens_before_they_are_encoded(make):
    """Of two texts of 60,000 tokens, `tokenizers` would make millions of rows: one for each two of their pieces."""
    draw, max_length = random.Random(0), 8
    words = ["the", "models", "of", "Texts,", "naïve", "語言", "e\u0301té", "a  b", "\n", "x" * 300, "3.14"]
    columns = [[" ".join(draw.choices(words, k=number)) for number in (1, 40, 300, 300)] for _ in range(2)]
    tokenizer = wrapped(make())
    expected = tokenizer(*columns, truncation="longest_first", max_length=max_length)["input_ids"]
    watched = Watched(tokenizer)
    rows = encode_texts(watched, columns, max_length=max_length, token_types=False)
    assert [ids.tolist() for ids in np.split(rows.token_values["input_ids"], rows.starts[1:-1])] == expected
    assert max(map(max, watched.pairs)) < 1_000 < max(map(len, columns[0]))
