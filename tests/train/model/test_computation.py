"""How a step is computed where flags leave it open: by the hardware, the length of the run, and what it did before."""

import pytest

from tests.fixtures.plans import config_of, plan_of
from tests.fixtures.tiny_models import tiny_config
from train.model.computation import Computation, choose_computation


def chosen(*flags, num_steps=100, num_replicas=1, recorded=None, model="roberta"):
    config = config_of("--preset", "tiny-roberta-cpu", "--max-steps", num_steps, *flags)
    plan = plan_of(config, num_rows=10**9, num_replicas=num_replicas)
    return choose_computation(config, tiny_config(model), plan, recorded)


@pytest.mark.parametrize("flags", [("--jit-compile", "true"), ("--bfloat16",), ("--tpu-layers", "on")])
def test_what_asks_for_xla_is_compiled_however_short_the_run(flags, monkeypatch):
    monkeypatch.setattr("train.has_bfloat16_instructions", lambda: False)
    assert chosen(*flags, num_steps=1).jit_compile


def test_in_bfloat16_a_cpu_with_instructions_for_it_is_faster_without_xla(monkeypatch):
    monkeypatch.setattr("train.has_bfloat16_instructions", lambda: True)
    monkeypatch.setattr("train.has_accelerator", lambda: False)
    assert not chosen("--bfloat16").jit_compile
    assert chosen("--bfloat16", recorded=Computation(True, tpu_layers=False)).jit_compile
    assert chosen("--bfloat16", "--jit-compile", "true", num_steps=1).jit_compile


def test_on_a_cpu_nothing_is_compiled_unasked():
    assert chosen(num_steps=10**9) == Computation(jit_compile=False, tpu_layers=False)
    assert not chosen("--tpu-name", "local").jit_compile  # TPUStrategy compiles by itself


@pytest.mark.parametrize("was_compiled", [False, True])
def test_a_run_that_resumes_is_computed_as_it_was(was_compiled):
    recorded = Computation(was_compiled, tpu_layers=False)
    for num_steps in (1, 1000):
        assert chosen(num_steps=num_steps, recorded=recorded) == recorded
    assert chosen("--jit-compile", str(not was_compiled), recorded=recorded).jit_compile != was_compiled


def test_tpu_layers_are_compared_on_a_tpu_once():
    tpu = ("--tpu-name", "local")
    assert chosen(*tpu).tpu_layers is None
    assert chosen(*tpu, "--tpu-layers", "on").tpu_layers is True
    assert chosen(*tpu, "--tpu-layers", "off").tpu_layers is False
    assert chosen(*tpu, model="albert").tpu_layers is False  # whose layers are others
    assert chosen(*tpu, "--reference-layers").tpu_layers is False
    assert chosen(*tpu, "--reference-layers", recorded=Computation(True, tpu_layers=True)).tpu_layers is False
    for was_proven in (False, True):
        recorded = Computation(jit_compile=False, tpu_layers=was_proven)
        assert chosen(*tpu, recorded=recorded) == recorded
        assert chosen(*tpu, "--tpu-layers", "off" if was_proven else "on", recorded=recorded).tpu_layers != was_proven


def test_elsewhere_the_reference_layers_are_the_default():
    assert chosen().tpu_layers is False
    assert chosen("--tpu-layers", "on") == Computation(jit_compile=True, tpu_layers=True)
    compiled = Computation(jit_compile=True, tpu_layers=True)
    assert chosen(recorded=compiled) == compiled
    assert chosen("--jit-compile", "false", recorded=compiled) == Computation(jit_compile=False, tpu_layers=False)


def test_a_sharded_optimizer_is_compared_on_a_tpu_until_it_is_proven():
    assert chosen("--tpu-name", "local", num_replicas=8).shard_optimizer is False
    flags = ("--tpu-name", "local", "--shard-optimizer")
    assert chosen(*flags, num_replicas=8).shard_optimizer is None
    assert chosen(*flags, num_replicas=1).shard_optimizer is False
    for was_proven in (False, True):
        recorded = Computation(jit_compile=False, tpu_layers=False, shard_optimizer=was_proven)
        assert chosen(*flags, num_replicas=8, recorded=recorded).shard_optimizer is (was_proven or None)
    assert chosen("--shard-optimizer", num_replicas=2).shard_optimizer is True
