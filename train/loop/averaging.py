"""The mean of a run's checkpoints, evaluated as the run evaluates.

Weights of the end of a run, averaged, often have a lower loss than the last ones (Izmailov et al. 2018), as long as the
learning rate has not yet decayed.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlm_common.errors import InputError
from train.config.settings import SUBJECTS, TrainingConfig
from train.loop.lifecycle import Pretraining
from train.loop.trainer import build_trainer
from train.metrics.log import VALIDATION
from train.publishing.saved_model import SavedModel, read_saved_model
from train.runtime.machines import Cluster
from train.runtime.preemption import StopRequest
from train.runtime.strategy import connect

logger = logging.getLogger(__name__)


def average_checkpoints(paths: Sequence[str], tokenizer: str | None) -> tuple[SavedModel, str]:
    """Average the weights of checkpoints of one phase of a run; evaluate the mean on the run's validation rows.

    Return the model, with the log of the last checkpoint and the evaluation, and a line on how it compares with it.
    """
    checkpoints = sorted((read_saved_model(path, tokenizer) for path in paths), key=lambda one: one.snapshot.step)
    of_run = {(one.run_folder and one.run_folder.path, str(one.record and one.record["plan"])) for one in checkpoints}
    steps = [one.snapshot.step for one in checkpoints]
    if len(of_run) != 1 or checkpoints[0].record is None or len(set(steps)) < 2:
        raise InputError(f"--average needs different checkpoints of one phase of one run; received {' '.join(paths)}.")
    last = checkpoints[-1]
    means = {
        # In float64, so that the mean of equal weights is that weight.
        name: np.mean([one.snapshot.arrays[name] for one in checkpoints], axis=0, dtype=np.float64).astype(array.dtype)
        for name, array in last.snapshot.arrays.items()
    }
    assert last.record is not None
    last.record["averaged_steps"] = steps
    lines = [line for line in last.snapshot.metrics if (line["step"], line["split"]) != (steps[-1], VALIDATION)]
    before = next((line for line in last.snapshot.metrics if line not in lines), None)
    told = f"average of the steps {', '.join(f'{step:,}' for step in steps)}"
    if figures := _evaluate(last, means):
        lines.append({"step": steps[-1], "split": VALIDATION, **figures})
        told += f": validation loss {figures['loss']:.4f}"
        told += f"; {before['loss']:.4f} at step {steps[-1]:,}" if before else ""
    return replace(last, snapshot=replace(last.snapshot, arrays=means, metrics=lines)), told


def _evaluate(saved: SavedModel, weights: dict[str, np.ndarray]) -> dict[str, float] | None:
    """Evaluate other weights of a run's model; None where the run has no validation rows."""
    assert saved.record is not None
    settings = saved.record["settings"]
    # The phase is a run by itself here, on the shards that are recorded.
    here: dict[str, Any] = {"phases": None, "overwrite_output_dir": False, "report_to": []}
    settings = {**settings, "run": settings["run"] | here}
    config = TrainingConfig(*(kind(**settings[name]) for name, kind in zip(settings, SUBJECTS, strict=True)))
    run = Pretraining().open_run(config, Cluster())
    trainer = build_trainer(run, 0, connect(config.hardware, run.cluster))
    if trainer.add_up is None:
        logger.warning("The run has no --eval-dataset, so the average is not evaluated.")
        return None
    trainer.state.write(trainer.state.read() | weights)
    return trainer.evaluate(StopRequest())
