"""A stand-in server in a process of its own, as a test sees it."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

PROJECT_FOLDER = Path(__file__).resolve().parents[2]


class ServerProcess:
    """Starts `python -m MODULE ARGUMENTS…`, which prints its port and ends when its standard input does."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, cwd=PROJECT_FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=10)

    def control(self, action: str, **argument: Any) -> Any:
        """Ask for the answer of `POST /_control/ACTION`."""
        request = urllib.request.Request(f"{self.url}/_control/{action}", json.dumps(argument).encode(), method="POST")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)


class ServerHandle:
    """What the fixtures of both servers offer."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    def reset(self) -> None:
        """Forget all content, faults and logged requests."""
        self._process.control("reset")

    def fault(self, path: str, **options: Any) -> None:
        """Make something go wrong with the next requests whose `path?query` matches: see `loopback.Fault`."""
        self._process.control("fault", path=path, **options)

    def release(self) -> None:
        """Answer the requests that faults of the mode `hold` have held, and hold no more."""
        self._process.control("release")

    def heal(self) -> None:
        """Let no more of the faults happen."""
        self._process.control("heal")

    def requests(self, method: str = "", path: str = "") -> list[dict[str, Any]]:
        """List the logged requests of that method, with that text in their path; all of them by default."""
        log = self._process.control("log")
        return [entry for entry in log if method in ("", entry["method"]) and path in entry["path"]]
