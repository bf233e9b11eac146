"""The network as it is built: sinusoidal positions, a padded vocabulary, activations that are recomputed."""

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.fixtures.arrays import assert_all_close
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import (
    PAD,
    VOCABULARY,
    each_architecture,
    one_layer_model,
    padded_batch,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from tests.fixtures.tiny_steps import NO_DROPOUT, RULE, batch_of, compiled_model, token_rows, train
from train.layers.random_bits import dropping_out_by, key_dropout, key_of, row_keys
from train.model.architectures import ARCHITECTURES, learns_positions, vocabulary_axis
from train.model.build import (
    build_network,
    encoder_layers,
    recompute_layers,
    sinusoids,
    start_positions_as_sinusoids,
)
from train.model.config import padded_vocabulary_size
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.step.train_step import PretrainingModel
from train.tasks.masked_lm import MaskedLanguageModeling


def position_table(model):
    (table,) = (variable for variable in model.trainable_variables if "position_embeddings" in variable.name)
    return table


def test_sinusoids_are_pinned_and_their_products_depend_on_distance():
    expected = [[0, 0, 1, 1], [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)]]
    np.testing.assert_allclose(sinusoids(2, 4), expected, rtol=1e-6)
    assert sinusoids(3, 5).shape == (3, 5)
    products = sinusoids(50, 64) @ sinusoids(50, 64).T
    for distance in (0, 1, 7):
        diagonal = np.diag(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)


@pytest.mark.parametrize("name", ["roberta", "electra"])
def test_only_the_position_table_changes_and_keeps_its_size(name):
    model, untouched = one_layer_model(name), one_layer_model(name)
    start_positions_as_sinusoids(model)
    table, before = position_table(model).numpy(), position_table(untouched).numpy()
    direction = sinusoids(*table.shape)
    scale = table[3, 0] / direction[3, 0]
    np.testing.assert_allclose(table, direction * scale, rtol=1e-4, atol=1e-6)
    assert np.sqrt((table**2).mean()) == pytest.approx(np.sqrt((before**2).mean()), rel=0.1)
    for variable, other in zip(model.trainable_variables, untouched.trainable_variables, strict=True):
        if "position_embeddings" not in variable.name:
            np.testing.assert_array_equal(variable.numpy(), other.numpy())


PADDED = 256


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_the_size_is_the_next_multiple(vocabulary_size, multiple):
    size = padded_vocabulary_size(vocabulary_size, multiple)
    assert size % multiple == 0
    assert vocabulary_size <= size < vocabulary_size + multiple


@pytest.mark.parametrize("name", each_architecture("deberta-v2 as v3"))
def test_a_padded_model_is_exported_without_its_padding(name, tmp_path):
    """And it has one table of positions, if it learns them."""
    model = one_layer_model(name, vocab_size=PADDED)
    positions = [variable for variable in model.weights if "position_embeddings" in variable.name]
    assert len(positions) == learns_positions(model.config)
    with_ids = [variable for variable in model.weights if PADDED in variable.shape]
    assert [vocabulary_axis(variable.name, model.config.model_type) for variable in with_ids] == [
        variable.shape.as_list().index(PADDED) for variable in with_ids
    ]
    export_model(model, tiny_tokenizer(), str(tmp_path), model_max_length=30, vocabulary_size=VOCABULARY)
    assert read_json(tmp_path / "config.json")["vocab_size"] == VOCABULARY
    assert not any(PADDED in array.shape for array in load_file(tmp_path / "model.safetensors").values())
    assert model.config.vocab_size == PADDED
    inputs, _ = padded_batch(model)
    logits = model(inputs).logits[..., :VOCABULARY]
    np.testing.assert_allclose(load_model(str(tmp_path))(inputs).logits, logits, atol=1e-6)


def test_fresh_weights_are_those_without_padding_and_0():
    def fresh(size):
        config = tiny_config("roberta", vocab_size=size)
        return build_network(config, vocabulary_size=VOCABULARY, seed=5, sinusoidal_positions=True).weights

    for plain, padded in zip(fresh(VOCABULARY), fresh(PADDED), strict=True):
        if plain.shape == padded.shape:
            np.testing.assert_array_equal(padded, plain)
        else:
            np.testing.assert_array_equal(padded[:VOCABULARY], plain)
            np.testing.assert_array_equal(padded[VOCABULARY:], 0)


def pretraining_model(vocabulary_size: int) -> PretrainingModel:
    with tf.distribute.OneDeviceStrategy("/device:CPU:0").scope():
        plain, masked_lm = (
            tiny_model("roberta", num_hidden_layers=1, vocab_size=size, **NO_DROPOUT)
            for size in (VOCABULARY, vocabulary_size)
        )
        for variable, source in zip(masked_lm.weights, plain.weights, strict=True):
            spare = [(0, size - own) for size, own in zip(variable.shape, source.shape, strict=True)]
            # Were the padding not left out, its 9 would make it the likeliest.
            variable.assign(np.pad(source.numpy(), spare, constant_values=9.0 if variable.shape.rank == 1 else 0.0))
        return compiled_model(masked_lm, MaskedLanguageModeling(RULE, PAD))


@pytest.mark.usefixtures("eagerly")
def test_steps_are_those_without_padding():
    rows, models = token_rows(), (pretraining_model(VOCABULARY), pretraining_model(PADDED))
    figures = [train(model, rows, num_steps=2) for model in models]
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
    for plain, padded in zip(*(model.network.weights for model in models), strict=True):
        cut = padded[tuple(slice(size) for size in plain.shape)]
        np.testing.assert_allclose(cut, plain, atol=1e-5)
    inputs = batch_of(rows) | {"attention_mask": (rows != PAD).astype(np.int32)}
    logits = [model.network(inputs).logits[..., :VOCABULARY] for model in models]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def dropping_model(name: str, rate: float) -> Any:
    model = one_layer_model(name, **dict.fromkeys(ARCHITECTURES[name].dropouts, rate))
    key_dropout(model)
    return model


def gradients(model: Any) -> list[tf.Tensor]:
    inputs, _ = padded_batch(model)
    with dropping_out_by(row_keys((5, 6), 3), key_of((5, 6))):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.log_softmax(model(inputs, training=True).logits)[..., 7])
        weight_gradients = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
    return [tf.convert_to_tensor(gradient) for gradient in weight_gradients]


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_gradients_stay_the_same_with_what_was_dropped(name):
    model = dropping_model(name, 0.3)
    expected = gradients(model)
    num_calls = []
    for layer in encoder_layers(model):
        *_, part = (part for part in layer.submodules if isinstance(part, tf_keras.layers.Dense))
        part.call = counted(part.call, num_calls)
    recompute_layers(model)
    assert_all_close(gradients(model), expected, atol=1e-6)
    assert len(num_calls) == 2  # once forward and once again


def counted(call: Any, calls: list[int]) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(*args, **kwargs)

    return count


@pytest.mark.slow
def test_xla_does_not_find_that_layers_are_computed_twice():
    def compiled(model):
        step = tf.function(tf.autograph.experimental.do_not_convert(lambda: gradients(model)), jit_compile=True)
        program = step.experimental_get_compiler_ir()(stage="optimized_hlo")
        return step(), len(re.findall(r" dot\(| custom-call\(", program))

    model = dropping_model("roberta", 0.3)
    expected, num_products = compiled(model)
    recompute_layers(model)
    recomputed, num_more_products = compiled(model)
    assert_all_close(recomputed, expected, atol=1e-6)
    # Of a layer's eight products the last is not needed again.
    assert num_more_products >= num_products + 5
