"""Weights with the names and shapes of published checkpoints, in tiny sizes, are read with nothing missing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlm_common.errors import InputError
from tests.fixtures.arrays import assert_same_arrays
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import pytorch_weights

VOCABULARY, WIDTH, INNER, LAYERS, POSITIONS, TABLE_WIDTH = 50, 16, 24, 2, 20, 12
Shapes = dict[str, tuple[int, ...]]


def dense(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int = WIDTH, *, old: bool = False) -> Shapes:
    scale, shift = ("gamma", "beta") if old else ("weight", "bias")
    return {f"{name}.{scale}": (width,), f"{name}.{shift}": (width,)}


def bert_like(prefix: str, *, types: int = 2, width: int = WIDTH, old: bool = False) -> Shapes:
    """List the weights of an encoder; `prefix` ends with a point, or is empty."""
    shapes: Shapes = {
        f"{prefix}embeddings.word_embeddings.weight": (VOCABULARY, width),
        f"{prefix}embeddings.position_embeddings.weight": (POSITIONS, width),
        f"{prefix}embeddings.token_type_embeddings.weight": (types, width),
        **norm(f"{prefix}embeddings.LayerNorm", width, old=old),
    }
    if width != WIDTH:
        shapes |= dense(f"{prefix}embeddings_project", width, WIDTH)
    for index in range(LAYERS):
        layer = f"{prefix}encoder.layer.{index}."
        for part in ("query", "key", "value"):
            shapes |= dense(f"{layer}attention.self.{part}", WIDTH, WIDTH)
        shapes |= dense(f"{layer}attention.output.dense", WIDTH, WIDTH)
        shapes |= norm(f"{layer}attention.output.LayerNorm", old=old)
        shapes |= dense(f"{layer}intermediate.dense", WIDTH, INNER) | dense(f"{layer}output.dense", INNER, WIDTH)
        shapes |= norm(f"{layer}output.LayerNorm", old=old)
    return shapes


def lm_head() -> Shapes:
    return {"lm_head.bias": (VOCABULARY,), **dense("lm_head.dense", WIDTH, WIDTH), **norm("lm_head.layer_norm")}


def modernbert() -> Shapes:
    shapes: Shapes = {
        "model.embeddings.tok_embeddings.weight": (VOCABULARY, WIDTH),
        "model.embeddings.norm.weight": (WIDTH,),
        "model.final_norm.weight": (WIDTH,),
        "head.dense.weight": (WIDTH, WIDTH),
        "head.norm.weight": (WIDTH,),
        "decoder.bias": (VOCABULARY,),
        "decoder.weight": (VOCABULARY, WIDTH),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}attn_norm.weight": (WIDTH,)} if index else {}  # the first has that of the embeddings
        shapes |= {
            f"{layer}attn.Wqkv.weight": (3 * WIDTH, WIDTH),
            f"{layer}attn.Wo.weight": (WIDTH, WIDTH),
            f"{layer}mlp_norm.weight": (WIDTH,),
            f"{layer}mlp.Wi.weight": (2 * INNER, WIDTH),
            f"{layer}mlp.Wo.weight": (WIDTH, INNER),
        }
    return shapes


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5}
POOLER, TABLE = dense("pooler.dense", WIDTH, WIDTH), (VOCABULARY, WIDTH)
# {name on the Hub: (settings, shapes of what is read, shapes of what is left out)}.
LAYOUTS: dict[str, tuple[dict[str, Any], Shapes, Shapes]] = {
    "bert-base-uncased": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "type_vocab_size": 2, "pad_token_id": 0},
        bert_like("bert.", old=True)
        | {"cls.predictions.bias": (VOCABULARY,)}
        | dense("cls.predictions.transform.dense", WIDTH, WIDTH)
        | norm("cls.predictions.transform.LayerNorm", old=True),
        {f"bert.{name}": shape for name, shape in POOLER.items()}
        | {"cls.predictions.decoder.weight": TABLE, "bert.embeddings.position_ids": (1, POSITIONS)}
        | dense("cls.seq_relationship", WIDTH, 2),
    ),
    "roberta-base": (
        {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **ROBERTA},
        bert_like("roberta.", types=1) | lm_head(),
        {f"roberta.{name}": shape for name, shape in POOLER.items()}
        | {"roberta.embeddings.position_ids": (1, POSITIONS)},
    ),
    "xlm-roberta-base": (
        {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"], **ROBERTA},
        bert_like("roberta.", types=1) | lm_head(),
        {f"roberta.{name}": shape for name, shape in POOLER.items()}
        | {"roberta.embeddings.position_ids": (1, POSITIONS)}
        | {"lm_head.decoder.weight": TABLE, "lm_head.decoder.bias": (VOCABULARY,)},
    ),
    "google/electra-base-generator": (
        {"model_type": "electra", "architectures": ["ElectraForMaskedLM"], "embedding_size": TABLE_WIDTH},
        bert_like("electra.", width=TABLE_WIDTH)
        | dense("generator_predictions.dense", WIDTH, TABLE_WIDTH)
        | norm("generator_predictions.LayerNorm", TABLE_WIDTH)
        | {"generator_lm_head.bias": (VOCABULARY,)},
        {"generator_lm_head.weight": (VOCABULARY, TABLE_WIDTH), "electra.embeddings.position_ids": (1, POSITIONS)},
    ),
    "google/electra-base-discriminator": (
        {"model_type": "electra", "architectures": ["ElectraForPreTraining"], "embedding_size": WIDTH},
        bert_like("electra.")
        | dense("discriminator_predictions.dense", WIDTH, WIDTH)
        | dense("discriminator_predictions.dense_prediction", WIDTH, 1),
        {"electra.embeddings.position_ids": (1, POSITIONS)},
    ),
    "answerdotai/ModernBERT-base": (
        {
            "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "local_attention": 8,
            "global_attn_every_n_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "cls_token_id": 1, "sep_token_id": 2,
        },
        modernbert(),
        {},
    ),
    "sentence-transformers/all-MiniLM-L6-v2": (
        {"model_type": "bert", "architectures": ["BertModel"], "type_vocab_size": 2, "pad_token_id": 0},
        bert_like("") | POOLER,
        {"embeddings.position_ids": (1, POSITIONS)},
    ),
}  # fmt: skip
MODEL_CLASSES = {"ForMaskedLM": "TFAutoModelForMaskedLM", "PreTraining": "TFAutoModelForPreTraining"}


def write(name: str, folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Write made-up weights; return the auto class that reads them, and the weights."""
    settings, read, left_out = LAYOUTS[name]
    random = np.random.default_rng(0)
    weights = {
        weight_name: random.normal(size=shape).astype(np.float32) for weight_name, shape in (read | left_out).items()
    }
    weights |= {
        weight_name: np.arange(POSITIONS)[np.newaxis] for weight_name in weights if weight_name.endswith("position_ids")
    }
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SIZES | settings), encoding="utf-8")
    ending = settings["architectures"][0]
    return next((MODEL_CLASSES[suffix] for suffix in MODEL_CLASSES if ending.endswith(suffix)), "TFAutoModel"), weights


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_weights_of_a_published_layout_are_read_with_nothing_missing(name, tmp_path):
    model_class, weights = write(name, tmp_path)
    read = {weight_name: weights[weight_name] for weight_name in LAYOUTS[name][1] if weight_name != "decoder.weight"}
    names = {weight_name: weight_name.replace("gamma", "weight").replace("beta", "bias") for weight_name in read}
    prefix = "bert." if name.startswith("sentence-transformers") else ""
    expected = {prefix + names[weight_name]: array for weight_name, array in read.items()}
    assert_same_arrays(pytorch_weights(load_model(str(tmp_path), model_class)), expected)


@pytest.mark.parametrize("name", ["bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"])
def test_layers_of_the_encoder_that_a_checkpoint_lacks_or_has_beyond_are_refused_whatever_the_head(name, tmp_path):
    model_class, _ = write(name, tmp_path)
    for num_layers, problem in ((LAYERS + 1, "missing"), (LAYERS - 1, "unexpected")):
        settings = SIZES | LAYOUTS[name][0] | {"num_hidden_layers": num_layers}
        (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        for head in (model_class, "TFAutoModelForSequenceClassification"):
            with pytest.raises(InputError, match=rf"are {problem}: bert\.encoder\.layer\."):
                load_model(str(tmp_path), head, head_labels={0: "a", 1: "b"})


def test_the_head_of_a_classifier_is_read_beside_one_for_masked_tokens(tmp_path):
    _, weights = write("bert-base-uncased", tmp_path)
    weights |= {"classifier.weight": np.ones((2, WIDTH), np.float32), "classifier.bias": np.ones(2, np.float32)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(tmp_path), "TFAutoModelForSequenceClassification")
    np.testing.assert_array_equal(pytorch_weights(model)["classifier.weight"], weights["classifier.weight"])
