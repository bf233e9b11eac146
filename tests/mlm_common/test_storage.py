import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlm_common.errors import InputError
from mlm_common.storage import files as storage
from mlm_common.storage.gcs import NUM_TRIES_DAMAGED
from tests.servers.fixtures import CloudStorageHandle

BUCKET = CloudStorageHandle.bucket_url
UPLOAD = "/upload/storage/v1/b/test-bucket/o"


@pytest.fixture(params=["local", "cloud"])
def folder(request: pytest.FixtureRequest, cloud: CloudStorageHandle, tmp_path: Path) -> str:
    return f"{cloud.bucket_url}/data" if request.param == "cloud" else str(tmp_path / "data")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A local folder with two shards in a subfolder, a manifest beside them, and what a killed write left behind."""
    root = tmp_path / "shards"
    (root / "train").mkdir(parents=True)
    (root / "settings.json").write_text("{}")
    (root / "train" / "a-manifest.json").write_text("manifest")
    (root / "train" / "dataset-0.tfrecord").write_bytes(b"shard 0")
    (root / "train" / "dataset-1.tfrecord").write_bytes(b"shard 1")
    (root / "train" / ".x.123.partial").write_bytes(b"half")
    (root / ".train.123.partial").mkdir()
    (root / ".train.123.partial" / "dataset-0.tfrecord").write_bytes(b"half")
    return root


def uploads(cloud: CloudStorageHandle) -> list[str]:
    """Return the method and the status of every request that carried an upload."""
    return [f"{entry['method']} {entry['status']} {entry['fault']}" for entry in cloud.requests(path=UPLOAD)]


def test_round_trip(folder: str) -> None:
    path = storage.join(folder, "train", "text.txt")
    assert not storage.exists(path)
    assert not storage.exists(folder)
    storage.write_text(path, "naïve ☃")
    assert storage.exists(path)
    assert storage.exists(folder)
    assert not storage.exists(storage.join(folder, "tra"))
    assert storage.read_text(path) == "naïve ☃"
    storage.write_bytes(path, b"\0\xff")
    assert storage.read_bytes(path) == b"\0\xff"
    with pytest.raises(FileNotFoundError, match="missing"):
        storage.read_bytes(storage.join(folder, "missing"))


def test_list_files_names_what_is_directly_in_the_folder(folder: str) -> None:
    assert storage.list_files(folder) == {}
    for name in ("b", "a", "sub/c"):
        storage.write_bytes(storage.join(folder, name), b"12345")
    storage.write_bytes(folder + "-other/d", b"1")
    assert list(storage.list_files(folder).items()) == [("a", 5), ("b", 5)]
    assert storage.list_files(folder + "/") == {"a": 5, "b": 5}


def test_folder_goes_up_and_comes_back(folder: str, shards: Path) -> None:
    storage.upload_folder(str(shards), folder, last="a-manifest.json")
    assert storage.list_files(folder) == {"settings.json": 2}
    with storage.local_copy(folder) as copy:
        files = {str(path.relative_to(copy)): path.read_bytes() for path in Path(copy).rglob("*") if path.is_file()}
    assert files == {
        "settings.json": b"{}",
        "train/a-manifest.json": b"manifest",
        "train/dataset-0.tfrecord": b"shard 0",
        "train/dataset-1.tfrecord": b"shard 1",
    }
    assert Path(copy).exists() == (not storage.is_remote(folder))


def test_local_copy_of_a_missing_folder(folder: str) -> None:
    with pytest.raises(InputError, match="folder"), storage.local_copy(folder):
        pass


def test_last_file_is_not_uploaded_when_another_fails(cloud: CloudStorageHandle, shards: Path) -> None:
    cloud.fault(UPLOAD, status=403, method="POST")
    with pytest.raises(InputError, match=r"roles/storage\.objectAdmin"):
        storage.upload_folder(str(shards), f"{BUCKET}/data", last="a-manifest.json")
    assert "data/train/a-manifest.json" not in cloud.objects()
    storage.upload_folder(str(shards), f"{BUCKET}/data", last="a-manifest.json")
    assert len(cloud.objects()) == 4


def test_unchanged_files_are_not_sent_again(cloud: CloudStorageHandle, shards: Path) -> None:
    for _ in range(2):
        storage.upload_folder(str(shards), f"{BUCKET}/data")
    assert len(uploads(cloud)) == 4


def test_local_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(FileNotFoundError):
        storage.upload_file(str(tmp_path / "missing"), str(path))
    storage.upload_file(str(path), str(tmp_path / "." / "file"))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"mode": "reset"}, {"mode": "lost_answer"}])
@pytest.mark.parametrize("old", [None, b"old"])
def test_upload_outlives_a_fault(cloud: CloudStorageHandle, fault: dict[str, str], old: bytes | None) -> None:
    if old:
        cloud.put("file", old)
    cloud.fault(UPLOAD, method="POST", **fault)
    storage.write_bytes(f"{BUCKET}/file", b"new")
    assert cloud.objects() == {"file": b"new"}
    assert len(uploads(cloud)) == 2


@pytest.mark.parametrize("fault", [{"mode": "reset", "num_bytes": 100_000}, {"mode": "lost_answer"}, {"status": 503}])
def test_large_upload_outlives_a_fault(cloud: CloudStorageHandle, tmp_path: Path, fault: dict[str, str]) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(1 << 20) * 9)  # the client sends in several requests from 8 MiB on
    cloud.fault(UPLOAD, method="PUT", **fault)
    storage.upload_file(str(path), f"{BUCKET}/large")
    assert cloud.objects() == {"large": path.read_bytes()}
    assert uploads(cloud)[0].startswith("POST")


@pytest.mark.parametrize("fault", [{"status": 503}, {"mode": "reset"}, {"mode": "truncate", "num_bytes": 2}])
def test_download_outlives_a_fault(cloud: CloudStorageHandle, fault: dict[str, str]) -> None:
    cloud.put("data/file", b"content")
    cloud.fault("alt=media", **fault)
    assert storage.read_bytes(f"{BUCKET}/data/file") == b"content"
    cloud.fault("alt=media", **fault)
    with storage.local_copy(f"{BUCKET}/data") as copy:
        assert (Path(copy) / "file").read_bytes() == b"content"


def test_corrupted_transfers_are_refused(cloud: CloudStorageHandle) -> None:
    cloud.fault(UPLOAD, method="POST", mode="corrupt_upload", num_bytes=-50, times=NUM_TRIES_DAMAGED)
    with pytest.raises(Exception, match="400"):
        storage.write_bytes(f"{BUCKET}/file", b"x" * 100)
    assert cloud.objects() == {}
    cloud.put("file", b"content")
    cloud.fault("alt=media", mode="corrupt")
    with pytest.raises(Exception, match=r"(?i)checksum"):
        storage.read_bytes(f"{BUCKET}/file")


def test_bytes_that_were_changed_on_their_way_are_sent_again(cloud: CloudStorageHandle) -> None:
    cloud.fault(UPLOAD, method="POST", mode="corrupt_upload", num_bytes=-50, times=NUM_TRIES_DAMAGED - 1)
    storage.write_bytes(f"{BUCKET}/file", b"x" * 100)
    assert cloud.objects() == {"file": b"x" * 100}


def test_object_of_another_program_is_not_overwritten(cloud: CloudStorageHandle) -> None:
    cloud.fault(UPLOAD, method="POST", mode="delay", delay_seconds=0.5)

    def write_meanwhile() -> None:
        while not uploads(cloud):
            time.sleep(0.02)
        cloud.put("file", b"theirs")

    other = threading.Thread(target=write_meanwhile)
    other.start()
    with pytest.raises(InputError, match="one program at a time"):
        storage.write_bytes(f"{BUCKET}/file", b"ours")
    other.join()
    assert cloud.objects() == {"file": b"theirs"}


def calls(path: str, local_folder: str) -> dict[str, Callable[[], object]]:
    """Return every function that goes to Cloud Storage, as a call."""
    return {
        "exists": lambda: storage.exists(path),
        "list_files": lambda: storage.list_files(path),
        "read_bytes": lambda: storage.read_bytes(path),
        "write_bytes": lambda: storage.write_bytes(path, b"x"),
        "upload_folder": lambda: storage.upload_folder(local_folder, path),
        "local_copy": lambda: storage.local_copy(path).__enter__(),
    }


@pytest.mark.parametrize("function", calls("", ""))
def test_errors_name_the_cure(function: str, cloud: CloudStorageHandle, shards: Path) -> None:
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
def test_bad_paths(path: str) -> None:
    with pytest.raises(InputError, match="gs://BUCKET/NAME"):
        storage.write_bytes(path, b"")


def test_names_that_lead_out_of_the_folder(cloud: CloudStorageHandle) -> None:
    cloud.put("data/../../evil", b"x")
    with pytest.raises(InputError, match="leads out"), storage.local_copy(f"{BUCKET}/data"):
        pass


@given(names=st.sets(st.from_regex(r"[ab%é ]{1,3}(/[ab+]{1,2}){0,2}", fullmatch=True), max_size=8))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_listing_matches_a_local_folder(cloud: CloudStorageHandle, names: set[str]) -> None:
    """Listing is the one place where folders have to be made up; objects that are also folders do not exist locally."""
    names = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    cloud.reset()
    cloud.make_bucket("test-bucket")
    for name in names:
        cloud.put(name, name.encode())
    with storage.local_copy(BUCKET) if names else storage.local_copy(".") as copy:
        for folder in {"", *(name.rpartition("/")[0] for name in names)} if names else ():
            remote = storage.join(BUCKET, folder) if folder else BUCKET
            assert storage.list_files(remote) == storage.list_files(storage.join(copy, folder))
            assert storage.exists(remote)
