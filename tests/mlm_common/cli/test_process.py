"""How the process of a script begins and ends, whatever became of its standard streams."""

import importlib
import operator
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlm_common.cli import STATUSES
from mlm_common.cli.command_line import command
from mlm_common.cli.process import check_interrupts, run_as_script
from mlm_common.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.fixtures.commands import COMMANDS, PARSERS, SMALL_COMMANDS

DEFAULT_OF_PYTHON = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
PROJECT_FOLDER = Path(__file__).parents[3]
BEGIN = """
import atexit, logging, os, signal, sys, time
from mlm_common.cli.command_line import command
from mlm_common.cli.process import run_as_script
from mlm_common.errors import InputError, RunFailedError
from pathlib import Path

logger = logging.getLogger("mlm_common")

@command
def main(argv=None):
"""
END = """
run_as_script(main)
"""


def run_script(body: str, folder: Path, *, begin: str = BEGIN, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of this body as a script, which must not hang."""
    script = folder / "script.py"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script.write_text(begin + lines + END, encoding="utf-8")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    environment = os.environ | {"PYTHONPATH": str(PROJECT_FOLDER), "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=folder, timeout=60, check=False, **options
    )


STAYS = """
class Stays:
    def __del__(self):
        while True:
            time.sleep(1)
stays = Stays()
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise InputError('bad')", 2), ("raise ZeroDivisionError", 1), ("os.kill(os.getpid(), signal.SIGTERM)", 75)],
)
def test_objects_that_would_wait_at_their_end_are_not_destroyed(end, status, tmp_path):
    """As an iterator of tf.data that waits for a thread of its own."""
    assert run_script(f"{STAYS}\n{end}", tmp_path).returncode == status


def test_what_is_registered_for_the_exit_is_done_but_not_for_ever(tmp_path):
    body = "atexit.register(time.sleep, 1000)\natexit.register(Path('done').touch)\nprint('printed')"
    done = run_script(body, tmp_path)
    assert (done.returncode, done.stdout) == (0, b"printed\n")
    assert (tmp_path / "done").exists()


def test_workers_that_are_left_are_not_waited_for(tmp_path):
    """As those of a generator that an error has left in the middle."""
    body = """
from operator import methodcaller
from mlm_common.workers import map_in_order
results = map_in_order(methodcaller("upper"), ["a", "b", "c", "d"], 2, "")
raise RunFailedError(next(results))
"""
    script = "import atexit, pathlib\natexit.register(pathlib.Path('done').touch)\n" + BEGIN
    done = run_script(body, tmp_path, begin=script)
    assert (done.returncode, done.stderr) == (1, b"error: A\n")
    assert (tmp_path / "done").exists()  # registered first, done last


@pytest.mark.parametrize(
    ("error", "number", "status", "said"),
    [
        ("ImportError('failed')", signal.SIGINT, 130, b"Stopping. Press Ctrl-C again to end at once.\n"),
        (
            *("InputError('damaged')", signal.SIGTERM, 75),
            b"Stopped (received SIGTERM). Run the same command again to continue.\n",
        ),
    ],
)
def test_what_an_interrupt_is_turned_into_is_still_the_interrupt(error, number, status, said, tmp_path):
    """As C++ turns one that comes while its module is imported into an error of the import."""
    body = f"""
try:
    os.kill(os.getpid(), {int(number)})
    time.sleep(60)
except KeyboardInterrupt as interrupt:
    raise {error} from interrupt
"""
    done = run_script(body, tmp_path)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize(
    ("callback", "number"),
    [
        ("type('Finalized', (), {'__del__': interrupt})()", signal.SIGINT),
        ("gc.callbacks.append(interrupt)\ngc.collect()", signal.SIGTERM),
        ("weakref.finalize(type('Finalized', (), {})(), interrupt)", signal.SIGINT),
    ],
    ids=["finalizer", "garbage collector", "weak reference"],
)
def test_interrupt_in_a_callback_whose_errors_python_drops_still_stops_the_command(callback, number, tmp_path):
    body = f"""
import gc, weakref
def interrupt(*_):
    gc.callbacks.clear()
    os.kill(os.getpid(), {int(number)})
    time.sleep(0.05)
{callback}
time.sleep(60)
"""
    done = run_script(body, tmp_path)
    assert done.returncode == STATUSES[number]
    assert done.stderr.startswith(b"Stopp")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("script", sorted({*COMMANDS, *SMALL_COMMANDS, *PARSERS} - {"install.py"}))
