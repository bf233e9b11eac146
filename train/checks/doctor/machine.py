"""Checks of disk and memory: what a run needs, and what is free."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlm_common.storage import open_folder
from train.checks.doctor.findings import Finding, error, ok
from train.config.settings import TrainingConfig
from train.runtime.plan import STATE_BYTES_PER_PARAMETER

# A checkpoint: float32 weights and the optimizer's two moments. An export: float32 weights.
CHECKPOINT_BYTES_PER_PARAMETER = 4 * 3
EXPORT_BYTES_PER_PARAMETER = 4
# TensorFlow with transformers, before there is a model.
LIBRARIES_BYTES = 1_000_000_000
MEMORY_FILE = Path("/proc/meminfo")


def check_disk(config: TrainingConfig, num_parameters: int) -> Iterator[Finding]:
    """Check that there is room for checkpoints and export.

    A run that writes to Cloud Storage makes each file in the folder for temporary files first.
    """
    output_dir = config.run.output_dir
    is_local = output_dir is None or open_folder(output_dir).is_local
    wanted = Path(output_dir or ".").absolute()
    folder = next(one for one in (wanted, *wanted.parents) if one.exists()) if is_local else Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(folder).free
    # The newest, that of the lowest loss, and the one being written.
    num_checkpoints = config.run.keep_checkpoints + 2 if is_local else 1
    needed_bytes = num_parameters * (num_checkpoints * CHECKPOINT_BYTES_PER_PARAMETER + EXPORT_BYTES_PER_PARAMETER)
    needs = f"the run writes up to {_gb(needed_bytes)}: {num_checkpoints} checkpoints and the export"
    text = f"{_gb(free_bytes)} free in {folder.resolve()}; {needs}"
    if free_bytes < needed_bytes:
        more = "or keep fewer with --keep-checkpoints 1" if is_local else "(or with TMPDIR)"
        yield error("disk", f"{text}.", f"Free some space, name a larger disk with --output-dir {more}.")
    else:
        yield ok("disk", text)


def check_memory(config: TrainingConfig, num_parameters: int) -> Iterator[Finding]:
    """Check that the host's memory is enough for a run.

    On the CPU that is weights, gradients and moments; with a TPU or GPU the copy that becomes a checkpoint.
    """
    available_bytes = available_memory_bytes()
    per_parameter = CHECKPOINT_BYTES_PER_PARAMETER if config.hardware.wants_tpu else STATE_BYTES_PER_PARAMETER
    needed_bytes = LIBRARIES_BYTES + num_parameters * per_parameter
    needs = f"the run needs {_gb(needed_bytes)}, plus activations if it trains on the CPU"
    text = f"{_gb(available_bytes)} of memory available; {needs}"
    if available_bytes < needed_bytes:
        fix = "End other programs, use a machine with more, or a smaller model (--preset)."
        yield error("memory", f"{text}.", fix)
    else:
        yield ok("memory", text)


def available_memory_bytes() -> int:
    """Measure what programs may still take of this machine's memory."""
    if not MEMORY_FILE.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in MEMORY_FILE.read_text(encoding="utf-8").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
