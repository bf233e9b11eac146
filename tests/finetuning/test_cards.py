"""The lines of code on the cards of fine-tuned models, run with transformers 4 and 5."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from finetuning.predict import main
from tests.fixtures.finetuned_runs import KINDS, finetuned
from tests.fixtures.other_environments import output_of
from tests.fixtures.run_command import Outcome

pytestmark = pytest.mark.slow

# What the card's lines use, replaced by what the tiny models know.
EXAMPLES = {
    '"A text to classify."': '"the list is a value"',
    '"A first text."': '"the name"',
    '"A second text."': '"a name"',
    '"A sentence to tag ."': '"the list is a file"',
    '"Who wrote the notes?"': '"value"',
    '"The notes were written by Ada Lovelace in 1843."': '"the name of the list is in the text"',
}


def shown_by_card(export: Path, python: Path) -> list[str]:
    """Run the code of the card in the folder of the export, and return the lines that it prints."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (export / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    for example, known in EXAMPLES.items():
        code = code.replace(example, known)
    return output_of(python, f"import os, sys\nos.chdir(sys.argv[1])\n{code}", str(export)).splitlines()


@pytest.fixture
def predicted(run: Callable[..., Outcome]) -> Callable[..., list[str]]:
    """Return the lines that predict.py prints."""
    return lambda *flags: run(main, *flags).out.splitlines()


def test_classes(classified: Path, python: Path, predicted: Callable[..., list[str]]) -> None:
    ours = predicted("--model", str(classified), "--text", "the list is a value")[1:]
    theirs = [line.split() for line in shown_by_card(classified / "export", python)]
    assert [line.split()[1] for line in ours] == [label for _, label in theirs]
    for line, (score, _) in zip(ours, theirs, strict=True):
        assert float(line.split()[0].removesuffix("%")) == pytest.approx(100 * float(score), abs=0.11)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_labels_and_tags(
    kind: str,
    tiny_start: Path,
    python: Path,
    tmp_path_factory: pytest.TempPathFactory,
    predicted: Callable[..., list[str]],
) -> None:
    run = finetuned(kind, tiny_start / "start", tmp_path_factory) / "run"
    theirs = [line.split() for line in shown_by_card(run / "export", python)]
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


def test_answers(answered: Path, python: Path, predicted: Callable[..., list[str]]) -> None:
    """The code on the card has no answer for questions without one."""
    question = ("--question", "value", "--context", "the name of the list is in the text")
    flags = ("--model", str(answered / "run"), *question, "--null-score-diff-threshold", "1000")
    ours = predicted(*flags)[1].split(maxsplit=1)[1]
    assert shown_by_card(answered / "run" / "export", python) == [ours]


def test_the_encoder_of_a_custom_task(rated: Path, python: Path) -> None:
    shown_by_card(rated / "run" / "export", python)
