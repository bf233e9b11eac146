"""TensorFlow classes of transformers: what our patches change, that they come off again, and what says they lack."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import transformers

from mlm_common.errors import EXIT_BAD_INPUT, InputError
from tests.fixtures.doctor_cases import config_of
from tests.fixtures.fresh_process import answers_of
from tests.fixtures.tiny_classification import flags as classification_flags
from tests.fixtures.tiny_models import (
    CONFIGS,
    HAS_TF_CLASSES,
    of_transformers_4,
    padded_batch,
    tiny_config,
    tiny_tokenizer,
)
from tests.fixtures.tiny_run import run_flags
from train.checks import machine
from train.layers.random_bits import dropping_out_by, key_of, row_keys
from train.model import legacy
from train.model.architectures import check_computable, check_tensorflow_classes
from train.model.build import recompute_layers

MLM = "TFAutoModelForMaskedLM"


def attributes(network: tf.Module) -> dict[str, Any]:
    """Collect the attributes of all parts, those of simple types with their values."""
    simple = (bool, int, float, str, type(None))
    return {
        f"{index}.{name}": value if isinstance(value, simple) else type(value)
        for index, module in enumerate((network, *network.submodules))
        for name, value in vars(module).items()
    }


def outputs(network: Any, *, training: bool) -> list[np.ndarray]:
    """Compute logits and all hidden states; a part that drops at random starts from one seed."""
    rows, _ = padded_batch(network)
    tf.random.set_seed(3)
    returned = network(rows, training=training, output_hidden_states=True)
    return [returned.logits.numpy(), *(states.numpy() for states in returned.hidden_states)]


@of_transformers_4
@pytest.mark.parametrize("name", ["mpnet", "roberta padded with id 0", "albert with two groups", "deberta-v2 as v3"])
def test_without_its_patches_a_network_is_as_transformers_made_it(name):
    config = tiny_config(name)
    tf_keras.backend.reset_uids()  # by which Keras numbers the names of layers
    made = getattr(transformers, MLM).from_config(config)
    made(made.dummy_inputs, training=False)
    tf_keras.backend.reset_uids()
    patched = legacy.new_network(MLM, config)
    patched.set_weights(made.get_weights())
    recompute_layers(patched)
    with legacy.predicting_at(tf.constant([3, 5])), dropping_out_by(row_keys((5, 6), 3), key_of((5, 6))):
        assert outputs(patched, training=True)[0].shape[:2] == (1, 2)
    differing = {name.rpartition(".")[2] for name in attributes(made).keys() ^ attributes(patched).keys()}
    assert differing == {"call", "recomputes_layers"}

    legacy.undo_patches(patched)
    assert attributes(patched) == attributes(made)
    for training in (False, True):
        for output, expected in zip(outputs(patched, training=training), outputs(made, training=training), strict=True):
            np.testing.assert_array_equal(output, expected)


@of_transformers_4
def test_patches_are_applied_in_the_order_of_their_list(monkeypatch):
    applied = []
    names = [patch.__name__ for patch in legacy.PATCHES]
    monkeypatch.setattr(legacy, "PATCHES", [lambda _, name=name: applied.append(name) for name in names])
    legacy.new_network(MLM, tiny_config("mpnet"))
    assert (
        applied
        == names
        == ["count_positions_from_padding", "gather_before_head", "let_layers_be_recomputed", "key_dropout"]
    )


def test_without_tensorflow_classes_other_architectures_are_refused(monkeypatch):
    monkeypatch.delattr(transformers.utils, "is_tf_available", raising=False)
    monkeypatch.setattr(transformers, "__version__", "5.24.0")
    message = (
        r"^model_type mpnet needs the TensorFlow classes of transformers 4; transformers 5\.24\.0 is installed\. "
        r"Install version 4: python3 install\.py --with legacy$"
    )
    for check in (lambda config: legacy.new_network(MLM, config), check_computable):
        with pytest.raises(InputError, match=message):
            check(tiny_config("mpnet"))
    check_computable(tiny_config("bert"))


def test_transformers_that_does_not_see_tensorflow_is_refused(monkeypatch):
    monkeypatch.setattr(transformers.utils, "is_tf_available", lambda: False, raising=False)
    with pytest.raises(InputError, match=r"imported before train and does not see .* Import train first"):
        check_tensorflow_classes("x")


@pytest.mark.skipif(HAS_TF_CLASSES, reason="with TensorFlow classes the commands run")
def test_commands_refuse_an_albert_before_they_import_tensorflow(shards, tiny_start, tmp_path):
    for folder in (tmp_path / "start", tmp_path / "glue"):
        folder.mkdir()
    (tmp_path / "start" / "config.json").write_text(json.dumps(CONFIGS["albert"]), encoding="utf-8")
    tiny_tokenizer().save_pretrained(tmp_path / "start")
    for part in (tiny_start / "glue").rglob("*.tsv"):
        part_here = tmp_path / part.relative_to(tiny_start)
        part_here.parent.mkdir(exist_ok=True)
        part_here.write_bytes(part.read_bytes()[:40])  # of a few examples
    _empty(shards, tmp_path / "shards")
    model = ("--pretrained-model-config", str(tmp_path / "start"), "--config-overrides", "hidden_size=32")
    commands = [
        ("train.run_mlm", [*run_flags(tmp_path / "shards", tmp_path / "run"), *model, "--dry-run"]),
        ("train.run_mlm", [*run_flags(tmp_path / "shards", tmp_path / "run"), *model]),
        ("finetuning.run_classification", classification_flags(tmp_path, tmp_path / "run")),
    ]
    message = "model_type albert needs the TensorFlow classes of transformers 4"
    for answer in answers_of(commands):
        assert (answer.status, answer.has_tensorflow) == (EXIT_BAD_INPUT, False), answer.err
        assert message in answer.err.splitlines()[-1]
    with pytest.raises(InputError, match=message):  # of the doctor
        machine.check_run(config_of(*run_flags(tmp_path / "shards", tmp_path / "run"), *model))


def _empty(shards: Path, folder: Path) -> None:
    """Copy shards with zeros in place of all rows: who reads one fails."""
    for path in filter(Path.is_file, shards.rglob("*")):
        copy = folder / path.relative_to(shards)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(bytes(path.stat().st_size) if path.suffix == ".tfrecord" else path.read_bytes())
