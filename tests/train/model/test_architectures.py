import json

import numpy as np
import pytest
import tensorflow as tf
from transformers import AutoConfig

from mlm_common.errors import InputError
from tests.fixtures.tiny_models import CONFIGS, of_transformers_4, tiny_config, tiny_model
from train.model.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    check_architecture,
    max_positions,
    position_offset,
    uses_token_types,
)
from train.model.pretrained_files import read_config


def test_every_supported_type_has_a_configuration_here():
    assert {config["model_type"] for config in CONFIGS.values()} == set(ARCHITECTURES)
    for name in CONFIGS:
        check_architecture(tiny_config(name))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AutoConfig.for_model("gpt2"), r"supported type: albert, bert, .*; received gpt2"),
        (tiny_config("mpnet", pad_token_id=0), r"received 0\. Use a tokenizer with pad_token_id 1"),
        (tiny_config("roberta", pad_token_id=None), "pad_token_id"),
    ],
)
def test_an_unsupported_configuration_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        check_architecture(config)


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
        ("mobilebert", "normalization_type", "layer_norm"),
        ("albert", "hidden_act", "gelu_pytorch_tanh"),
    ],
)
def test_settings_that_the_tf_class_ignores_are_refused(name, setting, value):
    with pytest.raises(InputError, match=rf"{setting} .*received {value}.*--config-overrides {setting}="):
        check_architecture(tiny_config(name, **{setting: value}))


@pytest.mark.parametrize("activation", ["gelo", ["gelu"]])
def test_the_file_of_a_setting_that_is_refused_is_named(activation, tmp_path):
    """A list is refused by transformers 5 when it is read, with 4 by us."""
    settings = CONFIGS["bert"] | {"hidden_act": activation}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(InputError, match=rf"^{tmp_path}/config\.json.*\bhidden_act"):
        check_architecture(read_config(str(tmp_path)))


@of_transformers_4
def test_activations_are_those_of_the_tf_classes():
    from transformers.activations_tf import ACT2FN

    # `glu` halves the width, so no dense layer takes it.
    assert sorted(ACTIVATIONS) == sorted(set(ACT2FN) - {"glu"})


@pytest.mark.parametrize(
    ("name", "offset", "longest", "has_types"),
    [
        ("bert", 0, 32, True),
        ("distilbert", 0, 32, False),
        ("roberta", 2, 30, False),
        ("roberta padded with id 0", 1, 31, False),
        ("mpnet", 2, 30, False),
        ("deberta-v2", 0, 32, False),
        ("deberta-v2 as v3", 0, None, False),
    ],
)
def test_token_types_and_the_longest_row_that_the_position_table_fits(name, offset, longest, has_types):
    config = tiny_config(name)
    assert uses_token_types(config) is has_types
    assert (position_offset(config), max_positions(config)) == (offset, longest)
    model = tiny_model(name)

    def run(length):
        ids = tf.fill((1, length), 7)
        return model({"input_ids": ids, "attention_mask": tf.ones_like(ids)}).logits

    assert np.isfinite(run(longest or 80)).all()
    if longest is not None:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            run(longest + 1)


def test_positions_count_from_the_configured_padding_id():
    model = tiny_model("roberta padded with id 0")
    ids = tf.constant([[7, 1, 8, 0]])
    assert model.encoder.positions(ids, None).numpy().tolist() == [[1, 2, 3, 0]]
    assert tiny_model("bert").encoder.positions(ids, None).numpy().tolist() == [[0, 1, 2, 3]]
    mpnet = tiny_model("mpnet")
    assert mpnet.mpnet.embeddings.create_position_ids_from_input_ids(ids).numpy().tolist() == [[2, 1, 3, 4]]
