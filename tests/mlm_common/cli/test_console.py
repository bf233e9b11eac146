"""What a command prints on standard error: plain lines, progress, no library's noise, and what Ctrl-C says."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlm_common.cli.console import about, clock_time, counted, progress_bar, short_number, two_digits
from mlm_common.cli.process import STOPPING

PROJECT_FOLDER = Path(__file__).parents[3]

LOGGING = """
import logging, os, sys
import train
from mlm_common.cli.command_line import command

@command
def main(argv=None):
    logging.getLogger("train.loop").info("read %d rows", 3)
    logging.getLogger("train.loop").warning("the lines are wrapped")
    logging.getLogger("train.loop").error("no room")
    logging.getLogger("httpx").info("GET 200")
    logging.getLogger("httpx").warning("slow")
    logging.getLogger("tensorflow").warning("Callback method is slow")
    logging.getLogger("huggingface_hub.file_download").warning("Retrying in 1s")
    import huggingface_hub.file_download  # sets its level
    logging.getLogger("huggingface_hub.file_download").warning("Retrying in 2s")
    print(os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["GRPC_VERBOSITY"])

main()
"""
# A stand-in for TensorFlow: what its libraries write to standard error while they are loaded.
TENSORFLOW = """
import os, sys
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
os.write(2, b"I0000 00:00:1795541683.581741   29328 port.cc:153] oneDNN custom operations are on.\\n")
os.write(2, b"2026-11-24 17:00:00.123456: W tensorflow/tsl/cuda.cc:10] Could not find cuda drivers.\\n")
os.write(2, b"E0000 00:00:1795541683.581741   29328 cuda_dnn.cc:8] Unable to register cuDNN factory\\n")
try:
    import colorsys
except ImportError:
    sys.stdout.write("colorsys is hidden\\n")
"""
IMPORTING = """
import sys
import train
from mlm_common.cli.command_line import command

train.OPTIONAL_PACKAGES += ("colorsys", "json")

@command
def main(argv=None):
    train.load_tensorflow()
    import colorsys, tensorflow
    sys.stderr.write(f"{tensorflow.__name__} is imported\\n")

main()
"""
SLOW_TO_STOP = """
import time
from mlm_common.cli.command_line import command

@command
def main(argv=None):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(60)

main()
"""


def errors_of(program: str, *arguments: str, path: Path = PROJECT_FOLDER) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "GRPC_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, (path, PROJECT_FOLDER)))},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return (done.stdout + done.stderr).splitlines()


def test_lines_are_plain():
    level, *lines, done = errors_of(LOGGING)
    assert level in ("2 ERROR", "3 ERROR")
    assert lines == ["read 3 rows", "warning: the lines are wrapped", "error: no room", "warning: slow"]
    assert done.startswith("Done in ")


def test_verbose_shows_modules_and_libraries():
    lines = errors_of(LOGGING, "--verbose")
    assert lines[0] == "0 INFO"
    assert {"INFO train.loop: read 3 rows", "INFO httpx: GET 200"} <= set(lines)
    assert "WARNING tensorflow: Callback method is slow" in lines


def test_tensorflow_is_imported_without_its_noise_and_what_it_does_not_need(tmp_path):
    (tmp_path / "tensorflow.py").write_text(TENSORFLOW, encoding="utf-8")
    hidden, loading, imported, _ = errors_of(IMPORTING, path=tmp_path)
    assert hidden == "colorsys is hidden"
    assert loading == "Loading TensorFlow …"
    assert imported == "tensorflow is imported"
    assert len(errors_of(IMPORTING, "--verbose", path=tmp_path)) == 8


@pytest.mark.slow
def test_the_noise_of_the_tensorflow_installed_is_known():
    assert errors_of(IMPORTING)[:2] == ["Loading TensorFlow …", "tensorflow is imported"]


def test_a_second_ctrl_c_ends_the_process_at_once():
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_STOP],
        env=os.environ | {"PYTHONPATH": str(PROJECT_FOLDER)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"cleaning\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == -signal.SIGINT
        assert process.stderr.read() == STOPPING


def test_lines_every_ten_seconds_where_there_is_no_terminal(monkeypatch, caplog):
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    caplog.set_level(logging.INFO, "mlm_common.cli.console")
    with progress_bar("Reading", " files", 1000) as bar:
        for _ in range(6):
            seconds[0] += 5
            bar.update(100)
    with progress_bar("Scoring", " rows", 1000) as bar:  # whose first rows are computed while a program is compiled
        for _ in range(3):
            seconds[0] += 60 if not bar.n else 10
            bar.update(10)
    with progress_bar("Counting", " words") as bar:
        seconds[0] += 10
        bar.update(1234)
    assert [record.getMessage() for record in caplog.records] == [
        "Reading.",
        "Reading: 20%, 40 s left.",
        "Reading: 40%, 30 s left.",
        "Reading: 60%, 20 s left.",
        "Scoring.",
        "Scoring: 1%.",
        "Scoring: 2%, 980 s left.",
        "Scoring: 3%, 970 s left.",
        "Counting.",
        "Counting: 1.23k words so far.",
    ]


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (two_digits, {145_323: "150,000", 99.6: "100", 9.96: "10", 7.41e-5: "0.000074", 3: "3.0", 0: "0"}),
        (short_number, {0: "0", 128: "128", 1700: "1.7 k", 999_900: "1 M", 2.1e9: "2.1 B", 3e12: "3 T"}),
        (about, {5: "less than a minute", 60: "about 1 minute", 90: "about 1.5 minutes", 9 * 3600: "about 9 hours"}),
        (about, {2.08 * 86400: "about 2.1 days"}),
        (clock_time, {5: "0:05", 90: "1:30", 9 * 3600: "9:00:00", 2.08 * 86400: "2.1 d"}),
    ],
)
def test_numbers_and_times_are_short(shown, texts):
    assert {number: shown(number) for number in texts} == texts


def test_a_noun_has_the_form_of_its_number():
    assert [counted(number, "file") for number in (0, 1, 2_000)] == ["0 files", "1 file", "2,000 files"]
    assert counted(2, "micro-batch") == "2 micro-batches"


def test_the_corpus_is_imported_without_what_storage_needs():
    modules = errors_of("import sys, mlm_common.corpus.corpus; print(*sys.modules)")[0].split()
    assert "mlm_common.storage" in modules
    assert not {"mlm_common.storage.gcs", "google.cloud.storage", "pyarrow", "datasets", "tensorflow"} & set(modules)
