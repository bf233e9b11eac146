"""The folder of a run: its files, its record `run.json`, and which run it contains."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError
from mlm_common.folder_lock import locked_folder
from mlm_common.hub.redaction import is_same
from mlm_common.storage import open_folder
from mlm_common.storage.guard import guarded_read
from train.runtime.supervisor import supervision

RECORD_NAME = "run.json"
# In the record of a run whose length was changed: numbers alone, which are published as they are.
EARLIER_SCHEDULES = "earlier_schedules"
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
TRACKERS_FOLDER = "trackers"  # of --report-to
WORDS_FOLDER = "words"  # of --save-at-words
SCORES_NAME = "scores.json"  # of `train/score_mlm.py`, if that is told to write it there

# The files that a run writes, by folder; it deletes no others.
FILES_OF_A_RUN = {
    CHECKPOINTS_FOLDER: r"step-\d+\.(json|safetensors)",
    EXPORT_FOLDER: r"README\.md|loss\.png|confusion_matrix\.png|model\.safetensors|tf_model\.h5|config\.json|"
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json",
    **{f"{TENSORBOARD_FOLDER}/{split}": EVENTS_PATTERN for split in TENSORBOARD_SPLITS},
    **{f"{EXPORT_FOLDER}/{EVENTS_FOLDER}/{split}": EVENTS_PATTERN for split in TENSORBOARD_SPLITS},
}
# Those of fine-tuning.
RESULT_FILES = (
    r"(train|eval|all)_results\.json|predict_results_[\w-]+\.txt|confusion_matrix\.png|predictions\.txt"
    r"|eval_predictions\w*\.(txt|json)"
    r"|(nbest_)?predictions\.json|null_odds\.json"
)
# What a fingerprint has of shards are their names and checksums, which tell a reader nothing.
SHARDS = {"train_shards": "training shards", "eval_shards": "validation shards"}
# A setting in a fingerprint; names that begin with `model.` are those of the model's configuration as well.
SETTING = re.compile(r"\b(?:data|hardware|hub|masking|optimization|run)\.(\w+)$")
WHAT_MAY_CHANGE = "docs/guides/resume.md"
PROFILES_FOLDER = f"{TENSORBOARD_FOLDER}/plugins/profile"


class RunFolder:
    """The folder of a run, local or gs://, which need not exist.

    files: the folder. checkpoints, export, tensorboard: folders in it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self.files = open_folder(self.path)
        self.checkpoints = self.files.subfolder(CHECKPOINTS_FOLDER)
        self.export = self.files.subfolder(EXPORT_FOLDER)
        self.tensorboard = self.files.subfolder(TENSORBOARD_FOLDER)

    def __str__(self) -> str:
        return self.path

    def locked(self) -> AbstractContextManager[object]:
        return locked_folder(self.path)

    def has_run(self) -> bool:
        return self.files.exists(RECORD_NAME)

    def has_checkpoint(self) -> bool:
        return self.has_run() and any(name.endswith(".json") for name in self.checkpoints.list_files())

    def has_export(self) -> bool:
        return self.export.exists("config.json")

    def read_record(self) -> dict[str, Any]:
        """Read `run.json`; InputError if it is damaged, or that of another program."""
        with self.guarded_record():
            record = json.loads(self.files.read_text(RECORD_NAME))
            if not isinstance(record, dict):
                raise TypeError("it is no object of JSON")
        return record

    def guarded_record(self) -> AbstractContextManager[None]:
        """Explain whatever reading `run.json`, and looking up its values, raises within it."""
        hint = "Restore it from a backup or from the Hub; or start the run again in another folder."
        return guarded_read(self.files.path_of(RECORD_NAME), "the record of a run", hint=hint)

    def write_record(self, record: dict[str, Any]) -> None:
        self.files.write_text(RECORD_NAME, json.dumps(record, indent=2) + "\n")

    def was_started_by_current_supervisor(self) -> bool:
        """Return whether a process of the same supervision wrote `run.json`, and so obeyed flags to start over."""
        return supervision() is not None and self.has_run() and self.read_record().get("supervision") == supervision()

    def check(self, fingerprint: dict[str, Any], *, resume: str, overwrite: bool, begun_phase: int = 0) -> None:
        """Check that the folder is empty or contains this very run, as `--resume` asks for.

        Phases after `begun_phase`, counted from 0, may differ.
        """
        names = self.files.list_files()
        if resume == "must" and not self.has_checkpoint():
            raise InputError(
                f"--resume must needs a run with a checkpoint; {self} has none. Name the folder of the run, or give "
                "--resume auto."
            )
        if not names:
            return
        rule = (
            f"--output-dir must be an empty folder or that of this run; {self} holds {sorted(names)[0]} and no "
            f"{RECORD_NAME} of a run"
        )
        try:
            has_fingerprint = RECORD_NAME in names and "fingerprint" in self.read_record()
        except InputError as error:
            raise InputError(f"{rule}: {error}") from error
        if not has_fingerprint:
            raise InputError(f"{rule}. Name another folder.")
        if overwrite:
            return
        if resume == "never":
            raise InputError(
                f"--resume never needs a folder without a run; {self} has one. Name another folder, or give "
                "--overwrite-output-dir, which deletes that run."
            )
        self._check_fingerprint(fingerprint, begun_phase)

    def clear(self) -> None:
        """Delete the run in the folder, if there is one: what a run writes, and nothing else."""
        if not self.has_run():
            return
        for name, pattern in FILES_OF_A_RUN.items():
            folder = self.files.subfolder(name)
            folder.delete_files([file for file in folder.list_files() if re.fullmatch(pattern, file)])
            folder.delete_partial_files()
        self.files.subfolder(PROFILES_FOLDER).delete()
        for name in (WORDS_FOLDER, TRACKERS_FOLDER):
            self.files.subfolder(name).delete()
        self.files.delete_files([METRICS_NAME, LOSS_CURVE_NAME])
        others = "|".join((RESULT_FILES, DAMAGED_METRICS_NAME.format(r"\d+")))
        self.files.delete_files([name for name in self.files.list_files() if re.fullmatch(others, name)])
        self.files.delete_files([RECORD_NAME])  # last: without it the folder is not known as that of a run

    def _check_fingerprint(self, fingerprint: dict[str, Any], begun_phase: int) -> None:
        with self.guarded_record():
            theirs = dict(self.read_record()["fingerprint"])
        # Of a record that was on the Hub, hashes are compared.
        # In this order settings come before what they decide of the model.
        place = {key: index for one in (theirs, fingerprint) for index, key in enumerate(one)}
        differing = [
            key
            for key in sorted(place, key=lambda key: place[key])
            if not is_same(_value(theirs, key), _value(fingerprint, key)) and _phase_of(key) <= begun_phase
        ]
        if "train_rows" in differing:  # which the lengths of buckets are fitted to
            differing = [key for key in differing if key != "data.length_buckets"]
        if differing:
            begun = ""
            if any(map(_phase_of, fingerprint.keys() | theirs.keys())):
                begun = f" Phase {begun_phase + 1} has begun: only later phases may change."
            named = (_differences(key, _value(theirs, key), _value(fingerprint, key)) for key in differing)
            texts = list(itertools.chain.from_iterable(named))
            shown = "; ".join(texts[:3])
            more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
            raise InputError(
                f"--output-dir: {self} contains a different run ({shown}{more}). Name another folder, give "
                f"--overwrite-output-dir, or the settings of that run; those that may change are in {WHAT_MAY_CHANGE}."
                f"{begun}"
            )


