"""What TensorFlow and JAX fail by: one line, and whether to try again."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from jax.errors import JaxRuntimeError

from mlm_common.errors import PermanentError, RunFailedError
from tfrecord_prep.records import encode_rows
from train.data.inputs import Feature
from train.data.pipeline import SampleOrder, training_batches
from train.runtime.device_errors import explained_failures, is_lost
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder

RUN, LENGTH, NUM_ROWS = RunFolder("run"), 8, 6
LOST = "The device was lost.* from the newest checkpoint in run"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (tf.errors.UnavailableError(None, None, "failed to connect"), RunFailedError, LOST),
        (tf.errors.AbortedError(None, None, "Socket closed"), RunFailedError, LOST),
        (tf.errors.AbortedError(None, None, "All 10 retry attempts failed. HTTP 503"), RunFailedError, "Cloud Storage"),
        (tf.errors.ResourceExhaustedError(None, None, "Ran out of memory"), PermanentError, "Halve --per-replica"),
        (tf.errors.InvalidArgumentError(None, None, "a bad shape"), tf.errors.InvalidArgumentError, "a bad shape"),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: allocating"),
            PermanentError,
            "Halve .* JAX says: RESOURCE_EXHAUSTED: all",
        ),
        (JaxRuntimeError("UNAVAILABLE: gone\nsecond line"), RunFailedError, f"{LOST}. JAX says: UNAVAILABLE: gone sec"),
        (JaxRuntimeError("DEADLINE_EXCEEDED: no answer"), RunFailedError, f"{LOST}. JAX says: DEADLINE_EXCEEDED: no a"),
        (JaxRuntimeError("INTERNAL: a bug"), JaxRuntimeError, "INTERNAL: a bug"),
        (RuntimeError("of something else"), RuntimeError, "of something else"),
    ],
)
def test_what_a_user_can_fix_is_explained(error, kind, said):
    with pytest.raises(kind, match=said) as caught, explained_failures(Cluster(), RUN):
        raise error
    assert caught.type is kind


GLOO = "UNKNOWN: Buffer Definition Event: Gloo AllReduce failed: [pair.cc:534] Connection closed by peer [127.0.0.1]:4"


@pytest.mark.parametrize("error", [JaxRuntimeError(GLOO), tf.errors.AbortedError(None, None, "[op] Socket closed")])
def test_a_lost_worker_is_said_to_be_lost(error):
    said, cluster = r"A worker was lost, so the others stop.* on all workers", Cluster(("one:1", "two:2"), 1)
    with pytest.raises(RunFailedError, match=said), explained_failures(cluster, RUN):
        raise error


def test_the_errors_of_lost_devices():
    """Of which the proofs on the first rows say nothing."""
    assert is_lost(JaxRuntimeError("UNAVAILABLE: gone"))
    assert is_lost(tf.errors.CancelledError(None, None, "gone"))
    assert not is_lost(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not is_lost(tf.errors.ResourceExhaustedError(None, None, "UNAVAILABLE: memory"))
    assert not is_lost(ValueError("UNAVAILABLE: it is no status"))


def rows_of(num_rows=NUM_ROWS, length=LENGTH):
    return encode_rows(np.ones((num_rows, length), np.int32), np.full(num_rows, length))


DAMAGES = {
    "a bit": lambda shard: shard.write_bytes(rows_of()[:60] + b"?" + rows_of()[61:]),
    "shorter rows": lambda shard: shard.write_bytes(rows_of(length=LENGTH - 1)),
    "fewer rows": lambda shard: shard.write_bytes(rows_of(1)),
    "no file": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_cannot_be_read_is_not_tried_again(damage, tmp_path):
    shard = tmp_path / f"dataset-00000-{NUM_ROWS}.tfrecord"
    shard.write_bytes(rows_of())
    order = SampleOrder((str(shard),), (NUM_ROWS,), 0, window_rows=NUM_ROWS)
    features = {"input_ids": Feature((LENGTH,), padding=1)}
    batches = training_batches(order, features, global_batch_rows=2, start_step=0, num_steps=3)
    assert len(list(batches)) == 3
    DAMAGES[damage](shard)
    with pytest.raises(PermanentError, match="--verify") as caught, explained_failures(Cluster(), RUN):
        list(batches)
    assert "\n" not in str(caught.value)
