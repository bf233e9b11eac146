import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.tensorflow
import tensorflow as tf
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlm_common.errors import InputError
from tests.fixtures.arrays import assert_all_close, assert_same_arrays, logits_of
from tests.fixtures.results import read_json
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_models import CONFIGS, SAME_CODE, one_layer_model, padded_batch, tiny_model, tiny_tokenizer
from train.model.architectures import ARCHITECTURES
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model, pytorch_weights

EXPORTED_FILES = ["config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json"]


@pytest.fixture(scope="module")
def bert_export(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert_export")
    export_model(tiny_model("bert"), tiny_tokenizer(), str(folder), model_max_length=30)
    return folder


def changed_copy(export: Path, folder: Path, weights: dict[str, np.ndarray]) -> str:
    folder.mkdir()
    (folder / "config.json").write_bytes((export / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


# `tests/train/model/test_build.py` has one of each architecture.
@pytest.mark.parametrize("name", ["roberta", *(name for name in CONFIGS if name not in (*ARCHITECTURES, *SAME_CODE))])
def test_an_export_loads_again_with_the_same_logits(name, tmp_path):
    model = tiny_model(name)
    export_model(model, tiny_tokenizer(), str(tmp_path), model_max_length=30)
    inputs, _ = padded_batch(model)
    loaded = load_model(str(tmp_path))
    assert type(loaded) is type(model)
    np.testing.assert_allclose(loaded(inputs).logits, model(inputs).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "head"),
    [("albert", "SequenceClassification"), ("mobilebert", "QuestionAnswering"), ("roberta", "TokenClassification")],
)
def test_a_model_with_another_head_is_exported_and_loads_again(name, head, tmp_path):
    model_class = f"TFAutoModelFor{head}"
    model = one_layer_model(name, model_class=model_class, num_labels=2)
    export_model(model, tiny_tokenizer(), str(tmp_path), model_max_length=30)
    assert read_json(tmp_path / "config.json")["architectures"][0].endswith(f"For{head}")
    assert not [weight for weight in load_file(tmp_path / "model.safetensors") if "predictions" in weight]
    inputs, _ = padded_batch(model)
    loaded = load_model(str(tmp_path), model_class)
    assert type(loaded) is type(model)
    assert_all_close(logits_of(loaded(inputs)), logits_of(model(inputs)), atol=1e-6)
    with pytest.raises(InputError, match=r"must be those of a \w+ForMaskedLM; .* missing"):
        load_model(str(tmp_path))


def test_a_pooler_that_one_class_of_pytorch_has_is_exported_for_that_one(tmp_path):
    for head in ("MultipleChoice", "SequenceClassification"):
        model_class = f"TFAutoModelFor{head}"
        model = one_layer_model("mpnet", model_class=model_class)
        export_model(model, tiny_tokenizer(), str(tmp_path / head), model_max_length=30)
        weights = load_file(tmp_path / head / "model.safetensors")
        assert ("mpnet.pooler.dense.weight" in weights) == (head == "MultipleChoice")
        assert_same_arrays(pytorch_weights(load_model(str(tmp_path / head), model_class)), weights)


def test_the_files_are_those_of_a_pytorch_model(tmp_path):
    folder = tmp_path / "new" / "export"
    model, tokenizer = tiny_model("roberta"), tiny_tokenizer()
    before = model.config.to_dict(), tokenizer.model_max_length, tokenizer.model_input_names
    export_model(model, tokenizer, str(folder), model_max_length=30)
    assert (model.config.to_dict(), tokenizer.model_max_length, tokenizer.model_input_names) == before
    assert sorted(path.name for path in folder.iterdir()) == sorted([*EXPORTED_FILES, "tokenizer_config.json"])
    config = read_json(folder / "config.json")
    assert (config["architectures"], config["dtype"]) == (["RobertaForMaskedLM"], "float32")
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # PyTorch's classes of transformers 4 require it
    weights = load_file(folder / "model.safetensors")
    # PyTorch reads all of them in test_other_environments.py.
    names = ("roberta.embeddings.LayerNorm.weight", "roberta.encoder.layer.1.attention.self.key.bias", "lm_head.bias")
    assert weights.keys() >= set(names)
    assert len(weights) == 5 + 2 * 16 + 5
    assert {array.dtype.name for array in weights.values()} == {"float32"}
    # PyTorch's dense layers are (out, in).
    assert weights["roberta.encoder.layer.0.intermediate.dense.weight"].shape == (64, 32)
    kernel = model.encoder.layer[0].expansion.kernel.numpy()
    np.testing.assert_array_equal(weights["roberta.encoder.layer.0.intermediate.dense.weight"], kernel.T)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("bert", ["input_ids", "token_type_ids", "attention_mask"]), ("roberta", ["input_ids", "attention_mask"])],
)
def test_the_tokenizer_keeps_its_ids_and_gets_the_limit_of_the_model(name, inputs, tmp_path):
    tokenizer = tiny_tokenizer()
    text = "a function returns the [MASK] of ünknown text"
    expected = tokenizer(text)["input_ids"]
    tokenizer(["a", text], padding="max_length", truncation=True, max_length=5)  # leaves its mark on the backend
    export_model(tiny_model(name), tokenizer, str(tmp_path), model_max_length=7)

    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert type(exported) is PreTrainedTokenizerFast
    assert read_json(tmp_path / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert list(exported(text)) == inputs
    assert exported(text)["input_ids"] == expected
    assert exported(text, truncation=True)["input_ids"] == [*expected[:6], tokenizer.sep_token_id]
    assert exported.mask_token_id == 4
    assert exported.convert_ids_to_tokens(exported("the [MASK]")["input_ids"]) == ["[CLS]", "▁the", "[MASK]", "[SEP]"]


def test_an_export_that_fails_leaves_the_earlier_one_as_it_was(bert_export):
    before = contents(bert_export)
    model = tiny_model("bert")
    model.trainable_variables[0].assign_add(tf.ones_like(model.trainable_variables[0]))
    with pytest.raises(AttributeError):
        export_model(model, None, str(bert_export), model_max_length=30)
    assert contents(bert_export) == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cls.predictions.bias", None, "missing: cls.predictions.bias"),
        ("extra", np.zeros(3, np.float32), "unexpected: extra"),
        ("cls.predictions.bias", np.zeros(7, np.float32), r"wrong shape: cls.predictions.bias \(7,\), not \(200,\)$"),
    ],
)
def test_weights_of_another_model_are_refused(name, change, message, bert_export, tmp_path):
    weights = load_file(bert_export / "model.safetensors") | {name: change}
    weights = {key: array for key, array in weights.items() if array is not None}
    with pytest.raises(InputError, match=message):
        load_model(changed_copy(bert_export, tmp_path / "changed", weights))


