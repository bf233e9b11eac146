"""The tokenizer made of counted words: its vocabulary to the piece, its alphabet, its reserved tokens."""

import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tests.fixtures.generated_text import generated_lines
from tokenizer_training.config import MIN_BYTES, NormalizationConfig, UnigramConfig
from tokenizer_training.corpus_sample import count_words
from tokenizer_training.report import measure_quality, plain_text_backend
from tokenizer_training.trainer import _default_vocabulary_size, choose_alphabet, train_unigram

LINES = generated_lines(1000)
SPECIALS = list(SPECIAL_TOKENS.values())
NO_BYTES = UnigramConfig(byte_fallback=False)


def trained(lines: list[str], normalization: dict[str, Any] | None = None, **settings: Any) -> PreTrainedTokenizerFast:
    config = NormalizationConfig(**(normalization or {}))
    return train_unigram(count_words(lines, config), sum(map(len, lines)), UnigramConfig(**settings), config)


def tokens_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


def number_in(message: str) -> int:
    match = re.search(r"[\d,]+\d", message)
    assert match
    return int(match[0].replace(",", ""))


def test_largest_and_smallest_vocabulary_of_the_errors_can_be_had():
    lines = generated_lines(100, num_words=100)
    with pytest.raises(
        InputError, match=r"--vocab-size must be at most \d+ with this corpus; received 9,000"
    ) as caught:
        trained(lines, vocab_size=9000)
    largest = number_in(str(caught.value))
    assert len(trained(lines, vocab_size=largest)) == largest
    with pytest.raises(InputError, match=rf"--vocab-size must be at most {largest} .* received {largest + 1}"):
        trained(lines, vocab_size=largest + 1)

    smallest_of_settings = 5 + 256 + 1
    with pytest.raises(InputError, match="--vocab-size must be more than") as caught:
        trained(lines, vocab_size=smallest_of_settings)
    too_small = number_in(str(caught.value))
    assert smallest_of_settings < too_small < largest
    with pytest.raises(InputError, match=rf"must be more than {too_small}, .* received {too_small}\."):
        trained(lines, vocab_size=too_small)
    assert len(trained(lines, vocab_size=too_small + 1)) == too_small + 1


def test_default_vocabulary_size():
    for num_bytes, size in ((25_000_000, 8576), (100_000_000, 16_768), (400_000_000, 32_000), (10**12, 32_000)):
        assert _default_vocabulary_size(num_bytes, 100, UnigramConfig()) == size
        assert size % 128 == 0
    assert _default_vocabulary_size(25_000_000, 100, NO_BYTES) == 8320  # 8,192 + 5, rounded up
    assert _default_vocabulary_size(1_000_000, 7000, UnigramConfig()) == 14_336  # 2 * 7,000 + 261, rounded up
    assert _default_vocabulary_size(1_000_000, 20_000, UnigramConfig()) == 32_000


def test_default_vocabulary_falls_to_the_largest_there_is():
    assert len(trained(LINES)) == 768  # 1.6384 * sqrt(87,000) + 261, rounded up
    lines = generated_lines(80, num_words=80)
    with pytest.raises(InputError) as caught:
        trained(lines, vocab_size=900, byte_fallback=False)
    largest = number_in(str(caught.value))
    assert 128 < largest < 256
    assert _default_vocabulary_size(10**6, 100, NO_BYTES) > largest
    counts = count_words(lines, NormalizationConfig())
    assert len(train_unigram(counts, 10**6, NO_BYTES, NormalizationConfig())) == 128


@pytest.mark.parametrize(
    ("lines", "byte_fallback"),
    [(["a"], True), (["天地玄黃"], True), (["\U0001f600 ."], False)],
    ids=str,
)
def test_tiniest_texts(lines, byte_fallback):
    tokenizer = trained(lines, byte_fallback=byte_fallback)
    ids = tokenizer(lines[0], add_special_tokens=False)["input_ids"]
    assert 3 not in ids
    assert tokenizer.decode(ids) == lines[0]


