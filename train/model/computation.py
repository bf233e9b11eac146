"""How a run computes its step where the flags leave that open: decided once, recorded, and kept on resuming."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from train.config.settings import RunSettings
from train.model.architectures import architecture_of
from train.model.flops import planned_step_flops
from train.runtime.plan import Plan
from train.runtime.strategy import compiles_with_xla

# From this size on, XLA compiles the steps of a run on one CPU: about 200 CPU seconds of a small model. XLA saves at
# least 4 % of them, and compiling step and evaluation takes up to 9.
MIN_COMPILED_FLOPS = 2e13


@dataclass(frozen=True)
class Computation:
    """How a step is computed.

    jit_compile: it is wrapped in `jit_compile`; a TPU compiles by itself.
    tpu_layers: its layers are those of `train.model.tpu_layers`; None where the first rows decide.
    """

    jit_compile: bool
    tpu_layers: bool | None


def choose_computation(
    config: RunSettings,
    model_config: PretrainedConfig,
    plan: Plan,
    num_predictions: int,
    recorded: Computation | None = None,
) -> Computation:
    """Choose how the steps of a plan are computed.

    Args:
        num_predictions: prediction slots of a micro-batch; 0 where the head is not a masked LM's.
        recorded: how the run was computed so far on this hardware; holds where a flag leaves it open.
    """
    jit_compile = compiles_with_xla(config.hardware)
    if jit_compile is None and recorded is not None:
        jit_compile = recorded.jit_compile
    if jit_compile is None:
        flops = planned_step_flops(model_config, plan, num_predictions)
        # XLA adds up nothing over several CPUs, and compiles a program for each length of rows.
        is_one_program = plan.num_replicas == 1 and plan.mean_length is None
        jit_compile = is_one_program and flops is not None and plan.num_phase_steps * flops >= MIN_COMPILED_FLOPS
    return Computation(jit_compile, _tpu_layers(config, model_config, jit_compile, recorded))


def _tpu_layers(
    config: RunSettings, model_config: PretrainedConfig, jit_compile: bool, recorded: Computation | None
) -> bool | None:
    hardware = config.hardware
    is_compiled = hardware.wants_tpu or jit_compile
    if hardware.tpu_layers != "auto" or not is_compiled or not architecture_of(model_config).has_tpu_layers:
        return hardware.tpu_layers == "on"
    if recorded is not None and recorded.tpu_layers is not None:
        return recorded.tpu_layers
    return None if hardware.wants_tpu else False


def describe_computation(computation: Mapping[str, Any], *, on_tpu: bool) -> str:
    """Describe how a step is computed, from a `Computation` as it is recorded."""
    layers = "TPU-optimized layers" if computation["tpu_layers"] else "reference layers"
    return f"{'compiled with XLA' if on_tpu or computation['jit_compile'] else 'without XLA'}, {layers}"
