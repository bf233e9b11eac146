"""Two workers on loopback train the model of one process, on each runtime."""

import functools
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlm_common.errors import EXIT_STOPPED
from tests.campaign.processes import Processes
from tests.fixtures.arrays import assert_same_arrays
from tests.fixtures.finetuned_runs import run_on_one_device
from tests.fixtures.jax_devices import run_on_jax
from tests.fixtures.results import read_json
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_phases import phases_flags, phases_with
from tests.fixtures.tiny_run import NUM_STEPS, forget_checkpoint, run_flags
from tests.fixtures.two_workers import finish, start_workers
from tests.servers.fixtures import HubHandle
from train.run_mlm import main

pytestmark = pytest.mark.slow

# With dropout, whose draws depend on the row and not on the replica.
# Two kernels just large enough to be divided, and dropout, whose draws depend on the row and not on the replica.
MODEL = "num_hidden_layers=1,hidden_size=128,num_attention_heads=2,intermediate_size=512"
WITH_DROPOUT = f"{MODEL},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1"
SHARED = ("--config-overrides", WITH_DROPOUT, "--max-grad-norm", "0.5", "--warmup-steps", "2", "--score-words", "20")
# Of a step of 8 rows.
OF_WORKERS = {
    "tensorflow": ("--per-replica-batch-size", "2", "--gradient-accumulation-steps", "2"),
    "jax": ("--runtime", "jax", "--per-replica-batch-size", "1"),
}
NUM_DEVICES = 4  # of each worker, with JAX


@pytest.fixture(scope="module", params=OF_WORKERS)
def runtime(request):
    return request.param


@pytest.fixture(scope="module")
def of_workers(runtime):
    """The flags of each worker."""
    return (*SHARED, *OF_WORKERS[runtime])


@pytest.fixture(scope="module")
def hub_of_two(hub_process, tmp_path_factory):
    return HubHandle(hub_process, tmp_path_factory.mktemp("hf-home"))


@pytest.fixture(scope="module")
def processes(hub_of_two, tmp_path_factory):
    with Processes(tmp_path_factory.mktemp("workers"), hub_of_two.environment) as processes:
        yield processes


@pytest.fixture(scope="module")
def start(processes):
    return functools.partial(start_workers, processes, num_devices=NUM_DEVICES)


@pytest.fixture(scope="module")
def folder_of_two(start, hub_of_two, shards, of_workers, tmp_path_factory):
    """The folder of a run of two workers to its end, and what they printed.

    Each has half of the optimizer. The other worker ends only after the chief's push, which is slow: TensorFlow says
    after ten seconds that a worker which has ended has crashed.
    """
    hub_of_two.reset()
    hub_of_two.fault("commit/main", method="POST", mode="delay", delay_seconds=12.0)
    folder = tmp_path_factory.mktemp("two") / "run"
    flags = run_flags(shards, folder, *of_workers, "--shard-optimizer", "--hub-model-id", "alice/two")
    workers = start(flags, flags)
    workers[1].wait()
    repository = hub_of_two.repository("alice/two") or {"commits": []}
    ended = finish_well(workers)
    assert len(repository["commits"]) > 1, "the other worker ended before the chief's push"
    return folder, ended


