"""Translate errors of TensorFlow and JAX into one-line messages, and decide whether a retry can help.

JAX's errors are RuntimeErrors that start with the name of a status, such as `RESOURCE_EXHAUSTED: Out of memory …`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from mlm_common.errors import PermanentError, RunFailedError
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder

# TensorFlow's text before and after the reason why workers cannot continue together.
ABORTED = "Collective ops is aborted by:"
ADVICE = "The error could be from a previous operation."
# These messages show that a worker has ended: TensorFlow's message about the lost connection, and messages of Gloo,
# which JAX uses for collectives on CPUs.
CONNECTION_LOST = re.compile(r"Socket closed|Gloo .*([Cc]onnection|[Tt]imed out|peer)")
# This message shows that TensorFlow's client for Cloud Storage has given up.
NO_ANSWER = "retry attempts failed"
# This text shows that an error came from the input pipeline.
INPUT_ERROR = re.compile(r"transformation with iterator|\.tfrecord\b")
UNREADABLE = ("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED")
OUT_OF_MEMORY = re.compile(r"OOM when allocating|[Oo]ut of memory|[Aa]llocat")
# Statuses of a lost device. They do not mean that the computation is wrong.
LOST = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
STATUSES = (*LOST, *UNREADABLE, "RESOURCE_EXHAUSTED", "DATA_LOSS", "UNKNOWN", "INTERNAL", "FAILED_PRECONDITION")
STATUS = re.compile(rf"({'|'.join(STATUSES)}): ")
PREFIX = re.compile(r"\{\{function_node .*?\}\} ")


def status_of(error: BaseException) -> str | None:
    """Return the name of the status of a TensorFlow or JAX error; None for any other error."""
    if isinstance(error, tf.errors.OpError):
        return next((name for name in STATUSES if getattr(tf.errors, name) == error.error_code), "UNKNOWN")
    match = STATUS.match(str(error)) if isinstance(error, RuntimeError) else None
    return match[1] if match else None


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that the device was lost, rather than that the computation failed."""
    return status_of(error) in LOST


@contextmanager
def explained_failures(cluster: Cluster, folder: RunFolder) -> Iterator[None]:
    """If a user can fix an error of TensorFlow or JAX, replace the error by a one-line message.

    TensorFlow's coordination service notices a lost worker when its connection closes, or after 10 seconds without a
    heartbeat. JAX's service ends the process by itself if it loses the first worker.
    """
    try:
        yield
    except (tf.errors.OpError, RuntimeError) as error:
        explained = _explain(error, cluster, folder)
        if explained is None:
            raise
        raise explained from error


def _explain(error: Exception, cluster: Cluster, folder: RunFolder) -> RunFailedError | None:
    status, is_tensorflow = status_of(error), isinstance(error, tf.errors.OpError)
    if status is None:
        return None
    message = PREFIX.sub("", getattr(error, "message", str(error)))
    said = "TensorFlow says" if is_tensorflow else "JAX says"
    reason = " ".join(message.partition("[[{{node")[0].split())
    reason = reason[-400:] if is_tensorflow else reason[:400]
    if NO_ANSWER in message:
        return RunFailedError(
            "Cloud Storage did not answer TensorFlow. Run the same command again: it resumes from the newest "
            f"checkpoint in {folder}. {said}: {reason}"
        )
    is_disconnected = ABORTED in message or CONNECTION_LOST.search(message)
    if is_disconnected or status == "UNAVAILABLE" or (status in LOST and not is_tensorflow):
        reason = " ".join(message.partition(ABORTED)[2].partition(ADVICE)[0].split()) or " ".join(message.split())
        if cluster.num_workers == 1:
            what, hint = "The device was lost.", "Run the same command again when it is back, or use --supervise:"
        else:
            what = "A worker was lost, so the others stop; see the error in the output of that worker."
            hint = "Run the same command again on all workers:"
        return RunFailedError(
            f"{what} {hint} it resumes from the newest checkpoint in {folder}. {said}: {reason[:400]}"
        )
    if (status in UNREADABLE and INPUT_ERROR.search(message)) or status == "DATA_LOSS":
        return PermanentError(
            "A shard is unreadable, or was changed since it was prepared. Find it with "
            "`prepare_tfrecord_shards.py --verify`, copy or prepare it again, and run the same command again: it "
            f"resumes from the newest checkpoint in {folder}. {said}: {reason}"
        )
    if status == "RESOURCE_EXHAUSTED" and OUT_OF_MEMORY.search(message):
        return PermanentError(
            "The step does not fit in the device's memory. Halve --per-replica-batch-size and double "
            "--gradient-accumulation-steps, or use --bfloat16 or --gradient-checkpointing. Check that no other program "
            f"uses the memory. {said}: {reason}"
        )
    return None
