"""Requests to stop from signals and from a metadata server on loopback."""

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from train.runtime import preemption
from train.runtime.preemption import StopRequest, listening


@pytest.fixture
def metadata(monkeypatch):
    """The values of a metadata server, by name, which a test may change."""
    values = {"instance/maintenance-event": "NONE", "instance/preempted": "FALSE"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/")
            is_known = name in values and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(values.get(name, "").encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.02)
    yield values
    server.shutdown()
    server.server_close()


def wait_until(holds, timeout_seconds=30):
    end_seconds = time.monotonic() + timeout_seconds
    while not holds() and time.monotonic() < end_seconds:
        time.sleep(0.01)
    return holds()


def test_sigterm_makes_the_request_and_its_handler_goes_away():
    request = StopRequest()
    before = signal.getsignal(signal.SIGTERM)
    with listening(request, on_cloud_machine=False):
        assert not request.is_due(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_until(lambda: request.is_due(2))
    assert request.reason == "received SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("instance/preempted", "TRUE")],
)
def test_a_notice_makes_the_request(metadata, name, value):
    request = StopRequest()
    with listening(request, on_cloud_machine=False):
        time.sleep(0.2)
        assert not request.is_made
        metadata[name] = value
        assert wait_until(lambda: request.is_made)
    assert request.reason == f"the machine's {name} is {value}"


def test_a_notice_that_stood_before_does_not_count(metadata):
    metadata["instance/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    request = StopRequest()
    with listening(request, on_cloud_machine=False):
        time.sleep(0.2)
        assert not request.is_made
        metadata["instance/preempted"] = "TRUE"
        assert wait_until(lambda: request.is_made)


def test_workers_stop_where_they_ask_each_other():
    asked = []

    def agree(value):
        asked.append(value)
        return True

    request = StopRequest(agree)
    assert not any(request.is_due(step) for step in range(1, request.interval_steps))
    assert not asked
    assert request.is_due(request.interval_steps)
    assert asked == [False]
    request.make("a reason")
    assert not request.may_interrupt
