"""Preparations in one folder: killed on a faulty Cloud Storage and run again, stopped, or a second one."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_common.errors import EXIT_BAD_INPUT, EXIT_PERMANENT, EXIT_STOPPED
from mlm_common.folder_lock import locked_folder
from tests.fixtures.folder_owners import look_often, shorten_times, start_with_short_times
from tests.fixtures.run_command import Outcome
from tests.fixtures.tiny_corpus import WORDS, contents, flags, write_source
from tests.servers.fixtures import CloudStorageHandle
from tfrecord_prep.prepare_tfrecord_shards import main, stoppable

SCRIPT = Path(__file__).parents[2] / "tfrecord_prep" / "prepare_tfrecord_shards.py"
OWNER = "tfrecord_prep.prepare_tfrecord_shards"
SIZES = ["--partition-bytes", "1024", "--shard-size", "20", "--num-workers", "2", "--validation-percent", "20"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_source(tmp_path_factory.mktemp("source"))
    generator = random.Random(0)
    lines = (" ".join(generator.choices(WORDS, k=generator.randrange(40))) + "\n" for _ in range(700))
    (folder / "docs.txt").write_text("".join(lines), encoding="utf-8")  # 70 kB
    return folder


def arguments_for(source: Path, output: Path | str) -> list[str]:
    return flags(source, output, "--data-files", str(source / "docs.txt"), *SIZES)


def start(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(
        command, env=os.environ | (environment or {}), start_new_session=True, stdout=subprocess.PIPE, encoding="utf-8",
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def num_files(folder: Path) -> int:
    return sum(1 for _ in folder.glob("[!.]*/*"))  # .owner/ comes and goes


def kill(process: subprocess.Popen, with_workers: bool) -> bool:
    """Kill the command; return whether it was still at work."""
    if process.poll() is None:
        (os.killpg if with_workers else os.kill)(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode != 0


@pytest.mark.slow
def test_killed_and_resumed_on_faulty_cloud_storage(
    source: Path, tmp_path: Path, cloud_storage: CloudStorageHandle
) -> None:
    sizes = ["--chunking", "segment_pairs", "--partition-bytes", "1024", "--num-workers", "2"]
    assert main(flags(source, tmp_path, *sizes)) == 0
    expected = {f"run/{name}": data for name, data in contents(tmp_path).items()}
    environment = {"STORAGE_EMULATOR_HOST": cloud_storage.url, "NO_PROXY": "127.0.0.1"}
    arguments = flags(source, f"{cloud_storage.bucket_url}/run", *sizes)
    modes = {"lost_answer": 0, "reset": 0, "status": 503}
    for number, (mode, status) in enumerate(modes.items()):
        process = start(arguments, environment)
        cloud_storage.fault("^/upload/", mode=mode, status=status)
        cloud_storage.fault("run/train", mode=mode, status=status)  # another request for an object
        wait_for(lambda: process.poll() is not None or len(cloud_storage.objects()) >= 6 * number + 4)  # noqa: B023
        kill(process, with_workers=True)
        assert "run/train/manifest.json" not in cloud_storage.objects()
    cloud_storage.fault("^/upload/", status=429)
    finish(start(arguments, environment))
    assert cloud_storage.objects() == expected
    taken = [(entry["fault"], entry["status"]) for entry in cloud_storage.requests() if entry["fault"] != "none"]
    assert {mode for mode, _ in taken} == set(modes)
    assert {503, 429} <= {status for _, status in taken}


@pytest.mark.slow
def test_a_stopped_preparation_ends_if_another_took_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with start_with_short_times(OWNER, arguments_for(source, out)) as stopped:
        wait_for(lambda: stopped.poll() is not None or num_files(out) >= 10)
        os.killpg(stopped.pid, signal.SIGSTOP)
        shorten_times(OWNER, monkeypatch)
        # With other rows, so that what the stopped workers might still write is seen.
        assert main([*arguments_for(source, out), "--max-length", "32", "--overwrite", "--num-workers", "1"]) == 0
        expected = contents(out)
        os.killpg(stopped.pid, signal.SIGCONT)
        _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == EXIT_PERMANENT
    assert f"error: The folder must belong to this run; {out} has no .owner/ of it any more." in errors
    time.sleep(0.5)
    assert contents(out) == expected


def test_a_second_preparation_is_refused_and_touches_nothing(
    source: Path, tmp_path: Path, run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    with locked_folder(str(tmp_path / "out"), heartbeat_seconds=0.05):
        refused = run(main, *arguments_for(source, tmp_path / "out"), "--overwrite")
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".owner"]
    assert refused.status == EXIT_BAD_INPUT
    assert f"{tmp_path / 'out'} belongs to the run of process {os.getpid()} on " in refused.err


def wait_for(condition: Callable[[], bool]) -> None:
    end_seconds = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_seconds
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_request_ends_in_one_line(
    number: signal.Signals, handler: signal.Handlers, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, handler)
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if (number, handler) == (signal.SIGINT, signal.SIG_IGN):
            with stoppable():
                signal.raise_signal(number)
            return
        with pytest.raises(SystemExit) as caught, stoppable():
            signal.raise_signal(number)
        assert caught.value.code == EXIT_STOPPED
        assert capsys.readouterr().err == "Stopped. Run the same command again to continue.\n"
        assert signal.getsignal(signal.SIGTERM) == sigterm
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_handle_no_signals() -> None:
    entered = []

    def work() -> None:
        with stoppable():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered
