"""A custom task: a class in a file of its author, of pretraining or of fine-tuning."""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TypeVar

from mlm_common.cli.local_paths import missing
from mlm_common.errors import InputError
from mlm_common.hub.retries import one_line

MODULE_NAME = "task_of_the_user"
Kind = TypeVar("Kind")


def load_class(task: str, base: type[Kind], needed: tuple[str, ...] = ()) -> type[Kind]:
    """Run the file of `FILE.py:CLASS`, and return that class.

    The file's folder is not searched for modules, so that only its code and installed packages are run.

    Args:
        base: what it must be a subclass of; abstract methods must be defined.
        needed: attributes that it must have as well.

    Raises:
        InputError: no such file or class, a file that fails, or a class that is no task or lacks a part of one.
    """
    path, _, name = task.rpartition(":")
    if not Path(path).is_file():
        raise missing(path, "--task", "file")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"--task: running {path} failed with {reason}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == MODULE_NAME]
        known = ", ".join(one.__name__ for one in classes) or "no classes"
        raise InputError(f"--task: {path} has no class {name}; it has {known}.")
    if not issubclass(found, base):
        raise InputError(f"--task: {name} in {path} is not a subclass of {base.__module__}.{base.__name__}.")
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise InputError(f"--task: {name} in {path} lacks these methods: {', '.join(lacking)}.")
    if lacking := [one for one in needed if not hasattr(found, one)]:
        raise InputError(f"--task: {name} in {path} lacks these attributes: {', '.join(lacking)}.")
    return found


def identity_of(task: str) -> str:
    """Name the class and the content of its file, by which a run is known; the file itself may move."""
    path, _, name = task.rpartition(":")
    return f"{name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
