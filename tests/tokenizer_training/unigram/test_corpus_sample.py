"""The sample of a corpus: everything where it fits, else drawn from all over it; the held-out passages never in it."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.corpus.passages import cut_passages
from mlm_common.errors import InputError
from tokenizer_training.unigram.corpus_sample import (
    Block,
    BlockSample,
    CorpusSample,
    DocumentTally,
    HeldOut,
    SampleLimits,
    draw_passages,
    sample_corpus,
)
from tokenizer_training.unigram.normalization import NormalizationConfig
from tokenizer_training.unigram.word_counts import count_words

CONFIG = NormalizationConfig()
PASSAGES = st.lists(st.text(st.sampled_from("aä語 \n"), max_size=12), max_size=30)
WORDS = ["".join(letters) for letters in product("abcdefg", repeat=3)]
TENTHS = [f"tenth{chr(ord('a') + number)}" for number in range(10)]


def marked_documents(num_documents: int = 3000) -> list[str]:
    """Make documents of 20 words; the first of each says in which tenth of the text it is."""
    draw = random.Random(0)
    return [
        " ".join([TENTHS[10 * index // num_documents], *draw.choices(WORDS, k=19)]) for index in range(num_documents)
    ]


DOCUMENTS = marked_documents()
NUM_BYTES = sum(map(len, DOCUMENTS))


def sampled(
    documents: list[str], max_bytes: int, seed: int = 0, hold_out: bool = False, num_processes: int = 1, **limits: int
) -> CorpusSample:
    all_limits = SampleLimits(max_bytes, limits.get("max_distinct_characters", 10**9), seed)
    return sample_corpus(documents, CONFIG, all_limits, num_processes, hold_out)


def size(passages: list[str]) -> int:
    return sum(len(passage.encode()) for passage in passages)


def test_everything_is_kept_when_it_fits() -> None:
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


def test_held_out_passages_are_not_counted() -> None:
    sample = sampled(DOCUMENTS, NUM_BYTES, hold_out=True)
    # A share of 5 %, and five standard deviations.
    assert abs(len(sample.held_out) - 150) < 5 * (3000 * 0.05 * 0.95) ** 0.5
    assert sample.record["num_sampled_bytes"] == NUM_BYTES - size(sample.held_out)
    counts = count_words(sample.held_out, CONFIG)
    counts.add(sample.counts)
    assert counts == count_words(DOCUMENTS, CONFIG)


@given(PASSAGES, st.integers(0, 60), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 9))
def test_passages_are_held_out_or_pass(passages: list[str], max_bytes: int, share: float, seed: int) -> None:
    held_out = HeldOut(random.Random(seed), max_bytes, share)
    rest = list(held_out.rest(passages))
    assert size(held_out.passages) <= max_bytes
    assert Counter(rest) + Counter(held_out.passages) == Counter(passages)
    remaining = iter(passages)
    assert all(passage in remaining for passage in held_out.passages), "in the order of the text"
    assert all(passage.strip() for passage in held_out.passages)
    if share == 0:
        assert rest == passages


def test_share_of_one_holds_all_that_there_is_room_for() -> None:
    passages = ["a", " ", "bc", "", "ä", "a"]
    for max_bytes, held in ((6, ["a", "bc", "ä", "a"]), (0, [])):
        held_out = HeldOut(random.Random(0), max_bytes, share=1.0)
        assert Counter(held_out.rest(passages)) == Counter(passages) - Counter(held)
        assert held_out.passages == held


def test_held_out_passages_are_from_all_over_the_text() -> None:
    held: Counter[str] = Counter()
    for seed in range(10):
        held_out = HeldOut(random.Random(seed), max_bytes=NUM_BYTES // 20, share=0.5)
        list(held_out.rest(DOCUMENTS))
        # The share is halved until it fits: between half of the room and all of it, give or take.
        assert 0.4 * NUM_BYTES / 20 < size(held_out.passages) <= NUM_BYTES / 20
        held.update(document.split()[0] for document in held_out.passages)
    mean = held.total() / 10
    assert all(abs(held[tenth] - mean) < 5 * mean**0.5 for tenth in TENTHS), held


def test_drawn_passages() -> None:
    long = "word " * 2000
    documents = ["one", " ", "two", long]
    assert draw_passages(documents, seed=0) == ["one", "two", *cut_passages([long])]
    drawn = draw_passages(DOCUMENTS, seed=1, max_bytes=10_000)
    assert 4_000 < size(drawn) <= 10_000
    assert drawn == draw_passages(DOCUMENTS, seed=1, max_bytes=10_000)
    assert drawn != draw_passages(DOCUMENTS, seed=2, max_bytes=10_000)


def groups_of_ten_bytes() -> Iterator[list[str]]:
    return (["12345", f"{number:05}"] for number in range(1000))


def test_rate_is_halved_when_the_sample_would_grow_too_large() -> None:
    sample = BlockSample(random.Random(0), max_bytes=100)
    drawn: list[Block] = []
    rates = []
    for block in sample.draw(groups_of_ten_bytes()):
        drawn.append(block)
        rates.append(sample.rate)
        assert sample.num_bytes <= 100
    assert [block.halve for block in drawn[:12]] == [False] * 10 + [True, False]
    assert rates[:12] == [1.0] * 10 + [0.5] * 2
    assert sample.rate == 0.5 ** sum(block.halve for block in drawn) <= 1 / 64
    assert sample.num_bytes >= 50
    numbers = [int(block.passages[1]) for block in drawn]
    assert numbers == sorted(set(numbers))


def test_rate_of_what_fits_stays() -> None:
    sample = BlockSample(random.Random(0), max_bytes=10_000)
    assert list(sample.draw(groups_of_ten_bytes())) == [Block(group, False) for group in groups_of_ten_bytes()]
    assert (sample.rate, sample.num_bytes) == (1.0, 10_000)


def test_sample_is_of_the_whole_text_and_its_counts_are_in_proportion() -> None:
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


def test_one_seed_reaches_every_part_of_the_text() -> None:
    """With as many blocks as a corpus beyond `max_bytes` has."""
    sample = sampled(DOCUMENTS, NUM_BYTES // 2)
    assert sample.record["sampling_rate"] < 1
    assert all(sample.counts.segments[f"▁{tenth}"] > 10 for tenth in TENTHS), sample.counts.segments


def test_rarest_segments_are_dropped_on_the_way() -> None:
    documents = [f"frequent often {index}x {index}y" for index in range(5000)]
    sample = sampled(documents, 40_000, max_distinct_characters=2000)
    assert sample.counts.num_distinct_characters <= 2000
    assert {"▁frequent", "▁often"} <= set(sample.counts.segments)
    record = sample.record
    assert record["num_dropped_segments"] > 1000
    assert record["num_distinct_segments"] == len(sample.counts.segments)
    assert "5" in sample.counts.characters


def test_any_number_of_processes_gives_the_same() -> None:
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


def test_another_seed_gives_another_sample() -> None:
    first, second = (sampled(DOCUMENTS, 50_000, seed) for seed in (0, 1))
    assert first.counts != second.counts


def test_tally() -> None:
    sizes: list[int] = []
    tally = DocumentTally(iter(["a", "", "äö"]), sizes.append)
    assert list(tally) == ["a", "", "äö"]
    assert (tally.num_documents, tally.num_bytes, sizes) == (3, 5, [1, 0, 4])


def test_no_documents() -> None:
    sample = sampled([], 1000, hold_out=True)
    assert not sample.counts.segments
    assert sample.record["num_documents"] == sample.record["num_words"] == 0


def test_broken_unicode_names_its_document() -> None:
    documents = chain(["fine", "fine"], [json.loads('"half of a pair: \\ud83d"')])
    limits = SampleLimits(10**6, 10**6, 0)
    with pytest.raises(InputError, match=r"must be valid Unicode; number 3 is not: .*Remove it"):
        sample_corpus(documents, CONFIG, limits, num_processes=1, hold_out=True)
