"""Words counted in segments: nothing lost or added, whatever the blocks, and cut only where no piece may cross."""

import io
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from tokenizer_training.unigram.normalization import WORD_MARK, NormalizationConfig, make_normalizer, make_pre_tokenizer
from tokenizer_training.unigram.word_counts import WordCounts, count_characters, count_words, segment_cutter

# Letters, signs, digits, marks and separators of each kind.
TELLING = "ab1٣½,(.)-'\" \n\ufeff▁éß\u0301яのカー語\u200d️©ªﬁ①"
MIXED = st.text(st.one_of(st.sampled_from(TELLING), st.characters(exclude_categories=["Cs"])))
CONFIGS = [NormalizationConfig(), NormalizationConfig(normalization="none", split_digits=True)]
CONFIGS_BY_NAME = pytest.mark.parametrize("config", CONFIGS, ids=["default", "split digits"])
LETTERS_OF_MANY_SCRIPTS = "aÿßωжאعहกგ가の語カー"


def words_of(texts: list[str], config: NormalizationConfig) -> list[str]:
    normalize = make_normalizer(config).normalize_str
    return [word for text in texts for word in normalize(text).split(" ") if word]


@pytest.mark.parametrize(
    ("word", "segments"),
    [
        ("▁word", ["▁word"]),
        ("▁(word),", ["▁(", "word", "),"]),
        ("▁it's", ["▁it", "'", "s"]),
        ("▁2010年", ["▁2010", "年"]),
        ("▁コーヒー。ー", ["▁コーヒー", "。", "ー"]),
        ("▁ロシアяя語", ["▁ロシアяя語"]),  # of other scripts, but the trainer cuts between letters, too
        ("▁e\u0301t1\u0301t", ["▁e\u0301t", "1\u0301", "t"]),
        ("▁\u0301x", ["▁\u0301x"]),
        ("▁👩\u200d👩x", ["▁👩\u200d👩", "x"]),
        ("▁", ["▁"]),
    ],
)
def test_cuts(word: str, segments: list[str]) -> None:
    assert segment_cutter(False)(word) == segments


def test_digits_can_be_cut() -> None:
    assert segment_cutter(True)("▁x2010,½٣") == ["▁x", "2", "0", "1", "0", ",", "½", "٣"]
    assert segment_cutter(True)("▁20") == ["▁", "2", "0"]
    assert segment_cutter(False)("▁x2010,½") == ["▁x", "2010,½"]


@CONFIGS_BY_NAME
def test_segments_give_their_words_back(config: NormalizationConfig) -> None:
    cut, pre_tokenizer = segment_cutter(config.split_digits), make_pre_tokenizer(config)

    @given(MIXED)
    @settings(max_examples=300)
    def check(text: str) -> None:
        for word in words_of([text], config):
            segments = cut(WORD_MARK + word)
            assert "".join(segments) == WORD_MARK + word
            assert all(segments)
            # The tokenizer may cut there only where the counts are cut, too.
            parts = [part for part, _ in pre_tokenizer.pre_tokenize_str(word)]
            assert ends_of(parts) <= ends_of(segments)

    check()


def ends_of(parts: list[str]) -> set[int]:
    return {sum(map(len, parts[: index + 1])) for index in range(len(parts))}


@CONFIGS_BY_NAME
def test_counts_are_those_of_the_normalized_text(config: NormalizationConfig) -> None:
    cut = segment_cutter(config.split_digits)

    @given(st.lists(MIXED, max_size=4), st.lists(MIXED, max_size=4))
    @settings(max_examples=300)
    def check(first: list[str], second: list[str]) -> None:
        words = words_of(first + second, config)
        segments = list(chain.from_iterable(cut(WORD_MARK + word) for word in words))
        counts = count_words(first, config)
        counts.add(count_words(second, config))
        assert counts.segments == Counter(segments)
        assert counts.characters == Counter("".join(segments))
        assert counts.num_words == len(words)
        assert counts.num_distinct_characters == sum(map(len, set(segments)))

    check()


def test_counts_of_a_text() -> None:
    counts = count_words(["ﬁne  ``text''\u00a0here\n", "", " here", "a▁here"], NormalizationConfig())
    assert counts.segments == {"▁here": 3, "▁fine": 1, '▁"': 1, "text": 1, '"': 1, "▁a": 1}
    assert counts.num_words == 6
    assert counts.characters["▁"] == 6
    assert count_words([], NormalizationConfig()) == WordCounts()
    assert not count_words(["\x00 \ufeff"], NormalizationConfig()).segments
    assert count_characters(Counter()) == Counter()


def make_counts(segments: dict[str, int]) -> WordCounts:
    counter = Counter(segments)
    return WordCounts(counter, count_characters(counter), sum(segments.values()))


