"""The machines of a run, without TensorFlow: its workers, as TF_CONFIG names them, and its TPU.

TF_CONFIG: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.

A chip is counted by replica of TPUStrategy: a core up to v3, a whole chip from v4 on.

Peaks and memory are those of Google's documentation (cloud.google.com/tpu/docs/v3 to v6e), halved for a core
of v3. v2's, and the clocks of v2 and v3, are of Jouppi et al. 2020, "A Domain-Specific Supercomputer for Training Deep
Neural Networks"; v4's clock is of Jouppi et al. 2023 (arXiv 2304.01433). The other clocks follow from the peak and the
matrix units. `usable_memory_bytes` is what the TPU compiler (libtpu 0.0.42) leaves to a program: it names the figure
when it refuses one that is too large.
"""

import contextlib
import json
import logging
import os
import re
import sys
import urllib.request
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from train import has_accelerator
from train.config.settings import HardwareConfig, RunSettings

logger = logging.getLogger(__name__)

GIB = 2**30
ACCELERATOR_TYPE_VARIABLE = "TPU_ACCELERATOR_TYPE"
METADATA_HOST_VARIABLE = "GCE_METADATA_HOST"
METADATA_HOST = "metadata.google.internal"
DEVICES, PCI_DEVICES = Path("/dev"), Path("/sys/bus/pci/devices")
# What the kernel drivers of TPU VMs offer: up to v4, and from v5e on.
TPU_DEVICE_PATTERNS = ("accel*", "vfio/[0-9]*")
# Of PCI, as jax has them (jax/_src/hardware_utils.py, 0.7.1): the maker, and the generation by chip. A v2 is as a v3.
GOOGLE = "0x1ae0"
PCI_CHIPS = {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}
# Distributions of TensorFlow in which XLA compiles for TPUs alone.
TPU_BUILDS = ("tensorflow-tpu", "tf-nightly-tpu")
# Where nothing tells the size of the TPU; a v2-8, v3-8 or v5e-8 has as many.
ASSUMED_TPU_REPLICAS = 8
CLUSTER_VARIABLE = "TF_CONFIG"
# Of a TPU slice of several hosts: their names, and which one this is.
TPU_HOSTS_VARIABLE, TPU_HOST_INDEX_VARIABLE = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"
# Where the first host listens for the others, as with `jax.distributed.initialize()` on Cloud TPUs.
JAX_COORDINATOR_PORT = 8476
EXAMPLE = '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}'
# The chief is a separate task, or the first worker.
CHIEF, WORKER = "chief", "worker"
ADDRESS = re.compile(r".+:\d+")
# Characters of the variable in an error.
MAX_SHOWN = 200


@dataclass(frozen=True)
class Cluster:
    """The workers of a run, chief first, and which of them this process is."""

    addresses: tuple[str, ...] = ("localhost",)
    index: int = 0

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this is the one process that writes the run's files, pushes and prints."""
        return self.index == 0


