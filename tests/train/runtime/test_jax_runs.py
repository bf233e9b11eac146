"""What a run does beside its steps, on the runtime of JAX: the log and the weights of TensorFlow's run."""

import pytest

from tests.fixtures.finetuned_runs import run_on_one_device
from tests.fixtures.jax_devices import run_on_jax
from tests.fixtures.results import write_jsonl
from tests.fixtures.same_run import assert_alike, logged
from tests.fixtures.tiny_mixture import WEIGHTS, mixture_flags
from tests.fixtures.tiny_pairs import PAIRS
from tests.fixtures.tiny_run import run_flags
from train.run_mlm import main

pytestmark = pytest.mark.slow

REPO = "alice/baby"


def test_a_mixture_evaluates_each_source(mixture_shards, mixture_run, tmp_path):
    run_on_jax(main, mixture_flags(mixture_shards, tmp_path / "run", *WEIGHTS), 1)
    assert_alike(tmp_path / "run", mixture_run)


def test_pairs_of_segments(pair_shards, pair_run, tmp_path):
    run_on_jax(main, run_flags(pair_shards, tmp_path / "run", *PAIRS), 1)
    assert_alike(tmp_path / "run", pair_run)


def test_scores_words_pushes_and_a_profile(shards, tmp_path, hub_here):
    """On two replicas with micro-batches."""
    rows = [{"sentence_good": f"{word} corpus", "sentence_bad": f"corpus {word}"} for word in ("small", "many", "rows")]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", *rows)
    flags = ("--score-pairs", str(pairs), "--score-words", "5", "--save-at-words", "80", "150", "--log-steps", "1")
    run_on_one_device(main, run_flags(shards, tmp_path / "expected", *flags), eagerly=True)
    flags += ("--per-replica-batch-size", "1", "--gradient-accumulation-steps", "2", "--steps-per-execution", "3")
    flags += ("--hub-model-id", REPO, "--hub-strategy", "steps", "--push-steps", "2", "--profile", "2:4")
    run_on_jax(main, run_flags(shards, tmp_path / "run", *flags), 2)
    assert list((tmp_path / "run").rglob("*.xplane.pb"))
    assert_alike(tmp_path / "run", tmp_path / "expected")
    assert {"pairs_accuracy", "word_accuracy", "bits_per_byte"} <= set(logged(tmp_path / "run", "validation")[0])
    pushed, exported = hub_here.files(REPO)["model.safetensors"], tmp_path / "run" / "export" / "model.safetensors"
    assert pushed == exported.read_bytes()
    assert len(hub_here.repository(REPO)["commits"]) > 2


def test_bfloat16_on_tpu_layers_of_a_model_that_grows_and_saves_by_the_clock(shards, jax_run, tmp_path):
    larger = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64"
    flags = ("--bfloat16", "--tpu-layers", "on", "--optimizer", "lamb")
    flags += ("--init-from", str(jax_run / "export"), "--grow", "--config-overrides", larger)
    run_on_one_device(main, run_flags(shards, tmp_path / "expected", *flags))
    run_on_jax(main, run_flags(shards, tmp_path / "run", *flags, "--save-minutes", "0.001"), 1)
    assert_alike(tmp_path / "run", tmp_path / "expected", 2e-2)
    assert len(list((tmp_path / "run" / "checkpoints").glob("*.json"))) > 1
