"""A run of tagging from its files to its results."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from finetuning.data.labels import Labels
from finetuning.loop.task import Split
from finetuning.tasks.tagging import Sentences, Tagging
from tests.fixtures.finetuned_runs import finetuned, sentences_of
from tests.fixtures.results import config_of_export, results
from train.model.from_pretrained import load_model


def test_words_are_scored_wherever_their_rows_stand():
    """Rows in another order, one of them cut, and one of padding; the loss is the mean over words."""
    labels = Labels("single_label_classification", ("O", "B-X"))
    sentences = Sentences("a", [["p", "q"], ["r"]], [["O", "B-X"], ["B-X"]])
    task = Tagging(labels, pad_token_id=1, token_types=False, max_length=4)
    task.evaluated = Split(None, sentences)  # type: ignore[arg-type]
    rows = {
        "input_ids": tf.constant([[0, 7, 2], [0, 8, 2], [1, 1, 1]]),
        "attention_mask": tf.constant([[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        "word": tf.constant([[-1, 0, -1], [-1, 0, -1], [-1, -1, -1]]),
        "label": tf.constant([[-100, 1, -100], [-100, 0, -100], [-100] * 3]),
        "index": tf.constant([1, 0, -1]),
    }
    logits = np.zeros((3, 3, 2))
    logits[0, 1, 1] = 2.0
    outputs = SimpleNamespace(logits=tf.constant(logits, tf.float32))
    sums = {name: value.numpy() for name, value in task.sums(lambda *_, **__: outputs, rows, training=False).items()}
    losses = [np.log(1 + np.exp(-2.0)), np.log(2.0)]
    assert sums["loss"] == pytest.approx(sum(losses), rel=1e-6)
    assert (sums["num_tagged"], sums["num_correct"]) == (2, 2)
    assert sums["tag"].shape == (3, 4)
    assert task.predictions(sums, task.evaluated) == [["O", "O"], ["B-X"]]
    figures = task.figures(sums)
    assert (figures["num_words"], figures["num_words_cut_off"], figures["num_rows"]) == (3, 1, 2)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert (figures["precision"], figures["recall"]) == (1.0, 0.5)


@pytest.mark.slow
def test_it_learns_what_can_be_learned(tiny_start, tmp_path_factory):
    run = finetuned("tagging", tiny_start / "start", tmp_path_factory) / "run"
    scores = results(run)
    assert scores["eval_f1"] == 1.0
    assert scores["predict_f1"] > 0.9
    assert scores["eval_guess_f1"] == 0.0
    for part, file in (("validation", "eval_predictions"), ("test", "predictions")):
        predicted = [line.split() for line in (run / f"{file}.txt").read_text(encoding="utf-8").splitlines()]
        assert [len(row) for row in predicted] == [len(tags) for _, tags in sentences_of(part)]
    config = config_of_export(run)
    assert config["architectures"] == ["RobertaForTokenClassification"]
    assert config["id2label"] == {"0": "O", "1": "B-KIND", "2": "I-KIND"}
    assert load_model(str(run / "export"), "TFAutoModelForTokenClassification").config.num_labels == 3
