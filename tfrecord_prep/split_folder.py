"""The folder of a split in every state: empty, unfinished, complete, or with shards of other settings.

The first file is `plan.json`, with the fields of the manifest that are known in advance. Then come the shards, and a
sidecar for each complete partition. At the end `manifest.json` is written, and the plan and the sidecars are deleted.
So a folder never looks complete if the command was killed, and the next run can see which partitions are done.

A sidecar has a hash of everything that its partition was made from. After a file of the corpus has been fixed, only the
partitions of this file are rebuilt.
"""

import base64
import dataclasses
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.cli.settings import describe_differences
from mlm_common.corpus.config import BUILTIN
from mlm_common.corpus.corpus import Partition
from mlm_common.corpus.identity import FILES_KEYS, Record, describe_changes, identity
from mlm_common.corpus.text_files import ByteRange
from mlm_common.corpus.text_formats import BadRows, bad_rows_from_record
from mlm_common.errors import InputError
from mlm_common.storage import PROBE_PREFIX, folder_and_name, open_folder
from mlm_common.storage.guard import guarded_read
from tfrecord_prep.manifest import (
    MANAGED_SHARD_NAME,
    MANIFEST_NAME,
    PLAN_NAME,
    TOKENIZER_FOLDER_NAME,
    ShardRecord,
    Totals,
    open_shards,
    read_manifest,
)

logger = logging.getLogger(__name__)

Plan = dict[str, Any]  # as read from JSON

SIDECAR_NAME = re.compile(r"^partition-(\d{5,})\.json$")
NUM_READERS = 8
# Libraries that tokenize and cut text. If the corpus is a data set, the version of `datasets`, which reads it, matters
# as well.
LIBRARIES_OF_SHARDS = ("mlm-pretraining", "tokenizers")
# Settings of a corpus that say where its text is.
PLACES = ("dataset_name", *FILES_KEYS)


@dataclass(frozen=True)
class PartitionResult:
    """The shards of a partition, with their counts.

    Attributes:
        index: number of the partition in the split, from 0 on.
        sha256: hash returned by `partition_sha256`.
        shards: shards of the partition, in order.
        totals: sums over the partition.
        bad_rows: rows of the corpus that were skipped.
        id_counts: count of each id in the text, without special tokens; (vocabulary_size,).
    """

    index: int
    sha256: str
    shards: tuple[ShardRecord, ...]
    totals: Totals
    bad_rows: BadRows
    id_counts: NDArray[np.int64]


def check_folder(folder: str, plan: Plan) -> bool:
    """Return whether the folder of a split is complete, after checking that its shards fit the plan.

    Different versions of libraries are accepted. In an unfinished folder the files of the corpus may have changed.

    Raises:
        InputError: existing shards were made with other settings, were not made by this command, or are damaged.
    """
    names = open_folder(folder).list_files()
    hint = "Choose another --output-dir, or pass --overwrite to replace them."
    is_complete, recorded = MANIFEST_NAME in names, recorded_plan(folder)
    if recorded and (differences := describe_plan_differences(recorded, plan, is_complete=is_complete)):
        shards = "shards" if is_complete else "unfinished shards"
        raise InputError(f"{folder} contains {shards} with other settings: {differences}. {hint}")
    if is_complete:
        open_shards(folder)
        return True
    foreign = [name for name in names if name.endswith(".tfrecord") and not MANAGED_SHARD_NAME.match(name)]
    if foreign:
        raise InputError(f"{folder} contains shards that this command did not write, such as {foreign[0]}. {hint}")
    return False


def recorded_plan(folder: str) -> Plan | None:
    """Read the manifest of a folder or, if it is unfinished, its plan; None if it has neither.

    Raises:
        InputError: the manifest or the plan cannot be read.
    """
    files = open_folder(folder)
    names = files.list_files()
    if MANIFEST_NAME in names:
        return dataclasses.asdict(read_manifest(folder))
    if PLAN_NAME not in names:
        return None
    with guarded_read(files.path_of(PLAN_NAME), "a plan, a JSON object", hint="Delete it to start again."):
        return dict(json.loads(files.read_text(PLAN_NAME)))


