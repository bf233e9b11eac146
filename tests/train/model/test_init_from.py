import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlm_common.errors import InputError
from mlm_common.hub import push as hub
from mlm_common.tokenizer import vocabulary_size
from tests.fixtures.plans import inputs_of
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import (
    VOCABULARY,
    one_layer_model,
    padded_batch,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from train.config.learning import PretrainedModel
from train.model.build import build_network
from train.model.config import resolve_model_config
from train.model.from_pretrained import load_initial_weights, load_model
from train.publishing.pytorch_format import export_model

PADDED = 256


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    export_model(tiny_model("roberta"), tiny_tokenizer(), str(folder), model_max_length=30)
    return folder


def fresh(name: str, **changes: Any) -> Any:
    config = tiny_config(name, **{"vocab_size": PADDED, **changes})
    return build_network(config, vocabulary_size=VOCABULARY, seed=8)


@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_a_model_starts_as_the_checkpoint_with_other_padding(name, tmp_path):
    """Whose vocabulary may have padding, too."""
    source = one_layer_model(name, vocab_size=210 if name == "roberta" else VOCABULARY)
    export_model(source, tiny_tokenizer(), str(tmp_path), model_max_length=30)
    model = fresh(name, num_hidden_layers=1)
    load_initial_weights(model, str(tmp_path), VOCABULARY)
    batch, _ = padded_batch(model)
    logits = model(batch).logits
    np.testing.assert_allclose(logits[..., :VOCABULARY], source(batch).logits[..., :VOCABULARY], atol=1e-5)
    np.testing.assert_array_equal(logits[..., VOCABULARY:], 0)


def test_positions_that_a_checkpoint_lacks_keep_their_start(export):
    untouched, model = (fresh("roberta", max_position_embeddings=50) for _ in range(2))
    load_initial_weights(model, str(export), VOCABULARY)
    source = load_model(str(export))
    table, given, before = (network.roberta.embeddings.positions.numpy() for network in (model, source, untouched))
    np.testing.assert_array_equal(table[:32], given)
    np.testing.assert_array_equal(table[32:], before[32:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, r"layer_\._1/.* is in only one of the two"),
        ({"intermediate_size": 32}, r"is \(32, 64\), here \(32, 32\)\. Leave out the --config-overrides"),
        ({"max_position_embeddings": 20}, r"position_embeddings.* is \(32, 32\), here \(20, 32\)"),
    ],
)
def test_weights_of_another_size_are_refused(changes, message, export):
    with pytest.raises(InputError, match=message):
        load_initial_weights(fresh("roberta", **changes), str(export), VOCABULARY)


def test_the_configuration_is_the_checkpoints_with_overrides(export):
    settings = PretrainedModel(
        preset="tiny-roberta-cpu", init_from=str(export), config_overrides="max_position_embeddings=40"
    )
    config = resolve_model_config(settings, inputs_of(tiny_tokenizer()))
    assert (config.hidden_size, config.max_position_embeddings, config.vocab_size) == (32, 40, 128)


def test_rows_longer_than_the_checkpoints_positions_are_refused(export):
    with pytest.raises(InputError, match=r"--config-overrides max_position_embeddings=33"):
        resolve_model_config(PretrainedModel(init_from=str(export)), inputs_of(tiny_tokenizer(), max_length=31))


def test_other_special_tokens_of_one_vocabulary_are_refused(export, tmp_path):
    for path in export.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = read_json(tmp_path / "tokenizer_config.json")
    settings |= {"cls_token": "[SEP]", "sep_token": "[CLS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(InputError, match=r"has special ids \{'cls': 2"):
        resolve_model_config(PretrainedModel(init_from=str(tmp_path)), inputs_of(tiny_tokenizer()))


@pytest.mark.usefixtures("hub_of_transformers")
def test_a_checkpoint_on_the_hub(export):
    files = {path.name: path for path in export.iterdir()}
    hub.push_files(files, hub.HubRepository("alice/checkpoint"), commit_message="trained", kept_in=str(export))
    config = resolve_model_config(PretrainedModel(init_from="alice/checkpoint"), inputs_of(tiny_tokenizer()))
    size = vocabulary_size(tiny_tokenizer())
    model = build_network(config, vocabulary_size=size, seed=8)
    load_initial_weights(model, "alice/checkpoint", size)
    table = load_file(export / "model.safetensors")["roberta.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(model.encoder.embeddings.weight[:size], table[:size])
    assert config._commit_hash
