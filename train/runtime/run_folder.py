"""The folder of a run: what lies in it, its record `run.json`, and whose run it holds."""

import json
import re
from collections.abc import Sequence
from typing import Any

from mlm_common.errors import InputError
from mlm_common.hub.redaction import is_same
from mlm_common.storage import open_folder
from train.config.settings import MAY_CHANGE, flags_marked
from train.runtime.supervisor import supervision

RECORD_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
# With a number; a metrics.jsonl in which a line could not be read.
DAMAGED_METRICS_NAME = "metrics.damaged-{}.jsonl"
LOSS_CURVE_NAME = "loss.png"
CONFUSION_NAME = "confusion_matrix.png"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
EVENTS_FOLDER = "runs"  # of an export: the Hub shows the event files in it as training metrics
# Folders in both: TensorBoard shows figures of one name in one chart.
TENSORBOARD_SPLITS = ("train", "validation")
EVENTS_PATTERN = r"events\.out\.tfevents\..*"
EXPORT_FOLDER = "export"
# In fingerprints of before 0.3.0; a run may resume with another version.
FORMER_FINGERPRINT_KEY = "model.transformers_version"

# The files that a run writes, by folder; of others that lie beside them it deletes none.
FILES_OF_A_RUN = {
    CHECKPOINTS_FOLDER: r"step-\d+\.(json|safetensors)",
    EXPORT_FOLDER: r"README\.md|loss\.png|confusion_matrix\.png|model\.safetensors|tf_model\.h5|config\.json|"
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json",
    # Earlier versions had no folders for splits.
    **dict.fromkeys((TENSORBOARD_FOLDER, f"{EXPORT_FOLDER}/{EVENTS_FOLDER}"), EVENTS_PATTERN),
    **{f"{TENSORBOARD_FOLDER}/{split}": EVENTS_PATTERN for split in TENSORBOARD_SPLITS},
    **{f"{EXPORT_FOLDER}/{EVENTS_FOLDER}/{split}": EVENTS_PATTERN for split in TENSORBOARD_SPLITS},
}
# Those of fine-tuning.
RESULT_FILES = (
    r"(train|eval|all)_results\.json|predict_results_[\w-]+\.txt|confusion_matrix\.png|predictions\.txt"
    r"|eval_predictions\w*\.(txt|json)"
    r"|(nbest_)?predictions\.json|null_odds\.json"
)
_BEGUN = " Phase {} is begun: it, and what lies behind it, must stay as it was; phases that lie ahead may change."
PROFILES_FOLDER = f"{TENSORBOARD_FOLDER}/plugins/profile"
_STEP_RECORD = re.compile(r"step-(\d+)\.json")


