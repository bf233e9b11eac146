"""Write rows as TFRecord shards, each uploaded or flushed to disk while the next is made."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import google_crc32c

from tfrecord_prep.chunking import Rows
from tfrecord_prep.manifest import ShardRecord
from tfrecord_prep.records import encode_rows
from tokenizer_training.streamed_file import StreamedFile


def write_shards(folder: str, partition: int, rows: Iterable[Rows], shard_size: int) -> tuple[ShardRecord, ...]:
    """Write the rows of a partition in shards of `shard_size`, the last with what remains, and return their records.

    No shard is held in memory.
    """
    records: list[ShardRecord] = []
    with ExitStack() as files, ThreadPoolExecutor(1) as finisher:
        shard: _Shard | None = None
        finished: Future[None] | None = None

        def finish(shard: _Shard) -> Future[None]:
            if finished:
                finished.result()  # one at a time, so that what fails stops the work soon
            records.append(shard.record(f"dataset-{partition:05d}-{len(records):05d}-{shard.num_rows}.tfrecord"))
            return finisher.submit(shard.finish, records[-1].name)

        for some in rows:
            start = 0
            while start < len(some.input_ids):
                shard = shard or _Shard(files.enter_context(StreamedFile(folder)))
                end = min(start + shard_size - shard.num_rows, len(some.input_ids))
                shard.write(Rows(some.input_ids[start:end], some.num_tokens_per_row[start:end]))
                if shard.num_rows == shard_size:
                    finished, shard = finish(shard), None
                start = end
        if shard:
            finished = finish(shard)
        if finished:
            finished.result()
    return tuple(records)


class _Shard:
    """A shard that is being written, and what it counts."""

    def __init__(self, file: StreamedFile) -> None:
        self._file = file
        self._checksum = google_crc32c.Checksum()
        self._num_bytes = self._num_tokens = self.num_rows = 0

    def write(self, rows: Rows) -> None:
        """Append rows."""
        data = encode_rows(rows.input_ids, rows.num_tokens_per_row)
        self._file.write(data)
        self._checksum.update(data)
        self._num_bytes += len(data)
        self._num_tokens += int(rows.num_tokens_per_row.sum())
        self.num_rows += len(rows.input_ids)

    def record(self, name: str) -> ShardRecord:
        """Return its record under this name."""
        return ShardRecord(name, self.num_rows, self._num_tokens, self._num_bytes, self._checksum.hexdigest().decode())

    def finish(self, name: str) -> None:
        """Store it under this name."""
        with self._file:
            self._file.finish(name)
