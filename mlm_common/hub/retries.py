"""Repeat calls of huggingface_hub after transient errors, with growing waits, and give each request a time-out.

huggingface_hub repeats few of its requests, and gives few a time-out. Before its version 1 it sends them by `requests`,
since then by `httpx` or its successor.
"""

import functools
import json
import logging
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import constants

from mlm_common.errors import InputError, RunFailedError, retry_call

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CONNECT_TIMEOUT_SECONDS = 30.0
# Between two bytes of an answer; the Hub may take a minute to commit large files.
READ_TIMEOUT_SECONDS = 300.0
# A storage answers an upload at once. The process cannot end earlier, since it waits for huggingface_hub's threads.
UPLOAD_READ_TIMEOUT_SECONDS = 60.0
# The longest wait that an answer's Retry-After is granted.
MAX_RETRY_AFTER_SECONDS = 900.0
TRANSIENT_STATUSES = {408, 409, 412, 429, 500, 502, 503, 504}
# The errors of `requests` and of `httpx` by which an answer did not come, or not whole. Text instead of JSON is the
# page of a proxy that did not reach the Hub.
BROKEN_IN_REQUESTS = ("ConnectionError", "Timeout", "ChunkedEncodingError", "JSONDecodeError")
BROKEN_IN_HTTPX = ("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError")


class HubAwayError(RunFailedError):
    """The Hub, or the network, failed for a transient reason; the message says what it was needed for."""


class NoAnswerError(ConnectionError):
    """An error of `httpx` as one of the system, as those of `requests` are."""


def repeat(
    function: Callable[[], Result], delays_seconds: tuple[float, ...], stop_retries: threading.Event | None = None
) -> Result:
    """Call the function until it succeeds, with a wait after each transient error; the last error is raised.

    What the function does is ask the Hub, and nothing else. Where no answer of the Hub came, the error is an OSError.
    """

    unanswered: tuple[type[Exception], ...] = (*_broken(), json.JSONDecodeError)

    def ask() -> Result:
        try:
            return function()
        except unanswered as error:
            if isinstance(error, OSError):
                raise
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error

    def log(error: Exception, wait_seconds: float) -> None:
        logger.warning("The Hub failed, next try in %.0f s: %s", wait_seconds, one_line(error))

    return retry_call(
        ask,
        delays_seconds,
        _is_transient,
        on_failure=log,
        least_wait_seconds=_retry_after_seconds,
        stop_event=stop_retries,
    )


def one_line(error: BaseException) -> str:
    """Write what the error says, and what it was raised from, on one line of bounded length."""
    cause = _cause(error)
    return textwrap.shorten(str(error) if cause in (None, error) else f"{error} {cause}", 300)


def status_of(error: BaseException) -> int | None:
    """Look up the status of the HTTP answer behind the exception, None without one."""
    return getattr(_response(error), "status_code", None)


def hub_error(message: str, error: BaseException) -> HubAwayError | InputError:
    """Make the error for a failed request: one that a retry may help if the reason is transient, else bad input."""
    if _is_of_encoding(error):
        check_token()
    return (HubAwayError if is_away(error) else InputError)(message)


def is_away(error: BaseException | None) -> bool:
    """Return whether the exception, or one that it was raised from, means that the Hub is away for a while."""
    return error is not None and (_is_transient(error) or is_away(error.__cause__ or error.__context__))


def _is_of_encoding(error: BaseException | None) -> bool:
    """Return whether text could not be sent, as the exception or one that it was raised from says."""
    return error is not None and (
        isinstance(error, UnicodeEncodeError) or _is_of_encoding(error.__cause__ or error.__context__)
    )


def check_token() -> None:
    """Raise an InputError if the Hub token has a character that none has, and that no request can send."""
    token = huggingface_hub.get_token() or ""
    wrong = next((character for character in token if not "!" <= character <= "~"), None)
    if wrong is not None:
        raise InputError(
            f"A Hub token must be letters, digits and `_`; this one has {wrong!r} (U+{ord(wrong):04X}) at character "
            f"{token.index(wrong) + 1}. Copy it again, and set HF_TOKEN or log in with `hf auth login`."
        )


@functools.cache
def configure_sessions() -> None:
    """Give all requests of huggingface_hub from now on a time-out."""
    if hasattr(huggingface_hub, "configure_http_backend"):
        huggingface_hub.configure_http_backend(_make_session)
        return
    usual: Any = huggingface_hub.get_session()
    hooks = {"request": [*usual.event_hooks["request"], _bound]}
    huggingface_hub.set_client_factory(lambda: type(usual)(follow_redirects=True, timeout=None, event_hooks=hooks))


def _make_session() -> Any:
    """Make a session of `requests` whose requests have a time-out."""
    import requests  # a third of the start of a worker process, which needs none of it
    from requests.adapters import HTTPAdapter

    class BoundedAdapter(HTTPAdapter):
        def send(self, request: Any, **options: Any) -> Any:  # type: ignore[override]
            options["timeout"] = options.get("timeout") or (CONNECT_TIMEOUT_SECONDS, _read_seconds(request))
            return super().send(request, **options)

    session = requests.Session()
    session.mount("http://", BoundedAdapter())
    session.mount("https://", BoundedAdapter())
    return session


def _bound(request: Any) -> None:
    """Give a request of `httpx` the time-outs that it lacks."""
    read_seconds = _read_seconds(request)
    ours = {"connect": CONNECT_TIMEOUT_SECONDS, "read": read_seconds, "write": read_seconds}
    given = {name: seconds for name, seconds in request.extensions.get("timeout", {}).items() if seconds is not None}
    request.extensions["timeout"] = ours | given


def _read_seconds(request: Any) -> float:
    return UPLOAD_READ_TIMEOUT_SECONDS if request.method == "PUT" else READ_TIMEOUT_SECONDS


def _cause(error: BaseException) -> BaseException | None:
    """Unwrap the exception; huggingface_hub wraps those of uploads in a RuntimeError."""
    return error.__cause__ if isinstance(error, RuntimeError) else error


def _response(error: BaseException) -> Any:
    return getattr(_cause(error), "response", None)


def _is_transient(error: BaseException) -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    # `datasets` and `hf_xet` say only that there was no connection.
    return isinstance(_cause(error), (ConnectionError, *_broken())) or status_of(error) in TRANSIENT_STATUSES


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """Look up the errors in the library that huggingface_hub sends its requests by."""
    from huggingface_hub.errors import HTTPError  # imports the library

    library = sys.modules[HTTPError.__module__]
    names = BROKEN_IN_REQUESTS if library.__name__.startswith("requests") else BROKEN_IN_HTTPX
    return tuple(getattr(library, name) for name in names)


def _retry_after_seconds(error: BaseException) -> float:
    """Read what the answer's header asks for; the Hub states it in seconds."""
    response = _response(error)
    value = response.headers.get("Retry-After", "0") if response is not None else "0"
    return min(float(value), MAX_RETRY_AFTER_SECONDS) if value.isdigit() else 0.0
