"""Records: what TensorFlow reads of them is what went in."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from tfrecord_prep.records import decode_feature, encode_rows, read_records

MAX_ID = 2**31 - 1


@st.composite
def rows_strategy(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    num_rows, max_length = draw(st.integers(0, 6)), draw(st.integers(1, 150))
    # Ids around the borders between sizes of varints, beside arbitrary ones.
    borders = [border + step for border in (1 << 7, 1 << 14, 1 << 16, 1 << 21, 1 << 28) for step in (-1, 0)]
    ids = st.one_of(st.sampled_from([0, MAX_ID, *borders]), st.integers(0, MAX_ID))
    input_ids = draw(hypothesis_numpy.arrays(np.int32, (num_rows, max_length), elements=ids))
    num_tokens = draw(hypothesis_numpy.arrays(np.int64, num_rows, elements=st.integers(0, max_length)))
    return input_ids, num_tokens


@given(rows=rows_strategy())
@settings(max_examples=40)
def test_tensorflow_reads_what_we_read(tmp_path_factory, rows):
    import tensorflow as tf

    input_ids, num_tokens = rows
    path = tmp_path_factory.getbasetemp() / "rows.tfrecord"
    path.write_bytes(encode_rows(input_ids, num_tokens))
    ours = list(read_records(path.read_bytes()))
    read = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())  # checks every checksum
    assert read == ours
    for record, row, length in zip(ours, input_ids, num_tokens, strict=True):
        expected = {"input_ids": row.tolist(), "attention_mask": [1] * length + [0] * (len(row) - length)}
        features = tf.train.Example.FromString(record).features.feature
        assert {name: list(feature.int64_list.value) for name, feature in features.items()} == expected
        assert {name: decode_feature(record, name).tolist() for name in expected} == expected


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_every_changed_bit_is_noticed(position, bit):
    data = bytearray(encode_rows(np.arange(40, dtype=np.int32).reshape(2, 20) * 9, np.array([20, 5])))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(ValueError, match="at byte"):
        list(read_records(bytes(data)))


def test_truncation_is_noticed():
    data = encode_rows(np.arange(20, dtype=np.int32).reshape(1, 20), np.array([20]))
    for end in range(1, len(data)):
        with pytest.raises(ValueError, match="at byte 0"):
            list(read_records(data[:end]))
