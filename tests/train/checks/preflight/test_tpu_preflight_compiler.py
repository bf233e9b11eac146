"""The preflight with the TPU VM's compiler, by the environment that `install.py` makes, and with a newer one."""

import platform
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.fixtures.other_environments import PROJECT, installed_environment, made_environment
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_run import MODEL
from tests.fixtures.tiny_steps import LENGTH, RULE, compiled_model
from train.checks.preflight.tpu_compiler import DoesNotFitError, compile_for_tpu, tpu_slice
from train.runtime.lowering import lower
from train.runtime.machines import CHIPS
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.scoring.answers import QueriedModel
from train.step import sharding
from train.step.sharding import Sharding
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.masking import MaskedRows
from train.tpu_preflight import main

HAS_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_WHEELS, reason="libtpu is for Linux on x86-64")]

NEWER = ("jax==0.10.2", "libtpu==0.0.42.*")
STEP = [
    *("--preset", "tiny-roberta-cpu", "--config-overrides", MODEL, "--bfloat16"),
    *("--max-length", "64", "--vocab-size", "500", "--max-steps", "1000"),
    *("--per-replica-batch-size", "8", "--gradient-accumulation-steps", "2"),
]
# Two arrays of 64 GiB go in; what comes out, the compiler does not count when it refuses a program.
TOO_LARGE = """
module @too_large {
  func.func @main(%arg0: tensor<17179869184xf32>, %arg1: tensor<17179869184xf32>) -> tensor<17179869184xf32> {
    %0 = stablehlo.add %arg0, %arg1 : tensor<17179869184xf32>
    return %0 : tensor<17179869184xf32>
  }
}
"""
GIB = 2**30


@pytest.fixture(autouse=True)
def _no_flags_of_the_tests(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of the environment with the extra `preflight`."""
    return str(installed_environment(tmp_path_factory, "preflight"))


def printed_by(python, *command):
    return subprocess.run([python, *command], cwd=PROJECT, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


@pytest.mark.parametrize(("topology", "num_replicas"), [("v5e-1", 1), ("v3-8", 8)])
def test_a_small_step_of_two_micro_batches(python, topology, num_replicas, capsys):
    """The first in the compiler's environment, the other one lowered in this one."""
    if topology == "v5e-1":
        printed = printed_by(python, "train/tpu_preflight.py", *STEP, "--topology", topology)
    else:
        assert main([*STEP, "--topology", topology, "--compiler-python", python]) == 0
        printed = capsys.readouterr().out
    assert re.search(r"Modelled by the TPU's compiler \(jax 0\.[67]\.\d, libtpu 0\.0\.20\)", printed)
    assert f"= {1024 * num_replicas:,} tokens" in printed
    assert "of unknown length" not in printed  # the loop over micro-batches
    assert float(re.search(r"modelled step time +([\d.]+) ms", printed)[1]) > 0
    assert 0 <= float(re.search(r"modelled MFU +([\d.]+)%", printed)[1]) < 100
    shares = {kind: float(share) for share, kind in re.findall(r"^ *([\d.]+)% +[\d.]+ M  (.+)$", printed, re.M)}
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    assert {"attention", "feed-forward", "head and loss", "optimizer", "layer norm", "masks"} <= set(shares)
    assert shares.get("other", 0) < 25  # a step this small is overhead for the most part


def test_a_newer_compiler_by_its_interpreter(tmp_path_factory, capsys):
    """It reads the steps of this environment's TensorFlow."""
    newer = made_environment(tmp_path_factory, "newer-tpu-compiler", *NEWER)
    assert main([*STEP, "--topology", "v5e-8", "--compiler-python", str(newer)]) == 0
    assert "(jax 0.10.2, libtpu 0.0.42" in capsys.readouterr().out


def test_the_benchmark_prints_its_tables(python):
    sizes = ["--num-layers=1", "--rows=8", "--length=64", "--vocab-size=1000"]
    contenders = ["--topologies", "v5e-8", "--contenders", "ours"]
    printed = printed_by(python, "benchmarks/train_step_tpu.py", *sizes, *contenders)
    # The tutorial's steps, with which the others are compared, need transformers 4.
    for line in (r"^ours( +[\d.]+){6}$", r"^attention +[\d.]+$"):
        assert re.search(line, printed, re.M), printed


def test_all_that_a_run_on_jax_executes_compiles_for_a_tpu(python, monkeypatch):
    """The evaluation, the proofs on the first rows, and scores while training; the step itself is above."""
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 512)
    network = tiny_model("roberta", num_hidden_layers=1)
    model = compiled_model(network, MaskedLanguageModeling(RULE, PAD), sharding=Sharding(8, by_xla=True))
    answers = QueriedModel(model.network, TensorFlowRuntime(tf.distribute.get_strategy()), VOCABULARY, PAD)
    rows = tf.TensorSpec((8, LENGTH), tf.int32)
    masked = MaskedRows(rows, rows, tf.TensorSpec((8, LENGTH), tf.bool))
    slots = tf.TensorSpec((16,), tf.int32)
    for function, specs in (
        (model.evaluation_step, (masked,)),
        (model.gradient_sums, ({"input_ids": rows},)),
        (model.divided_squares, ({"input_ids": rows},)),
        (answers._answer_batch, (rows, slots, slots)),
    ):
        lowered = lower(function, specs, 8)
        compiled = compile_for_tpu(lowered.stablehlo, tpu_slice("v5e-8"), python=python, what=function.__name__)
        assert compiled.memory_bytes > 0


@pytest.mark.parametrize("generation", CHIPS)
def test_the_memory_that_the_compiler_leaves_to_a_program(python, generation):
    tpu = tpu_slice(f"{generation}-8")
    with pytest.raises(DoesNotFitError) as caught:
        compile_for_tpu(TOO_LARGE, tpu, python=python)
    assert caught.value.limit_bytes / GIB == pytest.approx(tpu.chip.usable_memory_bytes / GIB, abs=0.01)
    assert caught.value.needed_bytes == 2 * 64 * GIB
