"""Start, stop and end the process of a command.

A script is responsible for ending its process. Python would first destroy all objects, and TensorFlow's objects may
then wait for their threads, although all results are written.
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
# Maximum time for the exit functions that libraries register, such as functions that delete temporary files.
EXIT_SECONDS = 2.0
# A KeyboardInterrupt that Python dropped is raised again after this time, when the callback has probably returned. This
# repeats as long as Python drops the exception.
DROPPED_SECONDS = 0.01

_has_begun = False
# The error that ended the command. The error's traceback keeps alive the objects that must not be destroyed.
_kept: list[BaseException] = []
_received: list[int] = []  # signals that the running command has received
_loaded_seconds = time.monotonic()


def begin_script() -> None:
    """Set up the standard streams and signals of a script, before anything large is imported.

    Closed standard streams are opened on the null device, because otherwise the next files to be opened would get their
    file descriptors. Output to a pipe whose reader has ended is dropped, and the command continues. Ctrl-C and SIGTERM
    end the process at once until the command starts.
    """
    global _has_begun
    if _has_begun:
        return
    _has_begun = True
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is `number`
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)
    stop_at_once()


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal.

    Unlike `signal.SIG_IGN`, this handler is replaced when another command starts in the same script.
    """


class _LastingFile(io.FileIO):
    """Writes to a pipe as long as the pipe has a reader, and then drops the output."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also affects other threads and libraries
            os.close(nowhere)
            return len(content)


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """Return a copy of a standard stream that can be written to even after the reader of its pipe has ended.

    Args:
        stream: the stream; None if it is closed.
        number: file descriptor of the stream.
    """
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
    """Make the first Ctrl-C or SIGTERM raise KeyboardInterrupt, and a later Ctrl-C kill the process, even in C++ code.

    Python drops exceptions that a finalizer or a callback of the garbage collector raises. If it drops the
    KeyboardInterrupt, the KeyboardInterrupt is raised again a moment later.

    Yields:
        The list of received signals, which grows when one arrives.
    """
    before = {number: signal.getsignal(number) for number in STATUSES}
    replaceable = (*DEFAULT_HANDLERS, end_early, _ignore)
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        before = {number: handler for number, handler in before.items() if handler in replaceable}
    else:
        before = {}

    def interrupt(number: int, _frame: object) -> None:
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        is_first = not _received
        _received.append(number)
        if number == signal.SIGINT:
            os.write(2, b"\n" * os.isatty(2) + STOPPING)  # `print` fails if the signal has interrupted a `print`
        if is_first:
            raise KeyboardInterrupt

    report_dropped = sys.unraisablehook

    def raise_dropped_again(dropped: Any) -> None:
        if not _received or dropped.exc_type is not KeyboardInterrupt:
            report_dropped(dropped)
            return
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # it raises KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, DROPPED_SECONDS)

    if before:  # otherwise another command called this one, and handles the signals
        _received.clear()
        sys.unraisablehook = raise_dropped_again
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield _received
    finally:
        if before:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = report_dropped
        for number, handler in before.items():
            # A script is about to end here, so it ignores signals from now on.
            signal.signal(number, _ignore if handler is end_early else handler)
        if before:
            _received.clear()


def check_interrupts() -> None:
    """Raise KeyboardInterrupt again if the command was interrupted, because a library may have caught the first one."""
    if _received and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def repeat_notice() -> None:
    """Print again that the command is stopping, if Ctrl-C was pressed while standard error was silenced."""
    if signal.SIGINT in _received:
        os.write(2, STOPPING)


def describe_interrupt(received: Sequence[int]) -> int:
    """Print that the command was stopped, unless Ctrl-C has already printed a notice, and return the exit status."""
    if signal.SIGTERM in received[:1]:
        print("Stopped (received SIGTERM).", file=sys.stderr)
        return EXIT_STOPPED
    return EXIT_INTERRUPTED


def seconds_of_script() -> float | None:
    """Return the seconds since the process started, as `time` counts them; None if it does not run a script."""
    if not _has_begun:
        return None
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        started_seconds = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_seconds
    except (AttributeError, OSError, ValueError):  # not on Linux
        return time.monotonic() - _loaded_seconds


def keep(error: BaseException) -> None:
    """Keep the objects that an error refers to alive until the process ends, if the process runs a script."""
    if _has_begun:
        _kept.append(error)


def run_as_script(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end the process with its exit status as soon as all output is written.

    If another program runs the script inside its own process, raise SystemExit instead.
    """
    if script_path() is None:
        sys.exit(main())
    begin_script()
    try:
        status = _as_status(main())
    except SystemExit as error:
        keep(error)
        status = _as_status(error.code)
    except KeyboardInterrupt:  # Ctrl-C may be pressed just after the command ends
        status = EXIT_INTERRUPTED
    except BaseException as error:
        keep(error)
        sys.excepthook(type(error), error, error.__traceback__)
        status = EXIT_FAILED
    end_process(status)


def _as_status(code: object) -> int:
    """Convert the argument of `sys.exit` to an exit status; print it if it is a message."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return EXIT_FAILED


def end_process(status: int) -> NoReturn:
    """Flush the streams, run exit functions for at most `EXIT_SECONDS`, and end the process and its workers."""
    for number in STATUSES:
        signal.signal(number, signal.SIG_DFL)  # a signal may end the process while a slow reader blocks the flush
    flush_status = _flush()
    status = status or flush_status
    for number in STATUSES:
        signal.signal(number, signal.SIG_IGN)
    limit = threading.Timer(EXIT_SECONDS, os._exit, (status,))
    limit.daemon = True
    limit.start()
    if "multiprocessing" in sys.modules:  # its exit function waits for the workers of pools that were not closed
        threading.excepthook = lambda _: None  # a thread of a pool may raise because its workers were killed
        for worker in sys.modules["multiprocessing"].active_children():
            worker.kill()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    if not flush_status:  # otherwise the error has already been printed
        _flush()
    os._exit(status)


def _flush() -> int:
    """Flush the standard streams; return 0, or a different exit status if standard output cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"error: standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return EXIT_FAILED
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
    return 0
