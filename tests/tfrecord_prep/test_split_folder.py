"""Folders in every state: complete, unfinished, damaged, of other settings; and bad input."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm_common.corpus import identity
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus, read_partition
from mlm_common.corpus.text_files import ByteRange
from mlm_common.corpus.text_formats import BadRow, BadRows
from mlm_common.errors import InputError
from tests.fixtures.run_command import Run
from tests.fixtures.tiny_corpus import contents
from tfrecord_prep import partition, split
from tfrecord_prep.manifest import read_manifest
from tfrecord_prep.split import default_partition_bytes, default_shard_size

CORPUS = b"a corpus of small words\n" * 400 + b"x\n"
MIB = 1 << 20


@pytest.fixture
def unfinished(prepare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make `out` of `docs.txt` without its last partition; return the flags of the corpus."""
    (tmp_path / "docs.txt").write_bytes(CORPUS)
    corpus = ["--data-files", str(tmp_path / "docs.txt")]

    def read(config: CorpusConfig, split_name: str, byte_ranges: list[ByteRange], bad_rows: BadRows) -> Iterator[str]:
        if byte_ranges[0].stop == len(CORPUS):
            raise InputError("stopped before the last")
        return read_partition(config, split_name, byte_ranges, bad_rows)

    with monkeypatch.context() as patch:
        patch.setattr(partition, "read_partition", read)
        stopped = prepare(tmp_path / "out", *corpus)
    assert (stopped.status, "stopped before the last" in stopped.error) == (2, True)
    names = {path.name for path in (tmp_path / "out" / "train").iterdir()}
    assert {"plan.json", *(f"partition-{index:05d}.json" for index in range(4))} < names
    assert "manifest.json" not in names
    return corpus


def times(folder: Path, pattern: str = "dataset-*") -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob(pattern) if path.is_file()}


def assert_same_as_fresh(prepare: Run, folder: Path, *extra_flags: object) -> None:
    """Run the command to its end in `folder/out`: it is then the same as in an empty folder."""
    assert prepare(folder / "out", *extra_flags).status == 0
    assert prepare(folder / "fresh", *(word for word in extra_flags if word != "--overwrite")).status == 0
    assert contents(folder / "out") == contents(folder / "fresh")


def test_complete_folder_is_left_alone_but_for_remains(prepare, tmp_path):
    out = tmp_path / "out"
    assert f"{out}/train: to be written" in prepare(out, "--dry-run").out
    assert not out.exists()
    prepare(out)
    before = times(out, "*")
    for name in ("plan.json", "partition-00001.json", ".manifest.json.0a.partial"):  # of a run killed at its end
        (out / "train" / name).write_text("{}", encoding="utf-8")
    no_influence = ["--trust-remote-code", "--seed", "3", "--streaming", "--on-bad-row", "skip"]
    for extra_flags in ([], no_influence):  # there are no bad rows
        assert "already complete with these settings" in prepare(out, *extra_flags).out
        assert times(out, "*") == before
    refused = prepare(out / "train")
    assert (
        f"--output-dir must be the parent of the splits' folders; {out}/train is the folder of one split"
        in refused.error
    )


def test_resumed_run_keeps_complete_partitions(prepare, unfinished, tmp_path):
    folder = tmp_path / "out" / "train"
    before = times(folder)
    redone = {path for path in before if path.name.startswith(("dataset-00001", "dataset-00002"))}
    next(folder.glob("dataset-00001-00001-*")).write_bytes(b"")  # not the size in the sidecar
    (folder / "partition-00002.json").unlink()
    # What a kill may leave.
    for name in ("dataset-00009-00000-7.tfrecord", ".dataset-1-1.tfrecord.0a.partial", "tokenizer/.x.0a.partial"):
        (folder / name).write_bytes(b"half")
    (tmp_path / "out" / ".writable-0a.partial").mkdir()
    assert_same_as_fresh(prepare, tmp_path, *unfinished)
    assert {path for path in before if times(folder)[path] != before[path]} == redone


def test_with_another_tokenizers_library_unfinished_work_is_done_again(prepare, unfinished, tmp_path, monkeypatch):
    version = split.version
    before = times(tmp_path / "out")
    for library, is_rebuilt in (("numpy", False), ("tokenizers", True)):
        monkeypatch.setattr(split, "version", lambda name, other=library: "99" if name == other else version(name))
        assert prepare(tmp_path / "out", *unfinished).status == 0
        after = times(tmp_path / "out")
        assert all((after[path] != before[path]) == is_rebuilt for path in before)
        (tmp_path / "out" / "train" / "manifest.json").rename(tmp_path / "out" / "train" / "plan.json")


def with_bad_rows(folder: Path) -> Path:
    corpus = folder / "docs.jsonl"
    rows = [f'{{"text": "a corpus of small words {number}"}}\n'.encode() for number in range(300)]
    rows[3] = b'{"text": 0}\n'
    rows[150] = b'{"text": "half \\ud800 pair"}\n'
    rows[299] = b'{"text": "\xff"}\n'
    corpus.write_bytes(b"".join(rows))
    return corpus


