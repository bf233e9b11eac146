"""The console of a command: plain lines on standard error, quiet libraries, and Ctrl-C."""

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

VERBOSE_FLAG = "--verbose"
OUR_PACKAGES = ("mlm_common", "tokenizer_training", "tfrecord_prep", "train", "finetuning", "benchmarks", "__main__")
# TensorFlow's warnings are about its API and the speed of callbacks: nothing that a user can change.
QUIET_LIBRARIES = {"absl": logging.ERROR, "tensorflow": logging.ERROR}
# What TensorFlow and gRPC, in C++, must show; both read it when they are first imported.
VERBOSE_VARIABLES = {"TF_CPP_MIN_LOG_LEVEL": "0", "GRPC_VERBOSITY": "INFO"}
STOPPING = b"Stopping. Press Ctrl-C again to end at once.\n"


def add_verbose_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that every command accepts; `set_up_console` reads it."""
    parser.add_argument(
        VERBOSE_FLAG, action="store_true", help="Also show the libraries' messages, and where each line comes from."
    )


def set_up_console(arguments: Sequence[str]) -> None:
    """Log to standard error: our lines as they are, the warnings and errors of all; everything with `--verbose`.

    Does nothing to a process that has set up its logging, such as a test.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names of files that are not UTF-8
    handler = logging.StreamHandler()
    if VERBOSE_FLAG in arguments:
        os.environ.update(VERBOSE_VARIABLES)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(_PlainFormatter())
        handler.addFilter(_is_for_users)
        for library, level in QUIET_LIBRARIES.items():
            logging.getLogger(library).setLevel(level)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _PlainFormatter(logging.Formatter):
    """Names the level of warnings and errors only."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "error: " if record.levelno >= logging.ERROR else "warning: "
        return (prefix if record.levelno >= logging.WARNING else "") + super().format(record)


def _is_for_users(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in OUR_PACKAGES


@contextlib.contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt and say so, and a second one kill the process, even within C++."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may handle signals
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, b"\n" * os.isatty(2) + STOPPING)  # printing might interrupt a print
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
