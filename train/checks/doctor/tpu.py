"""Checks of the TPU: type, TensorFlow build, other processes that use it, and whether it can be connected to."""

import contextlib
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from mlm_common.errors import InputError
from train.checks.doctor.findings import Finding, error, ok, warning
from train.checks.doctor.libraries import CONNECT_SECONDS, ProcessFailedError, ask_tensorflow
from train.checks.doctor.packages import TPU_BUILD, TPU_INSTALL, tensorflow_builds
from train.config.settings import TrainingConfig
from train.runtime.machines import (
    GIB,
    check_tpu_devices,
    check_tpu_use,
    chip_of,
    local_accelerator_type,
    read_cluster,
    tpu_devices,
)


def check_tpu(config: TrainingConfig, installed: dict[str, Distribution]) -> Iterator[Finding]:
    """Check that the requested TPU can be used; without a request, that no TPU is idle."""
    if not config.hardware.wants_tpu:
        yield from _check_unused(config, installed)
        return
    check_tpu_use(config, read_cluster())
    if config.hardware.tpu_name == "local":
        check_tpu_devices(config.hardware)
        if TPU_BUILD not in tensorflow_builds(installed):
            text = f"--tpu-name local needs {TPU_BUILD}; the installed TensorFlow is the one for CPUs and GPUs."
            yield error("TPU", text, TPU_INSTALL)
            return
        holders = processes_that_hold(tpu_devices())
        if holders:
            names = ", ".join(f"{number} ({name})" for number, name in holders.items())
            yield error(
                "TPU", f"is in use by process {names}; only one process can use it.", "End that process: kill NUMBER"
            )
            return
    yield from _check_connection(config)


def processes_that_hold(devices: list[Path], processes: Path = Path("/proc")) -> dict[int, str]:
    """Find {process id: command} of the processes that have one of these files open, as far as this user may see."""
    names = {str(device) for device in devices}
    holders = {}
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if any(str(file.readlink()) in names for file in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders[int(folder.name)] = command.strip()[:80]
    return holders


def describe_tpu() -> str:
    """Describe type and memory of this machine's TPU, as far as they are known."""
    kind = local_accelerator_type()
    chip = chip_of(kind)
    return f"{kind}, {chip.memory_bytes // GIB} GiB per replica" if chip else kind or "of unknown type"


def _check_unused(config: TrainingConfig, installed: dict[str, Distribution]) -> Iterator[Finding]:
    if tpu_devices() and not config.hardware.no_tpu:
        text = f"this machine has one ({describe_tpu()}), but without --tpu-name a run trains on the CPU."
        yield warning("TPU", text, "Pass --tpu-name local.")
    elif tpu_devices():
        yield ok("TPU", f"{describe_tpu()}; not used, because of --no-tpu")
    elif TPU_BUILD in tensorflow_builds(installed):
        text = f"{TPU_BUILD} is installed, but this machine has no TPU (no /dev/accel*, no /dev/vfio/*)."
        fix = (
            "On Colab, choose a TPU runtime; on a TPU VM, the runtime version for its type. Otherwise train on the CPU."
        )
        yield warning("TPU", text, fix)
    else:
        yield ok("TPU", "none on this machine; a run trains on the GPU or CPU")


def _check_connection(config: TrainingConfig) -> Iterator[Finding]:
    """Claim the TPU for a moment, as the run will."""
    name = config.hardware.tpu_name
    try:
        num_replicas = ask_tensorflow("connect_tpu", config, CONNECT_SECONDS)["num_replicas"]
    except ProcessFailedError as failed:
        fix = "Restart the TPU VM. If that does not help, check its runtime version: it must fit the TPU's type."
        yield error("TPU", f"connecting to {name} {failed}", fix)
    except InputError as refused:
        yield Finding("error", "TPU", str(refused))
    else:
        kind = describe_tpu() if name == "local" else name
        yield ok("TPU", f"{kind}, {num_replicas} replicas")
