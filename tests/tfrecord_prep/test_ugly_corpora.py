"""Folders of files of all formats and encodings, some damaged, through both commands: the same documents as an
independent reader's, or one line that names the file."""

import csv
import gzip
import io
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from mlm_common.tokenizer import SPECIAL_TOKENS, save_tokenizer
from tests.fixtures.tiny_corpus import read_rows, wrapped
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from tokenizer_training.train_unigram import main as train

WORDS = [
    "plain",
    "Grüße",
    "你好",
    "a;b",
    "c,d",
    'q"u"o',
    "tab\u3000bed",
    "-",
    "{}",
    "[1]",
    "'x'",
    "|",
    "null",
    "2020-01-01",
]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join), min_size=1, max_size=4)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 9\n" % 5
FORMATS = ["txt", "jsonl", "json", "json list", "csv", "csv ;", "csv tab", "csv utf-16", "parquet"]


def content_of(kind: str, texts: list[str]) -> bytes:
    if kind == "txt":
        return "".join(f"{text}\n" for text in texts).encode()
    if kind in ("jsonl", "json"):
        return "".join(json.dumps({"n": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    if kind == "json list":
        return json.dumps([{"text": text} for text in texts], indent=1).encode()
    file = io.BytesIO()
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), file)
        return file.getvalue()
    delimiter = {"csv ;": ";", "csv tab": "\t"}.get(kind, ",")
    rows = io.StringIO(newline="")
    csv.writer(rows, delimiter=delimiter).writerows([["text", "n"], *([text, "1"] for text in texts)])
    return rows.getvalue().encode("utf-16" if kind.endswith("16") else "utf-8")


DAMAGE = {
    "pointer": lambda _: POINTER,
    "binary": lambda content: b"\0\1\2" + content,
    "utf-16": lambda _: "some text\n".encode("utf-16"),
    "latin-1": lambda content: content + "Grüße\n".encode("latin-1"),
    "cut": lambda content: gzip.compress(content)[:-5],  # called .gz
    "html": lambda _: b"PAR1<html>\xff\xfe",
}


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes, list[str], bool]:
    """Draw the name of a file without its number, its content, its texts, and whether it can be read."""
    kind, texts = draw(st.sampled_from(FORMATS)), draw(TEXTS)
    content, ending = content_of(kind, texts), kind.split()[0]
    name = draw(st.sampled_from(["a", "b [1]", "über", "deep/er/x", ".hidden/../c"])) + "." + ending
    how = draw(st.sampled_from([None, None, None, None, "gz", "mark", "empty", *DAMAGE]))
    if how == "mark" and ending not in ("parquet",) and not kind.endswith("16"):
        return name, b"\xef\xbb\xbf" + content, texts, True
    if how == "gz" and ending != "parquet":
        return name + ".gz", gzip.compress(content), texts, True
    if how == "empty":
        return name, b"", [], ending != "parquet"
    if how in DAMAGE and not (how == "utf-16" and ending == "csv") and not (how == "latin-1" and ending != "txt"):
        if how == "cut" and ending != "parquet":
            name += ".gz"
        return name, DAMAGE[how](content), [], False
    return name, content, texts, True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer whose tokens are the words, and what NFKC and white space make of them."""
    words = [*SPECIAL_TOKENS.values(), *sorted({part for word in WORDS for part in word.split()})]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("words") / "tokenizer"
    save_tokenizer(wrapped(backend), str(folder))
    return folder


@given(corpus_files=st.lists(files(), min_size=1, max_size=5))
@settings(max_examples=15)
def test_documents_are_those_of_an_independent_reader_or_there_is_one_line(
    corpus_files, tokenizer, tmp_path_factory, run
):
    top = tmp_path_factory.mktemp("ugly")
    for number, (name, content, _, _) in enumerate(corpus_files):
        path = Path(top, "text", f"{number}", name)
        Path(top, "text", f"{number}", ".hidden").mkdir(parents=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    corpus = ["--data-files", f"{top}/text/**/*", "--num-workers", 1]
    rows = ["--tokenizer-name-or-path", tokenizer, "--max-length", 32, "--chunking", "documents"]
    prepared = run(prepare, *corpus, *rows, "--output-dir", top / "out")
    planned = run(train, *corpus, "--output-dir", top / "tok", "--dry-run")
    texts = [text for *_, of_file, _ in corpus_files for text in of_file]
    for outcome in (prepared, planned):
        assert outcome.status in (0, 2), outcome
        assert "Traceback" not in outcome.err
    if not all(is_right for *_, is_right in corpus_files) or not texts:
        event("refused")
        assert prepared.status == 2
        named = [f"text/{number}/" for number, (*_, is_right) in enumerate(corpus_files) if not is_right]
        assert any(name in prepared.error for name in named) or not texts, prepared.error
        return
    assert (prepared.status, planned.status) == (0, 0), prepared.error
    event("read")
    ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    documents: Counter[str] = Counter()
    for row in read_rows(top / "out" / "train"):
        words = [str(ids.id_to_token(token_id)) for token_id in row]
        documents.update(" ".join(words).removeprefix("[CLS] ").removesuffix(" [SEP]").split(" [SEP] [CLS] "))
    assert documents == Counter(" ".join(text.split()) for text in texts)