def phase_prefix(index: int) -> str:
    """Begin the names of what a phase, counted from 0, has other than the first one in the fingerprint of a run."""
    return f"phase {index + 1}: "


def exported_model(path: str, flag: str = "--model") -> str:
    """Return the export in the folder of a run; a folder without a run, local or `gs://`, or a Hub id, as it is."""
    folder = RunFolder(path)
    if not folder.has_run():
        return path
    if folder.has_export():
        return folder.export.path
    raise InputError(
        f"{flag}: {path} has no export yet. Let the run finish; or export its newest checkpoint, once it has one: "
        f"python train/export.py {path} {folder.export}"
    )


def record_of_phase(record: dict[str, Any], index: int) -> dict[str, Any]:
    """Give a `run.json` as it is in the phase of that index; as it is where the run has no phases."""
    phases = record.get("phases")
    return {**record, **phases[index]} if phases else record


def _value(fingerprint: dict[str, Any], key: str) -> Any:
    """Look up what a fingerprint has under a name; what it does not have of a phase is as in the first one."""
    return fingerprint.get(key, fingerprint.get(re.sub(r"^phase \d+: ", "", key)))


def _phase_of(key: str) -> int:
    match = re.match(r"phase (\d+): ", key)
    return int(match[1]) - 1 if match else 0


def _differences(key: str, there: Any, now: Any) -> Iterator[str]:
    """Describe how a value of a fingerprint differs; of the shards of a mixture, {source: [weight, …]}, by source.

    A setting goes by its flag.
    """
    name = key.rpartition(" ")[2]
    key = SETTING.sub(lambda match: flag_of(match[1]), key)
    is_mixture = name in SHARDS and isinstance(there, dict) and isinstance(now, dict)
    if name in SHARDS and there and now and not is_mixture:
        yield f"{key.removesuffix(name)}other {SHARDS[name]}"
    elif not is_mixture:
        yield f"{key}: {_short(there)} there, {_short(now)} now"
    elif there.keys() != now.keys():
        yield f"{key}: of {', '.join(there)} there, of {', '.join(now)} now"
    else:
        phase, _, is_of_evaluation = key.rpartition("train_shards")
        totals = [sum(weight for weight, *_ in one.values()) for one in (there, now)]
        for source in there:
            (weight, *shards), (weight_now, *shards_now) = there[source], now[source]
            if weight != weight_now and not is_of_evaluation:  # which has the same weights
                fractions = f"{weight / totals[0]:.3%}", f"{weight_now / totals[1]:.3%}"
                shown = fractions if fractions[0] != fractions[1] else (weight, weight_now)
                yield f"{phase}weight of {source}: {shown[0]} there, {shown[1]} now"
            if shards != shards_now:
                yield f"{key.removesuffix(name)}other {SHARDS[name]} of {source}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:29] + "…"
