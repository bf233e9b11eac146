"""Replaced-token detection, the recipe: exact draws, the loss beside NumPy, gradients, and what is exported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from tests.fixtures.arrays import assert_all_equal
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_steps import (
    NO_DROPOUT,
    RULE,
    batch_of,
    compiled_model,
    gradients_of,
    one_cpu,
    token_rows,
    two_cpus,
)
from train.layers.random_bits import draw_bits, row_keys
from train.model.architectures import cut_vocabulary
from train.model.build import hidden_matrices
from train.publishing.pytorch_format import num_parameters, pytorch_weights, take_snapshot
from train.step.train_step import PretrainingModel
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.masking import MaskedRows, collect_predictions, fill_in
from train.tasks.task import PretrainingTask, load_class

RECIPE = Path(__file__).parents[3] / "recipes" / "replaced_tokens.py"
CLASSES = ("ReplacedTokens", "GradientDisentangled")
TABLE = "electra.embeddings.word_embeddings.weight"


def build(class_name: str = "ReplacedTokens", strategy: Any = None, **options: Any) -> PretrainingModel:
    kind: Any = load_class(f"{RECIPE}:{class_name}", PretrainingTask)  # type: ignore[type-abstract]
    with (strategy or one_cpu()).scope():
        network = tiny_model("electra", kind.model_class, num_hidden_layers=1, **NO_DROPOUT)
        return compiled_model(network, kind(MaskedLanguageModeling(RULE, PAD)), **options)


def weighed_rows(model: PretrainingModel, seed: int = 0) -> Any:
    rows = model.prepare_batch(batch_of(token_rows(seed=seed)), 0)
    return model.task.apply_global_weights(rows, lambda total: total)


def masked_rows(ids: Any, is_masked: Any) -> MaskedRows:
    ids = tf.constant(ids, tf.int32)
    return MaskedRows(ids, ids, tf.constant(is_masked))


def test_tokens_are_filled_in_as_the_probabilities_say():
    rows = masked_rows([[7, 8, 9], [5, 6, 7]], [[True, False, True], [False, True, False]])
    sure = 50 * tf.one_hot([2, 0, 3], 5)
    draws = tf.constant([[0, 0, 2**32 - 1], [0, 2**31, 0]], tf.uint32)
    np.testing.assert_array_equal(fill_in(rows, sure, draws), [[2, 8, 0], [5, 3, 7]])
    # Of four alike, each has a quarter of the draws.
    even = tf.math.log([[0.25, 0.25, 0.25, 0.25, 1e-30]] * 3)
    for quarter in range(4):
        for draw in (quarter * 2**30 + 2**14, (quarter + 1) * 2**30 - 2**14):
            filled = fill_in(rows, even, tf.fill((2, 3), tf.constant(draw, tf.uint32)))
            np.testing.assert_array_equal(filled, [[quarter, 8, quarter], [5, quarter, 7]])


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 6))
def test_what_is_not_masked_stays(seed, num_masked, num_slots):
    generator = np.random.default_rng(seed)
    ids = generator.integers(5, 40, (2, 3))
    is_masked = generator.permutation(np.arange(6) < num_masked).reshape(2, 3)
    rows = masked_rows(ids, is_masked)
    draws = draw_bits(row_keys((seed,), 2), (3,))
    logits = tf.constant(generator.normal(0, 30, (num_slots, 3)), tf.float32)
    filled = fill_in(rows, logits, draws).numpy()
    is_filled = is_masked & (np.cumsum(is_masked).reshape(2, 3) <= num_slots)
    assert (filled[is_filled] < 3).all()
    np.testing.assert_array_equal(filled[~is_filled], ids[~is_filled])


def test_frequencies_are_the_probabilities():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    rows = masked_rows(np.full((1, 4000), 9), np.full((1, 4000), True))
    logits = tf.math.log(tf.constant([probabilities] * 4000, tf.float32))
    filled = fill_in(rows, logits, draw_bits(row_keys((7,), 1), (4000,)))
    counts = np.bincount(filled.numpy()[0], minlength=4)
    deviations = np.sqrt(4000 * probabilities * (1 - probabilities))
    assert (np.abs(counts - 4000 * probabilities) < 4 * deviations).all()


@pytest.mark.parametrize("class_name", CLASSES)
def test_the_loss_is_that_of_the_paper(class_name):
    """In NumPy, from the logits of both networks, apart and at all tokens."""
    model = build(class_name)
    for variable in model.network.weights:  # a delta that is not 0
        if "/delta/" in variable.name:
            variable.assign(tf.random.stateless_normal(variable.shape, (1, 2)))
    rows = weighed_rows(model)
    sums = {name: float(total) for name, total in model.task.sums(model.network, rows, training=True).items()}
    original, is_masked = rows.masked.original_ids.numpy(), rows.masked.is_masked.numpy()
    attended = (original != PAD).astype(np.int32)
    generator = model.network.training_only
    logits = generator({"input_ids": rows.masked.input_ids, "attention_mask": attended}).logits.numpy()
    of_label = np.take_along_axis(log_softmax(logits, -1), original[..., None], -1)[..., 0]
    expected_generator = -of_label[is_masked].mean()

    slots = collect_predictions(rows.masked, RULE.num_prediction_slots(original.size)).positions
    filled = fill_in(rows.masked, tf.gather(logits.reshape(-1, VOCABULARY), slots), rows.draws).numpy()
    assert (filled != original).any()
    exported = pytorch_weights(model.network)
    discriminator = tiny_model("electra", "TFAutoModelForPreTraining", num_hidden_layers=1, **NO_DROPOUT)
    for weight, ours in zip(discriminator.weights, model.network.weights, strict=False):
        weight.assign(exported[TABLE] if "word_embeddings" in weight.name else ours)
    scores = discriminator({"input_ids": filled, "attention_mask": attended}).logits.numpy()
    is_replaced = filled != original
    losses = np.log1p(np.exp(-np.where(is_replaced, scores, -scores)))[attended > 0]
    assert sums["generator_loss"] / sums["num_masked"] == pytest.approx(expected_generator, rel=1e-5)
    assert sums["discriminator_loss"] / sums["num_tokens"] == pytest.approx(losses.mean(), rel=1e-5)
    assert sums["loss"] / sums["num_masked"] == pytest.approx(expected_generator + 50 * losses.mean(), rel=1e-5)
    assert sums["num_right"] == ((scores > 0) == is_replaced)[attended > 0].sum()
    figures = model.task.figures({name: np.float64(2 * total) for name, total in sums.items()})
    assert figures["loss"] == pytest.approx(expected_generator + 50 * losses.mean(), rel=1e-5)


def gradients_by_name(model: PretrainingModel, rows: Any, name: str) -> dict[str, np.ndarray]:
    variables = model.network.trainable_variables
    with tf.GradientTape() as tape:
        loss = model.task.sums(model.network, rows, training=True)[name]
    gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
    return {
        variable.name: tf.convert_to_tensor(grad).numpy() for variable, grad in zip(variables, gradients, strict=True)
    }


@pytest.mark.parametrize("class_name", CLASSES)
def test_which_loss_moves_which_weights(class_name):
    model = build(class_name)
    rows = weighed_rows(model)
    of_generator, of_discriminator = (
        gradients_by_name(model, rows, name) for name in ("generator_loss", "discriminator_loss")
    )
    for name in of_generator:
        is_shared, is_table = "/electra/embeddings/" in name, "word_embeddings" in name
        if "/training_only/" in name:
            assert not of_discriminator[name].any()
        elif "/delta/" in name or not is_shared:
            assert of_discriminator[name].any()
            assert not of_generator[name].any()
        else:
            assert of_generator[name].any()
            assert of_discriminator[name].any() == (class_name == "ReplacedTokens" or not is_table)


def test_replicas_and_micro_batches_give_the_same_gradient():
    model, other = build(), build(strategy=two_cpus(), num_micro_batches=2)
    gradients = gradients_of(model, batch_of(token_rows()))
    assert np.linalg.norm(gradients) > 0.1
    np.testing.assert_allclose(gradients_of(other, batch_of(token_rows())), gradients, rtol=1e-5, atol=1e-5)


def test_an_evaluation_fills_in_by_the_content_of_a_row():
    task = build().task
    row = {"input_ids": tf.constant(token_rows()[0])}
    first, again = task.prepare_row(row), task.prepare_row(row)
    assert_all_equal(tf.nest.flatten(first), tf.nest.flatten(again))
    assert first.draws.shape == row["input_ids"].shape


def test_the_export_has_the_discriminator_with_its_delta():
    model = build("GradientDisentangled")
    (delta,) = (weight for weight in model.network.weights if "/delta/" in weight.name)
    delta.assign(tf.ones_like(delta))
    snapshot = take_snapshot(model.network)
    # Its name counts the networks of the process.
    before = snapshot.arrays[model.network.electra.embeddings.weight.name].copy()
    exported, num_ids = pytorch_weights(snapshot, 190), 190
    np.testing.assert_array_equal(exported[TABLE], cut_vocabulary(before, 0, num_ids) + 1)
    assert all(name.startswith(("electra.", "discriminator_predictions.")) for name in exported)
    assert num_parameters(snapshot, num_ids) == sum(array.size for array in exported.values())
    # A second export is of the same weights.
    np.testing.assert_array_equal(pytorch_weights(snapshot, num_ids)[TABLE], exported[TABLE])


def test_muon_updates_the_matrices_of_both_networks():
    network = build().network
    matrices = {
        id(variable): variable.name
        for variable, count in zip(network.trainable_variables, hidden_matrices(network), strict=True)
        if count
    }
    of_generator = [variable for variable in network.training_only.trainable_variables if id(variable) in matrices]
    assert (len(matrices), len(of_generator)) == (14, 7)  # with the dense layer of each head
    assert not any("embeddings" in name for name in matrices.values())
