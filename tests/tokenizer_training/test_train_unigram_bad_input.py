"""The command of stage 1 where it cannot do what it was told: one line, nothing half-written."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.generated_text import generated_lines
from tokenizer_training.train_unigram import main

SCRIPT = Path(__file__).parents[2] / "tokenizer_training" / "train_unigram.py"
LINE_BYTES = 50_000_000


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{line}\n" for line in generated_lines(200)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-files CORPUS", "--output-dir is required"),
        ("--output-dir OUT", "No corpus was given. Pass --data-files or --dataset-name (`builtin` needs no download)"),
        ("--output-dir OUT --data-files no*.txt", "no file matches no*.txt"),
        ("--output-dir OUT --data-files=", "--data-files has an empty name"),
        ("--output-dir OUT --data-files FOLDER", "it is a folder. Name its files, such as 'FOLDER/*.txt'"),
        (
            "--output-dir OUT --data-files CORPUS --push-to-hub a/x --export-to-hub",
            "cannot be combined with --export-to",
        ),
        ("--output-dir OUT --data-files CORPUS --hub-revision b", "--hub-revision needs --push-to-hub; received b"),
        (
            "--output-dir OUT --data-files CORPUS --sample-by document --validation-percent 1 --vocab-size 300",
            "`validation` has none, because --validation-percent 1 drew none of 1 document. Raise --validation",
        ),
        ("--output-dir CORPUS/below --data-files CORPUS", "must be writable; CORPUS"),
    ],
)
def test_bad_input_is_one_line(flags, message, corpus_file, tmp_path, run):
    def filled(template: str) -> str:
        template = template.replace("CORPUS", str(corpus_file)).replace("OUT", f"{tmp_path}/out")
        return template.replace("FOLDER", str(tmp_path))

    before = sorted(tmp_path.iterdir())
    refused = run(main, *filled(flags).split())
    assert (refused.status, refused.error[:7]) == (2, "error: ")
    assert filled(message) in refused.error
    assert sum(line.startswith(("error", "Traceback")) for line in refused.err.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_line_of_50_mb_without_spaces(tmp_path):
    letters = re.sub(r"\W", "", "".join(generated_lines(LINE_BYTES // 50)))[: LINE_BYTES - 3]
    (tmp_path / "line.txt").write_text(letters + "語", encoding="utf-8")
    flags = ["--data-files", str(tmp_path / "line.txt"), "--vocab-size", "400", "--num-workers", "2"]
    # A shell between, because the system counts a parent's memory as that of its child, before that is a program.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(SCRIPT), *flags]
    command += ["--output-dir", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=200)
    assert result.returncode == 0, result.stderr
    match = re.search(r"peak memory ([\d.]+) GB", result.stderr)
    assert match
    assert float(match[1]) < 0.6
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["vocabulary_size"] == 400
    assert report["input"]["num_documents"] == 1
    assert report["input"]["num_words"] > 10_000


def test_dry_run_writes_nothing(corpus_file, tmp_path, run):
    plan = run(main, "--data-files", corpus_file, "--output-dir", tmp_path / "out", "--dry-run", "--limit", 5)
    assert plan.status == 0
    assert f"{corpus_file} (1 file" in plan.out
    assert "first 5 documents; splits: train" in plan.out
    assert list(tmp_path.iterdir()) == [corpus_file]
