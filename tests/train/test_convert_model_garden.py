"""Object checkpoints of Model Garden, written by these tests, become what Google's own of the same model becomes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_keras
from safetensors.numpy import load_file

from tests.fixtures.google_checkpoints import Variables, google_settings, google_variables, write_google_checkpoint
from tests.fixtures.model_garden import Encoder, Pretrainer, functional_encoder, write_objects
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import tiny_model
from train.convert_bert import main


@pytest.fixture(scope="module")
def bert() -> Any:
    return tiny_model("bert", "TFAutoModelForPreTraining", pad_token_id=0, bos_token_id=3, eos_token_id=4)


@pytest.fixture(scope="module")
def variables(bert) -> Variables:
    return google_variables(bert)


@pytest.fixture
def source(bert, variables, tmp_path) -> Path:
    return write_google_checkpoint(tmp_path / "cased", variables, google_settings(bert.config))


def converted(source: Path, output: Path) -> Path:
    assert main([str(source), str(output)]) == 0
    return output / "model.safetensors"


def test_a_pretrainer_with_both_heads(bert, variables, source, tmp_path, run):
    expected = converted(source, tmp_path / "google")
    pretrainer = Pretrainer(bert.config, variables)
    write_objects(source, {"model": pretrainer, **pretrainer.checkpoint_items})
    printed = run(main, source, tmp_path / "garden").out
    assert (tmp_path / "garden" / "model.safetensors").read_bytes() == expected.read_bytes()
    configs = [(tmp_path / name / "config.json").read_text(encoding="utf-8") for name in ("google", "garden")]
    assert configs[0] == configs[1]
    # The pooler beside that of the head for pairs, and nothing else.
    left_out = printed.splitlines()[0]
    assert re.fullmatch(
        r"not converted[^:]*: (encoder/_pooler_layer/(bias|kernel)/.ATTRIBUTES/VARIABLE_VALUE(, )?){2}", left_out
    )


def test_an_encoder_of_numbered_layers(bert, variables, source, tmp_path):
    expected = load_file(converted(source, tmp_path / "google"))
    encoder = functional_encoder(bert.config, variables)
    ids = np.random.default_rng(0).integers(6, 200, (2, 8), dtype=np.int32)
    types = np.repeat(np.arange(2, dtype=np.int32), 4)[np.newaxis].repeat(2, axis=0)
    for own, transformers in zip(encoder([ids, types]), bert.bert(ids, token_type_ids=types)[:2], strict=True):
        np.testing.assert_allclose(own, transformers, atol=1e-5)
    write_objects(source, {"model": encoder})
    weights = load_file(converted(source, tmp_path / "garden"))
    assert read_json(tmp_path / "garden" / "config.json")["architectures"] == ["BertModel"]
    assert weights.keys() == {name for name in expected if name.startswith("bert.")}
    for name, array in weights.items():
        np.testing.assert_array_equal(array, expected[name], name)


def project_embeddings(encoder: Any) -> Any:
    encoder._embedding_projection = tf_keras.layers.Dense(8)
    encoder._embedding_projection.build((None, 8))
    return encoder


def empty_pooler(encoder: Any) -> Any:
    encoder._pooler_layer = tf_keras.layers.Activation("tanh")
    return encoder


def replace_encoder(_: Any) -> Any:
    layer = tf_keras.layers.Dense(8)
    layer.build((None, 8))
    return layer


WRONG = [
    (project_embeddings, "unknown: .*_embedding_projection/bias/.ATTRIBUTES/VARIABLE_VALUE, "),
    (empty_pooler, "missing: bert/pooler/dense/bias, bert/pooler/dense/kernel$"),
    (replace_encoder, "must hold a BertEncoder of Model Garden, .*cased are: global_step, model, optimizer, save_"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_another_encoder_is_refused(change, message, bert, variables, source, tmp_path, run):
    write_objects(source, {"model": change(Encoder(bert.config, variables))})
    outcome = run(main, source, tmp_path / "out")
    assert re.search(f"^error: .*{message}", outcome.refusal)
    assert not list((tmp_path / "out").glob("*"))
