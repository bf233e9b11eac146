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
from sklearn.preprocessing import MultiLabelBinarizer

from finetuning import run_classification, run_multiple_choice, run_tagging
from tests.fixtures.results import predictions, results, write_jsonl
from tests.fixtures.tiny_classification import WORDS

pytestmark = pytest.mark.usefixtures("one_device", "eagerly")
CLASSES = {"train": ("pos", "neg"), "validation": ("pos", "neg"), "test": ("pos", "neg", "new", "newer", "?")}


def texts(part: str, num: int) -> list[str]:
    draw = random.Random(part)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + f", {number}; value" for number in range(num)]


def flags(start: Path, folder: Path, ending: str, *more: str) -> list[str]:
    """Make the flags of one step on the files of the folder."""
    return [
        *("--init-from", str(start / "start"), "--output-dir", str(folder / "run"), "--max-steps", "1"),
        *(f"--{part}-file={folder}/{part}{ending}" for part in ("train", "validation", "test")),
        *("--max-seq-length", "24", "--length-buckets", "24", "--per-replica-batch-size", "20", *more),
    ]


def assert_scores(run: Path, part: str, expected: dict[str, float]) -> None:
    found = results(run)
    assert {name: found[f"{part}_{name}"] for name in expected} == pytest.approx(expected, abs=1e-9)


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
        predicted = predictions(tmp_path / "run", file)
        pairs = [(label, one) for label, one in zip(labels[part], predicted, strict=True) if label != "?"]
        references, found = zip(*pairs, strict=True)
        expected = {
            "accuracy": metrics.accuracy_score(references, found),
            "f1_macro": metrics.f1_score(references, found, average="macro", zero_division=0),
            "samples": len(pairs),
        }
        assert_scores(tmp_path / "run", "predict" if part == "test" else "eval", expected)
    assert "predict_loss" not in results(tmp_path / "run")
    assert "rows of" in caplog.text
    assert "count as wrong: 'new'" in caplog.text or "count as wrong: 'newer'" in caplog.text


def test_several_classes(tiny_start, tmp_path, run):
    labels = {}
    for part, names in CLASSES.items():
        draw = random.Random(part)
        labels[part] = [[name for name in names if name != "?" and draw.random() < 0.5] for _ in range(40)]
        rows = zip(texts(part, 40), labels[part], strict=True)
        write_jsonl(tmp_path / f"{part}.jsonl", *({"text": text, "label": label} for text, label in rows))
    assert run(run_classification.main, *flags(tiny_start, tmp_path, ".jsonl")).status == 0
    predicted = list(csv.reader(predictions(tmp_path / "run", "predict_results_test")))
    binary = MultiLabelBinarizer().fit([*labels["test"], *predicted])
    pair = binary.transform(labels["test"]), binary.transform(predicted)
    expected = {f"f1_{one}": metrics.f1_score(*pair, average=one, zero_division=0) for one in ("micro", "macro")}
    assert_scores(tmp_path / "run", "predict", expected | {"accuracy": metrics.accuracy_score(*pair), "samples": 40})


@pytest.mark.parametrize("kinds", [pytest.param(("",), marks=pytest.mark.slow), ("-A", "-B", "-NEW")])
def test_tags(tiny_start, tmp_path, run, kinds):
    """Also of entities of one kind, which they do not name, and of sentences without words."""
    tags: dict[str, list[list[str]]] = {}
    for part in CLASSES:
        draw = random.Random(part)
        names = [
            "O",
            "O",
            *(f"{letter}{kind}" for letter in "BI" for kind in kinds if part == "test" or kind != "-NEW"),
        ]
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
    assert ("predict_loss" in results(tmp_path / "run")) == (len(kinds) == 1)
    assert results(tmp_path / "run")["train_samples"] == 19


@pytest.mark.slow
def test_choices(tiny_start, tmp_path, run):
    labels = {}
    for part in CLASSES:
        draw = random.Random(part)
        labels[part] = [str(draw.randrange(2)) for _ in range(20)]
        if part == "test":
            labels[part][3] = "?"
        rows = zip(texts(part, 20), labels[part], strict=True)
        options = {"choice1": "the ____ list", "choice2": "a file", "question": "cause"}
        write_jsonl(tmp_path / f"{part}.jsonl", *({"premise": text, **options, "label": one} for text, one in rows))
    assert run(run_multiple_choice.main, *flags(tiny_start, tmp_path, ".jsonl")).status == 0
    for part, file in (("validation", "eval_predictions"), ("test", "predict_results_test")):
        pairs = zip(labels[part], predictions(tmp_path / "run", file), strict=True)
        right = [label == one for label, one in pairs if label != "?"]
        expected = {"accuracy": sum(right) / len(right), "samples": len(right)}
        assert_scores(tmp_path / "run", "predict" if part == "test" else "eval", expected)


def test_numbers_with_a_decimal_comma(tiny_start, tmp_path, run):
    values = {}
    for part in CLASSES:
        draw = random.Random(part)
        values[part] = [round(draw.uniform(-5, 5), 2) for _ in range(20)]
        written = [f"{value}".replace(".", ",") for value in values[part]]
        with (tmp_path / f"{part}.csv").open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=";").writerows([("text", "label"), *zip(texts(part, 20), written, strict=True)])
    arguments = flags(tiny_start, tmp_path, ".csv")
    assert "numbers with a decimal comma" in run(run_classification.main, *arguments).refusal
    assert run(run_classification.main, *arguments, "--decimal-separator", ",").status == 0
    for part, file in (("validation", "eval_predictions"), ("test", "predict_results_test")):
        predicted = [float(one) for one in predictions(tmp_path / "run", file)]
        expected = {"mse": metrics.mean_squared_error(values[part], predicted)}
        found = results(tmp_path / "run")[f"{'predict' if part == 'test' else 'eval'}_mse"]
        assert found == pytest.approx(expected["mse"], rel=1e-6)
