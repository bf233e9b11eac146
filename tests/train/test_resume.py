"""A run that is asked to stop or diverges, and resumes: against one that was not, bit for bit.

`tests/campaign` kills runs at random moments.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mlm_common.errors import EXIT_STOPPED
from tests.fixtures.imported_files import PARTS_OF_A_RUN, imported_files
from tests.fixtures.killable_runs import IMPORTED_VARIABLE, PROJECT, KillableRuns
from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run, logged, timeless_lines
from tests.fixtures.tiny_run import MODEL, run_flags
from tfrecord_prep.records import encode_rows
from train.run_mlm import main

NUM_STEPS = 14
# Dropout, windows of a few shards, two rows a device in each of two micro-batches of a step.
FLAGS = [
    *("--config-overrides", f"{MODEL},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1"),
    *("--shuffle-buffer-size", "12", "--per-replica-batch-size", "2", "--gradient-accumulation-steps", "2"),
    *("--max-steps", str(NUM_STEPS), "--log-steps", "3", "--eval-steps", "5", "--save-steps", "2"),
]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    return tmp_path_factory.mktemp("imported") / "modules.txt"


@pytest.fixture(scope="module")
def runs(imported):
    with KillableRuns({IMPORTED_VARIABLE: str(imported)}) as runs:
        yield runs


@pytest.fixture(scope="module")
def whole_run(runs, shards, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.run(run_flags(shards, folder, *FLAGS)) == 0
    return folder


@pytest.mark.slow
def test_the_run_imports_the_files_that_are_counted(whole_run, imported):
    del whole_run  # first of all, so the file is of it
    modules = imported.read_text(encoding="utf-8").split("\n")
    files = [name for name in modules if (PROJECT / f"{name.replace('.', '/')}.py").exists()]
    assert {name for name in files if not name.startswith("tests.")} == imported_files(PARTS_OF_A_RUN)


@pytest.mark.slow
def test_sigterm_and_ctrl_c_save_and_the_run_resumes(runs, whole_run, shards, tmp_path):
    """Once in an evaluation, which is made up for, and once in the middle of an epoch."""
    flags = run_flags(shards, tmp_path / "run", *FLAGS, "--save-steps", "100")
    assert runs.run_and_signal(flags, "evaluate", 1, signal.SIGTERM, 0.0) == EXIT_STOPPED
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == ["step-00000005.json"]
    assert runs.run_and_signal([*flags, "--resume", "must"], "train", 2, signal.SIGINT, 0.0) == EXIT_STOPPED
    assert not (tmp_path / "run" / "export").exists()
    assert runs.run([*flags, "--resume", "must"]) == 0
    assert_same_run(tmp_path / "run", whole_run)


def bad_rows(shards, folder, num_good=6):
    """Write shards of one repeated token, and one of many tokens after which the loss is high."""
    shutil.copytree(shards / "train" / "tokenizer", folder / "tokenizer")
    random_rows = np.random.default_rng(0).integers(5, 48, (8, 16), np.int32)
    for index in range(num_good + 1):
        rows = random_rows if index == num_good else np.full((8, 16), 9, np.int32)
        (folder / f"dataset-{index:05d}-8.tfrecord").write_bytes(encode_rows(rows, np.full(8, 16)))


SPIKE_FLAGS = [
    *("--shuffle-buffer-size", "1", "--per-replica-batch-size", "8", "--max-steps", "30", "--learning-rate", "0.02"),
    *("--log-steps", "1", "--save-steps", "2", "--schedule", "constant", "--warmup-steps", "0"),
    *("--max-loss-rise", "1.0", "--max-rollbacks", "9"),
]


@pytest.mark.slow
def test_a_spike_leads_back_and_on_without_its_rows(runs, shards, tmp_path):
    runs = runs.on(1)
    bad_rows(shards, tmp_path / "shards")
    data_flags = ["--train-dataset", str(tmp_path / "shards"), "--tokenizer", str(shards / "train" / "tokenizer")]
    flags = run_flags(shards, tmp_path / "run", *SPIKE_FLAGS, *data_flags, "--on-nonfinite", "skip")
    assert runs.run(flags) == 0
    lines = timeless_lines(tmp_path / "run")
    rollbacks = [line for line in lines if line["split"] == "rollback"]
    assert rollbacks
    assert {line["reason"] for line in rollbacks} == {"spike"}
    for line in rollbacks:
        assert line["num_skipped_rows"] == 8 * (line["step"] - line["to_step"])
    train = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 31))
    assert max(line["loss"] for line in train[8:]) < 1.5
    record = read_json(tmp_path / "run" / "checkpoints" / "step-00000030.json")
    assert [rows["after_step"] for rows in record["skipped"]] == [line["to_step"] for line in rollbacks]
    assert record["row"] == 30 * 8 + sum(line["num_skipped_rows"] for line in rollbacks)


def test_another_optimizer_is_refused(finished_run, shards, tmp_path, run):
    shutil.copytree(finished_run, tmp_path / "run")
    refused = run(main, *run_flags(shards, tmp_path / "run", "--optimizer", "muon", "--dry-run"))
    assert "contains a different run (--optimizer: adamw there, muon now). Use another" in refused.refusal


@pytest.mark.slow
@pytest.mark.usefixtures("eagerly")
def test_more_steps_resume_with_the_new_schedule(finished_run, shards, tmp_path, run):
    shutil.copytree(finished_run, tmp_path / "run")
    status, printed, _ = run(main, *run_flags(shards, tmp_path / "run", "--max-steps", "8"))
    assert status == 0
    assert "resuming at step 6 of 8 (epoch 0.37)" in printed
    assert "the run's length changed from 6 to 8 steps: the learning rate resumes at 0.0005" in printed
    assert [line["step"] for line in logged(tmp_path / "run")][-2:] == [8, 8]
    assert read_json(tmp_path / "run" / "run.json")["earlier_schedules"] == [[6, 6]]
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "| earlier schedules | steps 1 to 6 with the schedule of a run of 6 steps |" in card


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_another_number_of_replicas_resumes_with_the_same_batch(runs, whole_run, shards, tmp_path, run):
    """Two devices before, one from step 8 on."""
    flags = run_flags(shards, tmp_path / "run", *FLAGS)
    assert runs.run_and_signal(flags, "train", 8, signal.SIGTERM, 0.0) == EXIT_STOPPED
    status, printed, _ = run(main, *flags, "--per-replica-batch-size", "4")
    assert status == 0
    assert "results may differ in the last bits" in printed
    assert "replicas 2 -> 1" in printed
    for line, expected in zip(timeless_lines(tmp_path / "run"), timeless_lines(whole_run), strict=True):
        assert line.pop("split") == expected.pop("split")
        assert line == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_supervised_training_survives_a_kill(shards, tmp_path):
    """The flag to overwrite holds for the first process alone."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"fingerprint": {}}', encoding="utf-8")
    flags = ["--max-steps", "12", "--save-steps", "1", "--supervise", "--retry-seconds", "0.1"]
    command = [sys.executable, str(PROJECT / "train" / "run_mlm.py")]
    command += run_flags(shards, tmp_path / "run", *flags, "--overwrite-output-dir")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as supervisor:
        killed = threading.Event()

        def kill_once():
            while not list((tmp_path / "run").glob("checkpoints/step-0000000*.json")):
                killed.wait(0.05)
            children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text(encoding="utf-8")
            os.kill(int(children), signal.SIGKILL)
            killed.set()

        threading.Thread(target=kill_once, daemon=True).start()
        _, errors = supervisor.communicate(timeout=600)
        assert killed.is_set()
        assert supervisor.returncode == 0, errors[-3000:]
    assert "ended with status -9" in errors
    assert "taking over from a run that has ended" in errors
    steps = [line["step"] for line in logged(tmp_path / "run", "train")]
    assert steps == list(range(2, 13, 2))
