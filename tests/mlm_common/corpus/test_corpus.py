import gzip
import hashlib
import json
import os
import tempfile
import textwrap
from pathlib import Path

import pytest

from mlm_common.corpus.config import CorpusConfig, corpus_config_from_record
from mlm_common.corpus.corpus import are_wrapped, open_corpus
from mlm_common.corpus.text_files import find_files
from mlm_common.errors import InputError
from mlm_common.storage.reading import find_stored_files
from tests.fixtures.text_files import contents_of

TEXTS = ["first, with a comma", "", 'second "quoted" \u2013 ünïcode', "日本語", "007", "NA", "null", "1.50", "last"]
WORDS = ["Wort", "und", "Silbe", "Donaudampfschiff", "a", "sehr", "lange", "Reihe"]
TEXT = " ".join(WORDS[number * number % 7] for number in range(3000))


def write_text(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_lines(path: Path, lines: list[str]) -> None:
    write_text(path, "".join(line + "\n" for line in lines))


def sha256(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()}"


def read(split_name: str = "train", **settings) -> list[str]:
    return list(open_corpus(CorpusConfig(**settings)).documents(split_name))


@pytest.mark.parametrize(("ending", "content"), contents_of(TEXTS).items(), ids=contents_of(TEXTS))
def test_every_format_gives_the_same_documents(ending, content, tmp_path):
    path = tmp_path / f"corpus.{ending}"
    path.write_bytes(content)
    corpus = open_corpus(CorpusConfig(data_files=[str(path)]))
    assert list(corpus.documents("train")) == TEXTS
    assert list(corpus.documents("train")) == TEXTS, "a second reading differs"
    (file_record,) = corpus.record["data_files"]
    expected = {"path": str(path), "num_bytes": len(content), "checksum": sha256(content)}
    assert file_record == expected | ({"content_checksum": sha256(gzip.decompress(content))} if ".gz" in ending else {})


def test_files_are_read_in_the_order_given_and_globs_sorted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "c.txt", "a.txt", "part[1].txt"):
        write_lines(Path(name), [name])
    Path("z.jsonl").write_text('{"text": "z.jsonl"}', encoding="utf-8")
    (tmp_path / "folder.txt").mkdir()
    assert read(data_files=["z.jsonl", "?.txt", "part[1].txt"]) == ["z.jsonl", "a.txt", "b.txt", "c.txt", "part[1].txt"]
    assert read(data_files=["c.txt", "*.txt"]) == ["c.txt", "a.txt", "b.txt", "part[1].txt"]
    assert open_corpus(CorpusConfig(data_files=["a.txt"])).record["data_files"][0]["path"] == f"{tmp_path}/a.txt"


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", ["", "one", "two", "", " ", "three"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("document", ["\none\ntwo\n\n \nthree\n"]),
    ],
)
def test_sample_by(sample_by, expected, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\none\r\ntwo\n\n \nthree\n")
    assert read(data_files=[str(tmp_path / "a.txt")], sample_by=sample_by) == expected


SENTENCE = "It is a truth universally acknowledged, that a single man in possession of a good fortune. "


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_wrapped_lines_need_a_choice(ending, tmp_path):
    """In any of the splits; a choice on the command line is as good as one in a record or settings file."""
    write_lines(tmp_path / f"wrapped.{ending}", ["", *textwrap.wrap(SENTENCE * 50, 72), ""] * 2)
    write_lines(tmp_path / "long.txt", [SENTENCE * 3] * 20)
    wrapped, long = [str(tmp_path / f"wrapped.{ending}")], [str(tmp_path / "long.txt")]
    for settings in (
        {"data_files": long},
        {"data_files": wrapped, "sample_by": "paragraph"},
        {"data_files": wrapped, "sample_by": "line"},
    ):
        read(**settings)
    for settings in ({"data_files": wrapped}, {"data_files": long, "validation_files": wrapped}):
        with pytest.raises(InputError, match=rf"lines of .*{ending} .* --sample-by paragraph .* --sample-by line"):
            open_corpus(CorpusConfig(**settings))  # type: ignore[arg-type]


def test_record_gives_the_settings_back(tmp_path):
    write_lines(tmp_path / "a.txt", ["text"])
    config = CorpusConfig(data_files=[str(tmp_path / "a.txt")], validation_percent=1.5, limit=7, sample_by="paragraph")
    record = json.loads(json.dumps(open_corpus(config).record))
    assert corpus_config_from_record(record) == config
    with pytest.raises(InputError, match="unknown to this version: novelty"):
        corpus_config_from_record({"settings": {"novelty": 1}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "x", "data_files": ["a.txt"]}, "--dataset-name cannot be combined with --data-files"),
        ({"dataset_name": "builtin", "dataset_revision": "x"}, "need a Hub data set"),
        ({"split": "train[:10%]"}, "--limit"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"validation_percent": 100}, "must be at least 0 and below 100; received 100"),
        ({"validation_percent": 1.0, "validation_files": ["a"]}, "must come from a single origin"),
        (
            {"test_percent": 1.0, "test_files": ["a"]},
            "`test` must come from a single origin; received --test-percent and --test-files",
        ),
        ({"split": "validation", "validation_percent": 1.0}, "because both name the split `validation`"),
        ({"validation_percent": 60, "test_percent": 40}, "must be below 100; received 60 and 40"),
        ({"data_files": ["a.txt"], "test_split": "test"}, "--test-split needs a Hub data set .* --test-files"),
        ({"dataset_name": "x", "validation_split": "b", "test_split": "b"}, "different splits; received train, b, b"),
    ],
)
def test_contradicting_settings(settings, message):
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        CorpusConfig(**settings)


