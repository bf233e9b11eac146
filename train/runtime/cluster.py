"""The workers of a run over several machines, as TF_CONFIG names them; read and checked without TensorFlow.

Format: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from mlm_common.errors import InputError

VARIABLE = "TF_CONFIG"
EXAMPLE = '{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}'
# The chief is a task of its own, or the first worker.
CHIEF, WORKER = "chief", "worker"


@dataclass(frozen=True)
class Cluster:
    """The workers of a run, chief first, and which of them this process is."""

    addresses: tuple[str, ...] = ("localhost",)
    index: int = 0

    @property
    def num_workers(self) -> int:
        """Processes that train together."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this is the one process that writes the run's files, pushes and prints."""
        return self.index == 0


def read_cluster() -> Cluster:
    """Read the cluster of TF_CONFIG: one worker where the variable is not set.

    Raises:
        InputError: the variable is not the JSON that TensorFlow expects, or its task is not in its cluster.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return Cluster()
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise _malformed(f"received text that is not JSON ({error})") from error
    jobs = settings.get("cluster") if isinstance(settings, dict) else None
    if not jobs:
        return Cluster()  # what some platforms set on a machine that trains by itself
    addresses = _addresses(jobs)
    if len(addresses) == 1:
        return Cluster()
    return Cluster(addresses, _index(settings.get("task"), jobs))


def _addresses(jobs: Any) -> tuple[str, ...]:
    """Check and list the address of each worker, chief first."""
    if not isinstance(jobs, dict) or not set(jobs) <= {CHIEF, WORKER}:
        raise _malformed(f"its cluster may have the jobs chief and worker only; received {_shown(jobs)}")
    for job, addresses in jobs.items():
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise _malformed(f"{job} must be a list of host:port; received {_shown(addresses)}")
    if len(jobs.get(CHIEF, [])) > 1:
        raise _malformed(f"there can be one chief; received {_shown(jobs[CHIEF])}")
    addresses = (*jobs.get(CHIEF, ()), *jobs.get(WORKER, ()))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise _malformed(f"an address must be host:port; received {address!r}")
    if len(set(addresses)) < len(addresses):
        raise _malformed(f"the addresses must differ; received {_shown(addresses)}")
    return addresses


def _index(task: Any, jobs: dict[str, list[str]]) -> int:
    """Find the place of this process among the workers, the chief first."""
    job, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if job not in jobs or not str(index).isdecimal() or int(str(index)) >= len(jobs[job]):
        raise _malformed(
            f"its task must be one of its cluster, which has {', '.join(f'{len(jobs[job])} {job}' for job in jobs)}; "
            f"received {_shown(task)}. The index counts from 0"
        )
    return int(str(index)) + (len(jobs.get(CHIEF, ())) if job == WORKER else 0)


def _malformed(what: str) -> InputError:
    return InputError(f"{VARIABLE} must be like {EXAMPLE}; {what}. Correct it, or unset it to train on one machine.")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"