HEAD_BIASES = {name: architecture.head_bias for name, architecture in ARCHITECTURES.items() if architecture.head_bias}


@pytest.mark.parametrize(("name", "used"), HEAD_BIASES.items())
def test_the_bias_of_the_head_has_the_name_in_pytorch(name, used, tmp_path):
    export_model(one_layer_model(name), tiny_tokenizer(), str(tmp_path / "export"), model_max_length=30)
    weights = load_file(tmp_path / "export" / "model.safetensors")
    np.testing.assert_array_equal(weights[used[0]], weights[used[1]])
    weights[used[1]] += 1
    changed = load_model(changed_copy(tmp_path / "export", tmp_path / "changed", weights))
    np.testing.assert_array_equal(pytorch_weights(changed)[used[0]], weights[used[0]])


def test_sharded_checkpoints_in_half_precision_load(bert_export, tmp_path):
    (tmp_path / "config.json").write_bytes((bert_export / "config.json").read_bytes())
    weights = sorted(load_file(bert_export / "model.safetensors").items())
    weight_map = {}
    for index in range(2):
        shard = {name: tf.cast(array, tf.bfloat16) for name, array in weights[index::2]}
        file_name = f"model-0000{index + 1}-of-00002.safetensors"
        safetensors.tensorflow.save_file(shard, str(tmp_path / file_name))
        weight_map |= dict.fromkeys(shard, file_name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")

    rounded = {name: tf.cast(array, tf.bfloat16).numpy().astype(np.float32) for name, array in weights}
    assert_same_arrays(pytorch_weights(load_model(str(tmp_path))), rounded)

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks model-00002-of-00002.safetensors"):
        load_model(str(tmp_path))


def test_a_setting_that_another_one_stands_for_is_written_out(tmp_path):
    model = tiny_model("modernbert without biases", global_rope_theta=5000.0)
    assert model.config.local_rope_theta is None
    export_model(model, tiny_tokenizer(), str(tmp_path), model_max_length=16)
    assert read_json(tmp_path / "config.json")["local_rope_theta"] == 5000.0
    assert model.config.local_rope_theta is None
