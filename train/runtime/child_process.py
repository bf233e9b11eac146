"""A module of the project asked in a process of its own, which may crash or hang, for a JSON object."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

# What begins a line of TensorFlow's or libtpu's log, or of the stack that they print in a crash.
OF_LOGS = re.compile(r"[IWEF]\d{4} |2\d{3}-\d\d-|WARNING|\*\*\*|https://symbolize|(PC: )?@ |=== |\S+\.cc:\d+$")


class ChildFailedError(Exception):
    """How the process ended without an answer, as a predicate: `crashed (SIGSEGV): …`, `did not end within 300 s.`."""


def ask_module(
    module: str,
    *arguments: str,
    seconds: float,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `python -m MODULE ARGUMENTS` and read the last line that it prints; ChildFailedError if it has none.

    given: its standard input. environment: what is added to that of this process.
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
    said = [line for line in lines if not OF_LOGS.match(line)]
    return textwrap.shorten(said[-1] if said else "it said nothing.", 300)
