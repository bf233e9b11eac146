"""What TensorFlow says when a run cannot go on, told in one line each, with whether another try may succeed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from mlm_common.errors import PermanentError, RunFailedError
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder

# What TensorFlow says before and after the reason why workers cannot continue together.
ABORTED = "Collective ops is aborted by:"
SOCKET_CLOSED = "Socket closed"
ADVICE = "The error could be from a previous operation."
# Of TensorFlow's client of Cloud Storage, when it gives up.
NO_ANSWER = "retry attempts failed"
# What else an error of the input says.
OF_INPUT = re.compile(r"transformation with iterator|\.tfrecord\b")
UNREADABLE_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.UnauthenticatedError,
)
OUT_OF_MEMORY = re.compile(r"OOM when allocating|[Oo]ut of memory")
PREFIX = re.compile(r"\{\{function_node .*?\}\} ")


@contextmanager
def explained_failures(cluster: Cluster, folder: RunFolder) -> Iterator[None]:
    """Explain, within it, the errors of TensorFlow that a user can fix; others stay as they are.

    TensorFlow's coordination service notices a lost worker by a closed connection, or after 10 seconds without a
    heartbeat.

    Raises:
        RunFailedError: another worker ended or cannot be reached any more, or the TPU.
        PermanentError: shards cannot be read, or a device's memory is too small.
    """
    try:
        yield
    except tf.errors.OpError as error:
        explained = _explain(error, cluster, folder)
        if explained is None:
            raise
        raise explained from error


def _explain(error: tf.errors.OpError, cluster: Cluster, folder: RunFolder) -> RunFailedError | None:
    message = PREFIX.sub("", error.message)
    reason = " ".join(message.partition("[[{{node")[0].split())[-400:]
    if NO_ANSWER in message:
        return RunFailedError(
            "Cloud Storage did not answer TensorFlow. Give the same command again: it resumes from the newest "
            f"checkpoint in {folder}. TensorFlow says: {reason}"
        )
    if any(sign in message for sign in (ABORTED, SOCKET_CLOSED)) or isinstance(error, tf.errors.UnavailableError):
        return _lost_devices(message, cluster, folder)
    is_unreadable = isinstance(error, UNREADABLE_ERRORS) and OF_INPUT.search(message)
    if is_unreadable or isinstance(error, tf.errors.DataLossError):
        return PermanentError(
            "Shards must stay as they were prepared, and readable; TensorFlow met one that is not. Find it with "
            "`prepare_tfrecord_shards.py --verify`, copy or prepare it again, and give the same command: it resumes "
            f"from the newest checkpoint in {folder}. TensorFlow says: {reason}"
        )
    if isinstance(error, tf.errors.ResourceExhaustedError) and OUT_OF_MEMORY.search(message):
        return PermanentError(
            "The step must fit in a device's memory; it does not. Give half the --per-replica-batch-size with twice "
            "the --gradient-accumulation-steps, --bfloat16, or --gradient-checkpointing; see that no other program "
            f"holds the memory. TensorFlow says: {reason}"
        )
    return None


def _lost_devices(message: str, cluster: Cluster, folder: RunFolder) -> RunFailedError:
    reason = " ".join(message.partition(ABORTED)[2].partition(ADVICE)[0].split()) or message
    if cluster.num_workers == 1:
        what, where = "The TPU was lost.", "Start the command again when it is back, or give --supervise:"
    else:
        what = "A worker was lost, so the others stop; see the error in its own output."
        where = "Start the command again on all workers:"
    return RunFailedError(
        f"{what} {where} it resumes from the newest checkpoint in {folder}. TensorFlow says: {reason[:400]}"
    )
