"""The folder of a run: its files, its record `run.json`, and the check that the folder contains a given run."""

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
from mlm_common.storage import Folder, open_folder
from mlm_common.storage.guard import guarded_read

RECORD_NAME = "run.json"
# Key in the record of a run whose length was changed. The value contains only numbers, so it is published without
# redaction.
EARLIER_SCHEDULES = "earlier_schedules"
METRICS_NAME = "metrics.jsonl"
# New name of a metrics.jsonl that has an unreadable line. The braces stand for a number.
DAMAGED_METRICS_NAME = "metrics.damaged-{}.jsonl"
LOSS_CURVE_NAME = "loss.png"
CONFUSION_NAME = "confusion_matrix.png"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
EVENTS_FOLDER = "runs"  # in an export; the Hub shows its event files as training metrics
# Subfolders for event files, in the run's folder and in an export. TensorBoard shows metrics of the same name in one
# chart.
TENSORBOARD_SPLITS = ("train", "validation")
EVENTS_PATTERN = r"events\.out\.tfevents\..*"
EXPORT_FOLDER = "export"
CONFIG_NAME = "config.json"  # file of an export
TRACKERS_FOLDER = "trackers"  # for --report-to
WORDS_FOLDER = "words"  # for --save-at-words
SCORES_NAME = "scores.json"  # written by `train/score_mlm.py`, if its output is this file

# The files that a run writes, {folder: pattern}. A run deletes no other files.
FILES_OF_A_RUN = {
    CHECKPOINTS_FOLDER: r"step-\d+\.(json|safetensors)",
    EXPORT_FOLDER: r"README\.md|loss\.png|confusion_matrix\.png|model\.safetensors|tf_model\.h5|config\.json|"
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json",
    **{f"{TENSORBOARD_FOLDER}/{split}": EVENTS_PATTERN for split in TENSORBOARD_SPLITS},
    **{f"{EXPORT_FOLDER}/{EVENTS_FOLDER}/{split}": EVENTS_PATTERN for split in TENSORBOARD_SPLITS},
}
# Additional files that fine-tuning writes.
RESULT_FILES = (
    r"(train|eval|all)_results\.json|predict_results_[\w-]+\.txt|confusion_matrix\.png|predictions\.txt"
    r"|eval_predictions\w*\.(txt|json)"
    r"|(nbest_)?predictions\.json|null_odds\.json"
)
# Keys of a fingerprint whose values are names and checksums of shards. Error messages do not show these values.
SHARDS = {"train_shards": "training shards", "eval_shards": "validation shards"}
# A setting in a fingerprint. `model.` is left out, because it is also the prefix of the model's configuration.
SETTING = re.compile(r"\b(?:data|hardware|hub|masking|optimization|run)\.(\w+)$")
WHAT_MAY_CHANGE = "docs/guides/resume.md"
PROFILES_FOLDER = f"{TENSORBOARD_FOLDER}/plugins/profile"


