import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.fixtures.tiny_models import (
    MASK,
    PAD,
    VOCABULARY,
    one_layer_model,
    padded_batch,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from tests.fixtures.tiny_steps import compiled_model
from train.config.learning import ModelConfig
from train.model.architectures import ARCHITECTURES, vocabulary_axis
from train.model.build import build_network, clear_padding
from train.model.config import padded_vocabulary_size
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.step.train_step import PretrainingModel
from train.tasks.masked_lm import MaskedLanguageModeling, masked_lm_loss
from train.tasks.masking import MaskingRule

PADDED = 256
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_the_size_is_the_next_multiple(vocabulary_size: int, multiple: int) -> None:
    size = padded_vocabulary_size(vocabulary_size, multiple)
    assert size % multiple == 0
    assert vocabulary_size <= size < vocabulary_size + multiple


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_padded_model_is_exported_without_its_padding(name: str, tmp_path: Path) -> None:
    model = one_layer_model(name, vocab_size=PADDED)
    with_ids = [variable for variable in model.weights if PADDED in variable.shape]
    assert [vocabulary_axis(variable.name, name) for variable in with_ids] == [
        variable.shape.as_list().index(PADDED) for variable in with_ids
    ]
    export_model(model, tiny_tokenizer(), str(tmp_path), model_max_length=30, vocabulary_size=VOCABULARY)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["vocab_size"] == VOCABULARY
    assert not any(PADDED in array.shape for array in load_file(tmp_path / "model.safetensors").values())
    assert model.config.vocab_size == PADDED
    inputs, _ = padded_batch(model)
    logits = model(inputs).logits[..., :VOCABULARY]
    np.testing.assert_allclose(load_model(str(tmp_path))(inputs).logits, logits, atol=1e-6)


@pytest.mark.parametrize("position_init", ["random", "sinusoidal"])
def test_fresh_weights_are_those_without_padding_and_0(position_init: str) -> None:
    def fresh(size: int) -> list[tf.Variable]:
        settings = ModelConfig(position_init=position_init)
        config = tiny_config("roberta", vocab_size=size)
        return build_network(config, settings, vocabulary_size=VOCABULARY, seed=5).weights

    for plain, padded in zip(fresh(VOCABULARY), fresh(PADDED), strict=True):
        if plain.shape == padded.shape:
            np.testing.assert_array_equal(padded, plain)
        else:
            np.testing.assert_array_equal(padded[:VOCABULARY], plain)
            np.testing.assert_array_equal(padded[VOCABULARY:], 0)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_padding_is_never_predicted_and_gets_no_gradient(dtype: tf.DType, jit_compile: bool) -> None:
    logits = tf.constant([[1.0, 2.0, 3.0], [0.5, 0.0, -60_000.0]], dtype)
    padded = tf.concat([logits, tf.constant([[5.0, 60_000.0], [0.0, 9.0]], dtype)], axis=1)
    labels, weights = tf.constant([2, 2]), tf.ones(2)

    @tf.function(jit_compile=jit_compile)
    @tf.autograph.experimental.do_not_convert
    def sums_and_gradient(logits: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            sums = masked_lm_loss(logits, labels, weights, vocabulary_size=3)
        return sums, tape.gradient(sums["loss"], logits)

    (expected, expected_gradient), (sums, gradient) = sums_and_gradient(logits), sums_and_gradient(padded)
    np.testing.assert_allclose(list(sums.values()), list(expected.values()), rtol=1e-6)
    assert float(sums["num_correct"]) == 1
    np.testing.assert_allclose(tf.cast(gradient[:, :3], tf.float32), tf.cast(expected_gradient, tf.float32), rtol=1e-6)
    np.testing.assert_array_equal(tf.cast(gradient[:, 3:], tf.float32), 0)


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
        task = MaskedLanguageModeling(MaskingRule(MASK, (0, 1, 2, 3, 4), VOCABULARY), PAD)
        return compiled_model(masked_lm, task)


@pytest.mark.slow
def test_steps_are_those_without_padding() -> None:
    rows = np.random.default_rng(0).integers(5, VOCABULARY, (8, 16), dtype=np.int32)
    rows[-1, 10:] = PAD
    models = pretraining_model(VOCABULARY), pretraining_model(PADDED)
    figures = []
    for model in models:
        model.fit(tf.data.Dataset.from_tensors({"input_ids": rows}).repeat(4), steps_per_epoch=4, verbose=0)
        figures.append({metric.name: float(metric.result()) for metric in model.metrics})
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)
    for plain, padded in zip(*(model.network.weights for model in models), strict=True):
        cut = padded[tuple(slice(size) for size in plain.shape)]
        np.testing.assert_allclose(cut, plain, atol=1e-5)
    inputs = {"input_ids": rows, "attention_mask": (rows != PAD).astype(np.int32)}
    logits = [model.network(inputs).logits[..., :VOCABULARY] for model in models]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def test_clearing_touches_the_padding_alone() -> None:
    model, untouched = one_layer_model("mobilebert"), one_layer_model("mobilebert")
    clear_padding(model, VOCABULARY)
    for variable, before in zip(model.weights, untouched.weights, strict=True):
        np.testing.assert_array_equal(variable, before)
    clear_padding(model, 150)
    for variable, before in zip(model.weights, untouched.weights, strict=True):
        axis = vocabulary_axis(variable.name, "mobilebert")
        if axis is not None:
            kept, cleared = np.split(variable.numpy(), [150], axis)
            np.testing.assert_array_equal(kept, np.split(before.numpy(), [150], axis)[0])
            assert not cleared.any()
