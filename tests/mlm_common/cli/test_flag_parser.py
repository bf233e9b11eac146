"""Flags as users meet them: help in groups with one spelling, and mistakes in one line with the nearest match."""

import re
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Literal

import pytest

from mlm_common.cli import PROJECT_FOLDER
from mlm_common.cli.command_line import parse_arguments
from mlm_common.cli.flag_parser import TRAINER_FLAGS, FlagParser
from mlm_common.cli.settings import Bounded, flag
from mlm_common.errors import InputError
from train.config.settings import SUBJECTS


@dataclass
class Data(Bounded):
    """Some flags of a group."""

    FLAG_GROUP = "Data"

    train_dataset: str | None = flag(None, "Folder of shards.", is_usual=True)
    text_files: list[str] = flag(list, "Files of text.")
    max_seq_length: int = flag(128, "Tokens per row: 100 % of them.", alias="sequence_length", at_least=8)
    share: float | None = flag(0.5, "A fraction.", at_least=0, below=1)
    unit: Literal["line", "file"] = flag("line", "What a document is.")


@dataclass
class Run:
    """Flags of groups of their own."""

    FLAG_GROUP = "Output"

    learning_rate: float = flag(1e-4, "Peak learning rate.", group="Optimizer")
    eval_steps: int | None = flag(None, "Evaluate every N steps. Default: ten times per run.", group="Evaluation")
    dry_run: bool = flag(False, "Print the plan and stop.", is_usual=True)
    fast: bool | None = flag(None, "Be quick.")
    replace_quotes: bool = flag(True, "Replace quotes. This is the default.", off_help="Keep quotes as they are.")


