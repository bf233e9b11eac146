"""Configurations as transformers 4 and 5 write them."""

import json

import pytest

from mlm_common.errors import InputError
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import CONFIGS
from train.model.configurations import make_config
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


@pytest.mark.parametrize(("layers", "every"), [("glgl", 2), ("gggg", 1), ("glll", 4), ("g", 3), ("gl", 3), ("", 3)])
def test_the_distance_of_global_layers_is_found(layers, every):
    kinds = [{"g": "full_attention", "l": "sliding_attention"}[kind] for kind in layers]
    config = make_config(OF_5 | {"layer_types": kinds, "num_hidden_layers": len(kinds)})
    assert config.global_attn_every_n_layers == every


@pytest.mark.parametrize("layers", ["lgl", "ggl", "gllgg"])
def test_layers_without_such_a_distance_are_refused(layers, tmp_path):
    kinds = [{"g": "full_attention", "l": "sliding_attention"}[kind] for kind in layers]
    settings = OF_5 | {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(InputError, match="layer_types must be full_attention at equal distances"):
        read_config(str(tmp_path))
