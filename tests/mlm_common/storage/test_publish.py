"""Folders checked before a run and published after it: nothing left behind, nothing that seems complete but is not."""

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from mlm_common.storage import PARTIAL_SUFFIX, open_folder
from tests.servers.fixtures import CloudStorageHandle

BUCKET = CloudStorageHandle.bucket_url
LAST = "training.json"


def paths_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A finished folder whose completion marker is neither the first nor the last by name."""
    folder = tmp_path / "built"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.json", LAST, "z.json", "sub/b.json"):
        (folder / name).write_text(f"new {name}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", [".", "missing", "missing/deeper/deepest", "missing/../other/", "there", "there/new"])
def test_check_of_a_writable_folder_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    open_folder(f"{tmp_path}/{name}").check_writable()
    assert paths_in(tmp_path) == {"there", "there/file"}


def test_check_takes_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("", ".", "new", "new/deeper", "../sibling"):
        open_folder(name).check_writable()
    assert not paths_in(tmp_path.parent / tmp_path.name)


@pytest.mark.parametrize("name", ["file", "file/below/it", "dangling", "dangling/below", "n" * 256, f"a/{'n' * 256}/b"])
def test_check_of_a_folder_that_cannot_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"must be writable; .*(Not a directory|No such file|too long).*Name another"):
        open_folder(str(tmp_path / name)).check_writable()
    assert paths_in(tmp_path) == {"file", "dangling"}


@pytest.mark.usefixtures("ordinary_user")
def test_check_of_a_folder_without_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's are in one that only their owner may enter
        Path(folder).chmod(0o555)
        with pytest.raises(InputError, match="Permission denied"):
            open_folder(str(Path(folder, "new"))).check_writable()
        assert paths_in(Path(folder)) == set()


def test_check_of_a_cloud_folder_leaves_nothing(cloud: CloudStorageHandle) -> None:
    cloud.put("data/file", b"content")
    for folder in (BUCKET, f"{BUCKET}/", f"{BUCKET}/data", f"{BUCKET}/new/folder/"):
        open_folder(folder).check_writable()
    assert cloud.objects() == {"data/file": b"content"}


@pytest.mark.parametrize("permission", ["storage.objects.create", "storage.objects.delete", "storage.objects.get"])
def test_check_names_the_missing_permission(permission: str, cloud: CloudStorageHandle) -> None:
    cloud.authorize(denied_permissions=[permission])
    with pytest.raises(InputError, match=rf"lacks {permission}, the role .*roles/storage\.objectAdmin") as caught:
        open_folder(f"{BUCKET}/data").check_writable()
    assert "\n" not in str(caught.value)
    cloud.authorize()
    open_folder(f"{BUCKET}/data").check_writable()
    assert cloud.objects() == {}, "what a refused deletion left stays"


@pytest.mark.parametrize("place", ["cloud", "missing", "missing/deeper", "empty", "there"])
@pytest.mark.usefixtures("cloud")
def test_publishing(place: str, built: Path, tmp_path: Path) -> None:
    destination = f"{BUCKET}/data" if place == "cloud" else str(tmp_path / place)
    (tmp_path / "empty").mkdir()
    kept: dict[str, str] = {}
    if place in ("cloud", "there"):
        kept = {"other.txt": "other", "sub/other.txt": "other"}
        for name in (*kept, LAST, "a.json"):
            open_folder(destination).write_text(name, "other")
    open_folder(destination).publish(str(built), last=LAST)
    with open_folder(destination).local_copy() as copy:
        contents = {
            str(path.relative_to(copy)): path.read_text(encoding="utf-8")
            for path in Path(copy).rglob("*")
            if path.is_file()
        }
    assert contents == kept | {name: f"new {name}" for name in ("a.json", LAST, "z.json", "sub/b.json")}
    assert not [path for path in paths_in(tmp_path) if PARTIAL_SUFFIX in path]


def test_no_marker_no_publishing(built: Path, tmp_path: Path) -> None:
    (built / LAST).unlink()
    with pytest.raises(FileNotFoundError, match=LAST):
        open_folder(str(tmp_path / "new")).publish(str(built), last=LAST)
    assert not (tmp_path / "new").exists()


def test_cloud_marker_goes_first_and_comes_last(built: Path, cloud: CloudStorageHandle) -> None:
    cloud.put(f"data/{LAST}", b"old")
    cloud.put("data/z.json", b"old")
    cloud.fault("/upload/", status=403, method="POST")
    with pytest.raises(InputError, match=r"roles/storage\.objectAdmin"):
        open_folder(f"{BUCKET}/data").publish(str(built), last=LAST)
    assert f"data/{LAST}" not in cloud.objects()
    first_write, *_ = [entry for entry in cloud.requests() if entry["method"] in ("POST", "DELETE")]
    assert (first_write["method"], first_write["path"].endswith(LAST)) == ("DELETE", True)
    open_folder(f"{BUCKET}/data").publish(str(built), last=LAST)
    assert cloud.objects()[f"data/{LAST}"] == f"new {LAST}".encode()


def test_failure_leaves_no_marker_and_no_half_files(built: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for name in (LAST, "sub"):  # a file where a subfolder has to be
        (there / name).write_text("old", encoding="utf-8")
    with pytest.raises(FileExistsError):
        open_folder(str(there)).publish(str(built), last=LAST)
    assert paths_in(there) == {"a.json", "sub"}


def test_publishing_in_a_thread(built: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    thread = threading.Thread(target=open_folder(str(tmp_path / "there")).publish, args=(str(built), LAST))
    thread.start()
    thread.join()
    assert paths_in(tmp_path / "there") == paths_in(built)


PUBLISH_FOR_EVER = """
import itertools, pathlib, sys
from mlm_common.storage import open_folder
built, destination, last = sys.argv[1:]
for generation in itertools.count():
    for name in (*map(str, range(5)), last):
        pathlib.Path(built, name).write_text(str(generation))
    open_folder(destination.format(generation)).publish(built, last)
    print(generation, flush=True)
