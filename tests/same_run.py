"""Whether two runs came to the same end: weights, moments, step and means bit for bit, and the log line by line."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from train.metrics_log import CLOCK_FIGURES, read_metrics


def assert_same_run(folder: Path, expected: Path) -> None:
    assert timeless_lines(folder) == timeless_lines(expected)
    assert tensorboard_points(folder) == tensorboard_points(expected)
    assert newest_variables(folder) == newest_variables(expected)
    exports = [one / "export" / "model.safetensors" for one in (folder, expected)]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def timeless_lines(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(str(folder / "metrics.jsonl"))
    return [{name: value for name, value in line.items() if name not in CLOCK_FIGURES} for line in lines]


def newest_variables(folder: Path) -> tuple[str, bytes]:
    """Return name and content of the newest checkpoint's data."""
    newest = max((folder / "checkpoints").glob("*.safetensors"))
    return newest.name, newest.read_bytes()


def tensorboard_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return tag -> (step, value) as TensorBoard shows them."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
        if tag.rpartition("/")[2] not in CLOCK_FIGURES
    }
