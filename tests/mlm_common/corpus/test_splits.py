"""The splits of a corpus, and its partitions: together exactly the documents, whatever they are made of."""

import gzip
import hashlib
import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Corpus, Source, open_corpus, read_partition
from mlm_common.errors import InputError

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=30)


def in_memory(texts: list[str], **settings) -> Corpus:
    config = CorpusConfig(**settings)
    return Corpus(config, {}, {config.split: Source(lambda _: texts)})


def write_rows(path: Path, texts: list[str]) -> str:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def in_partitions(corpus: Corpus, split: str, partition_bytes: int) -> list[str]:
    """Read the documents of all partitions, read from what a worker is sent."""
    config, partitions = pickle.loads(pickle.dumps((corpus.config, list(corpus.partitions(split, partition_bytes)))))
    return [text for partition in partitions for text in read_partition(config, split, partition)]


def split_by_formula(text: str, validation: float, test: float, seed: int) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    share = int.from_bytes(digest, "little") / 2**64
    return "validation" if share < validation / 100 else "test" if share < (validation + test) / 100 else "train"


@given(TEXTS, st.floats(0, 49.9), st.floats(0, 49.9), st.integers(0, 1 << 40), st.randoms())
def test_draw_is_a_partition_by_text(texts, validation, test, seed, random):
    corpus = in_memory(texts, validation_percent=validation, test_percent=test, seed=seed)
    documents = {split: list(corpus.documents(split)) for split in corpus.split_names}
    assert documents.keys() == {"train", *["validation"] * (validation > 0), *["test"] * (test > 0)}
    for split, drawn in documents.items():
        assert drawn == [text for text in texts if split_by_formula(text, validation, test, seed) == split]
    assert sum(map(Counter, documents.values()), Counter()) == Counter(texts)
    shuffled = in_memory(random.sample(texts, len(texts)), validation_percent=validation, test_percent=test, seed=seed)
    assert all(Counter(shuffled.documents(split)) == Counter(drawn) for split, drawn in documents.items())


def test_share_follows_the_percentages_and_the_seed():
    texts = [f"document {index}" for index in range(10_000)]
    both = [in_memory(texts, validation_percent=5, test_percent=10, seed=seed) for seed in (0, 1)]
    validation = [list(corpus.documents("validation")) for corpus in both]
    test = [list(corpus.documents("test")) for corpus in both]
    assert all(400 < len(split) < 600 for split in validation)
    assert all(850 < len(split) < 1150 for split in test)
    assert validation[0] != validation[1]
    assert not set(validation[0]) & set(test[0])
    assert validation[0] == list(in_memory(texts, validation_percent=5).documents("validation"))
    # Corpora that were drawn with another version must be drawn so again.
    assert (validation[0][:3], len(validation[0])) == (["document 9", "document 16", "document 28"], 485)


@given(TEXTS, st.integers(1, 8), st.floats(0, 49), st.floats(0, 49))
def test_limit_counts_main_documents(texts, limit, validation, test):
    settings = {"validation_percent": validation, "test_percent": test}
    unlimited, limited = in_memory(texts, **settings), in_memory(texts, limit=limit, **settings)
    assert list(limited.documents("train")) == list(unlimited.documents("train"))[:limit]
    documents = {split: list(limited.documents(split)) for split in limited.split_names}
    # The others are those that come before the last of the main documents.
    num_read = sum(map(len, documents.values()))
    assert Counter(texts[:num_read]) == sum(map(Counter, documents.values()), Counter())
    assert num_read == len(texts) or len(documents["train"]) == limit


def test_no_such_split():
    with pytest.raises(InputError, match="must be one of train, which the corpus has; received 'test'"):
        in_memory([]).documents("test")


@pytest.mark.parametrize(("num_files", "has_byte_ranges"), [(15, False), (16, True)])
def test_few_files_that_cannot_be_cut_are_read_by_the_parent(tmp_path, num_files, has_byte_ranges):
    for number in range(num_files):
        with gzip.open(tmp_path / f"{number:02}.txt.gz", "wt", encoding="utf-8") as file:
            file.writelines(f"{number} {line}\n" for line in range(200))
    corpus = open_corpus(CorpusConfig(data_files=[str(tmp_path / "*.gz")]))
    assert corpus.has_byte_ranges("train", 100) == has_byte_ranges
    partitions = list(corpus.partitions("train", 100))
    assert (len(partitions) == num_files) == has_byte_ranges
    assert in_partitions(corpus, "train", 100) == list(corpus.documents("train"))
    assert corpus.has_byte_ranges("train", 10_000), "small files come together"
