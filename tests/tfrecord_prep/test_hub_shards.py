"""Shards on the Hub: pushed with the manifest last, read as they were written, of one commit, and complete."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import DatasetCard, constants

from mlm_common.errors import InputError
from mlm_common.hub import push as hub
from mlm_common.hub.redaction import REDACTED
from mlm_common.hub.retries import HubAwayError
from mlm_common.mixture import read_mixture
from tests.fixtures.tiny_corpus import contents, flags
from tests.servers.fixtures import HubHandle
from tfrecord_prep import hub_shards
from tfrecord_prep.hub_shards import HubShards, dataset_card
from tfrecord_prep.manifest import MANIFEST_NAME, open_shards, published_manifest
from tfrecord_prep.prepare_tfrecord_shards import main

REPO = "alice/rows"
HUB = ("--push-to-hub", REPO, "--validation-percent", "20")


def published(server: HubHandle) -> dict[str, bytes]:
    files = server.files(REPO, kind="datasets")
    return {path: content for path, content in files.items() if path not in (".gitattributes", "README.md")}


def written(folder: Path) -> dict[str, bytes]:
    """Read what a push sends of the output folder, its manifests without what is their owner's."""
    files = contents(folder)
    for path in files:
        if path.endswith("manifest.json"):
            manifest = published_manifest(json.loads(files[path]))
            files[path] = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def titles(server: HubHandle) -> list[str]:
    repository = server.repository(REPO, kind="datasets")
    assert repository
    return repository["commits"][1:]


def test_what_is_pushed_is_what_was_written(source, tmp_path, hub_here, monkeypatch):
    monkeypatch.setattr(hub_shards, "FILES_PER_COMMIT", 10)
    assert main(flags(source, tmp_path / "out", *HUB, "--hub-private")) == 0
    assert published(hub_here) == written(tmp_path / "out")
    assert hub_here.repository(REPO, kind="datasets")["private"]
    num_shards = {name: len(list((tmp_path / "out" / name).glob("*.tfrecord"))) for name in ("train", "validation")}
    assert num_shards["train"] > 20
    assert titles(hub_here)[0] == "Add the card"
    assert titles(hub_here)[1:3] == [f"train: shards {a} to {a + 9} of {num_shards['train']}" for a in (1, 11)]
    assert titles(hub_here)[-1] == "Complete validation"
    card = DatasetCard(hub_here.files(REPO, kind="datasets")["README.md"].decode())
    assert card.data.to_dict()["task_categories"] == ["fill-mask"]
    assert f"| {num_shards['train']} |" in card.text
    assert str(tmp_path) not in card.content


def test_again_and_with_other_settings(source, tmp_path, hub_here):
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    before = titles(hub_here)
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    assert titles(hub_here) == before
    assert main(flags(source, tmp_path / "other", *HUB, "--shard-size", "7")) == 0
    assert published(hub_here) == written(tmp_path / "other")
    assert titles(hub_here)[len(before) : len(before) + 2] == ["Add the card", "Begin train"]


def test_a_failed_push_leaves_no_manifest_and_is_continued(source, tmp_path, hub_here, monkeypatch, run):
    monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", ())
    monkeypatch.setattr(hub_shards, "FILES_PER_COMMIT", 10)
    assert main(flags(source, tmp_path / "before", *HUB, "--shard-size", "7")) == 0
    hub_here.fault("commit/main", method="POST", mode="none", times=3)
    hub_here.fault("commit/main", method="POST", status=403)
    failed = run(main, *flags(source, tmp_path / "out", *HUB))
    assert failed.status == 1
    assert failed.error.endswith(f"The files are kept in {tmp_path}/out; run the same command again to push them.")
    assert "train/manifest.json" not in published(hub_here)
    num_commits = len(titles(hub_here))
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    assert published(hub_here) == written(tmp_path / "out")
    # The first ten shards are there already.
    assert titles(hub_here)[num_commits].startswith("train: shards 11 to 20 of")


def test_a_repository_of_others_is_refused_before_the_work(source, tmp_path, hub_here, run):
    hub_here.put(REPO, "data/train-0.parquet", b"rows", kind="datasets")
    assert "(data/train-0.parquet)" in run(main, *flags(source, tmp_path / "out", *HUB)).refusal
    assert not (tmp_path / "out").exists()


def test_files_beside_the_shards_stay_on_this_machine(source, tmp_path, hub_here):
    assert main(flags(source, tmp_path / "out", *HUB[2:])) == 0
    names = set(contents(tmp_path / "out"))
    for name in (".env", "notes.md", "train/notes.md", "train/tokenizer/.env"):
        (tmp_path / "out" / name).write_text("a secret", encoding="utf-8")
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    assert set(published(hub_here)) == names


def test_pushed_shards_name_no_path_and_can_be_verified(source, tmp_path, hub_here):
    assert main(flags(source, tmp_path / "out", *HUB)) == 0
    files = hub_here.files(REPO, kind="datasets")
    assert not [path for path, content in files.items() if str(source).encode() in content]
    assert not [path for path, content in files.items() if b"docs.jsonl" in content]
    for path, content in files.items():
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(content)
    assert main(["--verify", "--output-dir", str(tmp_path / "copy"), "--num-workers", "1"]) == 0
    manifest = open_shards(str(tmp_path / "copy" / "train")).manifest
    assert manifest.corpus["data_files"][0]["path"] == REDACTED
    assert manifest.corpus["data_files"][0]["num_bytes"] == (source / "docs.jsonl").stat().st_size
    assert main(flags(source, tmp_path / "out", *HUB, "--publish-details")) == 0
    assert published(hub_here) == contents(tmp_path / "out")


def test_the_card_names_no_folder(shards):
    manifest = open_shards(str(shards / "train")).manifest
    settings = manifest.corpus["settings"] | {"data_files": [], "dataset_name": "/home/alice/private"}
    folder = dataclasses.replace(manifest, corpus={"settings": settings})
    assert "private" not in dataset_card(REPO, {"train": folder})
    on_hub = dataclasses.replace(manifest, corpus={"settings": settings | {"dataset_name": "bob/texts"}})
    assert "The text is the data set `bob/texts`" in dataset_card(REPO, {"train": on_hub})


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
        monkeypatch.setattr(hub, "CHECK_RETRY_DELAYS_SECONDS", ())
        monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", ())

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
        ("hub:alice/nothing", "the Hub found no data set alice/nothing"),
        (f"{ADDRESS}@v9", "alice/rows has no branch, tag or commit v9"),
        (f"{ADDRESS}/test", "has no test/manifest.json in commit"),
    ],
)
@pytest.mark.usefixtures("pushed")
def test_what_the_hub_does_not_have_is_one_line(address, message):
    with pytest.raises(InputError, match=message) as raised:
        HubShards().local_folder(address, "train")
    assert "\n" not in str(raised.value)


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
