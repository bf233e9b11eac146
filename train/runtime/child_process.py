"""Run a module of the project in a child process, which may crash or hang, and read a JSON object that it prints."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

# Start of a line of TensorFlow's or libtpu's log, or of the stack trace that they print in a crash.
LOG_LINE = re.compile(r"[IWEF]\d{4} |2\d{3}-\d\d-|WARNING|\*\*\*|https://symbolize|(PC: )?@ |=== |\S+\.cc:\d+$")


class ChildFailedError(Exception):
    """The child gave no answer. The message is a predicate, such as `did not end within 300 s.`."""


def ask_module(
    module: str,
    *arguments: str,
    seconds: float,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS`, and return the JSON object in the last line that it prints.

    Args:
        module: name of the module.
        arguments: arguments of the module.
        seconds: time limit.
        given: standard input of the process.
        environment: variables added to the environment of this process.

    Raises:
        ChildFailedError: the process failed, crashed or took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=given,
            capture_output=True,
            timeout=seconds,
            check=False,
            env=os.environ | dict(environment or {}),
        )
    except subprocess.TimeoutExpired as late:
        raise ChildFailedError(f"did not end within {seconds:.0f} s.") from late
    if done.returncode == -signal.SIGILL:
        raise ChildFailedError("needs instructions that this CPU lacks (AVX). Use another machine.")
    if done.returncode:
        how = f"crashed ({signal.Signals(-done.returncode).name})" if done.returncode < 0 else "failed"
        raise ChildFailedError(f"{how}: {_last_words(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return answer


def _last_words(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    messages = [line for line in lines if not LOG_LINE.match(line)]
    return textwrap.shorten(messages[-1] if messages else "it printed no message.", 300)
