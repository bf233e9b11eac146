"""The folder of a split in every state: empty, complete, unfinished, or somebody else's.

While it is made it holds `plan.json`, written first, then shards, and a sidecar for each partition that is complete. At
the end `manifest.json` is written; then plan and sidecars are deleted. So a kill at any moment leaves a folder that
does not look complete, and of which the next run knows what is done.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.settings import describe_differences
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

logger = logging.getLogger(__name__)

SIDECAR_NAME = re.compile(r"^partition-(\d{5,})\.json$")
NUM_READERS = 8


@dataclass(frozen=True)
class PartitionResult:
    """What became of partition number `index`; `id_counts` is of the text, without framing and unknown tokens."""

    index: int
    shards: tuple[ShardRecord, ...]
    totals: Totals
    id_counts: NDArray[np.int64]  # (vocabulary_size,)


def check_folder(folder: str, plan: dict[str, Any]) -> bool:
    """Tell whether the folder is complete; an unfinished one must have this very plan.

    Args:
        folder: of one split.
        plan: the fields of its manifest that are known beforehand, as JSON knows them. A complete folder may have been
            made with other versions.

    Raises:
        InputError: it holds shards of other settings, of unknown origin, or damaged ones.
    """
    names = open_folder(folder).list_files()
    cure = "Give another --output-dir, or --overwrite to replace them."
    if MANIFEST_NAME in names:
        found = dataclasses.asdict(read_manifest(folder)) | {"versions": plan["versions"]}
        _check_same(found, plan, f"{folder} holds shards of other settings", cure)
        open_shards(folder)
        return True
    if PLAN_NAME in names:
        _check_same(_read_plan(folder), plan, f"{folder} holds unfinished shards of other settings", cure)
    foreign = [name for name in names if name.endswith(".tfrecord") and not OWN_SHARD_NAME.match(name)]
    if foreign:
        raise InputError(f"{folder} holds shards that this command did not write, such as {foreign[0]}. {cure}")
    return False


def plan_sha256(plan: dict[str, Any]) -> str:
    """Hash what tells this plan from any other."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def begin_folder(folder: str, plan: dict[str, Any]) -> set[int]:
    """Make the folder ready for the shards of a plan, and return the numbers of the partitions that are complete.

    Of an unfinished folder of the same plan the complete partitions stay; everything else is deleted.
    """
    files = open_folder(folder)
    sizes_bytes = files.list_files()
    if MANIFEST_NAME in sizes_bytes or PLAN_NAME not in sizes_bytes or _read_plan(folder) != plan:
        clear_folder(folder)
        files.write_json(PLAN_NAME, plan)
        return set()
    complete = [
        result
        for result in read_results(folder, plan)
        if all(sizes_bytes.get(shard.name) == shard.num_bytes for shard in result.shards)
    ]
    numbers = {result.index for result in complete}
    shards = {shard.name for result in complete for shard in result.shards}
    stale = [name for name in sizes_bytes if sidecar_index(name) not in {None, *numbers}]
    files.delete_files(stale)  # before the shards they speak of
    files.delete_files([name for name in sizes_bytes if name.endswith(".tfrecord") and name not in shards])
    _delete_partials(folder)
    logger.info("%s is unfinished: its %d complete partitions stay", folder, len(numbers))
    return numbers


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


def read_results(folder: str, plan: dict[str, Any]) -> Iterator[PartitionResult]:
    """Yield what the sidecars of this plan tell, in the order of the partitions."""
    names = [name for name in open_folder(folder).list_files() if sidecar_index(name) is not None]
    names.sort(key=lambda name: sidecar_index(name) or 0)
    read = partial(read_sidecar, folder, plan_sha256=plan_sha256(plan))
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for start in range(0, len(names), NUM_READERS):  # few at a time, since each has the counts of all ids
            yield from filter(None, pool.map(read, names[start : start + NUM_READERS]))


def sidecar_name(index: int) -> str:
    """Name the sidecar of partition number `index`."""
    return f"partition-{index:05d}.json"


def sidecar_index(name: str) -> int | None:
    """Read the number of the partition whose sidecar has this name, None for another file."""
    match = SIDECAR_NAME.match(name)
    return int(match[1]) if match else None


def write_sidecar(folder: str, plan_sha256: str, result: PartitionResult) -> None:
    """Write `partition-{index}.json`, which declares a partition of this plan complete: the last of its files."""
    record = {
        "plan_sha256": plan_sha256,
        "shards": [dataclasses.asdict(shard) for shard in result.shards],
        "totals": dataclasses.asdict(result.totals),
        "id_counts": base64.b64encode(zlib.compress(result.id_counts.astype("<i8").tobytes(), level=1)).decode(),
    }
    open_folder(folder).write_text(sidecar_name(result.index), json.dumps(record))


def read_sidecar(folder: str, name: str, plan_sha256: str) -> PartitionResult | None:
    """Read the sidecar of that name, None where it is of another plan or no sidecar at all."""
    try:
        record = json.loads(open_folder(folder).read_text(name))
        if record["plan_sha256"] != plan_sha256:
            return None
        counts = zlib.decompress(base64.b64decode(record["id_counts"]))
        shards = tuple(ShardRecord(**shard) for shard in record["shards"])
        totals = Totals(**record["totals"])
    except (KeyError, TypeError, ValueError, zlib.error):
        return None
    return PartitionResult(sidecar_index(name) or 0, shards, totals, np.frombuffer(counts, "<i8"))


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


def _check_same(found: dict[str, Any], asked: dict[str, Any], problem: str, cure: str) -> None:
    if differences := describe_differences(found, asked):
        raise InputError(f"{problem}: {differences}. {cure}")
