"""The folder of a split in every state: empty, complete, unfinished, or somebody else's.

While it is made it holds `plan.json`, written first, then shards, and a sidecar for each partition that is complete. At
the end `manifest.json` is written; then plan and sidecars are deleted. So a kill at any moment leaves a folder that
does not look complete, and of which the next run knows what is done. A sidecar has a hash of what its partition was
made of: of a file that was mended meanwhile its own partitions are made again, and no others.
"""

import base64
import dataclasses
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.corpus.bad_rows import BadRows, bad_rows_from_record
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.corpus import Partition
from mlm_common.corpus.record import describe_changes, describe_unknown
from mlm_common.errors import InputError
from mlm_common.storage import PROBE_PREFIX, folder_and_name, open_folder
from tfrecord_prep.manifest import (
    MANIFEST_NAME,
    OWN_SHARD_NAME,
    PLAN_NAME,
    TOKENIZER_FOLDER_NAME,
    ShardRecord,
    Totals,
    open_shards,
    read_manifest,
)
from tfrecord_prep.plan import describe_plan_differences, plan_settings, without_on_bad_row

logger = logging.getLogger(__name__)

SIDECAR_NAME = re.compile(r"^partition-(\d{5,})\.json$")
NUM_READERS = 8


@dataclass(frozen=True)
class PartitionResult:
    """What became of partition number `index`, made of what `sha256` says.

    `id_counts` is of the text, without framing and unknown tokens.
    """

    index: int
    sha256: str
    shards: tuple[ShardRecord, ...]
    totals: Totals
    bad_rows: BadRows
    id_counts: NDArray[np.int64]  # (vocabulary_size,)


def check_folder(folder: str, plan: dict[str, Any]) -> bool:
    """Tell whether the folder is complete; an unfinished one must have a plan of these settings.

    Args:
        folder: of one split.
        plan: the fields of its manifest that are known beforehand, as JSON knows them. A complete folder may have been
            made with other versions; of an unfinished one the corpus's files may have changed.

    Raises:
        InputError: it holds shards of other settings, of unknown origin, or damaged ones.
    """
    names = open_folder(folder).list_files()
    hint = "Choose another --output-dir, or pass --overwrite to replace them."
    if MANIFEST_NAME in names:
        manifest = read_manifest(folder)
        found = dataclasses.asdict(manifest)
        if not (manifest.bad_rows and manifest.bad_rows.num_rows):
            found, plan = without_on_bad_row(found), without_on_bad_row(plan)
        if differences := describe_plan_differences(found, plan, of_manifest=True):
            raise InputError(f"{folder} contains shards of other settings: {differences}. {hint}")
        if unknown := describe_unknown(found["corpus"]):
            logger.warning("%s is of an older version, which did not record %s: not compared.", folder, unknown)
        open_shards(folder)
        return True
    if PLAN_NAME in names and (differences := describe_plan_differences(_read_plan(folder), plan, of_manifest=False)):
        raise InputError(f"{folder} contains unfinished shards of other settings: {differences}. {hint}")
    foreign = [name for name in names if name.endswith(".tfrecord") and not OWN_SHARD_NAME.match(name)]
    if foreign:
        raise InputError(f"{folder} contains shards that this command did not write, such as {foreign[0]}. {hint}")
    return False


def partition_bytes_of(folder: str) -> int | None:
    """Look up the size of the partitions of a folder, complete or not; None where it has no shards."""
    names = open_folder(folder).list_files()
    if MANIFEST_NAME in names:
        return read_manifest(folder).partition_bytes
    return _read_plan(folder).get("partition_bytes") if PLAN_NAME in names else None


def corpus_of_folder(folder: str) -> dict[str, Any] | None:
    """Read which corpus the shards in a folder are of, complete or not; None without shards of this command.

    Raises:
        InputError: manifest or plan cannot be read.
    """
    names = open_folder(folder).list_files()
    if MANIFEST_NAME in names:
        return read_manifest(folder).corpus
    return _read_plan(folder).get("corpus") if PLAN_NAME in names else None


def partition_sha256(plan: dict[str, Any], partition: Partition) -> str:
    """Hash what a partition is made of: the plan's settings, the content of its byte ranges, or its documents."""
    digest = hashlib.sha256(json.dumps(plan_settings(plan), sort_keys=True).encode())
    for item in partition:
        if isinstance(item, ByteRange):
            file = item.file
            content = json.dumps([PurePath(file.name).name, file.num_bytes, file.checksum, item.start, item.stop])
        else:
            content = item
        digest.update(len(content).to_bytes(8, "little") + content.encode())
    return digest.hexdigest()


class CompletePartitions:
    """The partitions of an unfinished folder that are complete; each is asked for once."""

    def __init__(self, folder: str, results: Iterable[PartitionResult]) -> None:
        self._folder = folder
        self._sha256 = {}
        self._shards: dict[int, list[str]] = {}
        for result in results:
            self._sha256[result.index] = result.sha256
            self._shards[result.index] = [shard.name for shard in result.shards]

    def __len__(self) -> int:
        return len(self._sha256)

    def keep(self, index: int, sha256: str) -> bool:
        """Tell whether partition number `index` is complete; what was made of something else is deleted."""
        found = self._sha256.pop(index, None)
        if found not in {None, sha256}:
            self._delete(index)
        return found == sha256

    def delete_others(self) -> None:
        """Delete the partitions that were not asked for."""
        for index in self._sha256:
            self._delete(index)
        self._sha256 = {}

    def _delete(self, index: int) -> None:
        files = open_folder(self._folder)
        files.delete_files([sidecar_name(index)])  # before the shards it speaks of
        files.delete_files(self._shards[index])