WRAPPED = textwrap.wrap(TEXT, 72)


@pytest.mark.parametrize("width", [45, 60, 72, 79])
def test_wrapped_paragraphs(width):
    lines = textwrap.wrap(TEXT, width)
    assert are_wrapped(lines)
    assert are_wrapped([line for place in range(0, len(lines), 6) for line in (*lines[place:][:6], "short.", "")])


@pytest.mark.parametrize(
    "lines",
    [
        [" ".join(TEXT.split()[start : start + 3 + start % 9]) for start in range(0, 2900, 7)],
        textwrap.wrap(TEXT, 20),
        textwrap.wrap(TEXT, 160),
        WRAPPED[:10],
        ["", " "],
        [line for text in WRAPPED for line in (text, "")],
    ],
    ids=["verses", "narrow", "wide", "few", "blank", "documents apart"],
)
def test_other_lines_are_documents(lines):
    assert not are_wrapped(lines)


def names(*patterns: Path | str) -> list[str]:
    return [file.name for file in find_files(list(map(str, patterns)), "--data-files")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "sub/.hidden/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_read_once_whatever_its_names(folder):
    (folder / "link.txt").symlink_to("a.txt")
    corpus = open_corpus(CorpusConfig(data_files=["a.txt", "./a.txt", "sub/../a.txt", "*.txt", str(folder / "a.txt")]))
    assert list(corpus.documents("train")) == ["text of a.txt"]
    assert [file["path"] for file in corpus.record["data_files"]] == [f"{folder}/a.txt"]


def test_links_that_loop_lead_to_each_folder_once(folder):
    (folder / "sub" / "up").symlink_to("..")
    (folder / "sub" / "deep" / "top").symlink_to(folder)
    expected = ["a.txt", "sub/b.txt", "sub/deep/c.txt"]
    assert names(folder / "**" / "*.txt") == [f"{folder}/{name}" for name in expected]
    assert names(folder / "**") == [f"{folder}/{name}" for name in expected]
    assert names("sub/**/*.txt", "**/deep/**") == ["sub/b.txt", "sub/deep/c.txt", "sub/up/a.txt"]


def test_a_pattern_names_the_same_files_from_any_folder(folder, monkeypatch):
    special = folder / "[x] *"
    special.mkdir()
    (special / "e.txt").write_text("text\n", encoding="utf-8")
    monkeypatch.chdir(special)
    for pattern in ("e.txt", "*.txt", "../**/e.txt"):
        settings = open_corpus(CorpusConfig(data_files=[pattern])).config
        monkeypatch.chdir(folder)
        assert list(open_corpus(settings).documents("train")) == ["text"]
        monkeypatch.chdir(special)


def test_a_pipe_is_no_text_and_is_named_as_such(folder):
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(InputError, match=r"--data-files: there is no file pipe\.txt: it is a pipe or device\."):
        open_corpus(CorpusConfig(data_files=["pipe.txt"]))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 12345\n" % 7


@pytest.mark.parametrize("ending", ["txt", "jsonl", "json", "csv", "parquet", "txt.gz", "jsonl.gz"])
def test_a_git_lfs_pointer_is_no_text_alone_or_among_many_files(ending, tmp_path):
    for number in range(20):
        write_lines(tmp_path / f"{number:02d}.txt", ["text"])
    for name in ("07", "13"):
        (tmp_path / f"{name}.{ending}").write_bytes(POINTER)
    for pattern, others in ((f"07.{ending}", ""), ("*", r" \(one of 2 pointers\)")):
        with pytest.raises(
            InputError, match=rf"07\.{ending} is a Git LFS pointer, not the text{others}\. .*git lfs pull"
        ):
            open_corpus(CorpusConfig(data_files=[f"{tmp_path}/{pattern}"]))


@pytest.mark.usefixtures("ordinary_user")
@pytest.mark.parametrize("pattern", ["closed/a.txt", "closed/*.txt", "*/a.txt", "*/*.txt", "**/*.txt", "clos*/*.txt"])
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_folder_that_cannot_be_entered_or_listed_is_named(pattern, mode):
    with tempfile.TemporaryDirectory() as top:
        for name in ("open", "closed"):
            Path(top, name).mkdir()
            write_lines(Path(top, name, "a.txt"), ["text"])
        Path(top, "closed").chmod(mode)
        if mode == 0o100 and pattern in ("closed/a.txt", "*/a.txt"):  # for which the folder need not be listed
            assert f"{top}/closed/a.txt" in [file.name for file in find_stored_files(f"{top}/{pattern}")]
        else:
            with pytest.raises(InputError, match=r"closed(/a\.txt|/)?'? (must|cannot) be .*ermission denied") as caught:
                find_stored_files(f"{top}/{pattern}")
            assert "\n" not in str(caught.value)
        Path(top, "closed").chmod(0o755)
