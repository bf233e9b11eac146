"""What the commands say of corpora that are too small, and of text that is cut into documents in the wrong way."""

from pathlib import Path

import pytest

from mlm_common.corpus import corpus as corpus_module
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import check_drawn_splits, open_corpus
from mlm_common.errors import InputError
from tests.fixtures.generated_text import generated_lines
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from tokenizer_training.train_unigram import main as train


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("command", [train, prepare])
def test_a_source_too_small_for_its_validation_split_is_named_before_others_are_read(command, tmp_path, run):
    small = write_lines(tmp_path / "en.txt", [f"document {number}" for number in range(45)])
    (tmp_path / "de.txt.gz").write_bytes(b"not gzip")
    sources = ["--sources", f"en={small}", f"de={tmp_path}/de.txt.gz", "--output-dir", tmp_path / "out"]
    tokenizer_flags = ["--tokenizer-name-or-path", tmp_path / "tok"] if command is prepare else []
    if command is prepare:
        assert run(train, "--data-files", small, "--output-dir", tmp_path / "tok", "--num-workers", 1).status == 0
    refused = run(command, *sources, *tokenizer_flags, "--validation-percent", "0.01").refusal
    assert (
        "--sources en: A split must have text; `validation` has none, because --validation-percent 0.01 drew none"
        in refused
    )
    assert " of 45 documents." in refused


def test_drawn_splits_of_large_corpora_are_not_searched_to_their_end(tmp_path, monkeypatch):
    file = str(write_lines(tmp_path / "a.txt", [f"document {number}" for number in range(400)]))
    monkeypatch.setattr(corpus_module, "NUM_DOCUMENTS_DRAWN", 50)
    check_drawn_splits(open_corpus(CorpusConfig(data_files=[file], validation_percent=0.0001)))
    monkeypatch.setattr(corpus_module, "NUM_DOCUMENTS_DRAWN", 500)
    with pytest.raises(InputError, match=r"`validation` has none, .* of 400 documents"):
        check_drawn_splits(open_corpus(CorpusConfig(data_files=[file], validation_percent=0.0001)))
    with pytest.raises(InputError, match=r"`test` has none, because --test-percent 0\.0001 drew none of"):
        check_drawn_splits(
            open_corpus(CorpusConfig(data_files=[file], validation_percent=50, test_percent=0.0001, limit=7))
        )


def test_books_without_blank_lines_are_named_if_paragraphs_are_documents(tmp_path, caplog):
    lines = generated_lines(60)
    for name in ("austen", "melville", "twain", "wells"):
        write_lines(tmp_path / f"{name}.txt", lines)
    write_lines(tmp_path / "with.txt", ["\n".join(lines[:30]) + "\n", *lines[30:]])
    write_lines(tmp_path / "few.txt", lines[:5])
    files = {"data_files": [f"{tmp_path}/*.txt"]}
    open_corpus(CorpusConfig(**files, sample_by="paragraph"))  # type: ignore[arg-type]
    (said,) = caplog.messages
    assert said.startswith(
        "4 of 6 .txt files have no blank line (austen.txt, melville.txt, twain.txt, …), so each is one"
    )
    assert "use --sample-by line" in said
    caplog.clear()
    open_corpus(CorpusConfig(**files, sample_by="line"))  # type: ignore[arg-type]
    open_corpus(CorpusConfig(data_files=[f"{tmp_path}/[fw]??h.txt"], sample_by="paragraph"))
    assert not caplog.messages
