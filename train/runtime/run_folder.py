"""The folder of a run: what lies in it, its record `run.json`, and whose run it holds."""

import json
import re
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

# The files that a run writes, by folder; of others that lie beside them it deletes none.
OWN_FILES = {
    CHECKPOINTS_FOLDER: r"step-\d+\.(json|safetensors)",
    TENSORBOARD_FOLDER: r"events\.out\.tfevents\..*",
    EXPORT_FOLDER: r"README\.md|loss\.png|model\.safetensors|tf_model\.h5|config\.json|"
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json",
    f"{EXPORT_FOLDER}/runs": r"events\.out\.tfevents\..*",
}
PROFILES_FOLDER = f"{TENSORBOARD_FOLDER}/plugins/profile"


def check_run_folder(run_folder: str, fingerprint: dict[str, Any], *, resume: str, overwrite: bool) -> None:
    """Check that the folder is empty or holds this very run, as `--resume` asks for.

    Raises:
        InputError: it holds another run, and the first differences are named; a run where there must be none, or none
            where there must be one.
    """
    files = open_folder(run_folder).list_files()
    if resume == "must" and not has_checkpoint(run_folder):
        raise InputError(
            f"--resume must needs a run with a checkpoint; {run_folder} has none. Name the folder of the run, or give "
            "--resume auto."
        )
    if not files:
        return
    if RECORD_NAME not in files or not _holds_run(run_folder):
        raise InputError(
            f"--output-dir must be an empty folder or that of this run; {run_folder} holds {sorted(files)[0]} and no "
            f"{RECORD_NAME} of a run. Name another folder."
        )
    if overwrite:
        return
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
    """Delete the run in the folder, if there is one: what a run writes, and nothing else; local or gs://."""
    folder = open_folder(run_folder)
    if not folder.exists(RECORD_NAME):
        return
    for name, pattern in OWN_FILES.items():
        files = folder.subfolder(name)
        files.delete_files([file for file in files.list_files() if re.fullmatch(pattern, file)])
        files.delete_partial_files()
    folder.subfolder(PROFILES_FOLDER).delete()
    folder.delete_files([METRICS_NAME, LOSS_CURVE_NAME])
    folder.delete_files([RECORD_NAME])  # last: without it the folder is not known as that of a run


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


def _holds_run(run_folder: str) -> bool:
    try:
        return "fingerprint" in read_run_record(run_folder)
    except (TypeError, ValueError):
        return False


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
