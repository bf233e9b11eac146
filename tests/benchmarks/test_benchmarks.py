"""The benchmarks: their flags, the text that one generates, and what they measure."""

import gzip
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.generated_text import write_generated_text
from benchmarks.measured_run import run_measured
from tests.fixtures.script_help import ask_for_help

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def output_of(script, *flags):
    """Run a benchmark and return what it printed; what it wrote to stderr is shown where a test fails."""
    command = [sys.executable, BENCHMARKS / script, *flags]
    return subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


def test_generated_text_repeats_and_a_shorter_one_is_its_head(tmp_path):
    for name, num_bytes, seed in (("long", 300_000, 0), ("short", 100_000, 0), ("other", 100_000, 1)):
        write_generated_text(tmp_path / name, num_bytes, seed)
    long, short, other = ((tmp_path / name).read_bytes() for name in ("long", "short", "other"))
    assert (len(long), len(short)) == (300_000, 100_000)
    assert long.startswith(short)
    assert other != short


def test_new_words_keep_coming_in_generated_text(tmp_path):
    path = tmp_path / "text"
    write_generated_text(path, 4_000_000)
    words = path.read_text(encoding="ascii").replace(",", "").replace(".", "").split()
    num_distinct = [len(set(words[: len(words) // part])) for part in (16, 4, 1)]
    assert all(2.2 < more / fewer < 3.2 for fewer, more in itertools.pairwise(num_distinct))
    assert 6 < 4_000_000 / len(words) < 8
    assert 0.04 < max(map(words.count, set(words[:100]))) / len(words) < 0.1


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_of_a_command_and_its_children_is_measured_together():
    child = "import time; held = b'x' * 40_000_000; time.sleep(1)"
    program = (
        f"import subprocess, sys; print('started', file=sys.stderr); held = b'x' * 30_000_000; "
        f"subprocess.run([sys.executable, '-c', {child!r}]); sys.exit(3)"
    )
    run = run_measured([sys.executable, "-c", program])
    assert 70e6 < run.peak.num_bytes < 110e6
    assert len(run.peak.process_bytes) == 2
    assert (run.status, run.output) == (3, "started")
    assert 0 < run.seconds_of_line("^start") < run.seconds - 0.9
    assert run.seconds_of_line("never written") == run.seconds


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_both_parts_print_their_tables(tmp_path):
    write_generated_text(tmp_path / "text", 1_000_000)
    rows = [json.dumps({"text": text}) + "\n" for text in (tmp_path / "text").read_text(encoding="utf-8").split("\n")]
    with gzip.open(tmp_path / "train.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(rows[100:])
    with gzip.open(tmp_path / "valid.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(rows[:100])
    files = [f"--train-file={tmp_path}/train.jsonl.gz", f"--valid-file={tmp_path}/valid.jsonl.gz"]
    sizes = ["--vocab-sizes", "1000", "--repeats", "1", "--trainer-repeats", "1", "--generated-megabytes", "1"]
    tables = output_of("tokenizer_training.py", *files, *sizes)
    for name, num_runs in (("ours", 1), ("ours, no byte fallback", 1), ("UnigramTrainer", 1), ("SentencePiece", 1)):
        assert re.search(rf"^{name} +{num_runs} .* 1,000 +[34]\.\d{{4}} ", tables, re.MULTILINE), tables
    assert "memory of ours / UnigramTrainer" in tables
    assert re.search(r"^1 .* 1\.00 ", tables, re.MULTILINE)


SCRIPTS = (
    *("input_pipeline.py", "prepare.py", "preemption.py", "resume.py", "train_step_cpu.py", "train_step_tpu.py"),
    *("time_to_quality.py", "finetune_step.py"),
    *("peers/input_contenders.py", "peers/prepare_peers.py", "peers/tpu_step_contenders.py"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmarks_show_their_flags_without_tensorflow(script):
    printed, imported = ask_for_help(tuple(f"benchmarks/{script}" for script in SCRIPTS))[f"benchmarks/{script}"]
    assert re.search("--(length|rates|minutes)", printed)
    assert "argparse" in imported
    assert "tensorflow" not in imported


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_inputs_print_their_table():
    names = ["ours-masked", "tutorial"]
    flags = ["--num-rows=600", "--length=32", "--batch-rows=64", "--vocab-size=1000", "--repeats=1"]
    flags += ["--contenders", *names]
    tables = output_of("input_pipeline.py", *flags)
    for name in names:
        assert re.search(rf"^{name} +1 +[\d,]+ +\(", tables, re.MULTILINE), tables
    assert "ours-masked / tutorial " in tables


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_preparation_and_its_peers_print_their_tables(tmp_path):
    write_generated_text(tmp_path / "text", 1_000_000)
    with (tmp_path / "train.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"text": text}) + "\n" for text in (tmp_path / "text").read_text(encoding="utf-8").split("\n")
        )
    flags = [f"--train-file={tmp_path}/train.jsonl", "--vocab-size=1000", "--length=64", "--repeats=1"]
    flags += ["--generated-megabytes", "1", "2"]
    tables = output_of("prepare.py", *flags)
    for name in ("ours", "tutorial", "tokenizer"):
        assert re.search(rf"^{name} +1 +\d+\.\d+ ", tables, re.MULTILINE), tables
    assert "time of tutorial / ours" in tables
    assert re.search(r"^1 .* 1\.00 .*\n2 ", tables, re.MULTILINE), tables


@pytest.mark.slow
def test_train_steps_print_their_table():
    flags = ["--contenders", "tutorial", "ours", "--num-layers=1", "--hidden-size=32", "--vocab-size=500"]
    flags += ["--length=16", "--rounds=1", "--steps-per-round=2"]
    tables = output_of("train_step_cpu.py", *flags)
    for name in ("tutorial", "ours"):
        assert re.search(rf"^{name} +[\d,]+ +\(", tables, re.MULTILINE), tables
    assert re.search(r"^ours / tutorial +\d", tables, re.MULTILINE), tables


@pytest.mark.slow
def test_resuming_and_saving_print_their_tables():
    flags = ["--num-rows=2000", "--length=16", "--late-step=900", "--repeats=1", "--num-layers=1", "--saves=1"]
    tables = output_of("resume.py", *flags)
    for pattern in (r"^101 +1 +\d", r"^901 +1 +\d", r"^run-mlm +1 +\d", r"^CheckpointManager +1 +\d"):
        assert re.search(pattern, tables, re.MULTILINE), tables
