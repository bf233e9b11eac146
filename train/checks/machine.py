"""Checks of the installed packages, TensorFlow, GPUs and the TPU, and the lines that the doctor prints about them.

Code that imports TensorFlow may crash or hang, so it runs in a separate process:

    python -m train.checks.machine TASK

This process reads a pickled `TrainingConfig` from standard input, and prints a JSON object as the last line.
"""

import contextlib
import importlib.util
import json
import logging
import pickle
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mlm_common.cli.console import counted
from mlm_common.errors import InputError, RunFailedError
from train.config.settings import TrainingConfig
from train.runtime.child_process import ChildFailedError, ask_module
from train.runtime.machines import (
    GIB,
    Cluster,
    check_tpu_devices,
    check_tpu_use,
    chip_of,
    is_newer_tpu,
    local_accelerator_type,
    read_cluster,
    tpu_devices,
)
from train.runtime.pjrt_settings import ADVICE, show_tpu, try_to_connect
from train.runtime.runtime_choice import INSTALL as INSTALL_FOR
from train.runtime.runtime_choice import choose_runtime, jax_devices, look

logger = logging.getLogger(__name__)

PROJECT = "mlm-pretraining"
Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        status: `warning` if a run can start, but something is probably a mistake, slow, or about to fail.
        subject: what was checked.
        text: the result of the check.
        fix: how to fix the problem.
    """

    status: Status
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:<8} {self.subject:<14} {' '.join(f'{self.text} {self.fix}'.split())}"


def findings_of(subject: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield the findings of a check. An exception becomes an error line, and does not stop other checks."""
    try:
        yield from check(*arguments)
    except (InputError, RunFailedError) as error:  # the messages of these errors say how to fix them
        yield Finding("error", subject, str(error))
    except Exception as error:
        text = f"could not be checked: {type(error).__name__}: {error}. Fix the errors above first."
        yield Finding("error", subject, text)


# Distributions that contain the module `tensorflow`, with the extra of this project that installs them.
TENSORFLOW_BUILDS = {
    "tensorflow": "cpu",
    "tensorflow-tpu": "tpu",
    "tensorflow-cpu": None,
    "tensorflow-gpu": None,
    "tensorflow-rocm": None,
    "intel-tensorflow": None,
    "tf-nightly": None,
    "tf-nightly-tpu": None,
}
TPU_BUILD = "tensorflow-tpu"
TF_KERAS = "tf-keras"
INSTALL = "run python3 install.py in the checkout, which creates an environment for this machine."
TPU_INSTALL = "Create the environment again: rm -rf .venv && python3 install.py --extra tpu"
REINSTALL = "Reinstall the packages named above; if that does not help, start over with python3 install.py."
PROGRAM = "train.checks.machine"
TIMEOUT_SECONDS = 300.0  # importing TensorFlow from a cold disk takes more than a minute


def installed_packages(path: Sequence[str] | None = None) -> dict[str, Distribution]:
    """Return {normalized name: distribution}. If distributions share a name, return the one that Python imports."""
    installed: dict[str, Distribution] = {}
    for distribution in distributions(path=list(sys.path if path is None else path)):
        name = distribution.metadata["Name"]
        if name:  # an interrupted installation leaves distributions without a name
            installed.setdefault(canonicalize_name(name), distribution)
    return installed


def tensorflow_builds(installed: dict[str, Distribution]) -> list[str]:
    return [name for name in TENSORFLOW_BUILDS if name in installed]


def check_python(installed: dict[str, Distribution], version: str = platform.python_version()) -> Iterator[Finding]:
    if PROJECT not in installed:
        yield Finding(
            "error", "Python", f"{PROJECT} is not installed for {sys.executable}.", f"To install it, {INSTALL}"
        )
        return
    supported = installed[PROJECT].metadata["Requires-Python"]
    if version in SpecifierSet(supported):
        yield Finding("ok", "Python", f"{version}, {sys.executable}")
    else:
        fix = "Run python3 install.py, which creates an environment with a supported Python."
        text = f"must be {supported}, the versions that TensorFlow supports; {sys.executable} is {version}."
        yield Finding("error", "Python", text, fix)


def check_requirements(installed: dict[str, Distribution]) -> Iterator[Finding]:
    requirements = _requirements(installed, PROJECT)
    all_fit = True
    for name, specifier in requirements.items():
        package = installed.get(name)
        if package is None or not _fits(package, specifier):
            all_fit = False
            state = f"{package.version} is installed" if package else "it is not installed"
            text = f"{name}{specifier} is needed; {state}."
            yield Finding("error", "packages", text, _pip_install(installed, f"{name}{specifier}"))
    if requirements and all_fit:
        yield Finding("ok", "packages", f"all {len(requirements)} that the project needs, in versions it can use")


