"""Shards that stage 2 pushed are read from the Hub: as they were written, of one commit, and complete."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from mlm_common.errors import InputError
from mlm_common.hub.retries import HubAwayError
from mlm_common.mixture import read_mixture
from tests.fixtures.tiny_corpus import contents, flags
from tests.servers.fixtures import HubHandle
from tfrecord_prep import hub_shards
from tfrecord_prep.hub_shards import HubShards
from tfrecord_prep.manifest import MANIFEST_NAME, open_shards
from tfrecord_prep.prepare_tfrecord_shards import main

REPO = "alice/rows"
ADDRESS = f"hub:{REPO}"


@pytest.fixture
def pushed(source: Path, tmp_path: Path, hub_here: HubHandle) -> Path:  # noqa: ARG001
    """The folder of two splits that are on the Hub."""
    output = tmp_path / "out"
    assert main(flags(source, output, "--push-to-hub", REPO, "--validation-percent", "20", "--publish-details")) == 0
    return output


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the Hub's port refuse from now on."""

    def start() -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr(hub_shards.hub, "CHECK_RETRY_DELAYS_SECONDS", ())
        monkeypatch.setattr(hub_shards.hub, "RETRY_DELAYS_SECONDS", ())

    return start


def test_a_split_is_fetched_as_it_was_written(pushed, hub_here, refuse):
    hub = HubShards()
    train = Path(hub.local_folder(ADDRESS, "train"))
    assert contents(train) == contents(pushed / "train")
    assert not (train.parent / "validation").exists()
    assert contents(Path(hub.local_folder(ADDRESS, "validation"))) == contents(pushed / "validation")
    commit = hub_here.commit(REPO, kind="datasets")
    assert hub.commits == {f"{REPO}@main": commit}
    refuse()
    assert hub.local_folder(ADDRESS, "train") == str(train)
    assert HubShards().local_folder(f"{ADDRESS}/train@{commit}", "validation") == str(train)
    with pytest.raises(HubAwayError):
        HubShards().local_folder(ADDRESS, "train")


def test_a_known_commit_is_read_though_the_repository_has_changed(source, pushed, tmp_path, hub_here):
    before = {f"{REPO}@main": hub_here.commit(REPO, kind="datasets")}
    assert main(flags(source, tmp_path / "other", "--push-to-hub", REPO, "--shard-size", "7", "--publish-details")) == 0
    assert contents(Path(HubShards(before).local_folder(ADDRESS, "train"))) == contents(pushed / "train")
    assert contents(Path(HubShards().local_folder(ADDRESS, "train"))) == contents(tmp_path / "other" / "train")


def test_a_mixture_is_fetched_with_the_split_of_all_sources(mixture_shards, hub_here, tmp_path):
    for path, content in contents(mixture_shards).items():
        if path == "mixture.json" or path.split("/")[1:2] in (["train"], ["validation"]):
            hub_here.put(REPO, path, content, kind="datasets")
    root = Path(HubShards().local_folder(ADDRESS, "validation"))
    assert read_mixture(str(root)) == read_mixture(str(mixture_shards))
    for name in read_mixture(str(root)) or {}:
        assert contents(root / name / "validation") == contents(mixture_shards / name / "validation")
        assert not (root / name / "train").exists()
    assert HubShards().local_folder(str(tmp_path), "train") == str(tmp_path)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hub:rows", "must be hub:NAMESPACE/NAME"),
        (f"{ADDRESS}@", "must be hub:NAMESPACE/NAME"),
        ("hub:alice/nothing", "the Hub shows you no data set alice/nothing"),
        (f"{ADDRESS}@v9", "alice/rows has no branch, tag or commit v9"),
        (f"{ADDRESS}/test", "has no test/manifest.json in commit"),
    ],
)
@pytest.mark.usefixtures("pushed")
def test_what_the_hub_does_not_have_is_one_line(address, message):
    with pytest.raises(InputError, match=message) as raised:
        HubShards().local_folder(address, "train")
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("pushed")
def test_transient_errors_are_retried(hub_here):
    hub_here.fault(f"/api/datasets/{REPO}/revision/main", method="GET", status=503)
    hub_here.fault("/tree/", method="GET", status=503)
    hub_here.fault("dataset-00000", method="HEAD", status=503)
    hub_here.fault("manifest.json", method="GET", mode="reset")
    assert open_shards(HubShards().local_folder(ADDRESS, "train")).num_rows > 0


def test_a_shard_with_another_checksum_is_refused_until_it_is_right(pushed, hub_here):
    name = f"train/{json.loads((pushed / 'train' / MANIFEST_NAME).read_text('utf-8'))['shards'][3]['name']}"
    content = (pushed / name).read_bytes()
    hub_here.put(REPO, name, content[:-1] + b"x", kind="datasets")
    for _ in range(2):  # what is in the cache is not taken as complete
        with pytest.raises(InputError, match=f"{name} does not have the checksum"):
            HubShards().local_folder(ADDRESS, "train")
    hub_here.put(REPO, name, content, kind="datasets")
    assert contents(Path(HubShards().local_folder(ADDRESS, "train"))) == contents(pushed / "train")


@pytest.mark.usefixtures("pushed")
def test_too_small_a_disk_is_found_before_the_shards_are_fetched(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(InputError, match="Set HF_HOME to a folder on a larger disk"):
        HubShards().local_folder(ADDRESS, "train")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.tfrecord"))
