"""The client of Google Cloud Storage, one per process: objects by path, and errors that say how to fix them."""

import contextlib
import errno
import functools
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from mlm_common.errors import InputError, RunFailedError

PREFIX = "gs://"


class CloudStorageError(RunFailedError):
    """Cloud Storage did not answer for two minutes of repeated tries, or bytes were changed during the transfer."""


_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


def bucket_and_name(path: str) -> tuple[str, str]:
    """Split `gs://bucket/name`; the name is empty for a bucket alone.

    Raises:
        InputError: the path has another form.
    """
    bucket, _, name = path.removeprefix(PREFIX).partition("/")
    if not path.startswith(PREFIX) or not _BUCKET.fullmatch(bucket) or name.startswith("/") or "//" in name:
        raise InputError(f"A Cloud Storage path must be gs://BUCKET/NAME, with no empty part; received {path!r}.")
    return bucket, name


@functools.cache
def _client(_process_id: int) -> Any:
    """Make the client of this process: a forked process must not write to its parent's connections."""
    from google.cloud import storage

    return storage.Client(project=None)  # only creating and listing buckets needs a project


def blob_at(path: str) -> Any:
    """Return the client's handle of an object, which need not exist."""
    bucket, name = bucket_and_name(path)
    return _client(os.getpid()).bucket(bucket).blob(name)


def find_blob(path: str) -> Any | None:
    """Return the object as it is now, with its generation and checksum, or None."""
    from google.api_core.exceptions import NotFound

    blob = blob_at(path)  # a new handle each time: one that was loaded before keeps its generation
    try:
        blob.reload()
    except NotFound as error:
        if is_missing_bucket(error):
            raise
        return None
    return blob


def list_blobs(bucket: str, prefix: str, **options: Any) -> Iterator[Any]:
    """List the objects whose names begin so, by name, without the empty ones by which the console shows a folder."""
    blobs = _client(os.getpid()).list_blobs(bucket, prefix=prefix, **options)
    return (blob for blob in blobs if not blob.name.endswith("/"))


def is_missing_bucket(error: Exception) -> bool:
    """Return whether an answer of "not found" is about the bucket."""
    return "bucket does not exist" in str(error)


@contextlib.contextmanager
def explained_errors(path: str) -> Iterator[None]:
    """Turn the client's exceptions into those that `Folder` names, each with a hint."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption
    from requests import RequestException

    try:
        yield
    except (GoogleAPICallError, RetryError, GoogleAuthError, RequestException, DataCorruption) as error:
        raise _explain(path, error) from error


def _explain(path: str, error: Exception) -> Exception:
    """Make the exception of `Folder` for one of the client's; unless it is known to be final, a retry may help."""
    from google.api_core import exceptions as api_errors
    from google.auth import exceptions as auth_errors
    from google.cloud.storage.exceptions import DataCorruption

    answer = textwrap.shorten(str(error), 300)
    is_transient = getattr(error, "retryable", False) or isinstance(error, auth_errors.TransportError)
    if isinstance(error, auth_errors.GoogleAuthError | api_errors.Unauthorized) and not is_transient:
        return InputError(
            f"{path} needs Google credentials, and none were found or accepted. Run `gcloud auth application-default "
            f"login`, or on a TPU VM give its service account access to the bucket. ({answer})"
        )
    if isinstance(error, api_errors.NotFound):
        if not is_missing_bucket(error):
            return FileNotFoundError(errno.ENOENT, "no such object", path)
        bucket = PREFIX + bucket_and_name(path)[0]
        return InputError(
            f"{path} needs an existing bucket; there is no {bucket}. Create it with `gcloud storage buckets create "
            f"{bucket}`."
        )
    if isinstance(error, api_errors.Forbidden):
        return InputError(f"{path} needs permission. {_hint_for_refusal(str(error))} ({answer})")
    status = getattr(error, "code", None) or 0
    is_answered = 400 <= status < 500 and status not in (408, 429)
    if is_answered or isinstance(error, DataCorruption):
        return CloudStorageError(f"{path}: the transfer failed. ({answer}) Run the same command again.")
    return CloudStorageError(f"{path}: Cloud Storage did not answer. ({answer}) Run the same command again.")


def _hint_for_refusal(answer: str) -> str:
    """Say how to get the permission that Cloud Storage missed."""
    if re.search(r"(authentication|OAuth2?|Provided) scope", answer):
        return (
            "The access scopes of this machine forbid it, whatever its account may do: they are set when the machine "
            "is created, with `--scopes=cloud-platform`."
        )
    lacking = re.search(r"storage\.objects\.\w+", answer)
    return (
        f"Grant the account in use{f', which lacks {lacking[0]},' if lacking else ''} the role Storage Object Admin "
        "(roles/storage.objectAdmin) on the bucket, or to read only Storage Object Viewer (roles/storage.objectViewer)."
    )
