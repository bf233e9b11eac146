"""Stage 2 pushes its shards to a data set repository: a manifest is there only with all of its split."""

import dataclasses
import json
from pathlib import Path

from huggingface_hub import DatasetCard

from mlm_common.hub import push as hub
from mlm_common.hub.redaction import REDACTED
from tests.fixtures.tiny_corpus import contents, flags
from tests.servers.fixtures import HubHandle
from tfrecord_prep import hub_shards as publishing
from tfrecord_prep.hub_shards import dataset_card
from tfrecord_prep.manifest import open_shards, published_manifest
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
    monkeypatch.setattr(publishing, "FILES_PER_COMMIT", 10)
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
    monkeypatch.setattr(publishing, "FILES_PER_COMMIT", 10)
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


def test_from_cloud_storage(source, cloud, hub_here):
    assert main(flags(source, f"{cloud.bucket_url}/rows", *HUB, "--publish-details")) == 0
    stored = {name.removeprefix("rows/"): content for name, content in cloud.objects().items()}
    assert published(hub_here) == stored


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
    assert main(["--verify", "--output-dir", str(tmp_path / "copy")]) == 0
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
    assert "Its text: `bob/texts`" in dataset_card(REPO, {"train": on_hub})
