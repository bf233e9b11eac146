"""The command of stage 1 where it cannot do what it was told, or is told to stop: one line, nothing half-written."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm_common.cli.console import STOPPING
from tests.fixtures.generated_text import generated_lines
from tests.fixtures.run_command import Run
from tokenizer_training.train_unigram import main

SCRIPT = Path(__file__).parents[2] / "tokenizer_training" / "train_unigram.py"
LINE_BYTES = 50_000_000
needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{line}\n" for line in generated_lines(200)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-files CORPUS", "--output-dir is required"),
        ("--output-dir OUT", "A corpus is needed: --dataset-name (`builtin` needs no download) or --data-files"),
        ("--output-dir OUT --data-files no*.txt", "no file matches no*.txt"),
        (
            "--output-dir OUT --data-files CORPUS --push-to-hub alice/x --export-to-hub",
            "cannot be combined with --export-to-hub",
        ),
        ("--output-dir CORPUS/below --data-files CORPUS", "must be writable; CORPUS"),
    ],
)
def test_bad_input_is_one_line(flags: str, message: str, corpus_file: Path, tmp_path: Path, run: Run) -> None:
    def filled(template: str) -> str:
        return template.replace("CORPUS", str(corpus_file)).replace("OUT", str(tmp_path / "out"))

    before = sorted(tmp_path.iterdir())
    refused = run(main, *filled(flags).split())
    assert (refused.status, refused.error[:7]) == (2, "error: ")
    assert filled(message) in refused.error
    assert sum(line.startswith(("error", "Traceback")) for line in refused.err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_line_of_50_mb_without_spaces(tmp_path: Path) -> None:
    letters = re.sub(r"\W", "", "".join(generated_lines(LINE_BYTES // 50)))[: LINE_BYTES - 3]
    (tmp_path / "line.txt").write_text(letters + "語", encoding="utf-8")
    flags = ["--data-files", str(tmp_path / "line.txt"), "--vocab-size", "400", "--num-workers", "2"]
    # A shell between, because the system counts a parent's memory as that of its child, before that is a program.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(SCRIPT), *flags]
    command += ["--output-dir", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=200)
    assert result.returncode == 0, result.stderr
    found = re.search(r"peak memory ([\d.]+) GB", result.stderr)
    assert found
    assert float(found[1]) < 0.6
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["vocabulary_size"] == 400
    assert report["input"]["num_documents"] == 1
    assert report["input"]["num_words"] > 10_000


@pytest.fixture
def run_in_background(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, as a terminal has it, when it has come to the phase asked for.

    It has a folder for its temporary files, and seconds of work in that phase.
    """
    phase, copies = request.param
    (tmp_path / "tmp").mkdir()
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{line}\n" for line in generated_lines(20_000, 0, 20_000)) * copies, encoding="utf-8"
    )
    flags = ["--data-files", str(tmp_path / "corpus.txt"), "--output-dir", str(tmp_path / "out"), "--num-workers", "2"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags, "--vocab-size", "8000"],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        assert any(line.endswith(f"{phase}.\n") for line in process.stderr)
        yield process
        process.kill()


COUNTING, TRAINING = ("Reading and counting", 30), ("Training", 1)


def processes_of_group(group: int) -> dict[int, str]:
    """List the command lines of the processes of a group that have not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, process_group = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text(encoding="utf-8").replace("\0", " ")
        except OSError:  # it has ended
            continue
    return found


@needs_proc
@pytest.mark.parametrize(
    ("run_in_background", "command"),
    [(COUNTING, "spawn_main"), pytest.param(TRAINING, "train_model", marks=pytest.mark.slow)],
    indirect=["run_in_background"],
    ids=["counting", "training"],
)
def test_ctrl_c_leaves_nothing(command: str, run_in_background: subprocess.Popen[str], tmp_path: Path) -> None:
    process = run_in_background
    assert process.stderr is not None
    while not any(command in line for line in processes_of_group(process.pid).values()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=20) == 130
    assert rest == STOPPING.decode()
    deadline = time.monotonic() + 5
    while processes_of_group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of_group(process.pid)
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "corpus.txt"}
    assert not list((tmp_path / "tmp").iterdir())


def test_dry_run_writes_nothing(corpus_file: Path, tmp_path: Path, run: Run) -> None:
    plan = run(main, "--data-files", corpus_file, "--output-dir", tmp_path / "out", "--dry-run", "--limit", 5)
    assert plan.status == 0
    assert f"{corpus_file} (1 files" in plan.out
    assert "first 5 documents; splits: train" in plan.out
    assert list(tmp_path.iterdir()) == [corpus_file]
