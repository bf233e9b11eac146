"""How TensorFlow and transformers are imported: announced, without noise, and without what no command here needs.

What TensorFlow's C++ libraries print while they are loaded is hidden here, since none of their variables does.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from mlm_common.cli.process import check_interrupts

logger = logging.getLogger(__name__)

# Infos and warnings, as absl and TensorFlow write them, and lines of each GPU build. Errors are shown.
NOISE = "|".join(
    (
        r"^WARNING: All log messages before absl::InitializeLog\(\) is called",
        r"^[IW][0-9]{4} [0-9:.]+ +[0-9]+ [^ ]+:[0-9]+\] ",
        r"^[0-9-]+ [0-9:.]+: [IW] ",
        r"^To enable the following instructions: ",
        r"Unable to register cu[A-Z]+ factory",
    )
)
GREP_END_SECONDS = 5.0
# TensorFlow, Keras and TensorBoard import these if they are installed, which takes a second; nothing here needs that.
OPTIONAL_PACKAGES = ("fsspec", "jax", "pandas", "scipy")
# What transformers 5 logs when it is imported; a run needs no PyTorch.
WITHOUT_TORCH = "PyTorch was not found"


def set_up_imports() -> None:
    """Have TensorFlow and transformers imported without noise, and faster, where they are not imported yet.

    The noise is shown if TF_CPP_MIN_LOG_LEVEL is 0 by then.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    logging.getLogger("transformers").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(WITHOUT_TORCH)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules through the other finders, and has their loaders run as `EXECUTED` says."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in EXECUTED:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(EXECUTED[name], spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute_tensorflow(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    logger.info("Loading TensorFlow …")
    shows_noise = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
    with contextlib.nullcontext() if shows_noise else without_noise(), hidden(OPTIONAL_PACKAGES):
        execute(module)
    check_interrupts()  # in an optional import, which failed


def _execute_torch(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    logger.info("Loading PyTorch …")
    execute(module)
    check_interrupts()


def _execute_import_utils(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Spare transformers two things that it does when it is imported, which take half a second."""
    execute(module)
    # The metrics of version 4, which nothing here uses, import scikit-learn and SciPy.
    module._sklearn_available = False  # type: ignore[attr-defined]
    with contextlib.suppress(AttributeError):  # if another release has other functions
        # It reads the names in each of its 1,400 files twice, for it remembers 128 folders and has 400; and the names
        # are in the last lines of a file.
        read_names = module.fetch__all__
        of_folder = module.create_import_structure_from_path.__wrapped__
        module.fetch__all__ = lambda text: read_names(text[text.rfind("\n__all__") + 1 :])  # type: ignore[attr-defined]
        module.create_import_structure_from_path = functools.cache(of_folder)  # type: ignore[attr-defined]


EXECUTED = {
    "tensorflow": _execute_tensorflow,
    "torch": _execute_torch,
    "transformers.utils.import_utils": _execute_import_utils,
}


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Let imports of these packages fail as if they were not installed, unless they are imported already.

    An import fails so where `sys.modules` has None for the package.
    """
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


@contextmanager
def without_noise() -> Iterator[None]:
    """Filter standard error through grep, which still prints the last lines of a library that aborts."""
    grep = ["grep", "--text", "--line-buffered", "-vE", NOISE]
    with contextlib.ExitStack() as opened:
        try:
            stderr = os.dup(2)
            opened.callback(os.close, stderr)
            process = subprocess.Popen(
                grep,
                stdin=subprocess.PIPE,
                stdout=stderr,
                env=os.environ | {"LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C must not end it first
            )
        except OSError:  # no grep, or no standard error
            yield
            return
        assert process.stdin is not None
        os.dup2(process.stdin.fileno(), 2)
        process.stdin.close()
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            with contextlib.suppress(subprocess.TimeoutExpired):  # if a child process keeps it open
                process.wait(GREP_END_SECONDS)
