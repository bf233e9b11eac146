"""Object checkpoints of Model Garden, written by these tests, become what Google's own of the same model becomes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_keras
from safetensors.numpy import load_file

from tests.fixtures.arrays import assert_all_close, assert_same_arrays
from tests.fixtures.model_garden import Encoder, Pretrainer, functional_encoder, write_objects
from tests.fixtures.results import read_json
from train.convert_bert import main


def converted(source: Path, output: Path) -> Path:
    assert main([str(source), str(output)]) == 0
    return output / "model.safetensors"


def test_a_pretrainer_with_both_heads(bert, bert_variables, bert_checkpoint, tmp_path, run):
    expected = converted(bert_checkpoint, tmp_path / "google")
    pretrainer = Pretrainer(bert.config, bert_variables)
    write_objects(bert_checkpoint, {"model": pretrainer, **pretrainer.checkpoint_items})
    printed = run(main, bert_checkpoint, tmp_path / "garden").out
    assert (tmp_path / "garden" / "model.safetensors").read_bytes() == expected.read_bytes()
    configs = [(tmp_path / name / "config.json").read_text(encoding="utf-8") for name in ("google", "garden")]
    assert configs[0] == configs[1]
    # The pooler beside that of the head for pairs, and nothing else.
    left_out = printed.splitlines()[0]
    assert re.fullmatch(
        r"not converted[^:]*: (encoder/_pooler_layer/(bias|kernel)/.ATTRIBUTES/VARIABLE_VALUE(, )?){2}", left_out
    )


def test_an_encoder_of_numbered_layers(bert, bert_variables, bert_checkpoint, tmp_path):
    expected = load_file(converted(bert_checkpoint, tmp_path / "google"))
    encoder = functional_encoder(bert.config, bert_variables)
    ids = np.random.default_rng(0).integers(6, 200, (2, 8), dtype=np.int32)
    types = np.repeat(np.arange(2, dtype=np.int32), 4)[np.newaxis].repeat(2, axis=0)
    states = bert.bert(ids, token_types=types)
    assert_all_close(encoder([ids, types]), [states, bert.pair_pooler(states[:, 0])], atol=1e-5)
    write_objects(bert_checkpoint, {"model": encoder})
    weights = load_file(converted(bert_checkpoint, tmp_path / "garden"))
    assert read_json(tmp_path / "garden" / "config.json")["architectures"] == ["BertModel"]
    assert_same_arrays(weights, {name: array for name, array in expected.items() if name.startswith("bert.")})


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
    (empty_pooler, r"missing: bert/pooler/dense/bias, bert/pooler/dense/kernel\.$"),
    (
        replace_encoder,
        "must contain a BertEncoder of Model Garden, .*cased contains global_step, model, optimizer, save_",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_another_encoder_is_refused(change, message, bert, bert_variables, bert_checkpoint, tmp_path, run):
    write_objects(bert_checkpoint, {"model": change(Encoder(bert.config, bert_variables))})
    outcome = run(main, bert_checkpoint, tmp_path / "out")
    assert re.search(f"^error: .*{message}", outcome.refusal)
    assert not list((tmp_path / "out").glob("*"))
