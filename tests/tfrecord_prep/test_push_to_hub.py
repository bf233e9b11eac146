"""Stage 2 pushes its shards to a data set repository: a manifest is there only with all of its split."""

from pathlib import Path

import pytest
from huggingface_hub import DatasetCard

from mlm_common.hub import push as hub
from tests.fixtures.tiny_corpus import contents, flags, write_source
from tests.servers.fixtures import CloudStorageHandle, HubHandle
from tfrecord_prep import push_to_hub as publishing
from tfrecord_prep.prepare_tfrecord_shards import main

REPO = "alice/rows"
HUB = ("--push-to-hub", REPO, "--validation-percent", "20")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def published(server: HubHandle) -> dict[str, bytes]:
    files = server.files(REPO, kind="datasets")
    return {path: content for path, content in files.items() if path not in (".gitattributes", "README.md")}


def titles(server: HubHandle) -> list[str]:
    repository = server.repository(REPO, kind="datasets")
    assert repository
    return repository["commits"][1:]


def test_what_is_pushed_is_what_was_written(
    source: Path, tmp_path: Path, hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FILES_PER_COMMIT", 10)
    assert main(flags(source, tmp_path / "out", *HUB, "--hub-private")) == 0
    assert published(hub_here) == contents(tmp_path / "out")
    assert hub_here.repository(REPO, kind="datasets")["private"]
    num_shards = {name: len(list((tmp_path / "out" / name).glob("*.tfrecord"))) for name in ("train", "validation")}
    assert num_shards["train"] > 20
    assert titles(hub_here)[:2] == [f"train: shards {a} to {a + 9} of {num_shards['train']}" for a in (1, 11)]
    assert titles(hub_here)[-2:] == ["Complete validation", "Add the card"]
    card = DatasetCard(hub_here.files(REPO, kind="datasets")["README.md"].decode())
    assert card.data.to_dict()["task_categories"] == ["fill-mask"]
    assert f"| {num_shards['train']} |" in card.text
    assert str(tmp_path) not in card.content


def test_again_and_with_other_settings(source: Path, tmp_path: Path, hub_here: HubHandle) -> None:
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    before = titles(hub_here)
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    assert titles(hub_here) == before
    assert main(flags(source, tmp_path / "other", *HUB, "--shard-size", "7")) == 0
    assert published(hub_here) == contents(tmp_path / "other")
    assert titles(hub_here)[len(before)] == "Begin train"


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"mode": "reset"}, {"mode": "lost_answer"}], ids=["503", "reset", "lost"]
)
def test_faults_at_every_commit(fault: dict[str, object], source: Path, tmp_path: Path, hub_here: HubHandle) -> None:
    assert main(flags(source, tmp_path / "before", *HUB, "--shard-size", "7")) == 0
    for path in ("create", "preupload", "commit/main"):
        hub_here.fault(path, method="POST", **fault)
    hub_here.fault("/tree/", method="GET", status=503)
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    assert published(hub_here) == contents(tmp_path / "out")


def test_a_push_that_fails_leaves_no_manifest_and_is_taken_up_again(
    source: Path, tmp_path: Path, hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", ())
    monkeypatch.setattr(publishing, "FILES_PER_COMMIT", 10)
    assert main(flags(source, tmp_path / "before", *HUB, "--shard-size", "7")) == 0
    hub_here.fault("commit/main", method="POST", mode="none", times=2)
    hub_here.fault("commit/main", method="POST", status=403)
    assert main(flags(source, tmp_path / "out", *HUB)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"hf upload {REPO} {tmp_path}/out . --repo-type dataset")
    assert "train/manifest.json" not in published(hub_here)
    num_commits = len(titles(hub_here))
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    assert published(hub_here) == contents(tmp_path / "out")
    # The first ten shards are there already.
    assert titles(hub_here)[num_commits].startswith("train: shards 11 to 20 of")


def test_from_cloud_storage(source: Path, cloud: CloudStorageHandle, hub_here: HubHandle) -> None:
    assert main(flags(source, f"{cloud.bucket_url}/rows", *HUB)) == 0
    stored = {name.removeprefix("rows/"): content for name, content in cloud.objects().items()}
    assert published(hub_here) == stored


def test_what_cannot_be_pushed_is_told_before_the_work(
    source: Path, tmp_path: Path, hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", hub_here.read_token)
    assert main(flags(source, tmp_path / "out", *HUB)) == 2
    assert "role is 'read'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
