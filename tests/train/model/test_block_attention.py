"""Documents of one row: numbered by the ids, and computed as if each had its own row."""

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.arrays import assert_all_close, logits_and_gradients
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_steps import RULE, compiled_model, one_cpu
from tfrecord_prep.chunking import CHUNKINGS, Framing
from tfrecord_prep.encoding import TokenBatch
from train.layers import tpu_attention, tpu_layers
from train.layers.attention import number_documents, positions_within
from train.model.build import recompute_layers, use_tpu_layers
from train.step.proofs import prove_tpu_layers
from train.tasks.masked_lm import MaskedLanguageModeling

CLS, SEP, LENGTH = 0, 2, 24
# Of the documents in each row, framing included.
LENGTHS = [(6, 9, 5), (24,), (3, 20)]


def rows_of(lengths: list[tuple[int, ...]], pad_id: int, seed: int = 3) -> np.ndarray:
    """Make a row of each group of documents, padded; the same documents however they are grouped."""
    rows = np.full((len(lengths), LENGTH), pad_id, np.int32)
    generator = np.random.default_rng(seed)
    for row, group in zip(rows, lengths, strict=True):
        documents = [[CLS, *generator.integers(5, VOCABULARY, length - 2), SEP] for length in group]
        row[: sum(group)] = np.concatenate(documents)
    return rows


def test_documents_are_numbered_and_positions_restart():
    rows = [
        [CLS, 5, 6, SEP, CLS, 7, SEP, PAD],
        [5, SEP, CLS, 6, SEP, CLS, 7, 8],  # as `concat` cuts
        [CLS, 5, SEP, 6, SEP, SEP, PAD, PAD],  # as `full_sentences` does
        [PAD] * 8,
    ]
    documents = number_documents(tf.constant(rows), SEP, PAD)
    assert documents.numpy().tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 1, 1, 2, 2, 2], [0] * 8,
    ]  # fmt: skip
    assert positions_within(documents).numpy().tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 0, 1, 2], list(range(8)),
    ]  # fmt: skip


def test_each_document_of_a_packed_row_begins_with_cls():
    generator = np.random.default_rng(0)
    ends = np.cumsum(generator.integers(1, 9, 60))
    batch = TokenBatch(generator.integers(5, VOCABULARY, ends[-1], dtype=np.int32), ends, len(ends))
    (rows,) = CHUNKINGS["packed"]([batch], Framing(cls_id=CLS, sep_id=SEP, pad_id=PAD), LENGTH)
    documents = number_documents(tf.constant(rows.input_ids), SEP, PAD).numpy()
    assert documents.max() > 2
    np.testing.assert_array_equal(documents, np.cumsum(rows.input_ids == CLS, axis=1) - 1)


@pytest.mark.parametrize(
    ("name", "is_tpu"),
    [("roberta", False), ("modernbert", False), pytest.param("modernbert", True, marks=pytest.mark.slow)],
)
def test_packed_rows_give_what_separate_rows_give(monkeypatch, name, is_tpu):
    """Also by the TPU layers that take long rows in blocks, and by layers that are recomputed."""
    # Of a ModernBERT a global layer, and a local one whose rows are cut into blocks.
    changes = {"local_attention": 4} if name == "modernbert" else {"num_hidden_layers": 1}
    model = tiny_model(name, sep_token_id=SEP, **changes)

    def computed(lengths):
        ids = rows_of(lengths, model.config.pad_token_id)
        attended = ids != model.config.pad_token_id
        inputs = {"input_ids": tf.constant(ids), "attention_mask": tf.constant(attended, tf.int32)}
        return logits_and_gradients(model, inputs, attended, jit_compile=is_tpu)

    seen, _ = computed(LENGTHS)
    if is_tpu:
        use_tpu_layers(model)
    expected, expected_gradients = computed([(length,) for group in LENGTHS for length in group])
    model.encoder.separates_documents = True
    if is_tpu:
        for constant, value in (("LONG_ROW_TOKENS", LENGTH), ("BLOCK_QUERIES", 8), ("BLOCK_KEYS", 4)):
            monkeypatch.setattr(tpu_attention, constant, value)
    logits, gradients = computed(LENGTHS)
    assert np.abs(seen - expected).max() > 0.01
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert_all_close(gradients, expected_gradients, atol=1e-6)
    if name == "roberta":
        recompute_layers(model)
        assert_all_close(computed(LENGTHS)[1], expected_gradients, atol=1e-6)


@pytest.mark.slow
def test_the_check_of_the_layers_compares_within_documents(monkeypatch):
    attention = tpu_layers.attention
    monkeypatch.setattr(
        tpu_layers,
        "attention",
        lambda layer, states, rows, *arguments: attention(layer, states, rows._replace(documents=None), *arguments),
    )
    with one_cpu().scope():
        network = tiny_model("roberta", num_hidden_layers=1, sep_token_id=SEP, attention_probs_dropout_prob=0.2)
        network.encoder.separates_documents = True
        model = compiled_model(network, MaskedLanguageModeling(RULE, PAD), jit_compile=True)
    assert not prove_tpu_layers(model, {"input_ids": tf.constant(rows_of(LENGTHS, PAD))})
