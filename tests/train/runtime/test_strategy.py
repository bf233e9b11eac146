"""Devices that are not ready, or never will be: one line, and whether to try again."""

import json
import re
import threading
import urllib.error
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from mlm_common.errors import InputError, PermanentError, RunFailedError
from tests.fixtures.tiny_steps import two_cpus
from train.config.settings import HardwareConfig
from train.runtime import strategy
from train.runtime.machines import Cluster, read_cluster
from train.runtime.tensorflow_runtime import TensorFlowRuntime

LOCAL = HardwareConfig(tpu_name="local")
NOT_FOUND = tf.errors.NotFoundError(None, None, "TPUs not found in the cluster. Failed in initialization: No matching")
NO_SUCH_TPU = "Could not lookup TPU metadata from name 'my-tpu'. Exception: <HttpError {} when requesting>"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (RunFailedError, tf.errors.UnavailableError(None, None, "failed to connect to all addresses")),
        (RunFailedError, tf.errors.AbortedError(None, None, "The TPU is already in use by process with pid 22589.")),
        (RunFailedError, RuntimeError('TPU "my-tpu" is not yet ready; state: "CREATING"')),
        (RunFailedError, ValueError(NO_SUCH_TPU.format(404))),
        (RunFailedError, urllib.error.URLError("Connection refused")),
        (RunFailedError, NOT_FOUND),
        (InputError, NOT_FOUND),  # by a TensorFlow without TPUs
        (InputError, tf.errors.PermissionDeniedError(None, None, "Permission 'tpu.nodes.get' denied")),
        (InputError, ValueError(NO_SUCH_TPU.format(403))),
        (InputError, RuntimeError("Missing runtime dependency on the Google API client.")),
        (InputError, ImportError("libtpu")),
    ],
)
def test_a_tpu_that_is_not_ready_may_be_tried_again_and_one_that_refuses_not(kind, error, monkeypatch):
    def fail(*_, **__):
        raise error

    package = "tensorflow" if (kind, error) == (InputError, NOT_FOUND) else "tensorflow-tpu"
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", lambda **_: None)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    monkeypatch.setattr("train.runtime.machines.distributions", lambda name: [name] if name == package else [])
    with pytest.raises(kind, match="--tpu-name must name a TPU that can be reached") as caught:
        strategy.connect(LOCAL, Cluster())
    assert re.search(r"Tried: tensorflow-tpu .*, libtpu .* --runtime jax ", str(caught.value))
    assert not isinstance(caught.value, PermanentError)


def test_a_tpu_that_never_answers_is_not_waited_for_without_end(monkeypatch):
    """The error names what was tried, and the other runtime."""
    ended = threading.Event()
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", lambda **_: None)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda _: ended.wait(60))
    monkeypatch.setattr(strategy, "CONNECT_SECONDS", 0.1)
    try:
        with pytest.raises(RunFailedError, match=r"local did not answer within 0 s\. Tried: .* --runtime jax "):
            strategy.connect(LOCAL, Cluster())
    finally:
        ended.set()


class TwoWorkers:
    """A runtime whose other worker has another value, and ends as soon as it may."""

    cluster = Cluster(("a", "b"))

    def gather(self, values: np.ndarray) -> np.ndarray:
        return np.stack([values, values + 1])


def test_workers_that_disagree_say_so_whichever_ends_first(monkeypatch):
    def lost(*_):
        waits.append(1)
        raise tf.errors.UnavailableError(None, None, "Connection reset by peer")

    waits: list[int] = []
    monkeypatch.setattr(strategy, "wait_for_workers", lost)
    with pytest.raises(
        InputError, match=r"All alike\. Values that differ from the chief's on b: step\. On a, step is 3\."
    ):
        strategy.check_agreement(TwoWorkers(), {"step": 3}, rule="All alike.")
    assert waits == [1]


def test_workers_that_are_not_there_may_be_tried_again(monkeypatch):
    def fail():
        raise tf.errors.DeadlineExceededError(None, None, "Barrier timed out")

    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", fail)
    with pytest.raises(RunFailedError, match="TF_CONFIG must name workers that reach each other"):
        strategy.connect(HardwareConfig(), read_cluster())


