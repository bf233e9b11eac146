"""Control how TensorFlow, PyTorch and transformers are imported: announce it, hide noise, and skip slow extras.

No environment variable hides all that TensorFlow's C++ libraries print while they are loaded, so it is filtered here.
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

# Patterns of lines to hide: infos and warnings of absl and TensorFlow, and lines that every GPU build prints. Errors
# are shown.
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
# TensorFlow, Keras and TensorBoard import these packages if they are installed. That takes a second, and is not needed.
OPTIONAL_PACKAGES = ("fsspec", "jax", "pandas", "scipy")
# The start of a message that transformers 5 logs when it is imported. It is hidden, because a run needs no PyTorch.
WITHOUT_TORCH = "PyTorch was not found"


def set_up_imports() -> None:
    """Make later imports of TensorFlow and transformers fast and quiet.

    The output of TensorFlow's libraries is shown if TF_CPP_MIN_LOG_LEVEL is 0 when TensorFlow is imported.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    logging.getLogger("transformers").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(WITHOUT_TORCH)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in `EXECUTED` through the other finders, and replaces how their loaders execute them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in EXECUTED:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(EXECUTED[name], spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute_tensorflow(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    logger.info("Loading TensorFlow …")
    shows_noise = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
    with contextlib.nullcontext() if shows_noise else without_noise(), hidden(OPTIONAL_PACKAGES):
        execute(module)
    check_interrupts()  # an optional import may have caught the KeyboardInterrupt and counted as failed


def _execute_torch(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    logger.info("Loading PyTorch …")
    execute(module)
    check_interrupts()


def _execute_import_utils(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Skip two things that transformers does when it is imported, which take half a second."""
    execute(module)
    # The metrics of version 4, which nothing here uses, would import scikit-learn and SciPy.
    module._sklearn_available = False  # type: ignore[attr-defined]
    with contextlib.suppress(AttributeError):  # another release may have other functions
        # transformers reads the exported names of its 1,400 files twice, because it caches 128 folders but has 400. It
        # also parses the whole files, although `__all__` is in their last lines.
        read_names = module.fetch__all__
        read_folder = module.create_import_structure_from_path.__wrapped__
        module.fetch__all__ = lambda text: read_names(text[text.rfind("\n__all__") + 1 :])  # type: ignore[attr-defined]
        module.create_import_structure_from_path = functools.cache(read_folder)  # type: ignore[attr-defined]


EXECUTED = {
    "tensorflow": _execute_tensorflow,
    "torch": _execute_torch,
    "transformers.utils.import_utils": _execute_import_utils,
}


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Make imports of these packages fail as if they were not installed, unless they are already imported.

    This uses the fact that an import fails if `sys.modules` has None for the package.
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
    """Filter standard error through grep. As a separate process, it prints even the last lines before an abort."""
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
                start_new_session=True,  # Ctrl-C must not end grep before this process
            )
        except OSError:  # there is no grep or no standard error
            yield
            return
        assert process.stdin is not None
        os.dup2(process.stdin.fileno(), 2)
        process.stdin.close()
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a child process may keep the pipe open
                process.wait(GREP_END_SECONDS)
