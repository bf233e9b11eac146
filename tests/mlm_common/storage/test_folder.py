import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google.cloud.storage.retry import DEFAULT_RETRY
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.errors import InputError
from mlm_common.storage import CloudStorageError, Folder, folder_and_name, gcs, open_folder
from mlm_common.storage.folder import NUM_TRANSFERS
from mlm_common.storage.gcs import NUM_TRIES_DAMAGED
from tests.servers.fixtures import CloudStorageHandle

BUCKET = CloudStorageHandle.bucket_url
UPLOAD = "/upload/storage/v1/b/test-bucket/o"


@pytest.fixture(params=["local", "cloud"])
def folder(request: pytest.FixtureRequest, cloud: CloudStorageHandle, tmp_path: Path) -> Folder:
    return open_folder(f"{cloud.bucket_url}/data" if request.param == "cloud" else str(tmp_path / "data"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A local folder with two shards in a subfolder, a manifest beside them, and what a killed write left behind."""
    root = tmp_path / "shards"
    (root / "train").mkdir(parents=True)
    (root / "settings.json").write_text("{}", encoding="utf-8")
    (root / "train" / "a-manifest.json").write_text("manifest", encoding="utf-8")
    (root / "train" / "dataset-0.tfrecord").write_bytes(b"shard 0")
    (root / "train" / "dataset-1.tfrecord").write_bytes(b"shard 1")
    (root / "train" / ".x.123.partial").write_bytes(b"half")
    (root / ".train.123.partial").mkdir()
    (root / ".train.123.partial" / "dataset-0.tfrecord").write_bytes(b"half")
    return root


def uploads(cloud: CloudStorageHandle) -> list[str]:
    """List the method and the status of every request that carried an upload."""
    return [f"{entry['method']} {entry['status']} {entry['fault']}" for entry in cloud.requests(path=UPLOAD)]


def test_round_trip(folder):
    name = "train/text.txt"
    assert not folder.exists(name)
    assert not folder.exists()
    folder.write_text(name, "naïve ☃")
    assert folder.exists(name)
    assert folder.exists()
    assert folder.subfolder("train").exists("text.txt")
    assert not folder.exists("tra")
    assert folder.read_text(name) == "naïve ☃"
    folder.write_bytes(name, b"\0\xff")
    assert folder.read_bytes(name) == b"\0\xff"
    folder.append_text("log", "one ☃\n", before="")
    folder.append_text("log", "two\n", before="one ☃\n")
    assert folder.read_text("log") == "one ☃\ntwo\n"
    with pytest.raises(FileNotFoundError, match="missing"):
        folder.read_bytes("missing")


def test_a_path_to_write_to(folder):
    folder.write_text("file", "old")
    with contextlib.suppress(KeyError), folder.replacing("file") as partial:
        partial.write_text("half", encoding="utf-8")
        raise KeyError
    assert folder.read_text("file") == "old"
    with folder.replacing("file") as partial:
        partial.write_text("new", encoding="utf-8")
        assert folder.list_files() == {"file": 3}
        assert folder.read_text("file") == "old"
    assert folder.read_text("file") == "new"
    assert folder.list_files() == {"file": 3}


def test_folder_goes_up_and_comes_back(folder, shards):
    folder.upload_folder(str(shards), last="a-manifest.json")
    assert folder.list_files() == {"settings.json": 2}
    with folder.local_copy() as copy:
        files = {str(path.relative_to(copy)): path.read_bytes() for path in Path(copy).rglob("*") if path.is_file()}
    assert files == {
        "settings.json": b"{}",
        "train/a-manifest.json": b"manifest",
        "train/dataset-0.tfrecord": b"shard 0",
        "train/dataset-1.tfrecord": b"shard 1",
    }
    assert Path(copy).exists() == folder.is_local
    with folder.local_copy(["train/dataset-1.tfrecord"]) as copy:
        assert Path(copy, "train", "dataset-1.tfrecord").read_bytes() == b"shard 1"
        assert Path(copy, "settings.json").exists() == folder.is_local
    with pytest.raises(InputError, match="folder"), folder.subfolder("missing").local_copy():
        pass


def test_a_folder_is_deleted_with_all_in_it(folder):
    for name in ("a", "sub/b", "sub/sub/c"):
        folder.write_text(name, "x")
    other = open_folder(folder.path + "-other")
    other.write_text("d", "x")
    folder.subfolder("missing").delete()
    folder.subfolder("sub").delete()
    assert folder.list_files() == {"a": 1}
    assert not folder.exists("sub")
    folder.delete()
    assert not folder.exists()
    assert other.exists("d")


def test_a_killed_write_is_cleaned_up(tmp_path):
    for name in (".a.1.partial", ".b.1.partial", "a.partial", ".a"):
        (tmp_path / name).write_text("half", encoding="utf-8")
    folder = open_folder(str(tmp_path))
    folder.delete_partial_files("a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a", ".b.1.partial", "a.partial"]


@pytest.mark.parametrize(
    ("path", "folder", "name"), [("a/b", "a", "b"), ("/b", "/", "b"), ("b", "", "b"), ("gs://abc/b", "gs://abc", "b")]
)
def test_the_path_of_a_file_is_that_of_its_folder_and_its_name(path, folder, name):
    assert folder_and_name(path) == (open_folder(folder), name)
    assert open_folder(folder).path_of(name) == path


def test_last_file_is_not_uploaded_when_another_fails(cloud, shards):
    cloud.fault(UPLOAD, status=403, method="POST")
    with pytest.raises(InputError, match=r"roles/storage\.objectAdmin"):
        open_folder(f"{BUCKET}/data").upload_folder(str(shards), last="a-manifest.json")
    assert "data/train/a-manifest.json" not in cloud.objects()
    for _ in range(2):
        open_folder(f"{BUCKET}/data").upload_folder(str(shards), last="a-manifest.json")
        assert len(cloud.objects()) == 4
    assert sum(entry["status"] == 200 for entry in cloud.requests(path=UPLOAD)) == 4, "what is unchanged is sent once"


IN_PARTS = os.urandom((1 << 16) + 1)


def write_small(_: Path) -> bytes:
    open_folder(BUCKET).write_bytes("file", b"x" * 100)
    return b"x" * 100


def upload_large(folder: Path) -> bytes:
    content = os.urandom(1 << 20) * 9  # the client sends in several requests from 8 MiB on
    (folder / "large").write_bytes(content)
    open_folder(BUCKET).upload_file(str(folder / "large"), "file")
    return content


def write_in_parts(_: Path) -> bytes:
    with open_folder(BUCKET).replacing("file") as path:
        path.write_bytes(IN_PARTS)
    return IN_PARTS


@pytest.mark.parametrize(
    ("write", "path", "method", "old", "fault"),
    [
        (write_small, UPLOAD, "POST", None, {"status": 503}),
        (write_small, UPLOAD, "POST", None, {"mode": "lost_answer"}),
        (write_small, UPLOAD, "POST", b"old", {"mode": "lost_answer"}),
        (upload_large, UPLOAD, "PUT", None, {"mode": "reset"}),
        (upload_large, UPLOAD, "PUT", None, {"mode": "lost_answer"}),
        (write_in_parts, UPLOAD, "POST", None, {"status": 429}),
        (write_in_parts, "/compose", "POST", b"old", {"mode": "lost_answer"}),
    ],
)
def test_uploads_outlive_a_fault(write, path, method, old, fault, cloud, tmp_path, monkeypatch):
    monkeypatch.setattr(gcs, "IN_PARTS_BYTES", 1 << 16)
    if old:
        cloud.put("file", old)
    cloud.fault(path, method=method, **fault)
    content = write(tmp_path)
    assert cloud.objects() == {"file": content}
    assert [entry for entry in cloud.requests() if entry["fault"] != "none"], "the fault took place"


@pytest.mark.parametrize(("write", "times"), [(write_small, NUM_TRIES_DAMAGED - 1), (write_in_parts, 1)])
def test_bytes_that_were_changed_during_a_transfer_are_sent_again(write, times, cloud, tmp_path, monkeypatch):
    monkeypatch.setattr(gcs, "IN_PARTS_BYTES", 1 << 16)
    cloud.fault(UPLOAD, method="POST", mode="corrupt_upload", num_bytes=-50, times=times)
    content = write(tmp_path)
    assert cloud.objects() == {"file": content}
    cloud.fault(UPLOAD, method="POST", mode="corrupt_upload", num_bytes=-50, times=NUM_TRIES_DAMAGED)
    with pytest.raises(CloudStorageError, match=r"gs://test-bucket/other: the transfer failed.*400"):
        open_folder(BUCKET).write_bytes("other", b"x" * 100)
    assert cloud.objects() == {"file": content}
    cloud.fault("alt=media", mode="corrupt", times=NUM_TRIES_DAMAGED)
    with pytest.raises(CloudStorageError, match=r"(?i)gs://test-bucket/file: the transfer failed.*checksum"):
        open_folder(BUCKET).read_bytes("file")


def test_a_large_file_goes_up_in_parts_at_once_and_leaves_none(cloud, tmp_path, monkeypatch):
    monkeypatch.setattr(gcs, "IN_PARTS_BYTES", 1 << 16)
    cloud.put("file", b"old")
    write_in_parts(tmp_path)
    assert cloud.objects() == {"file": IN_PARTS}
    assert 1 < len(uploads(cloud)) <= NUM_TRANSFERS
    assert len(cloud.requests("POST", "/compose")) == 1


@pytest.mark.parametrize(("write", "path"), [(write_small, UPLOAD), (write_in_parts, "/compose")])
def test_an_object_of_another_program_is_not_replaced(write, path, cloud, tmp_path, monkeypatch):
    monkeypatch.setattr(gcs, "IN_PARTS_BYTES", 1 << 16)
    cloud.fault(path, method="POST", mode="delay", delay_seconds=0.5)

    def write_meanwhile() -> None:
        while not cloud.requests("POST", path):
            time.sleep(0.02)
        cloud.put("file", b"theirs")

    other = threading.Thread(target=write_meanwhile)
    other.start()
    with pytest.raises(InputError, match="one program at a time"):
        write(tmp_path)
    other.join()
    assert cloud.objects() == {"file": b"theirs"}


def test_parts_left_by_a_killed_write_are_no_files(cloud):
    folder = open_folder(f"{BUCKET}/data")
    folder.write_text("a", "x")
    for name in (".a.1.0.partial", ".b.1.0.partial", "sub/.a.1.0.partial"):
        cloud.put(f"data/{name}", b"half")
    assert folder.list_files() == {"a": 1}
    with folder.local_copy() as copy:
        assert [path.name for path in Path(copy).rglob("*") if path.is_file()] == ["a"]
    folder.delete_partial_files("a")
    assert set(cloud.objects()) == {"data/a", "data/.b.1.0.partial", "data/sub/.a.1.0.partial"}


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"mode": "reset"},
        {"mode": "truncate", "num_bytes": 2},
        {"mode": "corrupt", "times": NUM_TRIES_DAMAGED - 1},
    ],
)
def test_downloads_outlive_a_fault(cloud, fault):
    cloud.put("data/file", b"content")
    cloud.fault("alt=media", **fault)
    assert open_folder(f"{BUCKET}/data").read_bytes("file") == b"content"
    cloud.fault("alt=media", **fault)
    with open_folder(f"{BUCKET}/data").local_copy() as copy:
        assert (Path(copy) / "file").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("exists", 400, "400"),
        ("list_files", 503, "did not answer"),
        ("read_bytes", 412, "412"),
        ("write_bytes", 503, "did not answer"),
        ("delete_files", 409, "409"),
    ],
)
def test_no_answer_or_a_refusal_is_one_error_to_retry(function, status, said, cloud, shards, monkeypatch):
    monkeypatch.setattr(DEFAULT_RETRY, "_timeout", 0.3)
    cloud.put("data/x", b"x")
    cloud.fault("/o", status=status, times=1000)
    with pytest.raises(CloudStorageError, match=rf"gs://test-bucket/data.*{said}.* Run the same command") as caught:
        calls(f"{BUCKET}/data", str(shards))[function]()
    assert "\n" not in str(caught.value)


def calls(path: str, local_folder: str) -> dict[str, Callable[[], object]]:
    """List every function that goes to Cloud Storage, as a call."""
    return {
        "exists": lambda: open_folder(path).exists(),
        "list_files": lambda: open_folder(path).list_files(),
        "read_bytes": lambda: open_folder(path).read_bytes("x"),
        "write_bytes": lambda: open_folder(path).write_bytes("x", b"x"),
        "upload_folder": lambda: open_folder(path).upload_folder(local_folder),
        "local_copy": lambda: open_folder(path).local_copy().__enter__(),
        "local_copy_of_names": lambda: open_folder(path).local_copy(["x"]).__enter__(),
        "delete_files": lambda: open_folder(path).delete_files(["x"]),
        "check_writable": lambda: open_folder(path).check_writable(),
    }


@pytest.mark.parametrize("function", calls("", ""))
def test_errors_say_how_to_fix_them(function, cloud, shards):
    with pytest.raises(InputError, match="gcloud storage buckets create gs://no-such-bucket"):
        calls("gs://no-such-bucket/data", str(shards))[function]()
    cloud.authorize(accepted_tokens=["another"])
    with pytest.raises(InputError, match="gcloud auth application-default login"):
        calls(f"{BUCKET}/data", str(shards))[function]()
    cloud.authorize(denied_buckets=["test-bucket"])
    with pytest.raises(InputError, match=r"roles/storage\.objectAdmin.*roles/storage\.objectViewer"):
        calls(f"{BUCKET}/data", str(shards))[function]()


@pytest.mark.parametrize(
    "path", ["gs://", "gs:///name", "gs://Bucket/x", "gs://bucket//x", "gs://b/x", "gs:/bucket/x", "s3://bucket/x"]
)
def test_bad_paths(path):
    with pytest.raises(InputError, match="gs://BUCKET/NAME"):
        open_folder(path)


def test_no_credentials(cloud_storage, tmp_path):
    environment = os.environ | cloud_storage.environment | {"NO_GCE_CHECK": "true", "HOME": str(tmp_path)}
    program = f"from mlm_common.storage import open_folder; open_folder('{BUCKET}').exists('x')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, encoding="utf-8")
    assert "InputError: gs://test-bucket/x needs Google credentials" in done.stderr


def test_names_that_lead_out_of_the_folder(cloud):
    cloud.put("data/../../evil", b"x")
    with pytest.raises(InputError, match="is outside"), open_folder(f"{BUCKET}/data").local_copy():
        pass


@given(names=st.sets(st.from_regex(r"[ab%é ]{1,3}(/[ab+]{1,2}){0,2}", fullmatch=True), max_size=8))
@settings(max_examples=15)
def test_listing_matches_a_local_folder(cloud, names):
    """Listing is the one place where folders have to be made up; objects that are also folders do not exist locally."""
    names = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    cloud.reset()
    cloud.make_bucket("test-bucket")
    for name in names:
        cloud.put(name, name.encode())
    with open_folder(BUCKET).local_copy() if names else open_folder(".").local_copy() as copy:
        for folder in {"", *(name.rpartition("/")[0] for name in names)} if names else ():
            remote = open_folder(BUCKET).subfolder(folder) if folder else open_folder(BUCKET)
            assert remote.list_files() == open_folder(f"{copy}/{folder}").list_files()
            assert remote.exists()
