"""Of all settings, and of all fields of the records that are pushed, no text leaves the machine that is not known."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.identity import (
    Part,
    describe_changes,
    describe_shared_text,
    identity,
    names_its_text,
    published_corpus,
    record_of_split,
)
from mlm_common.corpus.text_formats import bad_rows_from_record
from mlm_common.hub.redaction import REDACTED, is_same, redact_settings, redacted_hash
from tests.fixtures.results import read_json
from tests.fixtures.tiny_corpus import flags, write_source
from tfrecord_prep.manifest import published_manifest
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from tokenizer_training.config import NormalizationConfig, UnigramConfig
from tokenizer_training.train_unigram import main as train_tokenizer
from tokenizer_training.train_unigram import published_record, published_report
from train.checkpoints.store import parse_record
from train.config.settings import SUBJECTS
from train.publishing.publisher import published_checkpoint, published_run

SECRET = "a secret"
BAD_ROWS = {"num_rows": 1, "listed": [{"source": SECRET, "place": SECRET, "problem": SECRET}]}
# All text that may be published, whoever wrote it.
PUBLIC_SETTINGS = {
    "split", "validation_split", "test_split", "dataset_config", "dataset_revision", "text_column", "delimiter",
    "extra_special_tokens", "preset", "hub_model_id", "hub_revision", "hub_tag", "hub_license", "hub_language",
    "hub_example", "metric_for_best", "log_steps", "eval_steps", "save_steps", "report_to",
}  # fmt: skip
PUBLIC_MANIFEST = {
    "split", "chunking", "tokenizer.sha256", "shards.name", "shards.crc32c", "versions", "corpus.settings.split",
    "corpus.settings.text_column", "corpus.data_files.checksum",
}  # fmt: skip
PUBLIC_RUN = {
    "commit", "versions", "hardware", "task", "model_config", "settings.model.preset", "settings.hub.hub_example",
    "settings.data.metric_for_best",
    *(f"{data}.{name}" for data in ("train_data", "eval_data") for name in PUBLIC_MANIFEST if "shards" not in name),
}  # fmt: skip
PUBLIC_CHECKPOINT = {
    "fingerprint_sha256", "crc32c", "generator", "made_by.device", "made_by.commit", "versions",
    "settings.model.preset", "settings.data.metric_for_best", "unwritten_log_lines.split",
}  # fmt: skip
PUBLIC_TOKENIZER = {
    "tokenizer_sha256", "versions", "corpus.settings.split", "corpus.settings.text_column",
    "corpus.data_files.checksum",
}  # fmt: skip
PUBLIC_REPORT = {"held_out.part", "fit.source", "longest_pieces"}  # sources are named by the keys of others, too
# Which libraries there are, and which settings a configuration has, is not counted here.
MAPS = ("versions", "task", "model_config")


@pytest.mark.parametrize("config_class", [CorpusConfig, NormalizationConfig, UnigramConfig, *SUBJECTS])
def test_text_in_a_setting_is_redacted_unless_it_is_marked(config_class):
    names = [field.name for field in fields(config_class)]
    for value in (SECRET, [SECRET], {SECRET: SECRET}):
        published = redact_settings(dict.fromkeys([*names, "of a later version"], value), [config_class])
        assert {name for name in published if SECRET in str(published[name])} == PUBLIC_SETTINGS & set(names)
        assert REDACTED in str(published["of a later version"])


def test_numbers_and_choices_leave_as_they_are():
    settings = {"sample_by": "paragraph", "limit": 5, "streaming": True, "validation_percent": 0.5, "data_files": []}
    settings["validation_split"] = None
    assert redact_settings(settings, [CorpusConfig]) == settings


def with_secrets(value: Any) -> Any:
    """Replace each text by a secret."""
    if isinstance(value, dict):
        return {key: with_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_secrets(item) for item in value]
    return SECRET if isinstance(value, str) else value


def places(value: Any, path: str = "") -> Iterator[str]:
    """Name the fields of a record in which a secret is."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, path if path.split(".")[-1] in MAPS else f"{path}.{key}".lstrip("."))
            assert SECRET not in key
    elif isinstance(value, list | tuple):
        for item in value:
            yield from places(item, path)
    elif SECRET in str(value):
        yield path


def secret_places(record: dict[str, Any]) -> set[str]:
    assert list(places(with_secrets(record))), "secrets are put in"
    return set(places(record))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_source(folder)
    sizes = ["--vocab-size", "48", "--no-byte-fallback", "--num-workers", "1"]
    output = str(folder / "trained")
    assert train_tokenizer(["--data-files", str(folder / "docs.jsonl"), *sizes, "--output-dir", output]) == 0
    return folder / "trained"


def test_unknown_text_in_a_manifest_is_redacted(shards):
    record = with_secrets(read_json(shards / "train" / "manifest.json"))
    record |= {"bad_rows": BAD_ROWS, "of_a_later_version": {SECRET: [SECRET]}}
    published = published_manifest(record)
    assert secret_places(published) == PUBLIC_MANIFEST
    assert bad_rows_from_record(published["bad_rows"]).num_rows == BAD_ROWS["num_rows"]


