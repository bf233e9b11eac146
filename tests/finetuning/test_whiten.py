"""The recipe that whitens vectors: what the layer computes, and that training starts from it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from finetuning.run_embedding import main as train
from finetuning.tasks.vectors import TextEncoder
from mlm_common.errors import InputError
from recipes.whiten import SMOOTHING, main, read_passages, whitening
from tests.finetuning.tasks.test_beir import CORPUS, QRELS, QUERIES, write_beir
from tests.fixtures.results import write_jsonl
from tests.fixtures.tiny_texts import embedding_flags, rows_of, write_rows


def test_whitened_vectors_are_uncorrelated():
    draw = np.random.default_rng(1)
    states = draw.normal(size=(500, 6)) @ draw.normal(size=(6, 6)) + 9
    kernel, bias = whitening(states)
    whitened = states @ kernel + bias
    np.testing.assert_allclose(whitened.mean(axis=0), 0, atol=1e-9)
    covariance = np.cov(whitened.T, bias=True)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-9)
    deviations = np.sqrt(np.linalg.eigvalsh(np.cov(states.T, bias=True))[::-1])
    expected = deviations / (deviations + SMOOTHING * deviations.mean())
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), expected, rtol=1e-6)


def test_repeated_texts_count_once(tiny_start, tmp_path, run):
    (tmp_path / "texts.txt").write_text("one\ntwo\n" * 20, encoding="utf-8")
    flags = (tiny_start / "start", tmp_path / "texts.txt", tmp_path / "white", "--max-seq-length", "30")
    refused = run(main, *flags).refusal
    assert "CORPUS must have more than 32 texts, the width of the model; received 2 in " in refused
    assert refused.endswith(f"{tmp_path}/texts.txt, counting repeated texts once.")


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_training_starts_from_the_whitened_vectors(tiny_start, tmp_path, run):
    texts = [row["passage"] for row in rows_of("train")]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    flags = (tiny_start / "start", tmp_path / "texts.txt", tmp_path / "white", "--max-seq-length", "30")
    outcome = run(main, *flags)
    assert outcome.status == 0, outcome.err
    vectors = TextEncoder.open(str(tmp_path / "white")).encode(texts, "", 7)
    assert np.linalg.norm(vectors.mean(axis=0)) < 0.2
    extra_flags = ("--embedding-dim", "32", "--max-steps", "1", "--learning-rate", "1e-12", "--no-baselines")
    assert train(embedding_flags(tmp_path / "white", write_rows(tmp_path / "rows"), *extra_flags)) == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("white", "rows/run/export"))
    np.testing.assert_allclose(after["custom_head.dense.weight"], before["custom_head.dense.weight"], atol=1e-6)
    too_long = run(main, *flags[:-1], "31").error
    assert f"--max-seq-length must be at most 30, the longest row that {flags[0]} can take; received 31." in too_long


def test_training_files_are_read_for_their_passages(tmp_path):
    beir = write_beir(tmp_path / "beir", [*CORPUS, {"_id": "d3", "text": ""}], QUERIES, QRELS)
    assert read_passages(str(beir)) == ["A cat", "dog"]
    paragraphs = [{"context": "one", "qas": []}, {"context": "two"}, {"context": "one"}, {"context": " "}]
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    assert read_passages(str(squad)) == ["one", "two"]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", {"query": "q", "passage": "p", "negative": "n"})
    assert read_passages(str(pairs)) == ["p", "n"]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", {"title": "t", "text": "x"}, {"title": "t", "text": "x"})
    assert read_passages(str(corpus)) == ["t x"]
    with pytest.raises(InputError, match="there is no file"):
        read_passages(str(tmp_path / "missing.jsonl"))
    labels = write_jsonl(tmp_path / "nli.jsonl", {"a": "q", "b": "p", "label": "n"})
    with pytest.raises(InputError, match="there is no column text"):
        read_passages(str(labels))
