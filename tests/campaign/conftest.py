"""The campaign's processes and servers, what an undisturbed run of each stage gives, and the notes of what was seen."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlm_common.storage.folder import OWNER_FOLDER
from tests.campaign.processes import Process, Processes
from tests.campaign.report import Seen, write_line
from tests.campaign.stages import STAGES, Stage, write_input
from tests.fixtures.made_once import made_once
from tests.fixtures.tiny_corpus import contents
from tests.servers.fixtures import CloudStorageHandle, HubHandle
from tests.servers.process import ServerProcess
from tfrecord_prep.manifest import MANIFEST_NAME
from tokenizer_training.train_unigram import RECORD_FILE

# Tests that take an hour.
LONG_FORMS = ("test_each_ugly_file", "test_damaged_folders_are")
# {test: its cases outside a whole campaign}
FEW_CASES = {
    "test_commands_are_stopped_and_given_again": slice(None, None, 8),
    "test_odd_environments_and_streams_change_nothing": slice(None, None, 8),
    "test_killed_on_cloud_storage_it_ends_with_the_same_bytes": slice(-1, None),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless a report of the whole campaign is made, let each fault meet one stage, the next fault the next stage.

    A few commands are interrupted and meet odd environments. `tests/commands` tries a few of the ugly files.
    """
    if config.getoption("campaign_report"):
        return
    folder, num = Path(__file__).parent, len(STAGES)
    faults = [item for item in items if item.path == folder / "test_faults.py"]
    left_out = {item for number, item in enumerate(faults) if number % num != number // num % num}
    for name, kept in FEW_CASES.items():
        of_name = [item for item in items if item.name.partition("[")[0] == name]
        left_out.update(set(of_name) - set(of_name[kept]))
    left_out |= {item for item in items if item.name.startswith(LONG_FORMS)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@dataclasses.dataclass
class Campaign:
    """What the tests of the campaign share."""

    processes: Processes
    stages: dict[str, Stage]
    folder: Path
    cloud: CloudStorageHandle
    hub: HubHandle
    report: str | None
    _whole: dict[str, tuple[dict[str, bytes], float]] = dataclasses.field(default_factory=dict)

    def stage(self, name: str) -> Stage:
        """Look up a stage, of which an undisturbed run has then been made."""
        self._undisturbed(name)
        return self.stages[name]

    def expected(self, name: str) -> dict[str, bytes]:
        """Read what an undisturbed run of the stage gives."""
        return self._undisturbed(name)[0]

    def seconds(self, name: str) -> float:
        """Measure how long an undisturbed run takes."""
        return self._undisturbed(name)[1]

    def start(self, stage: Stage, flags: Sequence[str], **options: Any) -> Process:
        """Start the command of a stage, with options of `Processes.start`."""
        return self.processes.start(stage.module, flags, **options)

    def finish(self, stage: Stage, output: Path | str, **options: Any) -> Process:
        """Run a stage to its end, and compare what is there, local or on Cloud Storage, with an undisturbed run."""
        process = self.start(stage, stage.flags(output), **options)
        assert process.wait() == 0, process.output
        self.check(stage, output)
        return process

    def check(self, stage: Stage, output: Path | str) -> None:
        """Compare an output with that of an undisturbed run; on Cloud Storage, but for the names of the corpus."""
        files, expected = self.files(output), self.expected(stage.name)
        if not isinstance(output, Path):
            files, expected = without_sources(files), without_sources(expected)
        assert stage.comparable(files) == expected

    def files(self, output: Path | str) -> dict[str, bytes]:
        """Read {path in the output: content}, local or on Cloud Storage, but for the owner's record."""
        if isinstance(output, Path):
            files = contents(output) if output.exists() else {}
        else:
            prefix = output.removeprefix(self.cloud.bucket_url).strip("/") + "/"
            objects = self.cloud.objects().items()
            files = {name.removeprefix(prefix): data for name, data in objects if name.startswith(prefix)}
        return {path: content for path, content in files.items() if not path.startswith(OWNER_FOLDER)}

    def note(self, fault: str, stage_name: str, num_tries: int, ended: str) -> None:
        """Write down what was seen."""
        write_line(self.report, Seen(fault, stage_name, num_tries, ended))

    def _undisturbed(self, name: str) -> tuple[dict[str, bytes], float]:
        if name not in self._whole:
            stage, output = self.stages[name], self.folder / name
            started_seconds = time.monotonic()
            process = self.start(stage, stage.flags(output))
            assert process.wait() == 0, process.output
            self._whole[name] = stage.result(output), time.monotonic() - started_seconds
        return self._whole[name]


def without_sources(files: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out of the records what names the corpus."""
    kept = dict(files)
    for path, content in files.items():
        if Path(path).name in (MANIFEST_NAME, RECORD_FILE):
            kept[path] = json.dumps(json.loads(content) | {"corpus": None}).encode()
    return kept


@pytest.fixture(scope="session")
def _campaign(
    tmp_path_factory: pytest.TempPathFactory,
    cloud_storage_process: tuple[ServerProcess, Path],
    hub_process: ServerProcess,
    pytestconfig: pytest.Config,
) -> Iterator[Campaign]:
    source = made_once(tmp_path_factory, "campaign-input", write_input)
    folder = tmp_path_factory.mktemp("campaign")
    cloud, hub = CloudStorageHandle(*cloud_storage_process), HubHandle(hub_process, folder / "hf-home")
    stages: dict[str, Stage] = {stage.name: stage(source) for stage in STAGES}
    with Processes(folder, cloud.environment | hub.environment) as processes:
        yield Campaign(processes, stages, folder, cloud, hub, pytestconfig.getoption("campaign_report"))


@pytest.fixture
def campaign(_campaign: Campaign, cloud_storage: CloudStorageHandle, hub_server: HubHandle) -> Campaign:
    """The campaign, with servers that hold nothing yet."""
    del cloud_storage, hub_server
    return _campaign


@pytest.fixture(scope="session")
def num_kills(pytestconfig: pytest.Config) -> int:
    """How often each stage is killed."""
    return pytestconfig.getoption("num_kills")
