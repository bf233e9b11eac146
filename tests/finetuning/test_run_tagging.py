"""A run of tagging from its files to its results."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from seqeval import metrics as seqeval

from finetuning.data.labels import Labels
from finetuning.run_tagging import main
from finetuning.tasks.sentences import Sentences
from finetuning.tasks.tagging import Tagging
from tests.fixtures.tiny_classification import WORDS, write_start
from train.model.from_pretrained import load_model


class Network:
    """Gives logits that are written down."""

    def __init__(self, logits: np.ndarray):
        self.logits = tf.constant(logits, tf.float32)

    def __call__(self, _: dict, training: bool) -> "Network":
        assert not training
        return self


def test_words_are_scored_wherever_their_rows_stand() -> None:
    """Rows in another order, one of them cut, and one of padding; the loss is the mean over words."""
    labels = Labels("single_label_classification", ("O", "B-X"))
    sentences = Sentences("a", [["p", "q"], ["r"]], [["O", "B-X"], ["B-X"]])
    task = Tagging(labels, sentences, pad_token_id=1, token_types=False, max_length=4)
    rows = {
        "input_ids": tf.constant([[0, 7, 2], [0, 8, 2], [1, 1, 1]]),
        "attention_mask": tf.constant([[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        "word": tf.constant([[-1, 0, -1], [-1, 0, -1], [-1, -1, -1]]),
        "label": tf.constant([[-100, 1, -100], [-100, 0, -100], [-100] * 3]),
        "index": tf.constant([1, 0, -1]),
    }
    logits = np.zeros((3, 3, 2))
    logits[0, 1, 1] = 2.0
    sums = {name: value.numpy() for name, value in task.sums(Network(logits), rows, training=False).items()}
    losses = [np.log(1 + np.exp(-2.0)), np.log(2.0)]
    assert sums["loss"] == pytest.approx(sum(losses), rel=1e-6)
    assert (sums["num_tagged"], sums["num_correct"]) == (2, 2)
    assert sums["tag"].shape == (3, 4)
    assert task.predictions(sums, sentences) == [["O", "O"], ["B-X"]]
    figures = task.figures(sums)
    assert (figures["num_words"], figures["num_words_cut_off"], figures["num_rows"]) == (3, 1, 2)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert (figures["precision"], figures["recall"]) == (1.0, 0.5)


def write_sentences(path: Path, num: int, seed: int) -> list[list[str]]:
    """Write sentences in which `list` and `file` are entities, with a `name` after them where there is one."""
    draw, written = random.Random(seed), []
    lines = []
    for _ in range(num):
        words = draw.choices([*WORDS, "list", "file"], k=draw.randint(2, 12))
        tags = []
        for index, word in enumerate(words):
            is_entity = word in ("list", "file")
            goes_on = word == "name" and index > 0 and words[index - 1] in ("list", "file")
            tags.append("B-KIND" if is_entity else "I-KIND" if goes_on else "O")
        lines += [f"{word} {tag}\n" for word, tag in zip(words, tags, strict=True)] + ["\n"]
        written.append(tags)
    path.write_text("".join(lines), encoding="utf-8")
    return written


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_it_learns_what_can_be_learned(tmp_path: Path) -> None:
    write_start(tmp_path / "start")
    tags = {split: write_sentences(tmp_path / f"{split}.conll", num, num) for split, num in SPLITS.items()}
    files = [f"--{split}-file={tmp_path}/{split}.conll" for split in SPLITS]
    more = ["--max-seq-length", "30", "--length-buckets", "16", "30", "--per-replica-batch-size", "8"]
    more += [
        "--learning-rate",
        "0.02",
        "--num-epochs",
        "12",
        "--eval-steps",
        "60",
        "--dropout",
        "0",
        "--metric-name",
        "loss",
    ]
    start = ["--init-from", str(tmp_path / "start"), "--output-dir", str(tmp_path / "run")]
    assert main([*start, *files, *more]) == 0
    everything = json.loads((tmp_path / "run" / "all_results.json").read_text(encoding="utf-8"))
    assert everything["eval_f1"] == 1.0
    assert everything["predict_f1"] > 0.9
    assert everything["eval_guess_f1"] == 0.0
    for split, prefix, file in (("validation", "eval", "eval_predictions"), ("test", "predict", "predictions")):
        lines = (tmp_path / "run" / f"{file}.txt").read_text(encoding="utf-8").splitlines()
        predicted = [line.split() for line in lines]
        assert [len(row) for row in predicted] == [len(row) for row in tags[split]]
        for name in ("f1", "precision", "recall", "accuracy"):
            expected = getattr(seqeval, f"{name}_score")(tags[split], predicted)
            assert everything[f"{prefix}_{name}"] == pytest.approx(expected, abs=1e-9)
    export = tmp_path / "run" / "export"
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["RobertaForTokenClassification"]
    assert config["id2label"] == {"0": "O", "1": "B-KIND", "2": "I-KIND"}
    assert load_model(str(export), "TFAutoModelForTokenClassification").config.num_labels == 3


SPLITS = {"train": 80, "validation": 20, "test": 10}
