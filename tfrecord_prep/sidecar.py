"""What became of a partition, kept beside its shards until the manifest is written: its completion marker."""

import base64
import dataclasses
import json
import re
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfrecord_prep.manifest import ShardRecord, Totals
from tokenizer_training import storage

SIDECAR_NAME = re.compile(r"^partition-(\d{5,})\.json$")


@dataclass(frozen=True)
class PartitionResult:
    """What became of partition number `index`; `id_counts` is of the text, without framing and unknown tokens."""

    index: int
    shards: tuple[ShardRecord, ...]
    totals: Totals
    id_counts: NDArray[np.int64]  # (vocabulary_size,)


def sidecar_name(index: int) -> str:
    """Return the name of the sidecar of partition number `index`."""
    return f"partition-{index:05d}.json"


def sidecar_index(name: str) -> int | None:
    """Return the number of the partition whose sidecar has this name, None for another file."""
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
    storage.write_text(storage.join(folder, sidecar_name(result.index)), json.dumps(record))


def read_sidecar(folder: str, name: str, plan_sha256: str) -> PartitionResult | None:
    """Return what the sidecar of that name tells, None where it is of another plan or no sidecar at all."""
    try:
        record = json.loads(storage.read_text(storage.join(folder, name)))
        if record["plan_sha256"] != plan_sha256:
            return None
        counts = zlib.decompress(base64.b64decode(record["id_counts"]))
        shards = tuple(ShardRecord(**shard) for shard in record["shards"])
        totals = Totals(**record["totals"])
    except (KeyError, TypeError, ValueError, zlib.error):
        return None
    return PartitionResult(sidecar_index(name) or 0, shards, totals, np.frombuffer(counts, "<i8"))
