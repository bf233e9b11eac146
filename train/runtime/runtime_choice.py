"""Which runtime a run has, TensorFlow's or JAX's; and the connection to its devices.

TensorFlow is imported only to connect, or to ask it for GPUs on a machine that has some.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.errors import InputError, RunFailedError
from train.config.hardware import HardwareConfig
from train.runtime import machines
from train.runtime.machines import Cluster

if TYPE_CHECKING:
    from train.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

# Of JAX, those that reach a TPU, and the GPUs of NVIDIA and AMD.
JAX_FOR_TPUS = ("libtpu", "libtpu-nightly")
JAX_FOR_GPUS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin")
GPU_DEVICE_PATTERNS = ("nvidia[0-9]*", "dxg", "kfd")
ONEDNN_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
INSTALL = {
    "TPU": "python install.py --extra jax-tpu, or tensorflow-tpu: python install.py --extra tpu",
    "GPU": "python install.py --extra jax-cuda, or TensorFlow for it: python install.py --extra gpu",
}


@dataclass(frozen=True)
class Installed:
    """What this machine and this environment have, as far as a runtime depends on it.

    device: "TPU", "GPU" or "CPU"; the TPU of another machine, which is given by its name, is none.
    tensorflow_has_device: whether the TensorFlow installed computes on it.
    """

    device: str
    tensorflow_has_device: bool
    has_jax: bool
    jax_has_device: bool


def look(config: HardwareConfig) -> Installed:
    """Look for the device of a run and for what reaches it, without claiming it."""
    has_jax = find_spec("jax") is not None
    if not config.no_tpu and config.tpu_name in (None, "local") and machines.tpu_devices():
        return Installed("TPU", machines.has_tensorflow_for_tpus(), has_jax, has_jax and is_installed(JAX_FOR_TPUS))
    if any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICE_PATTERNS):
        return Installed("GPU", _tensorflow_has_gpus(), has_jax, has_jax and is_installed(JAX_FOR_GPUS))
    return Installed("CPU", True, has_jax, has_jax)


def choose_runtime(
    config: HardwareConfig, look: Callable[[HardwareConfig], Installed] = look
) -> tuple[HardwareConfig, str]:
    """Decide which runtime a run has, and name the device that it then uses.

    Returns:
        The settings with the runtime, and `--tpu-name local` where JAX has found this machine's TPU; and the reason,
        for the plan.

    Raises:
        InputError: the runtime that is asked for is not installed, or nothing installed reaches the TPU.
    """
    if config.wants_tpu and config.tpu_name != "local":
        if config.runtime == "jax":
            raise InputError(
                f"--runtime jax computes on the devices of its own machine; received --tpu-name {config.tpu_name}. Run "
                "it on the TPU VM with --tpu-name local, or with --runtime tensorflow."
            )
        return replace(config, runtime="tensorflow"), "it reaches a TPU by its name"
    found = look(config)
    if config.runtime == "jax":
        if not found.has_jax:
            raise InputError(
                "--runtime jax needs jax, which is not installed. Install it: python install.py --extra jax-tpu."
            )
        if found.device == "TPU" and machines.has_tensorflow_for_tpus():
            raise InputError(
                "--runtime jax needs TensorFlow for the CPU, as tensorflow-tpu would hold the TPU itself. Make another "
                "environment: python install.py --extra jax-tpu --environment .venv-jax."
            )
        return _on_jax(config, found), "asked for"
    if config.runtime == "tensorflow":
        return config, "asked for"
    if found.tensorflow_has_device or not (found.jax_has_device or (found.device == "TPU" and config.wants_tpu)):
        return replace(config, runtime="tensorflow"), _why_tensorflow(config, found)
    if found.jax_has_device:
        return _on_jax(config, found), f"JAX has the {found.device}, the TensorFlow installed has not"
    raise InputError(
        f"--tpu-name local needs a package that reaches the TPU; neither tensorflow-tpu nor jax with libtpu is "
        f"installed. Install one: {INSTALL['TPU']}."
    )


def _on_jax(config: HardwareConfig, found: Installed) -> HardwareConfig:
    on_jax = replace(config, runtime="jax")
    return replace(on_jax, tpu_name="local") if found.device == "TPU" and found.jax_has_device else on_jax


def _why_tensorflow(config: HardwareConfig, found: Installed) -> str:
    if found.device == "TPU" and not config.wants_tpu:
        return "without --tpu-name local, the TPU is not used"
    if not found.tensorflow_has_device:
        return f"no package here reaches the GPU; install one: {INSTALL['GPU']}"
    return f"it has the {found.device}"


def is_installed(names: tuple[str, ...]) -> bool:
    return any(found for name in names for found in distributions(name=name))


def _tensorflow_has_gpus() -> bool:
    import tensorflow as tf  # which alone knows

    return bool(tf.config.list_physical_devices("GPU"))


def connect(config: HardwareConfig, cluster: Cluster) -> "Runtime":
    """Connect to the devices of a run whose runtime is chosen; the hosts of a cluster wait for each other.

    Raises:
        InputError, RunFailedError: the devices cannot be had, for good or for now.
    """
    if config.runtime != "jax":
        from train.runtime import strategy
        from train.runtime.tensorflow_runtime import TensorFlowRuntime

        return TensorFlowRuntime(strategy.connect(config, cluster), cluster)
    from train.runtime.jax_runtime import JaxRuntime

    devices = jax_devices(config, cluster)
    logger.info("computing on %s by JAX, replicas: %d", devices[0].device_kind, len(devices))
    return JaxRuntime(cluster, devices)


def jax_devices(config: HardwareConfig, cluster: Cluster) -> list[Any]:
    """List the devices that JAX computes on, of all hosts, those of a host one after the other; claims them."""
    import jax

    from train.runtime.jax_programs import set_up_jax

    set_up_jax()
    try:
        if cluster.num_workers > 1 and not jax.distributed.is_initialized():
            if not (config.wants_tpu or _has_jax_gpus()):  # CPUs: by JAX's own collectives
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(cluster.addresses[0], cluster.num_workers, cluster.index)
        devices = jax.devices("cpu") if config.no_tpu and jax.default_backend() == "tpu" else jax.devices()
    except RuntimeError as error:  # of JAX's client, or of the coordination service
        raise RunFailedError(
            f"JAX could not start its devices: {' '.join(str(error).split())[:300]}. See that no other process holds "
            "them and that all hosts run; `python train/doctor.py` looks further."
        ) from error
    if config.wants_tpu and devices[0].platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        raise InputError(
            "--tpu-name local needs a TPU that JAX finds; it has found only the CPU. Leave --tpu-name out."
        )
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def let_tensorflow_free_memory(config: HardwareConfig) -> None:
    """Let TensorFlow, which is not imported yet, free the variables that JAX has: oneDNN's allocator keeps them."""
    if config.runtime == "jax" and "tensorflow" not in sys.modules:
        os.environ.setdefault(ONEDNN_VARIABLE, "0")


def _has_jax_gpus() -> bool:
    return is_installed(JAX_FOR_GPUS) and any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICE_PATTERNS)
