"""Ctrl-C at a moment when it would leave something half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Let Ctrl-C take effect at the end; in a thread that is not the main one, it takes effect elsewhere anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