def check_run_folder(
    run_folder: str,
    fingerprint: dict[str, Any],
    *,
    resume: str,
    overwrite: bool,
    begun_phase: int = 0,
    changeable_flags: Sequence[str] | None = None,
) -> None:
    """Check that the folder is empty or holds this very run, as `--resume` asks for.

    Args:
        run_folder: the folder.
        fingerprint: of the run, with all its phases.
        resume: as the flag.
        overwrite: whether the run that is there is to be deleted.
        begun_phase: the last of the run's phases that was begun, counted from 0; those after it may be others.
        changeable_flags: those that may have other values when a run resumes; by default run_mlm's.

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
    _check_fingerprint(run_folder, fingerprint, begun_phase, changeable_flags or flags_marked(MAY_CHANGE))


def phase_prefix(index: int) -> str:
    """Begin the names of what a phase, counted from 0, has other than the first one in the fingerprint of a run."""
    return f"phase {index + 1}: "


def has_checkpoint(run_folder: str) -> bool:
    """Ask whether the folder holds a run with a checkpoint."""
    folder = open_folder(run_folder)
    checkpoints = folder.subfolder(CHECKPOINTS_FOLDER).list_files()
    return folder.exists(RECORD_NAME) and any(name.endswith(".json") for name in checkpoints)


def exported_model(path: str, flag: str = "--model") -> str:
    """Return the export in the folder of a run; a folder that holds no run, or a Hub id, as it is.

    Args:
        path: folder of a run or of a model, local or `gs://`, or a Hub id.
        flag: for errors.

    Raises:
        InputError: the run has no export yet.
    """
    folder = open_folder(path)
    if not folder.exists(RECORD_NAME):
        return path
    if folder.subfolder(EXPORT_FOLDER).exists("config.json"):
        return folder.path_of(EXPORT_FOLDER)
    files = folder.subfolder(CHECKPOINTS_FOLDER).list_files()
    steps = [int(match[1]) for match in map(_STEP_RECORD.fullmatch, files) if match]
    if not steps:
        raise InputError(
            f"{flag}: {path} has no export and no checkpoint yet. Wait for the first checkpoint of the run."
        )
    raise InputError(
        f"{flag}: {path} has no export yet: the run is at step {max(steps):,}. Let it finish, or export that "
        f"checkpoint: python train/export.py {path} {folder.path_of(EXPORT_FOLDER)}"
    )


def clear_run_folder(run_folder: str) -> None:
    """Delete the run in the folder, if there is one: what a run writes, and nothing else; local or gs://."""
    folder = open_folder(run_folder)
    if not folder.exists(RECORD_NAME):
        return
    for name, pattern in FILES_OF_A_RUN.items():
        files = folder.subfolder(name)
        files.delete_files([file for file in files.list_files() if re.fullmatch(pattern, file)])
        files.delete_partial_files()
    folder.subfolder(PROFILES_FOLDER).delete()
    folder.delete_files([METRICS_NAME, LOSS_CURVE_NAME])
    others = "|".join((RESULT_FILES, DAMAGED_METRICS_NAME.format(r"\d+")))
    folder.delete_files([name for name in folder.list_files() if re.fullmatch(others, name)])
    folder.delete_files([RECORD_NAME])  # last: without it the folder is not known as that of a run


def was_started_by_current_supervisor(run_folder: str) -> bool:
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


def record_of_phase(record: dict[str, Any], index: int) -> dict[str, Any]:
    """Give a `run.json` as it is in the phase of that index; as it is where the run has no phases."""
    phases = record.get("phases")
    return {**record, **phases[index]} if phases else record


def _check_fingerprint(
    run_folder: str, fingerprint: dict[str, Any], begun_phase: int, changeable_flags: Sequence[str]
) -> None:
    theirs = dict(read_run_record(run_folder)["fingerprint"])
    theirs.pop(FORMER_FINGERPRINT_KEY, None)
    # Of a record that was on the Hub, hashes are compared.
    differing = sorted(
        key
        for key in fingerprint.keys() | theirs.keys()
        if not is_same(_value(theirs, key), _value(fingerprint, key)) and _phase_of(key) <= begun_phase
    )
    if differing:
        has_phases = any(map(_phase_of, fingerprint.keys() | theirs.keys()))
        shown = "; ".join(
            f"{key}: {_short(_value(theirs, key))} there, {_short(_value(fingerprint, key))} now"
            for key in differing[:3]
        )
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"--output-dir must not hold another run; {run_folder} does ({shown}{more}). Name another folder, give "
            "--overwrite-output-dir, or the settings of that run, of which these may change: "
            f"{', '.join(changeable_flags)}." + (_BEGUN.format(begun_phase + 1) if has_phases else "")
        )


def _value(fingerprint: dict[str, Any], key: str) -> Any:
    """Look up what a fingerprint has under a name; what it does not have of a phase is as in the first one."""
    return fingerprint.get(key, fingerprint.get(re.sub(r"^phase \d+: ", "", key)))


def _phase_of(key: str) -> int:
    """Read from a name in a fingerprint the phase that it is of, counted from 0."""
    match = re.match(r"phase (\d+): ", key)
    return int(match[1]) - 1 if match else 0


def _holds_run(run_folder: str) -> bool:
    try:
        return "fingerprint" in read_run_record(run_folder)
    except (TypeError, ValueError):
        return False


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"
