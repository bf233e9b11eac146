"""Predictions of fine-tuned models: those that their training commands wrote, and what is printed for given texts."""

import json
import shutil
from pathlib import Path

import pytest

from finetuning import run_qa
from finetuning.predict import main
from tests.finetuning.test_run_qa import answered, qa_flags, write_questions  # noqa: F401
from tests.finetuning.test_run_task import TASK, rated  # noqa: F401
from tests.fixtures.finetuned_runs import KINDS, finetuned
from tests.fixtures.tiny_classification import LABELS


def predicted(capsys: pytest.CaptureFixture, *flags: str) -> str:
    """Return what the command prints."""
    capsys.readouterr()
    assert main(list(flags)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture, *flags: str) -> str:
    capsys.readouterr()
    assert main(list(flags)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    return line


def test_the_classes_of_a_file_are_those_of_training(
    classified: Path, tiny_start: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Also where only the export is known, and for a table without the columns that training had."""
    expected = (classified / "predict_results_sst2.txt").read_text(encoding="utf-8")
    file = str(tiny_start / "glue" / "SST-2" / "test.tsv")
    shown = predicted(capsys, "--model", str(classified), "--file", file, "--output", str(tmp_path / "out.txt"))
    assert shown.split() == ["13", "predictions", str(tmp_path / "out.txt")]
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == expected
    assert predicted(capsys, "--model", str(classified / "export"), "--file", file) == expected
    shutil.copytree(classified / "export", tmp_path / "model")
    lines = [
        json.dumps({"text": text})
        for text in (line.split("\t")[1] for line in Path(file).read_text(encoding="utf-8").splitlines()[1:])
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert predicted(capsys, "--model", str(tmp_path / "model"), "--file", str(tmp_path / "texts.jsonl")) == expected


def test_texts_are_shown_with_probabilities(classified: Path, capsys: pytest.CaptureFixture) -> None:
    texts = [f"the {word} is a value" for word in LABELS.values()]
    blocks = predicted(capsys, "--model", str(classified), "--text", *texts).strip().split("\n\n")
    for block, text, label in zip(blocks, texts, LABELS, strict=True):
        title, first, second = block.splitlines()
        assert title == text
        assert first.split()[1] == label
        shares = [float(line.split()[0].removesuffix("%")) for line in (first, second)]
        assert shares[0] > 50
        assert sum(shares) == pytest.approx(100, abs=0.11)


def test_answers_are_those_of_training(answered: Path, capsys: pytest.CaptureFixture) -> None:  # noqa: F811
    """Where some questions have no answer, and with the settings of the run."""
    expected = (answered / "run" / "predictions.json").read_text(encoding="utf-8")
    flags = ("--model", str(answered / "run"), "--file", str(answered / "validation.json"))
    assert predicted(capsys, *flags) == expected
    assert "" in json.loads(expected).values()
    always = json.loads(predicted(capsys, *flags, "--null-score-diff-threshold", "1000"))
    assert all(always.values())
    question = ("--question", "value", "--context", "the name of the list is in the text")
    title, *lines = predicted(capsys, "--model", str(answered / "run"), *question).strip().splitlines()
    assert title == "value"
    assert lines
    (none,) = predicted(
        capsys, "--model", str(answered / "run"), *question, "--null-score-diff-threshold", "-1000"
    ).splitlines()[1:]
    assert "no answer found" in none


def test_a_custom_task_predicts_as_in_training(rated: Path, capsys: pytest.CaptureFixture) -> None:  # noqa: F811
    expected = (rated / "run" / "predict_results_test.txt").read_text(encoding="utf-8")
    assert predicted(capsys, "--model", str(rated / "run"), "--file", str(rated / "test.tsv")) == expected
    stars = [
        int(predicted(capsys, "--model", str(rated / "run" / "export"), "--task", TASK, "--text", text).split()[-1])
        for text in ("file " * 8, "list " * 8)
    ]
    assert stars[0] < stars[1]


def test_what_does_not_fit_is_refused_in_one_line(
    classified: Path,
    tiny_start: Path,
    answered: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    model = ("--model", str(classified))
    assert "exactly one of --text, --question and --file" in refused(capsys, *model)
    assert "needs --context" in refused(capsys, *model, "--question", "a")
    assert "needs --text, or --file" in refused(capsys, *model, "--question", "a", "--context", "b")
    assert "takes single texts" in refused(capsys, *model, "--text", "a", "--text-pair", "b")
    assert "must have one text for each --text" in refused(capsys, *model, "--text", "a", "--text-pair", "b", "c")
    assert "must be at most 30" in refused(capsys, *model, "--text", "a", "--max-seq-length", "31")
    (tmp_path / "texts.tsv").write_text("sentence\na\n", encoding="utf-8")
    error = refused(capsys, *model, "--file", str(tmp_path / "text.tsv"))
    assert error == f"error: --file: there is no file {tmp_path}/text.tsv; did you mean {tmp_path}/texts.tsv?"
    assert "needs --question, or --file" in refused(capsys, "--model", str(answered / "run"), "--text", "a")
    assert "is a masked language model" in refused(capsys, "--model", str(tiny_start / "start"), "--text", "a")
    shutil.copytree(classified, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    assert "no export yet: the run is at step" in refused(capsys, "--model", str(tmp_path / "run"), "--text", "a")
    assert "there is no folder" in refused(capsys, "--model", str(tmp_path / "runs"), "--text", "a")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_labels_and_tags_are_those_of_training(
    kind: str, tiny_start: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture
) -> None:
    """Numbers, which are of pairs of texts, to the last digit."""
    folder = finetuned(kind, tiny_start / "start", tmp_path_factory)
    name = "predictions.txt" if kind == "tagging" else "predict_results_test.txt"
    expected = (folder / "run" / name).read_text(encoding="utf-8")
    model = ("--model", str(folder / "run"))
    assert predicted(capsys, *model, "--file", str(folder / "test.jsonl")) == expected
    if kind == "regression":
        assert "needs --text-pair" in refused(capsys, *model, "--text", "a")
        title, number = predicted(capsys, *model, "--text", "the name", "--text-pair", "a name").splitlines()
        assert title == "the name | a name"
        float(number)
    elif kind == "tagging":
        lines = predicted(capsys, *model, "--text", "the list is" + " a" * 40).splitlines()
        assert [line.split()[-1] for line in lines[:3]] == ["the", "list", "is"]
        assert lines[0].split()[0].endswith("%")
        assert lines[-1].split()[:2] == ["cut", "off"]
    else:
        assert "%" in predicted(capsys, *model, "--text", "the list")


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_questions_of_a_test_part_have_the_answers_of_training(
    answered: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    shutil.copytree(answered / "start", tmp_path / "start")
    for part, num in (("train", 16), ("validation", 8), ("test", 13)):
        write_questions(tmp_path / f"{part}.json", num, num)
    test = str(tmp_path / "test.json")
    assert run_qa.main(qa_flags(tmp_path, "--test-file", test, "--num-epochs", "1")) == 0
    expected = (tmp_path / "run" / "predictions.json").read_text(encoding="utf-8")
    assert predicted(capsys, "--model", str(tmp_path / "run"), "--file", test) == expected
