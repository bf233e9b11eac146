import gzip
import json

import pytest

from mlm_common.errors import InputError
from tests.fixtures.results import write_jsonl
from train.scoring.pairs import num_equal_pairs, read_pairs

PAIR = {"sentence_good": "a", "sentence_bad": "b"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"sentence_good": "a"}], "pairs.jsonl, line 1: no sentence_bad"),
        ([PAIR, {"sentence_good": "a", "sentence_bad": 1}], "line 2: sentence_bad is not a string"),
        ([PAIR | {"sentence_good": ""}], "line 1: no sentence_good"),
        ([PAIR, PAIR | {"linguistics_term": 5}], "line 2: linguistics_term is not a string"),
        ([PAIR | {"field": "\udfff"}], r"line 1: field is not valid Unicode: U\+DFFF"),
        ([["a", "b"]], "line 1: not a JSON object"),
        ([], "have none"),
    ],
)
def test_files_of_another_form_are_refused_with_the_line_and_the_reason(lines, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", *lines))])


def test_pairs_of_two_equal_sentences_are_read_and_counted(tmp_path, caplog):
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIR, {"sentence_good": "a", "sentence_bad": "a"})
    pairs = read_pairs([str(path)])
    assert [(pair.good, pair.bad) for pair in pairs] == [("a", "b"), ("a", "a")]
    assert num_equal_pairs(pairs) == 1
    assert "1 of 2 minimal pairs have two equal sentences. Each counts as half right." in caplog.text


def test_a_missing_field_and_null_are_no_field(tmp_path):
    rows = [
        PAIR | {"field": None, "linguistics_term": None, "UID": "one"},
        PAIR,
        PAIR | {"linguistics_term": "two", "UID": 7},
    ]
    pairs = read_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", *rows))])
    assert [(pair.field, pair.term) for pair in pairs] == [("", "one"), ("", ""), ("", "two")]


def test_blank_lines_and_separators_of_other_kinds_are_no_ends_of_pairs(tmp_path):
    pairs = [{"sentence_good": good, "sentence_bad": "a"} for good in ("one", "two\u2028lines", "three\x85")]
    text = "\r\n\r\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs) + "\r\n \r\n"
    (tmp_path / "pairs.jsonl").write_bytes(text.encode("utf-8-sig"))
    read = read_pairs([str(tmp_path / "pairs.jsonl")])
    assert [pair.good for pair in read] == [pair["sentence_good"] for pair in pairs]


def test_damaged_files_are_refused(tmp_path):
    for line in ("{", "[" * 100_000):
        (tmp_path / "pairs.jsonl").write_text(line, encoding="utf-8")
        with pytest.raises(InputError, match=r"pairs.jsonl, line 1: "):
            read_pairs([str(tmp_path / "pairs.jsonl")])
    path = tmp_path / "pairs.jsonl.gz"
    content = gzip.compress(json.dumps(PAIR).encode())
    damaged = [content[:place] + b"\xff\xff\xff\xff" for place in (12, 14, -6)]
    for content in (*damaged, json.dumps(PAIR).encode()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"--minimal-pairs: .*pairs.jsonl.gz must be a file of JSON lines; "):
            read_pairs([str(path)])
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(PAIR, ensure_ascii=False).replace("a", "ü").encode("latin-1"))
    with pytest.raises(InputError, match="line 1 has the byte 0xfc, which is not UTF-8"):
        read_pairs([str(tmp_path / "latin.jsonl")])
