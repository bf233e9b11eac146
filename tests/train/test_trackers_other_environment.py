"""Runs with the real trackers, offline, in an environment that has them beside the packages of this one."""

import json
import os
import re
import subprocess
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.fixtures.made_once import made_once
from tests.fixtures.other_environments import PROJECT, output_of
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_run import run_flags

pytestmark = pytest.mark.slow

NAMES = ("wandb", "mlflow", "trackio")
# Prints what the trackers have: for each run its status, settings and points, [figure, step, value].
READER = """
import json, struct, sys
from pathlib import Path

def wandb_records(path):
    # LevelDB's log after 7 bytes: records in parts, in blocks of 32 KiB. wandb has no reader of its own files.
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""

found = {"wandb": {}, "mlflow": {}, "trackio": {}}
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")):
    one = found["wandb"].setdefault(path.stem, {"points": [], "settings": {}})
    for record in wandb_records(path):
        if record.HasField("run"):
            one["settings"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                one["points"].append([name, record.history.step.num, json.loads(item.value_json)])

from mlflow import MlflowClient
client = MlflowClient()
for run in client.search_runs([client.get_experiment_by_name("mlm-pretraining").experiment_id]):
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    points = [[point.key, point.step, point.value] for history in histories for point in history]
    found["mlflow"][run.info.run_name] = {"status": run.info.status, "settings": run.data.params, "points": points}

from trackio.sqlite_storage import SQLiteStorage
for name in SQLiteStorage.get_runs("mlm-pretraining"):
    logs = SQLiteStorage.get_logs("mlm-pretraining", name)
    points = [[key, log["step"], value] for log in logs for key, value in log.items() if "/" in key]
    found["trackio"][name] = {"points": points, "settings": SQLiteStorage.get_run_config("mlm-pretraining", name)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trackers_python(tmp_path_factory) -> Path:
    """The interpreter of an environment with the trackers' extras, and all that is installed here."""

    def make(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        installed = subprocess.run([python, "-c", purelib], check=True, capture_output=True, encoding="utf-8").stdout
        Path(installed.strip(), "this.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        declared = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
        extras = re.findall(rf'^(?:{"|".join(NAMES)}) = \["(.+)"\]$', declared, re.MULTILINE)
        installed_hub = f"huggingface-hub=={version('huggingface-hub')}"  # so that trackio suits it
        subprocess.run([python, "-m", "pip", "install", "--quiet", *extras, installed_hub], check=True)

    kept_in = os.environ.get("MLM_TEST_ENVIRONMENTS")
    return made_once(tmp_path_factory, "trackers", make, kept_in=kept_in) / "bin" / "python"


def test_a_resumed_run_is_one_run_of_each_tracker_with_each_step_once(trackers_python, shards, tmp_path):
    environment = {
        "PYTHONPATH": str(PROJECT),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }

    def train(*flags):
        command = [trackers_python, PROJECT / "train" / "run_mlm.py", *flags, "--report-to", *NAMES]
        done = subprocess.run(
            command, env=os.environ | environment, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stderr
        assert "is not up to date" not in done.stderr, done.stderr

    constant = ("--schedule", "constant", "--run-name", "tiny", "--keep-checkpoints", "1")
    for max_steps in (6, 10):
        train(*run_flags(shards, tmp_path / "run", *constant, "--max-steps", str(max_steps)))
        if max_steps == 6:  # a kill: the checkpoint of the last steps was not written
            for path in (tmp_path / "run" / "checkpoints").glob("step-00000006.*"):
                path.unlink()
    found = json.loads(output_of(trackers_python, READER, str(tmp_path), environment=environment).splitlines()[-1])
    lines = logged(tmp_path / "run")
    loss = {(f"{line['split']}/loss", line["step"]): pytest.approx(line["loss"]) for line in lines}
    assert set(loss) >= {("train/loss", 2), ("train/loss", 10), ("validation/loss", 6), ("validation/loss", 10)}
    for name in NAMES:
        (run,) = found[name].values()
        points = run["points"]
        assert len({(figure, step) for figure, step, _ in points}) == len(points), name
        assert {(figure, step): one for figure, step, one in points if figure.endswith("/loss")} == loss, name
        assert {figure for figure, _, _ in points} >= {"train/learning_rate", "validation/masked_accuracy"}, name
        assert str(run["settings"]["optimization.schedule"]) == "constant", name
    assert found["mlflow"]["tiny"]["status"] == "FINISHED"