"""


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", ["there", "new-{}"])
def test_what_is_stopped_never_seems_complete(name: str, stop: signal.Signals, tmp_path: Path) -> None:
    """At random moments: with the marker, all files are of the marker's generation; Ctrl-C leaves no trace at all."""
    draw = random.Random(0)
    for attempt in range(6):
        root = tmp_path / str(attempt)
        (root / "built").mkdir(parents=True)
        (root / "there").mkdir()
        program = [sys.executable, "-c", PUBLISH_FOR_EVER, str(root / "built"), str(root / name), LAST]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(draw.uniform(0, 0.05))
            process.send_signal(stop)
        published = [path for path in root.iterdir() if path.name != "built" and not path.name.startswith(".")]
        complete = [folder for folder in published if (folder / LAST).exists()]
        for folder in complete:
            generation = (folder / LAST).read_text(encoding="utf-8")
            assert [(folder / str(number)).read_text(encoding="utf-8") for number in range(5)] == [generation] * 5
        if stop == signal.SIGINT or name != "there":
            assert len(complete) == len(published) - (name != "there"), "only the empty folder may be without a marker"
        if stop == signal.SIGINT:
            assert not [path for path in paths_in(root) if PARTIAL_SUFFIX in path]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("write_bytes", errno.EACCES),
        ("append_text", errno.EPERM),
        ("create_text", errno.EROFS),
        ("new_file", errno.EACCES),
        ("upload_file", errno.EPERM),
        ("publish", errno.EROFS),
    ],
)
def test_forbidden_writing_is_one_line_with_a_hint(
    function: str, reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_bytes(b"x")
    arguments = {
        "write_bytes": {"name": "file", "data": b"x"},
        "append_text": {"name": "file", "text": "x", "before": ""},
        "create_text": {"name": "file", "text": "x"},
        "upload_file": {"local_path": str(tmp_path / "new" / "file"), "name": "file"},
        "publish": {"local_folder": str(tmp_path / "new"), "last": "file"},
    }

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=f"must be writable; .*there.* is not: {os.strerror(reason)}.* Name another"):
        getattr(open_folder(str(tmp_path / "there")), function)(**arguments.get(function, {}))


def test_a_full_disk_is_no_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space left"):
        open_folder(str(tmp_path)).write_bytes("file", b"x")
