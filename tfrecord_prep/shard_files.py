"""Write rows as TFRecord shards, each uploaded or flushed to disk while the next is made."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import google_crc32c

from tfrecord_prep.chunking import Rows
from tfrecord_prep.manifest import ShardRecord
from tfrecord_prep.records import encode_rows
from tokenizer_training import storage


@dataclass(frozen=True)
class _Shard:
    """The content of a shard and what it counts."""

    data: bytes
    num_rows: int
    num_tokens: int


def write_shards(folder: str, partition: int, rows: Iterable[Rows], shard_size: int) -> tuple[ShardRecord, ...]:
    """Write the rows of a partition in shards of `shard_size`, the last with what remains, and return their records."""
    records: list[ShardRecord] = []
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for number, shard in enumerate(_shards(rows, shard_size)):
            name = f"dataset-{partition:05d}-{number:05d}-{shard.num_rows}.tfrecord"
            crc32c = f"{google_crc32c.value(shard.data):08x}"
            records.append(ShardRecord(name, shard.num_rows, shard.num_tokens, len(shard.data), crc32c))
            if written:
                written.result()
            written = writer.submit(storage.write_bytes, storage.join(folder, name), shard.data)
        if written:
            written.result()
    return tuple(records)


def _shards(rows: Iterable[Rows], shard_size: int) -> Iterator[_Shard]:
    parts: list[bytes] = []
    num_rows = num_tokens = 0
    for some in rows:
        start = 0
        while start < len(some.input_ids):
            end = min(start + shard_size - num_rows, len(some.input_ids))
            tokens_per_row = some.num_tokens_per_row[start:end]
            parts.append(encode_rows(some.input_ids[start:end], tokens_per_row))
            num_rows, num_tokens = num_rows + end - start, num_tokens + int(tokens_per_row.sum())
            if num_rows == shard_size:
                yield _Shard(b"".join(parts), num_rows, num_tokens)
                parts, num_rows, num_tokens = [], 0, 0
            start = end
    if num_rows:
        yield _Shard(b"".join(parts), num_rows, num_tokens)
