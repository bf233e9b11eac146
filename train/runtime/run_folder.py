"""The folder of a run: what lies in it, its record `run.json`, and whose run it holds."""

import json
from typing import Any

from mlm_common.errors import InputError
from mlm_common.hub.disclosure import is_same
from mlm_common.storage import open_folder
from train.config import MAY_CHANGE, flags_marked
from train.runtime.supervisor import supervision

RECORD_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
LOSS_CURVE_NAME = "loss.png"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
EXPORT_FOLDER = "export"
# In fingerprints of before 0.3.0; a run may resume with another version.
FORMER_FINGERPRINT_KEY = "model.transformers_version"


def claim_run_folder(run_folder: str, fingerprint: dict[str, Any], *, resume: str, overwrite: bool) -> None:
    """Check that the folder is empty or holds this very run, as `--resume` asks for.

    Raises:
        InputError: it holds another run, and the first differences are named; a run where there must be none, or none
            where there must be one.
    """
    files = open_folder(run_folder).list_files()
    if overwrite:
        return
    if resume == "must" and not has_checkpoint(run_folder):
        raise InputError(
            f"--resume must needs a run with a checkpoint; {run_folder} has none. Name the folder of the run, or give "
            "--resume auto."
        )
    if not files:
        return
    if RECORD_NAME not in files:
        raise InputError(
            f"--output-dir must be an empty folder or that of this run; {run_folder} holds {sorted(files)[0]} and no "
            f"{RECORD_NAME}. Name another folder."
        )
    if resume == "never":
        raise InputError(
            f"--resume never needs a folder without a run; {run_folder} has one. Name another folder, or give "
            "--overwrite-output-dir, which deletes that run."
        )
    _check_fingerprint(run_folder, fingerprint)


def has_checkpoint(run_folder: str) -> bool:
    """Ask whether the folder holds a run with a checkpoint."""
    folder = open_folder(run_folder)
    checkpoints = folder.subfolder(CHECKPOINTS_FOLDER).list_files()
    return folder.exists(RECORD_NAME) and any(name.endswith(".json") for name in checkpoints)


def clear_run_folder(run_folder: str) -> None:
    """Delete what a run writes, and nothing else, from the folder; local or gs://."""
    folder = open_folder(run_folder)
    folder.delete_files([METRICS_NAME, LOSS_CURVE_NAME, RECORD_NAME])
    for name in (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER, EXPORT_FOLDER):
        folder.subfolder(name).delete()


def is_of_this_supervision(run_folder: str) -> bool:
    """Tell whether a process of the same supervision has claimed the folder before: flags to start anew are done."""
    if supervision() is None or not open_folder(run_folder).exists(RECORD_NAME):
        return False
    return read_run_record(run_folder).get("supervision") == supervision()


def write_run_record(run_folder: str, record: dict[str, Any]) -> None:
    """Write `run.json`."""
    open_folder(run_folder).write_text(RECORD_NAME, json.dumps(record, indent=2) + "\n")


def read_run_record(run_folder: str) -> dict[str, Any]:
    """Read `run.json`."""
    return json.loads(open_folder(run_folder).read_text(RECORD_NAME))


def _check_fingerprint(run_folder: str, fingerprint: dict[str, Any]) -> None:
    theirs = dict(read_run_record(run_folder)["fingerprint"])
    theirs.pop(FORMER_FINGERPRINT_KEY, None)
    # Of a record that was on the Hub, hashes are compared.
    differing = sorted(
        key for key in fingerprint.keys() | theirs.keys() if not is_same(theirs.get(key), fingerprint.get(key))
    )
    if differing:
        shown = "; ".join(
            f"{key}: {_short(theirs.get(key))} there, {_short(fingerprint.get(key))} now" for key in differing[:3]
        )
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"--output-dir must not hold another run; {run_folder} does ({shown}{more}). Name another folder, give "
            "--overwrite-output-dir, or the settings of that run, of which these may change: "
            f"{', '.join(flags_marked(MAY_CHANGE))}."
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
