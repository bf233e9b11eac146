"""Send the log of a run to the trackers Weights & Biases, MLflow and Trackio, which are named as in transformers.

`trackers/NAME.json` in the run's folder contains the id of the run in the tracker, and for each split the last step
that was sent. So a resumed run continues the tracker's run and sends no step twice. After a divergence the tracker
keeps the abandoned steps.
"""

import importlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from mlm_common.errors import InputError
from mlm_common.storage import Folder
from train.config.settings import RunSettings
from train.runtime.run_folder import TENSORBOARD_SPLITS, TRACKERS_FOLDER, RunFolder

# Project in the tracker, unless the tracker's environment variable names another project.
PROJECT = "mlm-pretraining"
# Maximum time that the end of a run waits for wandb's server; by default wandb waits until the server answers.
WANDB_FINISH_SECONDS = 100.0
# Limits of MLflow.
PARAMS_PER_REQUEST, PARAM_CHARACTERS = 100, 500


class OpenRun(NamedTuple):
    """A run in a tracker.

    Attributes:
        run_id: id of the run in the tracker.
        steps: for each split, the last step that the tracker has; None if the tracker does not report it.
        send: sends metrics: `send(metrics, step, seconds_since_1970)`.
        finish: ends the run: `finish(is_training_complete)`.
    """

    run_id: str
    steps: dict[str, int] | None
    send: Callable[[dict[str, float], int, float], object]
    finish: Callable[[bool], object]


def open_wandb(run_id: str | None, run_name: str, settings: dict[str, Any]) -> OpenRun:
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise InputError("log in with `wandb login`, or set WANDB_MODE=offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id,
        name=run_name,
        config=settings,
        allow_val_change=True,
        resume="allow",
        reinit="finish_previous",
        settings=wandb.Settings(console="off", finish_timeout=WANDB_FINISH_SECONDS),
    )
    # wandb does not report the step of a run that is new or offline.
    steps = dict.fromkeys(TENSORBOARD_SPLITS, run.step - 1) if run.resumed else None
    return OpenRun(
        run.id, steps, lambda metrics, step, _: run.log(metrics, step), lambda is_done: run.finish(int(not is_done))
    )


def open_mlflow(run_id: str | None, run_name: str, settings: dict[str, Any]) -> OpenRun:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    if run_id is None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
        run_id = str(client.create_run(experiment_id, run_name=run_name).info.run_id)
        params = [Param(name, str(value)[:PARAM_CHARACTERS]) for name, value in settings.items()]
        for first in range(0, len(params), PARAMS_PER_REQUEST):
            client.log_batch(run_id, params=params[first : first + PARAMS_PER_REQUEST])
    client.update_run(run_id, status="RUNNING")

    def send(metrics: dict[str, float], step: int, seconds: float) -> None:
        milliseconds = round(seconds * 1000)
        client.log_batch(run_id, [Metric(name, float(value), milliseconds, step) for name, value in metrics.items()])

    def finish(is_done: bool) -> None:
        client.set_terminated(run_id, "FINISHED" if is_done else "KILLED")

    histories = {split: client.get_metric_history(run_id, f"{split}/loss") for split in TENSORBOARD_SPLITS}
    steps = {split: max(metric.step for metric in history) for split, history in histories.items() if history}
    return OpenRun(run_id, steps, send, finish)


def open_trackio(run_id: str | None, run_name: str, settings: dict[str, Any]) -> OpenRun:
    import trackio

    run_id = run_id or f"{run_name}-{uuid.uuid4().hex[:8]}"  # Trackio identifies runs by their names
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project, name=run_id, resume="allow", config=settings, embed=False)
    return OpenRun(run_id, None, lambda metrics, step, _: run.log(metrics, step), lambda _: run.finish())


# Modules of each tracker, including the modules that it imports only on first use. Trackio uses matplotlib if
# matplotlib is imported; while another thread imports matplotlib to draw the loss, Trackio skips metrics.
MODULES = {
    "wandb": ("wandb", "wandb.apis.public"),
    "mlflow": ("mlflow",),
    "trackio": ("trackio", "matplotlib.figure"),
}
OPENERS = {"wandb": open_wandb, "mlflow": open_mlflow, "trackio": open_trackio}


class Tracker:
    """Sends the log to a tracker.

    Args:
        name: name of the tracker.
        folder: the folder of `NAME.json`.
        run_name: name of the run that the tracker shows.
        settings: settings of the run that the tracker shows.
    """

    def __init__(self, name: str, folder: Folder, run_name: str, settings: dict[str, Any]) -> None:
        self._name, self._folder, self._run_name, self._settings = name, folder, run_name, settings
        self._run: OpenRun | None = None
        self._sent: dict[str, Any] = {}  # content of `NAME.json`: id of the run, last steps

    def __str__(self) -> str:
        return self._name

    def update(self, lines: Sequence[Any], *, is_complete: bool | None = None) -> None:
        """Send the missing lines. Unless `is_complete` is None, also end the tracker's run, as complete or not."""
        file = f"{self._name}.json"
        if not self._sent and self._folder.exists(file):
            self._sent = json.loads(self._folder.read_text(file))
        run, self._run = self._run, None  # after an error, open the run again to see which steps the tracker has
        if run is None:
            run = OPENERS[self._name](self._sent.get("id"), self._run_name, self._settings)
            self._sent = {"id": run.run_id, "steps": self._sent.get("steps", {}) if run.steps is None else run.steps}
        try:
            for line in lines:
                step, split = line["step"], line["split"]
                if split in TENSORBOARD_SPLITS and step > self._sent["steps"].get(split, -1):
                    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
                    metrics = {f"{split}/{name}": value for name, value in numbers.items() if name != "step"}
                    run.send(metrics, step, line.seconds)
                    self._sent["steps"][split] = step
        finally:
            self._folder.write_json(file, self._sent)
        if is_complete is None:
            self._run = run
        else:
            run.finish(is_complete)


def open_trackers(config: RunSettings, folder: RunFolder) -> list[Tracker]:
    """Import the trackers of `--report-to`, and return the objects that send the run's log and settings to them."""
    # Import here, not in the threads: Python 3.11 fails if two threads parse code, and TensorFlow parses the code of
    # the step.
    for module in (module for name in config.run.report_to for module in MODULES[name]):
        with suppress(Exception):  # the tracker's thread raises the error again, and warns
            importlib.import_module(module)
    settings = {
        f"{subject}.{name}": value for subject, values in config.as_dict().items() for name, value in values.items()
    }
    run_name = config.run.run_name or PurePath(folder.path).name
    records = folder.files.subfolder(TRACKERS_FOLDER)
    return [Tracker(name, records, run_name, settings) for name in config.run.report_to]


def check_trackers(names: Sequence[str]) -> None:
    """Raise InputError if the package of a tracker is not installed, without importing it."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: only a folder with this name, which wandb creates
            raise InputError(f"--report-to {name} needs a package that is missing: python3 install.py --with {name}")
