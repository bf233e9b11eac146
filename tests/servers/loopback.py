"""What the stand-in servers share: HTTP plumbing, a log of requests, faults on demand, and a way to steer them.

An `Application` answers requests; `LoopbackServer` carries them. The server runs as a process of its own
(`process.py`), since a native client may wait for an answer while it holds Python's interpreter lock. Tests steer it by
`POST /_control/ACTION` with a JSON body: `reset`, `fault`, `heal`, `log`, and what the application adds.
"""

import abc
import dataclasses
import json
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

CONTROL_PATH = "/_control/"


@dataclasses.dataclass(frozen=True)
class Request:
    """One request; `path` is still percent-encoded, since an encoded slash is part of a name."""

    method: str
    host: str
    path: str
    query: dict[str, str]
    headers: Message
    body: bytes = b""

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")


@dataclasses.dataclass
class Response:
    """One answer; the headers win over those that the server adds."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(status, json.dumps(content).encode(), {"Content-Type": "application/json"} | (headers or {}))


class HttpError(Exception):
    """An answer that is an error; `reason` is the word for programs, `message` the one for people."""

    def __init__(self, status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.headers = status, reason, message, headers or {}


def content_response(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    """Answer with all of the content, or the bytes that the `Range` header asks for (RFC 9110, section 14).

    Raises:
        HttpError: they begin past the end.
    """
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
    if not match:
        return Response(200, content, headers)
    start, stop = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
    if start >= len(content):
        raise HttpError(416, "InvalidRange", "The range is past the end.", {"Content-Range": f"bytes */{len(content)}"})
    content_range = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
    return Response(206, content[start:stop], headers | content_range)


@dataclasses.dataclass
class Fault:
    """What goes wrong with the next `times` requests whose `path?query` matches.

    Modes: `status` answers that status with that message and does nothing else; `delay` waits first; `reset` breaks
    the connection after `num_bytes` of the request's body; `lost_answer` does what was asked and breaks the connection
    before the answer; `truncate` breaks it after `num_bytes` of the answer; `corrupt` and `corrupt_upload` flip the
    byte number `num_bytes` of the answer or of the request; `hold` does what was asked when `release` is asked for,
    and not before.
    """

    path: str
    mode: str = "status"
    method: str = ".*"
    times: int = 1
    status: int = 503
    message: str = "a fault that the test asked for"
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    delay_seconds: float = 0.0

    def matches(self, request: Request) -> bool:
        address = unquote(request.path) + "?" + "&".join(f"{name}={value}" for name, value in request.query.items())
        return self.times > 0 and bool(re.fullmatch(self.method, request.method) and re.search(self.path, address))


class Application(abc.ABC):
    """What a server serves. Its methods are called one at a time."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abc.abstractmethod
    def respond(self, request: Request) -> Response:
        """Make the answer, or raise an `HttpError`."""

    @abc.abstractmethod
    def error_response(self, request: Request, error: HttpError) -> Response:
        """Make the answer that tells of an error."""

    def interrupted(self, request: Request) -> None:
        """Take note of a request whose connection broke; its body is what had come."""
        del request

    def control(self, action: str, argument: dict[str, Any]) -> Any:
        raise HttpError(404, "notFound", f"no control action {action} that takes {argument}")


class LoopbackServer(ThreadingHTTPServer):
    """Serves an application on a free port of 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, application: Application, handler: type["Handler"] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.application = application
        self.lock = threading.RLock()
        self.faults: list[Fault] = []
        self.log: list[dict[str, Any]] = []
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | ssl.SSLError | TimeoutError):
            super().handle_error(request, client_address)

    def take_fault(self, request: Request) -> Fault | None:
        with self.lock:
            fault = next((fault for fault in self.faults if fault.matches(request)), None)
            if fault:
                fault.times -= 1
            return fault

    def respond(self, request: Request) -> Response:
        with self.lock:
            try:
                if request.path.startswith(CONTROL_PATH):
                    return json_response(self.control(request.path.removeprefix(CONTROL_PATH), request.json()))
                return self.application.respond(request)
            except HttpError as error:
                return self.application.error_response(request, error)
            except Exception as error:  # a mistake in the stand-in has to show as one, not as a lost connection
                return self.application.error_response(request, HttpError(500, "internalError", f"mistake: {error!r}"))

    def control(self, action: str, argument: dict[str, Any]) -> Any:
        if action in ("reset", "release"):
            self.released.set()  # those who wait
            self.released = threading.Event()
            self.faults = [fault for fault in self.faults if action == "release" and fault.mode != "hold"]
            if action == "release":
                return None
            self.log.clear()
            self.application.reset()
            return None
        if action == "fault":
            self.faults.append(Fault(**argument))
            return None
        if action == "heal":
            self.faults.clear()
            return None
        if action == "log":
            return self.log
        return self.application.control(action, argument)

    def serve_until_stdin_ends(self) -> None:
        """Print the port and serve; ends with the parent process, however that ends."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        print(self.server_port, flush=True)
        sys.stdin.read()


