"""Create a run's tf.distribute strategy, and check that all workers were given the same flags and shards.

The strategy computes on the first of these that exists: the TPU of `--tpu-name`, the workers of TF_CONFIG, GPUs, the
CPU.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError, RunFailedError
from mlm_common.workers import num_cores
from train import multiplies_in_bfloat16
from train.config import PER_WORKER
from train.config.settings import HardwareConfig, RunSettings
from train.runtime import pjrt_settings, supervisor
from train.runtime.device_errors import explained_failures
from train.runtime.machines import Cluster, has_tensorflow_for_tpus
from train.runtime.run_folder import RunFolder
from train.runtime.runtime import Runtime, wait_for_workers

logger = logging.getLogger(__name__)

# Connecting to a slice with many hosts takes minutes. On some images it never returns (googlecolab/colabtools#5194).
CONNECT_SECONDS = 300.0
# The threads of this process, and the name of the threads in which TensorFlow runs the operations of a step.
THREADS, COMPUTING_THREAD = Path("/proc/self/task"), "tf_Compute"


def connect(config: HardwareConfig, cluster: Cluster) -> tf.distribute.Strategy:
    """Connect to the devices: claim and initialize the TPU, or wait for all workers of the cluster."""
    if config.wants_tpu:
        strategy, devices = _connect_tpu(config), f"TPU {config.tpu_name}"
    elif cluster.num_workers > 1:  # must come before any other use starts TensorFlow's runtime
        strategy, devices = _connect_workers(cluster), f"{cluster.num_workers} workers (this is worker {cluster.index})"
    else:
        names = local_devices()
        is_cpu = len(names) == 1 and "CPU" in names[0]
        strategy = tf.distribute.OneDeviceStrategy(names[0]) if is_cpu else mirrored_strategy(names)
        devices = "CPU" if "CPU" in names[0] else "GPU"
    _check_step_compiles(config, strategy.num_replicas_in_sync)
    logger.info("computing on %s, replicas: %d", devices, strategy.num_replicas_in_sync)
    return strategy


def share_cores(num_streams: int) -> None:
    """Let each operation use only its stream's share of the cores. Call it before TensorFlow computes anything."""
    if num_streams > 1:
        with suppress(RuntimeError):  # TensorFlow has started; its operations then use all cores, and are slower
            tf.config.threading.set_intra_op_parallelism_threads(max(1, num_cores() // num_streams))


def pin_streams(num_streams: int) -> None:
    """Give each thread that computes a stream its own core, on Linux. Call it after `connect`.

    These threads hardly ever wait, and the scheduler of a virtual machine may leave them on the same core: on one such
    machine, a step then took twice as long. Threads are not pinned if there are more cores than streams, because other
    processes would choose the same cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not 1 < num_streams == len(cores):
        return
    threads = [int(folder.name) for folder in THREADS.glob("*") if _name_of_thread(folder) == COMPUTING_THREAD]
    for thread, core in zip(sorted(threads), itertools.cycle(cores), strict=False):
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(thread, {core})


def _name_of_thread(folder: Path) -> str:
    try:
        return (folder / "comm").read_text(encoding="utf-8").strip()
    except OSError:  # it has ended
        return ""


def _check_step_compiles(config: HardwareConfig, num_replicas: int) -> None:
    """Reject XLA if it cannot be used: on several CPU replicas, or without a TPU in TensorFlow's build for TPUs."""
    if not compiles_with_xla(config):
        return
    flags = "--jit-compile, --bfloat16 and --tpu-layers on, which use XLA,"
    if has_tensorflow_for_tpus():
        raise InputError(
            f"{flags} need a TPU, because the installed TensorFlow is tensorflow-tpu; received no --tpu-name. Pass it, "
            "leave these flags out, or install tensorflow: python install.py --extra cpu."
        )
    if num_replicas > 1 and not tf.config.list_logical_devices("GPU"):
        raise InputError(
            f"{flags} need GPUs, a TPU or a single CPU, because XLA cannot sum over several CPUs; received "
            f"{num_replicas} CPU replicas. Leave these flags out."
        )


def local_devices() -> tuple[str, ...]:
    """Return the names of this machine's devices that a run without a TPU uses: the GPUs, else the CPU."""
    return tuple(
        device.name for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    )


@functools.cache
def mirrored_strategy(device_names: tuple[str, ...]) -> tf.distribute.MirroredStrategy:
    """Return the process's only strategy for these devices.

    The collectives of a second strategy would clash with the collectives of the first.
    """
    return tf.distribute.MirroredStrategy(list(device_names))


def _connect_tpu(config: HardwareConfig) -> tf.distribute.Strategy:
    def initialize() -> tf.distribute.cluster_resolver.TPUClusterResolver:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=config.tpu_name, zone=config.tpu_zone, project=config.gcp_project
        )
        if config.tpu_name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return resolver

    connected = _in_thread(initialize, "connect-tpu")
    fix = "Check that it is READY, that --tpu-zone and --gcp-project fit, that tensorflow-tpu is installed (pip list)"
    if config.tpu_name == "local":
        fix = f"{pjrt_settings.describe_attempts()} {pjrt_settings.ADVICE} Check that tensorflow-tpu is installed"
    fix += ", and that no other process holds it."
    if not wait([connected], CONNECT_SECONDS).done:
        raise RunFailedError(
            f"--tpu-name must name a TPU that can be reached; {config.tpu_name} did not answer within "
            f"{CONNECT_SECONDS:.0f} s. {fix}"
        )
    try:
        resolver = connected.result()
    # The resolver does not catch errors of its HTTP client, the metadata server or the TPU's runtime.
    except Exception as error:
        kind = InputError if _needs_another_setup(error) else RunFailedError
        raise kind(
            f"--tpu-name must name a TPU that can be reached; {config.tpu_name} gave {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. {fix}"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _in_thread(function: Callable[[], Any], name: str) -> "Future[Any]":
    """Call a function in a separate thread, so that Ctrl-C or a time limit can end the wait for it."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return result


def _needs_another_setup(error: Exception) -> bool:
    """Return whether connecting would fail again: access is denied, a package is missing, or TensorFlow lacks TPUs.

    All other errors may be transient: the TPU is being created, repaired or restarted, an ending process still holds
    it, or a server does not answer.
    """
    refusals = (ImportError, tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError)
    # The resolver's message contains the answer of the TPU's API.
    if isinstance(error, refusals) or re.search("Missing runtime dependency|HttpError 40[013]", str(error)):
        return True
    # TensorFlow finds no TPU if another process holds it, or if TensorFlow does not support TPUs.
    is_not_found = isinstance(error, tf.errors.NotFoundError | tf.errors.InvalidArgumentError)
    return is_not_found and not has_tensorflow_for_tpus()


def _connect_workers(cluster: Cluster) -> tf.distribute.Strategy:
    logger.info("waiting for the workers at %s", ", ".join(cluster.addresses))
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.OpError as error:
        raise RunFailedError(
            f"TF_CONFIG must name workers that reach each other; as worker {cluster.index} at "
            f"{cluster.addresses[cluster.index]} this process got {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Check that the address is this machine's, that its port is free "
            "and open to the other workers, and that all workers are running."
        ) from error


def compiles_with_xla(config: HardwareConfig) -> bool | None:
    """Return whether the step must be wrapped in `jit_compile`; False on a TPU, where TPUStrategy compiles.

    Returns:
        None if the step may or may not be compiled, as on CPUs, where XLA is not faster.
    """
    if config.runtime == "jax":
        return True
    if config.wants_tpu:
        return False
    if config.jit_compile is None:
        needs_xla = config.tpu_layers == "on" or (config.bfloat16 and not multiplies_in_bfloat16())
        if needs_xla or tf.config.list_logical_devices("GPU"):
            return True
        return False if has_tensorflow_for_tpus() else None
    return config.jit_compile


def check_run_agreement(runtime: Runtime, phases: Sequence[RunSettings], fingerprint: dict[str, Any]) -> None:
    """Check that all workers have the same flags and shards. Waits for the other workers.

    Paths may differ between workers; the fingerprint compares the content behind them.

    Raises:
        InputError: the flags or shards differ.
    """
    phase_settings = [config.without(PER_WORKER) for config in phases]
    values = {name: [settings[name] for settings in phase_settings] for name in phase_settings[0]}
    settings = {
        flag_of(name.partition(".")[2]): phase_values if len(phase_values) > 1 else phase_values[0]
        for name, phase_values in values.items()
    }
    settings["shards, tokenizer or model"] = fingerprint
    check_agreement(runtime, settings, rule="All workers must be given the same flags and shards.")


def check_agreement(runtime: Runtime, values: Mapping[str, Any], *, rule: str) -> None:
    """Check that all workers of the cluster call this with the same values. Waits for the other workers.

    Args:
        runtime: connects the workers.
        values: values of JSON types, by name. The hashes of the values are compared.
        rule: start of the error message, which names the things that must be the same.

    Raises:
        InputError: the values differ. All workers raise it, with the names of the first values that differ.
    """
    cluster = runtime.cluster
    if cluster.num_workers == 1:
        return
    digests = [hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest() for value in values.values()]
    gathered = runtime.gather(np.array([int.from_bytes(digest[:8], "little") >> 1 for digest in digests], np.int64))
    differs = gathered != gathered[0]  # (workers, values)
    if differs.any():
        names = [name for name, is_different in zip(values, differs.any(axis=0), strict=True) if is_different]
        workers = np.flatnonzero(differs.any(axis=1)).tolist()
        with suppress(tf.errors.OpError, RuntimeError):  # another worker may have ended already
            wait_for_workers(runtime)
        raise InputError(
            f"{rule} Values that differ from the chief's on {', '.join(cluster.addresses[i] for i in workers)}: "
            f"{', '.join(names[:5])}. On {cluster.addresses[cluster.index]}, {names[0]} is "
            f"{str(values[names[0]])[:100]}."
        )


def end_together(runtime: Runtime, folder: RunFolder) -> None:
    """Wait until all workers have called this, because TensorFlow reports a worker that ends early as crashed.

    The other workers wait while the chief publishes. Ctrl-C ends the wait.
    """
    if runtime.cluster.num_workers == 1:
        return
    has_ended = _in_thread(lambda: wait_for_workers(runtime), "end-together")
    with supervisor.keep_reporting("publish"), explained_failures(runtime.cluster, folder):
        has_ended.result()
