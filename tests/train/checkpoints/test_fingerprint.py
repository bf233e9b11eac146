"""The fingerprint stays that of the versions before, or none of their runs could be resumed."""

import dataclasses
import json
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from tests.fixtures.record_run import unpack
from tests.fixtures.tiny_models import tiny_tokenizer
from tfrecord_prep.manifest import ShardSet
from train.checkpoints.fingerprint import fingerprint, fingerprint_sha256, is_checkpoint_of
from train.checkpoints.store import parse_record
from train.config.settings import ADDED, MAY_CHANGE, PER_WORKER, ROUNDING, flags_marked, settings_marked
from train.config.sources import parse_training_config
from train.data.shards import TrainingInputs
from train.runtime.run_folder import check_run_folder

SHARDS = ShardSet("a", ("a/dataset-0-8.tfrecord",), (8,), num_rows=8, manifest=None, tokenizer_folder=None)
INPUTS = TrainingInputs(SHARDS, None, tiny_tokenizer(), "nowhere", 16)
MODEL_CONFIG = {"model_type": "roberta", "vocab_size": 128}


def sha256_of(*flags):
    config = parse_training_config(["--train-dataset", "shards", "--output-dir", "run", *flags], "")
    return fingerprint_sha256(fingerprint(config, INPUTS, MODEL_CONFIG))


def test_the_fingerprint_of_recorded_settings():
    """Version 0.2.0 gave this."""
    assert sha256_of() == "5147754fb49ba12a84bc00ac9a33cea97862aebb7b391a58ce18554dc4df4d79"


@pytest.mark.parametrize(
    "flags", [("--max-steps", "9"), ("--dropout", "0.1"), ("--output-dir", "b"), ("--hub-private",)]
)
def test_what_may_change_is_not_in_it(flags):
    assert sha256_of(*flags) == sha256_of()


@pytest.mark.parametrize(
    "flags",
    [("--seed", "1"), ("--learning-rate", "1e-5"), ("--bfloat16",), ("--masking", "span"), ("--block-attention",)],
)
def test_what_makes_another_run_is(flags):
    assert sha256_of(*flags) != sha256_of()


@pytest.mark.parametrize("transformers_version", ["4.57.5", "4.58.0"])
def test_another_version_of_transformers_is_the_same_run(transformers_version):
    config = parse_training_config(["--train-dataset", "shards", "--output-dir", "run"], "")
    of_version = fingerprint(config, INPUTS, {**MODEL_CONFIG, "transformers_version": transformers_version})
    assert fingerprint_sha256(of_version) == sha256_of()


def test_runs_and_checkpoints_that_were_recorded_with_the_version_of_transformers_are_the_same_run(tmp_path):
    written = json.loads((Path(__file__).parents[2] / "fixtures" / "written_by_0_2_0.json").read_text(encoding="utf-8"))
    unpack(written, tmp_path)
    for run in (tmp_path / name for name in written["runs"]):
        former = json.loads((run / "run.json").read_text(encoding="utf-8"))["fingerprint"]
        now = {key: value for key, value in former.items() if key != "model.transformers_version"}
        assert len(now) == len(former) - 1
        check_run_folder(str(run), now, resume="must", overwrite=False)
        with pytest.raises(InputError, match="must not hold another run"):
            check_run_folder(str(run), {**now, "run.seed": 7}, resume="must", overwrite=False)
        (record,) = (parse_record(path.read_text(encoding="utf-8")) for path in (run / "checkpoints").glob("*.json"))
        assert is_checkpoint_of(now, record)
        assert not is_checkpoint_of({**now, "run.seed": 7}, record)


def test_shards_and_architecture_are_in_it():
    config = parse_training_config(["--train-dataset", "shards", "--output-dir", "run"], "")
    others = [
        fingerprint(config, dataclasses.replace(INPUTS, max_length=32), MODEL_CONFIG),
        fingerprint(config, dataclasses.replace(INPUTS, eval_shards=SHARDS), MODEL_CONFIG),
        fingerprint(config, INPUTS, {**MODEL_CONFIG, "vocab_size": 256}),
    ]
    assert sha256_of() not in {fingerprint_sha256(one) for one in others}
    assert len({fingerprint_sha256(one) for one in others}) == 3


def test_marks_are_those_of_whole_settings():
    config = parse_training_config(["--train-dataset", "shards", "--output-dir", "run"], "")
    names = {
        f"{subject.name}.{one.name}"
        for subject in dataclasses.fields(config)
        for one in dataclasses.fields(getattr(config, subject.name))
    }
    for mark in (MAY_CHANGE, PER_WORKER, ROUNDING, ADDED):
        assert settings_marked(mark) < names
    # What workers or the order of sums may differ in is no reason to refuse a run.
    assert settings_marked(PER_WORKER) | settings_marked(ROUNDING) < settings_marked(MAY_CHANGE)
    assert set(flags_marked(PER_WORKER)) == {
        "--train-dataset", "--eval-dataset", "--tokenizer", "--pretrained-model-config", "--output-dir", "--phases",
    }  # fmt: skip
