"""Every command with every ugly file and many damaged folders, and in processes that are set up badly."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.campaign.report import Seen, stage_of, write_line
from tests.fixtures.fuzzed_commands import FILE_COMMANDS, FOLDER_COMMANDS, HEADS, Places, fed, filled, problems_of
from tests.fixtures.ugly_folders import damages_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eagerly")]

NUM_DAMAGES = 40
# One command line of each command, with good input.
GOOD_COMMANDS = (
    "train_unigram --data-files {fine} --dry-run",
    "compare_tokenizers {tokenizer} --data-files {fine}",
    "prepare --data-files {fine}",
    "verify {shards}",
    "run_tiny",
    "preflight --train-dataset {train}",
    "doctor --train-dataset {train} --output-dir {out}",
    "fill_mask --model {start} --text [MASK]",
    "score --model {start} --text {fine}",
    "export {run} {out}",
    "convert {google} {out}",
    "compare_runs --runs {run}",
    "classify --train-file {fine_rows}",
    "tag --train-file {tagged}/../train.conll",
    "choose --train-file {fine_rows}",
    "answer --train-file {fine_questions}",
    "embed --train-file {fine_rows}",
    "predict --model {classified} --text-column-names text --file {fine_rows}",
    "search --model {embedded} --corpus {fine}",
    "submit --runs {classified}",
    "whiten {start} {many} {out}",
)
# {variable: value}, of which {tmp} is a folder.
ODD_VARIABLES = (
    {"COLUMNS": "abc", "LINES": "-1", "TERM": ""},
    {"HF_TOKEN": "hf_\u2026\u200b"},
    {"HF_HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "MPLCONFIGDIR": "/proc/nowhere"},
    {"OMP_NUM_THREADS": "0", "TF_NUM_INTRAOP_THREADS": "x", "TF_CPP_MIN_LOG_LEVEL": "x"},
    {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    {"TMPDIR": "/nowhere/at/all", "TZ": "Nowhere/None", "MPLBACKEND": "none-such"},
)
MOST_DRAWN = 2


@pytest.fixture(scope="module")
def seen(pytestconfig: pytest.Config) -> Iterator[dict[str, Counter[str]]]:
    """Counts what is tried, {fault: {stage: number}}, for the report."""
    endings = {
        "malformed files, damaged folders": "inputs: each was read, or refused with a one-line error",
        "odd environment": "runs: all ended with status 0",
    }
    counts: dict[str, Counter[str]] = {fault: Counter() for fault in endings}
    yield counts
    for fault, counted in counts.items():
        for stage, number in counted.items():
            write_line(pytestconfig.getoption("campaign_report"), Seen(fault, stage, number, endings[fault]))


def stage_of_line(command: str) -> str:
    return stage_of(HEADS[command.partition(" ")[0]])


def check(
    command: str, inputs: Mapping[str, Callable[[], Path]], places: Places, out: Path, seen: Counter[str]
) -> None:
    problems = problems_of(command, inputs, places, out)
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    seen[stage_of_line(command)] += len(inputs)


@pytest.mark.parametrize(("command", "patterns"), FILE_COMMANDS, ids=[command for command, _ in FILE_COMMANDS])
def test_each_ugly_file_is_read_or_refused_in_one_line(command, patterns, places: Places, tmp_path, seen):
    files = {name: lambda path=path: path for name, path in fed(places.ugly, patterns).items()}
    check(command, files, places, tmp_path, seen["malformed files, damaged folders"])


@pytest.mark.parametrize(("command", "folder"), FOLDER_COMMANDS, ids=[" ".join(case) for case in FOLDER_COMMANDS])
def test_damaged_folders_are_read_or_refused_in_one_line(command, folder, places: Places, tmp_path, seen):
    damages = damages_of(places.named[folder])
    drawn = random.Random(f"campaign {command}").sample(damages, min(NUM_DAMAGES, len(damages)))
    copies = {str(damage): lambda damage=damage: damage.copy(tmp_path / "copies") for damage in drawn}
    check(command, copies, places, tmp_path, seen["malformed files, damaged folders"])


def program(command: str, places: Places, out: Path) -> list[str]:
    module, *words = filled(command, "", {**places.named, "out": out})
    return [sys.executable, "-m", module, *words]


def run(words: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, stderr=subprocess.PIPE, encoding="utf-8", errors="replace", timeout=600, check=False, **options
    )


@pytest.mark.parametrize("command", GOOD_COMMANDS)
def test_odd_environments_and_streams_change_nothing(command, places: Places, num_kills, tmp_path, seen):
    """Standard output is read by nobody, as with `| head -c 0`; standard error is closed; variables are odd."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run(program(command, places, tmp_path / "unread"), stdout=writing)
    os.close(writing)
    endings = {"unread": done}
    words = ["sh", "-c", 'exec "$@" 2>&-', "sh", *program(command, places, tmp_path / "closed")]
    endings["closed"] = run(words, stdout=subprocess.DEVNULL)
    for variables in random.Random(command).sample(ODD_VARIABLES, min(MOST_DRAWN, max(1, num_kills // 10))):
        out = tmp_path / f"größe-{len(endings)}"
        endings[str(variables)] = run(
            program(command, places, out), stdout=subprocess.DEVNULL, env={**os.environ, **variables}
        )
    wrong = {
        name: (done.returncode, done.stderr)
        for name, done in endings.items()
        if done.returncode != 0 or "Traceback" in done.stderr or "BrokenPipe" in done.stderr
    }
    assert wrong == {}
    seen["odd environment"][stage_of_line(command)] += len(endings)
