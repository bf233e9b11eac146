"""What stands in the way of a preparation: folders in every state, and bad input."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.tiny_corpus import contents, flags, write_source
from tfrecord_prep.prepare_tfrecord_shards import main
from tokenizer_training.tokenizer import SPECIAL_TOKENS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(flags(source, tmp_path / "out", "--dry-run")) == 0
    assert f"{tmp_path}/out/train: to be written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_complete_folder_is_left_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(flags(source, tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert main(flags(source, tmp_path)) == 0
    assert "complete with these settings, left as it is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_folder_that_was_cut_short_is_made_again(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path))
    before = contents(tmp_path)
    folder = tmp_path / "train"
    (folder / "manifest.json").unlink()
    (folder / "dataset-00009-00000-7.tfrecord").write_bytes(b"of a longer run")
    (folder / ".dataset-00001-00000-5.tfrecord.0a.partial").write_bytes(b"half")
    assert main(flags(source, tmp_path)) == 0
    assert contents(tmp_path) == before


def test_overwrite_replaces_other_settings(source: Path, tmp_path: Path) -> None:
    main(flags(source, tmp_path / "out"))
    main(flags(source, tmp_path / "fresh", "--max-length", "32"))
    assert main(flags(source, tmp_path / "out", "--max-length", "32", "--overwrite")) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def change_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"max_length": 16', '"max_length": 24'))


def truncate_shard(folder: Path) -> None:
    next(folder.glob("dataset-00001-*")).write_bytes(b"")


def leave_foreign_shards(folder: Path) -> None:
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink()
    (folder / "dataset-0-1000.tfrecord").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change_manifest, r"other settings: max_length is 24 there, 16 is asked for.*--overwrite"),
        (truncate_shard, r"has 0 bytes of .*--overwrite"),
        (leave_foreign_shards, r"this command did not write, such as dataset-0-1000\.tfrecord.*--overwrite"),
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
    assert re.search(message, capsys.readouterr().err)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-length", "7"], "--max-length must be at least 8"),
        (["--shard-size", "0"], "--shard-size must be 1 row or more"),
        (["--partition-bytes", "10"], "--partition-bytes must be at least 1,024"),
        (["--num-workers", "0"], "--num-workers must be 1 or more"),
        (["--tokenizer-name-or-path", ""], "A tokenizer is needed: --tokenizer-name-or-path"),
        (["--output-dir", ""], "A folder for the shards is needed: --output-dir"),
        (["--output-dir", __file__], "Not a directory"),
        (["--tokenizer-name-or-path", "/nowhere"], "/nowhere"),
        (["--data-files", "/nowhere.txt"], "--data-files must name local files; no file matches '/nowhere.txt'"),
        (["--limit", "2", "--validation-percent", "0.001"], "A split must hold text; validation has 0 documents"),
    ],
)
def test_bad_input_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], message: str
) -> None:
    assert main(flags(source, tmp_path, *more)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "validation" / "manifest.json").exists()


def test_unknown_chunking_names_the_choices(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(flags(source, tmp_path, "--chunking", "sentences"))
    assert "concat" in capsys.readouterr().err


def test_tokenizer_without_mask(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "[CLS]": 1, "[SEP]": 2, "<pad>": 3}, unk_token="<unk>"))
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items() if name != "mask"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "tokenizer")
    assert main(flags(source, tmp_path / "out", "--tokenizer-name-or-path", str(tmp_path / "tokenizer"))) == 2
    assert "lacks mask" in capsys.readouterr().err