@pytest.fixture(scope="module")
def folder_of_one(shards, runtime, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    if runtime == "jax":
        run_on_jax(main, run_flags(shards, folder, *SHARED, "--per-replica-batch-size", "1"), 2 * NUM_DEVICES)
    else:
        run_on_one_device(main, run_flags(shards, folder, *SHARED, "--per-replica-batch-size", "8"))
    return folder


def finish_well(workers):
    ended = finish(workers)
    assert [status for status, _, _ in ended] == [0, 0], ended[0][2][-3000:] + ended[1][2][-3000:]
    return ended


def weights(folder):
    arrays = load_file(folder / "export" / "model.safetensors")
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


def figures(folder, split):
    names = ("step", "loss", "masked_accuracy", "num_masked_tokens", "grad_norm", "learning_rate", "bits_per_byte")
    lines = logged(folder, split)
    return [{name: line[name] for name in names if name in line} for line in lines]


def test_two_workers_train_the_model_of_one_process(folder_of_two, folder_of_one, runtime):
    """Though each of them has half of the moments of two kernels."""
    folder, _ = folder_of_two
    assert read_json(folder / "run.json")["computation"]["shard_optimizer"]
    np.testing.assert_allclose(weights(folder), weights(folder_of_one), atol=2e-5)
    newest = [load_file(run / "checkpoints" / f"step-{NUM_STEPS:08d}.safetensors") for run in (folder, folder_of_one)]
    assert_same_arrays(*newest, rtol=1e-4, atol=2e-5)
    for split in ("train", "validation"):
        expected = figures(folder_of_one, split)
        assert len(expected) >= 2
        for line, expected_line in zip(figures(folder, split), expected, strict=True):
            assert line == pytest.approx(expected_line, rel=1e-4 if runtime == "tensorflow" else 1e-5)


def test_only_the_chief_writes_prints_and_pushes(folder_of_two, folder_of_one, hub_of_two):
    folder, ((_, chiefs_output, chiefs_errors), (_, others_output, others_errors)) = folder_of_two
    assert "validation loss" in chiefs_output
    assert others_output == ""
    assert "Compiling the first step" not in others_errors
    for errors in (chiefs_errors, others_errors):
        assert "crashed" not in errors
        assert "StartAbort" not in errors
    written = [
        {name for name in contents(run) if not name.startswith("tensorboard")} for run in (folder, folder_of_one)
    ]
    assert written[0] == written[1]
    for split in ("train", "validation"):
        assert len(list((folder / "tensorboard" / split).iterdir())) == 1
    assert hub_of_two.repository("alice/two")["commits"][1:] == [f"Pretrained for {NUM_STEPS} steps"]
    assert hub_of_two.files("alice/two")["model.safetensors"] == (folder / "export" / "model.safetensors").read_bytes()
    assert len(hub_of_two.requests(path="whoami")) == 1


def test_two_workers_resume(start, of_workers, folder_of_two, shards, tmp_path):
    shutil.copytree(folder_of_two[0], tmp_path / "run")
    forget_checkpoint(tmp_path / "run", NUM_STEPS)
    flags = run_flags(shards, tmp_path / "run", *of_workers, "--shard-optimizer")
    finish_well(start(flags, flags))
    np.testing.assert_allclose(weights(tmp_path / "run"), weights(folder_of_two[0]), atol=1e-6)


# JAX's service notices it only after 100 seconds without a heartbeat.
@pytest.mark.parametrize("runtime", ["tensorflow"], indirect=True)
def test_a_worker_ends_by_itself_after_the_other_was_killed(start, of_workers, shards, tmp_path):
    flags = run_flags(shards, tmp_path / "run", *of_workers, "--max-steps", "300", "--save-steps", "1")
    workers = start(flags, flags)
    while not list((tmp_path / "run").glob("checkpoints/step-00000002.json")):
        assert workers[0].wait(0) is None, workers[0].output
        time.sleep(0.05)
    workers[1].send(signal.SIGKILL)
    (status, _, errors), _ = finish(workers)
    assert status == 1
    assert "error: A worker was lost" in errors


@pytest.mark.usefixtures("one_device")
def test_two_workers_go_from_phase_to_phase(start, runtime, phase_shards, tmp_path):
    phases = [phase | {"max_steps": 2} for phase in phases_with()[1:]]
    flags = phases_flags(phase_shards, tmp_path / "two", phases, *(OF_WORKERS["jax"] if runtime == "jax" else ()))
    finish_well(start(flags, flags))
    assert main(phases_flags(phase_shards, tmp_path / "one", phases)) == 0
    np.testing.assert_allclose(weights(tmp_path / "two"), weights(tmp_path / "one"), atol=2e-5)


def test_two_workers_stop_together(start, of_workers, shards, tmp_path):
    """SIGTERM comes to one of them, which is not the chief, among executions of several steps."""
    extra_flags = ("--max-steps", "3000", "--save-steps", "1000", "--eval-steps", "1000", "--steps-per-execution", "8")
    flags = run_flags(shards, tmp_path / "run", *of_workers, *extra_flags)
    workers = start(flags, flags)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert workers[0].wait(0) is None, workers[0].output
        time.sleep(0.05)
    workers[1].send(signal.SIGTERM)
    for status, _, errors in finish(workers):
        assert status == EXIT_STOPPED, errors[-3000:]
        assert "Stopped (" in errors
    (record,) = (tmp_path / "run" / "checkpoints").glob("*.json")
    assert read_json(record)["step"] < 3000


def test_workers_of_different_runs_refuse_each_other(start, of_workers, shards, tmp_path):
    flags = run_flags(shards, tmp_path / "run", *of_workers)
    for status, _, errors in finish(start(flags, [*flags, "--log-steps", "5"])):
        assert status == 2
        rule = "All workers must be given the same flags and shards."
        assert f"{rule} Values that differ from the chief's on 127.0.0.1:" in errors
        assert ": --log-steps. On 127.0.0.1:" in errors


def test_a_worker_that_does_not_see_the_checkpoints_is_an_error(start, of_workers, folder_of_two, shards, tmp_path):
    shutil.copytree(folder_of_two[0], tmp_path / "run")
    chiefs, others = (run_flags(shards, tmp_path / name, *of_workers) for name in ("run", "elsewhere"))
    for status, _, errors in finish(start(chiefs, others)):
        assert status == 2
        assert "--output-dir must be a folder that all workers share" in errors
        assert "newest step. On" in errors
