"""Command lines: flags as dataclass fields, grouped help, and progress and messages on the terminal.

Every script imports this module first. This module must import nothing that takes time, because Ctrl-C prints a
traceback until the import has finished.
"""

import os
import re
import signal
import sys
from pathlib import Path

PROJECT_FOLDER = Path(__file__).resolve().parents[2]
COMMAND_FOLDERS = ("tokenizer_training", "tfrecord_prep", "train", "finetuning", "recipes")
# {signal that stops a command: exit status}. The statuses are EXIT_INTERRUPTED and EXIT_STOPPED of `mlm_common.errors`.
STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 75}
DEFAULT_HANDLERS = (signal.default_int_handler, signal.SIG_DFL)
STOPPED_EARLY = b"Stopped.\n"
# Options of Python itself: `-m NAME`, possibly joined with other options (`-um NAME`), and the options that take a
# value.
_MODULE_OPTION = re.compile("-[bBdEiIOPqsSuvx]*m(.*)")
OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def stop_at_once() -> None:
    """Make Ctrl-C and SIGTERM end the process at once. A command later replaces these handlers with its own."""
    for number in STATUSES:
        if signal.getsignal(number) in DEFAULT_HANDLERS:
            signal.signal(number, end_early)


def end_early(number: int, _frame: object) -> None:
    try:
        os.write(2, b"\n" * os.isatty(2) + STOPPED_EARLY)
    finally:  # even if standard error is closed
        os._exit(STATUSES[signal.Signals(number)])


def script_path() -> Path | None:
    """Return the path of the script or module that Python was started with, if any.

    Under a profiler or debugger the result is None, because that program still has work to do after the script.
    """
    main = sys.modules.get("__main__")
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None:
        return None
    arguments = iter(sys.orig_argv[1:])
    for argument in arguments:
        if argument in OPTIONS_WITH_VALUE:
            next(arguments, None)
        elif module := _MODULE_OPTION.fullmatch(argument):
            name = module[1] or next(arguments, "")
            is_started = (
                spec is not None and spec.name == name and name.partition(".")[0] not in sys.stdlib_module_names
            )
            return Path(path).resolve() if is_started else None
        elif not argument.startswith("-"):
            return Path(path).resolve() if os.path.realpath(argument) == os.path.realpath(path) else None
    return None


def runs_command() -> bool:
    """Return whether this process was started to run a command of this project."""
    path = script_path()
    if path is not None and path.parent == Path(sys.prefix, "bin").resolve():  # a console script: run-mlm
        name = path.stem.replace("-", "_")
        return any((PROJECT_FOLDER / folder / f"{name}.py").exists() for folder in COMMAND_FOLDERS)
    return path is not None and path.parent.parent == PROJECT_FOLDER and path.parent.name in COMMAND_FOLDERS


if runs_command():
    stop_at_once()
    from mlm_common.cli.process import begin_script

    begin_script()
