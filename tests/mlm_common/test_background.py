import threading

from mlm_common.workers import LatestItemWorker


class Handler:
    """Handles an item when the test lets it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.started, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, item: int) -> None:
        self.begun.append(item)
        self.started.release()
        assert self.may_end.acquire(timeout=20)
        if item < 0:
            raise ValueError(item)
        self.ended.append(item)


def test_of_those_that_wait_the_newest_is_handled():
    handler = Handler()
    pushes = LatestItemWorker(handler)
    pushes.submit(1)
    handler.started.acquire()
    assert not pushes.newer_waits.is_set()
    for item in (2, 3, 4):
        pushes.submit(item)
    assert pushes.newer_waits.is_set()
    assert not pushes.wait(0.01)
    handler.may_end.release(2)
    assert pushes.wait(20)
    assert handler.ended == [1, 4]


def test_what_waits_can_be_dropped_and_what_fails_ends_nothing():
    handler = Handler()
    pushes = LatestItemWorker(handler)
    pushes.submit(-1)
    handler.started.acquire()
    pushes.submit(2)
    pushes.drop_waiting()
    assert pushes.newer_waits.is_set()
    handler.may_end.release()
    assert pushes.wait(20)
    pushes.submit(3)
    handler.may_end.release()
    assert pushes.wait(20)
    assert (handler.begun, handler.ended) == ([-1, 3], [3])


def test_nothing_to_wait_for():
    assert LatestItemWorker(Handler()).wait()
