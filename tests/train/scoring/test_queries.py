import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from tests.fixtures.results import write_jsonl
from tests.fixtures.tiny_models import tiny_tokenizer
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from train.scoring.queries import Asker, Word, draw_words, read_pairs

TOKENIZER = tiny_tokenizer()
TEXTS = st.lists(
    st.sampled_from(["the", "model", "of", "languages", "x", "12.", "ab,cd", "\n"]), min_size=1, max_size=30
)


@given(words=TEXTS, max_length=st.integers(16, 40), seed=st.integers(0, 9), left_to_right=st.booleans())
def test_each_word_is_asked_for_in_a_row_of_its_document(words, max_length, seed, left_to_right):
    document = " ".join(words)
    try:
        drawn = draw_words([document], 5, seed)
    except InputError:  # line feeds alone
        return
    asker = Asker(TOKENIZER, max_length, left_to_right=left_to_right)
    single, whole, places = asker.about_words([document], drawn)
    (ids,) = asker.encode([document])
    assert len(places) == len(drawn)
    of_words = {query.item: query for query in whole}
    assert set(of_words) == set(range(len(drawn)))
    for query in (*single, *whole):
        assert len(query.ids) <= max_length
        assert (query.ids[0], query.ids[-1]) == (asker.start, asker.end)
        row = list(query.ids)
        for position, target in zip(query.positions, query.targets, strict=True):
            assert row[position] == asker.mask
            row[position] = target
        masks_left = row.count(asker.mask)
        if not left_to_right:
            assert masks_left == 0
            assert " ".join(map(str, row[1:-1])) in " ".join(map(str, ids))
    for item, word in enumerate(drawn):
        whole_word = of_words[item]
        text = document[word.start : word.stop]
        assert text.replace(" ", "") in TOKENIZER.decode(whole_word.targets).replace(" ", "")
        asked = [query for query in single if query.item == item]
        assert [query.targets[0] for query in asked] == whole_word.targets
        assert [query.positions[0] for query in asked] == whole_word.positions
        assert places[item] == whole_word.positions[0] - 1


def test_left_to_right_also_masks_the_rest_of_the_word():
    asker = Asker(TOKENIZER, 16, left_to_right=True)
    queries = list(asker.about_sentences(["the zq of"]))
    tokens = [TOKENIZER.convert_ids_to_tokens(query.ids[1:-1]) for query in queries]
    assert tokens == [
        ["[MASK]", "▁", "z", "q", "▁of"],
        ["▁the", "[MASK]", "[MASK]", "[MASK]", "▁of"],
        ["▁the", "▁", "[MASK]", "[MASK]", "▁of"],
        ["▁the", "▁", "z", "[MASK]", "▁of"],
        ["▁the", "▁", "z", "q", "[MASK]"],
    ]


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "byte_level"])
def test_the_tokens_of_a_word_are_found_for_every_kind(kind):
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    roles = dict(zip(names, SPECIAL_TOKENS, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **roles)
    text = "the model of language"
    _, whole, _ = Asker(tokenizer, 30, left_to_right=False).about_words([text], [Word(0, 4, 9), Word(0, 13, 21)])
    words = ["".join(tokenizer.convert_ids_to_tokens(query.targets)).strip("▁Ġ").replace("##", "") for query in whole]
    assert words == ["model", "language"]


def test_words_are_drawn_evenly_and_the_same_again():
    documents = ["a b c d", "e f", "語学 g-h"]
    everything = draw_words(documents, 100, seed=1)
    assert [documents[word.document][word.start : word.stop] for word in everything] == [*"abcdef", "語", "学", *"gh"]
    assert draw_words(documents, 3, seed=5) == draw_words(documents, 3, seed=5)
    counts = np.zeros(10)
    for seed in range(2000):
        for word in draw_words(documents, 3, seed):
            counts[everything.index(word)] += 1
    assert np.all(np.abs(counts / 2000 - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 2000))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"sentence_good": "a"}], "pairs.jsonl, line 1"),
        ([{"sentence_good": "a", "sentence_bad": "a"}], "two different texts"),
        ([{"sentence_good": "a", "sentence_bad": 1}], "line 1"),
        ([["a", "b"]], "line 1"),
        ([], "have none"),
    ],
)
def test_files_of_another_form_are_refused(lines, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", *lines))])


def test_blank_lines_and_separators_of_other_kinds_are_no_ends_of_pairs(tmp_path):
    pairs = [{"sentence_good": good, "sentence_bad": "a"} for good in ("one", "two\u2028lines", "three\x85")]
    text = "\r\n\r\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs) + "\r\n \r\n"
    (tmp_path / "pairs.jsonl").write_bytes(text.encode("utf-8-sig"))
    read = read_pairs([str(tmp_path / "pairs.jsonl")])
    assert [pair.good for pair in read] == [pair["sentence_good"] for pair in pairs]


def test_damaged_files_are_refused(tmp_path):
    content = gzip.compress(json.dumps({"sentence_good": "a", "sentence_bad": "b"}).encode())
    for place in (12, 14, -6):
        (tmp_path / "pairs.jsonl.gz").write_bytes(content[:place] + b"\xff\xff\xff\xff")
        with pytest.raises(InputError, match="must name readable files"):
            read_pairs([str(tmp_path / "pairs.jsonl.gz")])


def test_a_sentence_longer_than_the_rows_is_refused():
    with pytest.raises(InputError, match="1 to 6 tokens, as the model reads; 'the of the of the of the' has 7"):
        list(Asker(TOKENIZER, 8, left_to_right=False).about_sentences(["the of the of the of the"]))
