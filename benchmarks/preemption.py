"""Measure how long a preempted run takes to save, from the notice to the last byte of its checkpoint in Cloud Storage.

    python benchmarks/preemption.py

A run trains BERT-base (1.3 GB with its optimizer) on this machine, and writes to the tests' stand-in for Cloud Storage,
a separate process on loopback that reads the body of each request at a given rate. Then the metadata server of the
stand-in reports that the machine is preempted. A Spot VM has 30 seconds from this notice
(https://cloud.google.com/compute/docs/instances/preemptible). `copied` is the time at which weights and moments have
been copied from the device, and `whole` the time at which the checkpoint's record, which makes the checkpoint valid,
has been written.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.random_inputs import write_random_shards, write_tokenizer
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from benchmarks.resume import training
from mlm_common.errors import EXIT_STOPPED
from tests.servers.fixtures import BUCKET, cloud_environment
from tests.servers.process import ServerProcess
from train.runtime import supervisor

VOCABULARY, LENGTH = 30_522, 32
NOTICE_STEP = 4
HEADER = "MB/s a stream|runs|step s|copied s|(from-to)|whole s|(from-to)|ended s"


def object_sizes(server: ServerProcess) -> dict[str, int]:
    """Return {name: size in bytes} of the objects in the run's checkpoints."""
    url = f"{server.url}/storage/v1/b/{BUCKET}/o?prefix=run/checkpoints/"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url) as answer:
        return {metadata["name"]: int(metadata["size"]) for metadata in json.load(answer).get("items", [])}


def preempt(server: ServerProcess, flags: list[str], bytes_per_second: float) -> tuple[dict[str, float], int]:
    """Train until the run is preempted; return {event: seconds after the notice} and the bytes of a checkpoint.

    The entry "step" is the duration of a step.
    """
    server.control("reset")
    server.control("make_bucket", bucket=BUCKET)
    server.control("rate", bytes_per_second=bytes_per_second)
    seconds: dict[str, float] = {}
    step_seconds = noticed_seconds = time.perf_counter()
    with training(flags) as (process, reports):
        for report in reports:
            phase, step = report.split()
            now_seconds = time.perf_counter()
            if phase == supervisor.TRAIN and int(step) < NOTICE_STEP:
                step_seconds = now_seconds
            elif phase == supervisor.TRAIN and int(step) == NOTICE_STEP:
                seconds["step"] = now_seconds - step_seconds
                server.control("machine", preempted="TRUE")
                noticed_seconds = time.perf_counter()
            elif phase == "save":
                seconds["copied"] = now_seconds - noticed_seconds
                break
        sizes: dict[str, int] = {}
        while not any(name.endswith(".json") for name in sizes):
            assert process.poll() is None, process.returncode
            time.sleep(0.05)
            sizes = object_sizes(server)
        seconds["whole"] = time.perf_counter() - noticed_seconds
        assert process.wait() == EXIT_STOPPED, process.returncode
        seconds["ended"] = time.perf_counter() - noticed_seconds
    return seconds, sum(sizes.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0, 6.25], help="MB/s of each stream.")
    parser.add_argument("--repeats", type=int, default=3, help="Runs at each rate.")
    parser.add_argument("--num-layers", type=int, default=12, help="Layers of the BERT.")
    parser.add_argument("--batch-rows", type=int, default=8)
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        write_random_shards(folder / "shards", 10_000, LENGTH, VOCABULARY)
        write_tokenizer(folder, VOCABULARY)
        with ServerProcess("tests.servers.cloud_storage", name) as server:
            os.environ |= cloud_environment(server.port, folder) | {"STORAGE_EMULATOR_HOST": server.url}
            flags = [
                *("--preset", "bert-base", "--config-overrides", f"num_hidden_layers={arguments.num_layers}"),
                *("--train-dataset", str(folder / "shards"), "--tokenizer", str(folder / "tokenizer")),
                *("--output-dir", f"gs://{BUCKET}/run", "--per-replica-batch-size", str(arguments.batch_rows)),
                *("--max-steps", "1000", "--save-steps", "1000", "--log-steps", "1000"),
            ]
            rows = []
            for rate in arguments.rates:
                runs = []
                for number in range(arguments.repeats):
                    seconds, num_bytes = preempt(server, flags, rate * 1e6)
                    runs.append(seconds)
                    print(f"{rate:g} MB/s, run {number + 1}: {seconds}", file=sys.stderr)
                times = {name: [run[name] for run in runs] for name in runs[0]}
                medians = {name: f"{statistics.median(values):.1f}" for name, values in times.items()}
                ranges = [*median_and_range(times["copied"], ".1f"), *median_and_range(times["whole"], ".1f")]
                rows.append([f"{rate:g}", str(len(runs)), medians["step"], *ranges, medians["ended"]])
    print(f"a checkpoint has {num_bytes / 1e6:,.0f} MB")
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