class RunFolder:
    """The folder of a run, local or gs://. The folder need not exist.

    Attributes:
        path: the path as given.
        files: access to the folder's files.
        checkpoints: subfolder with checkpoints.
        export: subfolder with the exported model.
        tensorboard: subfolder with TensorBoard's event files.
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
        return self.export.exists(CONFIG_NAME)

    def read_record(self) -> dict[str, Any]:
        """Read `run.json`.

        Raises:
            InputError: the file is damaged, or was written by another program.
        """
        with self.guarded_record():
            record = json.loads(self.files.read_text(RECORD_NAME))
            if not isinstance(record, dict):
                raise TypeError("it is not a JSON object")
        return record

    def guarded_record(self) -> AbstractContextManager[None]:
        """Return a context that turns errors while reading `run.json`, or looking up its values, into InputErrors."""
        hint = "Restore it from a backup or from the Hub, or start the run again in another folder."
        return guarded_read(self.files.path_of(RECORD_NAME), "the record of a run", hint=hint)

    def write_record(self, record: dict[str, Any]) -> None:
        self.files.write_text(RECORD_NAME, json.dumps(record, indent=2) + "\n")

    def check(
        self,
        record: dict[str, Any] | None,
        fingerprint: dict[str, Any],
        *,
        resume: str,
        overwrite: bool,
        begun_phase: int = 0,
    ) -> None:
        """Check that the folder is empty or contains this run, according to `--resume`.

        Args:
            record: content of `run.json`; None if there is no such file.
            fingerprint: fingerprint of this run.
            resume: value of `--resume`.
            overwrite: whether the existing run will be deleted.
            begun_phase: index of the phase that the existing run has reached. Later phases may differ.

        Raises:
            InputError: the folder contains something else.
        """
        if resume == "must" and not self.has_checkpoint():
            raise InputError(
                f"With --resume must, --output-dir must contain a checkpoint; {self} has none. Pass the folder "
                "of the run, or use --resume auto."
            )
        self.check_files(record)
        if record is None or overwrite:
            return
        if resume == "never":
            raise InputError(
                f"With --resume never, --output-dir must not contain a run; {self} has one. Use another folder, or "
                "--overwrite-output-dir, which deletes that run."
            )
        with self.guarded_record():
            recorded = dict(record["fingerprint"])
        self._check_fingerprint(recorded, fingerprint, begun_phase)

    def check_files(self, record: dict[str, Any] | None) -> None:
        """Check that the folder is empty, or contains a run.

        Args:
            record: content of `run.json`; None if there is no such file.

        Raises:
            InputError: the folder contains other files.
        """
        names = self.files.list_files()
        if names and (record is None or "fingerprint" not in record):
            raise InputError(
                f"--output-dir must be empty or contain this run; {self} contains {sorted(names)[0]} but no "
                f"{RECORD_NAME} of a run. Use another folder."
            )

    def clear(self) -> None:
        """Delete the run in the folder, if there is one. Only files that a run writes are deleted."""
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
        self.files.delete_files([RECORD_NAME])  # last, because this file marks the folder of a run

    def _check_fingerprint(self, recorded: dict[str, Any], fingerprint: dict[str, Any], begun_phase: int) -> None:
        if _is_pretraining(recorded) != _is_pretraining(fingerprint):
            kind = "pretraining" if _is_pretraining(recorded) else "fine-tuning"
            raise InputError(
                f"--output-dir: {self} contains a {kind} run. Use another folder, or --overwrite-output-dir, which "
                "deletes that run."
            )
        # Sort the settings before the parts of the model's configuration that follow from the settings.
        place = {key: index for content in (recorded, fingerprint) for index, key in enumerate(content)}
        differing = [
            key
            for key in sorted(place, key=lambda key: place[key])
            # A record that was on the Hub may contain hashes instead of values; `is_same` compares hashes with values.
            if not is_same(_value(recorded, key), _value(fingerprint, key)) and _phase_of(key) <= begun_phase
        ]
        if "train_rows" in differing:  # the lengths of buckets follow from the rows
            differing = [key for key in differing if key != "data.length_buckets"]
        if differing:
            begun = ""
            if any(map(_phase_of, fingerprint.keys() | recorded.keys())):
                begun = f" Phase {begun_phase + 1} has started: only later phases may change."
            descriptions = (_differences(key, _value(recorded, key), _value(fingerprint, key)) for key in differing)
            texts = list(itertools.chain.from_iterable(descriptions))
            shown = "; ".join(texts[:3])
            remainder = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
            raise InputError(
                f"--output-dir: {self} contains a different run ({shown}{remainder}). Use another folder, "
                f"--overwrite-output-dir, or the settings of that run; {WHAT_MAY_CHANGE} lists the settings that may "
                f"change.{begun}"
            )


def _is_pretraining(fingerprint: dict[str, Any]) -> bool:
    return "train_rows" not in fingerprint  # only fine-tuning reads rows that are not in shards


def phase_prefix(index: int) -> str:
    """Return the prefix of names in a run's fingerprint that belong to phase `index`, counted from 0."""
    return f"phase {index + 1}: "


