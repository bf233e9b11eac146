"""Masked tokens and a question about pairs: exact arrays, losses by hand, and the same step however a batch is cut."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.arrays import assert_all_close, logits_of
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_steps import (
    LENGTH,
    MAX_GRAD_NORM,
    NO_DROPOUT,
    RULE,
    compiled_model,
    gradients_of,
    one_cpu,
    two_cpus,
)
from train.layers.random_bits import row_keys
from train.step.train_step import PretrainingModel
from train.tasks.masking import swapped, token_types
from train.tasks.pair_pretraining import NO_LABEL, NextSentencePrediction, SentenceOrderPrediction

CLS, SEP = 0, 2
TASKS = {"bert": NextSentencePrediction, "albert": SentenceOrderPrediction, "mobilebert": NextSentencePrediction}


def pair(first: int, second: int, seed: int = 0) -> list[int]:
    ids = (5 + np.random.default_rng(seed).permutation(VOCABULARY - 5)[: first + second]).tolist()
    row = [CLS, *ids[:first], SEP, *ids[first:], SEP]
    return row + [PAD] * (LENGTH - len(row))


def batch_of_pairs(num_rows: int = 8) -> dict[str, tf.Tensor]:
    """Make pairs of all lengths, half of them labelled 1, and at last a row of padding, as evaluations have."""
    rows = [pair(1 + n % 7, 1 + (3 * n) % 6, n) for n in range(num_rows - 1)] + [[PAD] * LENGTH]
    labels = [n % 2 for n in range(num_rows - 1)] + [NO_LABEL]
    return {"input_ids": tf.constant(rows, tf.int32), "next_sentence_label": tf.constant(labels, tf.int32)}


def build(name: str, strategy: tf.distribute.Strategy, noise_seed: int = 7, **settings: Any) -> PretrainingModel:
    with strategy.scope():
        network = tiny_model(
            name, "TFAutoModelForPreTraining", noise_seed=noise_seed, num_hidden_layers=1, **NO_DROPOUT
        )
        task = TASKS[name](RULE, PAD, SEP)
        return compiled_model(network, task, max_grad_norm=MAX_GRAD_NORM, **settings)


def inputs_of(ids: tf.Tensor) -> dict[str, tf.Tensor]:
    attended = tf.cast(ids != PAD, tf.int32)
    return {"input_ids": ids, "attention_mask": attended, "token_type_ids": token_types(ids, SEP, PAD)}


def test_token_types():
    rows = tf.constant([[CLS, 9, SEP, 9, 9, SEP, PAD], [CLS, 9, 9, 9, SEP, 9, SEP], [PAD] * 7])
    expected = [[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1], [0] * 7]
    np.testing.assert_array_equal(token_types(rows, SEP, PAD), expected)


def test_swapped_segments():
    rows = tf.constant([[CLS, 5, SEP, 6, 7, SEP, PAD], [CLS, 5, 6, 7, SEP, 8, SEP]])
    expected = [[CLS, 6, 7, SEP, 5, SEP, PAD], [CLS, 8, SEP, 5, 6, 7, SEP]]
    np.testing.assert_array_equal(swapped(rows, SEP), expected)
    many = batch_of_pairs(60)["input_ids"][:-1]
    np.testing.assert_array_equal(swapped(swapped(many, SEP), SEP), many)


def test_only_neighbours_have_an_order_and_half_are_swapped():
    task = SentenceOrderPrediction(RULE, PAD, SEP)
    batch = batch_of_pairs(2000)
    ids, labels, counts = task.ask(batch, row_keys((3,), 2000))
    np.testing.assert_array_equal(counts, batch["next_sentence_label"] == 0)
    was_swapped = (ids.numpy() != batch["input_ids"].numpy()).any(axis=1)
    np.testing.assert_array_equal(was_swapped, (labels.numpy() == 1) & counts.numpy())
    np.testing.assert_array_equal(ids[was_swapped], swapped(batch["input_ids"], SEP)[was_swapped])
    assert abs(labels.numpy()[counts].mean() - 0.5) < 0.05
    # By the key of its row alone.
    np.testing.assert_array_equal(task.ask(batch, row_keys((3,), 2000))[0], ids)
    part = {name: feature[700:] for name, feature in batch.items()}
    np.testing.assert_array_equal(task.ask(part, row_keys((3,), 1300, 700))[0], ids[700:])


@pytest.mark.parametrize("task_class", [NextSentencePrediction, SentenceOrderPrediction])
def test_a_row_of_an_evaluation_is_always_the_same(task_class):
    task, batch = task_class(RULE, PAD, SEP), batch_of_pairs(200)
    rows = tf.data.Dataset.from_tensor_slices(batch).map(task.prepare_row)
    whole, again = rows.batch(200).get_single_element(), rows.batch(200).get_single_element()
    tf.nest.map_structure(np.testing.assert_array_equal, whole, again)
    is_asked = whole.weights.numpy() > 0
    labels = batch["next_sentence_label"].numpy()
    np.testing.assert_array_equal(is_asked, labels == 0 if task_class is SentenceOrderPrediction else labels >= 0)
    assert 0.3 < whole.labels.numpy()[is_asked].mean() < 0.7
    assert whole.masked.is_masked.numpy().any()


@pytest.mark.parametrize("name", TASKS)
def test_losses_are_those_of_the_whole_heads(name):
    """By hand, from the logits at all tokens; both means together are the loss that is minimised."""
    model = build(name, one_cpu())
    rows = model.task.apply_global_weights(model.prepare_batch(batch_of_pairs(), 0), lambda total: total)
    sums = {key: float(value) for key, value in model.task.sums(model.network, rows, training=False).items()}
    masked, is_masked = rows.masked, rows.masked.is_masked.numpy()
    outputs = logits_of(model.network(inputs_of(masked.input_ids)))
    logits, pair_logits = (tf.nn.log_softmax(head_logits).numpy() for head_logits in outputs)
    mlm = -np.take_along_axis(logits, masked.original_ids.numpy()[..., None], -1)[..., 0][is_masked]
    is_asked = rows.weights.numpy() > 0
    pairs = -np.take_along_axis(pair_logits, np.maximum(rows.labels.numpy(), 0)[:, None], -1)[:, 0][is_asked]
    assert is_asked.sum() == (4 if name == "albert" else 7)
    assert (sums["num_masked"], sums["num_pairs"]) == (is_masked.sum(), is_asked.sum())
    assert sums["mlm_loss"] == pytest.approx(mlm.sum(), rel=1e-4)
    assert sums["pair_loss"] == pytest.approx(pairs.sum(), rel=1e-4)
    assert sums["loss"] / sums["num_masked"] == pytest.approx(mlm.mean() + pairs.mean(), rel=1e-4)
    right = (pair_logits.argmax(-1) == rows.labels.numpy())[is_asked]
    assert sums["num_right_pairs"] == right.sum()
    # An evaluation adds up over batches before it divides.
    figures = model.task.figures({key: np.float64(2 * value) for key, value in sums.items()})
    pair_name = model.task.pair_name
    assert figures["loss"] == pytest.approx(mlm.mean() + pairs.mean(), rel=1e-4)
    assert figures["perplexity"] == pytest.approx(np.exp(mlm.mean()), rel=1e-4)
    assert figures[f"{pair_name}_accuracy"] == pytest.approx(right.mean())
    assert figures["num_pairs"] == 2 * is_asked.sum()
    assert model.task.describe(figures)[f"{pair_name} accuracy"].endswith(f" of {2 * is_asked.sum()} pairs")


def test_replicas_and_micro_batches_give_the_same_gradient():
    model, other = build("bert", one_cpu()), build("bert", two_cpus(), num_micro_batches=2)
    gradients = gradients_of(model, batch_of_pairs(32))
    assert np.linalg.norm(gradients) > 0.1
    np.testing.assert_allclose(gradients_of(other, batch_of_pairs(32)), gradients, atol=2e-6)
    nothing = {"input_ids": tf.fill((32, LENGTH), PAD), "next_sentence_label": tf.fill((32,), NO_LABEL)}
    assert not gradients_of(model, nothing).any()


def test_the_gradient_is_that_of_both_means():
    model = build("bert", one_cpu())
    rows = model.prepare_batch(batch_of_pairs(), 0)
    weighed = model.task.apply_global_weights(rows, lambda total: total)
    gradients, sums = model._gradients(weighed, row_keys((3,), 8))
    with tf.GradientTape() as tape:
        apart = model.task.sums(model.network, rows, training=True)
        loss = apart["mlm_loss"] / apart["num_masked"] + apart["pair_loss"] / apart["num_pairs"]
    expected = map(tf.convert_to_tensor, tape.gradient(loss, model.network.trainable_variables))
    assert_all_close((gradient / sums["num_masked"] for gradient in gradients), expected, atol=1e-5)
