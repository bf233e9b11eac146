"""The lines of code on the cards of fine-tuned models, run with transformers 4 and 5."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from finetuning.predict import main
from tests.fixtures.finetuned_runs import KINDS, finetuned
from tests.fixtures.other_environments import output_of
from tests.fixtures.run_command import Run

pytestmark = pytest.mark.slow

# What the card's lines use, replaced by what the tiny models know.
EXAMPLES = {
    '"A text to classify."': '"the list is a value"',
    '"The cup fell.", ["It broke.", "It sang."]': '"a text", ["of the file", "of the list"]',
    '"A first text."': '"the name"',
    '"A second text."': '"a name"',
    '"A sentence to tag ."': '"the list is a file"',
    '"Who wrote the notes?"': '"value"',
    '"The notes were written by Ada Lovelace in 1843."': '"the name of the list is in the text"',
}


# Runs the code of each card in the folder of its export, and prints the lines that it prints.
READER = """
import contextlib, io, json, os, sys

for name, folder, code in json.loads(sys.argv[1]):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    print(json.dumps([name, printed.getvalue().splitlines()]))
"""


def code_of_card(export: Path) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", (export / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    for example, replacement in EXAMPLES.items():
        code = code.replace(example, replacement)
    return code


@pytest.fixture(scope="module")
def runs(
    classified: Path,
    answered: Path,
    rated: Path,
    chosen: Path,
    tiny_start: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The folders of runs of all kinds."""
    whole = {"answers": answered, "choice": chosen, "custom": rated}
    others = {kind: finetuned(kind, tiny_start / "start", tmp_path_factory) / "run" for kind in KINDS}
    return {"classes": classified, **{name: folder / "run" for name, folder in whole.items()}, **others}


@pytest.fixture(scope="module")
def shown(runs: dict[str, Path], python: Path) -> dict[str, list[str]]:
    """The lines that the code of each card prints."""
    programs = [(name, str(run / "export"), code_of_card(run / "export")) for name, run in runs.items()]
    return dict(map(json.loads, output_of(python, READER, json.dumps(programs)).splitlines()))


@pytest.fixture
def predicted(run: Run) -> Callable[..., list[str]]:
    """Return the lines that predict.py prints."""
    return lambda *flags: run(main, *flags).out.splitlines()


def test_classes(runs, shown, predicted):
    ours = predicted("--model", str(runs["classes"]), "--text", "the list is a value")[1:]
    theirs = [line.split() for line in shown["classes"]]
    assert [line.split()[1] for line in ours] == [label for _, label in theirs]
    for line, (score, _) in zip(ours, theirs, strict=True):
        assert float(line.split()[0].removesuffix("%")) == pytest.approx(100 * float(score), abs=0.11)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_labels_and_tags(kind, runs, shown, predicted):
    run, theirs = runs[kind], [line.split() for line in shown[kind]]
    if kind == "regression":
        (ours,) = predicted("--model", str(run), "--text", "the name", "--text-pair", "a name")[1:]
        ((number,),) = theirs
        assert float(number) == pytest.approx(float(ours), rel=1e-3)
    elif kind == "tagging":
        lines = predicted("--model", str(run), "--text", "the list is a file")
        ours = [word for _, tag, word in map(str.split, lines) if tag != "O"]
        assert [word for line in theirs for word in line[2:]] == ours
    else:
        labels = json.loads((run / "export" / "config.json").read_text(encoding="utf-8"))["id2label"].values()
        assert sorted(label for _, label in theirs) == sorted(labels)
        ours = predicted("--model", str(run), "--text", "the list is a value")[1:]
        likely = [label for score, label in theirs if float(score) > 0.5]
        assert likely == [line.split()[1] for line in ours if "none" not in line]


def test_choices_and_a_custom_task(shown):
    assert shown["choice"] == ["of the list"]
    assert "custom" in shown, "its code came to its end"


def test_answers(runs, shown, predicted):
    """The code on the card has no answer for questions without one."""
    question = ("--question", "value", "--context", "the name of the list is in the text")
    flags = ("--model", str(runs["answers"]), *question, "--null-score-diff-threshold", "1000")
    ours = predicted(*flags)[1].split(maxsplit=1)[1]
    assert shown["answers"] == [ours]
