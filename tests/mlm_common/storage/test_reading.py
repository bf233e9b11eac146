"""A corpus in Cloud Storage: found by globs, read in ranges, refused once it changes."""

import base64
import glob
import os
from pathlib import Path

import google_crc32c
import pytest
from google.cloud.storage.retry import DEFAULT_RETRY
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus import text_files
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus, read_partition
from mlm_common.corpus.text_files import ByteRange, cut_file, find_files, read_byte_range
from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage import gcs
from mlm_common.storage.reading import find_stored_files
from tests.fixtures.text_files import contents_of
from tests.servers.fixtures import CloudStorageHandle

BUCKET = CloudStorageHandle.bucket_url
TEXTS = ["first", "", "sécond ☃", "last"] * 50
DOWNLOAD = r"alt=media"
CONTENTS = contents_of(TEXTS)


def read(byte_range: ByteRange) -> list[str]:
    return list(read_byte_range(byte_range, CorpusConfig()))


def read_object(name: str, *bounds: int) -> list[str]:
    (file,) = find_stored_files(f"{BUCKET}/{name}")
    return read(ByteRange(file, *bounds))


def downloads(cloud: CloudStorageHandle) -> list[str]:
    """List the ranges that were asked for."""
    return [entry["range"] for entry in cloud.requests() if entry["query"].get("alt") == "media"]


