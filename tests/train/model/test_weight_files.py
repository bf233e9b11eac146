from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tf_keras
import transformers

from mlm_common.errors import InputError
from tests.fixtures.arrays import assert_same_arrays
from tests.fixtures.tiny_models import (
    each_architecture,
    of_transformers_4,
    one_layer_model,
    padded_batch,
    tiny_config,
    tiny_model,
)
from train.model import weight_files
from train.model.from_pretrained import load_model
from train.model.weight_files import write_h5
from train.publishing.pytorch_format import pytorch_weights, take_snapshot


def write(model: Any, folder: Path) -> str:
    model.config.save_pretrained(folder)
    write_h5(folder / "tf_model.h5", take_snapshot(model).arrays)
    return str(folder)


def model_of_transformers(name: str, model_class: str) -> Any:
    tf_keras.utils.set_random_seed(0)
    model = getattr(transformers, model_class).from_config(tiny_config(name))
    model(model.dummy_inputs)
    return model


def values(model: Any) -> dict[str, np.ndarray]:
    return {variable.name: variable.numpy() for variable in model.weights}


def assert_opened_by_transformers(folder: str, model: Any, model_class: str) -> None:
    opened, loading_info = getattr(transformers, model_class).from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values())
    named = {name.replace(opened.name, model.name, 1): array for name, array in values(opened).items()}
    assert_same_arrays(named, values(model))


@of_transformers_4
@pytest.mark.parametrize("name", each_architecture())
def test_transformers_4_opens_the_h5_that_is_written_and_so_do_we(name, tmp_path):
    model_class = "TFAutoModelForPreTraining" if name in ("bert", "albert", "mobilebert") else "TFAutoModelForMaskedLM"
    model = one_layer_model(name, model_class=model_class)
    folder = write(model, tmp_path)
    if name != "modernbert":  # of which transformers has no TF class
        assert_opened_by_transformers(folder, model, model_class)
    assert_same_arrays(pytorch_weights(load_model(folder, model_class)), pytorch_weights(model))


@of_transformers_4
def test_more_names_than_an_attribute_of_h5_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "MAX_ATTRIBUTE_BYTES", 500)
    model = tiny_model("bert")
    folder = write(model, tmp_path)
    with h5py.File(tmp_path / "tf_model.h5") as file:
        assert {"weight_names0", "weight_names1"} <= set(file["bert"].attrs)
    assert_opened_by_transformers(folder, model, "TFAutoModelForMaskedLM")


@of_transformers_4
@pytest.mark.parametrize(("name", "in_safetensors"), [("roberta", True), ("deberta-v2 as v3", False)])
def test_weights_that_tensorflow_wrote_are_read(name, in_safetensors, tmp_path):
    source = model_of_transformers(name, "TFAutoModelForMaskedLM")
    source.save_pretrained(tmp_path, safe_serialization=in_safetensors)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"config.json", "model.safetensors" if in_safetensors else "tf_model.h5"}
    batch, _ = padded_batch(source)
    np.testing.assert_allclose(load_model(str(tmp_path))(batch).logits, source(batch).logits, atol=1e-6)


@of_transformers_4
def test_the_h5_of_a_model_with_another_head_besides_is_read(tmp_path):
    source = model_of_transformers("bert", "TFAutoModelForPreTraining")
    source.save_pretrained(tmp_path)
    theirs = pytorch_weights(source)
    besides = {name for name in theirs if "pooler" in name or "seq_relationship" in name}
    assert len(besides) == 4
    expected = {name: array for name, array in theirs.items() if name not in besides}
    assert_same_arrays(pytorch_weights(load_model(str(tmp_path))), expected)


@of_transformers_4
def test_weights_of_tensorflow_without_a_head_are_refused(tmp_path):
    model_of_transformers("bert", "TFAutoModel").save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(InputError, match=r"must be those of a BertForMaskedLM; .* missing: cls\.predictions\."):
        load_model(str(tmp_path))


@of_transformers_4
def test_the_h5_of_transformers_in_shards_is_read(tmp_path):
    model = model_of_transformers("roberta", "TFAutoModelForMaskedLM")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("tf_model-*.h5"))
    assert len(shards) > 1
    assert_same_arrays(pytorch_weights(load_model(str(tmp_path))), pytorch_weights(model))
    shards[-1].unlink()
    with pytest.raises(InputError, match=rf"lacks {shards[-1].name}, which its tf_model\.h5\.index\.json names"):
        load_model(str(tmp_path))
    (tmp_path / "tf_model.h5.index.json").write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match="must be an index of h5 files"):
        load_model(str(tmp_path))


def test_the_h5_of_another_program_is_refused(tmp_path):
    tiny_model("roberta").config.save_pretrained(tmp_path)
    with h5py.File(tmp_path / "tf_model.h5", "w") as file:
        file["dense"] = np.zeros(3)
    with pytest.raises(InputError, match=r"are missing: roberta\..*; unexpected: dense$"):
        load_model(str(tmp_path))
    (tmp_path / "tf_model.h5").write_bytes(b"no h5")
    with pytest.raises(InputError, match="must be weights of TensorFlow's h5 format"):
        load_model(str(tmp_path))
