"""Disk and memory: what is free, and what a run needs of it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlm_common.storage import open_folder
from train.checks.doctor.findings import Finding, error, ok, warning
from train.config.settings import TrainingConfig
from train.runtime.plan import STATE_BYTES_PER_PARAMETER

# A checkpoint: float32 weights and the optimizer's two moments. An export: float32 weights.
CHECKPOINT_BYTES_PER_PARAMETER = 4 * 3
EXPORT_BYTES_PER_PARAMETER = 4
# TensorFlow with transformers, before there is a model.
LIBRARIES_BYTES = 1_000_000_000
LITTLE_BYTES = 2_000_000_000
MEMORY_FILE = Path("/proc/meminfo")
# What a container may use: of version 2 and 1 of Linux' control groups.
CONTAINER_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def check_disk(config: TrainingConfig, num_parameters: int | None = None) -> Iterator[Finding]:
    """Check that there is room for checkpoints and export, as far as the model's size is known.

    A run that writes to Cloud Storage makes each file in the folder for temporary files first.
    """
    output_dir = config.run.output_dir
    is_local = output_dir is None or open_folder(output_dir).is_local
    folder = _existing(Path(output_dir or ".")) if is_local else Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(folder).free
    # The newest, that of the lowest loss, and the one being written.
    num_checkpoints = config.run.keep_checkpoints + 2 if is_local else 1
    needed_bytes = (num_parameters or 0) * (
        num_checkpoints * CHECKPOINT_BYTES_PER_PARAMETER + EXPORT_BYTES_PER_PARAMETER
    )
    free = f"{_gb(free_bytes)} free in {folder.resolve()}"
    needs = f"the run writes up to {_gb(needed_bytes)}: {num_checkpoints} checkpoints and the export"
    fix = "Free some space, name a larger disk with --output-dir"
    if free_bytes < needed_bytes:
        fix += " or keep fewer with --keep-checkpoints 1." if is_local else " (or with TMPDIR)."
        yield error("disk", f"{free}; {needs}.", fix)
    elif free_bytes < LITTLE_BYTES:
        yield warning("disk", f"{free}, which is little for checkpoints.", f"{fix}.")
    else:
        yield ok("disk", f"{free}; {needs}" if num_parameters else free)


def check_memory(config: TrainingConfig, num_parameters: int | None = None) -> Iterator[Finding]:
    """Check that the host's memory is enough for a run.

    On the CPU that is weights, gradients and moments; with a TPU or GPU the copy that becomes a checkpoint.
    """
    available_bytes = available_memory_bytes()
    per_parameter = CHECKPOINT_BYTES_PER_PARAMETER if config.hardware.wants_tpu else STATE_BYTES_PER_PARAMETER
    needed_bytes = LIBRARIES_BYTES + (num_parameters or 0) * per_parameter
    available = f"{_gb(available_bytes)} of memory available"
    needs = f"the run needs {_gb(needed_bytes)}, plus activations if it trains on the CPU"
    if num_parameters and available_bytes < needed_bytes:
        fix = "End other programs, use a machine with more, or a smaller model (--preset)."
        yield error("memory", f"{available}; {needs}.", fix)
    elif available_bytes < LITTLE_BYTES:
        fix = "End other programs, or use a machine with more."
        yield warning("memory", f"{available}; TensorFlow and a small model need about that much.", fix)
    else:
        yield ok("memory", f"{available}; {needs}" if num_parameters else available)


def available_memory_bytes() -> int:
    """Measure what programs may still take of this machine, or of the container that this is."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMORY_FILE.exists():
        fields = dict(line.split(":", 1) for line in MEMORY_FILE.read_text(encoding="utf-8").splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limits = [path.read_text(encoding="utf-8").strip() for path in CONTAINER_LIMIT_FILES if path.exists()]
    return min([available, *(int(limit) for limit in limits if limit.isdecimal())])


def _existing(folder: Path) -> Path:
    """Find the folder, or the nearest above it that exists."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
