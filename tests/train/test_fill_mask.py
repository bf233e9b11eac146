import json
import shutil
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import VOCABULARY, one_layer_model, tiny_tokenizer
from train.fill_mask import fill_masks
from train.publishing.pytorch_format import export_model

SENTENCE = "a function returns the [MASK] of a file"


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> str:
    """A model whose head's bias alone decides: `▁list` before `▁value` before the rest."""
    tokenizer = tiny_tokenizer()
    model = one_layer_model("roberta", max_position_embeddings=62)
    bias = model.bias.numpy()
    bias[tokenizer.convert_tokens_to_ids(["▁list", "▁value"])] = 60.0, 40.0
    model.bias.assign(bias)
    folder = tmp_path_factory.mktemp("export")
    export_model(model, tokenizer, str(folder), model_max_length=60)
    return str(folder)


def test_the_likeliest_tokens_come_first(export):
    predictions = fill_masks(export, [SENTENCE, "[MASK] is text"], top_k=3)
    for filled in predictions:
        assert [candidate["token_str"] for candidate in filled[:2]] == ["list", "value"]
        assert len(filled) == 3
        assert filled == sorted(filled, key=lambda candidate: -candidate["score"])
    assert predictions[0][0]["sequence"] == "a function returns the list of a file"


def test_a_mask_token_of_another_look_is_filled(export, tmp_path):
    for path in Path(export).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes().replace(b"[MASK]", b"<mask>"))
    assert fill_masks(str(tmp_path), [SENTENCE], top_k=1)[0][0]["token_str"] == "list"


@pytest.mark.parametrize(
    ("sentence", "top_k", "message"),
    [
        ("a function", 5, r"exactly one \[MASK\]; 'a function' has none"),
        ("[MASK] [MASK]", 5, "has 2"),
        ("[MASK]" + " of" * 60, 5, "at most 60 tokens; .* has 63"),
        (SENTENCE, VOCABULARY + 1, r"--top-k must be at most \d+, the size of the vocabulary"),
    ],
)
def test_bad_input_is_refused(sentence, top_k, message, export):
    with pytest.raises(InputError, match=message):
        fill_masks(export, [sentence], top_k)


def test_a_model_on_the_hub_is_fetched(export, hub_of_transformers):
    for path in Path(export).iterdir():
        hub_of_transformers.put("alice/model", path.name, path.read_bytes())
    assert fill_masks("alice/model", [SENTENCE], top_k=1)[0][0]["token_str"] == "list"


def test_the_folder_of_a_run_stands_for_its_export(export, tmp_path):
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"no export yet\. .*train/export\.py"):
        fill_masks(str(tmp_path), [SENTENCE])
    shutil.copytree(export, tmp_path / "export")
    assert fill_masks(str(tmp_path), [SENTENCE], top_k=1)[0][0]["token_str"] == "list"


def test_a_model_that_was_fine_tuned_is_refused(export, tmp_path):
    shutil.copytree(export, tmp_path / "export")
    config = read_json(tmp_path / "export" / "config.json") | {"architectures": ["RobertaForQuestionAnswering"]}
    (tmp_path / "export" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=r"a RobertaForQuestionAnswering\. Use python finetuning/predict\.py"):
        fill_masks(str(tmp_path / "export"), [SENTENCE])
