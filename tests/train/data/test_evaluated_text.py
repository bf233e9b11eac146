"""Whatever the splits, files, copies and phases: a run is refused if and only if it evaluates on text it trains on."""

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.corpus.identity import record_of_split
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from tests.fixtures.tiny_models import tiny_tokenizer
from tfrecord_prep.manifest import Manifest, ShardRecord, ShardSet, TokenizerRecord, Totals
from train.data.shards import TrainingInputs, check_nothing_is_shared, check_phases

NUM_DOCUMENTS = 150
TOKENIZER = tiny_tokenizer()  # not looked at
# Files by text: the first of each is the original, the others are copies.
NAMES = {"a": ("a.txt", "copies/renamed.txt", "a.txt.gz", "copies/members.txt.gz"), "b": ("b.txt", "copies/b.txt.gz")}
# The whole text, or some of it drawn for `validation` and `test`.
DRAWS = st.sampled_from([(0, 0), (20, 20), (20, 20), (20, 20), (20, 0), (40, 0), (0, 20)])
Split = tuple[ShardSet, frozenset[str]]


@pytest.fixture(scope="module")
def make_split(tmp_path_factory) -> Callable[..., Split]:
    """Make what the manifest of a split says, and collect the documents that are in the split."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "copies").mkdir()
    for text, names in NAMES.items():
        lines = [f"document {number} of {text}\n".encode() for number in range(NUM_DOCUMENTS)]
        for name in names:
            members = (gzip.compress(b"".join(part)) for part in (lines[:9], lines[9:]))
            (folder / name).write_bytes(b"".join(members if name.endswith(".gz") else lines))

    @cache
    def make(names: tuple[str, ...], percents: tuple[int, int], seed: int, split_index: int, max_length: int) -> Split:
        draw = {"validation_percent": percents[0], "test_percent": percents[1], "seed": seed}
        corpus = open_corpus(CorpusConfig(data_files=[str(folder / name) for name in names], **draw))
        split = corpus.split_names[split_index % len(corpus.split_names)]
        shard = ShardRecord("s", 1, 1, 1, f"{names} {percents} {seed} {split} {max_length}")
        record = json.loads(json.dumps(record_of_split(corpus.record, split)))
        manifest = Manifest(
            split=split, max_length=max_length, chunking="packed", shard_size=1, partition_bytes=1, corpus=record,
            tokenizer=TokenizerRecord("", 1, {}), shards=(shard,), totals=Totals(1, 0, 1, 0, 1),
            unigram_entropy_nats=0.0, versions={}, bad_rows=BadRows(),
        )  # fmt: skip
        place = f"/{shard.crc32c}"
        shards = ShardSet(place, (f"{place}/s",), (1,), 1, manifest, None)
        return shards, frozenset(corpus.documents(split))

    return make


FILES = st.lists(st.sampled_from([name for names in NAMES.values() for name in names]), min_size=1, max_size=2)
MAX_LENGTHS = st.sampled_from([64, 128])


def splits(*likely_indices: int) -> st.SearchStrategy[Any]:
    """Choose arguments of `make_split`, mostly those of one draw, so that many runs are right."""
    indices = st.sampled_from([*likely_indices, 0, 1, 2])
    return st.tuples(FILES.map(tuple), DRAWS, st.sampled_from([0, 0, 0, 1]), indices, MAX_LENGTHS)


PHASES = st.tuples(splits(0, 0, 0), splits(1, 1, 1, 2, 2) | st.none())


@settings(max_examples=40)
@given(phases=st.lists(PHASES, min_size=1, max_size=3), is_reversed=st.booleans())
def test_a_run_that_evaluates_on_its_training_text_is_refused(make_split, phases, is_reversed):
    made = [(make_split(*train), make_split(*evaluation) if evaluation else None) for train, evaluation in phases]
    trained_on = frozenset[str]().union(*(documents for (_, documents), _ in made))
    evaluated_on = frozenset[str]().union(*(evaluation[1] for _, evaluation in made if evaluation))
    if is_reversed:
        made.reverse()
    refused = pytest.raises(InputError, match="--eval-dataset must not contain text of --train-dataset")
    with nullcontext() if trained_on.isdisjoint(evaluated_on) else refused:
        check(made)


def check(phases: list[tuple[Split, Split | None]]) -> None:
    """Compare the splits as a run does: those of each phase when it is opened, then the phases."""
    inputs = [TrainingInputs(train, other[0] if other else None, TOKENIZER, "", 64) for (train, _), other in phases]
    for phase_inputs in inputs:
        if phase_inputs.eval_shards is not None:
            check_nothing_is_shared(phase_inputs.train_shards, phase_inputs.eval_shards)
    check_phases(inputs)
