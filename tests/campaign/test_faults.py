"""Each fault in each stage: nothing lost, nothing twice, one clear line."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_common.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_PERMANENT, EXIT_STOPPED
from mlm_common.storage.folder import OWNER_FOLDER
from mlm_common.storage.gcs import NUM_TRIES_DAMAGED
from tests.campaign.conftest import Campaign
from tests.campaign.processes import Process
from tests.campaign.stages import STAGES, change_input, copied

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", [stage.name for stage in STAGES])]

# Instead of two minutes, and of more than eight.
SHORT_WAITS = {
    "google.cloud.storage.retry:DEFAULT_RETRY._timeout": 1.0,
    "mlm_common.hub.push:RETRY_DELAYS_SECONDS": (0.01,) * 3,
    "tokenizer_training.train_unigram:SAVE_RETRY_SECONDS": (0.01,) * 2,
}
# Of a folder's owner, instead of ten seconds and a minute.
SHORT_LIFE = {
    "mlm_common.folder_lock:locked_folder.__wrapped__.__kwdefaults__": {
        "heartbeat_seconds": 0.1,
        "dead_after_seconds": 1.5,
        "ends_process": True,
    }
}


def check_one_line(process: Process, *words: str) -> None:
    """Check that it failed and told why in one line with these words."""
    assert process.wait() not in (None, 0), process.output
    assert len(process.error_lines) == 1, process.output
    (line,) = process.error_lines
    assert all(word in line for word in words), line
    assert "Traceback" not in process.output


def test_sigterm(campaign, name, num_kills, tmp_path):
    """It ends at once, but training ends its step."""
    stage, output, draw = campaign.stage(name), tmp_path / "output", random.Random(name)
    statuses = []
    for _ in range(max(1, num_kills // 5)):
        process = campaign.start(stage, stage.flags(output))
        statuses.append(process.kill_after(draw.uniform(0, campaign.seconds(name)), signal.SIGTERM))
        assert statuses[-1] in (0, EXIT_STOPPED, -signal.SIGTERM), process.output  # the last before it listens
    campaign.finish(stage, output)
    ended = (
        f"signals: {statuses.count(EXIT_STOPPED)} ended a run with status 75, the others arrived while it started "
        "or ended; the output has the expected bytes"
    )
    campaign.note("SIGTERM", name, len(statuses), ended)


def test_a_second_run_is_refused_while_the_first_lives(campaign, name, tmp_path):
    stage, output = campaign.stage(name), tmp_path / "output"
    first = campaign.start(stage, stage.flags(output), constants=SHORT_LIFE)
    wait_for_owner(first, output)
    first.send(signal.SIGSTOP)  # so that it does not end before the second has looked
    second = campaign.start(stage, stage.flags(output), constants={"mlm_common.folder_lock:POLLS_WHILE_WAITING": 6000})
    wait_for(lambda: "waiting up to" in second.output)
    first.send(signal.SIGCONT)
    check_one_line(second, "belongs to the run of process")
    assert second.wait() == 2
    assert first.wait() == 0, first.output
    campaign.check(stage, output)
    campaign.note("a second run", name, 1, "second run: refused with status 2; the first wrote the expected bytes")


def test_stopped_it_loses_its_folder_and_touches_nothing_later(campaign, name, num_kills, tmp_path):
    stage, draw, seconds = campaign.stage(name), random.Random(name), campaign.seconds(name)
    num_tries, num_lost = max(1, num_kills // 10), 0
    while num_lost < num_tries:
        output = tmp_path / str(draw.random())
        stopped = campaign.start(stage, stage.flags(output), constants=SHORT_LIFE)
        wait_for_owner(stopped, output)
        stopped.wait(draw.uniform(0, 0.5) * seconds)
        stopped.send(signal.SIGSTOP)
        campaign.finish(stage, output, constants=SHORT_LIFE)
        files = campaign.files(output)
        stopped.send(signal.SIGCONT)
        if stopped.wait() != 0:  # else it had come to its end before
            check_one_line(stopped, "has lost its output folder")
            assert stopped.wait() == EXIT_PERMANENT
            assert campaign.files(output) == files
            num_lost += 1
    ended = "takeovers: the first run ended with status 3 and a one-line error; the output has the expected bytes"
    campaign.note("SIGSTOP, takeover by a second run, SIGCONT", name, num_lost, ended)


def wait_for_owner(process: Process, output: Path) -> None:
    wait_for(lambda: process.wait(0) is not None or any((output / OWNER_FOLDER).glob("*.json")))


def wait_for(condition: Callable[[], bool]) -> None:
    end_seconds = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_seconds
        time.sleep(0.005)


def test_disk_full(campaign, name, tmp_path):
    """A disk with room for about half of the output."""
    stage, disk, copy = campaign.stage(name), tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    campaign.expected(name)
    num_bytes = sum(-(-path.stat().st_size // 4096) * 4096 for path in (campaign.folder / name).rglob("*"))
    mounted = {"folder": str(disk), "options": f"size={num_bytes // 2}", "copy": str(copy)}
    process = campaign.start(stage, stage.flags(disk / "output"), constants=SHORT_WAITS, disk=mounted)
    check_mounted(process)
    check_one_line(process, "No space left on device")
    campaign.finish(stage, copy / "output")
    campaign.note("disk full", name, 1, "full disk: a one-line error; the next run wrote the expected bytes")


def test_read_only_disk(campaign, name, tmp_path):
    stage, disk = campaign.stage(name), tmp_path / "disk"
    disk.mkdir()
    mounted = {"folder": str(disk), "options": "ro", "copy": str(tmp_path / "copy")}
    process = campaign.start(stage, stage.flags(disk / "output"), disk=mounted)
    check_mounted(process)
    check_one_line(process, "Read-only file system")
    assert process.wait() == 2
    campaign.note("read-only disk", name, 1, "read-only disk: a one-line error and status 2")


def check_mounted(process: Process) -> None:
    process.wait()
    if "unshare" in process.output or "CalledProcessError" in process.output:
        pytest.skip("needs the right to mount")


# Of a run: one request may meet all of them, and both clients (ours, TensorFlow's) try once more.
NUM_FAULTS = NUM_TRIES_DAMAGED - 1
# {fault in the table: faults of the server}
SERVER_FAULTS: dict[str, list[dict[str, Any]]] = {
    "HTTP status 429, 500 or 503": [{"mode": "status", "status": status} for status in (429, 500, 503)],
    "connection reset or answer lost": [{"mode": "reset", "num_bytes": 100}, {"mode": "lost_answer"}],
    "truncated or corrupt transfer": [
        {"mode": "truncate", "num_bytes": 40, "path": "^/download"},
        # Not of a text, which is read in ranges: those have no checksum of their own, and are left to TLS.
        {"mode": "corrupt", "num_bytes": 40, "path": r"^/download.*\.(json|npy|safetensors)\?"},
        {"mode": "corrupt_upload", "num_bytes": -50, "path": "^/upload"},
    ],
    "slow answers": [{"mode": "slow", "delay_seconds": 0.5}],
}


@pytest.mark.parametrize("fault", SERVER_FAULTS)
def test_cloud_storage_that_fails_now_and_then(campaign, name, fault, num_kills):
    """Input and output on Cloud Storage; in each run faults of random kinds at random moments."""
    stage, draw = campaign.stage(name), random.Random(name + fault)
    put_input(campaign, stage.folder)
    url = campaign.cloud.bucket_url
    for number in range(max(1, num_kills // 25)):
        output = f"{url}/output-{number}"
        process = campaign.start(stage, stage.flags(output, f"{url}/input"))
        for _ in range(NUM_FAULTS):
            process.wait(draw.uniform(0, 1.5 * campaign.seconds(name) / NUM_FAULTS))
            campaign.cloud.fault(**{"path": "^/(storage|upload|download)", **draw.choice(SERVER_FAULTS[fault])})
        assert process.wait() == 0, process.output
        campaign.check(stage, output)
        campaign.cloud.heal()
    campaign.note(fault, name, num_faults_met(campaign), "affected requests: the outputs have the expected bytes")


def num_faults_met(campaign: Campaign) -> int:
    return sum(entry["fault"] != "none" for entry in campaign.cloud.requests())


def put_input(campaign: Campaign, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            campaign.cloud.put(f"input/{path.relative_to(folder)}", path.read_bytes())


def test_cloud_storage_that_is_away(campaign, name, num_kills):
    """From a random moment on no request is answered."""
    stage, draw = campaign.stage(name), random.Random(name)
    output = f"{campaign.cloud.bucket_url}/output"
    one_process = ["--num-workers", "1"] * (name != "training")  # whose waits are the short ones
    num_tries = max(1, num_kills // 33)
    for _ in range(num_tries):
        process = campaign.start(stage, [*stage.flags(output), *one_process], constants=SHORT_WAITS)
        time.sleep(draw.uniform(0.1, 0.6) * campaign.seconds(name))
        campaign.cloud.fault("^/(storage|upload|download)", mode="reset", times=10**6)
        if process.wait() != 0:
            check_one_line(process, "Cloud Storage did not answer")
        campaign.cloud.heal()
    campaign.finish(stage, output)
    ended = "outages: one-line errors; the run after the last outage wrote the expected bytes"
    campaign.note("Cloud Storage unavailable", name, num_tries, ended)


def test_hub_that_is_away_when_the_push_begins(campaign, name, tmp_path):
    """Once the Hub is back the same command pushes, and rebuilds no file."""
    stage, output = campaign.stage(name), tmp_path / "output"
    flags = [*stage.flags(output), *stage.push_flags]
    # Not of `preupload` requests, which huggingface_hub itself repeats for 23 seconds, four times.
    campaign.hub.fault("/commit/", status=503, times=10**6)
    process = campaign.start(stage, flags, constants=SHORT_WAITS)
    check_one_line(process, "push", str(output))
    assert process.wait() == EXIT_FAILED
    campaign.check(stage, output)
    campaign.hub.heal()
    process = campaign.start(stage, flags)
    assert process.wait() == 0, process.output
    assert stage.pushed in {Path(path).name for path in campaign.hub.files(stage.push_flags[1], stage.pushed_kind)}
    campaign.check(stage, output)
    ended = "outage: a one-line error; the next run pushed the output, which has the expected bytes"
    campaign.note("Hub unavailable", name, 1, ended)


def test_clock_that_is_set_back_by_an_hour(campaign, name, tmp_path):
    campaign.finish(campaign.stage(name), tmp_path / "output", seconds_back=3600.0)
    campaign.note("clock set back by an hour", name, 1, "run: the output has the expected bytes")


def test_fixed_input(campaign, name, tmp_path):
    """A byte of the last text, or of a shard, that cannot be read, and is put right."""
    stage, output = campaign.stage(name), tmp_path / "output"
    source = copied(stage.folder, tmp_path / "source")
    damaged = {
        "tokenizer": source / "text.txt",
        "shards": source / "docs-3.txt",
        "training": next((source / "shards" / "train").glob("*.tfrecord")),
    }[name]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-20] + b"\xff" + content[-19:])
    said = "--verify" if name == "training" else damaged.name
    check_one_line(campaign.start(stage, stage.flags(output, source)), said)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.tfrecord")}
    damaged.write_bytes(content)
    process = campaign.start(stage, stage.flags(output, source))
    assert process.wait() == 0, process.output
    fresh = tmp_path / "fresh"
    assert campaign.start(stage, stage.flags(fresh, source)).wait() == 0
    assert stage.result(output) == stage.result(fresh)
    kept = sum(path.exists() and path.stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert kept >= len(before) // 2
    ended = "faulty input: a one-line error; once the input was fixed, the next run wrote the expected bytes"
    campaign.note("faulty input, fixed later", name, 1, ended + f" and kept {kept} shards" * bool(kept))


def test_changed_input(campaign, name, tmp_path):
    """After the end, and after a kill in the middle: what is there is never mixed with what comes of other text."""
    stage, num_refused = campaign.stage(name), 0
    for state in ("killed", "complete"):
        source, output = copied(stage.folder, tmp_path / f"{state}-source"), tmp_path / state
        process = campaign.start(stage, stage.flags(output, source))
        if state == "killed":
            process.kill_after(0.7 * campaign.seconds(name))
        process.wait()
        before = campaign.files(output)
        change_input(source)
        process = campaign.start(stage, stage.flags(output, source))
        if process.wait() == 0:
            assert state == "killed"
            assert campaign.start(stage, stage.flags(tmp_path / "fresh", source)).wait() == 0
            assert campaign.files(output).keys() == campaign.files(tmp_path / "fresh").keys()
            assert stage.result(output) == stage.result(tmp_path / "fresh")
        else:
            check_one_line(process, "--over")
            assert process.wait() == EXIT_BAD_INPUT
            assert campaign.files(output) == before
            num_refused += 1
    assert num_refused
    again = "; 1 rebuilt with the expected bytes" * (2 - num_refused)
    campaign.note("changed input", name, 2, f"changed inputs: {num_refused} refused, without changing a file{again}")
