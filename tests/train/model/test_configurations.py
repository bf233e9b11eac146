"""Configurations as transformers 4 and 5 write them."""

import json
from typing import Any

import pytest

from mlm_common.errors import InputError
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import CONFIGS
from train.model.configurations import make_config, settings_of
from train.model.pretrained_files import read_config

NAMES_OF_4 = {"global_rope_theta": 5e4, "local_rope_theta": 2e4, "global_attn_every_n_layers": 2}
NAMES_OF_5 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
SETTINGS = {**CONFIGS["modernbert without biases"], "num_hidden_layers": 3}
OF_4 = SETTINGS | NAMES_OF_4
# The configuration of version 5 has none of the names of 4.
OF_5 = {name: value for name, value in (SETTINGS | NAMES_OF_5).items() if name not in NAMES_OF_4}


@pytest.mark.parametrize("settings", [OF_4, OF_5], ids=["4", "5"])
def test_modernbert_has_the_names_of_version_4_whichever_wrote_it(settings, tmp_path):
    (tmp_path / "written").mkdir()
    (tmp_path / "written" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for config in (make_config(settings), read_config(str(tmp_path / "written"))):
        assert {name: getattr(config, name) for name in NAMES_OF_4} == NAMES_OF_4
        config.save_pretrained(tmp_path / "saved")
        saved = read_json(tmp_path / "saved" / "config.json")
        assert saved.items() >= NAMES_OF_4.items()
        assert not NAMES_OF_5.keys() & saved.keys()


def test_modernbert_without_these_settings_has_the_defaults():
    config = make_config({"model_type": "modernbert"})
    assert {name: getattr(config, name) for name in NAMES_OF_4} == {
        "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("layers", "every"), [("glgl", 2), ("gggg", 1), ("glll", 4), ("", 3)])
def test_the_distance_of_global_layers_is_found(layers, every):
    kinds = [{"g": "full_attention", "l": "sliding_attention"}[kind] for kind in layers]
    config = make_config(OF_5 | {"layer_types": kinds, "num_hidden_layers": len(kinds)})
    assert config.global_attn_every_n_layers == every


@pytest.mark.parametrize("layers", ["lgl", "gllgg"])
def test_layers_without_such_a_distance_are_refused(layers, tmp_path):
    kinds = [{"g": "full_attention", "l": "sliding_attention"}[kind] for kind in layers]
    settings = OF_5 | {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(InputError, match="layer_types must have full_attention first and at equal distances"):
        read_config(str(tmp_path))


# As version 4.57 writes them.
WRITTEN: dict[str, dict[str, Any]] = {
    "roberta": {
        "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "classifier_dropout": None, "eos_token_id": 2,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 32, "initializer_range": 0.02,
        "intermediate_size": 64, "layer_norm_eps": 1e-12, "max_position_embeddings": 32, "model_type": "roberta",
        "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 1, "position_embedding_type": "absolute",
        "type_vocab_size": 2, "use_cache": True, "vocab_size": 200,
    },
    "distilbert": {
        "activation": "gelu", "attention_dropout": 0.1, "bos_token_id": 0, "dim": 32, "dropout": 0.1, "eos_token_id": 2,
        "hidden_dim": 64, "initializer_range": 0.02, "max_position_embeddings": 32, "model_type": "distilbert",
        "n_heads": 4, "n_layers": 2, "pad_token_id": 1, "qa_dropout": 0.1, "seq_classif_dropout": 0.2,
        "sinusoidal_pos_embds": False, "vocab_size": 200,
    },
    "modernbert": {
        "attention_bias": True, "attention_dropout": 0.0, "bos_token_id": 0, "classifier_activation": "gelu",
        "classifier_bias": True, "classifier_dropout": 0.0, "classifier_pooling": "cls", "cls_token_id": 0,
        "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 2,
        "global_attn_every_n_layers": 2, "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 32,
        "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 64, "local_attention": 8,
        "local_rope_theta": 10000.0, "max_position_embeddings": 32, "mlp_bias": True, "mlp_dropout": 0.0,
        "model_type": "modernbert", "norm_bias": True, "norm_eps": 1e-05, "num_attention_heads": 4,
        "num_hidden_layers": 2, "pad_token_id": 1, "repad_logits_with_grad": False, "sep_token_id": 2,
        "sparse_pred_ignore_index": -100, "sparse_prediction": False, "vocab_size": 200,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_the_settings_that_identify_a_run_are_those_of_version_4(name):
    assert settings_of(make_config(CONFIGS[name])) == WRITTEN[name]
    assert settings_of(make_config({**CONFIGS[name], "tie_word_embeddings": False}))["tie_word_embeddings"] is False
