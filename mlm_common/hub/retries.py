"""Repeat calls of huggingface_hub after transient errors, with growing waits, and give each request a time-out.

huggingface_hub repeats only the upload of a large file; its other requests are neither repeated nor given a time-out.
"""

import logging
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


class HubAwayError(RunFailedError):
    """The Hub, or the network, failed for a transient reason; the message says what it was needed for."""


def repeat(
    function: Callable[[], Result], delays_seconds: tuple[float, ...], stop_retries: threading.Event | None = None
) -> Result:
    """Call the function until it succeeds, with a wait after each transient error; the last error is raised."""

    def log(error: Exception, wait_seconds: float) -> None:
        logger.warning("The Hub failed, next try in %.0f s: %s", wait_seconds, one_line(error))

    return retry_call(
        function,
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
    if error is None or constants.HF_HUB_OFFLINE:
        return False
    # `datasets` says only that there was no connection.
    return isinstance(error, ConnectionError) or _is_transient(error) or is_away(error.__cause__ or error.__context__)


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


def configure_sessions() -> None:
    """Give all requests of huggingface_hub from now on a time-out."""
    import requests  # a third of the start of a worker process, which needs none of it
    from requests.adapters import HTTPAdapter

    class BoundedAdapter(HTTPAdapter):
        def send(self, request: Any, **options: Any) -> Any:  # type: ignore[override]
            read_seconds = UPLOAD_READ_TIMEOUT_SECONDS if request.method == "PUT" else READ_TIMEOUT_SECONDS
            options["timeout"] = options.get("timeout") or (CONNECT_TIMEOUT_SECONDS, read_seconds)
            return super().send(request, **options)

    def make_session() -> requests.Session:
        session = requests.Session()
        session.mount("http://", BoundedAdapter())
        session.mount("https://", BoundedAdapter())
        return session

    huggingface_hub.configure_http_backend(make_session)


def _cause(error: BaseException) -> BaseException | None:
    """Unwrap the exception; huggingface_hub wraps those of uploads in a RuntimeError."""
    return error.__cause__ if isinstance(error, RuntimeError) else error


def _response(error: BaseException) -> Any:
    return getattr(_cause(error), "response", None)


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, OSError | RuntimeError):
        return False
    from requests import exceptions

    # Text instead of JSON is the page of a proxy that did not reach the Hub.
    broken = exceptions.ConnectionError, exceptions.Timeout, exceptions.ChunkedEncodingError, exceptions.JSONDecodeError
    return isinstance(_cause(error), broken) or status_of(error) in TRANSIENT_STATUSES


def _retry_after_seconds(error: BaseException) -> float:
    """Read what the answer's header asks for; the Hub states it in seconds."""
    response = _response(error)
    value = response.headers.get("Retry-After", "0") if response is not None else "0"
    return min(float(value), MAX_RETRY_AFTER_SECONDS) if value.isdigit() else 0.0
