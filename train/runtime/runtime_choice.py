"""Choose the runtime of a run (TensorFlow's or JAX's), and connect to its devices.

TensorFlow is imported only to connect, or to list GPUs on a machine that seems to have GPUs.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlm_common.errors import InputError, RunFailedError
from train import ONEDNN_VARIABLE, load_tensorflow
from train.config.hardware import HardwareConfig
from train.runtime import machines
from train.runtime.machines import Cluster

if TYPE_CHECKING:
    from train.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

Hardware = TypeVar("Hardware", bound=HardwareConfig)

# Packages with which JAX supports TPUs, and GPUs from NVIDIA and AMD.
JAX_FOR_TPUS = ("libtpu", "libtpu-nightly")
JAX_FOR_GPUS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin")
GPU_DEVICE_PATTERNS = ("nvidia[0-9]*", "dxg", "kfd")
INSTALL = {
    "TPU": "python install.py --extra jax-tpu, or tensorflow-tpu: python install.py --extra tpu",
    "GPU": "python install.py --extra jax-cuda, or TensorFlow for it: python install.py --extra gpu",
}


@dataclass(frozen=True)
class Installed:
    """The device of this machine, and the installed packages that support it.

    Attributes:
        device: "TPU", "GPU" or "CPU". A TPU of another machine, given by its name, does not count.
        tensorflow_has_device: the installed TensorFlow supports the device.
        has_jax: JAX is installed.
        jax_has_device: the installed JAX supports the device.
    """

    device: str
    tensorflow_has_device: bool
    has_jax: bool
    jax_has_device: bool


def look(config: HardwareConfig) -> Installed:
    """Find the device for a run, and the packages that support it, without claiming the device."""
    has_jax = find_spec("jax") is not None
    if not config.no_tpu and config.tpu_name in (None, "local") and machines.tpu_devices():
        return Installed("TPU", machines.has_tensorflow_for_tpus(), has_jax, has_jax and is_installed(JAX_FOR_TPUS))
    if any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICE_PATTERNS):
        return Installed("GPU", _tensorflow_has_gpus(), has_jax, has_jax and is_installed(JAX_FOR_GPUS))
    return Installed("CPU", True, has_jax, has_jax)


def choose_runtime(config: Hardware, look: Callable[[HardwareConfig], Installed] = look) -> tuple[Hardware, str]:
    """Choose the runtime of a run.

    Returns:
        The settings with the chosen runtime, and with `--tpu-name local` if JAX is chosen and uses this machine's TPU;
        and the reason for the choice, which the plan shows.

    Raises:
        InputError: the requested runtime is not installed, or no installed package supports the TPU.
    """
    if config.wants_tpu and config.tpu_name != "local":
        if config.runtime == "jax":
            raise InputError(
                f"--runtime jax computes on the devices of its own machine; received --tpu-name {config.tpu_name}. Run "
                "it on the TPU VM with --tpu-name local, or with --runtime tensorflow."
            )
        return replace(config, runtime="tensorflow"), "it reaches a TPU by its name"
    installed = look(config)
    if config.runtime == "jax":
        if not installed.has_jax:
            raise InputError(
                "--runtime jax needs jax, which is not installed. Install it: python install.py --extra jax-tpu."
            )
        if installed.device == "TPU" and machines.has_tensorflow_for_tpus():
            raise InputError(
                "--runtime jax needs TensorFlow for the CPU, as tensorflow-tpu would hold the TPU itself. Create "
                "another environment: python install.py --extra jax-tpu --environment .venv-jax."
            )
        return _on_jax(config, installed), "requested"
    if config.runtime == "tensorflow":
        return config, "requested"
    must_reach_device = installed.jax_has_device or (installed.device == "TPU" and config.wants_tpu)
    if installed.tensorflow_has_device or not must_reach_device:
        return replace(config, runtime="tensorflow"), _why_tensorflow(config, installed)
    if installed.jax_has_device:
        reason = f"JAX supports the {installed.device}, the installed TensorFlow does not"
        return _on_jax(config, installed), reason
    raise InputError(
        f"--tpu-name local needs a package that reaches the TPU; neither tensorflow-tpu nor jax with libtpu is "
        f"installed. Install one: {INSTALL['TPU']}."
    )


def _on_jax(config: Hardware, installed: Installed) -> Hardware:
    on_jax = replace(config, runtime="jax")
    return replace(on_jax, tpu_name="local") if installed.device == "TPU" and installed.jax_has_device else on_jax


def _why_tensorflow(config: HardwareConfig, installed: Installed) -> str:
    if installed.device == "TPU" and not config.wants_tpu:
        return "without --tpu-name local, the TPU is not used"
    if not installed.tensorflow_has_device:
        return f"no installed package supports the GPU; install one: {INSTALL['GPU']}"
    return f"it has the {installed.device}"


def is_installed(names: tuple[str, ...]) -> bool:
    """Return whether any of these packages is installed."""
    return any(distribution for name in names for distribution in distributions(name=name))


def _tensorflow_has_gpus() -> bool:
    load_tensorflow()
    import tensorflow as tf  # only TensorFlow knows whether it can use the GPUs

    return bool(tf.config.list_physical_devices("GPU"))


def connect(config: HardwareConfig, cluster: Cluster) -> "Runtime":
    """Connect to the devices of a run, after its runtime was chosen. The hosts of a cluster wait for each other.

    Raises:
        InputError: the devices cannot be used, and a retry would not help.
        RunFailedError: the devices cannot be used now, but a retry may help.
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
    """Claim and return JAX's devices on all hosts, grouped by host."""
    import jax

    from train.runtime.jax_programs import set_up_jax

    set_up_jax()
    try:
        if cluster.num_workers > 1 and not jax.distributed.is_initialized():
            if not (config.wants_tpu or _has_jax_gpus()):  # CPUs need JAX's collectives
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(cluster.addresses[0], cluster.num_workers, cluster.index)
        devices = jax.devices("cpu") if config.no_tpu and jax.default_backend() == "tpu" else jax.devices()
    except RuntimeError as error:  # from JAX's client, or from the coordination service
        raise RunFailedError(
            f"JAX could not start its devices: {' '.join(str(error).split())[:300]}. Check that no other process uses "
            "them and that all hosts run; `python train/doctor.py` checks more."
        ) from error
    if config.wants_tpu and devices[0].platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        raise InputError("--tpu-name local needs a TPU that JAX finds; JAX found only the CPU. Leave --tpu-name out.")
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def let_tensorflow_free_memory(config: HardwareConfig) -> None:
    """Turn oneDNN off for JAX's runtime: oneDNN's allocator would keep the memory of variables that were moved to JAX.

    Call it before TensorFlow is imported.
    """
    if config.runtime == "jax" and "tensorflow" not in sys.modules:
        os.environ.setdefault(ONEDNN_VARIABLE, "0")


def _has_jax_gpus() -> bool:
    return is_installed(JAX_FOR_GPUS) and any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICE_PATTERNS)