@pytest.mark.parametrize("ending", CONTENTS)
def test_every_format(cloud, ending):
    cloud.put(f"texts/a.{ending}", CONTENTS[ending])
    cloud.put(f"texts/b/a.{ending}", CONTENTS[ending])
    corpus = open_corpus(CorpusConfig(data_files=[f"{BUCKET}/texts/*.{ending}"]))
    assert list(corpus.documents("train")) == TEXTS
    name, num_bytes = f"{BUCKET}/texts/a.{ending}", len(CONTENTS[ending])
    checksum = google_crc32c.Checksum(CONTENTS[ending]).digest()
    (record,) = corpus.record["data_files"]
    assert isinstance(record.pop("generation"), int)
    assert record == {"path": name, "num_bytes": num_bytes, "checksum": f"crc32c {base64.b64encode(checksum).decode()}"}
    partition_bytes = 300 if ending in ("txt", "jsonl") else num_bytes
    partitions = list(corpus.partitions("train", partition_bytes))
    assert len(partitions) == -(-num_bytes // partition_bytes)
    assert [text for part in partitions for text in read_partition(corpus.config, "train", part)] == TEXTS
    assert all(len(entry["range"]) for entry in cloud.requests(path="alt=media")), "a file was read as a whole"


NAMES = st.from_regex(r"[ab.]{0,2}[ab](/[ab.]?[ab]){0,2}\.txt", fullmatch=True)
PATTERNS = st.from_regex(r"([ab][*?]?|[*?][ab]?|\*\*|[.]?[ab*]|\[ab\]\*)(/(\*\*|[ab.]?\*|\?[ab])){0,2}", fullmatch=True)


@given(st.lists(NAMES, max_size=6), PATTERNS, st.sampled_from(["", "/*.txt", ".txt"]))
@settings(max_examples=30)
def test_globs_match_what_they_match_in_a_folder(cloud, tmp_path_factory, names, pattern, tail):
    folder = tmp_path_factory.mktemp("folder")
    cloud.reset()
    cloud.make_bucket("test-bucket")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x", encoding="utf-8")
        cloud.put(f"folder/{name}", b"x")
    paths = glob.glob(f"{folder}/{pattern}{tail}", recursive=True)  # noqa: PTH207
    expected = sorted({os.path.relpath(name, folder) for name in paths if Path(name).is_file()})
    assert [
        file.name.removeprefix(f"{BUCKET}/folder/") for file in find_stored_files(f"{BUCKET}/folder/{pattern}{tail}")
    ] == expected


def test_names_that_look_like_globs_and_empty_objects(cloud):
    for name in ("part[1].txt", "part1.txt", "folder.txt/", "z.txt"):
        cloud.put(name, b"x" * (name == "z.txt"))
    assert [file.name for file in find_files([f"{BUCKET}/z.txt", f"{BUCKET}/part[1].txt"], "--data-files")] == [
        f"{BUCKET}/z.txt", f"{BUCKET}/part[1].txt",
    ]  # fmt: skip
    assert [file.num_bytes for file in find_files([f"{BUCKET}/**"], "--data-files")] == [0, 0, 1]
    assert read_object("part1.txt") == []
    for pattern in ("gs://test-bucket", f"{BUCKET}/missing.txt", f"{BUCKET}/m*.txt"):
        with pytest.raises(InputError, match=r"--data-files: no file matches gs://test-bucket"):
            find_files([pattern], "--data-files")


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_range_is_read_without_the_rest(cloud, ending, monkeypatch):
    monkeypatch.setattr(text_files, "ROW_END_BYTES", 50)
    rows = [b'{"text": "%06d"}\n' % number for number in range(10_000)]
    cloud.put(f"a.{ending}", b"".join(rows))
    (file,) = find_stored_files(f"{BUCKET}/a.{ending}")
    byte_ranges = cut_file(file, "line", 20_000)
    num_before = len(cloud.requests(path="/o/"))
    texts = read(byte_ranges[5])
    assert 900 < len(texts) < 1200
    sizes = [int(last) - int(first) + 1 for first, last in (text[6:].split("-") for text in downloads(cloud))]
    assert sum(sizes) < 20_000 + 8_000 + 2 * 51
    assert len(cloud.requests(path="/o/")) - num_before == len(sizes), "something beside the content was asked for"
    assert len(sizes) == 4
    assert sum(len(read(byte_range)) for byte_range in byte_ranges) == 10_000


@pytest.mark.parametrize("ending", ["txt", "parquet"])
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_an_object_that_changes_is_an_error(cloud, ending, change):
    cloud.put(f"a.{ending}", CONTENTS[ending])
    (file,) = find_stored_files(f"{BUCKET}/a.{ending}")
    assert read(ByteRange(file)) == TEXTS
    if change == "deleted":
        cloud.delete(f"a.{ending}")
    else:
        cloud.put(f"a.{ending}", CONTENTS[ending])
    with pytest.raises(InputError, match=rf"gs://test-bucket/a\.{ending} was replaced or deleted while"):
        read(ByteRange(file))


def test_an_object_that_changes_while_it_is_read(cloud, monkeypatch):
    monkeypatch.setattr(gcs.GcsReader, "read_ahead_bytes", 100_000)
    cloud.put("a.txt", b"old line\n" * 50_000)
    (file,) = find_stored_files(f"{BUCKET}/a.txt")
    texts = read_byte_range(ByteRange(file), CorpusConfig())
    assert next(texts) == "old line"
    cloud.put("a.txt", b"new line\n" * 50_000)
    with pytest.raises(InputError, match="was replaced or deleted while it was being read"):
        assert "new line" not in texts


@pytest.mark.parametrize(
    ("ending", "fault"),
    [
        ("txt", {"status": 503}),
        ("txt", {"mode": "truncate"}),
        ("jsonl.gz", {"mode": "reset"}),
        ("parquet", {"mode": "truncate"}),
    ],
)
def test_reading_outlives_faults(cloud, ending, fault):
    cloud.put(f"a.{ending}", CONTENTS[ending])
    cloud.fault(DOWNLOAD, num_bytes=20, **fault)
    assert read_object(f"a.{ending}") == TEXTS
    assert [entry["fault"] for entry in cloud.requests() if entry["fault"] != "none"] == [fault.get("mode", "status")]


def test_no_answer_is_one_line(cloud, monkeypatch):
    monkeypatch.setattr(DEFAULT_RETRY, "_timeout", 0.5)
    cloud.put("a.txt", b"text")
    cloud.fault(DOWNLOAD, times=1000)
    with pytest.raises(RunFailedError, match=r"gs://test-bucket/a.* did not answer.* Run the same command again\."):
        read_object("a.txt")


@pytest.mark.parametrize("pattern", ["a.txt", "*.txt"])
def test_errors_say_how_to_fix_them(cloud, pattern):
    cloud.put("a.txt", b"text")
    (file,) = find_stored_files(f"{BUCKET}/a.txt")
    with pytest.raises(InputError, match="gcloud storage buckets create gs://no-such-bucket"):
        find_stored_files(f"gs://no-such-bucket/{pattern}")
    with pytest.raises(InputError, match="gs://BUCKET/NAME"):
        find_stored_files(f"gs://b*/{pattern}")
    cloud.authorize(denied_buckets=["test-bucket"])
    with pytest.raises(InputError, match=r"roles/storage\.objectViewer"):
        find_stored_files(f"{BUCKET}/{pattern}")
    with pytest.raises(InputError, match=r"roles/storage\.objectViewer"):
        read(ByteRange(file))
