import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from tests.fixtures.tiny_models import tiny_tokenizer
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from tests.train.scoring.test_texts import ENCODERS, TOKENIZERS, UGLY
from train.scoring.pairs import Pair
from train.scoring.queries import NATS_PER_UNREAD_BYTE, Asker, Material, nats_to_spell
from train.scoring.texts import Unit, draw_units

TOKENIZER = tiny_tokenizer()
TEXTS = st.lists(
    st.sampled_from(["the", "model", "of", "languages", "x", "12.", "ab,cd", "\n", "zqzqzqzqzqzqzqzqzqzqzqzqzq"]),
    min_size=1,
    max_size=30,
)


def pair_of(good, bad):
    return Pair(good, bad, "", "")


@given(words=TEXTS, max_length=st.integers(16, 40), seed=st.integers(0, 9), left_to_right=st.booleans())
def test_each_unit_is_asked_for_in_a_row_of_its_document(words, max_length, seed, left_to_right):
    document = " ".join(words)
    asker = Asker(TOKENIZER, max_length, left_to_right=left_to_right)
    texts = [asker.encoder.encode(document)]
    try:
        drawn = draw_units([document], [texts], 5, seed)
    except InputError:  # line feeds alone
        return
    single, whole, places = asker.about_units(texts, drawn)
    ids = texts[0].ids.tolist()
    assert len(places) == len(drawn)
    of_words = {query.item: query for query in whole}
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
    for item, unit in enumerate(drawn):
        asked = [query for query in single if query.item == item]
        text = document[unit.start : unit.stop].replace(" ", "").replace("\n", "<unk>")
        tokens = TOKENIZER.convert_ids_to_tokens([query.targets[0] for query in asked])
        assert "".join(tokens).replace("▁", "") == text
        if len(asked) > max_length - 2:  # it has no row that fits
            assert item not in of_words
            continue
        assert asked[0].positions[0] == places[item] + 1
        word = document[unit.word_start : unit.word_stop].replace(" ", "")
        tokens = TOKENIZER.convert_ids_to_tokens(of_words[item].targets)
        assert "".join(tokens).replace("▁", "") == word


@settings(max_examples=30)
@given(documents=st.lists(UGLY, min_size=1, max_size=3), num_units=st.sampled_from([1, 10**6]))
@pytest.mark.parametrize("name", list(ENCODERS))
def test_all_units_together_ask_for_each_token_once(name, documents, num_units):
    """By another way than the units: what is asked is counted token by token, and bytes from the documents."""
    asker = Asker(TOKENIZERS[name], 20, left_to_right=False)
    texts = [asker.encoder.encode(document) for document in documents]
    try:
        units = draw_units(
            documents, [texts, [ENCODERS["all bytes"].encode(document) for document in documents]], num_units, 3
        )
    except InputError:
        return
    material = Material(documents, units, [])
    single, _, _ = asker.about_units(texts, units)
    asked = np.sort([query.targets[0] for query in single])
    ids = np.sort(np.concatenate([asker.encoder.encode(document).ids for document in documents]))
    if num_units == 1:
        assert np.isin(asked, ids).all()
        return
    np.testing.assert_array_equal(asked, ids)
    assert material.num_bytes.sum() == len("".join(documents).encode())


def test_unknown_words_are_never_asked_for_and_cost_their_spelling():
    asker = Asker(TOKENIZERS["wordpiece"], 20, left_to_right=False)
    document = "the жжж model"
    texts = [asker.encoder.encode(document)]
    units = draw_units([document], [texts], 9, 1)
    single, whole, _ = asker.about_units(texts, units)
    assert [query.item for query in single] == [0, 1, 2]
    assert [query.item for query in whole] == [0, 2]
    costs = [nats_to_spell(document[unit.start : unit.stop], texts[0].unread[unit.start : unit.stop]) for unit in units]
    assert costs == [0, 6 * NATS_PER_UNREAD_BYTE, 0]
    queries, nats = asker.about_pairs([pair_of("the жж", "the model"), pair_of("the ж", "the щщ")])
    assert {query.item for query in queries} == {0, 1}  # the second is a tie: two unknown words
    assert nats.tolist() == [4 * NATS_PER_UNREAD_BYTE, 0, 0, 0]


def test_left_to_right_also_masks_the_rest_of_the_word():
    asker = Asker(TOKENIZER, 16, left_to_right=True)
    queries, _ = asker.about_pairs([pair_of("the zq of", "of")])
    tokens = [TOKENIZER.convert_ids_to_tokens(query.ids[1:-1]) for query in queries]
    assert tokens == [
        ["[MASK]", "▁", "z", "q", "▁of"],
        ["▁the", "[MASK]", "[MASK]", "[MASK]", "▁of"],
        ["▁the", "▁", "[MASK]", "[MASK]", "▁of"],
        ["▁the", "▁", "z", "[MASK]", "▁of"],
        ["▁the", "▁", "z", "q", "[MASK]"],
        ["[MASK]"],
    ]


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "byte_level"])
def test_the_tokens_of_a_word_are_found_for_every_kind(kind):
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    roles = dict(zip(names, SPECIAL_TOKENS, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **roles)
    text = "the model of language"
    asker = Asker(tokenizer, 30, left_to_right=False)
    _, whole, _ = asker.about_units([asker.encoder.encode(text)], [Unit(0, 3, 9, 4, 9), Unit(0, 12, 21, 13, 21)])
    words = ["".join(tokenizer.convert_ids_to_tokens(query.targets)).strip("▁Ġ").replace("##", "") for query in whole]
    assert words == ["model", "language"]


def test_a_sentence_longer_than_the_rows_is_refused():
    with pytest.raises(InputError, match="1 to 6 tokens, the model's limit; 'the of the of the of the' has 7"):
        Asker(TOKENIZER, 8, left_to_right=False).about_pairs([pair_of("the of the of the of the", "of")])
