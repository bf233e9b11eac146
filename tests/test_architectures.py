import os
import re
import subprocess
import sys

import pytest

from tests.tiny_models import CONFIGS, padded_batch, tiny_config, tiny_model
from tokenizer_training.command_line import InputError
from train.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    REASONS_AGAINST,
    align_padding_positions,
    check_architecture,
    max_positions,
    position_offset,
    uses_token_types,
)

import train.environment  # noqa: F401  # isort: skip
import numpy as np
import tensorflow as tf
import tf_keras
import transformers
from transformers import AutoConfig

from train.masked_positions import gather_before_head, predicting_at

POSITIONS = np.array([[1, 3, 3, 9], [0, 2, 5, 6], [9, 0, 4, 8]], np.int32)  # (batch, num_predictions)
COMPILED = [name if name == "roberta" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def test_every_supported_type_has_a_configuration_here() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(ARCHITECTURES)
    for name in CONFIGS:
        check_architecture(tiny_config(name))


@pytest.mark.parametrize("model_type", REASONS_AGAINST)
def test_unsupported_types_are_refused_by_name_with_the_reason(model_type: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"received {model_type}: {REASONS_AGAINST[model_type]}.")):
        check_architecture(AutoConfig.for_model(model_type))


def test_an_unknown_type_is_refused_and_the_supported_are_named() -> None:
    with pytest.raises(InputError, match=r"supported type: albert, bert, .*; received gpt2"):
        check_architecture(AutoConfig.for_model("gpt2"))


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("bert", "tie_word_embeddings", False),
        ("mobilebert", "tie_word_embeddings", True),
        ("roberta", "is_decoder", True),
        ("electra", "position_embedding_type", "relative_key"),
        ("distilbert", "sinusoidal_pos_embds", True),
        ("distilbert", "activation", "gelu_python"),
        ("deberta-v2", "legacy", False),
        ("deberta-v2", "conv_kernel_size", 3),
        ("mpnet", "pad_token_id", 0),
        ("mobilebert", "normalization_type", "layer_norm"),
        ("albert", "hidden_act", "gelu_pytorch_tanh"),
    ],
)
def test_settings_that_the_tf_class_ignores_are_refused_with_the_cure(name: str, setting: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"{setting} .*received {value}.*--config-overrides {setting}="):
        check_architecture(tiny_config(name, **{setting: value}))


def test_a_roberta_without_padding_id_is_refused() -> None:
    with pytest.raises(InputError, match="pad_token_id"):
        check_architecture(tiny_config("roberta", pad_token_id=None))


def test_activations_are_those_of_the_tf_classes() -> None:
    from transformers.activations_tf import ACT2FN

    # `glu` halves the width, so no dense layer takes it.
    assert sorted(ACTIVATIONS) == sorted(set(ACT2FN) - {"glu"})


@pytest.mark.parametrize(
    ("name", "offset", "longest"),
    [
        ("bert", 0, 32),
        ("distilbert", 0, 32),
        ("roberta", 2, 30),
        ("roberta padded with id 0", 1, 31),
        ("mpnet", 2, 30),
        ("deberta-v2", 0, 32),
        ("deberta-v2 as v3", 0, None),
    ],
)
def test_the_longest_row_fits_the_position_table_exactly(name: str, offset: int, longest: int | None) -> None:
    config = tiny_config(name)
    assert (position_offset(config), max_positions(config)) == (offset, longest)
    model = tiny_model(name)

    def run(length: int) -> tf.Tensor:
        ids = tf.fill((1, length), 7)
        return model({"input_ids": ids, "attention_mask": tf.ones_like(ids)}).logits

    assert np.isfinite(run(longest or 80)).all()
    if longest is not None:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            run(longest + 1)


@pytest.mark.parametrize(
    ("name", "expected"), [("bert", True), ("deberta-v2 as v3", False), ("distilbert", False), ("roberta", False)]
)
def test_token_types(name: str, expected: bool) -> None:
    assert uses_token_types(tiny_config(name)) is expected


def test_positions_count_from_the_padding_id_of_the_configuration() -> None:
    model = tiny_model("roberta padded with id 0")
    ids = tf.constant([[7, 1, 8, 0]])
    assert model.roberta.embeddings.create_position_ids_from_input_ids(ids).numpy().tolist() == [[1, 2, 3, 0]]
    untouched = tiny_model("bert")
    align_padding_positions(untouched)
    assert not hasattr(untouched.bert.embeddings, "padding_idx")