def describe_plan_differences(recorded: Plan, requested: Plan, *, is_complete: bool) -> str:
    """Describe how the settings of two plans differ; return "" if they do not.

    Args:
        recorded: plan or manifest of the existing shards.
        requested: plan of this command.
        is_complete: whether the folder of the shards is complete. If not, files of the corpus may have changed.
    """
    corpora = [recorded["corpus"], requested["corpus"]]
    has_bad_rows = is_complete and recorded["bad_rows"]["num_rows"] > 0
    places = [[corpus["settings"][name] for name in PLACES] for corpus in corpora]
    if not is_complete and places[0] == places[1]:
        corpora = [_without_files(corpus) for corpus in corpora]
    settings = {"deduplicated": None} | {
        key: value for key, value in requested.items() if key not in ("corpus", "versions")
    }
    if not is_complete:
        del settings["deduplicated"]  # the hash of a partition already covers its duplicates
    changes = describe_changes(*corpora, has_bad_rows=has_bad_rows)
    return "; ".join(filter(None, (changes, describe_differences(recorded, settings))))


def _without_files(corpus: Record) -> Record:
    return {name: value for name, value in corpus.items() if name not in FILES_KEYS}


def _versions(plan: Plan) -> dict[str, str]:
    reads_dataset = plan["corpus"]["settings"]["dataset_name"] not in (None, BUILTIN)
    return {library: plan["versions"][library] for library in (*LIBRARIES_OF_SHARDS, *["datasets"] * reads_dataset)}


def partition_sha256(plan: Plan, partition: Partition, duplicates: bytes = b"") -> str:
    """Hash everything that determines the shards of a partition: settings, versions, and its byte ranges or documents.

    The hash depends neither on the folder of the files nor on other files. The hash leaves out the setting for bad
    rows, because most partitions have no bad rows.

    Args:
        plan: plan of the split.
        partition: byte ranges or documents.
        duplicates: flags of the documents to leave out, from `find_duplicates`; empty to keep all documents.
    """
    corpus = identity(_without_files(plan["corpus"]))
    settings = plan | {"corpus": corpus, "versions": _versions(plan)}
    settings.pop("deduplicated", None)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for item in partition:
        if isinstance(item, ByteRange):
            file = item.file
            content = json.dumps([PurePath(file.name).name, file.num_bytes, file.checksum, item.start, item.stop])
        else:
            content = item
        digest.update(len(content).to_bytes(8, "little") + content.encode())
    digest.update(duplicates)
    return digest.hexdigest()


def begin_folder(folder: str, plan: Plan) -> dict[int, str]:
    """Prepare the folder for the shards of a plan, and return the hashes of the partitions that are kept.

    Returns:
        {number: `partition_sha256`} of all complete partitions of an unfinished folder. The caller compares the hashes
        to find the partitions that fit the plan. Everything else in the folder is deleted.
    """
    files = open_folder(folder)
    sizes_bytes = files.list_files()
    before = recorded_plan(folder)
    if before is None or MANIFEST_NAME in sizes_bytes:
        clear_folder(folder)
        files.write_json(PLAN_NAME, plan)
        return {}
    may_have_bad_rows = plan["corpus"]["settings"]["on_bad_row"] == "skip"
    complete: dict[int, str] = {}
    shards: set[str] = set()
    for result in read_results(folder):
        has_all_shards = all(sizes_bytes.get(shard.name) == shard.num_bytes for shard in result.shards)
        if has_all_shards and (may_have_bad_rows or not result.bad_rows.num_rows):
            complete[result.index] = result.sha256
            shards.update(shard.name for shard in result.shards)
    stale = [name for name in sizes_bytes if sidecar_index(name) not in {None, *complete}]
    files.delete_files(stale)  # sidecars are deleted first, before the shards that they name
    files.delete_files([name for name in sizes_bytes if name.endswith(".tfrecord") and name not in shards])
    _delete_partials(folder)
    files.write_json(PLAN_NAME, plan)  # again, because files of the corpus may have changed
    logger.info("%s is unfinished: its %d complete partitions are kept", folder, len(complete))
    changes = describe_changes(before["corpus"], plan["corpus"])
    versions = describe_differences({"versions": _versions(before)}, {"versions": _versions(plan)})
    if changes := "; ".join(filter(None, (changes, versions))):
        logger.warning(
            "The corpus or the versions of libraries have changed, so the affected partitions are rebuilt: %s", changes
        )
    return complete


