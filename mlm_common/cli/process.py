"""How the process of a command begins, is stopped, and ends.

Python would destroy all objects at its end, and TensorFlow's may wait there for their threads, although everything is
written. So a script ends its process itself.
"""

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from mlm_common.cli import DEFAULT_HANDLERS, STATUSES, end_early, script_path, stop_at_once
from mlm_common.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED

STOPPING = b"Stopping. Press Ctrl-C again to end at once.\n"
# What libraries register for the end of a process, such as deleting temporary files, may take this long.
EXIT_SECONDS = 2.0

_has_begun = False
# The error that ended the command: its traceback holds the objects that are not to be destroyed.
_kept: list[BaseException] = []
_received: list[int] = []  # signals, by the command that runs
_loaded_seconds = time.monotonic()


def begin_script() -> None:
    """Set up the process before anything large is imported.

    A standard stream that is closed is opened to go nowhere; else the next file that is opened would get its number.
    What is written to a pipe whose reader has ended is lost, and the command continues. Ctrl-C and SIGTERM end the
    process at once, until the command has begun.
    """
    global _has_begun
    if _has_begun:
        return
    _has_begun = True
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets the lowest free number
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    stop_at_once()


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing; unlike with `signal.SIG_IGN`, a further command in the same script knows that it may be stopped."""


class _LastingFile(io.FileIO):
    """Writes to a pipe as long as it has a reader, then nowhere."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for other threads and libraries, too
            os.close(nowhere)
            return len(content)


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream like this standard stream, for the file of this number, that outlasts the reader of a pipe."""
    file = _LastingFile(number, "wb", closefd=False)
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "backslashreplace", write_through=number == 2)
    stream.flush()
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)
    return io.TextIOWrapper(
        io.BufferedWriter(file) if is_buffered else file,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextlib.contextmanager
def interruptible() -> Iterator[Sequence[int]]:
    """Make the first Ctrl-C or SIGTERM raise KeyboardInterrupt, and a Ctrl-C after it kill the process, even in C++.

    Yields the list of the signals received.
    """
    before = {number: signal.getsignal(number) for number in STATUSES}
    of_default = (*DEFAULT_HANDLERS, end_early, _ignore)
    if threading.current_thread() is threading.main_thread():  # the only one that may handle signals
        before = {number: handler for number, handler in before.items() if handler in of_default}
    else:
        before = {}

    def interrupt(number: int, _frame: object) -> None:
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        is_first = not _received
        _received.append(number)
        if number == signal.SIGINT:
            os.write(2, b"\n" * os.isatty(2) + STOPPING)  # printing might interrupt a print
        if is_first:
            raise KeyboardInterrupt

    if before:  # else they are those of the command that called this one
        _received.clear()
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield _received
    finally:
        for number, handler in before.items():
            # What a script still has to do takes a moment.
            signal.signal(number, _ignore if handler is end_early else handler)
        if before:
            _received.clear()


def check_interrupts() -> None:
    """Raise KeyboardInterrupt again if the command was interrupted, and something may have caught the first one."""
    if _received and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def describe_interrupt(received: Sequence[int]) -> int:
    """Say that the command was stopped, unless the answer to Ctrl-C has said so, and return its status."""
    if signal.SIGTERM in received[:1]:
        print("Stopped (received SIGTERM). Run the same command again to continue.", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_INTERRUPTED


def seconds_of_script() -> float | None:
    """Return how long the script has run, as `time` counts it; None if the process runs none."""
    if not _has_begun:
        return None
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        started_seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_seconds
    except (AttributeError, OSError, ValueError):  # not on Linux
        return time.monotonic() - _loaded_seconds


def keep(error: BaseException) -> None:
    """Keep what an error refers to until the process ends, if that is the end of a script."""
    if _has_begun:
        _kept.append(error)


def run_as_script(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end the process with its status as soon as all is written.

    A program that runs a script within its own process gets SystemExit.
    """
    if script_path() is None:
        sys.exit(main())
    begin_script()
    try:
        status = _as_status(main())
    except SystemExit as error:
        keep(error)
        status = _as_status(error.code)
    except KeyboardInterrupt:  # in the moment after the command
        status = EXIT_INTERRUPTED
    except BaseException as error:
        keep(error)
        sys.excepthook(type(error), error, error.__traceback__)
        status = EXIT_FAILED
    end_process(status)


def _as_status(code: object) -> int:
    """Return the status for the argument of `sys.exit`, and print it if it is a message."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return EXIT_FAILED


def end_process(status: int) -> NoReturn:
    """Flush the streams, run what was registered for the exit, but not for long, and end process and workers."""
    for number in STATUSES:
        signal.signal(number, signal.SIG_DFL)  # a reader may take its time
    flush_status = _flush()
    status = status or flush_status
    for number in STATUSES:
        signal.signal(number, signal.SIG_IGN)
    limit = threading.Timer(EXIT_SECONDS, os._exit, (status,))
    limit.daemon = True
    limit.start()
    if "multiprocessing" in sys.modules:  # whose own end waits for the workers of a pool that nobody has closed
        threading.excepthook = lambda _: None  # a thread of the pool may see that its workers were killed
        for worker in sys.modules["multiprocessing"].active_children():
            worker.kill()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    if not flush_status:  # else it has been said
        _flush()
    os._exit(status)


def _flush() -> int:
    """Flush the standard streams; return a status if what was printed cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"error: standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return EXIT_FAILED
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
    return 0