class Handler(BaseHTTPRequestHandler):
    """Reads requests, applies faults, sends answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: LoopbackServer
    host = ""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Stay silent: tests read the log through the control path."""

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        request = Request(self.command, self.host, url.path, query, self.headers)
        if url.path.startswith(CONTROL_PATH):
            self.send(self.server.respond(dataclasses.replace(request, body=self.read_body())))
            return
        fault = self.server.take_fault(request) or Fault(path="", mode="none")
        released = self.server.released
        entry = self.log_request_start(request, fault)
        time.sleep(fault.delay_seconds)
        if fault.mode == "hold":
            released.wait()
        if fault.mode == "reset":
            partial = dataclasses.replace(request, body=self.read_body(fault.num_bytes))
            with self.server.lock:
                self.server.application.interrupted(partial)
            self.break_connection()
            return
        body = flipped(self.read_body(), fault.num_bytes) if fault.mode == "corrupt_upload" else self.read_body()
        request = dataclasses.replace(request, body=body)
        if fault.mode == "status":
            error = HttpError(fault.status, "backendError", fault.message, fault.headers)
            response = self.server.application.error_response(request, error)
        else:
            response = self.server.respond(request)
        entry["status"] = response.status  # before the answer leaves, so that a test can read it right after
        if fault.mode == "lost_answer":
            self.break_connection()
            return
        self.send(response, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request  # noqa: N815

    def log_request_start(self, request: Request, fault: Fault) -> dict[str, Any]:
        entry = {
            "method": request.method,
            "host": request.host,
            "path": unquote(request.path),
            "query": request.query,
            "range": request.headers.get("Range") or request.headers.get("Content-Range") or "",
            "token": request.token,
            "fault": fault.mode,
            "status": 0,
        }
        with self.server.lock:
            self.server.log.append(entry)
        return entry

    def read_body(self, limit: int | None = None) -> bytes:
        body = bytearray()
        for block in () if limit == 0 else self.body_blocks():
            body += block
            if limit is not None and len(body) >= limit:
                break
        return bytes(body if limit is None else body[:limit])

    def body_blocks(self) -> Iterator[bytes]:
        # TensorFlow's client sends both headers on an upload; the encoding is the one that counts.
        if "chunked" in (self.headers.get("Transfer-Encoding") or "").lower():
            while num_bytes := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield self.rfile.read(num_bytes)
                self.rfile.readline()
            self.rfile.readline()
            return
        num_left = int(self.headers.get("Content-Length") or 0)
        while num_left > 0 and (block := self.rfile.read(min(num_left, 1 << 16))):
            num_left -= len(block)
            yield block

    def send(self, response: Response, fault: Fault | None = None) -> None:
        self.send_response_only(response.status)
        length = {} if response.status == 204 else {"Content-Length": str(len(response.body))}
        for name, value in (length | response.headers).items():
            self.send_header(name, value)
        self.end_headers()
        body = b"" if self.command == "HEAD" or response.status == 204 else response.body
        if fault and fault.mode == "corrupt":
            body = flipped(body, fault.num_bytes)
        if fault and fault.mode == "truncate":
            body = body[: fault.num_bytes]
            self.close_connection = True
        self.wfile.write(body)

    def break_connection(self) -> None:
        # A linger time of 0 makes the close a reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close_connection = True


def flipped(content: bytes, position: int) -> bytes:
    """Invert all bits of one byte of the content."""
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :] if content else content
