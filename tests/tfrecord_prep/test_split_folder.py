"""Folders in every state: complete, unfinished, damaged, somebody else's; and bad input."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlm_common.corpus.bad_rows import BadRow, BadRows
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import read_partition
from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tests.fixtures.tiny_corpus import contents, flags, write_source
from tfrecord_prep import partition
from tfrecord_prep.manifest import open_shards, read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main

CORPUS = b"a corpus of small words\n" * 400 + b"x\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def error_line(capsys: pytest.CaptureFixture) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def unfinished(source: Path, folder: Path, capsys: pytest.CaptureFixture) -> tuple[list[str], Path]:
    """Make `folder/out` without its last partition; return the flags and the corpus."""
    corpus = folder / "docs.txt"
    corpus.write_bytes(CORPUS)
    arguments = flags(source, folder / "out", "--data-files", str(corpus))

    def read(config: CorpusConfig, split_name: str, byte_ranges: list[ByteRange], bad_rows: BadRows) -> Iterator[str]:
        if byte_ranges[0].stop == len(CORPUS):
            raise InputError("stopped before the last")
        return read_partition(config, split_name, byte_ranges, bad_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "read_partition", read)
        assert main(arguments) == 2
    assert "stopped before the last" in error_line(capsys)
    return arguments, corpus


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(flags(source, tmp_path / "out", "--dry-run")) == 0
    assert f"{tmp_path}/out/train: to be written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_complete_folder_is_left_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(flags(source, tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(flags(source, tmp_path)) == 0
    assert "already complete with these settings" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_plan_and_sidecars_beside_a_manifest_are_deleted(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path))
    before = contents(tmp_path)
    for name in ("plan.json", "partition-00001.json", ".manifest.json.0a.partial"):
        (tmp_path / "train" / name).write_text("{}", encoding="utf-8")
    assert main(flags(source, tmp_path)) == 0
    assert contents(tmp_path) == before


def test_unfinished_folder_is_not_taken_for_complete(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    unfinished(source, tmp_path, capsys)
    names = {path.name for path in (tmp_path / "out" / "train").iterdir()}
    assert {"plan.json", "partition-00000.json"} < names
    assert "manifest.json" not in names
    with pytest.raises(InputError, match=r"did not end\. Run prepare-tfrecord-shards again with the same flags"):
        open_shards(str(tmp_path / "out" / "train"))


def test_resumed_run_keeps_complete_partitions(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments, corpus = unfinished(source, tmp_path, capsys)
    folder = tmp_path / "out" / "train"
    assert len(list(folder.glob("partition-*.json"))) >= 4
    before = {path: path.stat().st_mtime_ns for path in folder.glob("dataset-*")}
    redone = {path for path in before if path.name.startswith(("dataset-00001", "dataset-00002"))}
    next(folder.glob("dataset-00001-00001-*")).write_bytes(b"")  # not the size of the sidecar
    (folder / "partition-00002.json").unlink()
    # What a kill may leave.
    for name in ("dataset-00009-00000-7.tfrecord", ".dataset-1-1.tfrecord.0a.partial", "tokenizer/.x.0a.partial"):
        (folder / name).write_bytes(b"half")
    (tmp_path / "out" / ".writable-0a.partial").mkdir()
    assert main(arguments) == 0
    after = {path: path.stat().st_mtime_ns for path in folder.glob("dataset-*")}
    assert {path for path in before if after[path] != before[path]} == redone

    fresh = flags(source, tmp_path / "fresh", "--data-files", str(corpus))
    assert main(fresh) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_unfinished_folder_of_other_settings(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments, corpus = unfinished(source, tmp_path, capsys)
    corpus.write_bytes(CORPUS + b"x")
    before = contents(tmp_path)
    assert main([*arguments, "--max-length", "32"]) == 2
    line = error_line(capsys)
    assert "unfinished shards of other settings" in line
    assert "max_length is 16 there, 32 is asked for" in line
    assert "--overwrite" in line
    assert contents(tmp_path) == before
    assert main([*arguments, "--max-length", "32", "--overwrite"]) == 0
    assert main(flags(source, tmp_path / "fresh", "--data-files", str(corpus), "--max-length", "32")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_file_that_changed_has_its_own_partitions_made_again_and_no_others(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for file in files:
        file.write_bytes(CORPUS)
    good = files[1].read_bytes()
    files[1].write_bytes(good.replace(b"x", b"\xff"))
    arguments = flags(source, tmp_path / "out", "--data-files", *map(str, files))
    assert main(arguments) == 2
    assert f"{files[1]} must be UTF-8 text" in error_line(capsys)
    folder = tmp_path / "out" / "train"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("dataset-*")}
    of_first_file = {path for path in before if path.name < "dataset-00005"}

    files[1].write_bytes(good.upper())  # and so has the same size
    assert main(arguments) == 0
    assert "corpus.data_files[1] is " in caplog.text
    after = {path: path.stat().st_mtime_ns for path in folder.glob("dataset-*")}
    assert {path for path in before if after.get(path) == before[path]} == of_first_file
    assert main(flags(source, tmp_path / "fresh", "--data-files", *map(str, files))) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_partitions_of_a_corpus_that_became_shorter_do_not_stay(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments, corpus = unfinished(source, tmp_path, capsys)
    corpus.write_bytes(CORPUS[:2400])
    assert main(arguments) == 0
    assert main(flags(source, tmp_path / "fresh", "--data-files", str(corpus))) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_default_size_of_partitions_stays_that_of_the_folder(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A mended file may change the size of the corpus, after which the default goes."""
    arguments, _ = unfinished(source, tmp_path, capsys)
    place = arguments.index("--partition-bytes")
    del arguments[place : place + 2]
    assert main(arguments) == 0
    assert read_manifest(str(tmp_path / "out" / "train")).partition_bytes == 2048


