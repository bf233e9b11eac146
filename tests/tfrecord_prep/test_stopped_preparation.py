"""Preparations that are stopped or out of room; `tests/campaign/` kills them, and takes their folders away."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlm_common.errors import EXIT_STOPPED, InputError
from tests.fixtures.tiny_corpus import flags
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.prepare_tfrecord_shards import stoppable

SCRIPT = Path(__file__).parents[2] / "tfrecord_prep" / "prepare_tfrecord_shards.py"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_request_ends_in_one_line(number, handler, capsys):
    before = signal.signal(signal.SIGINT, handler)
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if (number, handler) == (signal.SIGINT, signal.SIG_IGN):
            with stoppable():
                signal.raise_signal(number)
            return
        with pytest.raises(SystemExit) as caught, stoppable():
            signal.raise_signal(number)
        assert caught.value.code == EXIT_STOPPED
        assert capsys.readouterr().err == "Stopped. Run the same command again to continue.\n"
        assert signal.getsignal(signal.SIGTERM) == sigterm
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_handle_no_signals():
    entered = []

    def work() -> None:
        with stoppable():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered


def test_a_file_that_becomes_too_large_leaves_nothing_complete(source, tmp_path):
    arguments = flags(source, tmp_path, "--shard-size", "100", "--partition-bytes", "8000")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({7_000}, {7_000})); "
    limited += f"import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", limited, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    said = "/train was not completed: .*File too large.*run the same command again: it resumes from there"
    assert re.search(said, line)
    with pytest.raises(InputError, match="did not end"):
        open_shards(str(tmp_path / "train"))
