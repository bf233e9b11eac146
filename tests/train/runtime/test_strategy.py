"""Connecting to devices that are not ready, and to those that never will be."""

import json
import urllib.error
from typing import Any

import pytest
import tensorflow as tf

from mlm_common.errors import InputError, PermanentError, RunFailedError
from train.config.settings import HardwareConfig
from train.runtime import strategy
from train.runtime.machines import Cluster, read_cluster

LOCAL = HardwareConfig(tpu_name="local")
NOT_FOUND = tf.errors.NotFoundError(None, None, "TPUs not found in the cluster. Failed in initialization: No matching")


def connect_failing_by(error: Exception, monkeypatch: pytest.MonkeyPatch, package: str = "tensorflow-tpu") -> str:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", lambda **_: None)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", fail)
    monkeypatch.setattr(strategy, "distributions", lambda name: [name] if name == package else [])
    with pytest.raises((InputError, RunFailedError), match="--tpu-name must name a TPU that can be reached") as caught:
        strategy.connect(LOCAL, Cluster())
    assert not isinstance(caught.value, PermanentError)
    return caught.type.__name__


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "failed to connect to all addresses"),
        tf.errors.AbortedError(None, None, "The TPU is already in use by process with pid 22589."),
        tf.errors.DeadlineExceededError(None, None, "Deadline Exceeded"),
        RuntimeError('TPU "my-tpu" is not yet ready; state: "CREATING"'),
        ValueError("Could not lookup TPU metadata from name 'my-tpu'. Exception: <HttpError 404 when requesting>"),
        urllib.error.URLError("Connection refused"),
        NOT_FOUND,
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_tpu_that_is_not_ready_may_be_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_failing_by(error, monkeypatch) == "RunFailedError"


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.PermissionDeniedError(None, None, "Permission 'tpu.nodes.get' denied"),
        ValueError("Could not lookup TPU metadata from name 'my-tpu'. Exception: <HttpError 403 when requesting>"),
        RuntimeError("Missing runtime dependency on the Google API client."),
        ImportError("libtpu"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_tpu_that_is_refused_is_bad_input(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_failing_by(error, monkeypatch) == "InputError"


def test_a_tensorflow_without_tpus_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_failing_by(NOT_FOUND, monkeypatch, package="tensorflow") == "InputError"


def test_workers_that_are_not_there_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise tf.errors.DeadlineExceededError(None, None, "Barrier timed out")

    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", fail)
    with pytest.raises(RunFailedError, match="TF_CONFIG must name workers that reach each other"):
        strategy.connect(HardwareConfig(), read_cluster())


@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"bfloat16": True}, {"tpu_layers": "on"}])
def test_what_xla_compiles_is_refused_on_several_cpus(settings: dict[str, Any]) -> None:
    assert strategy.connect(HardwareConfig(), Cluster()).num_replicas_in_sync == 2
    with pytest.raises(InputError, match="single CPU: XLA adds up nothing over several; received 2 CPU replicas"):
        strategy.connect(HardwareConfig(**settings), Cluster())


@pytest.mark.parametrize("settings", [{"jit_compile": True}, {"bfloat16": True}, {"tpu_layers": "on"}])
def test_the_build_for_tpus_compiles_nothing_for_a_cpu(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "distributions", lambda name: [name] if name == "tensorflow-tpu" else [])
    assert strategy.compiles_with_xla(HardwareConfig()) is False
    with pytest.raises(InputError, match=r"need a TPU where TensorFlow is tensorflow-tpu.* --extra cpu"):
        strategy.connect(HardwareConfig(**settings), Cluster())
