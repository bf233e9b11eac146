"""Calls of huggingface_hub that outlive passing failures: repeated with growing waits, each request with a time-out.

huggingface_hub repeats only the upload of a large file; its other requests are neither repeated nor given a time-out.
"""

import functools
import logging
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlm_common.errors import InputError, RunFailedError
from mlm_common.retry import retry_call

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CONNECT_TIMEOUT_SECONDS = 30.0
# Between two bytes of an answer; the Hub may take a minute to commit large files.
READ_TIMEOUT_SECONDS = 300.0
# A storage answers an upload at once. The process cannot end before it, since huggingface_hub's threads are waited for.
UPLOAD_READ_TIMEOUT_SECONDS = 60.0
# The longest wait that an answer's Retry-After is granted.
MAX_RETRY_AFTER_SECONDS = 900.0
TRANSIENT_STATUSES = {408, 409, 412, 429, 500, 502, 503, 504}


class HubAwayError(RunFailedError):
    """The Hub, or the way to it, failed for a passing reason; the message says what was wanted of it."""


class RequestsStoppedError(OSError):
    """A request that was not sent, or not to its end, because its push was told to stop."""


@dataclass(frozen=True)
class Interruption:
    """How another thread ends a push early: `stop_event` ends the waits between its tries, `stop` also the upload."""

    stop_event: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


def repeat(
    function: Callable[[], Result], delays_seconds: tuple[float, ...], interruption: Interruption | None = None
) -> Result:
    """Call the function until it succeeds; a transient failure costs a wait, the last one is raised."""

    def log(error: Exception, wait_seconds: float) -> None:
        logger.warning("The Hub failed, next try in %.0f s: %s", wait_seconds, one_line(error))

    return retry_call(
        function,
        delays_seconds,
        _is_transient,
        on_failure=log,
        least_wait_seconds=_retry_after_seconds,
        stop_event=(interruption or Interruption()).stop_event,
    )


def one_line(error: BaseException) -> str:
    """Write what the error says, and what it was raised from, on one line of bounded length."""
    cause = _cause(error)
    return textwrap.shorten(str(error) if cause in (None, error) else f"{error} {cause}", 300)


def status_of(error: BaseException) -> int | None:
    """Look up the status of the HTTP answer behind the exception, None without one."""
    return getattr(_response(error), "status_code", None)


def hub_error(message: str, error: BaseException) -> HubAwayError | InputError:
    """Make the error for what the Hub did not give: one to be tried again if the reason is passing, else bad input."""
    return (HubAwayError if is_away(error) else InputError)(message)


def is_away(error: BaseException | None) -> bool:
    """Ask whether the exception, or one that it was raised from, is of a Hub that is away for a while."""
    from huggingface_hub import constants

    if error is None or constants.HF_HUB_OFFLINE:
        return False
    # `datasets` tells no more than that there was no connection.
    return isinstance(error, ConnectionError) or _is_transient(error) or is_away(error.__cause__ or error.__context__)


def configure_sessions(interruption: Interruption | None = None) -> None:
    """Give all requests of huggingface_hub from now on a time-out, and let `interruption.stop` end them."""
    import requests
    from huggingface_hub import configure_http_backend
    from requests.adapters import HTTPAdapter

    stop = (interruption or Interruption()).stop

    class BoundedAdapter(HTTPAdapter):
        def send(self, request: Any, **options: Any) -> Any:  # type: ignore[override]
            if stop.is_set():
                raise RequestsStoppedError("the push was told to stop")
            if hasattr(request.body, "read"):
                request.body = _StoppableBody(request.body, stop)
            read_seconds = UPLOAD_READ_TIMEOUT_SECONDS if request.method == "PUT" else READ_TIMEOUT_SECONDS
            options["timeout"] = options.get("timeout") or (CONNECT_TIMEOUT_SECONDS, read_seconds)
            return super().send(request, **options)

    def make_session() -> requests.Session:
        session = requests.Session()
        session.mount("http://", BoundedAdapter())
        session.mount("https://", BoundedAdapter())
        return session

    configure_http_backend(make_session)


class _StoppableBody:
    """The body of a request as a file that cannot be read on once its push was told to stop."""

    def __init__(self, body: Any, stop: threading.Event):
        self._body = body
        self._stop = stop

    def read(self, *arguments: Any) -> bytes:
        if self._stop.is_set():
            raise RequestsStoppedError("the push was told to stop")
        return self._body.read(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


def _cause(error: BaseException) -> BaseException | None:
    """Unwrap the exception; huggingface_hub wraps those of uploads in a RuntimeError."""
    return error.__cause__ if isinstance(error, RuntimeError) else error


def _response(error: BaseException) -> Any:
    return getattr(_cause(error), "response", None)


@functools.cache
def _transient_errors() -> tuple[type[Exception], ...]:
    from requests import exceptions

    # Text in the place of JSON is the page of a proxy that did not reach the Hub.
    return (
        exceptions.ConnectionError,
        exceptions.Timeout,
        exceptions.ChunkedEncodingError,
        exceptions.JSONDecodeError,
    )


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, OSError | RuntimeError):
        return False
    return isinstance(_cause(error), _transient_errors()) or status_of(error) in TRANSIENT_STATUSES


def _retry_after_seconds(error: BaseException) -> float:
    """Read what the answer's header asks for; the Hub states it in seconds."""
    response = _response(error)
    value = response.headers.get("Retry-After", "0") if response is not None else "0"
    return min(float(value), MAX_RETRY_AFTER_SECONDS) if value.isdigit() else 0.0