def test_an_interrupt_in_the_first_imports_is_one_line(script, tmp_path):
    """Python's modules are found here first, and `typing` is what a command imports before it does anything."""
    number, status = random.Random(script).choice([(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_STOPPED)])
    module = f"import os\nos.kill(os.getpid(), {int(number)})\nraise ImportError('initialization failed')"
    (tmp_path / "typing.py").write_text(module, encoding="utf-8")
    command = [sys.executable, str(PROJECT_FOLDER / script), "--help"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, check=False, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (status, b"Stopped.\n")
    if script == "train/run_mlm.py":
        done = subprocess.run(command, env=environment, check=False, preexec_fn=lambda: os.close(2))
        assert done.returncode == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_is_interrupted_in_one_line_at_any_moment(number, tmp_path):
    """Among them those when its workers start and count."""
    script = PROJECT_FOLDER / "tokenizer_training" / "train_unigram.py"
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} words and {number**3} more\n" for number in range(3000)), encoding="utf-8")
    flags = ["--data-files", str(text), "--vocab-size", "400", "--num-workers", "2", "--output-dir", "output"]
    for moment in range(3):
        process = subprocess.Popen(
            [sys.executable, str(script), *flags], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        with process:
            process.stderr.readline()
            time.sleep(moment * 0.1)
            process.send_signal(number)
            errors = process.stderr.read().decode()
            status = process.wait(60)
        if status != 0:
            assert status == {signal.SIGINT: 130, signal.SIGTERM: 75}[number], errors
            assert len([line for line in errors.splitlines() if line.startswith("Stop")]) == 1, errors
            assert "Traceback" not in errors


def test_work_goes_on_when_the_reader_of_its_output_has_ended(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    body = """
for number in range(100_000):
    print(number)
    print(number, file=sys.stderr)
logger.info("logged")
os.write(2, b"of a library")
Path("done").touch()
"""
    done = run_script(body, tmp_path, stdout=writing, stderr=writing)
    os.close(writing)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()
    errors = run_script(body.replace("print(number, file=sys.stderr)", ""), tmp_path).stderr
    assert errors.startswith(b"logged\nof a libraryDone in ")


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_closed_streams_are_no_file_that_is_opened_later(closed, tmp_path):
    body = """
from mlm_common.cli.console import progress_bar
with open("file", "wb") as file:
    assert file.fileno() > 2
    print("printed")
    print("said", file=sys.stderr)
    logger.info("logged")
    with progress_bar("Counting", " words", 10) as bar:
        bar.update(10)
"""

    def close() -> None:
        for number in closed:
            os.close(number)

    done = run_script(body, tmp_path, preexec_fn=close)
    assert done.returncode == 0
    assert (tmp_path / "file").read_bytes() == b""
    assert done.stdout == (b"" if 1 in closed else b"printed\n")
    assert done.stderr.startswith(b"" if 2 in closed else b"said\nlogged\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("end", "status"), [("pass", 1), (f"raise SystemExit({EXIT_STOPPED})", EXIT_STOPPED)])
def test_output_that_cannot_be_written_is_one_line_and_hides_no_stop(end, status, tmp_path):
    with Path("/dev/full").open("wb") as full:
        done = run_script(f"print('printed')\n{end}", tmp_path, stdout=full)
    assert done.returncode == status
    assert done.stderr.endswith(b"error: standard output cannot be written: No space left on device.\n")


def test_a_program_that_runs_a_script_itself_goes_on(tmp_path):
    (tmp_path / "script.py").write_text(BEGIN + "    pass" + END, encoding="utf-8")
    program = """
import contextlib, runpy, sys
for path in sys.argv[1].split():
    sys.argv[:] = [path, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
print("done")
"""
    paths = f"{tmp_path}/script.py {PROJECT_FOLDER}/train/compare_runs.py"
    environment = os.environ | {"PYTHONPATH": str(PROJECT_FOLDER)}
    printed = subprocess.check_output([sys.executable, "-c", program, paths], env=environment)
    assert printed.endswith(b"done\n")


def test_a_profiler_of_a_script_writes_what_it_found(tmp_path):
    (tmp_path / "script.py").write_text(BEGIN + "    pass" + END, encoding="utf-8")
    command = [sys.executable, "-m", "cProfile", "-o", "profile.out", "script.py"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT_FOLDER)}
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "profile.out").exists()


def test_an_interrupt_is_forgotten_with_its_command():
    @command
    def main(_argv=None):
        signal.raise_signal(signal.SIGINT)

    handlers = {number: signal.signal(number, handler) for number, handler in DEFAULT_OF_PYTHON.items()}
    try:
        assert main([]) == EXIT_INTERRUPTED
        check_interrupts()  # as an import of TensorFlow does, in the next cell of a notebook
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_console_scripts_end_as_scripts_do():
    text = (PROJECT_FOLDER / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]\n")[2]
    scripts = re.findall(r'^([\w-]+) = "([\w.]+):([\w.]+)"$', text.partition("\n[")[0], re.MULTILINE)
    assert len(scripts) >= 11
    for name, module, place in scripts:
        script = operator.attrgetter(place)(importlib.import_module(module))
        assert script.func is run_as_script
        assert f"{name.replace('-', '_')}.py" in {Path(module.replace(".", "/") + ".py").name}
