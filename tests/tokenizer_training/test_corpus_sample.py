"""The sample of a corpus, drawn from all over it, held-out passages never in it; and words counted in segments."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus.text_files import cut_passages
from tokenizer_training.config import WORD_MARK, NormalizationConfig, make_normalizer, make_pre_tokenizer
from tokenizer_training.corpus_sample import (
    BlockSample,
    CorpusSample,
    HeldOut,
    WordCounts,
    count_characters,
    count_words,
    draw_passages,
    sample_corpus,
    segment_cutter,
)

CONFIG = NormalizationConfig()
PASSAGES = st.lists(st.text(st.sampled_from("aä語 \n"), max_size=12), max_size=30)
WORDS = ["".join(letters) for letters in product("abcdefg", repeat=3)]
TENTHS = [f"tenth{chr(ord('a') + number)}" for number in range(10)]
# Letters, signs, digits, marks and separators of each kind.
TELLING = "ab1٣½,(.)-'\" \n\ufeff▁éß\u0301яのカー語\u200d️©ªﬁ①"
MIXED = st.text(st.one_of(st.sampled_from(TELLING), st.characters(exclude_categories=["Cs"])))
CONFIGS = [NormalizationConfig(), NormalizationConfig(normalization="none", split_digits=True)]
LETTERS_OF_MANY_SCRIPTS = "aÿßωжאعहกგ가の語カー"


def marked_documents(num_documents: int = 3000) -> list[str]:
    """Make documents of 20 words; the first of each says in which tenth of the text it is."""
    draw = random.Random(0)
    return [
        " ".join([TENTHS[10 * index // num_documents], *draw.choices(WORDS, k=19)]) for index in range(num_documents)
    ]


DOCUMENTS = marked_documents()
NUM_BYTES = sum(map(len, DOCUMENTS))


def sampled(
    documents: Iterable[str], max_bytes: int, seed: int = 0, hold_out: bool = False, **other_limits: int
) -> CorpusSample:
    limits = {"max_distinct_characters": 10**9, "num_processes": 1} | other_limits
    return sample_corpus(documents, CONFIG, max_bytes=max_bytes, seed=seed, hold_out=hold_out, **limits)


def size(passages: list[str]) -> int:
    return sum(len(passage.encode()) for passage in passages)


def test_everything_is_kept_when_it_fits():
    documents = [*DOCUMENTS, "", "long " * 3000]
    sample = sampled(documents, size(documents))
    assert sample.counts == count_words(documents, CONFIG)
    assert sample.held_out == []
    assert sample.record == {
        "num_documents": len(documents),
        "num_bytes": size(documents),
        "num_sampled_bytes": size(documents),
        "sampling_rate": 1.0,
        "num_words": sum(len(document.split()) for document in documents),
        "num_distinct_segments": len(sample.counts.segments),
        "num_dropped_segments": 0,
    }


def test_held_out_passages_are_not_counted():
    sample = sampled(DOCUMENTS, NUM_BYTES, hold_out=True)
    # A share of 5 %, and five standard deviations.
    assert abs(len(sample.held_out) - 150) < 5 * (3000 * 0.05 * 0.95) ** 0.5
    assert sample.record["num_sampled_bytes"] == NUM_BYTES - size(sample.held_out)
    counts = count_words(sample.held_out, CONFIG)
    counts.add(sample.counts)
    assert counts == count_words(DOCUMENTS, CONFIG)


@given(PASSAGES, st.integers(0, 60), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 9))
def test_passages_are_held_out_or_pass(passages, max_bytes, share, seed):
    held_out = HeldOut(random.Random(seed), max_bytes, share)
    others = list(held_out.others(passages))
    assert size(held_out.passages) <= max_bytes
    assert Counter(others) + Counter(held_out.passages) == Counter(passages)
    remaining = iter(passages)
    assert all(passage in remaining for passage in held_out.passages), "in the order of the text"
    assert all(passage.strip() for passage in held_out.passages)
    if share == 0:
        assert others == passages


def test_held_out_passages_are_from_all_over_the_text():
    held: Counter[str] = Counter()
    for seed in range(10):
        held_out = HeldOut(random.Random(seed), max_bytes=NUM_BYTES // 20, fraction=0.5)
        list(held_out.others(DOCUMENTS))
        # The share is halved until it fits: between half of the room and all of it, give or take.
        assert 0.4 * NUM_BYTES / 20 < size(held_out.passages) <= NUM_BYTES / 20
        held.update(document.split()[0] for document in held_out.passages)
    mean = held.total() / 10
    assert all(abs(held[tenth] - mean) < 5 * mean**0.5 for tenth in TENTHS), held


def test_drawn_passages():
    long = "word " * 2000
    documents = ["one", " ", "two", long]
    assert draw_passages(documents, seed=0) == ["one", "two", *cut_passages([long])]
    drawn = draw_passages(DOCUMENTS, seed=1, max_bytes=10_000)
    assert 4_000 < size(drawn) <= 10_000
    assert drawn == draw_passages(DOCUMENTS, seed=1, max_bytes=10_000)
    assert drawn != draw_passages(DOCUMENTS, seed=2, max_bytes=10_000)


def groups_of_ten_bytes() -> Iterator[list[str]]:
    return (["12345", f"{number:05}"] for number in range(1000))


def test_rate_is_halved_when_the_sample_would_grow_too_large():
    sample = BlockSample(random.Random(0), max_bytes=100)
    drawn: list[tuple[list[str], bool]] = []
    rates = []
    for block in sample.draw(groups_of_ten_bytes()):
        drawn.append(block)
        rates.append(sample.rate)
        assert sample.num_bytes <= 100
    assert [halve for _, halve in drawn[:12]] == [False] * 10 + [True, False]
    assert rates[:12] == [1.0] * 10 + [0.5] * 2
    assert sample.rate == 0.5 ** sum(halve for _, halve in drawn) <= 1 / 64
    assert sample.num_bytes >= 50
    numbers = [int(passages[1]) for passages, _ in drawn]
    assert numbers == sorted(set(numbers))


def test_counts_of_a_sample_are_in_proportion():
    max_bytes, num_seeds = NUM_BYTES // 10, 20
    relative: Counter[str] = Counter()
    num_words = 0.0
    for seed in range(num_seeds):
        sample = sampled(DOCUMENTS, max_bytes, seed)
        rate = sample.record["sampling_rate"]
        assert rate in (1 / 8, 1 / 16, 1 / 32)
        assert 0.4 * max_bytes < sample.record["num_sampled_bytes"] <= max_bytes
        assert sample.record["num_bytes"] == NUM_BYTES
        assert sample.record["num_words"] == pytest.approx(sample.counts.segments.total(), rel=0.1)
        num_words += sample.record["num_words"] / rate / num_seeds
        for tenth in TENTHS:
            relative[tenth] += sample.counts.segments[f"▁{tenth}"] / 300 / rate / num_seeds
    assert num_words == pytest.approx(20 * 3000, rel=0.1)
    # A tenth has 64 blocks, of which one in 16 is kept: half a figure is the standard deviation of one seed's.
    assert all(abs(relative[tenth] - 1) < 4 * 0.5 / num_seeds**0.5 for tenth in TENTHS), relative


def test_rarest_segments_are_dropped_on_the_way():
    documents = [f"frequent often {index}x {index}y" for index in range(5000)]
    sample = sampled(documents, 40_000, max_distinct_characters=2000)
    assert sample.counts.num_distinct_characters <= 2000
    assert {"▁frequent", "▁often"} <= set(sample.counts.segments)
    record = sample.record
    assert record["num_dropped_segments"] > 1000
    assert record["num_distinct_segments"] == len(sample.counts.segments)
    assert "5" in sample.counts.characters


def test_any_number_of_processes_gives_the_same():
    samples = [
        sampled(DOCUMENTS, 100_000, 3, hold_out=True, num_processes=number, max_distinct_characters=1000)
        for number in (1, 2)
    ]
    as_bytes = [
        json.dumps([list(sample.counts.segments.items()), list(sample.counts.characters.items()), sample.held_out])
        for sample in samples
    ]
    assert as_bytes[0] == as_bytes[1]
    assert samples[0].record == samples[1].record
    assert samples[0].record["num_dropped_segments"] > 0
    assert samples[0].record["sampling_rate"] < 1
    assert as_bytes[0] != json.dumps(list(sampled(DOCUMENTS, 100_000, 4).counts.segments.items()))


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
def test_cuts(word, segments):
    assert segment_cutter(False)(word) == segments


def test_digits_can_be_cut():
    assert segment_cutter(True)("▁x2010,½٣") == ["▁x", "2", "0", "1", "0", ",", "½", "٣"]
    assert segment_cutter(True)("▁20") == ["▁", "2", "0"]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "split digits"])
def test_counts_are_those_of_the_normalized_text(config):
    cut, pre_tokenizer = segment_cutter(config.split_digits), make_pre_tokenizer(config)

    @given(st.lists(MIXED, max_size=4), st.lists(MIXED, max_size=4))
    @settings(max_examples=100)
    def check(first: list[str], second: list[str]) -> None:
        words = words_of(first + second, config)
        segments = [cut(WORD_MARK + word) for word in words]
        for word, parts in zip(words, segments, strict=True):
            assert "".join(parts) == WORD_MARK + word
            assert all(parts)
            # The tokenizer may cut there only where the counts are cut, too.
            assert ends_of([part for part, _ in pre_tokenizer.pre_tokenize_str(word)]) <= ends_of(parts)
        counts = count_words(first, config)
        counts.add(count_words(second, config))
        assert counts.segments == Counter(chain.from_iterable(segments))
        assert counts.characters == Counter("".join(chain.from_iterable(segments)))
        assert counts.num_words == len(words)
        assert counts.num_distinct_characters == sum(map(len, set(chain.from_iterable(segments))))

    check()


def ends_of(parts: list[str]) -> set[int]:
    return {sum(map(len, parts[: index + 1])) for index in range(len(parts))}


def test_counts_of_a_text():
    counts = count_words(["ﬁne  ``text''\u00a0here\n", "", " here", "a▁here", "\x00 \ufeff"], NormalizationConfig())
    assert counts.segments == {"▁here": 3, "▁fine": 1, '▁"': 1, "text": 1, '"': 1, "▁a": 1}
    assert (counts.num_words, counts.characters["▁"]) == (6, 6)
    assert count_words([], NormalizationConfig()) == WordCounts()


def make_counts(segments: dict[str, int]) -> WordCounts:
    counter = Counter(segments)
    return WordCounts(counter, count_characters(counter), sum(segments.values()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_halves_are_right_on_average(count):
    counts = make_counts({f"w{index}": count for index in range(10_000)})
    counts.halve(random.Random(0))
    assert set(counts.segments.values()) == {count // 2, -(-count // 2)} - {0}, "what halves to nothing is dropped"
    # Five standard deviations, of 0.5 each.
    assert abs(counts.segments.total() - 10_000 * count / 2) < 5 * 0.5 * 100
    assert counts.num_words == 10_000 * count // 2


def test_the_most_frequent_are_kept():
    counts = make_counts({"rare": 1, "▁the": 9, "middle": 5, "▁of": 7})
    assert counts.keep_most_frequent(17) == 0
    assert counts.keep_most_frequent(16) == 1
    assert counts.segments == {"▁the": 9, "▁of": 7, "middle": 5}
    assert counts.characters["r"] == 2, "characters count wherever they stood"
    assert counts.keep_most_frequent(12) == 1
    assert counts.segments == {"▁the": 9, "▁of": 7}
    assert counts.keep_most_frequent(3) == 2
    assert not counts.segments


def test_equally_frequent_ones_are_kept_evenly():
    names = [f"{letter}{number}" for letter in "abcdefghij" for number in range(10, 60)]
    kept = []
    for order in (1, -1):
        counts = make_counts(dict.fromkeys(names[::order], 1))
        assert counts.keep_most_frequent(len(names) * 3 // 2) == len(names) // 2
        kept.append(counts.segments)
    assert kept[0] == kept[1], "the order in which they came does not matter"
    by_letter = Counter(name[0] for name in kept[0])
    assert min(by_letter[letter] for letter in "abcdefghij") > 25 - 15


def test_sentencepiece_refuses_every_piece_across_a_cut(tmp_path):
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
        match = re.search(r"skipped (\d+) seed", trained.stderr)
        assert match, trained.stderr
        assert int(match[1]) == num_refused