def check_tensorflow_build(installed: dict[str, Distribution]) -> Iterator[Finding]:
    builds = tensorflow_builds(installed)
    if not builds:
        yield Finding("error", "TensorFlow", "is not installed.", f"To install it, {INSTALL}")
    elif len(builds) > 1:
        names = " and ".join(f"{name} {installed[name].version}" for name in builds)
        text = f"{names} are both installed. They contain the same files, so the later one overwrote the other."
        fix = TPU_INSTALL if TPU_BUILD in builds else f"pip uninstall -y {' '.join(builds)}, then {INSTALL}"
        yield Finding("error", "TensorFlow", text, fix)
    else:
        build, version, extra = builds[0], installed[builds[0]].version, TENSORFLOW_BUILDS[builds[0]]
        specifier = _requirements(installed, PROJECT, extra).get(build, "") if extra else ""
        if extra is None:
            text = f"{build} {version} is not a build that this project is tested with."
            yield Finding("warning", "TensorFlow", text, f"pip uninstall -y {build}, then {INSTALL}")
        elif _fits(installed[build], specifier):
            yield Finding("ok", "TensorFlow", f"{build} {version}")
        else:
            text = f"{build}{specifier} is needed; {version} is installed."
            yield Finding("error", "TensorFlow", text, _pip_install(installed, f"{build}{specifier}"))


def check_tf_keras(installed: dict[str, Distribution]) -> Iterator[Finding]:
    builds = tensorflow_builds(installed)
    if not builds:
        return
    minor = _minor(installed[builds[0]].version)
    fix = _pip_install(installed, f"{TF_KERAS}=={minor}.*")
    tf_keras = installed.get(TF_KERAS)
    if tf_keras is None:
        text = "is not installed; the models that this project trains are tf-keras models."
        yield Finding("error", TF_KERAS, text, fix)
    elif _minor(tf_keras.version) != minor:
        text = f"must have TensorFlow's version {minor}; {tf_keras.version} is installed."
        yield Finding("error", TF_KERAS, text, fix)
    else:
        yield Finding("ok", TF_KERAS, f"{tf_keras.version}, matches TensorFlow")


def _pip_install(installed: dict[str, Distribution], requirement: str) -> str:
    """Return the command that installs a package.

    On a TPU VM the command runs install.py, because pip may replace TensorFlow for TPUs with another build.
    """
    return TPU_INSTALL if TPU_BUILD in installed else f"pip install '{requirement}'"


def _requirements(installed: dict[str, Distribution], name: str, extra: str = "") -> dict[str, str]:
    """Return {normalized name: version specifier} for the packages that a package, or one of its extras, needs here."""
    texts = (installed[name].requires or ()) if name in installed else ()
    requirements = (
        requirement
        for requirement in map(Requirement, texts)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    )
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in requirements}


