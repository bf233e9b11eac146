import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from train.runtime import preemption


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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.02)
    yield values
    server.shutdown()
    server.server_close()