def logits_and_gradients(model: transformers.TFPreTrainedModel, inputs: dict, gather: bool) -> tuple:
    with tf.GradientTape() as tape:
        logits = model(inputs, training=False).logits
        if gather:
            logits = tf.gather(logits, POSITIONS, batch_dims=1)
        loss = tf.reduce_sum(tf.nn.log_softmax(logits)[..., 7])
    gradients = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
    return logits, [tf.convert_to_tensor(gradient) for gradient in gradients]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gathered_head_gives_the_logits_and_gradients_of_the_full_head(name: str) -> None:
    model = tiny_model(name)
    inputs, _ = padded_batch(model)
    full_logits = model(inputs).logits
    expected_logits, expected_gradients = logits_and_gradients(model, inputs, gather=True)

    gather_before_head(model)
    gather_before_head(model)
    with predicting_at(POSITIONS):
        logits, gradients = logits_and_gradients(model, inputs, gather=False)

    assert logits.shape == (3, 4, CONFIGS[name]["vocab_size"])
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5)
    for expected, gradient in zip(expected_gradients, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(model(inputs).logits, full_logits)


@pytest.mark.parametrize("name", COMPILED)
def test_the_gathered_head_trains_in_a_graph_under_xla(name: str) -> None:
    model = tiny_model(name)
    inputs, _ = padded_batch(model)
    expected, expected_gradients = logits_and_gradients(model, inputs, gather=True)
    gather_before_head(model)

    @tf.function(jit_compile=True)
    def step() -> tuple:
        with predicting_at(POSITIONS):
            return logits_and_gradients(model, inputs, gather=False)

    logits, gradients = step()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    for expected, gradient in zip(expected_gradients, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_it_trains_in_mixed_bfloat16_under_xla(name: str) -> None:
    policy = tf_keras.mixed_precision.global_policy()
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = tiny_model(name)
    finally:
        tf_keras.mixed_precision.set_global_policy(policy)
    inputs, _ = padded_batch(model)
    gather_before_head(model)

    @tf.function(jit_compile=True)
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape, predicting_at(POSITIONS):
            logits = tf.cast(model(inputs, training=True).logits, tf.float32)
            loss = -tf.reduce_mean(tf.nn.log_softmax(logits)[..., 7])
        gradients = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
        return loss, tf.linalg.global_norm(gradients)

    loss, gradient_norm = step()
    assert np.isfinite(loss)
    assert 0 < gradient_norm < np.inf
    assert {variable.dtype for variable in model.trainable_variables} == {tf.float32}


def test_each_replica_gathers_at_its_own_positions() -> None:
    strategy = tf.distribute.MirroredStrategy(tf.config.list_logical_devices("CPU"))
    with strategy.scope():
        model = tiny_model("roberta")
    gather_before_head(model)
    inputs, _ = padded_batch(model)
    full_logits = model(inputs).logits

    @tf.function
    def replica_logits() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        with predicting_at(tf.cast(POSITIONS + replica, tf.int32)):
            return model(inputs).logits

    for replica, logits in enumerate(strategy.experimental_local_results(strategy.run(replica_logits))):
        np.testing.assert_allclose(logits, tf.gather(full_logits, POSITIONS + replica, batch_dims=1), atol=1e-5)


def test_the_context_ends_with_an_error_and_nests() -> None:
    model = tiny_model("bert")
    gather_before_head(model)
    inputs, _ = padded_batch(model)
    with predicting_at(POSITIONS):
        with predicting_at(POSITIONS[:, :1]):
            assert model(inputs).logits.shape[1] == 1
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)), predicting_at(POSITIONS[:1]):
            model(inputs)
        assert model(inputs).logits.shape[1] == 4
    assert model(inputs).logits.shape[1] == 12


@pytest.mark.parametrize("module", ["train.environment", "train.architectures"])
def test_importing_it_imports_no_tensorflow(module: str) -> None:
    program = f"import sys, {module}; assert not {{'tensorflow', 'tf_keras', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_environment_prepared_too_late_is_refused() -> None:
    # A TensorFlow whose distribution transformers does not know is found by its module alone.
    program = """
import importlib.metadata as metadata
known = metadata.version
def version(name):
    if name.startswith(("tensorflow", "tf-nightly", "intel-tensorflow")):
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
{first}
{second}
from transformers.utils import is_tf_available
assert is_tf_available()
"""
    unprepared = {name: value for name, value in os.environ.items() if name != "FORCE_TF_AVAILABLE"}

    def run(first: str, second: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", program.format(first=first, second=second)]
        return subprocess.run(command, env=unprepared, capture_output=True, text=True, check=False)

    assert run("import train.environment", "import transformers").returncode == 0
    refused = run("import transformers", "import train.environment")
    assert "InputError: train.environment must be imported before transformers" in refused.stderr
