"""Predictions of fine-tuned models: those that their training commands wrote, and what is printed for given texts."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetuning.config.prediction import PredictionConfig
from finetuning.predict import main
from finetuning.tasks.choice import MultipleChoice
from finetuning.tasks.classification import TextClassification
from finetuning.tasks.questions import QuestionAnswering
from finetuning.tasks.tagging import Tagging
from mlm_common.cli.command_line import parse_arguments
from tests.fixtures.finetuned_runs import KINDS, TASK, finetuned
from tests.fixtures.run_command import Run
from tests.fixtures.tiny_classification import LABELS


@pytest.fixture
def predicted(run: Run) -> Callable[..., str]:
    """Return what the command prints."""

    def call(*flags: object) -> str:
        outcome = run(main, *flags)
        assert outcome.status == 0
        return outcome.out

    return call


def test_the_classes_of_a_file_are_those_of_training(classified, tiny_start, tmp_path, predicted):
    """Also where only the export is known, and for a table without the columns that training had."""
    expected = (classified / "predict_results_sst2.txt").read_text(encoding="utf-8")
    file = str(tiny_start / "glue" / "SST-2" / "test.tsv")
    shown = predicted("--model", classified, "--file", file, "--output", tmp_path / "out.txt")
    assert shown.split() == ["13", "predictions", str(tmp_path / "out.txt")]
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == expected
    assert predicted("--model", classified / "export", "--file", file, "--per-replica-batch-size", "5") == expected
    shutil.copytree(classified / "export", tmp_path / "model")
    lines = [
        json.dumps({"text": text})
        for text in (line.split("\t")[1] for line in Path(file).read_text(encoding="utf-8").splitlines()[1:])
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert predicted("--model", tmp_path / "model", "--file", tmp_path / "texts.jsonl") == expected


@pytest.mark.parametrize("flag", ["--text", "--choices"])
def test_bytes_of_the_command_line_that_are_not_utf8_are_one_line(flag, run):
    flags = ["--model", "none", flag, "Gr\udcfc\udcdfe", *(["--text", "a"] if flag != "--text" else [])]
    assert f"{flag} must be text in UTF-8; the byte 0xfc in 'Gr" in run(main, *flags).refusal


def test_texts_are_shown_with_probabilities(classified, predicted):
    texts = [f"the {word} is a value" for word in LABELS.values()]
    blocks = predicted("--model", classified, "--text", *texts).strip().split("\n\n")
    for block, text, label in zip(blocks, texts, LABELS, strict=True):
        title, first, second = block.splitlines()
        assert title == text
        assert first.split()[1] == label
        shares = [float(line.split()[0].removesuffix("%")) for line in (first, second)]
        assert shares[0] > 50
        assert sum(shares) == pytest.approx(100, abs=0.11)


def test_answers_are_those_of_training(answered, predicted):
    """Where some questions have no answer, and with the settings of the run."""
    expected = (answered / "run" / "predictions.json").read_text(encoding="utf-8")
    flags = ("--model", answered / "run", "--file", answered / "validation.json")
    assert predicted(*flags) == expected
    assert "" in json.loads(expected).values()
    always = json.loads(predicted(*flags, "--null-score-diff-threshold", "1000"))
    assert all(always.values())
    question = ("--question", "value", "--context", "the name of the list is in the text")
    title, *lines = predicted("--model", answered / "run", *question).strip().splitlines()
    assert title == "value"
    assert lines
    (none,) = predicted("--model", answered / "run", *question, "--null-score-diff-threshold", "-1000").splitlines()[1:]
    assert "no answer found" in none


@pytest.mark.slow
def test_a_custom_task_predicts_as_in_training(rated, predicted):
    expected = (rated / "run" / "predict_results_test.txt").read_text(encoding="utf-8")
    assert predicted("--model", rated / "run", "--file", rated / "test.tsv") == expected
    stars = [
        int(predicted("--model", rated / "run" / "export", "--task", TASK, "--text", text).split()[-1])
        for text in ("file " * 8, "list " * 8)
    ]
    assert stars[0] < stars[1]


# (model, flags, what the error says); {} is the folder of the test.
REFUSED = [
    ("classified", [], "exactly one of --text, --question and --file"),
    ("classified", ["--question", "a"], "needs --context"),
    ("classified", ["--text", "a", "--text-pair", "b", "c"], "must have one text for each --text (1)"),
    ("classified", ["--text", "a", ""], "--text must not be empty; received ''."),
    ("classified", ["--text", "a", "--text-pair", " "], "--text-pair must not be empty; received ' '."),
    ("classified", ["--question", "", "--context", "a"], "--question must not be empty"),
    ("classified", ["--question", "a", "--context", "\n"], "--context must not be empty"),
    ("classified", ["--text", "a", "--choices", "b", ""], "--choices must not be empty"),
    ("classified", ["--file", "{}/text.tsv"], "--file: there is no file {}/text.tsv; did you mean {}/texts.tsv?"),
    (
        "classified",
        ["--file", "{}/texts.tsv", "--output", "{}/./texts.tsv"],
        "--output must be another file than --file",
    ),
    ("chosen", ["--text", "a"], "--choices must be two or more texts to choose from"),
    ("classified", ["--text", "a", "--choices", "b", "c"], "ForSequenceClassification, which takes no --choices"),
    ("embedded", ["--text", "a"], "embeds texts. Use finetuning/search.py, or SentenceTransformer."),
    ("start", ["--text", "a"], "is a masked language model"),
    ("unfinished", ["--text", "a"], "has no export yet. Let the run finish"),
]


@pytest.mark.parametrize(("model", "flags", "message"), REFUSED)
def test_what_does_not_fit_is_one_line(model, flags, message, classified, tiny_start, tmp_path, run, request):
    models = {"classified": classified, "start": tiny_start / "start"}
    if model == "unfinished":
        models[model] = tmp_path / "run"
        shutil.copytree(classified, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    if model not in models:
        models[model] = request.getfixturevalue(model) / "run"
    (tmp_path / "texts.tsv").write_text("sentence\na\n", encoding="utf-8")
    refused = run(main, "--model", models[model], *(flag.format(tmp_path) for flag in flags)).refusal
    assert message.replace("{}", str(tmp_path)) in refused


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_labels_and_tags_are_those_of_training(kind, tiny_start, tmp_path_factory, predicted, run):
    """Numbers, which are of pairs of texts, to the last digit."""
    folder = finetuned(kind, tiny_start / "start", tmp_path_factory)
    name, ending = ("predictions", "conll") if kind == "tagging" else ("predict_results_test", "jsonl")
    expected = (folder / "run" / f"{name}.txt").read_text(encoding="utf-8")
    model = ("--model", folder / "run")
    assert predicted(*model, "--file", folder / f"test.{ending}") == expected
    if kind == "regression":
        assert "needs --text-pair" in run(main, *model, "--text", "a").error
        title, number = predicted(*model, "--text", "the name", "--text-pair", "a name").splitlines()
        assert title == "the name | a name"
        float(number)
    elif kind == "tagging":
        lines = predicted(*model, "--text", "the list is" + " a" * 40).splitlines()
        assert [line.split()[-1] for line in lines[:3]] == ["the", "list", "is"]
        assert lines[0].split()[0].endswith("%")
        assert lines[-1].split()[:2] == ["cut", "off"]
    else:
        assert "%" in predicted(*model, "--text", "the list")


@pytest.mark.parametrize("task_class", [TextClassification, Tagging, MultipleChoice, QuestionAnswering])
def test_the_next_command_predicts(task_class):
    """What a fine-tuned run says to type next is a command that parses."""
    task = task_class.__new__(task_class)
    python, script, *argv = shlex.split(task.next_command("my runs/export"))
    assert (python, script) == ("python", "finetuning/predict.py")
    (config,) = parse_arguments((PredictionConfig,), argv, "")
    assert config.model == "my runs/export"
