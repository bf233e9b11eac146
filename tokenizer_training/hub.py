"""Pushing a folder to the Hugging Face Hub, with the checks that belong before the expensive part of a run.

huggingface_hub repeats only the upload of a large file; its other requests are neither repeated nor given a timeout. So
a whole call is repeated here. That is safe: a push whose answer was lost finds its files unchanged and commits nothing.
"""

import logging
import shlex
import textwrap
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tokenizer_training.command_line import InputError, RunFailedError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Before each further try; together more than eight minutes.
RETRY_DELAYS_SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
CHECK_RETRY_DELAYS_SECONDS = (1.0, 2.0)
CONNECT_TIMEOUT_SECONDS = 30.0
# Between two bytes of an answer; the Hub may take a minute to commit large files.
READ_TIMEOUT_SECONDS = 300.0
TRANSIENT_STATUSES = {408, 409, 412, 429, 500, 502, 503, 504}


class HubPushError(RunFailedError):
    """A push that did not succeed: the message names the folder, which is kept, and how to push it by hand."""


def check_hub_access(repo_id: str, *, private: bool = False) -> None:
    """Check that a later `push_folder` to `repo_id` may succeed: call it before the expensive part of a run.

    Args:
        repo_id: `NAMESPACE/NAME` of a model repository, which need not exist.
        private: whether the files must not become public.

    Raises:
        InputError: a malformed id; no token, or one that is not valid or may not write there; the Hub cannot be
            reached; `private` is asked and the repository exists and is public.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    _check_repo_id(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"Pushing to {repo_id} needs the Hub; unset HF_HUB_OFFLINE, which forbids to reach it.")
    if not get_token():
        raise InputError(f"Pushing to {repo_id} needs a Hub token; log in with `hf auth login`, or set HF_TOKEN.")
    _give_sessions_a_timeout()
    api = HfApi()
    try:
        account = _repeat(api.whoami, CHECK_RETRY_DELAYS_SECONDS)
        _check_may_write(account, repo_id)
        if private and not _repeat(lambda: api.model_info(repo_id), CHECK_RETRY_DELAYS_SECONDS).private:
            raise InputError(f"--hub-private needs a private repository; {repo_id} exists and is public.")
    except RepositoryNotFoundError:
        return  # the push will make it
    except OSError as error:
        if _status(error) == 401:
            raise InputError(
                f"Pushing to {repo_id} needs a valid Hub token; {api.endpoint} refused this one. Log in again with "
                "`hf auth login`, or set HF_TOKEN (it wins over the login)."
            ) from error
        raise InputError(
            f"Pushing to {repo_id} needs the Hub, and {api.endpoint} does not serve it (HF_ENDPOINT names another): "
            + textwrap.shorten(str(error), 300)
        ) from error


def push_folder(folder: str, repo_id: str, *, commit_message: str, private: bool = False) -> str:
    """Push all files of a local folder in one commit, and return the commit's URL.

    Where nothing has changed no commit is made, and the URL is that of the newest one. Other files of the repository
    stay. A call that fails for a passing reason is repeated, for eight minutes.

    Args:
        folder: the local folder; it is never changed.
        repo_id: `NAMESPACE/NAME` of a model repository, made when missing.
        commit_message: the commit's title.
        private: whether a repository that is made here is private; one that exists stays as it is.

    Raises:
        HubPushError: it did not succeed.
    """
    from huggingface_hub import HfApi

    _give_sessions_a_timeout()
    api = HfApi()

    def push() -> Any:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message)

    try:
        return str(_repeat(push, RETRY_DELAYS_SECONDS).commit_url)
    except (OSError, RuntimeError, ValueError) as error:
        by_hand = shlex.join(["hf", "upload", repo_id, folder, ".", *(["--private"] if private else [])])
        raise HubPushError(
            f"The push to {repo_id} failed: {textwrap.shorten(str(error), 300)} "
            f"The files are kept in {folder}; push them by hand: {by_hand}"
        ) from error


def _check_repo_id(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(f"A Hub repository must be NAMESPACE/NAME; received {repo_id!r}. {error}") from error
    if "/" not in repo_id:
        raise InputError(f"A Hub repository must be NAMESPACE/NAME; received {repo_id!r}.")


def _check_may_write(account: dict[str, Any], repo_id: str) -> None:
    """Raise InputError unless the account and its token may write to the repository, as far as the Hub tells."""
    namespace = repo_id.partition("/")[0]
    roles = {organization["name"]: organization.get("roleInOrg") for organization in account.get("orgs", ())}
    roles[account["name"]] = "admin"
    if roles.get(namespace, "read") == "read":
        writable = ", ".join(sorted(name for name, role in roles.items() if role != "read"))
        raise InputError(f"{account['name']} may not write to {namespace} on the Hub, only to {writable}.")
    token = account.get("auth", {}).get("accessToken", {})
    may_write = token.get("role") != "read"
    scopes = token.get("fineGrained", {}).get("scoped")
    if scopes is not None:
        writable_names = {scope["entity"].get("name") for scope in scopes if "repo.write" in scope["permissions"]}
        may_write = bool({namespace, repo_id} & writable_names)
    if not may_write:
        raise InputError(
            f"Pushing to {repo_id} needs a Hub token that may write there; this one's role is {token['role']!r}. Make "
            "one with the role 'write' at https://huggingface.co/settings/tokens, and log in with `hf auth login`."
        )


def _repeat(function: Callable[[], Result], delays_seconds: tuple[float, ...]) -> Result:
    """Return the function's result; a transient failure costs a wait, the last one is raised."""
    for delay_seconds in delays_seconds:
        try:
            return function()
        except (OSError, RuntimeError) as error:
            if not _is_transient(error):
                raise
            wait_seconds = max(delay_seconds, _retry_after_seconds(error))
            logger.warning("The Hub failed, next try in %.0f s: %s", wait_seconds, textwrap.shorten(str(error), 300))
            time.sleep(wait_seconds)
    return function()


def _response(error: BaseException) -> Any:
    """Return the HTTP answer behind the exception; huggingface_hub wraps those of uploads in a RuntimeError."""
    wrapped = error.__cause__ if isinstance(error, RuntimeError) else error
    return getattr(wrapped, "response", None)


def _status(error: BaseException) -> int | None:
    return getattr(_response(error), "status_code", None)


def _is_transient(error: BaseException) -> bool:
    from requests import ConnectionError as RequestsConnectionError
    from requests import Timeout
    from requests.exceptions import ChunkedEncodingError

    cause = error.__cause__ if isinstance(error, RuntimeError) else error
    is_lost_connection = isinstance(cause, RequestsConnectionError | Timeout | ChunkedEncodingError)
    return is_lost_connection or _status(error) in TRANSIENT_STATUSES


def _retry_after_seconds(error: BaseException) -> float:
    """Return what the answer's header asks for; the Hub states it in seconds."""
    response = _response(error)
    value = response.headers.get("Retry-After", "0") if response is not None else "0"
    return float(value) if value.isdigit() else 0.0


def _give_sessions_a_timeout() -> None:
    import requests
    from huggingface_hub import configure_http_backend
    from requests.adapters import HTTPAdapter

    class TimeoutAdapter(HTTPAdapter):
        def send(self, request: Any, **options: Any) -> Any:  # type: ignore[override]
            options["timeout"] = options.get("timeout") or (CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS)
            return super().send(request, **options)

    def make_session() -> requests.Session:
        session = requests.Session()
        session.mount("http://", TimeoutAdapter())
        session.mount("https://", TimeoutAdapter())
        return session

    configure_http_backend(make_session)