def test_complete_folder_of_a_file_that_was_replaced_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By one of the same size; a copy of the same content is the same file."""
    arguments, corpus = unfinished(source, tmp_path, capsys)
    corpus.unlink()
    corpus.write_bytes(CORPUS)
    assert main(arguments) == 0
    corpus.write_bytes(CORPUS.upper())
    assert main(arguments) == 2
    line = error_line(capsys)
    assert "contains shards of other settings: corpus.data_files[0] is " in line
    assert "--overwrite" in line


def with_bad_rows(folder: Path) -> Path:
    corpus = folder / "docs.jsonl"
    rows = [f'{{"text": "a corpus of small words {number}"}}\n'.encode() for number in range(300)]
    rows[3] = b'{"text": 0}\n'
    rows[150] = b'{"text": "half \\ud800 pair"}\n'
    rows[299] = b'{"text": "\xff"}\n'
    corpus.write_bytes(b"".join(rows))
    return corpus


def test_rows_left_out_are_counted_and_named_the_same_for_any_number_of_workers(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    corpus = with_bad_rows(tmp_path)
    files = ["--data-files", str(corpus), "--on-bad-row", "skip"]
    assert main(flags(source, tmp_path / "one", *files)) == 0
    assert (
        f"  skipped             rows that cannot be read: 3 left out, such as {corpus}, line 4: int 0; "
        in capsys.readouterr().out
    )
    assert main(flags(source, tmp_path / "two", *files, "--num-workers", "2")) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    manifest = read_manifest(str(tmp_path / "one" / "train"))
    byte = corpus.read_bytes().index(b'{"text": "half')
    assert manifest.totals.num_documents == 297
    assert manifest.bad_rows == BadRows(
        3,
        [
            BadRow(str(corpus), "line 4", "int 0"),
            BadRow(str(corpus), f"the line at byte {byte}", "U+D800 is half of a surrogate pair"),
            BadRow(str(corpus), f"the line at byte {corpus.stat().st_size - 14}", "the byte 0xff is not UTF-8"),
        ],
    )
    # The process that reads documents itself names the same rows.
    assert main(flags(source, tmp_path / "limited", *files, "--limit", "1000")) == 0
    limited = read_manifest(str(tmp_path / "limited" / "train"))
    assert (limited.totals.num_documents, limited.bad_rows.num_rows) == (297, 3)
    assert [row.place for row in limited.bad_rows.listed] == ["line 4", "line 151", "line 300"]
    capsys.readouterr()
    assert main(["--verify", "--output-dir", str(tmp_path / "one"), "--num-workers", "1"]) == 0
    assert "Rows of the corpus that cannot be read: 3 left out" in capsys.readouterr().out


def test_a_run_that_a_bad_row_ended_resumes_without_such_rows_and_keeps_what_is_complete(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = with_bad_rows(tmp_path)
    corpus.write_bytes(b'{"text": "a"}\n' * 3 + corpus.read_bytes().partition(b"0}\n")[2])
    arguments = flags(source, tmp_path / "out", "--data-files", str(corpus))
    assert main(arguments) == 2
    assert "half of a surrogate pair. Mend it, or leave out all rows" in error_line(capsys)
    folder = tmp_path / "out" / "train"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("dataset-00000-*")}
    assert before
    skip = ["--on-bad-row", "skip"]
    assert main([*arguments, *skip]) == 0
    assert "corpus changed" not in caplog.text
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main([*flags(source, tmp_path / "fresh", "--data-files", str(corpus)), *skip]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    # Complete without those rows is not complete for who wants all of them.
    assert main(arguments) == 2
    assert "corpus.settings.on_bad_row is 'skip' there, 'fail' is asked for" in error_line(capsys)


def test_without_bad_rows_either_way_of_dealing_with_them_leaves_complete_shards_alone(
    source: Path, tmp_path: Path
) -> None:
    assert main(flags(source, tmp_path)) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("dataset-*")}
    assert main(flags(source, tmp_path, "--on-bad-row", "skip")) == 0
    assert main(flags(source, tmp_path)) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("dataset-*")} == before


def test_a_byte_that_is_not_utf_8_is_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpus = tmp_path / "docs.txt"
    corpus.write_bytes(CORPUS.replace(b"x", b"\xff"))
    assert main(flags(source, tmp_path / "out", "--data-files", str(corpus))) == 2
    assert f"{corpus} must be UTF-8 text; byte 9600 is 0xff" in error_line(capsys)


def test_overwrite_that_was_stopped_resumes(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments, _ = unfinished(source, tmp_path, capsys)
    first = next((tmp_path / "out" / "train").glob("dataset-00000-*"))
    before = first.stat().st_mtime_ns
    assert main([*arguments, "--overwrite"]) == 0
    assert first.stat().st_mtime_ns == before
    assert main([*arguments, "--overwrite"]) == 0
    assert first.stat().st_mtime_ns != before


def test_overwrite_replaces_other_settings(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path / "out"))
    (tmp_path / "out" / "train" / "tokenizer" / "vocab.txt").write_text("of another tokenizer", encoding="utf-8")
    main(flags(source, tmp_path / "fresh", "--max-length", "32"))
    assert main(flags(source, tmp_path / "out", "--max-length", "32", "--overwrite")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def change_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    (folder / "manifest.json").write_text(text.replace('"max_length": 16', '"max_length": 24'), encoding="utf-8")


def truncate_shard(folder: Path) -> None:
    next(folder.glob("dataset-00001-*")).write_bytes(b"")


def leave_foreign_shards(folder: Path) -> None:
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink()
    (folder / "dataset-0-1000.tfrecord").write_bytes(b"")


def leave_broken_plan(folder: Path) -> None:
    (folder / "manifest.json").rename(folder / "plan.json")
    (folder / "plan.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change_manifest, r"other settings: max_length is 24 there, 16 is asked for.*--overwrite"),
        (truncate_shard, r"has 0 bytes of .*--overwrite"),
        (leave_foreign_shards, r"this command did not write, such as dataset-0-1000\.tfrecord.*--overwrite"),
        (leave_broken_plan, r"A plan must be a JSON object; .*plan\.json.*Delete it to begin anew"),
    ],
)
def test_folder_in_the_way(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, spoil: Callable[[Path], None], message: str
) -> None:
    main(flags(source, tmp_path))
    spoil(tmp_path / "train")
    before = contents(tmp_path)
    capsys.readouterr()
    assert main(flags(source, tmp_path)) == 2
    assert re.search(message, error_line(capsys))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-length", "7"], "--max-length must be at least 8"),
        (["--shard-size", "0"], "--shard-size must be 1 row or more"),
        (["--partition-bytes", "10"], "--partition-bytes must be at least 1,024"),
        (["--num-workers", "0"], "--num-workers must be 1 or more"),
        (["--tokenizer-name-or-path", ""], "--tokenizer-name-or-path is required"),
        (["--output-dir", ""], "--output-dir is required"),
        (["--output-dir", __file__], "The folder of the output must be writable"),
        (["--tokenizer-name-or-path", "/nowhere"], "/nowhere"),
        (["--data-files", "/nowhere.txt"], "no file matches /nowhere.txt"),
        (["--limit", "2", "--validation-percent", "0.001"], "A split must hold text; validation has 0 documents"),
    ],
)
def test_bad_input_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], message: str
) -> None:
    assert main(flags(source, tmp_path, *more)) == 2
    assert message in error_line(capsys)
    assert not (tmp_path / "validation" / "plan.json").exists()
    assert not (tmp_path / "validation" / "manifest.json").exists()


def test_folder_is_tried_out_before_anything_is_read(capsys: pytest.CaptureFixture) -> None:
    arguments = ["--tokenizer-name-or-path", "/nowhere", "--dataset-name", "no/where", "--output-dir", __file__]
    assert main(arguments) == 2
    assert "The folder of the output must be writable" in error_line(capsys)


def test_unknown_chunking_names_the_choices(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(flags(source, tmp_path, "--chunking", "sentences")) == 2
    assert "documents" in error_line(capsys)


@pytest.mark.parametrize("missing", SPECIAL_TOKENS)
def test_tokenizer_without_a_special_token(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, missing: str
) -> None:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(SPECIAL_TOKENS.values())}))
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items() if name != missing}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "tokenizer")
    assert main(flags(source, tmp_path / "out", "--tokenizer-name-or-path", str(tmp_path / "tokenizer"))) == 2
    assert f"lacks {missing}" in error_line(capsys)
    assert not (tmp_path / "out").exists()
