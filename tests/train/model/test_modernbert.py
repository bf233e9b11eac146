"""ModernBERT's own parts; what holds for every architecture is tested with the others."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.arrays import logits_and_gradients
from tests.fixtures.tiny_models import VOCABULARY, tiny_config, tiny_model
from train.layers import reference_layers
from train.layers.attention import can_use_blocks, in_blocks, is_near, with_halo
from train.layers.reference_layers import rotary_tables, rotated
from train.model.build import new_network, use_tpu_layers


def padded_rows(length):
    """Make rows of that length, one whole, two padded: inputs and, as array, which tokens are real."""
    attended = np.arange(length) < np.array([[length], [length // 2 + 1], [3]])
    ids = np.random.default_rng(3).integers(5, VOCABULARY, attended.shape)
    ids = np.where(attended, ids, 1).astype(np.int32)
    return {"input_ids": ids, "attention_mask": attended.astype(np.int32)}, attended


def assert_same(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    for gradient, expected_gradient in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5 * np.abs(expected_gradient).max())


def test_blocks_of_a_local_layer_equal_masked_scores(monkeypatch):
    model, length = tiny_model("modernbert"), 43
    inputs, attended = padded_rows(length)
    assert can_use_blocks(length, model.encoder.layer[1].attention.reach)
    with_blocks = logits_and_gradients(model, inputs, attended)
    monkeypatch.setattr(reference_layers, "can_use_blocks", lambda *_: False)
    assert_same(with_blocks, logits_and_gradients(model, inputs, attended))


@pytest.mark.slow
def test_tpu_layers_equal_the_reference_layers():
    model, batch = tiny_model("modernbert without biases"), padded_rows(43)
    expected = logits_and_gradients(model, *batch)
    use_tpu_layers(model)
    assert_same(logits_and_gradients(model, *batch, jit_compile=True), expected)


def test_only_tokens_within_reach_change_the_result():
    # One local layer between a global one without keys' weights and the head.
    model = tiny_model("modernbert", local_attention=8)
    kernel = model.encoder.layer[0].attention_output.kernel
    kernel.assign(tf.zeros_like(kernel))
    inputs, _ = padded_rows(40)
    ids = inputs["input_ids"][:1]

    def logits(changed):
        other = ids.copy()
        other[0, changed] = (other[0, changed] + 1) % VOCABULARY
        return model({"input_ids": other}).logits.numpy()[0]

    before = model({"input_ids": ids}).logits.numpy()[0]
    differs = np.abs(logits(20) - before).max(axis=-1) > 1e-6
    assert np.flatnonzero(differs).tolist() == list(range(16, 25))


@pytest.mark.parametrize("local_attention", [1, 2])
def test_tokens_that_see_few_others(local_attention):
    """With `local_attention` 1 a token sees itself alone in local layers."""
    model = tiny_model("modernbert", local_attention=local_attention)
    inputs, _ = padded_rows(40)
    assert np.isfinite(model(inputs).logits.numpy()).all()
    assert not can_use_blocks(40, 0)
    assert can_use_blocks(40, 1)


@given(st.integers(1, 5), st.integers(1, 60))
@settings(max_examples=30)
def test_every_key_in_reach_is_in_the_blocks_of_its_query_once(reach, length):
    positions = tf.range(1, length + 1)[tf.newaxis]
    queries, keys = in_blocks(positions, reach).numpy()[0], with_halo(positions, reach).numpy()[0]
    near = is_near(queries.shape[1], keys.shape[1], reach)
    seen = {
        int(query): sorted(keys[block][near[at]][keys[block][near[at]] > 0].tolist())
        for block, row in enumerate(queries)
        for at, query in enumerate(row)
        if query
    }
    assert seen == {
        query: list(range(max(1, query - reach), min(length, query + reach) + 1)) for query in range(1, length + 1)
    }


def test_rotations_depend_on_the_distance_alone():
    states = tf.random.stateless_normal((2, 1, 1, 16), (1, 2))
    rows = rotated(tf.repeat(states, 50, axis=1), 10_000.0)
    scores = tf.einsum("qnh,knh->qk", rows[0], rows[1]).numpy()
    for distance in (-7, 0, 20):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert abs(scores[0, 1] - scores[0, 0]) > 0.01


def test_angles_are_exact_at_the_last_of_8192_positions():
    cosines, sines = rotary_tables(8192, 64, 160_000.0)
    angle = 8191 / 160_000 ** (2 / 64)
    assert (cosines[8191, 1], sines[8191, 1]) == pytest.approx((np.cos(angle), np.sin(angle)), abs=1e-7)


def test_residual_weights_start_smaller_by_the_depth():
    config = tiny_config("modernbert", hidden_size=96, num_hidden_layers=8, initializer_range=0.05)
    layer = new_network("TFAutoModelForMaskedLM", config).encoder.layer[3]
    # A normal distribution cut at two deviations has 0.88 of them.
    for dense, deviation in zip(
        (*layer.projections, layer.expansion, layer.attention_output, layer.contraction),
        (1, 1, 0.25, 0.25),
        strict=True,
    ):
        assert np.std(dense.kernel.numpy()) == pytest.approx(0.88 * 0.05 * deviation, rel=0.05)