def test_skipped_rows_are_the_same_for_any_number_of_workers(prepare, tmp_path):
    corpus = with_bad_rows(tmp_path)
    files = ["--data-files", corpus, "--on-bad-row", "skip"]
    skipped = f"  skipped             rows that cannot be read: 3 left out, such as {corpus}, line 4: int 0; "
    assert skipped in prepare(tmp_path / "one", *files).out
    assert prepare(tmp_path / "two", *files, "--num-workers", 2).status == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    manifest = read_manifest(str(tmp_path / "one" / "train"))
    assert manifest.totals.num_documents == 297
    content = corpus.read_bytes()
    first, *others = manifest.bad_rows.listed
    assert (manifest.bad_rows.num_rows, first) == (3, BadRow(str(corpus), "line 4", "int 0"))
    assert [row.problem for row in others] == ["U+D800 is half of a surrogate pair", "the byte 0xff is not UTF-8"]
    for row, start in zip(others, (b'{"text": "half', b'{"text": "\xff'), strict=True):
        line, byte = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", row.place))
        rows_of_range = content[content.index(b"\n", byte - 1) + 1 :].splitlines()
        assert rows_of_range[line - 1].startswith(start), row.place
    # The process that reads documents itself lists the same rows.
    assert prepare(tmp_path / "limited", *files, "--limit", 1000).status == 0
    limited = read_manifest(str(tmp_path / "limited" / "train"))
    assert (limited.totals.num_documents, limited.bad_rows.num_rows) == (297, 3)
    assert [row.place for row in limited.bad_rows.listed] == ["line 4", "line 151", "line 300"]
    assert "cannot be read: 3 left out" in prepare(tmp_path / "one", "--verify").out
    # Splits that are drawn from the same files.
    assert prepare(tmp_path / "drawn", *files, "--validation-percent", 20).out.count("cannot be read: 3 left out") == 1


def leave_foreign_shards(folder: Path) -> None:
    for path in folder.glob("*.*"):
        path.unlink()
    (folder / "dataset-0-1000.tfrecord").write_bytes(b"")


def leave_broken_plan(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "plan.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "extra_flags", "message"),
    [
        (
            lambda _: None,
            ["--max-length", 24],
            r"other settings: max_length is 16 there, but 24 is requested.*--overwrite",
        ),
        (lambda folder: next(folder.glob("dataset-00001-*")).write_bytes(b""), [], "0 bytes, in the manifest .*--over"),
        (leave_foreign_shards, [], r"this command did not write, such as dataset-0-1000\.tfrecord.*--overwrite"),
        (leave_broken_plan, [], r"plan\.json must be a plan, a JSON object; .*Delete it to start again"),
    ],
)
def test_folder_in_the_way(prepare, tmp_path, spoil, extra_flags, message):
    prepare(tmp_path)
    spoil(tmp_path / "train")
    before = contents(tmp_path)
    assert re.search(message, prepare(tmp_path, *extra_flags).refusal)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("extra_flags", "message"),
    [
        ("--max-length 7", "--max-length must be at least 8"),
        ("--partition-bytes 10", "--partition-bytes must be at least 1,024"),
        ("--chunking sentences", "documents"),
        ("--random-share 0", "--random-share needs --chunking segment_pairs; received it with concat"),
        ("--tokenizer-name-or-path=", "--tokenizer-name-or-path is required"),
        ("--output-dir=~/shards", "The ~ of ~/shards was not expanded"),
        # The folder is tried out before anything is read.
        (f"--output-dir {__file__} --tokenizer-name-or-path /nowhere", "The output folder must be writable"),
        ("--tokenizer-name-or-path /nowhere", "/nowhere"),
        ("--data-files /nowhere.txt", "no file matches /nowhere.txt"),
        (
            "--limit 2 --validation-percent 0.001",
            "A split must have text; `validation` has none, because --validation-percent 0.001 drew none of 2 doc",
        ),
    ],
)
def test_bad_input_is_one_line(prepare, tmp_path, extra_flags, message):
    refused = prepare(tmp_path / "out", *extra_flags.split())
    assert (refused.status, message in refused.error) == (2, True), refused.err
    assert not (tmp_path / "out" / "validation" / "plan.json").exists()
    assert not (tmp_path / "out" / "validation" / "manifest.json").exists()


@pytest.mark.parametrize(("length", "expected"), [(8, 16384), (512, 16384), (1000, 8388), (8192, 1024), (1 << 24, 1)])
def test_default_shard_size_follows_the_length_of_rows(length, expected):
    assert default_shard_size(length) == expected


@pytest.mark.parametrize(("num_bytes", "expected"), [(20_000, MIB), (300 * MIB, 300 * MIB // 128), (1 << 34, 64 * MIB)])
def test_default_partition_size_follows_the_corpus(tmp_path, num_bytes, expected, monkeypatch):
    monkeypatch.setattr(identity, "_sha256", lambda _: "sha256 of much")
    path = tmp_path / "a.txt"
    path.write_text("text\n" * 2000, encoding="utf-8")  # the start is looked at
    with path.open("r+b") as file:
        file.truncate(num_bytes)  # takes no room on the disk
    assert default_partition_bytes(open_corpus(CorpusConfig(data_files=[str(path)]))) == expected
    assert default_partition_bytes(open_corpus(CorpusConfig(data_files=[str(path)], limit=1))) == 4 * MIB
