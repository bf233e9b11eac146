"""Checks that import TensorFlow or list its devices, each in a separate process."""

import json
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlm_common.errors import InputError, RunFailedError
from train.checks.doctor.findings import Finding, error, ok, warning
from train.config.settings import TrainingConfig

PROGRAM = "train.checks.doctor.tensorflow_process"
IMPORT_SECONDS = 300.0  # from a cold disk a minute and more
CONNECT_SECONDS = 300.0
NVIDIA_DEVICES = "nvidia[0-9]*"
REINSTALL = "Reinstall the packages named above; if that does not help, start over with python3 install.py."


class ProcessFailedError(RunFailedError):
    """The process failed; the message says how it ended and its last line."""


def ask_tensorflow(task: str, config: TrainingConfig, timeout_seconds: float) -> dict[str, Any]:
    """Run a task of `tensorflow_process.py`, and read its answer.

    Raises:
        InputError: the task was refused; says how to fix it.
        ProcessFailedError: it crashed, failed, or did not answer in time.
    """
    command = [sys.executable, "-m", PROGRAM, task]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(config), capture_output=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise ProcessFailedError(f"did not answer within {timeout_seconds:.0f} s.") from late
    if done.returncode == -signal.SIGILL:
        raise ProcessFailedError("needs instructions that this CPU lacks (AVX). Use another machine.")
    if done.returncode < 0:
        raise ProcessFailedError(f"crashed ({signal.Signals(-done.returncode).name}): {_last_words(done.stderr)}")
    if done.returncode:
        raise ProcessFailedError(f"failed: {_last_words(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    if "refused" in answer:
        raise InputError(answer["refused"])
    return answer


def check_import(config: TrainingConfig) -> Iterator[Finding]:
    try:
        libraries = ask_tensorflow("import_libraries", config, IMPORT_SECONDS)
    except ProcessFailedError as failed:
        yield error("import", f"import of TensorFlow, tf-keras and transformers {failed}", REINSTALL)
        return
    if libraries["is_seen_by_transformers"]:
        yield ok("import", f"TensorFlow {libraries['tensorflow']}, {libraries['file']}, seen by transformers")
    else:
        text = f"transformers does not see TensorFlow {libraries['tensorflow']}, {libraries['file']}."
        yield error("import", text, "Unset USE_TORCH, USE_TF and FORCE_TF_AVAILABLE.")


def check_gpus(config: TrainingConfig, devices: Path = Path("/dev")) -> Iterator[Finding]:
    num_gpus = len(list(devices.glob(NVIDIA_DEVICES)))
    if not num_gpus or config.hardware.wants_tpu:
        return
    seen = ask_tensorflow("list_gpus", config, IMPORT_SECONDS)["gpus"]
    if seen:
        yield ok("GPU", f"TensorFlow sees {len(seen)}")
    else:
        text = f"the machine has {num_gpus}, but TensorFlow sees none, so a run would train on the CPU."
        yield warning(
            "GPU", text, "Run python3 install.py --extra gpu, and check with nvidia-smi that the driver works."
        )


def _last_words(stderr: bytes) -> str:
    """Return the last line that is not of TensorFlow's log."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("2", "I0", "W0", "WARNING"))] or lines
    return textwrap.shorten(said[-1] if said else "no message", 300)