def test_unknown_text_in_the_records_of_a_run_is_redacted(finished_run):
    record = with_secrets(read_json(finished_run / "run.json")) | {"owner": SECRET, "hosts": [SECRET]}
    record["settings"]["hardware"] |= dict.fromkeys(("tpu_name", "tpu_zone", "gcp_project"), SECRET)
    record["settings"]["model"] |= dict.fromkeys(("init_from", "pretrained_model_config"), SECRET)
    record["settings"]["hub"]["hub_example"] = SECRET
    record["model_config"]["_name_or_path"] = SECRET
    record["fingerprint"]["model.init_from"] = SECRET
    published = published_run(record)
    assert secret_places(published) == PUBLIC_RUN
    assert published["model_config"]["_name_or_path"] == REDACTED
    checkpoint = parse_record((finished_run / "checkpoints" / "step-00000006.json").read_text(encoding="utf-8"))
    content = json.loads(published_checkpoint(checkpoint).to_json())
    assert parse_record(json.dumps(content)).fingerprint_sha256 == checkpoint.fingerprint_sha256
    secrets = {field.name: with_secrets(getattr(checkpoint, field.name)) for field in fields(checkpoint)}
    secrets |= {"skipped": (), "unwritten_log_lines": ({"split": SECRET},)}
    published = published_checkpoint(dataclasses.replace(checkpoint, **secrets))
    assert secret_places(dataclasses.asdict(published)) == PUBLIC_CHECKPOINT


def test_unknown_text_in_the_records_of_a_tokenizer_is_redacted(tokenizer_folder):
    record = with_secrets(read_json(tokenizer_folder / "training.json")) | {"owner": SECRET, "bad_rows": BAD_ROWS}
    assert secret_places(published_record(record)) == PUBLIC_TOKENIZER
    report = with_secrets(read_json(tokenizer_folder / "report.json")) | {"excerpt": SECRET}
    assert secret_places(published_report(report)) <= PUBLIC_REPORT | {"characters.most_frequent_dropped"}
    assert published_report(report)["examples"] == []


@pytest.mark.parametrize(
    ("name", "is_published"),
    [("alice/corpus", True), ("builtin", True), ("/home/alice/mine", False), ("gs://b/mine", False), ("here", False)],
)
def test_a_data_set_is_named_where_it_is_on_the_hub(name, is_published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    settings = {"dataset_name": name, "dataset_config": "en", "data_files": [], "split": "train"}
    redacted = {} if is_published else {"dataset_name": REDACTED}
    assert published_corpus({"settings": settings})["settings"] == settings | redacted


def test_a_published_corpus_keeps_its_identity():
    def record(checksum, **settings):
        file = {"path": f"/home/alice/{checksum}", "num_bytes": 5, "checksum": f"sha256 {checksum}"}
        defaults = dataclasses.asdict(CorpusConfig())
        return {"settings": defaults | settings, "data_files": [file], "validation_files": [file]}

    files = record("a", data_files=["/home/alice/a"], validation_files=["/home/alice/a"])
    folder = record("b", dataset_name="/home/alice/b", dataset_config="en", validation_split="dev")
    on_hub = record("c", dataset_name="bob/c", dataset_revision="0" * 40, test_split="test")
    for corpus in (files, folder, on_hub):
        published = published_corpus(corpus)
        assert identity(published) == identity(corpus)
        assert describe_changes(published, corpus) == describe_changes(corpus, published) == ""
        for split in ("train", "validation"):
            assert record_of_split(published, split) == published_corpus(record_of_split(corpus, split))
        assert names_its_text(published) == (corpus is on_hub and not corpus["settings"]["data_files"])
    others = (files, folder, record("a", data_files=["a"], sample_by="paragraph"))
    parts = [Part(published_corpus(record_of_split(corpus, "train")), "train") for corpus in others]
    assert describe_shared_text(*parts[:2]) == ""
    assert "made from (redacted) (5 bytes, sha256 a)" in describe_shared_text(parts[0], parts[2])


def test_a_redacted_fingerprint_is_still_compared():
    value = ["a 0", "b 0"]
    assert is_same(redacted_hash(value), json.loads(json.dumps(value)))
    assert is_same(value, value)
    assert not is_same(redacted_hash(value), value[1:])


def test_a_tokenizer_from_the_hub_names_no_corpus_to_prepare(tokenizer_folder, tmp_path, run):
    for path in tokenizer_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    record = published_record(read_json(tokenizer_folder / "training.json"))
    (tmp_path / "training.json").write_text(json.dumps(record), encoding="utf-8")
    source = tokenizer_folder.parent
    given = flags(source, tmp_path / "out", "--dry-run", tokenizer=tmp_path, corpus=())
    assert "that names one. Pass --data-files or --dataset-name" in run(prepare, *given).refusal
    assert run(prepare, *given, "--data-files", source / "docs.jsonl").status == 0
