"""Which token begins a word, by tokenizers of all kinds; what is wrong with sentences."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import TaggingData
from finetuning.data.examples import read_table
from finetuning.data.inputs import encode_texts
from finetuning.data.labels import Labels
from finetuning.tasks.tagging import NO_TAG, NO_WORD, Sentences, encode_sentences, read_sentences
from mlm_common.errors import InputError
from tests.fixtures.tiny_models import tiny_tokenizer
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS

LABELS = Labels("single_label_classification", ("O", "B-X"))
# Those that cut no text across words, and know these words.
OF_WORDS = ("unigram", "lowercased", "albert", "wordpiece", "byte_level", "marks_every_space")


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    cls, pad, sep, unk, mask = SPECIAL_TOKENS
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token=cls, pad_token=pad, sep_token=sep, unk_token=unk, mask_token=mask
    )


TOKENIZERS = {kind: tokenizer_of(kind) for kind in OF_WORDS}


@pytest.mark.parametrize("kind", OF_WORDS)
@settings(max_examples=25)
@given(words=st.lists(st.sampled_from(["a", "model", "language,", "12", "of", "masked", "é"]), min_size=1, max_size=8))
def test_each_word_begins_once(kind, words):
    tags = ["B-X" if word == "model" else "O" for word in words]
    sentences = Sentences("a", [words], [tags])
    rows = encode_sentences(TOKENIZERS[kind], sentences, LABELS, max_length=100, token_types=False)
    begun = rows.token_values["word"]
    assert begun[begun != NO_WORD].tolist() == list(range(len(words)))
    learned = rows.token_values["label"]
    assert (learned != NO_TAG).tolist() == (begun != NO_WORD).tolist()
    assert [LABELS.names[tag] for tag in learned[learned != NO_TAG]] == tags


@pytest.mark.parametrize("kind", OF_WORDS)
@pytest.mark.parametrize("word", ["12", "中"])
def test_the_first_word_is_learned_where_others_are(kind, word):
    """Not at a lone mark of the space before it."""
    tokenizer, words = TOKENIZERS[kind], [word, "of", word]
    rows = encode_sentences(tokenizer, Sentences("a", [words], None), LABELS, max_length=100, token_types=False)
    begun, ids = rows.token_values["word"], rows.token_values["input_ids"]
    tokens = dict(zip(begun.tolist(), tokenizer.convert_ids_to_tokens(ids), strict=True))
    if 0 in tokens:  # a byte-level tokenizer trained on other texts has no token for some characters
        assert tokens[0].lstrip("▁Ġ") == tokens[2].lstrip("▁Ġ") != ""


def test_a_row_that_is_cut():
    sentences = Sentences("a", [["model"] * 30], None)
    rows = encode_sentences(TOKENIZERS["wordpiece"], sentences, LABELS, max_length=10, token_types=False)
    assert rows.lengths.tolist() == [10]
    assert max(rows.token_values["word"]) < 30
    assert set(rows.token_values["label"]) == {NO_TAG}


def test_rows_without_room_for_text_are_refused():
    with pytest.raises(
        InputError, match=r"--max-seq-length must be above 2, the number of special tokens .* received 2"
    ):
        encode_sentences(
            TOKENIZERS["wordpiece"], Sentences("a", [["a"]], None), LABELS, max_length=2, token_types=False
        )
    with pytest.raises(
        InputError, match=r"--max-seq-length must be above \d, the number of special tokens .* received 3"
    ):
        encode_texts(tiny_tokenizer(), (["a"], ["b"]), max_length=3, token_types=False, labels=np.zeros(1))


CONLL = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nPeter NNP B-PER\nBlackburn NNP I-PER\n"


def test_conll_is_read(tmp_path):
    (tmp_path / "a.conll").write_text(CONLL, encoding="utf-8")
    table = read_table(str(tmp_path / "a.conll"), "--train-file")
    assert table.columns == {
        "tokens": [["EU", "rejects"], ["Peter", "Blackburn"]],
        "ner_tags": [["B-ORG", "O"], ["B-PER", "I-PER"]],
    }
    (tmp_path / "b.conll").write_text("a\nb\n\nc\n", encoding="utf-8")
    sentences = read_sentences(TaggingData(train_file=str(tmp_path / "a.conll"), test_file=str(tmp_path / "b.conll")))
    assert (sentences["test"].words, sentences["test"].tags) == ([["a", "b"], ["c"]], None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("10\u00a0000 O\nEuro B-X\n", [["10\u00a0000", "Euro"]]),
        ("New York\tB-X\nis\tO\n\t\nbig\tO\n", [["New York", "is"], ["big"]]),
        ("-DOCSTART-(1) O\n\n# id = 7\na O\n", [["a"]]),
        ("# id\n# text = a b\na\tO\n#\tO\n\n#\tO\n", [["a", "#"], ["#"]]),
    ],
)
def test_lines_of_conll(tmp_path, content, words):
    (tmp_path / "a.conll").write_text(content, encoding="utf-8")
    assert read_table(str(tmp_path / "a.conll"), "").columns["tokens"] == words


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": "a b", "ner_tags": ["O"]}, "must hold lists of words; row 1 has 'a b'"),
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "must hold a tag for each word; row 1 has 2 words"),
        ({"tokens": ["a", "b"], "ner_tags": ["O", None]}, r"must be text or a number; row 1 of .* has None"),
    ],
)
def test_what_are_no_sentences(tmp_path, row, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_sentences(TaggingData(train_file=str(tmp_path / "a.jsonl")))


def test_tags_of_a_test_part_that_training_does_not_have(caplog):
    labels = Labels("single_label_classification", ("O", "B-X"))
    unknown = Sentences("test.jsonl", [["a", "b"]], [["O", "B-NEW"]], is_to_predict=True)
    assert unknown.with_tags_of(labels).tags == [["O", "B-NEW"]]
    assert "test.jsonl has tags that the training split lacks; they count as wrong: 'B-NEW'" in caplog.text
    untagged = Sentences("test.jsonl", [["a", "b"]], [["O", "-1"]], is_to_predict=True)
    assert untagged.with_tags_of(labels).tags is None
    assert "test.jsonl has words without a tag, so it is predicted but not scored" in caplog.text
    with pytest.raises(InputError, match="does not occur in the training split"):
        Sentences("validation.jsonl", [["a", "b"]], [["O", "-1"]]).with_tags_of(labels)
    with pytest.raises(InputError, match="but the training split has 'B-X'"):
        Sentences("test.jsonl", [["a"]], [["b-x"]], is_to_predict=True).with_tags_of(labels)
