"""What TensorFlow or JAX says when a run cannot go on, told in one line.

JAX's errors are RuntimeErrors that begin with the name of a status, as in `RESOURCE_EXHAUSTED: Out of memory …`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from mlm_common.errors import PermanentError, RunFailedError
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder

# What TensorFlow says before and after the reason why workers cannot continue together.
ABORTED = "Collective ops is aborted by:"
ADVICE = "The error could be from a previous operation."
# Of a worker that has ended: TensorFlow's word for its connection, and those of JAX's sums over CPUs (Gloo).
CONNECTION_LOST = re.compile(r"Socket closed|Gloo .*([Cc]onnection|[Tt]imed out|peer)")
# Of TensorFlow's client of Cloud Storage, when it gives up.
NO_ANSWER = "retry attempts failed"
# What else an error of the input says.
OF_INPUT = re.compile(r"transformation with iterator|\.tfrecord\b")
UNREADABLE = ("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED")
OUT_OF_MEMORY = re.compile(r"OOM when allocating|[Oo]ut of memory|[Aa]llocat")
# A device that was lost, for which the computation is not to blame.
LOST = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
STATUSES = (*LOST, *UNREADABLE, "RESOURCE_EXHAUSTED", "DATA_LOSS", "UNKNOWN", "INTERNAL", "FAILED_PRECONDITION")
STATUS = re.compile(rf"({'|'.join(STATUSES)}): ")
PREFIX = re.compile(r"\{\{function_node .*?\}\} ")


def status_of(error: BaseException) -> str | None:
    """Return the name of the status of an error of TensorFlow or JAX; None for an error of something else."""
    if isinstance(error, tf.errors.OpError):
        return next((name for name in STATUSES if getattr(tf.errors, name) == error.error_code), "UNKNOWN")
    match = STATUS.match(str(error)) if isinstance(error, RuntimeError) else None
    return match[1] if match else None


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that the device was lost, so that it says nothing about what was computed."""
    return status_of(error) in LOST


@contextmanager
def explained_failures(cluster: Cluster, folder: RunFolder) -> Iterator[None]:
    """Explain, within it, the errors of TensorFlow and JAX that a user can fix; others stay as they are.

    TensorFlow's coordination service notices a lost worker by a closed connection, or after 10 seconds without a
    heartbeat. JAX's ends the process itself where it has lost the first worker.
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
            "Cloud Storage did not answer TensorFlow. Give the same command again: it resumes from the newest "
            f"checkpoint in {folder}. {said}: {reason}"
        )
    is_cut_off = ABORTED in message or CONNECTION_LOST.search(message)
    if is_cut_off or status == "UNAVAILABLE" or (status in LOST and not is_tensorflow):
        reason = " ".join(message.partition(ABORTED)[2].partition(ADVICE)[0].split()) or " ".join(message.split())
        if cluster.num_workers == 1:
            what, where = "The device was lost.", "Start the command again when it is back, or give --supervise:"
        else:
            what = "A worker was lost, so the others stop; see the error in its own output."
            where = "Start the command again on all workers:"
        return RunFailedError(
            f"{what} {where} it resumes from the newest checkpoint in {folder}. {said}: {reason[:400]}"
        )
    if (status in UNREADABLE and OF_INPUT.search(message)) or status == "DATA_LOSS":
        return PermanentError(
            "Shards must stay as they were prepared, and readable; TensorFlow met one that is not. Find it with "
            "`prepare_tfrecord_shards.py --verify`, copy or prepare it again, and give the same command: it resumes "
            f"from the newest checkpoint in {folder}. {said}: {reason}"
        )
    if status == "RESOURCE_EXHAUSTED" and OUT_OF_MEMORY.search(message):
        return PermanentError(
            "The step must fit in a device's memory; it does not. Give half the --per-replica-batch-size with twice "
            "the --gradient-accumulation-steps, --bfloat16, or --gradient-checkpointing; see that no other program "
            f"holds the memory. {said}: {reason}"
        )
    return None
