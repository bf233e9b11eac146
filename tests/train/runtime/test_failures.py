"""What TensorFlow fails by: one line that says whether another try may succeed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from mlm_common.errors import EXIT_PERMANENT, PermanentError, RunFailedError
from tests.fixtures.tiny_run import run_flags
from tfrecord_prep.records import encode_rows
from train.data.inputs import Feature
from train.data.pipeline import training_batches
from train.data.shuffle import SampleOrder
from train.loop import lifecycle
from train.loop.run import Run
from train.run_mlm import main
from train.runtime.failures import explained_failures
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder

RUN = RunFolder("run")
LENGTH = 8
NUM_ROWS = 6


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (tf.errors.UnavailableError(None, None, "failed to connect"), "The TPU was lost."),
        (tf.errors.AbortedError(None, None, "Socket closed"), "The TPU was lost."),
        (
            tf.errors.AbortedError(None, None, "All 10 retry attempts failed. The last failure: HTTP code 503"),
            "Cloud Storage did not answer TensorFlow.",
        ),
    ],
    ids=["unavailable", "socket closed", "Cloud Storage"],
)
def test_a_lost_tpu_and_an_outage_may_be_tried_again(error: tf.errors.OpError, said: str) -> None:
    with (
        pytest.raises(RunFailedError, match=rf"{said}.* from the newest checkpoint in gs://bucket/run") as caught,
        explained_failures(Cluster(), RunFolder("gs://bucket/run")),
    ):
        raise error
    assert not isinstance(caught.value, PermanentError)


def test_a_step_that_does_not_fit_is_not_tried_again() -> None:
    with (
        pytest.raises(PermanentError, match="half the --per-replica-batch-size"),
        explained_failures(Cluster(), RUN),
    ):
        raise tf.errors.ResourceExhaustedError(None, None, "Ran out of memory in memory space hbm. Used 8.38G of 8.00G")


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), explained_failures(Cluster(), RUN):
        raise tf.errors.InvalidArgumentError(None, None, "a bad shape")


def flip_a_bit(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def write_shorter_rows(shard: Path) -> None:
    rows = np.ones((NUM_ROWS, LENGTH - 1), np.int32)
    shard.write_bytes(encode_rows(rows, np.full(NUM_ROWS, LENGTH - 1)))


def write_fewer_rows(shard: Path) -> None:
    shard.write_bytes(encode_rows(np.ones((1, LENGTH), np.int32), np.full(1, LENGTH)))


@pytest.mark.parametrize("damage", [flip_a_bit, write_shorter_rows, write_fewer_rows, Path.unlink])
def test_a_shard_that_cannot_be_read_is_not_tried_again(damage, tmp_path: Path) -> None:
    shard = tmp_path / f"dataset-00000-{NUM_ROWS}.tfrecord"
    shard.write_bytes(encode_rows(np.ones((NUM_ROWS, LENGTH), np.int32), np.full(NUM_ROWS, LENGTH)))
    order = SampleOrder((str(shard),), (NUM_ROWS,), 0, window_rows=NUM_ROWS)
    features = {"input_ids": Feature((LENGTH,), padding=1)}
    batches = training_batches(order, features, global_batch_rows=2, start_step=0, num_steps=3)
    assert len(list(batches)) == 3
    damage(shard)
    with pytest.raises(PermanentError, match="--verify") as caught, explained_failures(Cluster(), RUN):
        list(batches)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("one_device")
def test_shards_damaged_meanwhile_end_the_run_in_one_line(shards, tmp_path, monkeypatch, run) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    connect = lifecycle.connect

    def damage_and_connect(opened: Run) -> tf.distribute.Strategy:
        for shard in (tmp_path / "shards" / "train").glob("*.tfrecord"):
            flip_a_bit(shard)
        return connect(opened)

    monkeypatch.setattr(lifecycle, "connect", damage_and_connect)
    outcome = run(main, *run_flags(tmp_path / "shards", tmp_path / "run"))
    assert outcome.status == EXIT_PERMANENT
    assert outcome.error.startswith("error: Shards must stay as they were prepared")
