"""Exit statuses, and the exceptions that map to them."""

import signal
import traceback
from pathlib import Path

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PERMANENT = 3
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a shutdown request; the same command resumes
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells say it
# The same command would end in the same way, or was ended by a person.
FINAL_STATUSES = frozenset({0, EXIT_BAD_INPUT, EXIT_PERMANENT, EXIT_INTERRUPTED})
# What the documentation says of each.
MEANINGS = {
    0: "The command has finished.",
    EXIT_FAILED: "It failed, and another try may succeed: a lost TPU, a server that does not answer, a crash.",
    EXIT_BAD_INPUT: "Bad input. The line says what is wrong, what was received, and how to fix it.",
    EXIT_PERMANENT: "It would fail again: the training diverged, writing is forbidden, an input file is damaged.",
    EXIT_STOPPED: "It was asked to stop, and everything is saved. Run the same command again to continue.",
    EXIT_INTERRUPTED: "Ctrl-C. Run the same command again to continue.",
}


class InputError(ValueError):
    """Bad input: the message says what is wrong, what was received, and how to fix it."""

    exit_status = EXIT_BAD_INPUT


class RunFailedError(RuntimeError):
    """The run failed: the message says what happened, what is kept, and how to resume.

    A retry may succeed.
    """

    exit_status = EXIT_FAILED


class PermanentError(RunFailedError):
    """The run failed, and the same command would fail again until a person changes something."""

    exit_status = EXIT_PERMANENT


def error_summary(error: BaseException) -> str:
    """Summarize an unexpected error in one line: its type, its message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}{place}".split())
