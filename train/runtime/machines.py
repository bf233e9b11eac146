"""The machines of a run, without importing TensorFlow: the workers in TF_CONFIG, and the TPU.

TF_CONFIG: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.

`Chip` describes one replica of TPUStrategy: a core up to v3, a whole chip from v4 on.

Sources: peaks and memory are from Google's documentation (cloud.google.com/tpu/docs/v3 to v6e), halved for a core of
v3. The peak and memory of v2, and the clocks of v2 and v3, are from Jouppi et al. 2020, "A Domain-Specific
Supercomputer for Training Deep Neural Networks"; the clock of v4 is from Jouppi et al. 2023 (arXiv 2304.01433). The
other clocks are computed from the peak and the matrix units. `usable_memory_bytes` is the memory that the TPU compiler
(libtpu 0.0.42) leaves to a program; its error message for a program that is too large contains this number.
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

from mlm_common.cli.settings import nearest_name
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
# Device files of a TPU VM's kernel driver: the first up to v4, the second from v5e on.
TPU_DEVICE_PATTERNS = ("accel*", "vfio/[0-9]*")
# PCI ids, from jax 0.7.1 (jax/_src/hardware_utils.py): the vendor's id, and {id: generation of the chip}. A v2 has v3's
# id.
GOOGLE = "0x1ae0"
PCI_CHIPS = {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}
# Distributions of TensorFlow whose XLA compiles only for TPUs.
TPU_BUILDS = ("tensorflow-tpu", "tf-nightly-tpu")
# Assumed number of replicas if the size of the TPU is unknown. A v2-8, v3-8 or v5e-8 has this number of replicas.
ASSUMED_TPU_REPLICAS = 8
CLUSTER_VARIABLE = "TF_CONFIG"
# Variables on the hosts of a multi-host TPU slice: the names of all hosts, and the index of this host.
TPU_HOSTS_VARIABLE, TPU_HOST_INDEX_VARIABLE = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"
# Port on which the first host listens for the other hosts, as with `jax.distributed.initialize()` on Cloud TPUs.
JAX_COORDINATOR_PORT = 8476
EXAMPLE = '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}'
# Types of tasks. The chief is a separate task, or else the first worker.
CHIEF, WORKER = "chief", "worker"
ADDRESS = re.compile(r".+:\d+")
# Number of characters of the variable that an error shows.
MAX_SHOWN = 200


@dataclass(frozen=True)
class Cluster:
    """The workers of a run.

    Attributes:
        addresses: the addresses of all workers, the chief's address first.
        index: index of this process among the workers.
    """

    addresses: tuple[str, ...] = ("localhost",)
    index: int = 0

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files, pushes and prints. Exactly one process is the chief."""
        return self.index == 0


def read_cluster(*, tpu_hosts: bool = False) -> Cluster:
    """Read the cluster from TF_CONFIG. If the variable is not set, there is one worker.

    Args:
        tpu_hosts: if the variable is not set, return the hosts of this machine's TPU slice instead.
    """
    if tpu_hosts and not os.environ.get(CLUSTER_VARIABLE, "").strip():
        return read_tpu_hosts()
    text = os.environ.get(CLUSTER_VARIABLE, "").strip()
    try:
        settings = json.loads(text or "{}")
        jobs = settings.get("cluster")
        if not jobs:
            return Cluster()  # some platforms set TF_CONFIG on a single machine
        if not set(jobs) <= {CHIEF, WORKER} or len(jobs.get(CHIEF, ())) > 1:
            raise ValueError("its jobs may only be chief, with one address, and worker")
        addresses = tuple(str(address) for job in (CHIEF, WORKER) for address in jobs.get(job, ()))
        if len(addresses) == 1:
            return Cluster()
        if len(set(addresses)) < len(addresses) or not all(map(ADDRESS.fullmatch, addresses)):
            raise ValueError("each address must be a different host:port")
        job, index = settings["task"]["type"], int(settings["task"]["index"])
        if index not in range(len(jobs[job])):
            raise ValueError(f"its task must be in its cluster, which has {len(jobs[job])} {job}; indices start at 0")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
        raise InputError(
            f"{CLUSTER_VARIABLE} must be like {EXAMPLE}; received {shown} ({reason}). Correct it, or unset it to train "
            "on one machine."
        ) from error
    return Cluster(addresses, index + (len(jobs.get(CHIEF, ())) if job == WORKER else 0))


def read_tpu_hosts() -> Cluster:
    """Return the hosts of this machine's TPU slice, in the order of their chips.

    As in `jax.distributed`, their names come from the environment (GKE, Kaggle) or from the metadata server (TPU VMs).
    """
    names = os.environ.get(TPU_HOSTS_VARIABLE, "")
    index = os.environ.get(TPU_HOST_INDEX_VARIABLE, "")
    if not names or not index:
        endpoints = read_metadata("instance/attributes/worker-network-endpoints", timeout_seconds=2.0) or ""
        index = read_metadata("instance/attributes/agent-worker-number", timeout_seconds=2.0) or ""
        names = ",".join(endpoint.split(":")[2] for endpoint in endpoints.split(",") if endpoint.count(":") >= 2)
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    if len(hosts) < 2:
        return Cluster()
    if not index.isdecimal() or int(index) >= len(hosts):
        raise InputError(
            f"{TPU_HOST_INDEX_VARIABLE} must be this host's index among the {len(hosts)} hosts of "
            f"{TPU_HOSTS_VARIABLE}; received {index!r}. Correct it, or unset both variables to use only this host."
        )
    return Cluster(tuple(f"{host}:{JAX_COORDINATOR_PORT}" for host in hosts), int(index))


