"""Write and read TFRecord files of `tf.train.Example` records, without TensorFlow.

A record has two features, both int64 lists of `max_length` values: `input_ids`, and `attention_mask`, which is 1 for
tokens and 0 for padding. The record of a segment pair has a third feature, `next_sentence_label`, with one value.

The formats are described in https://www.tensorflow.org/tutorials/load_data/tfrecord (framing) and
https://protobuf.dev/programming-guides/encoding (messages).
"""

import io
import struct
from collections.abc import Iterator, Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlm_common.storage import read_file

LABEL_KEY = "next_sentence_label"

_LENGTH_DELIMITED = 2
_CRC_MASK_DELTA = 0xA282EAD8


def encode_rows(
    input_ids: NDArray[np.int32],
    num_tokens_per_row: NDArray[np.int64],
    next_sentence_labels: NDArray[np.int64] | None = None,
) -> bytes:
    """Encode rows as the content of a TFRecord file, with one record per row.

    Args:
        input_ids: non-negative ids; (num_rows, max_length).
        num_tokens_per_row: number of ids before the padding; (num_rows,).
        next_sentence_labels: 0 or 1 for segment pairs, None for other rows; (num_rows,).
    """
    max_length = input_ids.shape[1]
    packed_ids, sizes_bytes = _packed_varints(input_ids)
    offsets = [0, *np.cumsum(sizes_bytes).tolist()]
    lengths = num_tokens_per_row.tolist()
    masks = {n: _feature(b"attention_mask", b"\1" * n + b"\0" * (max_length - n)) for n in set(lengths)}
    labels = [b""] * len(lengths)
    if next_sentence_labels is not None:
        encoded = [_feature(LABEL_KEY.encode(), bytes([label])) for label in (0, 1)]
        labels = [encoded[label] for label in next_sentence_labels.tolist()]
    records = bytearray()
    for start, end, num_tokens, label in zip(offsets[:-1], offsets[1:], lengths, labels, strict=True):
        example = _field(1, _feature(b"input_ids", packed_ids[start:end]) + masks[num_tokens] + label)
        records += _framed(example)
    return bytes(records)


def read_records(content: bytes | io.BufferedIOBase) -> Iterator[bytes]:
    """Yield the serialized examples of a TFRecord file, in order.

    Raises:
        ValueError: the file is damaged; the message says at which byte.
    """
    file: io.BufferedIOBase = io.BytesIO(content) if isinstance(content, bytes) else content
    start = 0
    while header := file.read(12):
        if len(header) < 12 or _masked_crc32c(header[:8]) != header[8:]:
            raise ValueError(f"no record starts at byte {start}")
        num_bytes = int.from_bytes(header[:8], "little")
        record = file.read(num_bytes)
        if _masked_crc32c(record) != file.read(4):
            raise ValueError(f"the record at byte {start} is truncated or corrupted")
        yield record
        start += 12 + num_bytes + 4


def decode_feature(example: bytes, key: str) -> NDArray[np.int64]:
    """Decode an int64 feature of a serialized example; (num_values,).

    Raises:
        KeyError: the example does not have the feature.
    """
    return _unpacked_varints(_packed_feature(example, key))


def feature_names(example: bytes) -> set[str]:
    """Return the names of the features of a serialized example."""
    return {_fields(entry)[0][1].decode() for _, entry in _fields(_fields(example)[0][1])}


def first_row_ids(path: str) -> NDArray[np.int64]:
    """Read the `input_ids` of the first row of a shard, local or `gs://`; (max_length,)."""
    return decode_feature(next(read_records(read_file(path))), "input_ids")


def decode_rows(examples: Sequence[bytes], key: str, max_length: int) -> NDArray[np.int64]:
    """Decode an int64 feature of many serialized examples; (num_examples, max_length).

    Raises:
        ValueError: an example is malformed, lacks the feature, or has a different number of values. The message names
            the example.
    """
    packed = []
    for row, example in enumerate(examples):
        try:
            packed.append(_packed_feature(example, key))
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(f"row {row} is not an example with {key}") from error
    joined = b"".join(packed)
    num_ended = np.append(0, np.cumsum(np.frombuffer(joined, np.uint8) < 0x80))
    num_values = np.diff(num_ended[np.cumsum([0, *map(len, packed)])])
    if (num_values != max_length).any():
        row = int(np.argmax(num_values != max_length))
        raise ValueError(f"row {row} has {num_values[row]} values of {key}, not {max_length}")
    return _unpacked_varints(joined).reshape(len(packed), max_length)


def _packed_feature(example: bytes, key: str) -> bytes:
    for entry in _fields(_fields(example)[0][1]):
        (_, name), (_, feature) = _fields(entry[1])
        if name == key.encode():
            return b"".join(value for _, value in _fields(_fields(feature)[0][1]))
    raise KeyError(key)


def _packed_varints(rows: NDArray[np.int32]) -> tuple[bytes, NDArray[np.int64]]:
    """Encode all values as varints, row by row; return the varints and the number of bytes of each row, (num_rows,)."""
    num_bytes = np.ones(rows.shape, np.int8)
    for shift in range(7, 32, 7):
        num_bytes += rows >= 1 << shift
    width = int(num_bytes.max(initial=1))
    groups = np.empty((*rows.shape, width), np.uint8)  # (num_rows, max_length, width)
    for position in range(width):
        groups[..., position] = rows >> 7 * position & 0x7F | (num_bytes > position + 1) << 7
    packed = groups[np.arange(width) < num_bytes[..., None]]
    return packed.tobytes(), num_bytes.sum(axis=1, dtype=np.int64)


def _unpacked_varints(packed: bytes) -> NDArray[np.int64]:
    groups = np.frombuffer(packed, np.uint8)
    starts = np.append(0, np.flatnonzero(groups < 0x80) + 1)
    num_groups = np.diff(starts)
    values = (groups[starts[:-1]] & 0x7F).astype(np.int64)
    for position in range(1, int(num_groups.max(initial=1))):
        longer = np.flatnonzero(num_groups > position)
        values[longer] |= (groups[starts[longer] + position] & 0x7F).astype(np.int64) << 7 * position
    return values


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varint(len(content)) + content


def _feature(key: bytes, packed_values: bytes) -> bytes:
    """Encode an entry of `Features` with an int64 list: {key: Feature(int64_list=Int64List(value=…))}."""
    int64_list = _field(1, packed_values)
    return _field(1, _field(1, key) + _field(2, _field(3, int64_list)))


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Split a message into its fields (number, content). All fields must be length-delimited."""
    fields, position = [], 0
    while position < len(message):
        number = message[position] >> 3
        position += 1
        length, shift = 0, 0
        while True:
            group = message[position]
            position += 1
            length |= (group & 0x7F) << shift
            shift += 7
            if group < 0x80:
                break
        fields.append((number, message[position : position + length]))
        position += length
    return fields


def _framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + _masked_crc32c(length) + record + _masked_crc32c(record)


def _masked_crc32c(data: bytes) -> bytes:
    """Compute TFRecord's checksum: a rotated CRC32C plus a constant, because a plain CRC of data with CRCs is weak."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & 0xFFFFFFFF)
