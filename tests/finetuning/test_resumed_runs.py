"""Runs of fine-tuning commands end with the same bytes, also if they were stopped in between."""

import json
import shutil
from pathlib import Path

import pytest

from finetuning import run_classification, run_qa
from finetuning.data import buckets
from tests.fixtures import tiny_classification
from tests.fixtures.finetuned_runs import qa_flags
from tests.fixtures.same_run import assert_same_run
from tests.fixtures.tiny_run import forget_checkpoint

RESULTS = ("*results*.json", "*predict*")


def assert_same_results(run: Path, expected: Path) -> None:
    assert_same_run(run, expected)
    written = {path.name: path.read_bytes() for pattern in RESULTS for path in expected.glob(pattern)}
    assert written
    assert {name: (run / name).read_bytes() for name in written} == written


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_it_resumes_bit_for_bit(answered, tmp_path):
    """From a checkpoint in the middle of a pass, with dropout. The campaign kills runs of the same loop."""
    shutil.copytree(answered, tmp_path / "again")
    forget_checkpoint(tmp_path / "again" / "run", 10)
    assert run_qa.main([*qa_flags(tmp_path / "again", start=answered), "--resume", "must"]) == 0
    assert_same_results(tmp_path / "again" / "run", answered / "run")


def without_lengths(flags: list[str]) -> list[str]:
    """Take `--length-buckets` away, so that the lengths are fitted to the rows."""
    place = flags.index("--length-buckets")
    end = next(index for index in range(place + 1, len(flags)) if flags[index].startswith("--"))
    return flags[:place] + flags[end:]


@pytest.mark.usefixtures("one_device", "eagerly")
def test_it_keeps_its_lengths(tiny_start, tmp_path, monkeypatch, capsys):
    """Those fitted to its rows are settings of the run: by another rule it is another run, or has them given."""
    flags = without_lengths(tiny_classification.flags(tiny_start, tmp_path / "run", "--max-steps", "1"))
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "TOKENS_OF_PROGRAM", 64)
        assert run_classification.main(flags) == 0
        record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
        lengths = record["settings"]["data"]["length_buckets"]
        assert len(lengths) > 2
    capsys.readouterr()
    assert run_classification.main([*flags, "--dry-run"]) == 2
    assert "a different run (--length-buckets: [8, 16, 24, 30] there, [24, 30] now)" in capsys.readouterr().err
    assert run_classification.main([*flags, "--dry-run", "--length-buckets", *map(str, lengths)]) == 0
