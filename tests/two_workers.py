"""The training command in two processes on loopback that train one model together."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

RUN_MLM = str(Path(__file__).parent.parent / "train" / "run_mlm.py")


def free_addresses(num_addresses: int) -> list[str]:
    """Return addresses on loopback whose ports nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_addresses)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def start_workers(*flags_of_each: list[str]) -> list[subprocess.Popen]:
    """Start a worker with each list of flags, the first as chief; their output is captured."""
    cluster = {"worker": free_addresses(len(flags_of_each))}
    workers = []
    for index, flags in enumerate(flags_of_each):
        tf_config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        workers.append(
            subprocess.Popen(
                [sys.executable, RUN_MLM, *flags],
                env=os.environ | {"TF_CONFIG": tf_config},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return workers


def finish(workers: list[subprocess.Popen], timeout_seconds: float = 300) -> list[tuple[int, str, str]]:
    """Return (exit status, stdout, stderr) of each worker; none is left running."""
    try:
        outputs = [worker.communicate(timeout=timeout_seconds) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *output) for worker, output in zip(workers, outputs, strict=True)]
