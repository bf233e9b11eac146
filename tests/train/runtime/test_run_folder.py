"""Whose run a folder holds, and what of it is deleted."""

import shutil

import pytest

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from tests.fixtures.tiny_corpus import contents
from train.checkpoints.run_record import RunRecord
from train.runtime.run_folder import RunFolder, check_export_folder


def test_clearing_deletes_all_that_a_run_wrote_and_nothing_else(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    foreign = {"thesis.txt", "checkpoints/notes.txt", "export/thesis.txt", "tensorboard/mine.csv", "export/old/a"}
    for name in (*foreign, "tensorboard/plugins/profile/trace", "metrics.damaged-1.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("some", encoding="utf-8")
    RunFolder(run).clear()
    assert contents(run).keys() == foreign


def test_nothing_is_deleted_in_a_folder_that_holds_no_run(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").write_text("mine", encoding="utf-8")
    RunFolder(tmp_path).check(None, {}, resume="auto", overwrite=True)
    RunFolder(tmp_path).clear()
    assert (tmp_path / "export" / "README.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("record", [None, "[]", "{}", "no JSON"])
def test_a_folder_with_files_and_no_run_is_not_overwritten(tmp_path, record):
    (tmp_path / "metrics.jsonl").write_text("mine", encoding="utf-8")
    if record is not None:
        (tmp_path / "run.json").write_text(record, encoding="utf-8")
    refusal = r"must be empty .* contains metrics.jsonl but no run.json of a run|run.json .*the record of a run"
    with pytest.raises(InputError, match=refusal):
        RunFolder(tmp_path).check(RunRecord.read(RunFolder(tmp_path)).content, {}, resume="auto", overwrite=True)


def test_a_deletion_that_was_killed_is_taken_up_again(finished_run, tmp_path):
    """Its record is deleted last."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    for name in ("checkpoints/step-00000003.json", "checkpoints/step-00000006.json", "metrics.jsonl"):
        (run / name).unlink()
    RunFolder(run).check(RunFolder(run).read_record(), {}, resume="auto", overwrite=True)
    RunFolder(run).clear()
    assert not contents(run)


MIXTURE = {"de": [1, "a 1"], "en": [3, "b 1", "b 2"]}
OTHER_EVALUATION = {"eval_shards": {"de": [2, "c 1"]}}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"run.seed": 2}, "--seed: 1 there, 2 now"),
        ({"model.labels": {"a": 2}}, "model.labels: {'a': 1} there, {'a': 2} now"),
        (
            {"train_shards": {"de": [2, "a 1"], "en": [2, "b 1", "b 2"]}} | OTHER_EVALUATION,
            "weight of de: 25.000% there, 50.000% now; weight of en: 75.000% there, 50.000% now",
        ),
        ({"train_shards": MIXTURE | {"fo": [1, "d 1"]}}, "train_shards: from de, en there, from de, en, fo now"),
        ({"train_shards": MIXTURE | {"de": [1, "a 2"]}}, "different training shards of de"),
    ],
)
def test_what_differs_from_the_run_in_the_folder_is_named(changes, shown, tmp_path):
    fingerprint = {"run.seed": 1, "model.labels": {"a": 1}, "train_shards": MIXTURE, "eval_shards": {"de": [1, "c 1"]}}
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError) as error:
        RunFolder(tmp_path).check({"fingerprint": fingerprint}, fingerprint | changes, resume="auto", overwrite=False)
    assert f"contains a different run ({shown}). Use another folder" in str(error.value)


def test_new_rows_hide_the_buckets_that_follow_from_them(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    recorded, now = {"train_rows": "a"}, {"train_rows": "b", "data.length_buckets": [8]}
    with pytest.raises(InputError, match=r"contains a different run \(train_rows: a there, b now\)\."):
        RunFolder(tmp_path).check({"fingerprint": recorded}, now, resume="auto", overwrite=False)


@pytest.mark.parametrize("kind", ["pretraining", "fine-tuning"])
def test_a_run_of_the_other_kind_is_named_without_its_settings(kind, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    fingerprints = {"pretraining": {"train_shards": "a", "run.seed": 1}, "fine-tuning": {"train_rows": "b"}}
    recorded = fingerprints.pop(kind)
    (now,) = fingerprints.values()
    with pytest.raises(InputError, match=rf"contains a {kind} run\. Use another folder, or --overwrite-output-dir, wh"):
        RunFolder(tmp_path).check({"fingerprint": recorded}, now, resume="auto", overwrite=False)


def test_an_export_replaces_no_model_and_no_other_file(tmp_path):
    """An interrupted export, which has no config.json yet, may be repeated."""
    output = open_folder(str(tmp_path / "out"))
    check_export_folder(output, overwrite=False)
    output.write_text("tokenizer.json", "{}")
    check_export_folder(output, overwrite=False)
    output.write_text("README.md", "my notes")
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"must be an empty folder; .*out contains README\.md\. Use another"):
            check_export_folder(output, overwrite=overwrite)
    output.write_text("config.json", "{}")
    with pytest.raises(InputError, match=r"contains a model\. Use another folder, or --overwrite"):
        check_export_folder(output, overwrite=False)
    check_export_folder(output, overwrite=True)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").touch()
    with pytest.raises(InputError, match=r"contains manifest\.json"):
        check_export_folder(open_folder(str(tmp_path / "shards")), overwrite=True)
