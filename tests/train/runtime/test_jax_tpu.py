"""A machine with a TPU that JAX alone reaches, made up: the device behind it is a CPU."""

import dataclasses
import logging
import re
import shutil
from importlib.metadata import version

import pytest

from tests.fixtures.jax_devices import devices_of_jax
from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run, logged
from tests.fixtures.tiny_run import NUM_STEPS, forget_checkpoint, run_flags
from train.model.computation import Computation
from train.run_mlm import main
from train.runtime import runtime_choice

WHY = "(JAX supports the TPU, the installed TensorFlow does not)"


@pytest.fixture
def installed(tpu_machine, monkeypatch):
    """The names of the packages that reach a TPU, which a test may change."""
    tpu_machine("vfio/0 vfio/1", TPU_ACCELERATOR_TYPE="v5e-2")
    names = ["libtpu"]
    monkeypatch.setattr(runtime_choice, "is_installed", lambda wanted: bool(set(names) & set(wanted)))
    return names


def test_a_dry_run_says_which_runtime_and_why_and_that_it_saves_as_on_a_tpu(installed, shards, tmp_path, run):
    printed = run(main, *run_flags(shards, tmp_path / "run", "--dry-run")).out
    assert "The TPU is not claimed yet; assuming 2 replicas." in printed
    assert f"executed by JAX {version('jax')} {WHY}" in printed
    assert re.search(r"^save .*, and every 15 minutes$", printed, re.MULTILINE), printed
    installed.clear()
    flags = run_flags(shards, tmp_path / "run", "--dry-run")
    assert "TensorFlow (without --tpu-name local, the TPU is not used)" in run(main, *flags).out
    refusal = run(main, *flags, "--tpu-name", "local").refusal
    assert "neither tensorflow-tpu nor jax with libtpu is installed. Install one: python install.py" in refusal


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_a_run_proves_its_layers_and_resumes(shards, tmp_path, monkeypatch, caplog, capsys):
    flags = run_flags(shards, tmp_path / "run", "--dropout", "0.1", "--per-replica-batch-size", "2")
    with devices_of_jax(2), caplog.at_level(logging.INFO):
        assert main(flags) == 0
    printed = capsys.readouterr().out
    assert f"executed by JAX {version('jax')} {WHY}" in printed
    assert "computation            compiled with XLA, TPU-optimized layers" in printed
    assert "TPU-optimized layers are used; on the first rows they give loss " in caplog.text
    assert "TPU v5e-2, roberta" in printed
    record = read_json(tmp_path / "run" / "run.json")
    assert record["hardware"] == "TPU v5e-2, 2 replica(s) of JAX"
    assert record["computation"] == dataclasses.asdict(Computation(True, True))
    assert record["settings"]["hardware"]["tpu_name"] == "local"

    monkeypatch.setattr("train.step.proofs.prove_tpu_layers", lambda *_: pytest.fail("the layers were compared"))
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    forget_checkpoint(tmp_path / "run", NUM_STEPS)
    with devices_of_jax(2):
        assert main(flags) == 0
    printed = capsys.readouterr().out
    assert "because of --" not in printed
    assert "ms a step measured, not modelled (tpu_preflight.py): TPU v5e-2" in printed
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_layers_and_a_sharded_step_that_compute_something_else_are_not_used(
    finished_run, shards, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("train.layers.tpu_layers.attend", lambda query, *_, **__: 1.1 * query)
    monkeypatch.setattr("train.step.proofs.norms_agree", lambda *_: False)
    monkeypatch.setattr("train.step.sharding.MIN_SHARDED_SIZE", 512)
    with devices_of_jax(2):
        assert main(run_flags(shards, tmp_path / "run", "--shard-optimizer")) == 0
    assert "The run trains with the REFERENCE LAYERS: the TPU-optimized ones give loss " in caplog.text
    assert "The run trains WITHOUT --shard-optimizer: a sharded step differs on the first rows" in caplog.text
    record = read_json(tmp_path / "run" / "run.json")
    assert record["computation"] == dataclasses.asdict(Computation(True, False))
    losses = [[line["loss"] for line in logged(folder)] for folder in (tmp_path / "run", finished_run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
