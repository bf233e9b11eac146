"""Runs of all fine-tuning commands end with the same bytes, also if they were stopped or killed in between."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from finetuning import run_classification, run_qa, run_task
from finetuning.data import buckets
from tests.fixtures import tiny_choices, tiny_classification
from tests.fixtures.finetuned_runs import qa_flags, rating_flags
from tests.fixtures.killable_runs import KillableRuns
from tests.fixtures.same_run import assert_same_run
from tests.fixtures.tiny_run import forget_checkpoint
from tests.fixtures.tiny_texts import embedding_flags, write_rows

EMBEDDING = ("--query-prompt", "name: ", "--embedding-dim", "12")
RESULTS = ("*results*.json", "*predict*")


def assert_same_results(run: Path, expected: Path) -> None:
    assert_same_run(run, expected)
    written = {path.name: path.read_bytes() for pattern in RESULTS for path in expected.glob(pattern)}
    assert written
    assert {name: (run / name).read_bytes() for name in written} == written


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", ["rated", pytest.param("answered", marks=pytest.mark.slow)])
def test_it_resumes_bit_for_bit(name, tiny_start, tmp_path, request):
    """From a checkpoint in the middle of a pass, with dropout; the other commands are killed below."""
    whole = request.getfixturevalue(name)
    shutil.copytree(whole, tmp_path / "again")
    forget_checkpoint(tmp_path / "again" / "run", 20 if name == "rated" else 10)
    if name == "rated":
        status = run_task.main([*rating_flags(tiny_start / "start", tmp_path / "again"), "--resume", "must"])
    else:
        status = run_qa.main([*qa_flags(tmp_path / "again", start=whole), "--resume", "must"])
    assert status == 0
    assert_same_results(tmp_path / "again" / "run", whole / "run")


def without_lengths(flags: list[str]) -> list[str]:
    """Take `--length-buckets` away, so that the lengths are fitted to the rows."""
    place = flags.index("--length-buckets")
    end = next(index for index in range(place + 1, len(flags)) if flags[index].startswith("--"))
    return flags[:place] + flags[end:]


@pytest.mark.usefixtures("one_device", "eagerly")
def test_it_keeps_its_lengths(tiny_start, tmp_path, monkeypatch, capsys):
    """Those fitted to its rows are settings of the run: by another rule it is another run, or has them given."""
    more = ("--max-steps", "3", "--save-steps", "2")
    flags = without_lengths(tiny_classification.flags(tiny_start, tmp_path / "run", *more))
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "TOKENS_OF_PROGRAM", 64)
        assert run_classification.main(flags) == 0
        record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
        lengths = record["settings"]["data"]["length_buckets"]
        assert len(lengths) > 2
    capsys.readouterr()
    assert run_classification.main(flags) == 2
    assert "a different run (--length-buckets: [8, 16, 24, 30] there, [24, 30] now)" in capsys.readouterr().err
    forget_checkpoint(tmp_path / "run", 3)
    assert run_classification.main([*flags, "--resume", "must", "--length-buckets", *map(str, lengths)]) == 0


# {command: (its flags, the phase in which it is killed, and at which of its reports)}
MORE = ("--per-replica-batch-size", "2", "--gradient-accumulation-steps", "2")
LOSS = ("--class-weights", "balanced", "--layer-lr-decay", "0.9")
SHORT = ("--length-buckets", "30", "--max-steps", "8")
KILLED: dict[str, tuple[Callable[[Path, Path], list[str]], str, int]] = {
    "run_classification": (
        lambda start, to: without_lengths(
            tiny_classification.flags(start, to / "run", *MORE, *LOSS, "--num-epochs", "2", "--do-predict")
        ),
        "evaluate",
        2,
    ),
    "run_multiple_choice": (
        lambda start, to: tiny_choices.flags(start / "start", to, *MORE, "--num-epochs", "2"),
        "evaluate",
        2,
    ),
    "run_embedding": (
        lambda start, to: embedding_flags(start / "start", write_rows(to), *MORE, *SHORT, *EMBEDDING),
        "save",
        3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", KILLED)
def test_killed_equals_unkilled(command, tiny_start, tmp_path):
    """On two devices, in micro-batches."""
    flags, phase, num_reports = KILLED[command]
    with KillableRuns(command=f"finetuning.{command}") as runs:
        assert runs.run(flags(tiny_start, tmp_path / "whole")) == 0
        killed = [*flags(tiny_start, tmp_path / "killed"), "--save-minutes", "0.001"]
        assert runs.run_and_signal(killed, phase, num_reports, signal.SIGKILL, 0.001) == -signal.SIGKILL
        assert runs.run(killed) == 0
    assert_same_results(tmp_path / "killed" / "run", tmp_path / "whole" / "run")
