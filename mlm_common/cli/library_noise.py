"""Hide what TensorFlow's C++ libraries print while they are loaded, which none of their variables does."""

import contextlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
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


def hide_noise_of_tensorflow() -> None:
    """Hide the noise when `tensorflow` is first imported, unless TF_CPP_MIN_LOG_LEVEL is 0 by then."""
    if not any(isinstance(finder, _TensorFlowFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TensorFlowFinder())


class _TensorFlowFinder(importlib.abc.MetaPathFinder):
    """Finds `tensorflow` through the other finders, and has its loader run without noise."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "tensorflow":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_without_noise(module: ModuleType) -> None:
                with contextlib.nullcontext() if os.environ.get(LOG_LEVEL_VARIABLE) == "0" else without_noise():
                    execute(module)

            spec.loader.exec_module = execute_without_noise  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
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
