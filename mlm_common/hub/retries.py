"""Repeat calls of huggingface_hub after transient errors, with growing waits, and give each request a time-out.

huggingface_hub itself repeats only a few of its requests, and gives only a few of them a time-out. Versions before 1
send requests with the library `requests`, and later versions with `httpx` or its successor.
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
# Maximum time between two bytes of a response. The Hub may take a minute to commit large files.
READ_TIMEOUT_SECONDS = 300.0
# The same limit for an upload, to which the storage responds at once. The limit must be short, because a process cannot
# end before the uploads in huggingface_hub's threads have ended.
UPLOAD_READ_TIMEOUT_SECONDS = 60.0
# The longest wait that the Retry-After header of a response can cause.
MAX_RETRY_AFTER_SECONDS = 900.0
TRANSIENT_STATUSES = {408, 409, 412, 429, 500, 502, 503, 504}
# The errors of `requests` and `httpx` that mean that no response, or only a part of one, arrived. A response that is
# not JSON comes from a proxy that did not reach the Hub.
BROKEN_IN_REQUESTS = ("ConnectionError", "Timeout", "ChunkedEncodingError", "JSONDecodeError")
BROKEN_IN_HTTPX = ("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError")


class HubAwayError(RunFailedError):
    """The Hub or the network has failed temporarily. The message says what the Hub was needed for."""


class NoAnswerError(ConnectionError):
    """An error of `httpx`, converted to an OSError, because the errors of `requests` are OSErrors."""


def repeat(
    function: Callable[[], Result], delays_seconds: tuple[float, ...], stop_retries: threading.Event | None = None
) -> Result:
    """Call a function until it succeeds, with a wait after each transient error, and raise the last error.

    Args:
        function: sends requests to the Hub, and does nothing else that can fail.
        delays_seconds: waits before the retries.
        stop_retries: if set by another thread, ends the current wait and the retries.

    Raises:
        OSError: no response from the Hub arrived. Also any other error that the function raises.
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
        logger.warning("The Hub failed, trying again in %.0f s: %s", wait_seconds, one_line(error))

    return retry_call(
        ask,
        delays_seconds,
        _is_transient,
        on_failure=log,
        least_wait_seconds=_retry_after_seconds,
        stop_event=stop_retries,
    )


def one_line(error: BaseException) -> str:
    """Return the messages of an error and of its cause as one line of limited length."""
    cause = _cause(error)
    return textwrap.shorten(str(error) if cause in (None, error) else f"{error} {cause}", 300)


def status_of(error: BaseException) -> int | None:
    """Return the status of the HTTP response that caused an exception; None if there was no response."""
    return getattr(_response(error), "status_code", None)


def hub_error(message: str, error: BaseException) -> HubAwayError | InputError:
    """Make the error for a failed request: a HubAwayError if the reason is transient, else an InputError."""
    if _is_of_encoding(error):
        check_token()
    return (HubAwayError if is_away(error) else InputError)(message)


def is_away(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, means that the Hub is temporarily unavailable."""
    return error is not None and (_is_transient(error) or is_away(error.__cause__ or error.__context__))


def _is_of_encoding(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, means that some text cannot be encoded."""
    return error is not None and (
        isinstance(error, UnicodeEncodeError) or _is_of_encoding(error.__cause__ or error.__context__)
    )


def check_token() -> None:
    """Check that the Hub token contains only characters that are valid in a token and can be sent in a request.

    Raises:
        InputError: the token contains an invalid character.
    """
    token = huggingface_hub.get_token() or ""
    wrong = next((character for character in token if not "!" <= character <= "~"), None)
    if wrong is not None:
        raise InputError(
            f"A Hub token must be letters, digits and `_`; this one has {wrong!r} (U+{ord(wrong):04X}) at character "
            f"{token.index(wrong) + 1}. Copy it again, and set HF_TOKEN or log in with `hf auth login`."
        )


@functools.cache
def configure_sessions() -> None:
    """Give all later requests of huggingface_hub a time-out."""
    if hasattr(huggingface_hub, "configure_http_backend"):
        huggingface_hub.configure_http_backend(_make_session)
        return
    usual: Any = huggingface_hub.get_session()
    hooks = {"request": [*usual.event_hooks["request"], _bound]}
    huggingface_hub.set_client_factory(lambda: type(usual)(follow_redirects=True, timeout=None, event_hooks=hooks))


def _make_session() -> Any:
    """Make a session of `requests` whose requests have a time-out."""
    # Imported here, because the import would take a third of the startup time of worker processes, which do not need
    # it.
    import requests
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
    defaults = {"connect": CONNECT_TIMEOUT_SECONDS, "read": read_seconds, "write": read_seconds}
    given = {name: seconds for name, seconds in request.extensions.get("timeout", {}).items() if seconds is not None}
    request.extensions["timeout"] = defaults | given


def _read_seconds(request: Any) -> float:
    return UPLOAD_READ_TIMEOUT_SECONDS if request.method == "PUT" else READ_TIMEOUT_SECONDS


def _cause(error: BaseException) -> BaseException | None:
    """Return the exception itself or, if huggingface_hub has wrapped it in a RuntimeError (uploads), its cause."""
    return error.__cause__ if isinstance(error, RuntimeError) else error


def _response(error: BaseException) -> Any:
    return getattr(_cause(error), "response", None)


def _is_transient(error: BaseException) -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    # `datasets` and `hf_xet` raise plain ConnectionErrors.
    return isinstance(_cause(error), (ConnectionError, *_broken())) or status_of(error) in TRANSIENT_STATUSES


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """Return the exceptions that the HTTP library of huggingface_hub raises if no response, or only a part, arrives."""
    from huggingface_hub.errors import HTTPError  # imports the library

    library = sys.modules[HTTPError.__module__]
    names = BROKEN_IN_REQUESTS if library.__name__.startswith("requests") else BROKEN_IN_HTTPX
    return tuple(getattr(library, name) for name in names)


def _retry_after_seconds(error: BaseException) -> float:
    """Return the wait that the response's Retry-After header asks for; the Hub states it in seconds."""
    response = _response(error)
    value = response.headers.get("Retry-After", "0") if response is not None else "0"
    return min(float(value), MAX_RETRY_AFTER_SECONDS) if value.isdigit() else 0.0
