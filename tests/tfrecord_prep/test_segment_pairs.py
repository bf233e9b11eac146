"""Pairs of segments: exact where nothing is left to chance, else what must hold of any draw."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.partitions import build_partition, split_work
from tests.fixtures.tiny_corpus import flags
from tfrecord_prep.chunking import Framing, Rows, cut_segment_pairs
from tfrecord_prep.encoding import TokenBatch
from tfrecord_prep.manifest import read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main
from tfrecord_prep.records import decode_feature, read_records
from tfrecord_prep.segment_pairs import PairRule, sentences_of

CLS, PAD, SEP = 0, 1, 2
FRAMING = Framing(cls_id=CLS, sep_id=SEP, pad_id=PAD)
# Ids tell their document and their place in it.
IDS_PER_DOCUMENT = 1000
# Lengths of sentences, by document.
Lengths = list[list[int]]
Pair = tuple[list[int], list[int], int]

lengths_strategy = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=9), min_size=1, max_size=8)


def ids_of(document: int, num_tokens: int) -> list[int]:
    return [IDS_PER_DOCUMENT * (document + 1) + place for place in range(num_tokens)]


def batches_of(lengths: Lengths, cuts: Sequence[int] = ()) -> list[TokenBatch]:
    """Make batches of documents, cut anywhere."""
    ids = np.array([*chain.from_iterable(ids_of(n, sum(document)) for n, document in enumerate(lengths))], np.int32)
    sentence_ends = np.array([*accumulate(chain.from_iterable(lengths))], np.int64)
    document_ends = np.array([*accumulate(map(sum, lengths))], np.int64)
    batches, places = [], [0, *sorted(cuts), len(ids)]
    for start, stop in pairwise(places):
        own = [ends[(ends > start) & (ends <= stop)] - start for ends in (document_ends, sentence_ends)]
        batches.append(TokenBatch(ids[start:stop], own[0], len(own[0]), own[1]))
    return batches


def pairs_of(all_rows: Iterator[Rows]) -> list[Pair]:
    """Read the pairs of rows, and check their form."""
    pairs = []
    for rows in all_rows:
        assert rows.next_sentence_labels is not None
        for ids, num_tokens, label in zip(*vars(rows).values(), strict=True):
            row = ids[:num_tokens].tolist()
            assert (ids[num_tokens:] == PAD).all()
            assert (row[0], row[-1], row.count(CLS), row.count(SEP)) == (CLS, SEP, 1, 2)
            middle = row.index(SEP)
            pairs.append((row[1:middle], row[middle + 1 : -1], int(label)))
    return pairs


def cut(lengths: Lengths, max_length: int, cuts: Sequence[int] = (), **rule: float) -> list[Pair]:
    return pairs_of(cut_segment_pairs(batches_of(lengths, cuts), FRAMING, max_length, PairRule(**rule)))


def test_nothing_random_gives_all_text_in_order():
    first, second = ids_of(0, 14), ids_of(1, 5)
    pairs = cut([[3, 2, 4, 5], [2, 3]], 16, short_share=0, random_share=0)
    # Nine tokens do not fill a row of thirteen, so the fourth sentence of five is there, too, and one token is lost.
    assert [label for *_, label in pairs] == [0, 0]
    assert pairs[0][0] + pairs[0][1] in (first[1:], first[:-1], first[:3] + first[4:], first[:2] + first[3:])
    assert pairs[1] == (second[:2], second[2:], 0)


def test_everything_random_pairs_sentences_with_other_documents():
    pairs = cut([[5, 5, 5], [2, 2]], 13, short_share=0, random_share=1)
    assert [label for *_, label in pairs] == [1] * 5
    firsts = [ids_of(0, 15)[start : start + 5] for start in (0, 5, 10)] + [ids_of(1, 4)[:2], ids_of(1, 4)[2:]]
    assert [first for first, _, _ in pairs] == firsts
    # As long as fills the row, of the other document, from the begin of a sentence to the end of one.
    assert {tuple(other) for _, other, _ in pairs[:3]} <= {tuple(ids_of(1, 4)), tuple(ids_of(1, 4)[2:])}
    assert {len(other) for _, other, _ in pairs[3:]} <= {5, 8}


def test_short_pairs():
    """All documents' pairs are as short as was drawn, between two tokens and a row, all as likely."""
    pairs = cut([[1] * 200] * 300, 13, short_share=1, random_share=0)
    totals = np.array([len(first) + len(second) for first, second, _ in pairs])
    chosen = {}
    for (first, second, _), total in zip(pairs, totals, strict=True):
        chosen.setdefault(first[0] // IDS_PER_DOCUMENT, total)
        assert second[-1] % IDS_PER_DOCUMENT in (199, second[0] % IDS_PER_DOCUMENT + len(second) - 1)
    counts = np.bincount([*chosen.values()], minlength=11)
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:].min() > 300 / 9 / 2
    full = cut([[1] * 200] * 20, 13, short_share=0, random_share=0)
    assert {len(first) + len(second) for first, second, _ in full} == {10}


