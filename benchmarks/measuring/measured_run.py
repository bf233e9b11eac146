"""Run a command and measure its time, and the memory that it and its children use together (Linux)."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLING_SECONDS = 0.02
# Measuring memory is slow, because the kernel walks the pages of the process. The pause before a sample is this many
# times the duration of the last sample.
PAUSE_PER_SAMPLE = 10


@dataclass(frozen=True)
class MemorySample:
    """The memory of each process at one time. The command's process comes first.

    Pages that processes share are counted once (PSS).
    """

    seconds: float
    process_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.process_bytes)


@dataclass(frozen=True)
class MeasuredRun:
    """The results of a command: exit status, duration, memory over time, and its output as (seconds, line)."""

    status: int
    seconds: float
    samples: Sequence[MemorySample]
    lines: Sequence[tuple[float, str]]

    @property
    def peak(self) -> MemorySample:
        """The sample in which the processes together used the most memory."""
        return max(self.samples, key=lambda sample: sample.num_bytes, default=MemorySample(0.0, ()))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def seconds_of_line(self, pattern: str) -> float:
        """Return the time of the first line that matches the pattern, or of the command's end if no line matches."""
        return next((seconds for seconds, line in self.lines if re.search(pattern, line)), self.seconds)


def run_measured(arguments: Sequence[str]) -> MeasuredRun:
    """Run a command to its end, whatever its exit status, and return its measurements and output."""
    start_seconds = time.perf_counter()
    samples: list[MemorySample] = []
    lines: list[tuple[float, str]] = []
    done = threading.Event()
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    )
    assert process.stdout is not None

    def watch() -> None:
        pause_seconds = SAMPLING_SECONDS
        while not done.wait(pause_seconds):
            seconds = time.perf_counter() - start_seconds
            samples.append(MemorySample(seconds, tuple(map(memory_of, _family(process.pid)))))
            cost_seconds = time.perf_counter() - start_seconds - seconds
            pause_seconds = max(SAMPLING_SECONDS, PAUSE_PER_SAMPLE * cost_seconds)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for line in process.stdout:
            lines.append((time.perf_counter() - start_seconds, line.rstrip("\n")))
        status = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        done.set()
        watcher.join()
        process.stdout.close()
    return MeasuredRun(status, time.perf_counter() - start_seconds, samples, lines)


def run_and_tell(label: str, command: Sequence[str]) -> MeasuredRun:
    """Run and measure a command, and report on standard error. After a failure, also print the end of the output."""
    run = run_measured(command)
    print(f"{label}: {run.seconds:.1f} s, {run.peak.num_bytes / 1e6:,.0f} MB", file=sys.stderr)
    if run.status:
        print(f"exit status {run.status}", *run.output.splitlines()[-5:], sep="\n  ", file=sys.stderr)
    return run


def _family(pid: int) -> list[int]:
    """List the process and all its descendants, parents before children."""
    try:
        children = [
            int(child)
            for children in Path(f"/proc/{pid}/task").glob("*/children")
            for child in children.read_text(encoding="utf-8").split()
        ]
    except OSError:  # the process has ended
        return [pid]
    return [pid, *(descendant for child in children for descendant in _family(child))]


def memory_of(pid: int) -> int:
    try:
        match = re.search(
            r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
