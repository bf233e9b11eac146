"""Checks of the runtimes on a TPU: versions of the PJRT API, environment variables, visible devices."""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator

from mlm_common.errors import InputError, RunFailedError
from train import has_accelerator
from train.checks.machine import TPU_INSTALL, Finding, ask_tensorflow
from train.config.settings import TrainingConfig
from train.runtime.child_process import ChildFailedError
from train.runtime.machines import has_tensorflow_for_tpus, tpu_devices
from train.runtime.pjrt_settings import (
    FIXED,
    LIBRARY_VARIABLE,
    NO_METADATA_VARIABLE,
    XLA_VARIABLE,
    installed_version,
    library_api_version,
    library_path,
    tensorflow_api_version,
)
from train.runtime.runtime_choice import INSTALL

# Variables, in addition to TPU_*, that influence which library and which platform a runtime uses.
VARIABLES = (*FIXED, LIBRARY_VARIABLE, XLA_VARIABLE, "JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "XLA_FLAGS")
# One of the variables that Kaggle's image sets to keep libtpu from asking a metadata server.
KAGGLE_VARIABLE = "TPU_PROCESS_ADDRESSES"
HOSTS_VARIABLE = "TPU_WORKER_HOSTNAMES"


def check_pjrt(_config: TrainingConfig) -> Iterator[Finding]:
    """Check that libtpu's PJRT API is not older than the API that TensorFlow was built for; a newer API should work."""
    library = library_path()
    fix = TPU_INSTALL if has_tensorflow_for_tpus() else f"Install one: {INSTALL['TPU']}."
    if library is None:
        if tpu_devices():
            yield Finding("warning", "PJRT", "no libtpu.so is installed; a TPU needs it.", fix)
        return
    try:
        library_version = library_api_version(library)
    except ChildFailedError as error:
        text = f"{library} was asked for the version of its PJRT API, and {error}"
        yield Finding("warning", "PJRT", text, fix)
        return
    tensorflow_version = tensorflow_api_version() if has_tensorflow_for_tpus() else None
    text = f"the API of libtpu {installed_version('libtpu')} is {library_version}, {library}"
    if tensorflow_version is None:
        yield Finding("ok", "PJRT", text)
        return
    text = f"TensorFlow was built for the API {tensorflow_version}; {text}"
    if _numbers(library_version) < _numbers(tensorflow_version):
        yield Finding("warning", "PJRT", f"{text}. It should not be older.", TPU_INSTALL)
    else:
        yield Finding("ok", "PJRT", text)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def check_tpu_variables(_config: TrainingConfig) -> Iterator[Finding]:
    names = [name for name in sorted(os.environ) if name.startswith("TPU_") or name in VARIABLES]
    if not tpu_devices():
        names = [name for name in names if name != NO_METADATA_VARIABLE]  # this project sets it
    if names:
        text = ", ".join(f"{name}={os.environ[name]}" for name in names)
        if os.environ.get(KAGGLE_VARIABLE) == "local":
            text += f" (Kaggle's image sets {KAGGLE_VARIABLE}=local: one process has all chips, as here)"
        yield Finding("ok", "environment", text)
    if tpu_devices() and (num_hosts := os.environ.get(HOSTS_VARIABLE, "").count(",") + 1) > 1:
        text = f"{HOSTS_VARIABLE} names {num_hosts} hosts; libtpu waits for all of them."
        fix = "Start the doctor, like the run, on all hosts; TensorFlow uses one. See docs/tpu/start.md."
        yield Finding("warning", "environment", text, fix)


def check_runtime(config: TrainingConfig) -> Iterator[Finding]:
    """Report the runtime that a run would use. With a GPU, this depends on the devices that TensorFlow sees."""
    answer = ask_tensorflow("name_runtime", config, "choosing the runtime", "")
    yield Finding("ok", "runtime", f"--runtime {answer['runtime']}: {answer['reason']}")


def check_platforms(config: TrainingConfig) -> Iterator[Finding]:
    """List the devices that TensorFlow and JAX see. Run each in a separate process, because it claims the devices."""
    if not has_accelerator():
        return
    for name, task in (("TensorFlow", "list_devices"), ("JAX", "list_jax_devices")):
        if importlib.util.find_spec(name.lower()) is None:
            yield Finding("ok", "devices", f"{name} is not installed")
            continue
        try:
            devices = ask_tensorflow(task, config, f"asking {name} for its devices", "")["devices"]
        except (InputError, RunFailedError) as error:
            yield Finding("warning", "devices", str(error))
            continue
        listed = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(devices).items()))
        # TensorFlow sees these devices if libtpu offers the chips only through PJRT (googlecolab/colabtools#5717).
        if "TPU_SYSTEM" in devices and "TPU" not in devices:
            text = f"{name} sees {listed}: the TPU's system without its cores."
            yield Finding("warning", "devices", text, "Try --pjrt on, or another version of libtpu.")
        else:
            yield Finding("ok", "devices", f"{name} sees {listed}")
