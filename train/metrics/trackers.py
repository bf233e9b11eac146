"""Send the log of a run to trackers, named as in transformers: Weights & Biases, MLflow, Trackio.

`trackers/NAME.json` in the folder of a run has the id of the run in the tracker, and the last steps that were sent. So
a resumed run continues there, without a step twice; after a divergence the tracker keeps the abandoned steps.
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

# Where the tracker's environment variable names no other.
PROJECT = "mlm-pretraining"
# By default wandb waits at the end for as long as its server is away.
WANDB_FINISH_SECONDS = 100.0
# The most that MLflow takes.
PARAMS_PER_REQUEST, PARAM_CHARACTERS = 100, 500


class OpenRun(NamedTuple):
    """A run of a tracker: the last step that it has of each split, None if it cannot say; how to send and to end it."""

    run_id: str
    steps: dict[str, int] | None
    send: Callable[[dict[str, float], int, float], object]  # figures, step, seconds since 1970
    finish: Callable[[bool], object]  # whether the training is complete


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
    steps = dict.fromkeys(TENSORBOARD_SPLITS, run.step - 1) if run.resumed else None  # offline nothing is known
    return OpenRun(
        run.id, steps, lambda figures, step, _: run.log(figures, step), lambda done: run.finish(int(not done))
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

    def send(figures: dict[str, float], step: int, seconds: float) -> None:
        client.log_batch(
            run_id, [Metric(name, float(one), round(seconds * 1000), step) for name, one in figures.items()]
        )

    histories = {split: client.get_metric_history(run_id, f"{split}/loss") for split in TENSORBOARD_SPLITS}
    steps = {split: max(one.step for one in history) for split, history in histories.items() if history}
    return OpenRun(run_id, steps, send, lambda done: client.set_terminated(run_id, "FINISHED" if done else "KILLED"))


def open_trackio(run_id: str | None, run_name: str, settings: dict[str, Any]) -> OpenRun:
    import trackio

    run_id = run_id or f"{run_name}-{uuid.uuid4().hex[:8]}"  # it knows runs by their names
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project, name=run_id, resume="allow", config=settings, embed=False)
    return OpenRun(run_id, None, lambda figures, step, _: run.log(figures, step), lambda _: run.finish())


# What each imports, some of it only when it is first used.
MODULES = {"wandb": ("wandb", "wandb.apis.public"), "mlflow": ("mlflow",), "trackio": ("trackio",)}
OPENERS = {"wandb": open_wandb, "mlflow": open_mlflow, "trackio": open_trackio}


class Tracker:
    """Sends the log to a tracker, which shows `run_name` and `settings`; `NAME.json` is in the folder."""

    def __init__(self, name: str, folder: Folder, run_name: str, settings: dict[str, Any]) -> None:
        self._name, self._folder, self._about = name, folder, (run_name, settings)
        self._run: OpenRun | None = None
        self._sent: dict[str, Any] = {}  # id of the run, last steps

    def __str__(self) -> str:
        return self._name

    def update(self, lines: Sequence[Any], *, is_complete: bool | None = None) -> None:
        """Send the lines that are missing and, where it is given, end the tracker's run as complete or not."""
        file = f"{self._name}.json"
        if not self._sent and self._folder.exists(file):
            self._sent = json.loads(self._folder.read_text(file))
        run, self._run = self._run, None  # after an error it is opened again, and says what it has
        if run is None:
            run = OPENERS[self._name](self._sent.get("id"), *self._about)
            self._sent = {"id": run.run_id, "steps": self._sent.get("steps", {}) if run.steps is None else run.steps}
        try:
            for line in lines:
                step, split = line["step"], line["split"]
                if split in TENSORBOARD_SPLITS and step > self._sent["steps"].get(split, -1):
                    names = [name for name, one in line.items() if name != "step" and isinstance(one, int | float)]
                    run.send({f"{split}/{name}": line[name] for name in names}, step, line.seconds)
                    self._sent["steps"][split] = step
        finally:
            self._folder.write_json(file, self._sent)
        if is_complete is None:
            self._run = run
        else:
            run.finish(is_complete)


def open_trackers(config: RunSettings, folder: RunFolder) -> list[Tracker]:
    """Import the trackers of `--report-to`, and make what sends the log and the settings of the run to them."""
    # Not in their threads: Python 3.11 fails when two threads parse code, and TensorFlow parses that of the step.
    for module in (module for name in config.run.report_to for module in MODULES[name]):
        with suppress(Exception):  # the thread gets it again, and warns
            importlib.import_module(module)
    settings = {f"{subject}.{name}": value for subject, of in config.as_dict().items() for name, value in of.items()}
    about = config.run.run_name or PurePath(folder.path).name, settings
    return [Tracker(name, folder.files.subfolder(TRACKERS_FOLDER), *about) for name in config.run.report_to]


def check_trackers(names: Sequence[str]) -> None:
    """Raise InputError if the package of a tracker is not installed, without importing it."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, as wandb makes, is no package
            raise InputError(f"--report-to {name} needs a package that is missing: python3 install.py --with {name}")