def parse(*words: str) -> tuple[Data, Run]:
    return parse_arguments([Data, Run], words, "What it does.")


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["folder/command.py"])

    def ask(option: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parse_arguments(
                [Data, Run],
                [option],
                "Do it.\n\nExamples:\n    command.py \\\n        --dry-run\n",
                needed=["train_dataset"],
                other_defaults={"learning_rate": "the preset's"},
            )
        assert ended.value.code == 0
        return capsys.readouterr().out

    return ask


def test_help_shows_the_usual_flags_examples_and_where_the_others_are(help_of):
    assert help_of("--help") == help_of("-h")
    assert help_of("--help").splitlines() == [
        "usage: command.py --train-dataset DIR [flags]",
        "",
        "Do it.",
        "",
        "Usual flags:",
        "  --train-dataset DIR  Folder of shards.",
        "  --dry-run            Print the plan and stop.",
        "",
        "Examples:",
        "  command.py \\",
        "      --dry-run",
        "",
        "13 more flags: --help-all, or this command's page on the site that `make docs`",
        "builds.",
    ]


def test_help_shows_each_flag_once_in_one_spelling(help_of):
    shown = help_of("--help-all")
    lines = [re.sub(" {2,}", "  ", line.strip()) for line in shown.splitlines()]
    assert "_" not in shown
    assert "sequence-length" not in shown
    for line in (
        "--text-files FILE …  Files of text.",
        "--max-seq-length N  Tokens per row: 100 % of them. At least 8. (default: 128)",
        "--share X  A fraction. At least 0 and below 1. (default: 0.5)",
        "--unit line|file  What a document is. (default: line)",
        "--learning-rate X  Peak learning rate. (default: the preset's, else 0.0001)",
        "--eval-steps N  Evaluate every N steps. Default: ten times per run.",
        "--dry-run  Print the plan and stop.",
        "--fast true|false  Be quick.",
        "--replace-quotes  Replace quotes. This is the default.",
        "--no-replace-quotes  Keep quotes as they are.",
    ):
        assert line in lines
    assert all(line.count("--") <= 1 for line in lines if line.startswith("--") and "command" not in line)


def test_every_spelling_is_read():
    for words in ("--max-seq-length 8", "--max_seq_length=8", "--sequence_length 8", "--sequence-length=8"):
        assert parse(*words.split())[0].max_seq_length == 8
    assert parse("--dry_run", "--no_replace_quotes")[1] == Run(dry_run=True, replace_quotes=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train_data", "x"], "unknown flag --train_data; did you mean --train-dataset? (--help-all lists all)"),
        (["-train-dataset", "x"], "unknown flag -train-dataset; did you mean --train-dataset? (--help-all lists all)"),
        (["\u2014dry-run"], "unknown flag \u2014dry-run; did you mean --dry-run? (--help-all lists all)"),
        (["--Dry-Run"], "unknown flag --Dry-Run; did you mean --dry-run? (--help-all lists all)"),
        (["--train", "x"], "unknown flag --train; did you mean --train-dataset? (--help-all lists all)"),
        (["--learning-rates=1"], "unknown flag --learning-rates; did you mean --learning-rate? (--help-all lists all)"),
        (
            ["--zzz", "8", "--fast", "true", "--zzz", "--dryrun"],
            "unknown flags: --zzz, --dryrun (did you mean --dry-run?). --help-all lists all flags.",
        ),
        (["--lr", "1"], "unknown flag --lr; did you mean --learning-rate? (--help-all lists all)"),
        (["--zzz"], "unknown flag --zzz (--help-all lists all)"),
        (
            ["--fast", "true", "x"],
            "unexpected argument 'x': each value must follow its flag. --help-all lists all flags.",
        ),
        (["--learning_rate", "3e-3x"], "--learning-rate must be a finite number; received 3e-3x."),
        (["--max-seq-length", "1.5"], "--max-seq-length must be a whole number; received 1.5."),
        (["--unit", "lines"], "--unit must be one of line, file; received lines."),
        (["--fast", "very"], "--fast must be true or false; received very."),
        (["--max-seq-length", "4"], "--max-seq-length must be at least 8; received 4."),
        (["--share", "1"], "--share must be at least 0 and below 1; received 1.0."),
        (["--max-seq-length"], "--max-seq-length needs a value: --max-seq-length N."),
        (["--text-files", "--dry-run"], "--text-files needs a value: --text-files FILE …."),
        (["--fast"], "--fast needs a value: --fast true|false."),
    ],
)
def test_mistakes_are_one_line(words, message):
    with pytest.raises(InputError) as refused:
        parse(*words)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("is_list", "words", "hint"),
    [
        (True, ["work/a", "work/b c", "--fast"], "; did you mean --runs work/a 'work/b c'? --help-all lists"),
        (False, ["work/a", "work/b"], "; did you mean --runs work/a? --help-all lists"),
        (True, ["--fast"], ". --help-all lists"),
    ],
)
def test_values_without_the_required_flag_are_shown_with_it(is_list, words, hint):
    runs = ("runs", list[str] if is_list else str)
    compared = make_dataclass("Compared", [runs, ("fast", bool, flag(False, "Be quick."))])
    with pytest.raises(InputError) as refused:
        parse_arguments([compared], words, "")
    assert f"the following arguments are required: --runs{hint}" in str(refused.value)


def test_flags_of_transformers_name_those_of_a_run():
    run_flags = FlagParser(SUBJECTS, None)
    guide = (PROJECT_FOLDER / "docs/guides/migrating.md").read_text(encoding="utf-8")
    for theirs, ours in TRAINER_FLAGS.items():
        assert run_flags.nearest(theirs) == f"; did you mean {ours}?"
        assert f"`{theirs[:2]}{theirs[2:].replace('-', '_')}`" in guide
    with pytest.raises(
        InputError, match=r"^unknown flag --resume_from_checkpoint; leave it out: the same command resumes"
    ):
        run_flags.parse_dataclasses(["--resume_from_checkpoint", "work/model"])
    assert run_flags.nearest("resume_from_checkpoint").startswith("; leave it out: the same command resumes")
