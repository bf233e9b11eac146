import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlm_common.errors import InputError
from tests.fixtures.tiny_models import padded_batch, tiny_config, tiny_model, tiny_tokenizer
from train.model.from_pretrained import load_model
from train.model.pretrained_files import read_config
from train.publishing.pytorch_format import export_model


def test_what_pytorch_checkpoints_hold_besides_is_left_out(tmp_path):
    model = tiny_model("bert")
    export_model(model, tiny_tokenizer(), str(tmp_path), model_max_length=30)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {
        "bert.embeddings.position_ids": np.arange(32)[np.newaxis],
        "bert.pooler.dense.weight": np.zeros((32, 32), np.float32),
        "bert.pooler.dense.bias": np.zeros(32, np.float32),
        "cls.seq_relationship.weight": np.zeros((2, 32), np.float32),
        "cls.seq_relationship.bias": np.zeros(2, np.float32),
        "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"].copy(),
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"].copy(),
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    batch, _ = padded_batch(model)
    np.testing.assert_allclose(load_model(str(tmp_path))(batch).logits, model(batch).logits, atol=1e-6)


def test_weights_of_other_libraries_are_refused(tmp_path):
    tiny_config("roberta").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(InputError, match=r"pytorch_model\.bin need PyTorch"):
        load_model(str(tmp_path))
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(InputError, match=r"PyTorch's or TensorFlow's; .* mlx"):
        load_model(str(tmp_path))


def test_a_folder_without_a_configuration_is_no_model_whatever_its_name(tmp_path):
    """transformers takes its defaults for the architecture that a path contains."""
    folder = tmp_path / "roberta" / "my-bert"
    folder.mkdir(parents=True)
    with pytest.raises(InputError, match=r"my-bert cannot be read: it has no config\.json"):
        read_config(str(folder))
    (folder / "config.json").write_text('{"hidden_size": 24}', encoding="utf-8")
    config = read_config(str(folder))
    assert (config.model_type, config.hidden_size) == ("bert", 24)
    with pytest.raises(InputError, match="it has no model_type"):
        read_config(str(folder.rename(tmp_path / "roberta" / "my-model")))


@pytest.mark.parametrize(
    ("model_class", "labels", "expected"),
    [
        ("TFAutoModel", {}, []),
        ("TFAutoModelForSequenceClassification", {0: "x", 1: "y"}, ["are initialized randomly: "]),
    ],
)
def test_a_network_without_a_head_says_nothing_of_a_head(model_class, labels, expected, tmp_path, caplog):
    """As an encoder of embeddings, which takes no head from a model that fills masks."""
    export_model(tiny_model("roberta"), tiny_tokenizer(), str(tmp_path), model_max_length=30)
    with caplog.at_level(logging.INFO, "train.model.from_pretrained"):
        load_model(str(tmp_path), model_class, head_labels=labels)
    messages = [record.getMessage() for record in caplog.records if record.name == "train.model.from_pretrained"]
    assert len(messages) == len(expected)
    assert all(words in message for words, message in zip(expected, messages, strict=True))
