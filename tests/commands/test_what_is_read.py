"""Of ugly files that commands accept they read what other programs read: texts, rows and labels."""

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlm_common.tokenizer import SPECIAL_TOKENS, save_tokenizer
from tests.fixtures.fuzzed_commands import Places, end_of, fed
from tests.fixtures.tiny_corpus import wrapped
from tests.fixtures.ugly_files import LINES
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.records import decode_feature, read_records

# Tokens in texts; a column that is there twice, of which the first is read.
READ_OTHERWISE = ("special_tokens.txt", "duplicate_names.parquet")
# The same table by another separator, in another encoding.
DIALECTS = ("semicolons.csv", "separator_named.csv", "decimal_commas.csv", "tabs.csv", "utf16.csv", "excel_unicode.csv")
MAX_BYTES = 20_000  # longer documents are cut


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a token for each byte, which give back any text."""
    folder = tmp_path_factory.mktemp("bytes")
    tokens = [*SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    save_tokenizer(wrapped(backend), str(folder))
    return folder


def content_of(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()


def lines_of(path: Path) -> list[str]:
    return re.split("\r\n|\r|\n", content_of(path).decode("utf-8-sig"))


def rows_of_json(path: Path) -> list[str]:
    text = content_of(path).decode("utf-8-sig")
    try:
        rows = json.loads(text)
        rows = rows if isinstance(rows, list) else [rows]
    except ValueError:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    return [row if isinstance(row, str) else row.get("text") or "" for row in rows]


def cells_of(path: Path) -> list[str]:
    if path.name.removesuffix(".gz") in DIALECTS:
        return list(LINES)
    table = pd.read_csv(io.BytesIO(content_of(path)), dtype=str, keep_default_na=False, encoding="utf-8-sig")
    return list(table["text"])


def rows_of_parquet(path: Path) -> list[str]:
    return [text or "" for text in pd.read_parquet(path, columns=["text"])["text"]]


READERS: dict[str, Callable[[Path], list[str]]] = {
    ".txt": lines_of,
    ".jsonl": rows_of_json,
    ".json": rows_of_json,
    ".csv": cells_of,
    ".parquet": rows_of_parquet,
}


def documents_of(folder: Path, tokenizer: Path) -> list[str]:
    """Decode the documents of shards whose rows hold whole ones."""
    from transformers import PreTrainedTokenizerFast

    loaded, documents = PreTrainedTokenizerFast.from_pretrained(tokenizer), []
    for path in open_shards(str(folder)).paths:
        for record in read_records(Path(path).read_bytes()):
            ids = decode_feature(record, "input_ids")[decode_feature(record, "attention_mask") == 1].tolist()
            assert ids[0] == loaded.cls_token_id
            text = loaded.decode(ids, clean_up_tokenization_spaces=False)
            documents += text.removeprefix("[CLS]").removesuffix("[SEP]").replace("[SEP][CLS]", "[SEP]").split("[SEP]")
    return documents


@pytest.mark.parametrize("ending", READERS)
def test_a_corpus_is_read_as_other_programs_read_it(ending, places: Places, bytes_tokenizer, tmp_path):
    num_read, wrong = 0, {}
    for number, (name, path) in enumerate(fed(places.ugly, f"*{ending} *{ending}.gz").items()):
        if not path.is_file() or path.stat().st_size > MAX_BYTES or name in READ_OTHERWISE:
            continue
        output = tmp_path / f"output-{number}"
        words = ["tfrecord_prep.prepare_tfrecord_shards", "--tokenizer-name-or-path", bytes_tokenizer]
        words += [
            "--data-files",
            path,
            "--sample-by",
            "line",
            "--chunking",
            "documents",
            "--max-length",
            "4096",
            "--num-workers",
            "1",
        ]
        if end_of([*map(str, words), "--output-dir", str(output)], path.parent).status:
            continue
        num_read += 1
        read = [text.strip() for text in documents_of(output / "train", bytes_tokenizer)]
        expected = [text.strip() for text in READERS[ending](path) if text.strip()]
        if read != expected:
            wrong[name] = (len(read), len(expected), sorted(set(read) ^ set(expected))[:2])
    assert wrong == {}
    assert num_read >= 3