def finish_folder(folder: str) -> None:
    """Delete the files that only an unfinished folder has.

    The plan is deleted last, so that no sidecar is left without a plan.
    """
    files = open_folder(folder)
    files.delete_files([name for name in files.list_files() if sidecar_index(name) is not None])
    files.delete_files([PLAN_NAME])
    _delete_partials(folder)


def clear_folder(folder: str) -> None:
    """Delete manifest, sidecars, shards and plan, in this order, so that the folder never looks complete."""
    files = open_folder(folder)
    names = files.list_files()
    files.delete_files([MANIFEST_NAME])
    files.delete_files([name for name in names if sidecar_index(name) is not None])
    files.delete_files([name for name in names if name.endswith(".tfrecord")])
    tokenizer_files = files.subfolder(TOKENIZER_FOLDER_NAME)
    tokenizer_files.delete_files(tokenizer_files.list_files())
    finish_folder(folder)


def read_results(folder: str) -> Iterator[PartitionResult]:
    names = [name for name in open_folder(folder).list_files() if sidecar_index(name) is not None]
    names.sort(key=lambda name: sidecar_index(name) or 0)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for start in range(0, len(names), NUM_READERS):  # a few at a time, because each has the counts of all ids
            yield from filter(None, pool.map(partial(read_sidecar, folder), names[start : start + NUM_READERS]))


def sidecar_name(index: int) -> str:
    return f"partition-{index:05d}.json"


def sidecar_index(name: str) -> int | None:
    """Return the number of the partition from the name of its sidecar; None for any other file."""
    match = SIDECAR_NAME.match(name)
    return int(match[1]) if match else None


def write_sidecar(folder: str, result: PartitionResult) -> None:
    """Write `partition-{index}.json`.

    The sidecar must be the last file of a partition, because it marks the partition as complete.
    """
    record = {
        "sha256": result.sha256,
        "shards": [dataclasses.asdict(shard) for shard in result.shards],
        "totals": dataclasses.asdict(result.totals),
        "bad_rows": dataclasses.asdict(result.bad_rows),
        "id_counts": base64.b64encode(zlib.compress(result.id_counts.astype("<i8").tobytes(), level=1)).decode(),
    }
    open_folder(folder).write_text(sidecar_name(result.index), json.dumps(record))


def read_sidecar(folder: str, name: str) -> PartitionResult | None:
    """Read a sidecar; None if it is damaged."""
    try:
        record = json.loads(open_folder(folder).read_text(name))
        counts = zlib.decompress(base64.b64decode(record["id_counts"]))
        return PartitionResult(
            index=sidecar_index(name) or 0,
            sha256=record["sha256"],
            shards=tuple(ShardRecord(**shard) for shard in record["shards"]),
            totals=Totals(**record["totals"]),
            bad_rows=bad_rows_from_record(record["bad_rows"]),
            id_counts=np.frombuffer(counts, "<i8"),
        )
    except (KeyError, TypeError, ValueError, zlib.error):
        return None


def _delete_partials(folder: str) -> None:
    """Delete partial files that killed writes left in the folder, and the probe that `check_writable` left above it."""
    files, parent = open_folder(folder), folder_and_name(folder)[0]
    for place, prefix in ((files, ""), (files.subfolder(TOKENIZER_FOLDER_NAME), ""), (parent, PROBE_PREFIX)):
        place.delete_partial_files(prefix)
