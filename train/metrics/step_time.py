"""The line in which a run on a TPU says what a step took, beside what the compiler's model says."""

from collections.abc import Mapping

from train.config.settings import RunSettings
from train.runtime.plan import Plan

# Of what a run has installed, what decides how long its step takes.
LIBRARIES = ("tensorflow", "tensorflow-tpu", "jax", "libtpu")


def describe_step_time(
    seconds: float, config: RunSettings, plan: Plan, *, what: str, versions: Mapping[str, str]
) -> str:
    """Describe the mean time of a step, evaluations and the first step left out, with all that it depends on.

    what: the device, the model, and how it is computed. versions: as the run's record has them.
    """
    rows, hardware = config.optimization.per_replica_batch_size, config.hardware
    measured, modelled = f"{seconds * 1e3:.3g} ms a step measured", hardware.modelled_step_ms
    if modelled is None:
        beside = "not modelled (tpu_preflight.py)"
    else:
        beside = f"{modelled:.3g} ms modelled, measured / modelled {seconds * 1e3 / modelled:.2f}"
    precision = "bfloat16" if hardware.bfloat16 else "float32"
    step = f"{rows} rows x {plan.num_micro_batches} x {plan.num_replicas} replicas of {plan.max_length} tokens"
    libraries = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    return f"{measured}, {beside}: {what}, {precision}, {step}, --runtime {hardware.runtime}, {libraries}"
