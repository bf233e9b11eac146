"""The preflight with the TPU's compiler, in an environment that has nothing else."""

import platform
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fixtures.other_environments import made_environment
from tests.fixtures.tiny_run import MODEL
from train.checks.preflight.tpu_compiler import DoesNotFitError, check_compiler, compile_for_tpu
from train.checks.preflight.tpu_slices import tpu_slice
from train.runtime.tpu import CHIPS
from train.tpu_preflight import main

HAS_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info >= (3, 11)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_WHEELS, reason="jax and libtpu are for Linux on x86-64 and Python 3.11"),
]

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "train_step_tpu.py"
# Four TiB go in, and four come out.
TOO_LARGE = """
module @too_large {
  func.func @main(%arg0: tensor<1099511627776xf32>) -> tensor<1099511627776xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<1099511627776xf32>
    return %0 : tensor<1099511627776xf32>
  }
}
"""
GIB = 2**30


def requirements_of_the_extra():
    """What the extra `preflight` asks for."""
    found = map(Requirement, requires("mlm-pretraining") or [])
    return [f"{one.name}{one.specifier}" for one in found if one.marker and 'extra == "preflight"' in str(one.marker)]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the compiler."""
    requirements = requirements_of_the_extra()
    assert len(requirements) == 2
    interpreter = made_environment(tmp_path_factory, "tpu-compiler", *requirements)
    check_compiler(str(interpreter))
    return str(interpreter)


@pytest.mark.parametrize("topology", ["v5e-8", "v3-8"])
def test_a_small_step_of_two_micro_batches(python, topology, capsys):
    flags = ["--preset", "tiny-cpu", "--config-overrides", MODEL, "--bfloat16", "--max-length", "64"]
    flags += ["--vocab-size", "500", "--per-replica-batch-size", "8", "--gradient-accumulation-steps", "2"]
    assert main([*flags, "--topology", topology, "--max-steps", "1000", "--compiler-python", python]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Modelled by the TPU's compiler \(jax [\d.]+, libtpu [\d.]+\)", printed)
    assert "= 8,192 tokens" in printed
    assert "of unknown length" not in printed  # the loop over micro-batches
    assert float(re.search(r"modelled step time +([\d.]+) ms", printed)[1]) > 0
    assert 0 < float(re.search(r"modelled MFU +([\d.]+) %", printed)[1]) < 100
    shares = {kind: float(share) for share, kind in re.findall(r"^ *([\d.]+) % +[\d.]+ M  (.+)$", printed, re.M)}
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    assert {"attention", "feed-forward", "head and loss", "optimizer", "layer norm", "masks"} <= set(shares)
    assert shares.get("other", 0) < 25  # a step this small is overhead for the most part


def test_the_benchmark_prints_its_tables(python):
    sizes = ["--num-layers=1", "--rows=8", "--length=64", "--vocab-size=1000", f"--compiler-python={python}"]
    contenders = ["--topologies", "v5e-8", "--contenders", "tutorial-bf16", "ours"]
    command = [sys.executable, BENCHMARK, *sizes, *contenders]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Steps so small may need no temporaries; then there is no ratio of them.
    assert re.search(r"^tutorial-bf16( +[\d.]+){2} +1\.000( +[\d.]+){2}( +1\.000)?( +[\d.]+){2}$", printed, re.M), (
        printed
    )
    assert re.search(r"^ours( +[\d.]+){7,8}$", printed, re.M), printed
    assert re.search(r"^attention +[\d.]+ +[\d.]+$", printed, re.M), printed


@pytest.mark.parametrize("generation", CHIPS)
def test_the_memory_that_the_compiler_leaves_to_a_program(python, generation):
    tpu = tpu_slice(f"{generation}-8")
    with pytest.raises(DoesNotFitError) as caught:
        compile_for_tpu(TOO_LARGE, tpu, python=python)
    assert caught.value.limit_bytes / GIB == pytest.approx(tpu.chip.usable_memory_bytes / GIB, abs=0.01)
    assert caught.value.needed_bytes == 8 * 2**40
