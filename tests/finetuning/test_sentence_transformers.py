"""Models of sentence-transformers: their settings and modules are followed, or refused by name.

Vectors are compared with a direct computation from the states of the network; tests/finetuning/
test_beside_sentence_transformers.py compares them with those of the library.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

from finetuning.search import main
from finetuning.tasks.vectors import TextEncoder
from tests.fixtures.module_forms import FORMS, HIDDEN, LINEAR, TEXTS, write_form, write_plain
from tests.fixtures.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("eagerly")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model")


@functools.cache
def load_transformer(plain: Path) -> Any:
    from train.model.from_pretrained import load_model

    return load_model(str(plain), "TFAutoModel")


def direct_vectors(form: str, plain: Path, prompt: str) -> np.ndarray:
    """Compute the vectors of `TEXTS`, one after the other, by the rules of each module."""
    of, tokenizer, network = FORMS[form], tiny_tokenizer(), load_transformer(plain)
    limits = [of.get("max_seq_length"), *([of.get("model_max_length", 24), 32] if "max_seq_length" not in of else [])]
    length = min(limit for limit in limits if limit is not None)
    vectors = []
    for text in TEXTS:
        whole = (prompt + text).lower() if of.get("do_lower_case") else prompt + text
        ids = tokenizer(whole, truncation=True, max_length=length)["input_ids"]
        states = network({"input_ids": tf.constant([ids])}).last_hidden_state.numpy()[0].astype(np.float64)
        num_prompt = 0
        if not of.get("include_prompt", True) and prompt:
            num_prompt = len(tokenizer(prompt, truncation=True, max_length=length)["input_ids"]) - 1
        positions, states = np.arange(1, len(ids) + 1)[num_prompt:, np.newaxis], states[num_prompt:]
        pools = {
            "cls": states[0],
            "max": states.max(axis=0),
            "mean": states.mean(axis=0),
            "mean_sqrt_len_tokens": states.sum(axis=0) / np.sqrt(len(states)),
            "weightedmean": (states * positions).sum(axis=0) / positions.sum(),
            "lasttoken": states[-1],
        }
        vector = np.concatenate([pools[mode] for mode in of.get("poolings", ["mean"])])
        for layer in of.get("layers", []):
            if layer == "Normalize":
                vector = vector / np.linalg.norm(vector)
            elif layer != "Dropout":
                weight, bias = LINEAR[len(vector)]
                vector = weight @ vector + (bias if layer != "without bias" else 0)
                vector = np.tanh(vector) if layer in ("Tanh", "by default") else vector
                vector = np.maximum(vector, 0) if layer == "ReLU" else vector
        vectors.append(vector[: of.get("truncate_dim")])
    return np.array(vectors)


# Loading a network takes a second; all forms are compared with the library's.
QUICK = (
    *("two poolings", "length of the tokenizer", "lower case", "own Dense layer", "transformer in a folder"),
    "prompt not pooled",
)


@pytest.mark.parametrize("form", QUICK)
def test_vectors_are_those_of_the_modules(form, plain, tmp_path):
    folder = write_form(plain, tmp_path / "model", form)
    encoder = TextEncoder.open(str(folder))
    query, passage = FORMS[form].get("expected_prompts", ("", ""))
    assert encoder.model.prompts == (query, passage)
    for prompt in {query, passage}:
        np.testing.assert_allclose(
            encoder.encode(TEXTS, prompt, 2), direct_vectors(form, plain, prompt), atol=1e-5, rtol=1e-5
        )


def test_the_command_writes_these_vectors_and_compares_them_as_the_model_says(plain, tmp_path, run):
    texts = [text for text in TEXTS if text]
    (tmp_path / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")
    printed = {}
    for form in ("dot product", "no normalization"):
        folder = write_form(plain, tmp_path / form, form)
        flags = ("--model", folder, "--corpus", tmp_path / "corpus.txt", "--vectors-dir", tmp_path / f"{form}.vectors")
        outcome = run(main, *flags, "the name")
        assert outcome.status == 0, outcome.err
        printed[form] = [float(line.split()[0]) for line in outcome.out.splitlines()[1:]]
        vectors = np.load(tmp_path / f"{form}.vectors" / "vectors-00000.npy")
        np.testing.assert_allclose(vectors, direct_vectors(form, plain, "")[: len(texts)], atol=1e-5)
        query = TextEncoder.open(str(folder)).encode(["the name"], "", 1)
        expected = vectors @ query[0]
        if form == "no normalization":
            expected /= np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
        np.testing.assert_allclose(printed[form], np.sort(expected)[::-1], atol=1e-4)
    assert printed["dot product"] != printed["no normalization"]


# (file, its new content or the change of its object, what the error names)
REFUSED = [
    ("modules.json", [{"type": "sentence_transformers.models.CNN", "path": ""}], "sentence_transformers.models.CNN"),
    ("modules.json", [{"type": "sentence_transformers.models.Transformer", "path": ""}], "start with Transformer and"),
    ("config_sentence_transformers.json", {"similarity_fn_name": "euclidean"}, "similarity_fn_name of"),
    ("config_sentence_transformers.json", {"new_setting": 3}, "new_setting in config_sentence_transformers.json of"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task in sentence_bert_config.json"),
    ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling_mode of"),
    ("1_Pooling/config.json", {"pooling_mode_new_tokens": True}, "pooling_mode_new_tokens in 1_Pooling/config.json"),
    ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.PReLU"}, "in 2_Dense/config.json"),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name in 2_Dense/config.json"),
    ("1_Pooling/config.json", "{", "1_Pooling/config.json must be a JSON file"),
    ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "the pooling cls and mean; it takes"),
    ("modules.json", "{}", "modules.json must be a JSON file; it does not hold a list"),
    ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length of"),
]


@pytest.mark.parametrize(("file", "change", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(file, change, message, plain, tmp_path, run):
    folder = write_form(plain, tmp_path / "model", "own Dense layer")
    if isinstance(change, dict):
        path = folder / file
        change = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | change
    (folder / file).write_text(change if isinstance(change, str) else json.dumps(change), encoding="utf-8")
    (tmp_path / "corpus.txt").write_text("a\n", encoding="utf-8")
    refused = run(main, "--model", folder, "--corpus", tmp_path / "corpus.txt").refusal
    assert message in refused


def test_weights_of_a_dense_layer_must_be_readable(plain, tmp_path, run):
    folder = write_form(plain, tmp_path / "model", "own Dense layer")
    (tmp_path / "corpus.txt").write_text("a\n", encoding="utf-8")
    flags = ("--model", folder, "--corpus", tmp_path / "corpus.txt")
    save_file({"other": np.zeros(HIDDEN, np.float32)}, folder / "2_Dense" / "model.safetensors")
    assert (
        "2_Dense/model.safetensors must be a safetensors file; it has no 'linear.weight'" in run(main, *flags).refusal
    )
    shutil.move(folder / "2_Dense" / "model.safetensors", folder / "2_Dense" / "pytorch_model.bin")
    assert "the weights of 2_Dense of" in run(main, *flags).refusal
