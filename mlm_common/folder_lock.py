"""Lock an output folder, local or `gs://`, because two runs in the same folder would destroy each other's files.

The owner of a folder has a record in its subfolder `.owner`, such as `.owner/000001.json`. If there are several
records, only the one with the highest number is valid. The record contains a random token, and a thread of the owner
rewrites it every few seconds (the heartbeat).

A second run that sees the record change is refused. If the record does not change for a minute, measured by the second
run's clock, or if the owner's process has ended, the second run takes over. The second run creates the record with the
next number, which only one of several runs can do (on Cloud Storage, thanks to a precondition on the generation). Then
it deletes the other records, before it touches anything else in the folder.

The owner and its worker processes check their token before each write to the folder (see `check_locks`). So a run that
was suspended or cut off, and wakes up after a takeover, ends at once. Nothing else ends an owner: it continues even if
it cannot write its heartbeat for a while.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import multiprocessing
import os
import platform
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlm_common.errors import InputError, PermanentError, RunFailedError
from mlm_common.storage import Folder, open_folder
from mlm_common.storage.folder import OWNER_FOLDER, explained_refusals, locks

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
# This time is several heartbeats long, because a run that is computing or waiting for its storage must not be mistaken
# for dead.
DEAD_AFTER_SECONDS = 60.0
POLLS_WHILE_WAITING = 60
RELEASE_SECONDS = 5.0


class FolderLostError(PermanentError):
    """Another run took over the folder while this one sent no heartbeat."""


@dataclass(frozen=True)
class FolderLock:
    """The lock of a run on its folder. The run's worker processes get a copy.

    Attributes:
        path: the folder.
        name: name of the run's record in `.owner/`.
        token: random token in the record.
        ends_process: whether to end the process at once if the folder no longer belongs to the run.
    """

    path: str
    name: str
    token: str
    ends_process: bool = True

    def check(self) -> None:
        """Check that the folder still belongs to this run.

        If it does not, end the process if `ends_process` is true, or else raise FolderLostError.
        """
        if not self.is_held():
            fate = f"its record in {self.path}/{OWNER_FOLDER} is gone"
            with contextlib.suppress(OSError, RunFailedError, InputError):
                if texts := _read_owners(_owners(self.path)):
                    fate = f"{self.path} was taken over by {_describe_newest(texts)}"
            error = FolderLostError(
                f"This run has lost its output folder: {fate}. It has stopped, and has written nothing to the folder "
                "since then."
            )
            if self.ends_process:
                _end_process(error)
            raise error

    def is_held(self) -> bool:
        try:
            return self.token in _owners(self.path).read_text(self.name)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def guard(self) -> None:
        """Make this process, a worker of the owner, check the lock before each write to the folder."""
        if self.path not in locks or locks[self.path].token != self.token:
            locks[self.path] = self


def owner_of(path: str) -> FolderLock | None:
    """Return a copy, for worker processes, of this process's lock on the folder that contains `path`, if it has one."""
    owner: FolderLock
    for owner in locks.values():
        if f"{path}/".startswith(f"{owner.path}/"):
            return dataclasses.replace(owner, ends_process=False)
    return None


@contextlib.contextmanager
def locked_folder(
    path: str,
    *,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    dead_after_seconds: float = DEAD_AFTER_SECONDS,
    ends_process: bool = True,
) -> Iterator[FolderLock]:
    """Lock a folder within the context. A missing folder is created.

    Args:
        path: the folder, local or `gs://`.
        heartbeat_seconds: time between two heartbeats.
        dead_after_seconds: time without a heartbeat after which an owner counts as dead.
        ends_process: if the folder no longer belongs to this run, end the process at once with
            `FolderLostError.exit_status`. If False, FolderLostError is raised at the next write instead.

    Raises:
        InputError: the folder belongs to a run that is alive, or this user has no permission to take it over.
    """
    path = path.rstrip("/")
    is_new = not open_folder(path).exists()
    with explained_refusals(path):
        owner, record = _take(path, dead_after_seconds, ends_process)
    has_ended = threading.Event()
    thread = threading.Thread(
        target=_send_heartbeats, args=(owner, record, has_ended, heartbeat_seconds), name="folder-owner", daemon=True
    )
    locks[path] = owner
    try:
        thread.start()
        yield owner
    finally:
        has_ended.set()
        thread.join(RELEASE_SECONDS)
        del locks[path]
        _release(owner, is_new)


def _take(path: str, dead_after_seconds: float, ends_process: bool) -> tuple[FolderLock, dict[str, Any]]:
    owners = _owners(path)
    token = secrets.token_hex(16)
    while True:
        old_texts = _read_owners(owners)
        if old_texts and not _have_ended(owners, old_texts, dead_after_seconds):
            continue  # the owner was replaced by another run, or has released the folder
        number = max(map(_number, old_texts), default=0) + 1
        name = f"{number:06d}.json"
        record = {
            "token": token,
            "host": platform.node(),
            "pid": os.getpid(),
            "command": shlex.join(sys.argv),
            "started": _now(),
            "system": _system(),
            "beat": 0,
            "last_beat": _now(),
        }
        try:
            owners.create_text(name, _as_text(record))
        except (FileExistsError, FileNotFoundError):  # another run was faster, or has just deleted the local folder
            continue
        # Check again that the records of dead owners are unchanged, and that no other run has taken over in the
        # meantime.
        texts = _read_owners(owners)
        if all(texts.get(other, text) == text for other, text in old_texts.items()) and max(texts, key=_number) == name:
            owners.delete_files(other for other in texts if other != name)
            return FolderLock(path, name, token, ends_process), record
        owners.delete_files([name])


