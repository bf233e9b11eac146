"""The command line from tables to scores: those of a test part are those that its predictions file has by other means.

Test parts have classes and tags that training lacks, which no prediction can be, and rows without a label.
"""

import csv
import random
from pathlib import Path
from typing import Any

import pytest
from seqeval import metrics as seqeval
from sklearn import metrics

from finetuning import run_classification, run_tagging
from tests.fixtures.results import predictions, results, write_jsonl
from tests.fixtures.tiny_classification import WORDS

pytestmark = pytest.mark.usefixtures("one_device", "eagerly")
CLASSES = {"train": ("pos", "neg"), "validation": ("pos", "neg"), "test": ("pos", "neg", "new", "newer", "?")}


def texts(part: str, num: int) -> list[str]:
    draw = random.Random(part)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + f", {number}; value" for number in range(num)]


def flags(start: Path, folder: Path, ending: str, *extra_flags: str) -> list[str]:
    """Make the flags of one step on the files of the folder."""
    return [
        *("--init-from", str(start / "start"), "--output-dir", str(folder / "run"), "--max-steps", "1"),
        *(f"--{part}-file={folder}/{part}{ending}" for part in ("train", "validation", "test")),
        *("--max-seq-length", "24", "--length-buckets", "24", "--per-replica-batch-size", "20", *extra_flags),
    ]


def assert_scores(run: Path, part: str, expected: dict[str, float]) -> None:
    scores = results(run)
    assert {name: scores[f"{part}_{name}"] for name in expected} == pytest.approx(expected, abs=1e-9)


def test_classes_of_a_table_of_excel(tiny_start, tmp_path, run, caplog):
    labels = {}
    for part, names in CLASSES.items():
        rows = texts(part, 40)
        labels[part] = random.Random(part).choices(names, k=40)
        with (tmp_path / f"{part}.csv").open("w", encoding="utf-16", newline="") as file:
            csv.writer(file, delimiter=";").writerows([("text", "label"), *zip(rows, labels[part], strict=True)])
    outcome = run(run_classification.main, *flags(tiny_start, tmp_path, ".csv"))
    assert outcome.status == 0
    read_as = next(line for line in outcome.out.splitlines() if line.startswith("read as"))
    assert read_as.count("semicolons between columns, UTF-16") == 3
    for part, file in (("validation", "eval_predictions"), ("test", "predict_results_test")):
        lines = predictions(tmp_path / "run", file)
        pairs = [(label, line) for label, line in zip(labels[part], lines, strict=True) if label != "?"]
        references, predicted = zip(*pairs, strict=True)
        expected = {
            "accuracy": metrics.accuracy_score(references, predicted),
            "f1_macro": metrics.f1_score(references, predicted, average="macro", zero_division=0),
            "samples": len(pairs),
        }
        assert_scores(tmp_path / "run", "predict" if part == "test" else "eval", expected)
    assert "predict_loss" not in results(tmp_path / "run")
    assert "rows of" in caplog.text
    assert "count as wrong: 'new'" in caplog.text or "count as wrong: 'newer'" in caplog.text


def test_tags(tiny_start, tmp_path, run):
    """Also of sentences without words."""
    tags: dict[str, list[list[str]]] = {}
    for part in CLASSES:
        draw = random.Random(part)
        kinds = ("A", "B", "NEW") if part == "test" else ("A", "B")
        names = ["O", "O", *(f"{letter}-{kind}" for letter in "BI" for kind in kinds)]
        rows: list[dict[str, Any]] = []
        for _ in range(20):
            words = draw.choices(WORDS, k=draw.randint(1, 8))
            rows.append({"tokens": words, "ner_tags": draw.choices(names, k=len(words))})
        rows[3] = {"tokens": [], "ner_tags": []}
        tags[part] = [row["ner_tags"] for row in rows]
        write_jsonl(tmp_path / f"{part}.jsonl", *rows)
    assert run(run_tagging.main, *flags(tiny_start, tmp_path, ".jsonl")).status == 0
    for part, file, prefix in (("validation", "eval_predictions", "eval"), ("test", "predictions", "predict")):
        lines = (tmp_path / "run" / f"{file}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        pair = tags[part], [line.split() for line in lines]
        expected = {name: getattr(seqeval, f"{name}_score")(*pair) for name in ("f1", "precision", "recall")}
        assert_scores(tmp_path / "run", prefix, expected | {"accuracy": seqeval.accuracy_score(*pair)})
    assert "predict_loss" not in results(tmp_path / "run")
    assert results(tmp_path / "run")["train_samples"] == 19
