"""A run of multiple choice from its files to its results, its predictions, and its export in PyTorch."""

import json
import shutil

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from finetuning.predict import main as predict
from tests.fixtures.other_environments import output_of
from tests.fixtures.results import predictions, results
from tests.fixtures.same_run import timeless_lines
from tests.fixtures.tiny_choices import NUM_ROWS, answers, rows_of

STEPS_OF_PASS = -(-NUM_ROWS["train"] // 8)

# Prints what the class says of a file of rows in NumPy's form, and what of the model was not loaded.
READER = """
import json, sys
import numpy as np
import torch
from transformers import AutoModelForMultipleChoice

model, loading = AutoModelForMultipleChoice.from_pretrained(sys.argv[1], output_loading_info=True)
rows = np.load(sys.argv[2])
model.eval()
with torch.no_grad():
    logits = model(**{name: torch.tensor(rows[name]).long() for name in ("input_ids", "attention_mask")}).logits
wrong_keys = {kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys}
print(json.dumps({"class": type(model).__name__, "logits": logits.tolist(), "wrong_keys": wrong_keys}))
"""


def test_it_learns_what_can_be_learned(chosen):
    """Its accuracy is scikit-learn's; the guess is the most frequent letter."""
    scores = results(chosen / "run")
    right = answers("validation")
    predicted = predictions(chosen / "run", "eval_predictions")
    assert scores["eval_accuracy"] == pytest.approx(accuracy_score(right, predicted), abs=1e-12)
    assert scores["eval_accuracy"] > 0.9
    guess = max("ABC", key=answers("train").count)
    assert scores["eval_guess_accuracy"] == pytest.approx(right.count(guess) / len(right))
    assert accuracy_score(answers("test"), predictions(chosen / "run", "predict_results_test")) > 0.9
    assert "predict_accuracy" not in scores  # the test part has no labels
    lines = [line for line in timeless_lines(chosen / "run") if line["split"] == "validation"]
    assert [line["step"] for line in lines] == [STEPS_OF_PASS, 2 * STEPS_OF_PASS, 3 * STEPS_OF_PASS]


def test_it_predicts_as_in_training(chosen, run):
    expected = (chosen / "run" / "predict_results_test.txt").read_text(encoding="utf-8")
    assert run(predict, "--model", chosen / "run", "--file", chosen / "test.jsonl").out == expected
    text = ("--text", "a text", "--choices", "of the file", "of the list", "of a file", "of file")
    title, *lines = run(predict, "--model", chosen / "run" / "export", *text).out.splitlines()
    assert title == "a text"
    assert lines[0].split(maxsplit=1)[1] == "of the list"
    assert sum(float(line.split()[0].removesuffix("%")) for line in lines) == pytest.approx(100, abs=0.21)


def test_a_model_of_other_programs_chooses_among_those_of_the_file(chosen, tmp_path, run):
    """Their configurations often have two labels without names, however many choices there were."""
    shutil.copytree(chosen / "run" / "export", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    for labels in ({}, {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}):
        others = {name: value for name, value in config.items() if name not in ("id2label", "label2id")} | labels
        (tmp_path / "model" / "config.json").write_text(json.dumps(others), encoding="utf-8")
        printed = run(predict, "--model", tmp_path / "model", "--file", chosen / "test.jsonl").out
        expected = (chosen / "run" / "predict_results_test.txt").read_text(encoding="utf-8")
        assert printed == expected.translate(str.maketrans("ABC", "012"))


@pytest.mark.slow
def test_pytorch_chooses_the_same(chosen, torch_python, tmp_path):
    from transformers import PreTrainedTokenizerFast

    from train.model.from_pretrained import load_model

    export = str(chosen / "run" / "export")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(export)
    pairs = [("a text", f"of {option}") for row in rows_of("test") for option in row["options"]]  # type: ignore[attr-defined]
    encoded = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, truncation=True, max_length=24)
    shape, names = (NUM_ROWS["test"], 3, -1), ("input_ids", "attention_mask")
    rows = {name: np.array(encoded[name], np.int32).reshape(shape) for name in names}
    np.savez(tmp_path / "rows.npz", **rows)
    ours = load_model(export, "TFAutoModelForMultipleChoice")(rows).logits.numpy()
    theirs = json.loads(output_of(torch_python, READER, export, str(tmp_path / "rows.npz")))
    assert (theirs["class"], theirs["wrong_keys"]) == ("RobertaForMultipleChoice", {})
    np.testing.assert_allclose(theirs["logits"], ours, atol=1e-5)
    assert ["ABC"[choice] for choice in ours.argmax(axis=1)] == predictions(chosen / "run", "predict_results_test")
