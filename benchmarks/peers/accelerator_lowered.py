"""Lower train steps for accelerator_step.py, so that they can be executed without TensorFlow.

Import `train` before this module. For a step NAME this module writes NAME.mlir.gz, NAME.npz with the initial values,
and the entry of the step in the index.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from train.checkpoints.resume import ResumePoint
from train.checks.preflight.report import open_run
from train.config.settings import parse_run_flags, parse_training_config
from train.data.pipeline import batch_spec
from train.loop.lifecycle import Pretraining
from train.loop.run import Run
from train.model.computation import planned_step_flops
from train.runtime.jax_programs import parsed
from train.runtime.lowering import lower, value_of
from train.runtime.machines import Cluster
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.step.train_step import build_model

# For larger variables only the standard deviation is stored, except in short runs, because the duration of a step does
# not depend on the values.
MAX_KEPT_VALUES = 4096


def write_base_step(folder: Path, name: str, flags: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """Write the step of a preset, as run_mlm.py builds it, for rows of random ids."""
    config, _ = parse_run_flags([*flags, "--runtime", "jax"], "")
    return _write(folder, name, open_run(config, vocab_size, 1), MAX_KEPT_VALUES)


def write_short_run(folder: Path, name: str, flags: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Write the step of a run, its initial state, and the rows of its first steps."""
    options = ("--runtime", "jax", "--max-steps", str(num_steps), "--output-dir", str(folder / "run"))  # never created
    run = Pretraining().open_run(parse_training_config([*flags, *options], ""), Cluster()).planned(1)
    (phase,) = run.phases
    batches = run.batches_from(phase, ResumePoint())(tf.distribute.InputContext()).take(num_steps)
    rows = [dict(batch) for batch in batches.as_numpy_iterator()]
    arrays = {f"rows/{feature}": np.stack([batch[feature] for batch in rows]) for feature in rows[0]}
    return _write(folder, name, run, None, arrays)


def _write(
    folder: Path, name: str, run: Run, max_kept_values: int | None, arrays: dict[str, Any] | None = None
) -> dict[str, Any]:
    (phase,), (plan,) = run.phases, run.plans
    runtime = TensorFlowRuntime(tf.distribute.get_strategy())
    model = build_model(phase.config, phase.inputs, phase.task, phase.model_config, plan, runtime)
    spec = batch_spec(phase.task.features(plan.max_length), plan.global_batch_rows)
    lowered = lower(model.train_step, (spec,), 1)
    arrays, parameters = dict(arrays or {}), []
    for number, captured in enumerate(lowered.captured):
        value = value_of(captured) if isinstance(captured, tf.Variable) else captured.numpy()
        entry = {"name": getattr(captured, "name", ""), "shape": list(value.shape), "dtype": value.dtype.name}
        if value.size > 1 and not value.any():
            entry["spread"] = 0.0
        elif max_kept_values is not None and value.size > max_kept_values:
            entry["spread"] = float(np.std(value, dtype=np.float64))
        else:
            arrays[f"parameters/{number}"] = value
        parameters.append(entry)
    with parsed(lowered.stablehlo) as module:
        text = module.operation.get_asm(enable_debug_info=True)
    (folder / f"{name}.mlir.gz").write_bytes(gzip.compress(text.encode()))
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return {
        "batch": {feature: [list(tensor.shape), tensor.dtype.name] for feature, tensor in sorted(spec.items())},
        "parameters": parameters,
        "vocab_size": phase.model_config.vocab_size,
        "flops": planned_step_flops(phase.model_config, plan, phase.num_predictions(plan)),
        "model": {**phase.model_config.to_diff_dict()},
    }
