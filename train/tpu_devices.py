"""Whether this machine has a TPU, found out without TensorFlow."""

from pathlib import Path

from tokenizer_training.command_line import InputError
from train.config import HardwareConfig

# What the kernel drivers of TPU VMs offer: up to v4, and from v5e on.
TPU_DEVICE_PATTERNS = ("accel*", "vfio/[0-9]*")


def check_tpu_devices(config: HardwareConfig) -> None:
    """Check that a machine that is asked to use its own TPU has one.

    Raises:
        InputError: `--tpu-name local` on a machine without TPU devices.
    """
    if not config.wants_tpu or config.tpu_name != "local":
        return
    if not any(path for pattern in TPU_DEVICE_PATTERNS for path in Path("/dev").glob(pattern)):
        raise InputError(
            "--tpu-name local needs a machine with a TPU; this one has no /dev/accel* and no /dev/vfio/*. Check that "
            "this is the TPU VM and that its runtime version fits the TPU; or leave --tpu-name out to train on GPU or "
            "CPU."
        )
