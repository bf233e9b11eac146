import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.tiny_models import padded_batch, tiny_model
from train.layers.random_bits import dropping_out_by, key_dropout, key_of, row_keys
from train.model.architectures import ARCHITECTURES
from train.model.build import enable_gradient_checkpointing, encoder_layers

NAMES = [*ARCHITECTURES, "deberta-v2 as v3", "albert with two groups"]


def dropping_model(name: str, rate: float, **changes: Any) -> Any:
    model = tiny_model(name, **dict.fromkeys(ARCHITECTURES[name.split()[0]].dropouts, rate), **changes)
    key_dropout(model)
    return model


def gradients(model: Any) -> list[tf.Tensor]:
    inputs, _ = padded_batch(model)
    with dropping_out_by(row_keys((5, 6), 3), key_of((5, 6))):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.log_softmax(model(inputs, training=True).logits)[..., 7])
        found = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
    return [tf.convert_to_tensor(gradient) for gradient in found]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stay_the_same_with_what_was_dropped(name: str) -> None:
    model = dropping_model(name, 0.3)
    expected = gradients(model)
    num_calls = []
    for layer in encoder_layers(model):
        layer.call = counted(layer.call, num_calls)
    enable_gradient_checkpointing(model)
    for gradient, kept in zip(gradients(model), expected, strict=True):
        np.testing.assert_allclose(gradient, kept, atol=1e-6)
    # Once forward and once again: ALBERT's groups are used for several layers each.
    assert len(num_calls) == 2 * 2


def counted(call: Any, calls: list[int]) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(*args, **kwargs)

    return count


@pytest.mark.slow
def test_xla_does_not_find_that_layers_are_computed_twice() -> None:
    def compiled(model: Any) -> tuple[list[tf.Tensor], int]:
        step = tf.function(tf.autograph.experimental.do_not_convert(lambda: gradients(model)), jit_compile=True)
        program = step.experimental_get_compiler_ir()(stage="optimized_hlo")
        return step(), len(re.findall(r" dot\(| custom-call\(", program))

    model = dropping_model("roberta", 0.3, num_hidden_layers=1)
    expected, num_products = compiled(model)
    enable_gradient_checkpointing(model)
    found, num_more_products = compiled(model)
    for gradient, kept in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, kept, atol=1e-6)
    # Of a layer's eight products the last is not needed again.
    assert num_more_products >= num_products + 5


def test_an_encoder_of_another_build_is_an_error() -> None:
    model = tiny_model("roberta")
    with pytest.raises(AttributeError):
        encoder_layers(model.roberta)
    model.roberta.encoder.layer = ()
    with pytest.raises(ValueError, match="The layers of a roberta are not found"):
        encoder_layers(model)