def test_halves_of_even_counts_are_exact() -> None:
    counts = make_counts({"▁a": 2, "▁bc": 8, "d": 10**15})
    counts.halve(random.Random(0))
    assert counts.segments == {"▁a": 1, "▁bc": 4, "d": 5 * 10**14}
    assert counts.characters == {"▁": 5, "a": 1, "b": 4, "c": 4, "d": 5 * 10**14}
    assert counts.num_words == 5 + 5 * 10**14


@pytest.mark.parametrize("count", [1, 3])
def test_halves_of_odd_counts_are_right_on_average(count: int) -> None:
    counts = make_counts({f"w{index}": count for index in range(10_000)})
    counts.halve(random.Random(0))
    assert set(counts.segments.values()) == {count // 2, count // 2 + 1} - {0}, "what halves to nothing is dropped"
    # Five standard deviations, of 0.5 each.
    assert abs(counts.segments.total() - 10_000 * count / 2) < 5 * 0.5 * 100


def test_the_most_frequent_are_kept() -> None:
    counts = make_counts({"rare": 1, "▁the": 9, "middle": 5, "▁of": 7})
    assert counts.keep_most_frequent(17) == 0
    assert counts.keep_most_frequent(16) == 1
    assert counts.segments == {"▁the": 9, "▁of": 7, "middle": 5}
    assert counts.characters["r"] == 2, "characters count wherever they stood"
    assert counts.keep_most_frequent(12) == 1
    assert counts.segments == {"▁the": 9, "▁of": 7}
    assert counts.keep_most_frequent(3) == 2
    assert not counts.segments


def test_equally_frequent_ones_are_kept_from_all_over_the_alphabet() -> None:
    names = [f"{letter}{number}" for letter in "abcdefghij" for number in range(10, 60)]
    kept = []
    for order in (1, -1):
        counts = make_counts(dict.fromkeys(names[::order], 1))
        assert counts.keep_most_frequent(len(names) * 3 // 2) == len(names) // 2
        kept.append(counts.segments)
    assert kept[0] == kept[1], "the order in which they came does not matter"
    by_letter = Counter(name[0] for name in kept[0])
    assert min(by_letter[letter] for letter in "abcdefghij") > 25 - 15


def test_popping_gives_all_and_leaves_none() -> None:
    segments = {"▁a": 2, "▁bc": 8}
    counts = make_counts(segments)
    assert dict(counts.pop_segments()) == segments
    assert not counts.segments


def test_sentencepiece_makes_no_piece_across_a_cut() -> None:
    draw = random.Random(0)
    parts = [*"abc", "do", "コー", "語", "я", "ß", "e\u0301", *"12", "30", *"(),.-'", "。", "©"]
    lines = [" ".join("".join(draw.choices(parts, k=draw.randint(1, 3))) for _ in range(20)) for _ in range(1000)]
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=180, normalization_rule_name="identity"
    )
    trained = SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [trained.id_to_piece(index) for index in range(3, len(trained))]
    assert sum(len(piece) > 1 for piece in pieces) > 100
    assert [piece for piece in pieces if len(segment_cutter(False)(piece)) > 1] == []


def test_sentencepiece_refuses_every_piece_across_a_cut(tmp_path: Path) -> None:
    """Each sign of Unicode beside letters, offered as a piece to start from."""
    cut = segment_cutter(False)
    signs = [
        sign
        for sign in map(chr, chain(range(0x21, 0xD800), range(0xE000, sys.maxunicode)))
        if len(cut(f"a{sign}")) == 2 and not sign.isspace()
    ]
    assert len(signs) > 7000
    across = [f"{letter}{sign}" for letter in "aーの語" for sign in signs]
    across += [pair for letter in LETTERS_OF_MANY_SCRIPTS for pair in (f"1{letter}", f"{letter}1", f"▁.{letter}")]
    within = ["aß", "語カ", "コー", "ーの", "12", "1.", "▁a", "▁(", "©®"]
    assert {len(cut(piece)) for piece in across} == {2}
    assert {len(cut(piece)) for piece in within} == {1}
    corpus, seeds = tmp_path / "corpus.txt", tmp_path / "seeds.tsv"
    corpus.write_text("".join(f"{piece}\n" for piece in [*across, *within]), "utf-8")
    for pieces, num_refused in ((across, len(across)), (within, 0)):
        seeds.write_text("".join(f"{piece}\t5\n" for piece in pieces), "utf-8")
        options = {
            "input": str(corpus), "seed_sentencepieces_file": str(seeds), "model_prefix": str(tmp_path / "model"),
            "vocab_size": 100_000, "hard_vocab_limit": False, "character_coverage": 1.0,
            "normalization_rule_name": "identity",
        }  # fmt: skip
        # In a process of its own: what it logs depends on what others in the same process asked for.
        program = f"import sentencepiece; sentencepiece.SentencePieceTrainer.train(**{options!r})"
        trained = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True)
        found = re.search(r"skipped (\d+) seed", trained.stderr)
        assert found, trained.stderr
        assert int(found[1]) == num_refused