@pytest.fixture
def no_bfloat16_instructions(monkeypatch) -> None:
    monkeypatch.setattr("train.has_bfloat16_instructions", lambda: False)


@pytest.mark.usefixtures("no_bfloat16_instructions")
@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"bfloat16": True}, {"tpu_layers": "on"}])
def test_what_xla_compiles_needs_a_single_cpu_and_another_build_than_that_for_tpus(settings, monkeypatch):
    assert strategy.connect(HardwareConfig(), Cluster()).num_replicas_in_sync == 2
    with pytest.raises(InputError, match="single CPU, because XLA cannot sum over several CPUs; received 2 CPU"):
        strategy.connect(HardwareConfig(**settings), Cluster())
    monkeypatch.setattr("train.runtime.machines.distributions", lambda name: [name] if name == "tensorflow-tpu" else [])
    assert strategy.compiles_with_xla(HardwareConfig()) is False
    with pytest.raises(InputError, match=r"need a TPU, because the installed TensorFlow is tensorflow-tpu"):
        strategy.connect(HardwareConfig(**settings), Cluster())


@pytest.mark.usefixtures("no_bfloat16_instructions")
@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"bfloat16": True}, {"tpu_layers": "on"}])
def test_what_xla_compiles_is_refused_on_several_cpus(settings):
    assert strategy.connect(HardwareConfig(), Cluster()).num_replicas_in_sync == 2
    with pytest.raises(
        InputError, match="single CPU, because XLA cannot sum over several CPUs; received 2 CPU replicas"
    ):
        strategy.connect(HardwareConfig(**settings), Cluster())


@pytest.mark.parametrize("name", ["my-tpu", "local"])
def test_a_tpu_is_looked_up_by_name_zone_and_project_and_connected_to_unless_it_is_local(name, monkeypatch):
    calls = []

    def recording(function, result=None):
        def call(*arguments, **settings):
            calls.append((function, *arguments, *settings.items()))
            return result

        return call

    resolver, on_tpu = object(), SimpleNamespace(num_replicas_in_sync=8)
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", recording("look up", resolver))
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", recording("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", recording("initialize"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", recording("distribute", on_tpu))
    config = HardwareConfig(tpu_name=name, tpu_zone="us-west4-a", gcp_project="my-project")
    assert strategy.connect(config, Cluster()) is on_tpu
    looked_up = ("look up", ("tpu", name), ("zone", "us-west4-a"), ("project", "my-project"))
    connected = [] if name == "local" else [("connect", resolver)]
    assert calls == [looked_up, *connected, ("initialize", resolver), ("distribute", resolver)]


def test_one_worker_says_that_its_batches_are_endless(monkeypatch):
    """Several workers would otherwise ask each other before each batch whether there is one more."""
    runtime = TensorFlowRuntime(tf.distribute.OneDeviceStrategy("/device:CPU:0"))
    made = []
    monkeypatch.setattr(runtime.strategy, "distribute_datasets_from_function", made.append)
    runtime.distribute(lambda _: tf.data.Dataset.range(4).repeat().filter(lambda _: True))  # unknown cardinality
    assert made[0](tf.distribute.InputContext()).cardinality() == tf.data.INFINITE_CARDINALITY


@pytest.mark.parametrize("replicas", [lambda: tf.distribute.OneDeviceStrategy("/cpu:0"), two_cpus])
def test_no_thread_tunes_the_batches_that_wait_on_devices(replicas):
    """It can miss the end of its iterator, and the end of `fit` then waits for it, up to a minute."""
    runtime = TensorFlowRuntime(replicas())
    (iterator,) = iter(runtime.distribute(lambda _: tf.data.Dataset.range(4)))._iterators
    waiting = [on_device._dataset for on_device in iterator._iterator._device_iterators]
    assert len(waiting) == runtime.num_replicas
    assert {dataset.options().autotune.enabled for dataset in waiting} == {False}
