"""The tf.distribute strategy of a run: the TPU that is named, else the GPUs there are, else the CPU."""

import functools
import logging

import tensorflow as tf

from tokenizer_training.command_line import InputError
from train.config import HardwareConfig

logger = logging.getLogger(__name__)


def connect(config: HardwareConfig) -> tf.distribute.Strategy:
    """Return the strategy, its TPU claimed and initialised.

    Raises:
        InputError: the TPU that is named cannot be found or reached.
    """
    if config.wants_tpu:
        return _connect_tpu(config)
    gpus = tf.config.list_logical_devices("GPU")
    cpus = tf.config.list_logical_devices("CPU")
    if gpus or len(cpus) > 1:
        strategy = mirrored_strategy(tuple(device.name for device in gpus or cpus))
    else:
        strategy = tf.distribute.OneDeviceStrategy(cpus[0].name)
    logger.info("training on %d %s", strategy.num_replicas_in_sync, "GPU" if gpus else "CPU")
    return strategy


@functools.cache
def mirrored_strategy(device_names: tuple[str, ...]) -> tf.distribute.MirroredStrategy:
    """Return the one strategy over these devices: in a process, the collectives of a second one clash with its own."""
    return tf.distribute.MirroredStrategy(list(device_names))


def _connect_tpu(config: HardwareConfig) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=config.tpu_name, zone=config.tpu_zone, project=config.gcp_project
        )
        if config.tpu_name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    # The resolver raises whatever its HTTP client, the metadata server or the TPU's runtime did.
    except Exception as error:
        raise InputError(
            f"--tpu-name must name a TPU that can be reached; {config.tpu_name} gave {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Check that it is READY, --tpu-zone and --gcp-project, that "
            "tensorflow-tpu is installed (pip list), and that no other process holds it."
        ) from error
    strategy = tf.distribute.TPUStrategy(resolver)
    logger.info("training on TPU %s, %d replicas", config.tpu_name, strategy.num_replicas_in_sync)
    return strategy


def compiles_with_xla(config: HardwareConfig) -> bool:
    """Return whether the step is to be wrapped in `jit_compile`: TPUStrategy compiles by itself."""
    if config.wants_tpu:
        return False
    if config.jit_compile is None:
        return bool(tf.config.list_logical_devices("GPU"))
    return config.jit_compile
