"""Report the measured time of a step on a TPU, together with the compiler's estimate."""

from collections.abc import Mapping

from mlm_common.cli.console import counted
from train.config.settings import RunSettings
from train.runtime.plan import Plan

# Installed libraries that influence the time of a step.
LIBRARIES = ("tensorflow", "tensorflow-tpu", "jax", "libtpu")


def describe_step_time(
    seconds: float, config: RunSettings, plan: Plan, *, what: str, versions: Mapping[str, str]
) -> str:
    """Return a line with the mean time of a step, and with everything that this time depends on.

    Args:
        seconds: mean time of a step, without evaluations and without the first step.
        config: the settings of the run.
        plan: the plan of the phase.
        what: description of the device, the model, and how the model is computed.
        versions: versions of the installed packages, as in the run's record.
    """
    rows, hardware = config.optimization.per_replica_batch_size, config.hardware
    measured, modelled_ms = f"{seconds * 1e3:.3g} ms a step measured", hardware.modelled_step_ms
    if modelled_ms is None:
        modelled = "not modelled (tpu_preflight.py)"
    else:
        modelled = f"{modelled_ms:.3g} ms modelled, measured / modelled {seconds * 1e3 / modelled_ms:.2f}"
    precision = "bfloat16" if hardware.bfloat16 else "float32"
    micro_batches, replicas = counted(plan.num_micro_batches, "micro-batch"), counted(plan.num_replicas, "replica")
    step = f"{rows} rows x {plan.max_length:,} tokens x {micro_batches} x {replicas}"
    libraries = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    return f"{measured}, {modelled}: {what}, {precision}, {step}, --runtime {hardware.runtime}, {libraries}"
