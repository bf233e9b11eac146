"""A background worker that processes only the most recent item."""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

# How long a command waits for its threads at its end: longer than one try of Cloud Storage's client.
END_SECONDS = 150.0
# After a stop or an error: whoever stopped the command may be about to kill it.
STOP_SECONDS = 5.0

Item = TypeVar("Item")


def seconds_to_end(error_type: type[BaseException] | None) -> float:
    """Return how long a context may wait for its thread, by the exception that ends the context."""
    return END_SECONDS if error_type is None else STOP_SECONDS


class LatestItemWorker(Generic[Item]):
    """Calls `handle` in a daemon thread, one item at a time; while it is busy, a newer item replaces the waiting one.

    `newer_waits` is set while an item waits, so that `handle` can end early what the next item makes useless.

    Args:
        handle: its exceptions are logged, and the next item follows.
    """

    def __init__(self, handle: Callable[[Item], None]):
        self.newer_waits = threading.Event()
        self._handle = handle
        self._changed = threading.Condition()
        self._waiting: Item | None = None
        self._is_busy = False
        self._thread: threading.Thread | None = None

    def submit(self, item: Item) -> None:
        """Handle the item next, instead of the one that waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="latest-item", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting = item
            self.newer_waits.set()
            self._changed.notify_all()

    def drop_waiting(self) -> None:
        """Drop the item that waits, and let the current one end early."""
        with self._changed:
            self._waiting = None
            self.newer_waits.set()
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is handled, and return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._is_busy, timeout_seconds)

    def _work(self) -> None:
        while True:
            item = self._take()
            try:
                self._handle(item)
            except Exception:  # the thread must survive for the next item
                logger.exception("work in the background failed")
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
            del item  # its memory may be large

    def _take(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None)
            item, self._waiting = self._waiting, None
            self._is_busy = True
            self.newer_waits.clear()
            assert item is not None
            return item
