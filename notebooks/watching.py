"""Helpers for a notebook's kernel, which may lack the project's packages: run cells, show plots, watch a training run.

The project runs in separate processes, with the interpreter that `install.install` returns. So nothing depends on the
packages that the kernel has installed or imported. A TPU, which only one process can use at a time, is free again after
each cell.
"""

import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.core.magic import register_cell_magic
from IPython.display import HTML, Image, display

READ_BYTES = "import sys; from mlm_common.storage import read_file; sys.stdout.buffer.write(read_file(sys.argv[1]))"
NUM_LINES_SHOWN = 20


def use_environment(python: str) -> None:
    """Run `%%project` cells in the project's environment, and let a failed `!command` stop a cell.

    A cell that starts with `%%project ARGUMENTS` runs as a separate program with these arguments in its `sys.argv`. The
    program's output is shown, and stored in the variable `printed`.

    Args:
        python: interpreter of the project's environment.
    """
    shell: Any = get_ipython()

    def project(line: str, cell: str) -> None:
        # Pass the program with `-c`, because a program from standard input cannot start worker processes.
        command = [python, "-c", cell, *shlex.split(line)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8") as process:
            lines = [_echo(text) for text in process.stdout or ()]
        shell.user_ns["printed"] = "".join(lines)
        _check(process.returncode)

    register_cell_magic(project)
    run = shell.system

    def run_or_stop(command: str) -> None:
        run(command)
        _check(shell.user_ns.get("_exit_code"))

    shell.system = run_or_stop


def show(python: str, path: str) -> None:
    """Show a PNG file, local or gs://, which the project's interpreter reads."""
    done = subprocess.run([python, "-c", READ_BYTES, path], stdout=subprocess.PIPE, check=True)
    display(Image(done.stdout))


def watch(python: str, command: str, run_folder: str, *, interval_seconds: float = 15.0) -> None:
    """Run a training command, and meanwhile redraw the plot of its loss at intervals.

    If the cell is interrupted, the training saves a checkpoint and stops.

    Args:
        python: interpreter of the project's environment.
        command: a script of the project with its flags, as in a shell.
        run_folder: the `--output-dir` in the command.
        interval_seconds: time between two plots.

    Raises:
        RuntimeError: the command failed; its last lines are shown.
    """
    view = display(HTML("Starting; the first plot appears in about a minute."), display_id=True)
    with tempfile.TemporaryDirectory() as name:
        log, picture = Path(name, "log.txt"), Path(name, "loss.png")
        with log.open("w", encoding="utf-8") as output:
            training = subprocess.Popen([python, *shlex.split(command)], stdout=output, stderr=subprocess.STDOUT)
        draw = [python, "train/compare_runs.py", "--runs", run_folder, "--picture", str(picture)]
        try:
            while not _ended(training, interval_seconds):
                _redraw(view, draw, picture)
        finally:
            training.terminate()
            training.wait()
            print("\n".join(log.read_text(errors="replace", encoding="utf-8").splitlines()[-NUM_LINES_SHOWN:]))
        _redraw(view, draw, picture)
    _check(training.returncode)


def _echo(text: str) -> str:
    print(text, end="", flush=True)
    return text


def _check(status: int | None) -> None:
    if status:
        raise RuntimeError(f"The command above ended with status {status}; its output says why.")


def _ended(process: subprocess.Popen[bytes], timeout_seconds: float) -> bool:
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _redraw(view: Any, draw: list[str], picture: Path) -> None:
    # The command fails as long as there is nothing to draw.
    if subprocess.run(draw, capture_output=True, check=False).returncode == 0:
        view.update(Image(picture.read_bytes()))
