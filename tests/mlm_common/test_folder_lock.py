"""One owner of a folder, local or in Cloud Storage: processes that live, die, are stopped, and wake up again."""

import json
import logging
import pickle
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlm_common.errors import EXIT_BAD_INPUT, EXIT_PERMANENT, InputError
from mlm_common.folder_lock import FolderLostError, locked_folder, owner_of
from mlm_common.storage import Folder, open_folder
from tests.fixtures.folder_owners import DEAD_AFTER_SECONDS, HEARTBEAT_SECONDS, OwnerProcess
from tests.servers.fixtures import CloudStorageHandle

FAST = {"heartbeat_seconds": HEARTBEAT_SECONDS, "dead_after_seconds": DEAD_AFTER_SECONDS, "ends_process": False}
# Of one that follows a run that is surely dead or stopped.
SURE_SECONDS = 0.2


@pytest.fixture(params=["local", "gs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return open_folder(str(tmp_path / "output"))
    cloud: CloudStorageHandle = request.getfixturevalue("cloud")
    return open_folder(f"{cloud.bucket_url}/output")


# Most tests with processes of their own are about these, and not about the folder.
only_local = pytest.mark.parametrize("folder", ["local"], indirect=True)


def contents(folder: Folder) -> dict[str, str]:
    """Read all that is in the folder, but the number of the heartbeat."""
    owners = folder.subfolder(".owner")
    tokens = {name: json.loads(owners.read_text(name))["token"] for name in owners.list_files()}
    return {name: folder.read_text(name) for name in folder.list_files()} | tokens


def write_owner(folder: Folder, **changes: object) -> None:
    """Leave the record of an owner that was killed, on another machine unless the changes say otherwise."""
    with locked_folder(folder.path, **FAST):
        record = json.loads(folder.subfolder(".owner").read_text("000001.json"))
    record |= {"host": "vanished", "system": "another", **changes}
    folder.subfolder(".owner").write_text("000001.json", json.dumps(record))


@only_local
def test_a_second_run_is_refused_while_the_first_lives(folder):
    patient = {"dead_after_seconds": 20.0}
    with OwnerProcess(folder.path, **patient) as first, OwnerProcess(folder.path, **patient) as second:
        # Either may come first.
        lines = {first.line(): first, second.line(): second}
        status, errors = lines[""].end()
        assert status == EXIT_BAD_INPUT
        assert f"{folder.path} belongs to the run of process {lines['owned'].process.pid} on " in errors
        for said in ("(since 20", ", last heartbeat 20", "Wait until it ends, stop it, or name another folder."):
            assert said in errors
        lines["owned"].ask_to_write()
        assert lines["owned"].line() == "0"
        assert lines["owned"].end()[0] == 0
    assert len(folder.list_files()) == 1
    with locked_folder(folder.path, **FAST):
        pass


def test_a_run_that_ends_leaves_no_trace_of_its_ownership(folder):
    def fail() -> None:
        with locked_folder(folder.path, **FAST):
            assert folder.subfolder(".owner").list_files()
            assert any(thread.name == "folder-owner" for thread in threading.enumerate())
            raise InputError("bad")

    with pytest.raises(InputError, match="bad"):
        fail()
    assert not folder.exists()
    assert not any(thread.name == "folder-owner" for thread in threading.enumerate())


@only_local
def test_a_killed_run_of_this_machine_is_followed_at_once(folder):
    with OwnerProcess(folder.path) as killed:
        assert killed.line() == "owned"
        killed.signal(signal.SIGKILL)
        killed.process.wait()
        with locked_folder(folder.path, **FAST | {"dead_after_seconds": 3600}):
            assert folder.subfolder(".owner").list_files().keys() == {"000002.json"}


@pytest.mark.parametrize(("name", "mode"), [(".owner", 0o000), (".owner/000001.json", 0o000), (".owner", 0o555)])
@pytest.mark.usefixtures("ordinary_user")
def test_a_record_of_another_user_is_one_clear_error(name, mode):
    """As another user's killed run leaves it."""
    with tempfile.TemporaryDirectory() as path:  # pytest's are in one that only their owner may enter
        write_owner(open_folder(path))
        Path(path, name).chmod(mode)
        says = rf"must be writable; {path}.* is not: Permission denied \({path}/\.owner.*\)\. Name another folder"
        try:
            with pytest.raises(InputError, match=says):
                locked_folder(path, **FAST | {"dead_after_seconds": SURE_SECONDS}).__enter__()
        finally:
            Path(path, ".owner").chmod(0o755)


@pytest.mark.parametrize(("mode", "owners_mode"), [(0o1777, 0o777), (0o770, 0o770), (0o700, 0o700)])
def test_whoever_may_write_to_the_folder_may_take_it_over(tmp_path, mode, owners_mode):
    tmp_path.chmod(mode)
    with locked_folder(str(tmp_path), **FAST):
        assert stat.S_IMODE((tmp_path / ".owner").stat().st_mode) == owners_mode


@pytest.mark.parametrize("text", [None, "", '{"token": "cut o', "[]"])
def test_a_run_of_another_machine_without_heartbeat_is_followed(folder, text):
    write_owner(folder)
    if text is not None:
        folder.subfolder(".owner").write_text("000001.json", text)
    started_seconds = time.monotonic()
    with locked_folder(folder.path, **FAST | {"dead_after_seconds": SURE_SECONDS}):
        assert time.monotonic() - started_seconds >= SURE_SECONDS
        assert folder.subfolder(".owner").list_files().keys() == {"000002.json"}


@only_local
def test_one_of_many_takes_over_from_a_dead_run(folder):
    write_owner(folder)
    processes = [OwnerProcess(folder.path) for _ in range(4)]
    try:
        lines = [process.line() for process in processes]
        assert sorted(lines) == ["", "", "", "owned"]
        refused = [process for process, line in zip(processes, lines, strict=True) if not line]
        assert {process.end()[0] for process in refused} == {EXIT_BAD_INPUT}
    finally:
        for process in processes:
            process.__exit__(None, None, None)


# In the second case the thread of the stopped run comes too late to notice.
@pytest.mark.parametrize(
    ("folder", "heartbeat_seconds"), [("gs", HEARTBEAT_SECONDS), ("local", 3600.0)], indirect=["folder"]
)
def test_a_stopped_run_that_wakes_up_after_a_takeover_ends(folder, heartbeat_seconds):
    with OwnerProcess(folder.path, heartbeat_seconds=heartbeat_seconds) as stopped:
        assert stopped.line() == "owned"
        stopped.ask_to_write()
        assert stopped.line() == "0"
        stopped.signal(signal.SIGSTOP)
        stopped.ask_to_write()
        with OwnerProcess(folder.path, dead_after_seconds=SURE_SECONDS) as second:
            assert second.line() == "owned"
            second.ask_to_write()
            assert second.line() == "0"
            before = contents(folder)
            stopped.signal(signal.SIGCONT)
            status, errors = stopped.end()
            assert status == EXIT_PERMANENT
            assert f"{folder.path} was taken over by the run of process {second.process.pid} on " in errors
            assert contents(folder) == before
            second.ask_to_write()
            assert second.line() == "1"
            assert second.end()[0] == 0
    assert len(folder.list_files()) == 3
    assert not folder.subfolder(".owner").list_files()


@only_local
def test_a_stopped_run_ends_also_after_its_follower_has_ended(folder):
    with OwnerProcess(folder.path) as stopped:
        assert stopped.line() == "owned"
        stopped.signal(signal.SIGSTOP)
        with locked_folder(folder.path, **FAST | {"dead_after_seconds": SURE_SECONDS}):
            pass
        with OwnerProcess(folder.path) as third:  # the first number once more
            assert third.line() == "owned"
            stopped.ask_to_write()
            stopped.signal(signal.SIGCONT)
            assert stopped.end()[0] == EXIT_PERMANENT
            third.ask_to_write()
            assert third.line() == "0"


WRITES: Mapping[str, Callable[[Folder], object]] = {
    "write": lambda folder: folder.write_text("sub/a", "b"),
    "append": lambda folder: folder.append_text("old", "b", before="old"),
    "upload": lambda folder: folder.upload_file(__file__, "a"),
    "new file": lambda folder: folder.new_file().finish("a"),
    "delete files": lambda folder: folder.delete_files(["old"]),
    "delete": lambda folder: folder.subfolder("sub").delete(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_write_reaches_a_folder_that_was_lost(folder, write):
    with locked_folder(folder.path, **FAST | {"heartbeat_seconds": 3600.0}):
        folder.write_text("old", "old")
        folder.write_text("sub/old", "old")
        folder.subfolder(".owner").write_text("000001.json", json.dumps({"token": "another's"}))
        with pytest.raises(FolderLostError):
            write(folder)
    assert folder.read_text("old") == "old"
    assert folder.list_files().keys() == {"old"}
    assert folder.subfolder("sub").list_files().keys() == {"old"}
    assert folder.subfolder(".owner").list_files()  # which is another's


def test_a_worker_of_the_owner_writes_only_while_the_lock_is_held(folder):
    with locked_folder(folder.path, **FAST):
        sent = pickle.dumps(owner_of(folder.path_of("train")))
    owner = pickle.loads(sent)
    owner.guard()
    try:
        with pytest.raises(FolderLostError):
            folder.write_text("train/a", "b")
        open_folder(folder.path + "-beside").write_text("a", "b")
    finally:
        from mlm_common.storage.folder import locks

        del locks[owner.path]


def test_a_run_whose_signs_of_life_cannot_be_written_goes_on(cloud, caplog):
    folder = open_folder(f"{cloud.bucket_url}/output")
    with locked_folder(folder.path, **FAST), caplog.at_level(logging.WARNING):
        cloud.fault("/upload/", method="POST", mode="status", status=403, times=5)
        while sum("/upload/" in entry["path"] for entry in cloud.requests("POST")) < 8:
            time.sleep(HEARTBEAT_SECONDS)
        folder.write_text("a", "b")
    assert sum("cannot write a heartbeat" in message for message in caplog.messages) == 1
    assert cloud.objects() == {"output/a": b"b"}


def test_a_lost_answer_to_a_sign_of_life_is_no_lost_folder(cloud):
    folder = open_folder(f"{cloud.bucket_url}/output")
    with locked_folder(folder.path, **FAST):
        cloud.fault("/upload/", method="POST", mode="lost_answer", times=2)
        while sum("/upload/" in entry["path"] for entry in cloud.requests("POST")) < 8:
            time.sleep(HEARTBEAT_SECONDS)
        folder.write_text("a", "b")
    assert cloud.objects() == {"output/a": b"b"}
