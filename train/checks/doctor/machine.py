"""Checks of TensorFlow, GPUs and the TPU; what imports TensorFlow runs in a separate process, and so may crash or hang.

    python -m train.checks.doctor.machine TASK

is that process: it reads a pickled `TrainingConfig` on standard input, and prints a JSON object as the last line.
"""

import contextlib
import importlib.util
import json
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm_common.errors import InputError, RunFailedError
from train.checks.doctor.packages import (
    TPU_BUILD,
    TPU_INSTALL,
    Finding,
    error,
    installed_packages,
    ok,
    tensorflow_builds,
    warning,
)
from train.config.settings import TrainingConfig
from train.runtime.machines import (
    GIB,
    Cluster,
    check_tpu_devices,
    check_tpu_use,
    chip_of,
    expected_num_replicas,
    local_accelerator_type,
    read_cluster,
    tpu_devices,
)

PROGRAM = "train.checks.doctor.machine"
TIMEOUT_SECONDS = 300.0  # importing TensorFlow from a cold disk takes a minute and more
REINSTALL = "Reinstall the packages named above; if that does not help, start over with python3 install.py."


def ask_tensorflow(task: str, config: TrainingConfig, doing: str, fix: str) -> dict[str, Any]:
    """Run a task of `TASKS` in a separate process, and read its answer; InputError if it was refused.

    RunFailedError says that `doing` the task crashed, failed, or did not end in time, and how to `fix` that.
    """
    command = [sys.executable, "-m", PROGRAM, task]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(config), capture_output=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise RunFailedError(f"{doing} did not end within {TIMEOUT_SECONDS:.0f} s. {fix}") from late
    if done.returncode == -signal.SIGILL:
        raise RunFailedError(f"{doing} needs instructions that this CPU lacks (AVX). Use another machine.")
    if done.returncode:
        how = f"crashed ({signal.Signals(-done.returncode).name})" if done.returncode < 0 else "failed"
        raise RunFailedError(f"{doing} {how}: {_last_words(done.stderr)} {fix}")
    answer: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    if "refused" in answer:
        raise InputError(answer["refused"])
    return answer


def _last_words(stderr: bytes) -> str:
    """Return the last line that is not of TensorFlow's log."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("2", "I0", "W0", "WARNING"))] or lines
    return textwrap.shorten(said[-1] if said else "no message", 300)


def check_import(config: TrainingConfig) -> Iterator[Finding]:
    doing = "import of TensorFlow, tf-keras and transformers"
    libraries = ask_tensorflow("import_libraries", config, doing, REINSTALL)
    if libraries["is_seen_by_transformers"]:
        yield ok("import", f"TensorFlow {libraries['tensorflow']}, {libraries['file']}, seen by transformers")
    else:
        text = f"transformers does not see TensorFlow {libraries['tensorflow']}, {libraries['file']}."
        yield error("import", text, "Unset USE_TORCH, USE_TF and FORCE_TF_AVAILABLE.")


def check_gpus(config: TrainingConfig, devices: Path = Path("/dev")) -> Iterator[Finding]:
    num_gpus = len(list(devices.glob("nvidia[0-9]*")))
    if not num_gpus or config.hardware.wants_tpu:
        return
    if seen := ask_tensorflow("list_gpus", config, "looking for GPUs", REINSTALL)["gpus"]:
        yield ok("GPU", f"TensorFlow sees {len(seen)}")
    else:
        text = f"the machine has {num_gpus}, but TensorFlow sees none, so a run would train on the CPU."
        fix = "Run python3 install.py --extra gpu, and check with nvidia-smi that the driver works."
        yield warning("GPU", text, fix)


def check_tpu(config: TrainingConfig) -> Iterator[Finding]:
    name, has_tpu_build = config.hardware.tpu_name, TPU_BUILD in tensorflow_builds(installed_packages())
    if not config.hardware.wants_tpu:
        yield _unused_tpu(config, has_tpu_build)
        return
    check_tpu_use(config, read_cluster())
    if name == "local":
        check_tpu_devices(config.hardware)
        if not has_tpu_build:
            text = f"--tpu-name local needs {TPU_BUILD}; the installed TensorFlow is the one for CPUs and GPUs."
            yield error("TPU", text, TPU_INSTALL)
            return
        if holders := processes_that_hold(tpu_devices()):
            names = ", ".join(f"{number} ({command})" for number, command in holders.items())
            text = f"is in use by process {names}; only one process can use it."
            yield error("TPU", text, "End that process: kill NUMBER")
            return
    fix = "Restart the TPU VM. If that does not help, check its runtime version: it must fit the TPU's type."
    answer = ask_tensorflow("connect_tpu", config, f"connecting to {name}", fix)
    yield ok("TPU", f"{describe_tpu() if name == 'local' else name}, {answer['num_replicas']} replicas")


def _unused_tpu(config: TrainingConfig, has_tpu_build: bool) -> Finding:
    if tpu_devices() and not config.hardware.no_tpu:
        text = f"this machine has one ({describe_tpu()}), but without --tpu-name a run trains on the CPU."
        return warning("TPU", text, "Pass --tpu-name local.")
    if tpu_devices():
        return ok("TPU", f"{describe_tpu()}; not used, because of --no-tpu")
    if has_tpu_build:
        text = f"{TPU_BUILD} is installed, but this machine has no TPU (no /dev/accel*, no /dev/vfio/*)."
        fix = "On Colab, choose a TPU runtime; on a TPU VM, the runtime version for its type."
        return warning("TPU", text, f"{fix} Otherwise train on the CPU.")
    return ok("TPU", "none on this machine; a run trains on the GPU or CPU")


def processes_that_hold(devices: list[Path]) -> dict[int, str]:
    """Find {process id: command} of the processes that have one of these files open, as far as this user may see."""
    names = {str(device) for device in devices}
    holders = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if any(str(file.readlink()) in names for file in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders[int(folder.name)] = command.strip()[:80]
    return holders


def describe_tpu() -> str:
    kind = local_accelerator_type()
    chip = chip_of(kind)
    return f"{kind}, {chip.memory_bytes // GIB} GiB per replica" if chip else kind or "of unknown type"


def import_libraries(_config: TrainingConfig) -> dict[str, Any]:
    """Import what a run imports, and return versions; looking for devices might claim a TPU."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is not None and spec.origin is None:
        raise ImportError(f"only remains of a TensorFlow that was uninstalled: {spec.submodule_search_locations}")

    import tensorflow as tf
    import tf_keras  # noqa: F401
    import transformers.modeling_tf_utils

    return {
        "tensorflow": tf.__version__,
        "file": str(spec and spec.origin),
        "is_seen_by_transformers": transformers.utils.is_tf_available(),
    }


