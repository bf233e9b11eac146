"""What is checked before a run starts, and what it leaves behind in its process."""

import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from mlm_common.errors import InputError
from tests.fixtures.tiny_run import NUM_STEPS, run_flags
from tfrecord_prep.manifest import read_manifest
from train.config.settings import HardwareConfig, parse_run_flags
from train.loop.lifecycle import Pretraining, failure_handling, locked_run_folder, prepare
from train.run_mlm import main
from train.runtime.machines import Cluster
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.step.train_step import set_precision

TPU = HardwareConfig(tpu_name="local")


@pytest.mark.parametrize("is_compiled", [True, False])
def test_models_after_a_run_in_bfloat16_compute_in_float32(is_compiled):
    run: Any = SimpleNamespace(config=SimpleNamespace(hardware=HardwareConfig()), cluster=Cluster(), folder=None)
    with failure_handling(run, TensorFlowRuntime(tf.distribute.get_strategy())):
        set_precision(bfloat16=True, is_compiled=is_compiled)
    assert tf_keras.mixed_precision.global_policy().name == "float32"
    assert not tf.config.optimizer.get_experimental_options()["auto_mixed_precision_onednn_bfloat16"]


def prepared(shards, folder, *flags):
    config = parse_run_flags(run_flags(shards, folder, "--tpu-name", "local", *flags), "")[0]
    return prepare(config, Pretraining())


@pytest.fixture
def eight_replicas(monkeypatch, tmp_path):
    """A machine that has a TPU of eight replicas."""
    monkeypatch.setattr("train.runtime.machines.tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setattr("train.runtime.machines.has_tensorflow_for_tpus", lambda: True)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")


@pytest.mark.usefixtures("eight_replicas")
def test_words_to_save_at_are_checked_for_the_replicas_of_the_tpu_before_it_is_claimed(shards, tmp_path):
    """A step takes eight times the words that it takes on one replica."""
    num_words = read_manifest(str(shards / "train")).totals.num_words
    num_rows = read_manifest(str(shards / "train")).totals.num_rows
    words_on_one = NUM_STEPS * 4 * num_words / num_rows
    run = prepared(shards, tmp_path / "run", "--save-at-words", f"{2 * words_on_one:.0f}")
    (plan,) = run.plans
    assert plan.global_batch_rows == 32
    assert list(run.phases[0].steps_at_words(plan)) == [round(NUM_STEPS / 4)]
    with pytest.raises(InputError, match=f"at most the {8 * words_on_one:,.0f} words of the run; received"):
        prepared(shards, tmp_path / "run", "--save-at-words", f"{9 * words_on_one:.0f}")


@pytest.mark.usefixtures("eight_replicas")
def test_a_batch_that_does_not_suit_the_tpu_is_refused_before_it_is_claimed(shards, tmp_path, monkeypatch):
    refusal = "--global-batch-size must be a multiple of the 32 rows that 8 replicas process at once .* received 16"
    with pytest.raises(InputError, match=refusal):
        prepared(shards, tmp_path / "run", "--global-batch-size", "16")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-4")
    assert prepared(shards, tmp_path / "run", "--global-batch-size", "16").plans[0].num_micro_batches == 1
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    monkeypatch.setattr("train.runtime.machines.read_metadata", lambda *_, **__: None)
    with pytest.raises(InputError, match=f"{refusal}.*assumes 8 replicas.*set TPU_ACCELERATOR_TYPE"):
        prepared(shards, tmp_path / "run", "--global-batch-size", "16")


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--max-steps", "5"), "The run would end after step 5, but its newest checkpoint is from step 6. Raise"),
        (("--per-replica-batch-size", "2"), "A run must resume with its global batch of 8 rows; received 4"),
    ],
)
def test_a_dry_run_refuses_what_cannot_resume_as_the_run_does(shards, finished_run, run, tmp_path, flags, refusal):
    shutil.copytree(finished_run, tmp_path / "run")
    flags = run_flags(shards, tmp_path / "run", *flags)
    assert refusal in run(main, *flags, "--dry-run").refusal
    assert refusal in run(main, *flags).refusal
    over = run(main, *flags, "--overwrite-output-dir", "--dry-run")
    assert (over.status, "resuming" in over.out) == (0, False)


def test_a_dry_run_says_where_the_run_resumes(shards, finished_run, run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    outcome = run(main, *run_flags(shards, tmp_path / "run", "--max-steps", "9", "--dry-run"))
    assert re.search(r"^start +resuming at step 6 of 9$", outcome.out, re.MULTILINE), outcome.out


def test_a_run_that_began_since_the_first_check_is_checked_under_the_lock(shards, finished_run, tmp_path, monkeypatch):
    """By another process, with a different batch."""
    monkeypatch.setattr("train.loop.run.has_cpu_alone", lambda: True)
    config = parse_run_flags(run_flags(shards, tmp_path / "run", "--per-replica-batch-size", "2"), "")[0]
    run = prepare(config, Pretraining())
    assert [plan.num_replicas for plan in run.plans] == [1]
    shutil.copytree(finished_run, tmp_path / "run", dirs_exist_ok=True)
    refusal = "A run must resume with its global batch of 8 rows; received 2"
    with pytest.raises(InputError, match=refusal), locked_run_folder(run):
        pass


def test_a_tpu_of_unknown_type_is_taken_for_that_of_the_checkpoint(shards, finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("train.runtime.machines.tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setattr("train.runtime.machines.has_tensorflow_for_tpus", lambda: True)
    monkeypatch.setattr("train.runtime.machines.read_metadata", lambda *_, **__: None)
    shutil.copytree(finished_run, tmp_path / "run")
    assert prepared(shards, tmp_path / "run").plans[0].num_replicas == 2
    with pytest.raises(InputError, match=r"A run must resume with its global batch .* assumes 2 replicas.*set"):
        prepared(shards, tmp_path / "run", "--per-replica-batch-size", "2")


@pytest.mark.parametrize(("tpu_name", "expected"), [("local", True), ("my-tpu", False), (None, False)])
def test_only_on_a_tpu_vm_is_the_metadata_server_asked_whether_the_vm_is_preempted(tpu_name, expected, monkeypatch):
    asked = []

    def listening(_, *, on_cloud_machine):
        asked.append(on_cloud_machine)
        return nullcontext()

    monkeypatch.setattr("train.loop.lifecycle.listening", listening)
    config = SimpleNamespace(hardware=HardwareConfig(tpu_name=tpu_name))
    run: Any = SimpleNamespace(config=config, cluster=Cluster(), folder=None)
    with failure_handling(run, TensorFlowRuntime(tf.distribute.get_strategy())):
        assert asked == [expected]