def exported_model(path: str, flag: str = "--model") -> str:
    """Return the path of the export of a run; return any other folder (local or `gs://`) or Hub id unchanged.

    Raises:
        InputError: the run has no export.
    """
    folder = RunFolder(path)
    if not folder.has_run():
        return path
    if folder.has_export():
        return folder.export.path
    raise InputError(
        f"{flag}: {path} has no export yet. Let the run finish, or export its newest checkpoint, once it has one: "
        f"python train/export.py {path} {folder.export}"
    )


def check_export_folder(output: Folder, *, overwrite: bool) -> None:
    """Check that a command may export a model to a folder.

    Args:
        output: the folder, which need not exist.
        overwrite: whether a model in the folder may be replaced.

    Raises:
        InputError: the folder contains other files, or a model without `overwrite`, or cannot be written to.
    """
    names = sorted(output.list_files())
    if CONFIG_NAME in names and not overwrite:
        raise InputError(
            f"OUTPUT must be an empty folder; {output} contains a model. Use another folder, or --overwrite to replace "
            "that model."
        )
    # An export that was interrupted has no config.json yet.
    others = [name for name in names if name == "README.md" or not re.fullmatch(FILES_OF_A_RUN[EXPORT_FOLDER], name)]
    if CONFIG_NAME not in names and others:
        raise InputError(f"OUTPUT must be an empty folder; {output} contains {others[0]}. Use another folder.")
    output.check_writable()


def record_of_phase(record: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a `run.json` with the content of phase `index`; return it unchanged if the run has no phases."""
    phases = record.get("phases")
    return {**record, **phases[index]} if phases else record


def _value(fingerprint: dict[str, Any], key: str) -> Any:
    """Look up a name in a fingerprint. If a phase's value is missing, it is the same as in the first phase."""
    return fingerprint.get(key, fingerprint.get(re.sub(r"^phase \d+: ", "", key)))


def _phase_of(key: str) -> int:
    match = re.match(r"phase (\d+): ", key)
    return int(match[1]) - 1 if match else 0


def _differences(key: str, recorded: Any, now: Any) -> Iterator[str]:
    """Describe how a value of a fingerprint differs between the folder's run and this run.

    Settings are named by their flags. Shards of a mixture, {source: [weight, …]}, are compared source by source.
    """
    name = key.rpartition(" ")[2]
    key = SETTING.sub(lambda match: flag_of(match[1]), key)
    is_mixture = name in SHARDS and isinstance(recorded, dict) and isinstance(now, dict)
    if name in SHARDS and recorded and now and not is_mixture:
        yield f"{key.removesuffix(name)}different {SHARDS[name]}"
    elif not is_mixture:
        yield f"{key}: {_short(recorded)} there, {_short(now)} now"
    elif recorded.keys() != now.keys():
        yield f"{key}: from {', '.join(recorded)} there, from {', '.join(now)} now"
    else:
        phase, _, is_of_evaluation = key.rpartition("train_shards")
        totals = [sum(weight for weight, *_ in mixture.values()) for mixture in (recorded, now)]
        for source in recorded:
            (weight, *shards), (weight_now, *shards_now) = recorded[source], now[source]
            if weight != weight_now and not is_of_evaluation:  # evaluation has the same weights; report them once
                fractions = f"{weight / totals[0]:.3%}", f"{weight_now / totals[1]:.3%}"
                shown = fractions if fractions[0] != fractions[1] else (weight, weight_now)
                yield f"{phase}weight of {source}: {shown[0]} there, {shown[1]} now"
            if shards != shards_now:
                yield f"{key.removesuffix(name)}different {SHARDS[name]} of {source}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 30 else text[:29] + "…"
