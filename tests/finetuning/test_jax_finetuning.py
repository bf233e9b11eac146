"""Commands of fine-tuning on the runtime of JAX: the log, the scores and the weights of TensorFlow's run.

Rows of one text, of windows with two outputs, and of texts that are compared with those of all replicas.
"""

import shutil
from pathlib import Path

import pytest

from finetuning import run_classification, run_embedding, run_qa
from tests.fixtures import tiny_classification
from tests.fixtures.finetuned_runs import qa_flags, run_on_one_device
from tests.fixtures.jax_devices import run_on_jax
from tests.fixtures.results import predictions, results
from tests.fixtures.same_run import assert_alike
from tests.fixtures.tiny_texts import embedding_flags, write_rows

pytestmark = pytest.mark.slow


def assert_same_scores(folder: Path, expected: Path) -> None:
    assert_alike(folder, expected)
    scores, wanted = (
        {name: value for name, value in results(run).items() if not any(word in name for word in ("second", "runtime"))}
        for run in (folder, expected)
    )
    assert scores == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_two_replicas_classify_rows_in_buckets(tiny_start, classified, tmp_path):
    flags = tiny_classification.flags(tiny_start, tmp_path / "run", "--do-predict", "--per-replica-batch-size", "4")
    run_on_jax(run_classification.main, flags, 2)
    assert_same_scores(tmp_path / "run", classified)
    predicted = [predictions(run, "predict_results_sst2") for run in (tmp_path / "run", classified)]
    assert predicted[0] == predicted[1]


def test_questions(answered, tmp_path):
    for path in answered.iterdir():
        if path.name != "run":
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    run_on_jax(run_qa.main, qa_flags(tmp_path), 1)
    assert_same_scores(tmp_path / "run", answered / "run")


def test_embeddings_of_two_replicas_and_their_micro_batches(tiny_start, tmp_path):
    """The negatives are those of both replicas and of their micro-batches, and the gradients reach each of them.

    Random weights, a baseline, take the place of the trained ones for a while, which are exported.
    """
    write_rows(tmp_path)
    extra_flags = ("--embedding-dim", "12", "--max-steps", "6", "--schedule", "constant", "--warmup-steps", "0")
    flags = embedding_flags(tiny_start / "start", tmp_path, *extra_flags)
    run_on_one_device(run_embedding.main, [*flags, "--output-dir", str(tmp_path / "whole")])
    run_on_jax(run_embedding.main, [*flags, "--per-replica-batch-size", "2", "--gradient-accumulation-steps", "2"], 2)
    assert_same_scores(tmp_path / "run", tmp_path / "whole")
    assert any("random" in name for name in results(tmp_path / "run"))
