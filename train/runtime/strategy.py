"""The tf.distribute strategy of a run: the TPU that is named, else the workers of TF_CONFIG, GPUs, or the CPU.

Also how workers agree.
"""

import functools
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import numpy as np
import tensorflow as tf

from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError, RunFailedError
from train import multiplies_in_bfloat16
from train.config.learning import PER_WORKER
from train.config.settings import HardwareConfig, RunSettings
from train.runtime import pjrt_settings, supervisor
from train.runtime.device_errors import explained_failures
from train.runtime.machines import Cluster, has_tensorflow_for_tpus
from train.runtime.run_folder import RunFolder
from train.runtime.runtime import Runtime, wait_for_workers

logger = logging.getLogger(__name__)

# A slice of many hosts takes minutes; on some images connecting never returns (googlecolab/colabtools#5194).
CONNECT_SECONDS = 300.0


def connect(config: HardwareConfig, cluster: Cluster) -> tf.distribute.Strategy:
    """Connect to the devices: the TPU claimed and initialised, or all workers of the cluster there."""
    if config.wants_tpu:
        strategy, devices = _connect_tpu(config), f"TPU {config.tpu_name}"
    elif cluster.num_workers > 1:  # before anything else starts TensorFlow's runtime
        strategy, devices = _connect_workers(cluster), f"{cluster.num_workers} workers, as number {cluster.index}"
    else:
        names = local_devices()
        is_cpu = len(names) == 1 and "CPU" in names[0]
        strategy = tf.distribute.OneDeviceStrategy(names[0]) if is_cpu else mirrored_strategy(names)
        devices = "CPU" if "CPU" in names[0] else "GPU"
    _check_step_compiles(config, strategy.num_replicas_in_sync)
    logger.info("computing on %s, replicas: %d", devices, strategy.num_replicas_in_sync)
    return strategy


def _check_step_compiles(config: HardwareConfig, num_replicas: int) -> None:
    """Refuse a step that XLA does not compile: sums over several CPUs, and whatever is no TPU's in a build for TPUs."""
    if not compiles_with_xla(config):
        return
    flags = "--jit-compile, --bfloat16 and --tpu-layers on, which XLA compiles,"
    if has_tensorflow_for_tpus():
        raise InputError(
            f"{flags} need a TPU where TensorFlow is tensorflow-tpu, as here; received no --tpu-name. Give it, leave "
            "them out, or install tensorflow: python install.py --extra cpu."
        )
    if num_replicas > 1 and not tf.config.list_logical_devices("GPU"):
        raise InputError(
            f"{flags} need GPUs, a TPU or a single CPU: XLA cannot sum over several; received {num_replicas} CPU "
            "replicas. Leave them out."
        )


def local_devices() -> tuple[str, ...]:
    """List the names of this machine's devices that a run without a TPU uses: its GPUs, else its CPU."""
    return tuple(
        device.name for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    )


@functools.cache
def mirrored_strategy(device_names: tuple[str, ...]) -> tf.distribute.MirroredStrategy:
    """Make the one strategy over these devices: in a process, the collectives of a second one clash with its own."""
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
    fix = "Check that it is READY, --tpu-zone and --gcp-project, that tensorflow-tpu is installed (pip list)"
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
    # The resolver raises whatever its HTTP client, the metadata server or the TPU's runtime did.
    except Exception as error:
        kind = InputError if _needs_another_setup(error) else RunFailedError
        raise kind(
            f"--tpu-name must name a TPU that can be reached; {config.tpu_name} gave {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. {fix}"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _in_thread(function: Callable[[], Any], name: str) -> "Future[Any]":
    """Call it in a thread of its own, so that Ctrl-C and a limit of time end the wait for it."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return result


def _needs_another_setup(error: Exception) -> bool:
    """Return whether connecting would fail again: for a refusal, a missing package, or a TensorFlow without TPUs.

    All else may pass: a TPU that is made, repaired or restarted, one that an ending process still holds, a
    server that does not answer.
    """
    refusals = (ImportError, tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError)
    # The resolver puts the answer of the TPU's API into words.
    if isinstance(error, refusals) or re.search("Missing runtime dependency|HttpError 40[013]", str(error)):
        return True
    # A TPU that is held by another process is not found either.
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
            f"{' '.join(str(error).split())[:300]}. Check that the address is this machine's, its port free and "
            "open to the others, and all workers started."
        ) from error


def compiles_with_xla(config: HardwareConfig) -> bool | None:
    """Return whether the step must be wrapped in `jit_compile`: TPUStrategy compiles by itself.

    None where it may be, on CPUs, where XLA is no faster.
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
    """Check that all workers are of the same run; waits for them.

    The fingerprint stands in for the contents of the paths, which may differ.
    """
    of_phases = [config.without(PER_WORKER) for config in phases]
    values = {name: [settings[name] for settings in of_phases] for name in of_phases[0]}
    settings = {flag_of(name.partition(".")[2]): one if len(one) > 1 else one[0] for name, one in values.items()}
    settings["shards, tokenizer or model"] = fingerprint
    check_agreement(runtime, settings, rule="All workers must be given the same flags and shards.")


def check_agreement(runtime: Runtime, values: Mapping[str, Any], *, rule: str) -> None:
    """Check that all workers of the cluster call this with the same values; waits for them.

    The hashes of the values, of JSON types, are compared. Where they differ, all workers raise an InputError with the
    names of the first that do, and the `rule`: what must be the same, and how to fix it.
    """
    cluster = runtime.cluster
    if cluster.num_workers == 1:
        return
    digests = [hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest() for value in values.values()]
    gathered = runtime.gather(np.array([int.from_bytes(one[:8], "little") >> 1 for one in digests], np.int64))
    differs = gathered != gathered[0]  # (workers, values)
    if differs.any():
        names = [name for name, is_different in zip(values, differs.any(axis=0), strict=True) if is_different]
        workers = np.flatnonzero(differs.any(axis=1)).tolist()
        with suppress(tf.errors.OpError, RuntimeError):  # one has ended, once all had what they compare
            wait_for_workers(runtime)
        raise InputError(
            f"{rule} Not the chief's on {', '.join(cluster.addresses[worker] for worker in workers)}: "
            f"{', '.join(names[:5])}; here, on {cluster.addresses[cluster.index]}: {str(values[names[0]])[:100]}."
        )


def end_together(runtime: Runtime, folder: RunFolder) -> None:
    """Wait until all workers have come here: TensorFlow says of one that ends early that it has crashed.

    The others wait as long as the chief publishes. Ctrl-C ends the wait.
    """
    if runtime.cluster.num_workers == 1:
        return
    has_ended = _in_thread(lambda: wait_for_workers(runtime), "end-together")
    with supervisor.keep_reporting("publish"), explained_failures(runtime.cluster, folder):
        has_ended.result()
