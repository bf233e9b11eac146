"""The identity of a run, and what is said where one resumes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import pytest

from tests.fixtures.plans import make_plan
from tests.fixtures.tiny_models import tiny_tokenizer
from tfrecord_prep.manifest import ShardSet
from train.checkpoints.resume import ResumePoint, describe_resume_point, fingerprint, fingerprint_sha256
from train.checkpoints.store import CheckpointRecord
from train.config.learning import ADDED, MAY_CHANGE, PER_WORKER, ROUNDING
from train.config.settings import parse_training_config, settings_marked
from train.data.shards import TrainingInputs

SHARDS = ShardSet("a", ("a/dataset-0-8.tfrecord",), (8,), num_rows=8, manifest=None, tokenizer_folder=None)
INPUTS = TrainingInputs(SHARDS, None, tiny_tokenizer(), "nowhere", 16)
MODEL_CONFIG = {"model_type": "roberta", "vocab_size": 128}


def config_of(*flags):
    return parse_training_config(["--train-dataset", "shards", "--output-dir", "run", *flags], "")


def sha256_of(*flags):
    config = config_of(*flags)
    return fingerprint_sha256(fingerprint(config, INPUTS, MODEL_CONFIG))


def test_the_fingerprint_of_recorded_settings():
    assert sha256_of() == "5147754fb49ba12a84bc00ac9a33cea97862aebb7b391a58ce18554dc4df4d79"


@pytest.mark.parametrize(
    "flags", [("--max-steps", "9"), ("--dropout", "0.1"), ("--output-dir", "b"), ("--hub-language", "en")]
)
def test_what_may_change_is_not_in_it(flags):
    assert sha256_of(*flags) == sha256_of()


@pytest.mark.parametrize(
    "flags",
    [("--seed", "1"), ("--learning-rate", "1e-5"), ("--bfloat16",), ("--masking", "span"), ("--block-attention",)],
)
def test_what_makes_another_run_is(flags):
    assert sha256_of(*flags) != sha256_of()


def test_shards_and_architecture_are_in_it_and_no_versions():
    config = config_of()
    of_version = fingerprint(config, INPUTS, {**MODEL_CONFIG, "transformers_version": "4.58.0"})
    assert fingerprint_sha256(of_version) == sha256_of()
    others = [
        fingerprint(config, dataclasses.replace(INPUTS, max_length=32), MODEL_CONFIG),
        fingerprint(config, dataclasses.replace(INPUTS, eval_shards=SHARDS), MODEL_CONFIG),
        fingerprint(config, INPUTS, {**MODEL_CONFIG, "vocab_size": 256}),
    ]
    assert len({sha256_of(), *map(fingerprint_sha256, others)}) == 4


def test_marks_are_those_of_whole_settings():
    config = config_of()
    names = {
        f"{subject.name}.{one.name}"
        for subject in dataclasses.fields(config)
        for one in dataclasses.fields(getattr(config, subject.name))
    }
    for mark in (MAY_CHANGE, PER_WORKER, ROUNDING, ADDED):
        assert settings_marked(mark) < names
    # What workers or the order of sums may differ in is no reason to refuse a run.
    assert settings_marked(PER_WORKER) | settings_marked(ROUNDING) < settings_marked(MAY_CHANGE)
    assert settings_marked(PER_WORKER) == {
        "data.train_dataset", "data.eval_dataset", "data.tokenizer", "data.task", "model.pretrained_model_config",
        "run.output_dir", "run.phases",
    }  # fmt: skip


LIBRARIES = {"tensorflow": "2.21", "libtpu": "0.0.42", "numpy": "2.0"}
MADE_BY = {"device": "TPU v3-8", "commit": "abc"}
COMPUTATION = {"jit_compile": True, "tpu_layers": False}


def said(
    versions: dict[str, str],
    made_by: dict[str, str],
    *flags: str,
    without: str = "",
    computation: dict[str, Any] = COMPUTATION,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """List what is said of a checkpoint of these but for where it is.

    Its record lacks the setting `without`, and has those `changed` of the hardware.
    """
    required = ("--preset", "tiny-roberta-cpu", "--train-dataset", "x", "--output-dir", "y", "--max-steps", "9")
    config = parse_training_config([*required, *flags], "")
    plan = make_plan(config.optimization, config.run, num_rows=1000, max_length=16, num_replicas=1)
    settings = config.as_dict()
    record = CheckpointRecord(
        step=3,
        row=12,
        fingerprint_sha256="",
        plan=asdict(plan),
        settings={
            subject: {name: value for name, value in values.items() if name != without}
            for subject, values in {**settings, "hardware": {**settings["hardware"], **changed}}.items()
        },
        versions=versions,
        logged_step=3,
        computation=computation,
        made_by=made_by,
    )
    point = ResumePoint(step=3, checkpoint=record)
    first, *others = describe_resume_point(point, plan, config, LIBRARIES, COMPUTATION, MADE_BY)
    assert first == "resuming at step 3 of 9 (epoch 0.10)"
    return others


def test_nothing_is_said_where_nothing_differs():
    assert said(LIBRARIES, MADE_BY) == said({**LIBRARIES, "numpy": "1.0"}, MADE_BY) == []


def test_what_was_decided_counts_and_not_what_left_it_open():
    (line,) = said(LIBRARIES, MADE_BY, changed={"jit_compile": True})
    assert line == "changed since then: --jit-compile True -> None"
    (line,) = said(LIBRARIES, MADE_BY, computation={"jit_compile": False, "tpu_layers": False})
    assert "in the last bits from an uninterrupted run: --jit-compile False -> True. Sums" in line
    note, _ = said(LIBRARIES, MADE_BY, "--bfloat16", computation={"jit_compile": False, "tpu_layers": False})[-2:]
    assert "the precision changes from here on" in note


def test_another_libtpu_is_said_on_a_tpu_and_not_elsewhere():
    versions = {**LIBRARIES, "libtpu": "0.0.41"}
    (line,) = said(versions, MADE_BY, "--tpu-name", "local")
    assert "in the last bits from an uninterrupted run: libtpu 0.0.41 -> 0.0.42" in line
    assert said(versions, MADE_BY) == []


@pytest.mark.parametrize(
    ("made_by", "texts"),
    [
        ({**MADE_BY, "device": "TPU v4-8"}, ["device has changed since this run started (TPU v4-8 → TPU v3-8)"]),
        ({**MADE_BY, "commit": "abd+changes"}, ["code has changed since this run started (abd + local changes → abc)"]),
        (
            {},
            [
                "device has changed since this run started (unknown → TPU v3-8)",
                "code has changed since this run started (unknown → abc)",
            ],
        ),
    ],
)
def test_another_or_unrecorded_device_or_commit_is_said(made_by, texts):
    assert said(LIBRARIES, made_by) == [f"note: the {text}, so the result may differ slightly" for text in texts]


@pytest.mark.parametrize(
    ("flags", "text"), [((), "starting from scratch"), (("--init-from", "x"), "starting from the weights of x")]
)
def test_a_new_run_says_what_it_starts_from(flags, text):
    config = parse_training_config(["--train-dataset", "x", "--output-dir", "y", "--max-steps", "9", *flags], "")
    plan = make_plan(config.optimization, config.run, num_rows=1000, max_length=16, num_replicas=1)
    assert list(describe_resume_point(ResumePoint(), plan, config, LIBRARIES, COMPUTATION, MADE_BY)) == [text]