def _fits(distribution: Distribution, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(distribution.version, prereleases=True)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def ask_tensorflow(task: str, config: TrainingConfig, activity: str, fix: str) -> dict[str, Any]:
    """Run a task of `TASKS` in a separate process, and return its answer.

    Args:
        task: name of the task.
        config: the settings, for the task.
        activity: description of the task, used as the first words of an error message.
        fix: how to fix a failure, as the last words of an error message.

    Raises:
        InputError: the task raised an error that explains itself.
        RunFailedError: the process crashed, failed, or did not end in time.
    """
    logger.info("Loading TensorFlow …")
    try:
        answer = ask_module(PROGRAM, task, given=pickle.dumps(config), seconds=TIMEOUT_SECONDS)
    except ChildFailedError as error:
        raise RunFailedError(f"{activity} {error} {fix}") from error
    if "refused" in answer:
        raise InputError(answer["refused"])
    return answer


def check_import(config: TrainingConfig) -> Iterator[Finding]:
    doing = "import of TensorFlow, tf-keras and transformers"
    libraries = ask_tensorflow("import_libraries", config, doing, REINSTALL)
    yield Finding("ok", "import", f"TensorFlow {libraries['tensorflow']}, {libraries['file']}")


def check_gpus(config: TrainingConfig, devices: Path = Path("/dev")) -> Iterator[Finding]:
    num_gpus = len(list(devices.glob("nvidia[0-9]*")))
    if not num_gpus or config.hardware.wants_tpu:
        return
    if gpus := ask_tensorflow("list_gpus", config, "looking for GPUs", REINSTALL)["gpus"]:
        yield Finding("ok", "GPU", f"TensorFlow sees {len(gpus)}")
    elif ask_tensorflow("name_runtime", config, "choosing the runtime", "")["runtime"] == "jax":
        text = f"the machine has {num_gpus}; TensorFlow sees none, so a run uses them through JAX"
        yield Finding("ok", "GPU", text)
    else:
        text = f"the machine has {num_gpus}, but TensorFlow sees none, so a run would train on the CPU."
        fix = f"Install a library that can use them: {INSTALL_FOR['GPU']}. Check with nvidia-smi that the driver works."
        yield Finding("warning", "GPU", text, fix)


def check_tpu(config: TrainingConfig) -> Iterator[Finding]:
    if tpu_devices() and not config.hardware.no_tpu:  # without --tpu-name, a run may use the TPU through JAX
        config = replace(config, hardware=choose_runtime(config.hardware)[0])
    name, has_tpu_build = config.hardware.tpu_name, TPU_BUILD in tensorflow_builds(installed_packages())
    on_jax = config.hardware.runtime == "jax"
    if not config.hardware.wants_tpu:
        yield _unused_tpu(config, has_tpu_build)
        return
    check_tpu_use(config, read_cluster())
    if name == "local":
        check_tpu_devices(config.hardware)
        if not has_tpu_build and not on_jax:
            text = f"--runtime tensorflow needs {TPU_BUILD}; the installed TensorFlow is the build for CPUs and GPUs."
            fix = f"{TPU_INSTALL}; or leave out --runtime: JAX works without {TPU_BUILD}."
            yield Finding("error", "TPU", text, fix)
            return
        if holders := processes_that_hold(tpu_devices()):
            names = ", ".join(f"{number} ({command})" for number, command in holders.items())
            text = f"is in use by process {names}; only one process can use it at a time."
            yield Finding("error", "TPU", text, "End that process: kill NUMBER")
            return
        if not on_jax:
            show_tpu(config.hardware)
    fix = "Restart the TPU VM. If that does not help, check that the VM's runtime version fits the type of the TPU."
    try:
        answer = ask_tensorflow("connect_jax" if on_jax else "connect_tpu", config, f"connecting to {name}", fix)
    except (InputError, RunFailedError) as error:
        yield Finding("error", "TPU", str(error))
        if name == "local" and not on_jax and (config.hardware.pjrt == "off" or not is_newer_tpu()):
            yield _with_pjrt()
        return
    runtime = ", by JAX" if on_jax else ""
    kind = describe_tpu() if name == "local" else name
    yield Finding("ok", "TPU", f"{kind}, {counted(answer['num_replicas'], 'replica')}{runtime}")


def _with_pjrt() -> Finding:
    """Try to connect with TensorFlow's PJRT settings, which the run would not use."""
    try:
        num_cores = try_to_connect(with_pjrt=True)
    except ChildFailedError as error:
        return Finding("warning", "TPU", f"A trial of TensorFlow's PJRT settings {error}", ADVICE)
    return Finding("warning", "TPU", f"With --pjrt on, TensorFlow finds the {num_cores} cores.", "Pass --pjrt on.")


def _unused_tpu(config: TrainingConfig, has_tpu_build: bool) -> Finding:
    if tpu_devices() and not config.hardware.no_tpu:
        text = f"this machine has one ({describe_tpu()}), but without --tpu-name a run trains on the CPU."
        is_usable = has_tpu_build or look(config.hardware).jax_has_device
        install = "" if is_usable else f" No installed library can use the TPU; install one: {INSTALL_FOR['TPU']}."
        return Finding("warning", "TPU", text, f"Pass --tpu-name local.{install}")
    if tpu_devices():
        return Finding("ok", "TPU", f"{describe_tpu()}; not used, because of --no-tpu")
    if has_tpu_build:
        text = f"{TPU_BUILD} is installed, but this machine has no TPU (no /dev/accel*, no /dev/vfio/*)."
        fix = "On Colab, choose a TPU runtime; on a TPU VM, choose the runtime version for its type."
        return Finding("warning", "TPU", text, f"{fix} Otherwise train on the CPU.")
    return Finding("ok", "TPU", "none on this machine; a run trains on the GPU or CPU")


def processes_that_hold(devices: list[Path]) -> dict[int, str]:
    """Return {process id: command} of the processes visible to this user that have one of these files open."""
    names = {str(device) for device in devices}
    holders = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(str(file.readlink()) in names for file in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders[int(folder.name)] = command.strip()[:80]
    return holders


def describe_tpu() -> str:
    kind = local_accelerator_type()
    chip = chip_of(kind)
    return f"{kind}, {chip.memory_bytes // GIB} GiB per replica" if chip else kind or "of unknown type"


def import_libraries(_config: TrainingConfig) -> dict[str, Any]:
    """Import a run's packages, and return their versions. Do not list devices, because this might claim a TPU."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is not None and spec.origin is None:
        raise ImportError(f"only the remains of an uninstalled TensorFlow: {spec.submodule_search_locations}")

    import tensorflow as tf
    import tf_keras  # noqa: F401
    import transformers  # noqa: F401

    return {"tensorflow": tf.__version__, "file": str(spec and spec.origin)}


def list_gpus(_config: TrainingConfig) -> dict[str, Any]:
    import tensorflow as tf

    return {"gpus": [device.name for device in tf.config.list_physical_devices("GPU")]}


def list_devices(_config: TrainingConfig) -> dict[str, Any]:
    import tensorflow as tf

    return {"devices": [device.device_type for device in tf.config.list_physical_devices()]}


def list_jax_devices(_config: TrainingConfig) -> dict[str, Any]:
    import jax

    return {"devices": [device.platform for device in jax.devices()]}


def connect_jax(config: TrainingConfig) -> dict[str, Any]:
    """Connect to the TPU through JAX, as a run does."""
    return {"num_replicas": len(jax_devices(config.hardware, Cluster()))}


def name_runtime(config: TrainingConfig) -> dict[str, Any]:
    hardware, reason = choose_runtime(config.hardware)
    return {"runtime": hardware.runtime, "reason": reason}


def connect_tpu(config: TrainingConfig) -> dict[str, Any]:
    """Connect to the TPU as a run does; this process then holds the TPU until it ends."""
    from train.runtime.strategy import connect

    return {"num_replicas": connect(config.hardware, Cluster()).num_replicas_in_sync}


def check_run(config: TrainingConfig) -> dict[str, Any]:
    """Check a run as `run_mlm.py --dry-run` does, but without the TPU; also read a shard, and build the model."""
    import tensorflow as tf

    from train.data.shards import TrainingInputs
    from train.loop.lifecycle import Pretraining, prepare
    from train.loop.run import new_network
    from train.step.optimizer import count_with_one_moment

    config = replace(config, run=replace(config.run, dry_run=True))
    job = Pretraining()
    run = prepare(config, job, with_tpu=False) if config.run.output_dir else job.open_run(config, read_cluster())
    first, plans = run.phases[0], run.planned_as_expected(with_tensorflow=True).plans
    for phase in run.phases:
        assert isinstance(phase.inputs, TrainingInputs)
        _read_shard(phase.inputs.train_shards.paths[0])
    with tf.device("CPU:0"):
        network = new_network(first)
    num_parameters = network.count_params()
    output = f"; {run.folder} is writable and contains no other run" if config.run.output_dir else ""
    summary = f"{first.model_config.model_type}, {num_parameters:,} parameters, {plans[-1].num_steps:,} steps{output}"
    num_with_one_moment = count_with_one_moment(config.optimization, network)
    return {"num_parameters": num_parameters, "num_with_one_moment": num_with_one_moment, "summary": summary}


def _read_shard(path: str) -> None:
    """Read a byte of a shard with TensorFlow, whose client for Cloud Storage has a separate way to find credentials."""
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            file.read(1)
    except tf.errors.OpError as error:
        raise InputError(
            f"TensorFlow must be able to read the shards; {path} gave {type(error).__name__}: {error.message[:200]} If "
            "TensorFlow finds no credentials, it reads anonymously: run `gcloud auth application-default login`, or "
            "name the key of a service account in GOOGLE_APPLICATION_CREDENTIALS; on a TPU VM, give the VM's account "
            "access."
        ) from error


DEVICE_TASKS = (list_gpus, list_devices, list_jax_devices, name_runtime, connect_jax, connect_tpu)
TASKS = {task.__name__: task for task in (import_libraries, *DEVICE_TASKS, check_run)}


def main() -> None:
    config = pickle.load(sys.stdin.buffer)
    try:
        result = TASKS[sys.argv[1]](config)
    except (InputError, RunFailedError) as error:
        result = {"refused": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
