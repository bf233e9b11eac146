"""Lock an output folder, local or `gs://`: two runs in one folder would destroy each other's files.

The owner is the run whose record is the file `.owner/000001.json` in the folder, or of several such files the one with
the highest number. The file contains a random token, and a thread rewrites it every few seconds (the heartbeat). A
second run that sees it change is refused. If it has not changed for a minute by the second run's clock, or its process
has ended, the second run takes over: it creates the file of the next number, which only one of several runs can do (on
Cloud Storage by a precondition on the generation), and deletes the others before it touches the folder.

The owner and its worker processes look for the token before each write in the folder (see `check_locks`): a run that
was stopped or cut off, and wakes up after a takeover, ends at once. Nothing else ends it: an owner that cannot write
its heartbeat for a while continues.
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
# Many heartbeats long: a run that computes, or waits for its storage, must not be taken for dead.
DEAD_AFTER_SECONDS = 60.0
POLLS_WHILE_WAITING = 60
RELEASE_SECONDS = 5.0


class FolderLostError(PermanentError):
    """The folder belongs to another run, which took it over while this one sent no heartbeat."""


@dataclass(frozen=True)
class FolderLock:
    """Identifies a run among all others in its folder; its worker processes get it, too.

    name, token: of the file in `.owner/`, and in it.
    ends_process: end the process if the folder is lost, whatever its threads are doing.
    """

    path: str
    name: str
    token: str
    ends_process: bool = True

    def check(self) -> None:
        """Check that the folder still belongs to this run; if not, end the process, or raise FolderLostError."""
        if not self.is_held():
            fate = f"has no {OWNER_FOLDER}/ of it any more"
            with contextlib.suppress(OSError, RunFailedError, InputError):
                if there := _read_owners(_owners(self.path)):
                    fate = f"was taken over by {_describe_newest(there)}"
            error = FolderLostError(
                f"The folder must belong to this run; {self.path} {fate}. This run has stopped, and has written "
                "nothing to it since then."
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
        """Make this process, a worker of the owner, check before each write in the folder."""
        if self.path not in locks or locks[self.path].token != self.token:
            locks[self.path] = self


def owner_of(path: str) -> FolderLock | None:
    """Return the lock of this process on the folder that contains `path`, for its workers, if it has one."""
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
    """Lock the folder, which is created if it is missing, within the context, and release it at the end.

    Args:
        heartbeat_seconds: between two heartbeats.
        dead_after_seconds: without a heartbeat, after which an owner counts as dead.
        ends_process: end the process with `FolderLostError.exit_status` when the folder is lost; else raise the error
            at the next write.

    Raises:
        InputError: it belongs to a run that is alive, or this user may not take it over.
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
        found = _read_owners(owners)
        if found and not _has_ended(owners, found, dead_after_seconds):
            continue  # another run came, or the folder is free now
        number = max(map(_number, found), default=0) + 1
        name = f"{number:06d}.json"
        record = {
            "token": token,
            "host": platform.node(),
            "pid": os.getpid(),
            "command": shlex.join(sys.argv),
            "started": _now(),
            "system": _system(),
            "process_started": _process_started(os.getpid()),
            "beat": 0,
            "last_beat": _now(),
        }
        try:
            owners.create_text(name, _as_text(record))
        except (FileExistsError, FileNotFoundError):  # another run was faster, or has just deleted the local folder
            continue
        # The records that were thought dead are unchanged, and no other run took over meanwhile.
        there = _read_owners(owners)
        if all(there.get(other, text) == text for other, text in found.items()) and max(there, key=_number) == name:
            owners.delete_files(other for other in there if other != name)
            return FolderLock(path, name, token, ends_process), record
        owners.delete_files([name])


def _has_ended(owners: Folder, found: Mapping[str, str], dead_after_seconds: float) -> bool:
    """Return whether the owners found are dead, which may take long; False if there are others by then."""
    newest = _describe_newest(found)
    if all(_is_surely_dead(_parse(text)) for text in found.values()):
        logger.info("%s: taking over from a run that has ended (%s)", owners.path, newest)
        return True
    logger.warning("%s has the record of %s; waiting up to %.0f s for a heartbeat", owners, newest, dead_after_seconds)
    waits_until_seconds = time.monotonic() + dead_after_seconds
    while time.monotonic() < waits_until_seconds:
        time.sleep(dead_after_seconds / POLLS_WHILE_WAITING)
        there = _read_owners(owners)
        if there == found:
            continue
        if any(text != there.get(name, text) for name, text in found.items()):
            raise InputError(
                f"--output-dir must belong to one run at a time; {owners.path.rpartition('/')[0]} belongs to "
                f"{_describe_newest(there)}. Wait for its end, stop it, or name another folder."
            )
        return False
    logger.warning(
        "%s: previous owner sent no heartbeat for %.0f s; taking over the folder", owners, dead_after_seconds
    )
    return True


def _send_heartbeats(owner: FolderLock, record: dict[str, Any], has_ended: threading.Event, seconds: float) -> None:
    """Write heartbeats until the end, and end the process if the folder was lost."""
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
                logger.warning("no heartbeat can be written to %s; the run continues: %s", owners, error)
            is_failing = True
            continue
        with contextlib.suppress(FolderLostError, OSError, RunFailedError, InputError):
            if not has_ended.is_set():
                owner.check()


def _release(owner: FolderLock, is_new: bool) -> None:
    """Delete the record, and local folders that were created for it and are empty."""
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
    """Return the time for people to read; nothing is judged by it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _parse(text: str) -> dict[str, Any]:
    """Read a record; one that was cut off by a kill is empty."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _describe_newest(records: Mapping[str, str]) -> str:
    """Describe the run of the record with the highest number, of {name: text}."""
    record = _parse(records[max(records, key=_number)])
    if not record:
        return "an unknown run"
    return (
        f"the run of process {record.get('pid')} on {record.get('host')} (`{record.get('command')}`, since "
        f"{record.get('started')}, last heartbeat {record.get('last_beat')})"
    )


def _is_surely_dead(record: Mapping[str, Any]) -> bool:
    """Return whether the process of that record has ended, as far as this machine can know."""
    system, pid = record.get("system"), record.get("pid")
    if system is None or system != _system() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's process
    return _process_started(pid) != record.get("process_started")


def _system() -> str | None:
    """Return a name for this boot of this machine and its namespace of process ids; None if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _process_started(pid: int) -> str | None:
    """Return when a process was started, in ticks since boot, which tells it from a later process with its id.

    None if it has ended (a zombie waits for its parent), or if that is unknown.
    """
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else fields[18]  # fields 3 and 22 of proc(5)
