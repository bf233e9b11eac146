"""Settings that let TensorFlow see this machine's TPU: from v5e on, libtpu offers it only as a PJRT plugin.

TensorFlow reads these settings when it is imported. If the settings do not fit, connecting crashes the process or never
returns. So a separate process tries first:

    python -m train.runtime.pjrt_settings connect

This process connects to the TPU, and prints a JSON object with the number of TPU cores as the last line. With `api
FILE` it prints the version of the PJRT API of a libtpu.
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
# These values are from a Keras example that has run on a v6e with TensorFlow 2.19.1 (keras-team/keras-io#2174).
FIXED = {"PJRT_DEVICE": "TPU", "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true"}
XLA_VARIABLE = "TF_XLA_FLAGS"
XLA_FLAGS = (
    "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass=true",
)
# The path of libtpu in Google's images.
SYSTEM_LIBRARY = Path("/lib/libtpu.so")
# Importing TensorFlow from a cold disk takes a minute or more; connecting to a host's chips takes less time.
TRIAL_SECONDS = 300.0
API_SECONDS = 60.0
ADVICE = (
    "Run train/doctor.py --tpu-name local, which tries both ways. JAX finds TPUs that TensorFlow does not; to use "
    "it, pass --runtime jax in a separate environment (python3 install.py --extra jax-tpu --environment .venv-jax)."
)
# The attempts that this process has made, described in error messages about the connection.
_tried: list[str] = []


def library_path() -> Path | None:
    """Find the libtpu that TensorFlow will load: from TPU_LIBRARY_PATH, the installed package, or Google's image."""
    spec = importlib.util.find_spec("libtpu")
    package = Path(spec.origin).parent / "libtpu.so" if spec and spec.origin else None
    named = os.environ.get("TPU_LIBRARY_PATH")
    candidates = (Path(named) if named else None, package, SYSTEM_LIBRARY)
    return next((path for path in candidates if path and path.is_file()), None)


def settings(library: Path) -> dict[str, str]:
    """Return the environment variables to set, except those that the user has set."""
    wanted = FIXED | {LIBRARY_VARIABLE: str(library)}
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    flags = os.environ.get(XLA_VARIABLE, "")
    new = [flag for flag in XLA_FLAGS if flag.partition("=")[0] not in flags]
    return missing | ({XLA_VARIABLE: " ".join((flags, *new)).strip()} if new else {})


def show_tpu(config: HardwareConfig) -> None:
    """Set the environment so that TensorFlow will see this machine's TPU, according to `--pjrt`. Wait for a trial.

    Call this before TensorFlow is imported.

    Raises:
        RunFailedError: with `--pjrt on`, the trial has failed.
    """
    is_here = config.wants_tpu and config.tpu_name == "local" and tpu_devices() and has_tensorflow_for_tpus()
    if not is_here or "tensorflow" in sys.modules:
        return
    if NO_METADATA_VARIABLE not in os.environ and read_metadata("instance/id", timeout_seconds=2.0) is None:
        os.environ[NO_METADATA_VARIABLE] = "1"  # otherwise libtpu asks the server for minutes, then ends the process
    if config.pjrt == "off" or (config.pjrt == "auto" and not is_newer_tpu()):
        _tried[:] = ["without its PJRT settings"]
        return
    try:
        num_cores = try_to_connect(with_pjrt=True)
    except ChildFailedError as error:
        _tried[:] = [f"with its PJRT settings, where a trial {error}", "without them"]
        if config.pjrt == "on":
            raise RunFailedError(
                "--pjrt on needs a TPU that TensorFlow finds with the PJRT settings; a trial with them "
                f"{error} {ADVICE}"
            ) from error
        logger.warning("TensorFlow's PJRT settings are not used: a trial with them %s", error)
        return
    library = library_path()
    assert library is not None
    os.environ.update(settings(library))
    _tried[:] = ["with its PJRT settings"]
    logger.info("TensorFlow uses its PJRT settings; with them it found %d TPU cores", num_cores)


def try_to_connect(*, with_pjrt: bool) -> int:
    """Connect to this machine's TPU in a separate process, and return the number of TPU cores.

    Raises:
        ChildFailedError: libtpu is missing, or the process crashed, failed or did not end in time.
    """
    library = library_path()
    if library is None:
        raise ChildFailedError("found no libtpu.so: the package libtpu is not installed.")
    logger.info("Trying to connect to the TPU in a separate process …")
    given = settings(library) if with_pjrt else {}
    return int(ask_module(PROGRAM, "connect", seconds=TRIAL_SECONDS, environment=given)["num_cores"])


def describe_attempts() -> str:
    """Describe for an error message the attempts to connect, and the installed versions."""
    packages = ", ".join(f"{name} {installed_version(name)}" for name in ("tensorflow-tpu", "libtpu"))
    attempt_of_user = f"with{'' if LIBRARY_VARIABLE in os.environ else 'out'} its PJRT settings"
    return f"Tried: {packages}, {', then '.join(_tried or [attempt_of_user])}."


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def tensorflow_api_version() -> str | None:
    """Read from TensorFlow's headers the version of the PJRT API that TensorFlow supports; None without headers."""
    spec = importlib.util.find_spec("tensorflow")
    header = Path(spec.origin).parent / "include/xla/pjrt/c/pjrt_c_api.h" if spec and spec.origin else Path()
    if not header.is_file():
        return None
    numbers = dict(re.findall(r"^#define PJRT_API_(MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8"), re.M))
    return f"{numbers.get('MAJOR')}.{numbers.get('MINOR')}"


def library_api_version(library: Path) -> str:
    """Read the version of the PJRT API of a libtpu, in a separate process.

    Raises:
        ChildFailedError: the library has no PJRT API.
    """
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
    """The first fields of the struct PJRT_Api of XLA's pjrt_c_api.h."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p), ("version", _Version))


def _read_api_version(library: str) -> str:
    function = ctypes.CDLL(library).GetPjrtApi
    function.restype = ctypes.POINTER(_Api)
    api_version = function().contents.version
    return f"{api_version.major}.{api_version.minor}"


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
    os._exit(0)  # skip the destructors of TensorFlow and libtpu, which may wait for their threads


if __name__ == "__main__":
    main(*sys.argv[1:])