def begin_folder(folder: str, plan: dict[str, Any]) -> CompletePartitions:
    """Make the folder ready for the shards of a plan, and return the partitions that are complete.

    Of an unfinished folder of the same settings the complete partitions stay; everything else is deleted.
    """
    files = open_folder(folder)
    sizes_bytes = files.list_files()
    before = _read_plan(folder) if PLAN_NAME in sizes_bytes else None
    is_same = before is not None and not describe_plan_differences(before, plan, of_manifest=False)
    if MANIFEST_NAME in sizes_bytes or before is None or not is_same:
        clear_folder(folder)
        files.write_json(PLAN_NAME, plan)
        return CompletePartitions(folder, ())
    may_have_bad_rows = plan["corpus"]["settings"]["on_bad_row"] == "skip"
    numbers: set[int] = set()
    shards: set[str] = set()

    def complete() -> Iterator[PartitionResult]:
        for result in read_results(folder):
            is_there = all(sizes_bytes.get(shard.name) == shard.num_bytes for shard in result.shards)
            if is_there and (may_have_bad_rows or not result.bad_rows.num_rows):
                numbers.add(result.index)
                shards.update(shard.name for shard in result.shards)
                yield result

    partitions = CompletePartitions(folder, complete())
    stale = [name for name in sizes_bytes if sidecar_index(name) not in {None, *numbers}]
    files.delete_files(stale)  # before the shards they speak of
    files.delete_files([name for name in sizes_bytes if name.endswith(".tfrecord") and name not in shards])
    _delete_partials(folder)
    files.write_json(PLAN_NAME, plan)  # files of the corpus may have changed
    logger.info("%s is unfinished: its %d complete partitions stay", folder, len(numbers))
    if changes := describe_changes(without_on_bad_row(before)["corpus"], without_on_bad_row(plan)["corpus"]):
        logger.warning("The corpus changed since, and what was made of it is made again: %s", changes)
    return partitions


def finish_folder(folder: str) -> None:
    """Delete what only an unfinished folder has: the plan last, so that sidecars never stand without it."""
    files = open_folder(folder)
    names = files.list_files()
    files.delete_files([name for name in names if sidecar_index(name) is not None])
    files.delete_files([name for name in names if name == PLAN_NAME])
    _delete_partials(folder)


def clear_folder(folder: str) -> None:
    """Delete the manifest, the sidecars, then the shards, so that nothing ever seems complete, and last the plan."""
    files = open_folder(folder)
    names = files.list_files()
    files.delete_files([name for name in names if name == MANIFEST_NAME])
    files.delete_files([name for name in names if sidecar_index(name) is not None])
    files.delete_files([name for name in names if name.endswith(".tfrecord")])
    tokenizer_files = files.subfolder(TOKENIZER_FOLDER_NAME)
    tokenizer_files.delete_files(tokenizer_files.list_files())
    finish_folder(folder)


def read_results(folder: str) -> Iterator[PartitionResult]:
    """Yield what the sidecars tell, in the order of the partitions."""
    names = [name for name in open_folder(folder).list_files() if sidecar_index(name) is not None]
    names.sort(key=lambda name: sidecar_index(name) or 0)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for start in range(0, len(names), NUM_READERS):  # few at a time, since each has the counts of all ids
            yield from filter(None, pool.map(partial(read_sidecar, folder), names[start : start + NUM_READERS]))


def sidecar_name(index: int) -> str:
    """Name the sidecar of partition number `index`."""
    return f"partition-{index:05d}.json"


def sidecar_index(name: str) -> int | None:
    """Read the number of the partition whose sidecar has this name, None for another file."""
    match = SIDECAR_NAME.match(name)
    return int(match[1]) if match else None


def write_sidecar(folder: str, result: PartitionResult) -> None:
    """Write `partition-{index}.json`, which declares a partition complete: the last of its files."""
    record = {
        "sha256": result.sha256,
        "shards": [dataclasses.asdict(shard) for shard in result.shards],
        "totals": dataclasses.asdict(result.totals),
        "bad_rows": dataclasses.asdict(result.bad_rows),
        "id_counts": base64.b64encode(zlib.compress(result.id_counts.astype("<i8").tobytes(), level=1)).decode(),
    }
    open_folder(folder).write_text(sidecar_name(result.index), json.dumps(record))


def read_sidecar(folder: str, name: str) -> PartitionResult | None:
    """Read the sidecar of that name, None where it is none."""
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


def _read_plan(folder: str) -> dict[str, Any]:
    files = open_folder(folder)
    try:
        return dict(json.loads(files.read_text(PLAN_NAME)))
    except (TypeError, ValueError) as error:
        path = files.path_of(PLAN_NAME)
        raise InputError(f"A plan must be a JSON object; {path}: {error}. Delete it to begin anew.") from error


def _delete_partials(folder: str) -> None:
    """Delete what killed writes have left in the folder, and the probe of a killed `check_writable` above it."""
    files, parent = open_folder(folder), folder_and_name(folder)[0]
    for place, prefix in ((files, ""), (files.subfolder(TOKENIZER_FOLDER_NAME), ""), (parent, PROBE_PREFIX)):
        place.delete_partial_files(prefix)
