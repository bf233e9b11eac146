"""Which runtime a run has, as a table of what the machine and the environment have."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm_common.errors import InputError
from tests.fixtures.other_environments import output_of
from train import ONEDNN_VARIABLE
from train.config.hardware import HardwareConfig
from train.runtime import runtime_choice
from train.runtime.machines import Cluster
from train.runtime.runtime_choice import (
    Installed,
    choose_runtime,
    jax_devices,
    let_tensorflow_free_memory,
    look,
)

TPU_BY_NAME = {"tpu_name": "pod"}
LOCAL = {"tpu_name": "local"}


@pytest.mark.parametrize(
    ("settings", "device", "tensorflow_has_it", "jax_has_it", "runtime", "tpu_name"),
    [
        ({}, "CPU", True, True, "tensorflow", None),
        ({}, "GPU", True, True, "tensorflow", None),
        ({}, "GPU", False, True, "jax", None),
        ({}, "GPU", False, False, "tensorflow", None),
        ({}, "TPU", False, True, "jax", "local"),
        ({}, "TPU", True, True, "tensorflow", None),
        ({}, "TPU", False, False, "tensorflow", None),
        (LOCAL, "TPU", True, True, "tensorflow", "local"),
        (LOCAL, "TPU", False, True, "jax", "local"),
        (LOCAL, "TPU", False, False, None, None),
        (LOCAL | {"no_tpu": True}, "CPU", True, True, "tensorflow", "local"),
        (TPU_BY_NAME, "CPU", True, True, "tensorflow", "pod"),
        ({"runtime": "tensorflow"}, "TPU", False, True, "tensorflow", None),
        ({"runtime": "jax"}, "CPU", True, True, "jax", None),
        ({"runtime": "jax"}, "TPU", False, True, "jax", "local"),
        ({"runtime": "jax"} | LOCAL, "TPU", False, True, "jax", "local"),
    ],
)
def test_the_runtime_that_has_the_device(settings, device, tensorflow_has_it, jax_has_it, runtime, tpu_name):
    installed = Installed(device, tensorflow_has_it, True, jax_has_it)
    config = HardwareConfig(**settings)
    if runtime is None:
        with pytest.raises(InputError, match=r"neither tensorflow-tpu nor jax with libtpu .*--extra jax-tpu"):
            choose_runtime(config, lambda _: installed)
        return
    chosen, reason = choose_runtime(config, lambda _: installed)
    assert (chosen.runtime, chosen.tpu_name, bool(reason)) == (runtime, tpu_name, True)
    assert choose_runtime(chosen, lambda _: installed)[0] == chosen


@pytest.mark.parametrize(
    ("settings", "installed", "refusal"),
    [
        (TPU_BY_NAME, (), "--runtime jax computes on the devices of its own machine; received --tpu-name pod"),
        ({}, (), "--runtime jax needs jax, which is not installed"),
        (LOCAL, ("jax", "libtpu", "tensorflow-tpu"), "--runtime jax needs TensorFlow for the CPU, as tensorflow-tpu"),
    ],
)
def test_a_runtime_that_cannot_be_is_refused_with_what_to_do(settings, installed, refusal, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime_choice.machines, "tpu_devices", lambda: [tmp_path] if settings == LOCAL else [])
    monkeypatch.setattr(runtime_choice, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(runtime_choice, "is_installed", lambda names: bool(set(names) & set(installed)))
    monkeypatch.setattr(runtime_choice.machines, "has_tensorflow_for_tpus", lambda: "tensorflow-tpu" in installed)
    with pytest.raises(InputError, match=refusal):
        choose_runtime(HardwareConfig(runtime="jax", **settings))


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (("jax", "libtpu"), Installed("TPU", False, True, True)),
        (("jax",), Installed("TPU", False, True, False)),
        (("tensorflow-tpu", "libtpu"), Installed("TPU", True, False, False)),
        ((), Installed("TPU", False, False, False)),
    ],
)
def test_what_reaches_the_tpu_is_found_by_its_packages(installed, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime_choice.machines, "tpu_devices", lambda: [tmp_path])
    monkeypatch.setattr(runtime_choice, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(runtime_choice, "is_installed", lambda names: bool(set(names) & set(installed)))
    monkeypatch.setattr(runtime_choice.machines, "has_tensorflow_for_tpus", lambda: "tensorflow-tpu" in installed)
    assert look(HardwareConfig()) == look(HardwareConfig(**LOCAL)) == expected
    assert look(HardwareConfig(no_tpu=True)).device == "CPU"


MEMORY_OF_A_VARIABLE = """
import sys
from pathlib import Path
import train
from train.config.hardware import HardwareConfig
from train.runtime.runtime_choice import let_tensorflow_free_memory
let_tensorflow_free_memory(HardwareConfig(runtime=sys.argv[1]))
import tensorflow as tf
from train.runtime.lowering import empty, give_memory_back

def megabytes():
    give_memory_back()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

before = megabytes()
variable = tf.Variable(tf.zeros((100, 1000, 1000)))
full = megabytes()
empty([variable])
print(full - before, megabytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_the_memory_of_variables_that_jax_has_is_given_back():
    full, emptied = map(float, output_of(Path(sys.executable), MEMORY_OF_A_VARIABLE, "jax").split())
    assert full > 390
    assert emptied < 20


def test_only_tensorflow_beside_jax_is_without_onednn(monkeypatch):
    monkeypatch.delenv(ONEDNN_VARIABLE, raising=False)
    let_tensorflow_free_memory(HardwareConfig(runtime="jax"))  # too late, as it is imported
    monkeypatch.delitem(sys.modules, "tensorflow")
    let_tensorflow_free_memory(HardwareConfig(runtime="tensorflow"))
    assert ONEDNN_VARIABLE not in os.environ
    let_tensorflow_free_memory(HardwareConfig(runtime="jax"))
    assert os.environ[ONEDNN_VARIABLE] == "0"
    monkeypatch.setenv(ONEDNN_VARIABLE, "1")
    let_tensorflow_free_memory(HardwareConfig(runtime="jax"))
    assert os.environ[ONEDNN_VARIABLE] == "1"


def test_a_tpu_that_jax_does_not_find_is_no_cpu(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(platform="cpu", process_index=0, id=0)])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(InputError, match="needs a TPU that JAX finds; JAX found only the CPU"):
        jax_devices(HardwareConfig(runtime="jax", **LOCAL), Cluster())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(jax_devices(HardwareConfig(runtime="jax", **LOCAL), Cluster())) == 1