def test_text_without_any_structure():
    """Where the trainer's own pruning leaves fewer pieces than were to be had, and for those fewer yet."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    lines = ["".join(draw.choices(letters, k=draw.randint(20, 400))) for _ in range(100)]
    tokenizer = trained(lines)
    assert len(tokenizer) > 261 + 52
    assert tokenizer.decode(tokenizer(lines[0], add_special_tokens=False)["input_ids"]) == lines[0]


def test_blank_text_is_refused():
    with pytest.raises(InputError, match=r"must have text.*--text-column"):
        trained(["", " \x00\ufeff"])


def alphabet_of(characters: dict[str, int], **settings: Any) -> set[str]:
    config = UnigramConfig(byte_fallback=False, **settings)
    return choose_alphabet(Counter(characters), config) - set("".join(SPECIALS)) - {"▁"}


def test_alphabet_at_full_coverage_is_all_characters():
    characters = {chr(0x4E00 + index): 1 + index % 7 for index in range(5000)} | {"é": 1, "j": 1}
    assert alphabet_of(characters, character_coverage=1.0) == set(characters)


def test_alphabet_covers_what_was_asked_for_and_no_more():
    characters = {chr(0x4E00 + index): 10 for index in range(1000)}
    for coverage, num_kept in ((0.9, 900), (0.9995, 1000), (0.995, 995), (0.9501, 951)):
        assert len(alphabet_of(characters, character_coverage=coverage)) == num_kept


def test_rare_letters_of_a_small_alphabet_are_kept():
    letters = dict.fromkeys("eioäü", 200_000) | {"Ö": 6, "ж": 4, "J": 1}
    assert alphabet_of(letters) == set("eioäüÖJ")
    signs = {chr(0x4E00 + index): 10_000 for index in range(512)}
    assert alphabet_of(signs | {"Ö": 100, "~": 1}, character_coverage=0.9) >= set(signs) | {"~"}
    assert "Ö" not in alphabet_of(signs | {"Ö": 100, "~": 1}, character_coverage=0.9)


def test_alphabet_spells_the_reserved_tokens():
    alphabet = choose_alphabet(Counter("xy"), UnigramConfig(extra_special_tokens=["<ent>", "Ж1"]))
    assert alphabet == set("xy▁[CLS]<pad>[SEP]<unk>[MASK]<ent>Ж1<0x>0123456789ABCDEF")
    assert choose_alphabet(Counter("x▅"), NO_BYTES) == set("x▁[CLS]<pad>[SEP]<unk>[MASK]")


def test_rare_characters_are_spelled_in_bytes_or_lost():
    lines = ["the cat sat on the mat and then on the hat"] * 8000 + ["Jan ß"]
    with_bytes, without = (trained(lines, byte_fallback=byte_fallback) for byte_fallback in (True, False))
    for tokenizer in (with_bytes, without):
        assert "J" in tokenizer.get_vocab()
        assert "ß" not in tokenizer.get_vocab()
        assert "".join(tokens_of(tokenizer, "Jan")) == "▁Jan"
    assert tokens_of(with_bytes, "ß")[-2:] == ["<0xC3>", "<0x9F>"]
    assert with_bytes.decode(with_bytes("on ß 語▅", add_special_tokens=False)["input_ids"]) == "on ß 語▅"
    assert tokens_of(without, "catß") == ["▁cat", "<unk>"]
    quality = measure_quality(without, ["cat ß", "\U0001f600"])
    assert quality.unknown_character_rate == 2 / 5
    assert measure_quality(with_bytes, ["cat ß", "\U0001f600", "<unk>"]).unknown_rate == 0


def test_odd_characters_are_kept_at_full_coverage():
    odd = "\u2047\ufffd\ufffe\ue000\u200b\u200d\u0301\U0001f469\U0010fffd「ｱ"
    lines = [f"<s>{sign}</s> a{sign}b {sign}" for sign in odd]
    tokenizer = trained(lines, {"normalization": "none"}, character_coverage=1.0, byte_fallback=False)
    assert set(odd) < set(tokenizer.get_vocab())
    for line in lines:
        assert tokenizer.decode(tokenizer(line, add_special_tokens=False)["input_ids"]) == line


def test_extra_special_tokens_get_their_ids_and_stay_whole():
    extra = ["[ENT]", "ing", "@@", "\uff21\uff22"]
    lines = [f"{line} [ENT]{line} doing @@ing ing ing @@[ENT]{extra[3]}" for line in LINES]
    tokenizer = trained(lines, vocab_size=600, extra_special_tokens=extra)
    assert tokenizer.convert_tokens_to_ids(extra) == [5, 6, 7, 8]
    assert tokenizer.convert_tokens_to_ids("<0x00>") == 9
    assert len(tokenizer) == len(tokenizer.get_vocab()) == 600
    assert [token for token in tokenizer.all_special_tokens if token in extra] == extra
    # Each is found, with or without spaces around it, and no other.
    ids = tokenizer("[ENT] @@ing,\uff21\uff22x[ENT] doing AB", add_special_tokens=False)["input_ids"]
    assert [token_id for token_id in ids if token_id < 9] == [5, 7, 6, 8, 5, 6]
    # In plain text they are spelled from other pieces.
    plain = plain_text_backend(tokenizer).encode("doing [ENT] @@ing", add_special_tokens=False)
    assert not set(plain.ids) & set(range(9))
    assert plain_text_backend(tokenizer).decode(plain.ids) == "doing [ENT] @@ing"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_special_tokens": ["x"]}, r"at least two visible characters, .*; received 'x'"),
        ({"extra_special_tokens": ["a b"]}, "received 'a b'"),
        ({"extra_special_tokens": ["a\x00"]}, r"received 'a\\x00'"),
        ({"extra_special_tokens": ["\udcff\udcff"]}, r"received '\\udcff\\udcff'"),
        ({"extra_special_tokens": ["[ENT]", "[MASK]", "[ENT]"]}, r"must be new tokens; \[ENT\] \[MASK\] already exist"),
        ({"extra_special_tokens": ["<0x41>"]}, "must be new tokens; <0x41> already exist"),
        ({"vocab_size": 261}, "must be more than the 261 special tokens and bytes; received 261"),
        ({"vocab_size": 6, "byte_fallback": False, "extra_special_tokens": ["[ENT]"]}, "the 6 special .* received 6"),
        ({"character_coverage": 99.95}, "must be at least 0.9 and at most 1; received 99.95"),
        ({"character_coverage": float("nan")}, "must be at least 0.9 and at most 1; received nan"),
        ({"max_bytes": MIN_BYTES - 1}, "must be at least 1,000,000; received 999999"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        UnigramConfig(**settings)


def test_padded_vocabulary():
    for size, multiple, padded in ((320, 128, 384), (384, 128, 384)):
        tokenizer = trained(LINES, vocab_size=size, pad_vocab_to_multiple_of=multiple)
        assert len(tokenizer) == len(tokenizer.get_vocab()) == padded
        unused = [f"<unused{number}>" for number in range(padded - size)]
        assert tokenizer.convert_ids_to_tokens(range(size, padded)) == unused
        # They do not occur in any text.
        assert max(tokenizer("<unused0> <unused1>")["input_ids"]) < size


def test_normalization_is_part_of_the_tokenizer():
    normalization = {"lowercase": True, "strip_accents": True, "split_digits": True}
    tokenizer = trained([*LINES, "2010 2010 2010"] * 2, normalization, vocab_size=500)
    ids = tokenizer("``Ünder'' 2010\t\uff2f\uff2e", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == '"under" 2010 on'
    assert tokens_of(tokenizer, "2010") == ["▁", "2", "0", "1", "0"]
    assert not any(re.search(r"[A-Z].|\d.", piece) for piece in tokenizer.convert_ids_to_tokens(range(261, 500)))
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    assert {"NFKC", "Lowercase", "StripAccents"} < {step["type"] for step in backend["normalizer"]["normalizers"]}


def test_scores_are_read_back_as_they_were_written():
    tokenizer = trained(LINES, vocab_size=700)
    written = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    assert all(score == round(score, 6) for _, score in written)
    ordinary = [score for _, score in written[261:]]
    assert ordinary == sorted(ordinary, reverse=True)
    assert {score for _, score in written[:261]} == {-1000.0}
    assert min(ordinary) > -50