def list_gpus(_config: TrainingConfig) -> dict[str, Any]:
    import tensorflow as tf

    return {"gpus": [device.name for device in tf.config.list_physical_devices("GPU")]}


def connect_tpu(config: TrainingConfig) -> dict[str, Any]:
    """Claim the TPU as a run does, for as long as this process lives."""
    from train.runtime.strategy import connect

    return {"num_replicas": connect(config.hardware, Cluster()).num_replicas_in_sync}


def check_run(config: TrainingConfig) -> dict[str, Any]:
    """Make the checks of `run_mlm.py --dry-run`, read a shard with TensorFlow's client, and build the model."""
    import tensorflow as tf

    from train.data.shards import TrainingInputs
    from train.loop.lifecycle import Pretraining, prepare
    from train.loop.run import new_network
    from train.runtime.strategy import local_devices

    config = replace(config, run=replace(config.run, dry_run=True))
    job = Pretraining()
    run = prepare(config, job) if config.run.output_dir else job.open_run(config, read_cluster())
    first = run.phases[0]
    plan = run.plans(expected_num_replicas(config.hardware, run.cluster, len(local_devices())))[-1]
    for phase in run.phases:
        assert isinstance(phase.inputs, TrainingInputs)
        _read_shard(phase.inputs.train_shards.paths[0])
    with tf.device("CPU:0"):
        num_parameters = new_network(first).count_params()
    output = f"; {run.folder} is writable and contains no other run" if config.run.output_dir else ""
    summary = f"{first.model_config.model_type}, {num_parameters:,} parameters, {plan.num_steps:,} steps{output}"
    return {"num_parameters": num_parameters, "summary": summary}


def _read_shard(path: str) -> None:
    """Read from a shard with TensorFlow's own client, which finds credentials in its own way."""
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            file.read(1)
    except tf.errors.OpError as error:
        raise InputError(
            f"TensorFlow must be able to read the shards; {path} gave {type(error).__name__}: {error.message[:200]} It "
            "uses no account where it finds no credentials: run `gcloud auth application-default login`, or name a "
            "service account's key by GOOGLE_APPLICATION_CREDENTIALS; on a TPU VM give its account access."
        ) from error


TASKS = {task.__name__: task for task in (import_libraries, list_gpus, connect_tpu, check_run)}


def main() -> None:
    config = pickle.load(sys.stdin.buffer)
    try:
        result = TASKS[sys.argv[1]](config)
    except (InputError, RunFailedError) as error:
        result = {"refused": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