def test_a_document_alone_has_no_random_pairs():
    assert cut([[5]], 16) == []
    pairs = cut([[5] * 30], 16)
    assert {label for *_, label in pairs} == {0}
    assert len(pairs) >= 10


@given(data=st.data(), lengths=lengths_strategy, max_length=st.integers(8, 40), rates=st.tuples(*[st.floats(0, 1)] * 2))
def test_any_pairs(data, lengths, max_length, rates):
    rule = {"short_share": rates[0], "random_share": rates[1]}
    cuts = data.draw(st.lists(st.integers(0, sum(map(sum, lengths))), max_size=4))
    pairs = cut(lengths, max_length, cuts, **rule)
    assert pairs == cut(lengths, max_length, **rule)
    for first, second, label in pairs:
        assert first
        assert second
        assert len(first) + len(second) <= max_length - 3
        for segment in (first, second):
            assert segment == [*range(segment[0], segment[0] + len(segment))]
            assert segment[0] // IDS_PER_DOCUMENT == segment[-1] // IDS_PER_DOCUMENT
        is_same = first[0] // IDS_PER_DOCUMENT == second[0] // IDS_PER_DOCUMENT
        assert is_same == (label == 0)
        if is_same:
            assert first[-1] < second[0]
    # Every document is in a pair as the first, unless it is alone.
    firsts = {first[0] // IDS_PER_DOCUMENT - 1 for first, _, _ in pairs}
    assert firsts == set(range(len(lengths))) or len(lengths) == 1


@pytest.mark.parametrize("window_tokens", [1, 40, 200])
def test_windows_depend_on_documents_alone(window_tokens, monkeypatch):
    monkeypatch.setattr("tfrecord_prep.chunking.WINDOW_TOKENS", window_tokens)
    lengths = [[1 + (n * m) % 7 for m in range(1, 2 + n % 5)] for n in range(1, 24)]
    pairs = cut(lengths, 16)
    num_tokens = sum(map(sum, lengths))
    for cuts in ([5, 9, 100], [*range(0, num_tokens, 3)], [num_tokens, num_tokens]):
        assert cut(lengths, 16, cuts) == pairs
    distances = {abs(first[0] - second[0]) // IDS_PER_DOCUMENT for first, second, label in pairs if label}
    assert max(distances) <= 4 if window_tokens == 1 else max(distances) > 1


def test_half_of_a_hundred_thousand_pairs_are_random():
    """Every sentence is one token, so that a chunk has one only at the end of a document."""
    ids = np.arange(12_000, dtype=np.int32) % 90 + 5
    batches = [TokenBatch(ids, np.array([12_000]), 1, np.arange(12_000) + 1)] * 150
    labels = np.concatenate([rows.next_sentence_labels for rows in cut_segment_pairs(batches, FRAMING, 32)])
    assert len(labels) > 100_000
    assert abs(labels[:100_000].mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two!  Three? four\nFive", ["One.", "Two!", "Three? four", "Five"]),
        ('He said "No." (Really…) Yes', ['He said "No."', "(Really…)", "Yes"]),
        ("„Ja.“ Er ging.", ["„Ja.“", "Er ging."]),
        ("»Nein!« »Doch?« Sie »lacht.« leise", ["»Nein!«", "»Doch?«", "Sie »lacht.« leise"]),
        ("Version 3.5 of e.g. this. 42 more", ["Version 3.5 of e.g. this.", "42 more"]),
        ("天地。「玄黃。」宇宙", ["天地。", "「玄黃。」", "宇宙"]),
        ("यह है। वह भी", ["यह है।", "वह भी"]),
        (" \n\t\n", [""]),
    ],
)
def test_sentences(text, sentences):
    assert sentences_of(text, "punctuation") == sentences
    assert sentences_of(text, "line") == [line.strip() for line in text.split("\n") if line.strip()] or sentences == [
        ""
    ]


def test_a_partition_of_pairs(tmp_path):
    """Sentences come from the text, a blank document gives none, and what is counted is what is written."""
    documents = ["10 11 12\n13 14", "  \n ", "20 21\n\n22 23 24 25"]
    settings_of_pairs = split_work(tmp_path, chunking="segment_pairs", sentences_by="line", shard_size=64)
    result = build_partition(0, documents, settings_of_pairs)
    (shard,) = result.shards
    records = list(read_records((tmp_path / shard.name).read_bytes()))
    sentences = {(10, 11, 12), (13, 14), (20, 21), (22, 23, 24, 25)}
    labels = []
    for record in records:
        row = decode_feature(record, "input_ids").tolist()
        labels += decode_feature(record, "next_sentence_label").tolist()
        text = "".join(map(chr, row)).rstrip(chr(PAD))
        segments = [tuple(map(ord, segment)) for segment in text.strip(chr(CLS)).split(chr(SEP))[:2]]
        joined = {a + b for a in sentences for b in sentences}
        assert set(segments) <= sentences | joined
        # Which the tutorial's reader reads, too, and ours as rows of a masked language model.
        spec = {name: tf.io.FixedLenFeature((16,), tf.int64) for name in ("input_ids", "attention_mask")}
        assert tf.io.parse_single_example(record, spec)["input_ids"].numpy().tolist() == row
    totals = result.totals
    assert (totals.num_documents, totals.num_blank_documents, totals.num_rows) == (3, 1, len(records))
    assert (totals.num_random_pairs, totals.num_documents_without_pair) == (sum(labels), 0)
    alone = build_partition(1, ["10 11 12"], settings_of_pairs)
    assert (alone.shards, alone.totals.num_documents_without_pair, alone.totals.num_rows) == ((), 1, 0)


def test_the_command_writes_pairs(pair_shards, run):
    source, out = pair_shards.parent, pair_shards
    pair_flags = ("--chunking", "segment_pairs", "--validation-percent", "20")
    manifest = read_manifest(str(out / "train"))
    assert (manifest.chunking, manifest.sentences_by) == ("segment_pairs", "punctuation")
    assert manifest.totals.num_rows > manifest.totals.num_random_pairs > 0
    refused = run(main, *flags(source, out, *pair_flags, "--sentences-by", "line"))
    assert "sentences_by is 'punctuation' there, but 'line' is requested" in refused.error


def test_random_share(pair_shards, tmp_path, run):
    made = run(main, *flags(pair_shards.parent, tmp_path), "--chunking", "segment_pairs", "--random-share", "0")
    in_order, usual = read_manifest(str(tmp_path / "train")), read_manifest(str(pair_shards / "train"))
    assert f"  pairs               {in_order.totals.num_rows}, " in made.out
    assert in_order.random_share == 0
    assert in_order.totals.num_random_pairs / in_order.totals.num_rows < 0.8 * (
        usual.totals.num_random_pairs / usual.totals.num_rows
    )
