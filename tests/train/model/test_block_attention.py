"""Documents of one row: numbered by the ids, and computed as if each had its own row."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.arrays import assert_all_close, logits_and_gradients
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_steps import RULE, compiled_model, one_cpu, train, two_cpus, weights
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
# The same layers, in other code of transformers.
NAMES = ("roberta", "bert", "camembert", "electra", "roberta-prelayernorm", "xlm-roberta")


def rows_of(lengths: list[tuple[int, ...]], pad_id: int, seed: int = 3) -> np.ndarray:
    """Make a row of each group of documents, padded; the same documents however they are grouped."""
    rows = np.full((len(lengths), LENGTH), pad_id, np.int32)
    generator = np.random.default_rng(seed)
    for row, group in zip(rows, lengths, strict=True):
        documents = [[CLS, *generator.integers(5, VOCABULARY, length - 2), SEP] for length in group]
        row[: sum(group)] = np.concatenate(documents)
    return rows


def documents_model(name: str, **changes: Any) -> Any:
    model = tiny_model(name, num_hidden_layers=1, sep_token_id=SEP, **changes)
    model.encoder.separates_documents = True
    return model


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
    ("name", "is_tpu", "is_long"),
    [
        ("roberta", False, False),
        *(pytest.param(name, False, False, marks=pytest.mark.slow) for name in NAMES[1:]),
        ("modernbert", False, False),
        *(pytest.param(name, True, False, marks=pytest.mark.slow) for name in ("roberta", "modernbert")),
        pytest.param("modernbert", True, True, marks=pytest.mark.slow),
    ],
)
def test_packed_rows_give_what_separate_rows_give(monkeypatch, name, is_tpu, is_long):
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
    if is_long:
        for constant, value in (("LONG_ROW_TOKENS", LENGTH), ("BLOCK_QUERIES", 8), ("BLOCK_KEYS", 4)):
            monkeypatch.setattr(tpu_attention, constant, value)
    logits, gradients = computed(LENGTHS)
    assert np.abs(seen - expected).max() > 0.01
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert_all_close(gradients, expected_gradients, atol=1e-6)


def pretraining_model(strategy, num_micro_batches=1, jit_compile=False, **changes):
    with strategy.scope():
        network = documents_model("roberta", **changes)
        if num_micro_batches > 1:
            recompute_layers(network)
        task = MaskedLanguageModeling(RULE, PAD)
        return compiled_model(network, task, num_micro_batches=num_micro_batches, jit_compile=jit_compile)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
def test_the_check_of_the_layers_compares_within_documents(forgets, monkeypatch):
    if forgets:
        attention = tpu_layers.attention
        monkeypatch.setattr(
            tpu_layers,
            "attention",
            lambda layer, states, rows, *more: attention(layer, states, rows._replace(documents=None), *more),
        )
    model = pretraining_model(one_cpu(), jit_compile=True, attention_probs_dropout_prob=0.2)
    batch = {"input_ids": tf.constant(rows_of(LENGTHS, PAD))}
    assert prove_tpu_layers(model, batch) is not forgets


@pytest.mark.slow
def test_replicas_and_accumulation_give_the_same_steps():
    rows = rows_of([(6, 9, 5), (24,), (3, 20), (8, 8, 8), (5, 4), (12, 12), (4, 4, 4, 4), (21, 3)], PAD)
    expected, model = pretraining_model(one_cpu()), pretraining_model(two_cpus(), num_micro_batches=2)
    figures = [train(one, rows, num_steps=2) for one in (expected, model)]
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)
    np.testing.assert_allclose(weights(model), weights(expected), atol=2e-5)


def test_an_evaluation_is_that_of_separate_rows():
    """Masks would be others, so there are none: what is predicted stands at the same places of the documents."""
    model = pretraining_model(one_cpu(), hidden_dropout_prob=0.0)
    sums = []
    for lengths in (LENGTHS, [(length,) for group in LENGTHS for length in group]):
        ids = tf.constant(rows_of(lengths, PAD))
        rows = model.prepare_batch({"input_ids": ids}, 0)._replace(input_ids=ids, is_masked=ids % 5 == 0)
        sums.append(model.evaluation_step(rows))
    assert float(sums[0]["num_masked"]) > 8
    for name, value in sums[0].items():
        np.testing.assert_allclose(value, sums[1][name], rtol=1e-6)