def read_cluster(*, tpu_hosts: bool = False) -> Cluster:
    """Read the cluster of TF_CONFIG: one worker where the variable is not set.

    With `tpu_hosts` the hosts of this machine's TPU slice are one without it.
    """
    if tpu_hosts and not os.environ.get(CLUSTER_VARIABLE, "").strip():
        return read_tpu_hosts()
    text = os.environ.get(CLUSTER_VARIABLE, "").strip()
    try:
        settings = json.loads(text or "{}")
        jobs = settings.get("cluster")
        if not jobs:
            return Cluster()  # some platforms set it on a machine that trains by itself
        if not set(jobs) <= {CHIEF, WORKER} or len(jobs.get(CHIEF, ())) > 1:
            raise ValueError("it may have the jobs chief, of one address, and worker only")
        addresses = tuple(str(address) for job in (CHIEF, WORKER) for address in jobs.get(job, ()))
        if len(addresses) == 1:
            return Cluster()
        if len(set(addresses)) < len(addresses) or not all(map(ADDRESS.fullmatch, addresses)):
            raise ValueError("each address must be another host:port")
        job, index = settings["task"]["type"], int(settings["task"]["index"])
        if index not in range(len(jobs[job])):
            raise ValueError(
                f"its task must be one of its cluster, which has {len(jobs[job])} {job}; indices begin at 0"
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
        raise InputError(
            f"{CLUSTER_VARIABLE} must be like {EXAMPLE}; received {shown} ({reason}). Correct it, or unset it to train "
            "on one machine."
        ) from error
    return Cluster(addresses, index + (len(jobs.get(CHIEF, ())) if job == WORKER else 0))


def read_tpu_hosts() -> Cluster:
    """Find the hosts of this machine's TPU slice, in the order of their chips.

    GKE and Kaggle say so in the environment, TPU VMs by the metadata server; both as `jax.distributed` reads them.
    """
    names = os.environ.get(TPU_HOSTS_VARIABLE, "")
    index = os.environ.get(TPU_HOST_INDEX_VARIABLE, "")
    if not names or not index:
        endpoints = read_metadata("instance/attributes/worker-network-endpoints", timeout_seconds=2.0) or ""
        index = read_metadata("instance/attributes/agent-worker-number", timeout_seconds=2.0) or ""
        names = ",".join(one.split(":")[2] for one in endpoints.split(",") if one.count(":") >= 2)
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    if len(hosts) < 2:
        return Cluster()
    if not index.isdecimal() or int(index) >= len(hosts):
        raise InputError(
            f"{TPU_HOST_INDEX_VARIABLE} must be this host's number among the {len(hosts)} of {TPU_HOSTS_VARIABLE}; "
            f"received {index!r}. Correct it, or unset both to compute on this host alone."
        )
    return Cluster(tuple(f"{host}:{JAX_COORDINATOR_PORT}" for host in hosts), int(index))


@dataclass(frozen=True)
class Chip:
    """What one replica has of a TPU generation.

    cores_per_replica: TensorCores that work as one.
    names_count_cores: whether the number in `v3-8` is of cores, as up to v5p, or of chips.
    """

    generation: str
    peak_flops_per_second: float  # bfloat16
    memory_bytes: int
    usable_memory_bytes: int
    clock_hertz: float
    cores_per_replica: int
    names_count_cores: bool


CHIPS = {
    chip.generation: chip
    for chip in (
        Chip("v2", 23e12, 8 * GIB, int(7.48 * GIB), 0.70e9, 1, True),
        Chip("v3", 61.5e12, 16 * GIB, int(15.48 * GIB), 0.94e9, 1, True),
        Chip("v4", 275e12, 32 * GIB, int(30.75 * GIB), 1.05e9, 2, True),
        Chip("v5e", 197e12, 16 * GIB, int(15.75 * GIB), 1.50e9, 1, False),
        Chip("v5p", 459e12, 96 * GIB, int(95.73 * GIB), 1.75e9, 2, True),
        Chip("v6e", 918e12, 32 * GIB, int(31.25 * GIB), 1.75e9, 1, False),
    )
}
# Other names that the TPU runtime and the TPU API have for them.
OTHER_NAMES = {"v5litepod": "v5e", "v5 lite": "v5e", "v5lite": "v5e", "v5": "v5p", "v6 lite": "v6e", "v6lite": "v6e"}
NAME = re.compile(r"(?:TPU )?(?P<generation>v\d+(?: ?lite(?:pod)?|[ep])?)(?:-(?P<count>\d+))?", re.IGNORECASE)


def chip_of(name: str | None) -> Chip | None:
    """Find the chip of an accelerator type (`v3-8`, `v5litepod-8`, `v5e-8`) or device kind (`TPU v5 lite`).

    None for a CPU, a GPU, a generation not in the table, or None.
    """
    match = NAME.fullmatch((name or "").strip())
    if match is None:
        return None
    generation = match["generation"].lower()
    return CHIPS.get(OTHER_NAMES.get(generation, generation))


def num_replicas_of(accelerator_type: str) -> int | None:
    """Count the replicas of TPUStrategy on an accelerator type: 8 on `v3-8` and `v5e-8`, 4 on `v4-8`.

    None where type or count is not known.
    """
    chip, match = chip_of(accelerator_type), NAME.fullmatch(accelerator_type.strip())
    if chip is None or match is None or match["count"] is None:
        return None
    count = int(match["count"])
    return max(1, count // chip.cores_per_replica) if chip.names_count_cores else count


def local_accelerator_type() -> str | None:
    """Find the accelerator type of the TPU VM this runs on, from environment or metadata server; None elsewhere."""
    named = os.environ.get(ACCELERATOR_TYPE_VARIABLE)
    return named or read_metadata("instance/attributes/accelerator-type", timeout_seconds=2.0) or None


def tpu_devices() -> list[Path]:
    return sorted(path for pattern in TPU_DEVICE_PATTERNS for path in DEVICES.glob(pattern))


def is_newer_tpu() -> bool:
    """Return whether this machine's TPU is a v5e or newer, by environment, PCI, metadata server, or device files."""
    if not tpu_devices():
        return False
    chip = chip_of(os.environ.get(ACCELERATOR_TYPE_VARIABLE))
    generation = chip.generation if chip else _pci_generation()
    if generation is None and (chip := chip_of(local_accelerator_type())):
        generation = chip.generation
    if generation is None:
        return any(DEVICES.glob(TPU_DEVICE_PATTERNS[-1]))
    return generation not in ("v2", "v3", "v4")


def _pci_generation() -> str | None:
    for vendor in PCI_DEVICES.glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text(encoding="ascii").strip() == GOOGLE:
                return PCI_CHIPS.get(vendor.with_name("device").read_text(encoding="ascii").strip())
    return None


def has_tensorflow_for_tpus() -> bool:
    return any(found for name in TPU_BUILDS for found in distributions(name=name))


def check_tpu_devices(config: HardwareConfig) -> None:
    if config.wants_tpu and config.tpu_name == "local" and not tpu_devices():
        raise InputError(
            "--tpu-name local needs a machine with a TPU; this one has no /dev/accel* and no /dev/vfio/*. Check that "
            "this is the TPU VM and that its runtime version fits the TPU; or leave --tpu-name out to train on GPU or "
            "CPU."
        )


def check_tpu_use(config: RunSettings, cluster: Cluster) -> None:
    """Check that one process drives a TPU, and that the hosts of one given by name see all folders.

    Raises:
        InputError: a TPU and a cluster in TF_CONFIG; a local folder and a TPU that is reached over the network.
    """
    if not config.hardware.wants_tpu:
        return
    if cluster.num_workers > 1 and config.hardware.runtime != "jax":
        raise InputError(
            f"--tpu-name must not be given with a TF_CONFIG of several workers ({', '.join(cluster.addresses)}): one "
            "process drives all hosts of a TPU slice. Unset TF_CONFIG, leave --tpu-name out, or give --runtime "
            "jax, which has one process on each host."
        )
    if config.hardware.tpu_name == "local":
        return
    for flag, folder in config.folders().items():
        if folder and open_folder(folder).is_local:
            raise InputError(
                f"{flag} must be in Cloud Storage (gs://BUCKET/NAME) for --tpu-name {config.hardware.tpu_name}, whose "
                f"own hosts read and write it; received {folder}. On a TPU VM with its own TPU, give --tpu-name local."
            )


def has_cpu_alone() -> bool:
    """Return whether this machine has no device but its CPU, as far as that is known without TensorFlow.

    In a process that has imported TensorFlow it is not known: it may have been told of other devices.
    """
    return "tensorflow" not in sys.modules and not has_accelerator()


def read_metadata(name: str, timeout_seconds: float = 5.0) -> str | None:
    url = f"http://{os.environ.get(METADATA_HOST_VARIABLE) or METADATA_HOST}/computeMetadata/v1/{name}"
    # The metadata server is on the machine itself, so no proxy reaches it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return str(answer.read().decode().strip())
    except (OSError, ValueError) as error:
        logger.debug("no answer from %s: %s", url, error)
        return None
