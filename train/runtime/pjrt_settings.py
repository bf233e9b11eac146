"""How TensorFlow comes to see the TPU of this machine: from v5e on, libtpu offers it as a PJRT plugin alone.

TensorFlow reads the settings for that when it is imported. Where they do not fit, connecting ends the process by a
signal or never returns; so a process of its own tries first:

    python -m train.runtime.pjrt_settings connect

connects to the TPU, and prints a JSON object with the number of its cores as the last line. With `api FILE` it prints
the version of the PJRT API that a libtpu has.
"""

import ctypes
import importlib.util
import json
import logging
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlm_common.errors import RunFailedError
from train.config.hardware import HardwareConfig
from train.runtime.child_process import ChildFailedError, ask_module
from train.runtime.machines import has_tensorflow_for_tpus, is_newer_tpu, read_metadata, tpu_devices

logger = logging.getLogger(__name__)

PROGRAM = "train.runtime.pjrt_settings"
LIBRARY_VARIABLE = "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"
NO_METADATA_VARIABLE = "TPU_SKIP_MDS_QUERY"
# As in the program of Keras' examples that has run on a v6e, by TensorFlow 2.19.1 (keras-team/keras-io#2174).
FIXED = {"PJRT_DEVICE": "TPU", "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true"}
XLA_VARIABLE = "TF_XLA_FLAGS"
XLA_FLAGS = (
    "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass=true",
)
# Where Google's images have it.
SYSTEM_LIBRARY = Path("/lib/libtpu.so")
# Importing TensorFlow from a cold disk takes a minute and more, connecting to the chips of a host less.
TRIAL_SECONDS = 300.0
API_SECONDS = 60.0
ADVICE = (
    "Run train/doctor.py --tpu-name local, which tries both ways. JAX finds TPUs that TensorFlow does not: --runtime "
    "jax, in an environment of its own (python3 install.py --extra jax-tpu --environment .venv-jax)."
)
# What has been tried in this process, for the errors of a connection.
_tried: list[str] = []


def library_path() -> Path | None:
    """Find the libtpu that TensorFlow is to load: that of TPU_LIBRARY_PATH, the installed package's, or the image's."""
    spec = importlib.util.find_spec("libtpu")
    package = Path(spec.origin).parent / "libtpu.so" if spec and spec.origin else None
    named = os.environ.get("TPU_LIBRARY_PATH")
    candidates = (Path(named) if named else None, package, SYSTEM_LIBRARY)
    return next((path for path in candidates if path and path.is_file()), None)


def settings(library: Path) -> dict[str, str]:
    """Return the variables that are to be set: those that the user has set stay as they are."""
    wanted = FIXED | {LIBRARY_VARIABLE: str(library)}
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    flags = os.environ.get(XLA_VARIABLE, "")
    new = [flag for flag in XLA_FLAGS if flag.partition("=")[0] not in flags]
    return missing | ({XLA_VARIABLE: " ".join((flags, *new)).strip()} if new else {})


def show_tpu(config: HardwareConfig) -> None:
    """Let TensorFlow, which is not imported yet, see the TPU of this machine, as `--pjrt` says; wait for a trial.

    Raises:
        RunFailedError: `--pjrt on`, and the trial has failed.
    """
    is_here = config.wants_tpu and config.tpu_name == "local" and tpu_devices() and has_tensorflow_for_tpus()
    if not is_here or "tensorflow" in sys.modules:
        return
    if NO_METADATA_VARIABLE not in os.environ and read_metadata("instance/id", timeout_seconds=2.0) is None:
        os.environ[NO_METADATA_VARIABLE] = "1"  # else libtpu asks for minutes, and then ends the process
    if config.pjrt == "off" or (config.pjrt == "auto" and not is_newer_tpu()):
        _tried[:] = ["without its PJRT settings"]
        return
    try:
        num_cores = try_to_connect(with_pjrt=True)
    except ChildFailedError as error:
        _tried[:] = [f"with its PJRT settings, where a trial {error}", "without them"]
        if config.pjrt == "on":
            raise RunFailedError(
                f"--pjrt on needs a TPU that TensorFlow finds with the PJRT settings; a trial of them {error} {ADVICE}"
            ) from error
        logger.warning("TensorFlow's PJRT settings are not used: a trial of them %s", error)
        return
    library = library_path()
    assert library is not None
    os.environ.update(settings(library))
    _tried[:] = ["with its PJRT settings"]
    logger.info("TensorFlow is given its PJRT settings, by which it found %d TPU cores", num_cores)


def try_to_connect(*, with_pjrt: bool) -> int:
    """Connect to the TPU of this machine in a process of its own, and count its cores.

    Raises:
        ChildFailedError: libtpu is missing, or the process died, failed or did not end in time.
    """
    library = library_path()
    if library is None:
        raise ChildFailedError("found no libtpu.so: the package libtpu is not installed.")
    logger.info("Trying to connect to the TPU in a process of its own …")
    given = settings(library) if with_pjrt else {}
    return int(ask_module(PROGRAM, "connect", seconds=TRIAL_SECONDS, environment=given)["num_cores"])


def describe_attempts() -> str:
    """Say for an error what was tried, of which versions."""
    packages = ", ".join(f"{name} {installed_version(name)}" for name in ("tensorflow-tpu", "libtpu"))
    of_environment = f"with{'' if LIBRARY_VARIABLE in os.environ else 'out'} its PJRT settings"
    return f"Tried: {packages}, {', then '.join(_tried or [of_environment])}."


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def tensorflow_api_version() -> str | None:
    """Read the version of the PJRT API that TensorFlow was built for from its headers; None without them."""
    spec = importlib.util.find_spec("tensorflow")
    header = Path(spec.origin).parent / "include/xla/pjrt/c/pjrt_c_api.h" if spec and spec.origin else Path()
    if not header.is_file():
        return None
    numbers = dict(re.findall(r"^#define PJRT_API_(MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8"), re.M))
    return f"{numbers.get('MAJOR')}.{numbers.get('MINOR')}"


def library_api_version(library: Path) -> str:
    """Ask a libtpu for its version of the PJRT API, in a process of its own; ChildFailedError if it has none."""
    answer = ask_module(PROGRAM, "api", str(library), seconds=API_SECONDS, environment={NO_METADATA_VARIABLE: "1"})
    return str(answer["version"])


class _Version(ctypes.Structure):
    """The struct PJRT_Api_Version of XLA's pjrt_c_api.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Api(ctypes.Structure):
    """The beginning of its struct PJRT_Api."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p), ("version", _Version))


def _read_api_version(library: str) -> str:
    function = ctypes.CDLL(library).GetPjrtApi
    function.restype = ctypes.POINTER(_Api)
    found = function().contents.version
    return f"{found.major}.{found.minor}"


def _connect() -> int:
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
    try:
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    return int(topology.num_tasks * topology.num_tpus_per_task)


def main(task: str, *arguments: str) -> None:
    answer = {"num_cores": _connect()} if task == "connect" else {"version": _read_api_version(*arguments)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the destructors of TensorFlow and libtpu may wait for their threads


if __name__ == "__main__":
    main(*sys.argv[1:])
