"""Turn exceptions from reading other programs' files into one-line errors with the file, the reason and a hint."""

import errno
import os
import stat
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage import is_gcs, missing
from mlm_common.storage.encodings import conversion_hint

LFS_POINTER_START = b"version https://git-lfs.github.com/spec/"
MAX_REASON_CHARACTERS = 300
# Error numbers of a failing disk or network file system.
DISK_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO)


@contextmanager
def guarded_read(path: str | Path, kind: str, *, flag: str | None = None, hint: str = "") -> Iterator[None]:
    """Turn any exception of a reader into an InputError that names the file.

    Exceptions that already explain themselves (`InputError`, `RunFailedError`) are not changed, nor is MemoryError.
    Every other exception is blamed on the file, because libraries raise nearly any type of exception for a damaged
    file.

    Args:
        path: the file, or the folder that a library reads.
        kind: what the path must be, with its article, such as `a JSON file`.
        flag: flag that names the path on the command line.
        hint: sentence that says how to fix the file; default: advice to create or fetch it again.

    Raises:
        InputError: the body of the `with` statement raised an exception, or the file is a Git LFS pointer, which a
            reader of text would accept as text.
    """
    if _would_wait(path):
        raise missing(str(path), flag, "file")
    if (start_of_file(path) or b"").startswith(LFS_POINTER_START):
        raise unreadable(path, kind, ValueError(), flag=flag, hint=hint)
    try:
        yield
    except (InputError, RunFailedError, MemoryError):
        raise
    except Exception as error:
        raise unreadable(path, kind, error, flag=flag, hint=hint) from error


def _would_wait(path: str | Path) -> bool:
    """Return whether the path is a pipe or a device, because its reader would wait for a writer."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  (the name may be a Hub id or a gs:// path)
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def unreadable(path: str | Path, kind: str, error: Exception, *, flag: str | None = None, hint: str = "") -> InputError:
    """Make the InputError for a path whose reader raised `error`. For the other arguments, see `guarded_read`."""
    if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
        return missing(str(path), flag, "file")
    reason, hint_for_reason = _reason(Path(path), error)
    prefix = f"{flag}: " if flag else ""
    hint = hint or hint_for_reason or "Create or fetch it again."
    return InputError(f"{prefix}{path} must be {kind}; {reason}. {hint}")


def _reason(path: Path, error: Exception) -> tuple[str, str]:
    """Return the reason why the path cannot be read, and a hint for this reason, which may be empty."""
    if isinstance(error, UnicodeDecodeError) and isinstance(error.object, bytes):
        line = error.object.count(b"\n", 0, error.start) + 1
        reason = f"line {line:,} has the byte 0x{error.object[error.start]:02x}, which is not UTF-8"
        return reason, conversion_hint(error.object)
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        hint = (
            "Check the disk, or the network of the file system."
            if error.errno in DISK_ERRORS
            else "Check the path and its permissions."
        )
        return error.strerror[0].lower() + error.strerror[1:], hint
    if (refusal := _refusal(path)) is not None:
        return _reason(path, refusal)
    start = start_of_file(path)
    if start == b"":
        return "it is empty", ""
    if start is not None and start.startswith(LFS_POINTER_START):
        return "it is a Git LFS pointer", "Fetch the file itself with `git lfs pull`."
    message = textwrap.shorten(str(error) or type(error).__name__, MAX_REASON_CHARACTERS)
    if isinstance(error, KeyError):
        message = f"it has no {message}"
    return message.rstrip("."), getattr(error, "hint", "")


def _refusal(path: Path) -> OSError | None:
    """Return the error of opening a local file, which some libraries hide; None if the file opens or is a folder."""
    try:
        if not is_gcs(str(path)) and os.path.lexists(path) and not path.is_dir():
            path.open("rb").close()
    except OSError as error:
        return error
    except InputError:
        pass
    return None


def start_of_file(path: str | Path) -> bytes | None:
    """Return the first 64 bytes of a local file, or all bytes of a shorter file; None if it is not a readable file."""
    try:
        if is_gcs(str(path)) or not Path(path).is_file():
            return None
        with Path(path).open("rb") as file:
            return file.read(64)
    except (OSError, InputError):
        return None
