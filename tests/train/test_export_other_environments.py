"""What the stages make, read in environments with transformers 4 and 5, PyTorch and no TensorFlow."""

import functools
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.arrays import logits_of
from tests.fixtures.generated_text import generated_lines
from tests.fixtures.other_environments import output_of
from tests.fixtures.read_in_pytorch import read_in_pytorch, write_expected
from tests.fixtures.tiny_models import CONFIGS, VOCABULARY, padded_batch, tiny_model, tiny_tokenizer
from tokenizer_training.train_unigram import main
from train.publishing.pytorch_format import export_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
SENTENCES = ["a function returns the [MASK] of a file", "the [MASK]", "Text, with ünknown signs in 3 [MASK]."]
MODEL_MAX_LENGTH = 60
HEADS = ("SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering")
# Whose heads stand on what differs: a pooler, on nothing, on another width, on stacked layers.
MODELS_WITH_HEADS = ("albert", "bert", "distilbert", "mobilebert", "roberta")

# Prints what a tokenizer makes of texts and pairs of them, and which of its tokens are special.
TEXT_READER = """
import json, sys
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.loads(sys.argv[2])
ids = [tokenizer(text)["input_ids"] for text in texts]
print(json.dumps({
    "length": len(tokenizer),
    "ids": ids,
    "alone": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
    "pairs": dict(tokenizer(texts, texts[::-1], padding=True, truncation=True, max_length=40)),
    "decoded": [tokenizer.decode(row) for row in ids],
    "decoded_text": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
    "special": {name: getattr(tokenizer, name + "_token_id") for name in sys.argv[3].split()},
    "all_special": sorted(tokenizer.all_special_ids),
}))
"""
TEXTS = [
    "", " ", "kira dorna", "  Kira\tdorna\r\n\n", "kira [MASK]. [MASK]dorna[ENT]x [ENT] <pad>[SEP]", "[ENT][ENT][MASK]",
    "<0x41> <unused0> <unk>", "``so'' it's 2010, \uff21\uff22 \ufb01 e\u0301 \u00bd", "天地玄黃、カーン。한국어",
    "\U0001f469\u200d\U0001f469\U0001f600 \ufe0f", "▁▁a\ufeffb\x00c\x85d\xa0e\u2028f", "▅\u2047\ufffd\ufffe",
    "kira" * 50, "\u0301\u0327\u0301a \u0627\u0644\u0633 \u0939\u093f\u0928",
]  # fmt: skip
SPECIAL_IDS = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4, "bos": 0, "eos": 2}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A folder of exports of all architectures, each with TensorFlow's logits; and the ids of the sentences."""
    root = tmp_path_factory.mktemp("exports")
    tokenizer = tiny_tokenizer()
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="np")
    sentences = {name: encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask")}
    for name in CONFIGS:
        # An epsilon that is far from the defaults shows where a class does not read its configuration's.
        epsilon = "norm_eps" if "modernbert" in name else "layer_norm_eps"
        model = tiny_model(name, max_position_embeddings=MODEL_MAX_LENGTH + 2, **{epsilon: 0.05})
        random_batch, _ = padded_batch(model)
        folder = root / name.replace(" ", "_")
        export_model(model, tokenizer, str(folder), model_max_length=MODEL_MAX_LENGTH)
        expected = {"AutoModelForMaskedLM": lambda batch, model=model: logits_of(model(batch))}
        write_expected(folder, {"random": random_batch, "sentences": sentences}, expected)
    return root, encoded["input_ids"].tolist()


@pytest.fixture(scope="module")
def read_by(tmp_path_factory):
    """A function from an interpreter to what it makes of `TEXTS` by a trained tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_text("\n".join([*generated_lines(1000), "[ENT] 天地 [ENT]"]), encoding="utf-8")
    flags = ["--data-files", str(folder / "corpus.txt"), "--output-dir", str(folder / "out"), "--vocab-size", "600"]
    assert main([*flags, "--extra-special-tokens", "[ENT]", "--pad-vocab-to-multiple-of", "128"]) == 0
    arguments = (TEXT_READER, str(folder / "out"), json.dumps(TEXTS), " ".join(SPECIAL_IDS))
    return functools.cache(lambda interpreter: json.loads(output_of(interpreter, *arguments)))


def test_transformers_reads_a_trained_tokenizer_as_it_was_made(python, read_by):
    here, there = read_by(Path(sys.executable)), read_by(python)
    assert there["length"] == 640
    assert there["special"] == SPECIAL_IDS
    assert there["all_special"] == [0, 1, 2, 3, 4, 5]
    assert [ids.count(5) for ids in there["ids"]] == [text.count("[ENT]") for text in TEXTS]
    assert there == here


def test_transformers_on_torch_reads_every_export(python, exports):
    root, expected_ids = exports
    results = read_in_pytorch(python, root, SENTENCES)
    assert {result["folder"] for result in results} == {name.replace(" ", "_") for name in CONFIGS}
    expected = {"dtype": "torch.float32", "wrong_keys": {}, "ids": expected_ids, "max_length": MODEL_MAX_LENGTH}
    for result in results:
        assert result["class"].endswith("ForMaskedLM"), result
        assert {name: result[name] for name in expected} == expected, result
        assert result["difference"] < TOLERANCE, result


def write_head(folder: Path, name: str, head: str, lengths: tuple[int, ...], **changes: Any) -> None:
    """Export a model with that head, with TensorFlow's outputs for rows of each of these lengths, some padded."""
    model = tiny_model(name, f"TFAutoModelFor{head}", **changes)
    export_model(model, tiny_tokenizer(), str(folder), model_max_length=max(lengths))
    batches = {}
    for length in lengths:
        attended = np.arange(length) < np.array([[length], [length // 2], [length - 7]])
        if head == "MultipleChoice":  # three choices of one row
            attended = attended[np.newaxis]
        ids = np.where(attended, np.random.default_rng(length).integers(5, VOCABULARY, attended.shape), 1)
        batches[str(length)] = {"input_ids": ids.astype(np.int32), "attention_mask": attended.astype(np.int32)}
    attentions = ("sdpa", "eager") if name == "modernbert" else (None,)
    write_expected(folder, batches, {f"AutoModelFor{head}": lambda batch: logits_of(model(batch))}, attentions)


@pytest.fixture(scope="module")
def long_modernberts(tmp_path_factory) -> Path:
    """A folder of exports of ModernBERTs with each head, all on rows longer than the window."""
    root = tmp_path_factory.mktemp("modernberts")
    for head in ("MaskedLM", *HEADS):
        layers = {"local_attention": 128, "num_hidden_layers": 3, "global_attn_every_n_layers": 3}
        lengths = (300, 1024) if head == "MaskedLM" else (300,)
        write_head(root / head, "modernbert", head, lengths, **layers, num_labels=2, classifier_pooling="mean")
    return root


def test_rows_of_a_modernbert_that_are_longer_than_its_window(python, long_modernberts):
    results = read_in_pytorch(python, long_modernberts)
    assert len(results) == 2 * (1 + len(HEADS))
    assert all(result["wrong_keys"] == {} and result["difference"] < 1e-5 for result in results)


@pytest.fixture(scope="module")
def exports_with_heads(tmp_path_factory) -> Path:
    """A folder of exports of models of one layer with each of the heads of fine-tuning."""
    root = tmp_path_factory.mktemp("heads")
    for name, head in product(MODELS_WITH_HEADS, HEADS):
        one_layer = {"n_layers" if "n_layers" in CONFIGS[name] else "num_hidden_layers": 1}
        num_labels = 2 if head == "QuestionAnswering" else 3
        write_head(root / f"{name}-{head}", name, head, (12, 30), num_labels=num_labels, **one_layer)
    return root


def test_transformers_on_torch_reads_heads_of_fine_tuning(python, exports_with_heads):
    results = read_in_pytorch(python, exports_with_heads)
    assert len(results) == len(MODELS_WITH_HEADS) * len(HEADS)
    assert all(result["wrong_keys"] == {} and result["difference"] < 1e-5 for result in results)
