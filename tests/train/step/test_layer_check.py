"""What stands between a run on a TPU and layers that compute something else there: each failure, and none."""

import logging
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.tiny_models import PAD, tiny_model
from tests.fixtures.tiny_steps import RULE, batch_of, compiled_model, one_cpu, token_rows, two_cpus
from train.layers import tpu_layers
from train.model.architectures import ARCHITECTURES
from train.step import proofs
from train.step.proofs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Figures, figures_agree, prove_tpu_layers
from train.tasks.masked_lm import MaskedLanguageModeling

SEP = 2
# Of a ModernBERT a global layer, and a local one whose rows are cut into blocks.
LAYERS = {"modernbert": {"local_attention": 2}}


def built(name="roberta", strategy=None, jit_compile=True):
    with (strategy or one_cpu()).scope():
        rates = dict(zip(ARCHITECTURES[name].dropouts, (0.1, 0.2, 0.1), strict=False))
        network = tiny_model(name, **LAYERS.get(name, {"num_hidden_layers": 1}), **rates)
        return compiled_model(network, MaskedLanguageModeling(RULE, PAD), jit_compile=jit_compile)


def is_proven(model):
    rows = token_rows()
    rows[:, 6] = SEP
    return prove_tpu_layers(model, batch_of(rows))


def has_tpu_layers(model):
    return model.network.encoder.functions is tpu_layers


def state_of(model):
    return [variable.numpy() for variable in [*model.network.variables, *model.optimizer.variables]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("modernbert", "float32"), ("roberta", "mixed_bfloat16")])
def test_right_layers_are_used_and_drop_as_the_reference_layers(name, policy, caplog):
    """Also within the documents of a row."""
    tf_keras.mixed_precision.set_global_policy(policy)
    model = built(name)
    model.network.encoder.separates_documents = name == "modernbert"
    before = state_of(model)
    with caplog.at_level(logging.INFO):
        assert is_proven(model)
    assert has_tpu_layers(model)
    assert "TPU-optimized layers are used; on the first rows they give loss 5." in caplog.text
    assert "REFERENCE" not in caplog.text
    assert all(np.array_equal(array, old) for array, old in zip(state_of(model), before, strict=True))
    assert not any(layer.drops_heads for layer in model.network.dropout_layers)


def check_fallback(model, caplog):
    with caplog.at_level(logging.INFO):
        assert not is_proven(model)
    assert not has_tpu_layers(model)
    (text,) = (record.getMessage() for record in caplog.records if record.name == proofs.__name__)
    assert "WARNING" in caplog.text
    assert text.startswith("The run trains with the REFERENCE LAYERS: the TPU-optimized ones ")
    assert "--tpu-layers off trains with the reference layers, --tpu-layers on" in text
    return text


@pytest.mark.slow
def test_layers_that_drop_nothing_are_not_used(caplog, monkeypatch):
    attend = tpu_layers.attend
    monkeypatch.setattr(tpu_layers, "attend", lambda *tensors_and_keys, **_: attend(*tensors_and_keys[:4], None, 0.0))
    check_fallback(built(), caplog)


@pytest.mark.slow
def test_layers_that_cannot_be_traced_are_not_used_and_a_lost_device_says_nothing(caplog, monkeypatch):
    lost = tf.errors.UnavailableError(None, None, "Socket closed")
    monkeypatch.setattr(tpu_layers, "attend", Mock(side_effect=[lost, AttributeError("dot_general")]))
    model = built(jit_compile=False)
    with pytest.raises(tf.errors.UnavailableError):
        is_proven(model)
    assert "do not compile here: AttributeError: " in check_fallback(model, caplog)


def test_figures_are_those_of_all_replicas():
    """A row that one replica alone has moves what every one gets."""
    rows = np.concatenate([token_rows(), token_rows(seed=1)])
    strategy = two_cpus()
    model = built(strategy=strategy, jit_compile=False)

    def losses(rows):
        dataset = tf.data.Dataset.from_tensor_slices(batch_of(rows)).batch(len(rows), drop_remainder=True)
        batches = strategy.experimental_distribute_dataset(dataset)
        sums, squares = strategy.run(model.gradient_sums, args=(next(iter(batches)),))
        values = [value.numpy() for value in strategy.experimental_local_results(sums["loss"])]
        assert all(value.shape == (len(model.network.trainable_variables),) for value in squares.values)
        return values

    loss, same = losses(rows)
    rows[-1, 5] += 1
    assert loss == same
    assert losses(rows)[0] != loss


def test_figures_agree_within_rounding_alone():
    def figures(loss, *norms):
        return Figures(loss, dict(zip(("a/kernel:0", "b/kernel:0", "c/bias:0", "d/key/bias:0"), norms, strict=True)))

    expected = figures(5.0, 3.0, 4.0, 1e-9, 1e-3)
    assert expected.describe() == "loss 5, gradient norm 5"
    assert figures_agree(expected, expected)
    assert figures_agree(figures(5.0, 3.0, 4.0, 2e-9, 2e-3), expected)  # next to nothing, or nothing: all rounding
    for differing in (
        figures(5.0 * (1 + 2 * LOSS_TOLERANCE), 3.0, 4.0, 1e-9, 1e-3),
        figures(5.0, 3.0 * (1 + 2 * GRADIENT_TOLERANCE), 4.0, 1e-9, 1e-3),
        figures(float("nan"), 3.0, 4.0, 1e-9, 1e-3),
        figures(5.0, 3.0, float("nan"), 1e-9, 1e-3),
    ):
        assert not figures_agree(differing, expected)
        assert not figures_agree(expected, differing)