def _have_ended(owners: Folder, old_texts: Mapping[str, str], dead_after_seconds: float) -> bool:
    """Return whether the owners with these records are dead; wait for a heartbeat if that is not certain.

    Returns False if the records were replaced or deleted while waiting.

    Raises:
        InputError: an owner sent a heartbeat.
    """
    newest = _describe_newest(old_texts)
    if all(_is_surely_dead(_parse(text)) for text in old_texts.values()):
        logger.info("%s: taking over from a run that has ended (%s)", owners.path, newest)
        return True
    logger.warning("%s has the record of %s; waiting up to %.0f s for a heartbeat", owners, newest, dead_after_seconds)
    waits_until_seconds = time.monotonic() + dead_after_seconds
    while time.monotonic() < waits_until_seconds:
        time.sleep(dead_after_seconds / POLLS_WHILE_WAITING)
        texts = _read_owners(owners)
        if texts == old_texts:
            continue
        if any(text != texts.get(name, text) for name, text in old_texts.items()):
            raise InputError(
                f"--output-dir: {owners.path.rpartition('/')[0]} belongs to {_describe_newest(texts)}. Wait until it "
                "ends, stop it, or name another folder."
            )
        return False
    logger.warning(
        "%s: previous owner sent no heartbeat for %.0f s; taking over the folder", owners, dead_after_seconds
    )
    return True


def _send_heartbeats(owner: FolderLock, record: dict[str, Any], has_ended: threading.Event, seconds: float) -> None:
    """Write heartbeats until `has_ended` is set. After each one, check that the folder still belongs to this run."""
    owners = _owners(owner.path)
    is_failing = False
    while not has_ended.wait(seconds):
        record = record | {"beat": record["beat"] + 1, "last_beat": _now()}
        try:
            before = owners.read_text(owner.name)
            if owner.token in before:
                owners.replace_text(owner.name, _as_text(record), before=before)
            is_failing = False
        except FileNotFoundError:
            pass
        except (OSError, RunFailedError, InputError) as error:
            if not is_failing:
                logger.warning("cannot write a heartbeat to %s; the run continues: %s", owners, error)
            is_failing = True
            continue
        with contextlib.suppress(FolderLostError, OSError, RunFailedError, InputError):
            if not has_ended.is_set():
                owner.check()


def _release(owner: FolderLock, is_new: bool) -> None:
    """Delete the record, and the local folders that were created for the lock, if they are empty."""
    owners = _owners(owner.path)
    try:
        if owner.is_held():
            owners.delete_files([owner.name])
        if owners.is_local:
            Path(owners.path).rmdir()
            if is_new:
                Path(owner.path).rmdir()
    except (OSError, RunFailedError, InputError) as error:
        logger.debug("%s was not released: %s", owner.path, error)


def _end_process(error: FolderLostError) -> NoReturn:
    """End the process and its workers at once: no thread, no `finally` and no handler may write to the folder."""
    for worker in multiprocessing.active_children():
        worker.kill()
    with contextlib.suppress(OSError, ValueError):
        print(f"\nerror: {error}", file=sys.stderr, flush=True)  # a progress bar may be on the line
    os._exit(error.exit_status)


def _owners(path: str) -> Folder:
    return open_folder(path).subfolder(OWNER_FOLDER)


def _read_owners(owners: Folder) -> dict[str, str]:
    texts = {}
    for name in owners.list_files():
        with contextlib.suppress(FileNotFoundError):
            texts[name] = owners.read_text(name)
    return texts


def _number(name: str) -> int:
    stem = name.removesuffix(".json")
    return int(stem) if stem.isdecimal() else 0


def _now() -> str:
    """Return the time as text, for human readers only. No decision depends on this text."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _parse(text: str) -> dict[str, Any]:
    """Parse a record; return an empty record if a killed process left it incomplete."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _describe_newest(records: Mapping[str, str]) -> str:
    """Describe the run with the highest record number; `records` is {name: text}."""
    record = _parse(records[max(records, key=_number)])
    if not record:
        return "an unknown run"
    return (
        f"the run of process {record.get('pid')} on {record.get('host')} (since {record.get('started')}, last "
        f"heartbeat {record.get('last_beat')})"
    )


def _is_surely_dead(record: Mapping[str, Any]) -> bool:
    """Return whether the process of a record has certainly ended; False if this machine cannot tell.

    If another process now has the owner's id, only the missing heartbeats show that the owner is dead.
    """
    system = record.get("system")
    if system is None or system != _system():
        return False
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        pass
    return False


def _system() -> str | None:
    """Return a name for this boot of this machine and its namespace of process ids; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None
