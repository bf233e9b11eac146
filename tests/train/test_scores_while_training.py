"""Scores at each evaluation, and checkpoints after numbers of words."""

import time
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfApi

from mlm_common.tokenizer import load_tokenizer, special_token_ids, word_starts
from tests.fixtures.results import read_json, write_jsonl
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_corpus import DOCUMENTS
from tests.fixtures.tiny_run import NUM_STEPS, run_flags
from tfrecord_prep.manifest import open_shards, read_manifest
from train.loop.trainer import Trainer
from train.publishing.saved_model import read_saved_model
from train.run_mlm import main
from train.score_mlm import main as score
from train.scoring.pairs import Pair
from train.scoring.queries import Answers
from train.scoring.sample import draw_sample, rows_from_all_over, word_spans

REPO = "alice/baby"


@pytest.fixture
def pairs(tmp_path) -> Path:
    words = ["corpus", "small", "many", "rows"]
    orders = [(first, second) for first in words for second in words[:2] if first != second]
    rows = ({"sentence_good": f"{first} {second}", "sentence_bad": f"{second} {first}"} for first, second in orders)
    return write_jsonl(tmp_path / "pairs.jsonl", *rows)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_scores_are_logged_with_each_evaluation_and_those_of_the_export(shards, pairs, run, tmp_path):
    flags = run_flags(shards, tmp_path / "run", "--score-pairs", str(pairs), "--score-words", "5")
    assert main(flags) == 0
    evaluations = logged(tmp_path / "run", "validation")
    assert [line["step"] for line in evaluations] == [3, NUM_STEPS]
    assert all(0 <= line["word_accuracy"] <= 1 and line["bits_per_byte"] > 0 for line in evaluations)
    output = tmp_path / "scores.json"
    flags = ("--minimal-pairs", pairs, "--random-networks", "2", "--output", output)
    assert run(score, "--model", tmp_path / "run", *flags).status == 0
    scores = read_json(output)["scores"][str(tmp_path / "run")]
    assert evaluations[-1]["pairs_accuracy"] == pytest.approx(scores["pairs"]["value"])


def test_words_of_rows_are_asked_for_whole(shards):
    tokenizer, of_split = load_tokenizer(str(shards / "train" / "tokenizer")), open_shards(str(shards / "validation"))
    starts = word_starts(tokenizer)
    assert starts is not None
    special = np.isin(np.arange(len(starts)), list(special_token_ids(tokenizer)))
    rows = rows_from_all_over(of_split, 10**6)
    assert len(rows) == of_split.num_rows
    assert len(rows_from_all_over(of_split, 3)) == 3
    for row in rows:
        for first, stop in word_spans(row, starts, special):
            assert not special[row[first:stop]].any()
            assert not starts[row[first + 1 : stop]].any()
            assert starts[row[first]] or special[row[first - 1]]
            assert starts[row[stop]] or special[row[stop]]
    sample = draw_sample([], 20, of_split, tokenizer, len(rows[0]))
    assert [query.item for query in sample.word_queries] == list(range(len(sample.word_bytes)))
    for query in sample.word_queries:
        targets = [token_query.targets[0] for token_query in sample.token_queries if token_query.item == query.item]
        assert targets == query.targets
        text = tokenizer.decode(query.targets).strip()
        first = query.positions[0]
        has_space = first == 0 or not special[query.ids[first - 1]]  # which a document's first word has not
        assert sample.word_bytes[query.item] == len(text.encode()) + has_space


def test_pairs_of_equal_sentences_are_half_right_in_a_run(shards):
    tokenizer = load_tokenizer(str(shards / "train" / "tokenizer"))
    pairs = [Pair("a corpus", "a corpus", "", ""), Pair("small words", "words small", "", "")]

    def answer(queries, *_):
        nats = np.array([query.item == 3 for query in queries], float)  # the good one is the more probable
        return Answers(nats, np.zeros(len(queries), np.int32))

    for some, expected in ((pairs, 0.75), (pairs[:1], 0.5)):
        sample = draw_sample(some, 0, None, tokenizer, 30)
        assert sample.figures(answer, 30, 100) == {"pairs_accuracy": expected}


@pytest.mark.usefixtures("one_device", "eagerly")
@pytest.mark.slow
def test_checkpoints_after_words_are_exported_and_pushed_once_while_the_run_goes(
    shards, tmp_path, hub_here, run, monkeypatch
):
    totals = read_manifest(str(shards / "train")).totals
    words_per_step = totals.num_words * 4 / totals.num_rows
    first, second = wanted = [str(round(words_per_step * step)) for step in (1, 4)]
    words = tmp_path / "run" / "words"
    exported: list[str] = []
    is_killed = True

    def read(path):
        exported.append(Path(path).stem)
        if len(exported) == 2:
            raise OSError("the bucket is away")
        return read_saved_model(path)

    def evaluate(trainer, stop):
        if is_killed and trainer.model.optimizer.iterations.numpy() == NUM_STEPS:
            raise KeyboardInterrupt
        for _ in range(6000):  # the run is not over, and yet the first one is complete
            if (words / f"chck_{first}.json").exists():
                break
            time.sleep(0.01)
        return evaluate_as_ever(trainer, stop)

    evaluate_as_ever = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    monkeypatch.setattr("train.publishing.saved_model.read_saved_model", read)
    flags = ("--save-at-words", *wanted, "--hub-model-id", REPO, "--keep-checkpoints", "1")
    assert run(main, *run_flags(shards, tmp_path / "run", *flags)).status != 0
    weights_of_first = hub_here.files(REPO, revision=f"chck_{first}")["model.safetensors"]
    assert not (words / f"chck_{second}").exists()
    is_killed = False
    for _ in range(2):
        assert main(run_flags(shards, tmp_path / "run", *flags)) == 0
    assert exported == ["step-00000001", "step-00000004", "step-00000004"]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")}
    assert {"step-00000001.json", "step-00000004.json"} <= kept
    weights = [hub_here.files(REPO)["model.safetensors"], weights_of_first]
    for step, branch in zip((1, 4), (f"chck_{num_words}" for num_words in wanted), strict=True):
        weights.append(hub_here.files(REPO, revision=branch)["model.safetensors"])
        assert weights[-1] == (words / branch / "model.safetensors").read_bytes()
        commits = HfApi().list_repo_commits(REPO, revision=branch)
        assert [commit.title for commit in commits].count(f"Step {step}") == 1
    assert len(set(weights)) == 3


def test_words_are_counted_by_white_space(shards):
    counted = sum(read_manifest(str(shards / split)).totals.num_words for split in ("train", "validation"))
    assert counted == sum(len(document.split()) for document in DOCUMENTS)
