"""What a TPU needs: that this machine has it, or that its hosts see all folders; found out without TensorFlow."""

from pathlib import Path

from tokenizer_training import storage
from tokenizer_training.command_line import InputError
from train.chips import local_accelerator_type, num_replicas_of
from train.cluster import Cluster
from train.config import HardwareConfig, TrainingConfig

# What the kernel drivers of TPU VMs offer: up to v4, and from v5e on.
TPU_DEVICE_PATTERNS = ("accel*", "vfio/[0-9]*")
# Where nothing tells the size of the TPU; a v2-8, v3-8 or v5e-8 has as many.
ASSUMED_TPU_REPLICAS = 8


def tpu_devices(devices: Path = Path("/dev")) -> list[Path]:
    """Return the device files of this machine's TPU, none on a machine without one."""
    return sorted(path for pattern in TPU_DEVICE_PATTERNS for path in devices.glob(pattern))


def check_tpu_devices(config: HardwareConfig) -> None:
    """Check that a machine that is asked to use its own TPU has one.

    Raises:
        InputError: `--tpu-name local` on a machine without TPU devices.
    """
    if not config.wants_tpu or config.tpu_name != "local":
        return
    if not tpu_devices():
        raise InputError(
            "--tpu-name local needs a machine with a TPU; this one has no /dev/accel* and no /dev/vfio/*. Check that "
            "this is the TPU VM and that its runtime version fits the TPU; or leave --tpu-name out to train on GPU or "
            "CPU."
        )


def check_tpu_use(config: TrainingConfig, cluster: Cluster) -> None:
    """Check that a TPU is not to train in several processes, and that the hosts of one given by name see all folders.

    Raises:
        InputError: a TPU and a cluster in TF_CONFIG; a local folder and a TPU that is reached over the network.
    """
    if not config.hardware.wants_tpu:
        return
    if cluster.num_workers > 1:
        raise InputError(
            f"--tpu-name must not be given with a TF_CONFIG of several workers ({', '.join(cluster.addresses)}): one "
            "process drives all hosts of a TPU slice. Unset TF_CONFIG, or leave --tpu-name out."
        )
    if config.hardware.tpu_name == "local":
        return
    folders = {
        "--train-dataset": config.data.train_dataset,
        "--eval-dataset": config.data.eval_dataset,
        "--output-dir": config.run.output_dir,
    }
    for flag, folder in folders.items():
        if folder and not storage.is_remote(folder):
            raise InputError(
                f"{flag} must be in Cloud Storage (gs://BUCKET/NAME) for --tpu-name {config.hardware.tpu_name}, whose "
                f"own hosts read and write it; received {folder}. On a TPU VM with its own TPU, give --tpu-name local."
            )


def expected_num_replicas(config: HardwareConfig, cluster: Cluster) -> int:
    """Return on how many replicas a run will probably be, without claiming its TPU, which may be in use."""
    if not config.wants_tpu:
        return cluster.num_workers
    return num_replicas_of(local_accelerator_type() or "") or ASSUMED_TPU_REPLICAS
