"""The pages of the formats: the worked row is recomputed, the tables are compared with the code."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from mlm_common.tokenizer import SPECIAL_TOKENS
from tfrecord_prep.chunking import CHUNKINGS, Framing
from tfrecord_prep.encoding import TokenBatch, encode_documents
from tfrecord_prep.manifest import FORMAT_VERSION, Manifest
from tfrecord_prep.records import encode_rows
from train.checkpoints.store import CHECKSUM_FIELD, CheckpointRecord

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = "\n".join((REFERENCE / f"{name}.md").read_text(encoding="utf-8") for name in ("formats", "shards", "run_folder"))
DOCUMENTS = ["a dog ran", "the cat sat"]
MAX_LENGTH = 8


def block(name: str) -> str:
    (content,) = re.findall(rf"<!-- {name}: begin -->\n```\n(.*?)```\n<!-- {name}: end -->", PAGE, re.DOTALL)
    return content


def toy_tokenizer_json() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL_TOKENS.values(), *" ".join(DOCUMENTS).split()]
    vocabulary = {word: index for index, word in enumerate(words)} | {"ran": 300}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def joined(values: Any) -> str:
    return " ".join(map(str, values))


@pytest.fixture(scope="module")
def encoded() -> list[TokenBatch]:
    return list(encode_documents(toy_tokenizer_json(), DOCUMENTS))


FRAMING = Framing(cls_id=0, sep_id=2, pad_id=1)


def test_worked_row(encoded):
    (batch,) = encoded
    per_document = np.split(batch.ids, batch.document_ends[:-1])
    text = f"documents       {' | '.join(DOCUMENTS)}\n"
    text += f"their ids       {' | '.join(map(joined, per_document))}\n"
    for name, cut in CHUNKINGS.items():
        text += f"\n--chunking {name}\n"
        for rows in cut(encoded, FRAMING, MAX_LENGTH):
            for index, (row, num_tokens) in enumerate(zip(rows.input_ids, rows.num_tokens_per_row, strict=True)):
                mask = (np.arange(MAX_LENGTH) < num_tokens).astype(int)
                text += f"input_ids       {joined(row)}\nattention_mask  {joined(mask)}\n"
                if rows.next_sentence_labels is not None:
                    text += f"next_sentence_label  {rows.next_sentence_labels[index]}\n"
    assert block("worked row") == text


def test_worked_record(encoded):
    rows = next(CHUNKINGS["concat"](encoded, FRAMING, MAX_LENGTH))
    record = encode_rows(rows.input_ids, rows.num_tokens_per_row)
    shown = [line.split("  ")[0] for line in block("worked record").splitlines()]
    assert " ".join(shown) == record.hex(" ")


def field_names(of: type, prefix: str = "") -> list[str]:
    """List the dotted names of a dataclass's fields, of nested ones too; `[]` marks a list."""
    names = []
    for field in dataclasses.fields(of):
        kind = get_type_hints(of)[field.name]
        element = get_args(kind)[0] if get_args(kind) else kind
        if dataclasses.is_dataclass(element):
            mark = "[]" if get_origin(kind) in (list, tuple) else ""
            names += field_names(element, f"{prefix}{field.name}{mark}.")
        else:
            names.append(prefix + field.name)
    return names


def test_manifest_table_has_the_fields_in_order():
    section = PAGE.split("## manifest.json")[1].split("\n# ")[0]
    assert re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE) == field_names(Manifest)
    assert f"| `format_version` | integer | {FORMAT_VERSION} |" in section


def test_record_table_has_the_fields_in_order():
    section = PAGE.split("## checkpoints/")[1].split("\n## ")[0]
    fields = [field.name for field in dataclasses.fields(CheckpointRecord)]
    assert re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE) == [*fields, CHECKSUM_FIELD]


def test_special_ids():
    ids = ", ".join(f"`{token}` {index}" for index, token in enumerate(SPECIAL_TOKENS.values()))
    assert f"Special ids: {ids}." in PAGE
