"""Shards and two runs that version 0.2.0 wrote, stopped after steps 8 and 12 of 12: this version resumes them.

tests/fixtures/record_run.py recorded them, but for the preset's name: what is tiny-roberta-cpu now was tiny-cpu. They
are read by the commands alone, whatever modules are behind these.
"""

import contextlib
import io
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.fixtures.record_run import tensor_hashes, unpack
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from train.export import main as export
from train.fill_mask import main as fill_mask
from train.run_mlm import main

pytestmark = pytest.mark.slow

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "written_by_0_2_0.json").read_text(encoding="utf-8"))
STEP, NUM_STEPS = 8, 12
ADAM_BETA2 = 0.98  # the default, with which the runs were made

# These depend on how masks are drawn, and the first three on how dropout is: version 0.2.0 drew otherwise, and came to
# 3.692270, 3.597273 and 3.637181, and to 3.637181 with its weights at the end.
TRAIN_LOSSES_TO_THE_END = [3.691169, 3.585589]
VALIDATION_LOSS_AT_THE_END = 3.640852
VALIDATION_LOSS_OF_RECORDED_WEIGHTS = 3.634633779525757


class Resumed(NamedTuple):
    folder: Path
    start: list[str]  # what was printed of where training resumes
    lines: list[dict[str, Any]]  # of metrics.jsonl


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def resume(written: Path, folder: Path, name: str) -> Resumed:
    """Give the recorded command again, in a copy of all that was written."""
    shutil.copytree(written, folder, dirs_exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(RECORDED["runs"][name]["flags"]) == 0
    return Resumed(folder / name, start_of(printed.getvalue()), read_lines(folder / name))


def start_of(printed: str) -> list[str]:
    """Read what is printed beside the title `start`, line by line."""
    _, _, after = printed.partition("\nstart ")
    first, *others = after.splitlines()
    num_others = next((index for index, line in enumerate(others) if not line.startswith(" " * 20)), len(others))
    return [line.strip() for line in (first, *others[:num_others])]


def recorded_versions(run: Path) -> dict[str, str]:
    return json.loads((run / "run.json").read_text(encoding="utf-8"))["versions"]


def assert_nothing_changed(start: list[str], run: Path) -> None:
    """Assert what is said of the generator of masks and of the preset's new name; other libraries may be named, too."""
    changes = [line for line in start[1:] if "from here on masks and dropout are drawn by another" not in line]
    assert len(changes) == len(start) - 2
    for unknown in ("the device has changed since this run started (unknown → CPU (", "the code has changed since "):
        changes.remove(next(line for line in changes if unknown in line))
    example = "--hub-example The capital of France is [MASK]. -> None"  # its default then, and now
    changes.remove(f"changed since then: --preset tiny-cpu -> tiny-roberta-cpu, {example}")
    recorded = recorded_versions(run)
    if any(version(name) != recorded[name] for name in ("tensorflow", "tf-keras")):
        changes = [line for line in changes if "may differ in the last bits" not in line]
    assert changes == []


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder as version 0.2.0 left it, for reading only."""
    folder = tmp_path_factory.mktemp("written")
    unpack(RECORDED, folder)
    return folder


@pytest.fixture(scope="module")
def resumed(written, tmp_path_factory):
    """The run that was stopped in the middle, at its end."""
    return resume(written, tmp_path_factory.mktemp("resumed"), "run")


@pytest.fixture(scope="module")
def evaluated(written, tmp_path_factory):
    """The run with --recompute, stopped at its end, which has only to be evaluated again and exported."""
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(written, folder / "copy")
    metrics = folder / "copy" / "recomputed" / "metrics.jsonl"
    *others, last = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    assert (json.loads(last)["step"], json.loads(last)["split"]) == (NUM_STEPS, "validation")
    metrics.write_text("".join(others), encoding="utf-8")
    return resume(folder / "copy", folder, "recomputed")


def test_shards_are_verified(written, capsys, monkeypatch):
    monkeypatch.chdir(written)
    assert prepare(["--verify", "--output-dir", "shards", "--num-workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "shards/train: right. Checked 4 shards, 75 rows" in printed
    assert "shards/validation: right. Checked 2 shards" in printed


def test_resumes_from_the_recorded_step(resumed, written):
    assert resumed.start[0].startswith(f"resuming at step {STEP} of {NUM_STEPS} (epoch ")
    assert_nothing_changed(resumed.start, written / "run")


def test_lines_of_before_are_kept(resumed, written):
    before = read_lines(written / "run")
    assert resumed.lines[: len(before)] == before
    after = [(line["step"], line["split"]) for line in resumed.lines[len(before) :]]
    assert after == [(9, "train"), (12, "train"), (12, "validation")]


def test_variables_are_taken_up(resumed, written):
    before = load_file(written / "run" / "checkpoints" / f"step-{STEP:08d}.safetensors")
    after = load_file(resumed.folder / "checkpoints" / f"step-{NUM_STEPS:08d}.safetensors")
    assert {name: (array.dtype, array.shape) for name, array in after.items()} == {
        name: (array.dtype, array.shape) for name, array in before.items()
    }
    assert (before["optimizer/iterations"], after["optimizer/iterations"]) == (STEP, NUM_STEPS)
    # Whatever the gradients since then were, the moments cannot have fallen further than they decay.
    seconds = [name for name in before if name.startswith("optimizer/second_moment/")]
    assert len(seconds) == sum(name.startswith("model/") for name in before)
    for name in seconds:
        assert np.all(after[name] >= before[name] * ADAM_BETA2 ** (NUM_STEPS - STEP) * (1 - 1e-5)), name


def test_the_export_at_the_end_loads(resumed, capsys):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (resumed.folder / "export").iterdir()
    }
    assert fill_mask(["--model", str(resumed.folder / "export"), "--text", "a small [MASK]"]) == 0
    assert "a small [MASK]" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_export_of_the_recorded_weights(written, tmp_path, monkeypatch, name):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert export([name, "exported"]) == 0
    assert tensor_hashes(tmp_path / "exported" / "model.safetensors") == RECORDED["runs"][name]["exported"]


def test_a_run_with_recompute_has_nothing_changed(evaluated, written):
    assert evaluated.start[0].startswith(f"resuming at step {NUM_STEPS} of {NUM_STEPS} (epoch ")
    assert_nothing_changed(evaluated.start, written / "recomputed")
    exported = tensor_hashes(evaluated.folder / "export" / "model.safetensors")
    assert exported == RECORDED["runs"]["recomputed"]["exported"]


def test_validation_loss_of_the_recorded_weights(evaluated):
    """Evaluated again."""
    line = evaluated.lines[-1]
    assert (line["step"], line["split"]) == (NUM_STEPS, "validation")
    assert line["loss"] == pytest.approx(VALIDATION_LOSS_OF_RECORDED_WEIGHTS, rel=1e-5)


def test_losses_continue_as_they_did(resumed):
    *train, validation = (line["loss"] for line in resumed.lines[-3:])
    assert train == pytest.approx(TRAIN_LOSSES_TO_THE_END, rel=1e-4)
    assert validation == pytest.approx(VALIDATION_LOSS_AT_THE_END, rel=1e-4)
