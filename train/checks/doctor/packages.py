"""Result lines of the doctor, and its checks of the installed packages by their metadata, without importing them."""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mlm_common.errors import InputError, RunFailedError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    status: Status
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<8} {self.subject:<14} {' '.join(self.text.split())}"


def findings_of(subject: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield what a check finds; whatever it raises is an error of the subject, and the end of this check alone."""
    try:
        yield from check(*arguments)
    except (InputError, RunFailedError) as error:  # messages that say how to fix it
        yield Finding("error", subject, str(error))
    except Exception as error:
        text = f"could not be checked: {type(error).__name__}: {error}. Fix the errors above first."
        yield Finding("error", subject, text)


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def warning(subject: str, text: str, fix: str) -> Finding:
    """Make a finding that does not stop a run, but is probably not intended, slow, or will soon fail."""
    return Finding("warning", subject, f"{text} {fix}")


def error(subject: str, text: str, fix: str) -> Finding:
    return Finding("error", subject, f"{text} {fix}")


PROJECT = "mlm-pretraining"
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
REASONS = {
    "transformers": " (4.57 is the last with TensorFlow classes; 5 has none)",
    "huggingface-hub": " (transformers 4 needs one below 1)",
}
INSTALL = "run python3 install.py in the checkout, which makes an environment that fits this machine."
TPU_INSTALL = "Make the environment again: rm -rf .venv && python3 install.py --extra tpu"


def installed_packages(path: Sequence[str] | None = None) -> dict[str, Distribution]:
    """List {normalized name: distribution}, of several the first on the path, which is the one imported."""
    found: dict[str, Distribution] = {}
    for distribution in distributions(path=list(sys.path if path is None else path)):
        name = distribution.metadata["Name"]
        if name:  # else what an interrupted installation left behind
            found.setdefault(canonicalize_name(name), distribution)
    return found


def tensorflow_builds(installed: dict[str, Distribution]) -> list[str]:
    return [name for name in TENSORFLOW_BUILDS if name in installed]


def check_python(installed: dict[str, Distribution], version: str = platform.python_version()) -> Iterator[Finding]:
    if PROJECT not in installed:
        yield error("Python", f"{PROJECT} is not installed for {sys.executable}.", f"To install it, {INSTALL}")
        return
    supported = installed[PROJECT].metadata["Requires-Python"]
    if version in SpecifierSet(supported):
        yield ok("Python", f"{version}, {sys.executable}")
    else:
        fix = "Run python3 install.py, which makes an environment with a Python that fits."
        yield error("Python", f"must be {supported}, as TensorFlow's packages are; {sys.executable} is {version}.", fix)


def check_requirements(installed: dict[str, Distribution]) -> Iterator[Finding]:
    requirements = _requirements(installed, PROJECT)
    all_fit = True
    for name, wanted in requirements.items():
        found = installed.get(name)
        if found is None or not _fits(found, wanted):
            all_fit = False
            state = f"{found.version} is installed" if found else "it is not installed"
            text = f"{name}{wanted} is needed{REASONS.get(name, '')}; {state}."
            yield error("packages", text, _pip_install(installed, f"{name}{wanted}"))
    if requirements and all_fit:
        yield ok("packages", f"all {len(requirements)} that the project needs, in versions it can use")


def check_tensorflow_build(installed: dict[str, Distribution]) -> Iterator[Finding]:
    builds = tensorflow_builds(installed)
    if not builds:
        yield error("TensorFlow", "is not installed.", f"To install it, {INSTALL}")
    elif len(builds) > 1:
        names = " and ".join(f"{name} {installed[name].version}" for name in builds)
        text = (
            f"{names} are both installed. They contain the same files, so the one installed last overwrote the other."
        )
        fix = TPU_INSTALL if TPU_BUILD in builds else f"pip uninstall -y {' '.join(builds)}, then {INSTALL}"
        yield error("TensorFlow", text, fix)
    else:
        build, version, extra = builds[0], installed[builds[0]].version, TENSORFLOW_BUILDS[builds[0]]
        wanted = _requirements(installed, PROJECT, extra).get(build, "") if extra else ""
        if extra is None:
            text = f"{build} {version} is not a build that this project is tested with."
            yield warning("TensorFlow", text, f"pip uninstall -y {build}, then {INSTALL}")
        elif _fits(installed[build], wanted):
            yield ok("TensorFlow", f"{build} {version}")
        else:
            text = f"{build}{wanted} is needed; {version} is installed."
            yield error("TensorFlow", text, _pip_install(installed, f"{build}{wanted}"))


def check_tf_keras(installed: dict[str, Distribution]) -> Iterator[Finding]:
    builds = tensorflow_builds(installed)
    if not builds:
        return
    minor = _minor(installed[builds[0]].version)
    fix = _pip_install(installed, f"{TF_KERAS}=={minor}.*")
    found = installed.get(TF_KERAS)
    if found is None:
        text = "is not installed; without it transformers finds Keras 3, which its TensorFlow classes cannot use."
        yield error(TF_KERAS, text, fix)
    elif _minor(found.version) != minor:
        yield error(TF_KERAS, f"must have TensorFlow's version {minor}; {found.version} is installed.", fix)
    else:
        yield ok(TF_KERAS, f"{found.version}, matches TensorFlow")


def _pip_install(installed: dict[str, Distribution], requirement: str) -> str:
    """Return the command that installs a package; on a TPU VM pip could replace the TPU's TensorFlow by another."""
    return TPU_INSTALL if TPU_BUILD in installed else f"pip install '{requirement}'"


def _requirements(installed: dict[str, Distribution], name: str, extra: str = "") -> dict[str, str]:
    """Read {normalized name: version specifier} of what a package needs here, or with that extra."""
    texts = (installed[name].requires or ()) if name in installed else ()
    needed = [Requirement(text) for text in texts]
    return {
        canonicalize_name(one.name): str(one.specifier)
        for one in needed
        if one.marker is None or one.marker.evaluate({"extra": extra})
    }


def _fits(distribution: Distribution, wanted: str) -> bool:
    return SpecifierSet(wanted).contains(distribution.version, prereleases=True)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