@dataclass(frozen=True)
class Chip:
    """Capacities of one replica on a TPU generation.

    Attributes:
        generation: name of the generation, such as v5e.
        peak_flops_per_second: peak speed in bfloat16.
        memory_bytes: size of the memory.
        usable_memory_bytes: memory that the compiler leaves to a program.
        clock_hertz: clock rate.
        cores_per_replica: number of TensorCores that act as one replica.
        names_count_cores: whether the number in a name such as `v3-8` counts cores instead of chips, as in all
            generations but v5e and v6e.
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
# Other names of the generations, used by the TPU runtime and the TPU API.
OTHER_NAMES = {"v5litepod": "v5e", "v5 lite": "v5e", "v5lite": "v5e", "v5": "v5p", "v6 lite": "v6e", "v6lite": "v6e"}
NAME = re.compile(r"(?:TPU )?(?P<generation>v\d+(?: ?lite(?:pod)?|[ep])?)(?:-(?P<count>\d+))?", re.IGNORECASE)


def chip_of(name: str | None) -> Chip | None:
    """Return the chip of an accelerator type (`v3-8`, `v5litepod-8`, `v5e-8`) or device kind (`TPU v5 lite`).

    Returns:
        None for a CPU, a GPU, an unknown generation, or None.
    """
    match = NAME.fullmatch((name or "").strip())
    if match is None:
        return None
    generation = match["generation"].lower()
    return CHIPS.get(OTHER_NAMES.get(generation, generation))


def num_replicas_of(accelerator_type: str) -> int | None:
    """Return the number of TPUStrategy's replicas on an accelerator type: 8 on `v3-8` and `v5e-8`, 4 on `v4-8`.

    Returns:
        None if the type or the count is not known.
    """
    chip, match = chip_of(accelerator_type), NAME.fullmatch(accelerator_type.strip())
    if chip is None or match is None or match["count"] is None:
        return None
    count = int(match["count"])
    return max(1, count // chip.cores_per_replica) if chip.names_count_cores else count


def local_accelerator_type() -> str | None:
    """Return the accelerator type of this TPU VM, from the environment or the metadata server; None elsewhere."""
    named = os.environ.get(ACCELERATOR_TYPE_VARIABLE)
    return named or read_metadata("instance/attributes/accelerator-type", timeout_seconds=2.0) or None


def tpu_devices() -> list[Path]:
    return sorted(path for pattern in TPU_DEVICE_PATTERNS for path in DEVICES.glob(pattern))


def is_newer_tpu() -> bool:
    """Return whether this machine has a TPU v5e or newer, by environment, PCI, metadata server or device files."""
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
    return any(distribution for name in TPU_BUILDS for distribution in distributions(name=name))


def check_tpu_devices(config: HardwareConfig) -> None:
    if config.wants_tpu and config.tpu_name == "local" and not tpu_devices():
        raise InputError(
            "--tpu-name local needs a machine with a TPU; this one has no /dev/accel* and no /dev/vfio/*. Check that "
            "this is the TPU VM and that its runtime version matches the TPU, or leave --tpu-name out to train on GPU "
            "or CPU. Elsewhere, train/tpu_preflight.py --topology v5e-8 --dry-run checks the same flags."
        )


def check_tpu_use(config: RunSettings, cluster: Cluster) -> None:
    """Check that only one process drives a TPU, and that a TPU given by name can reach all folders.

    Raises:
        InputError: TF_CONFIG has several workers, or a folder is local although the TPU is on other machines.
    """
    if not config.hardware.wants_tpu:
        return
    if cluster.num_workers > 1 and config.hardware.runtime != "jax":
        raise InputError(
            f"--tpu-name must not be given with a TF_CONFIG of several workers ({', '.join(cluster.addresses)}): one "
            "process drives all hosts of a TPU slice. Unset TF_CONFIG, leave --tpu-name out, or use --runtime jax, "
            "which runs one process on each host."
        )
    if config.hardware.tpu_name == "local":
        return
    hint = "On a TPU VM, use its TPU with --tpu-name local."
    if nearest_name(str(config.hardware.tpu_name), ["local"]):
        hint = "Did you mean --tpu-name local?"
    for flag, folder in config.folders().items():
        if folder and open_folder(folder).is_local:
            raise InputError(
                f"{flag} must be in Cloud Storage (gs://BUCKET/NAME) for --tpu-name {config.hardware.tpu_name}, whose "
                f"hosts read and write it; received {folder}. {hint}"
            )


def has_cpu_alone() -> bool:
    """Return whether this machine is known to have only a CPU, without asking TensorFlow.

    False if this process has imported TensorFlow, which may have been configured to use other devices.
    """
    return "tensorflow" not in sys.modules and not has_accelerator()


def read_metadata(name: str, timeout_seconds: float = 5.0) -> str | None:
    """Read a value from the metadata server of a cloud machine; None if there is no answer."""
    url = f"http://{os.environ.get(METADATA_HOST_VARIABLE) or METADATA_HOST}/computeMetadata/v1/{name}"
    # Use no proxy, because the metadata server is local to the machine, and a proxy cannot reach it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return str(answer.read().decode().strip())
    except (OSError, ValueError) as error:
        logger.debug("no answer from %s: %s", url, error)
        return None
