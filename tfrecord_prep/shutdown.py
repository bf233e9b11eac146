"""Shutdown requests to a preparation: Ctrl-C and SIGTERM end it in the same way, and the same command continues it."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mlm_common.errors import EXIT_STOPPED


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM within it into one line and the status of a run that can be continued.

    Raises:
        SystemExit: with `EXIT_STOPPED`, after such a request.
    """

    def terminate(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)  # which waits for what must not be interrupted
        else:  # as that of a command in the background may be
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may handle signals
    before = signal.signal(signal.SIGTERM, terminate) if in_main_thread else None
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
