"""The identity of a run, and what is said where one resumes."""

import dataclasses
from types import MappingProxyType

import numpy as np

from tests.fixtures.plans import config_of, inputs_of, plan_of
from tests.fixtures.tiny_models import tiny_tokenizer
from tfrecord_prep.manifest import ShardSet
from train.checkpoints.resume import (
    ResumePoint,
    describe_resume_point,
    fingerprint,
    fingerprint_sha256,
    installed_versions,
)
from train.checkpoints.store import CheckpointRecord
from train.config import ADDED, MAY_CHANGE, PER_WORKER, ROUNDING
from train.config.settings import settings_marked

SHARDS = ShardSet("a", ("a/dataset-0-8.tfrecord",), (8,), num_rows=8, manifest=None, tokenizer_folder=None)
INPUTS = inputs_of(tiny_tokenizer(), max_length=16, shards=SHARDS)
MODEL_CONFIG = {"model_type": "roberta", "vocab_size": 128}


def sha256_of(*flags):
    return fingerprint_sha256(fingerprint(config_of(*flags), INPUTS, MODEL_CONFIG))


def test_the_fingerprint_has_what_makes_another_run():
    assert sha256_of() == "5147754fb49ba12a84bc00ac9a33cea97862aebb7b391a58ce18554dc4df4d79"
    for flags in ("--max-steps 9", "--dropout 0.1", "--output-dir b", "--hub-language en"):
        assert sha256_of(*flags.split()) == sha256_of(), flags
    for flags in (
        "--seed 1",
        "--learning-rate 1e-5",
        "--bfloat16",
        "--masking span",
        "--block-attention",
        "--optimizer muon",
    ):
        assert sha256_of(*flags.split()) != sha256_of(), flags
    of_muon = [
        ("--optimizer", "muon", *extra_flags)
        for extra_flags in ((), ("--muon-learning-rate", "1"), ("--muon-momentum", "0"))
    ]
    assert len({sha256_of(*flags) for flags in of_muon}) == 3


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
        f"{subject.name}.{field.name}"
        for subject in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, subject.name))
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


def said(versions, made_by, *flags, computation=COMPUTATION, changed=MappingProxyType({})):
    """List what is said of a checkpoint of these, whose settings of the hardware are `changed`, but for where it is."""
    config = config_of("--preset", "tiny-roberta-cpu", "--max-steps", "9", *flags)
    plan, settings = plan_of(config), config.as_dict()
    settings["hardware"] |= changed
    made = {"versions": versions, "computation": computation, "made_by": made_by}
    record = CheckpointRecord(
        step=3, row=12, fingerprint_sha256="", plan=plan, settings=settings, logged_step=3, **made
    )
    point = ResumePoint(step=3, checkpoint=record)
    first, *others = describe_resume_point(point, plan, config, LIBRARIES, COMPUTATION, MADE_BY)
    assert first == "resuming at step 3 of 9 (epoch 0.10)"
    return others


def test_what_was_decided_counts_and_not_what_left_it_open():
    assert said(LIBRARIES, MADE_BY) == said({**LIBRARIES, "numpy": "1.0"}, MADE_BY) == []
    (line,) = said(LIBRARIES, MADE_BY, changed={"jit_compile": True})
    assert line == "changed since then: --jit-compile True -> None"
    (line,) = said(LIBRARIES, MADE_BY, computation={"jit_compile": False, "tpu_layers": False})
    assert "in the last bits from an uninterrupted run: --jit-compile False -> True. Sums" in line
    _, line = said(LIBRARIES, MADE_BY, changed={"reference_layers": True})
    assert "in the last bits from an uninterrupted run: --reference-layers True -> False. Sums" in line
    note, _ = said(LIBRARIES, MADE_BY, "--bfloat16", computation={"jit_compile": False, "tpu_layers": False})[-2:]
    assert "the precision changes from here on" in note


def test_another_libtpu_is_said_on_a_tpu_and_not_elsewhere():
    versions = {**LIBRARIES, "libtpu": "0.0.41"}
    (line,) = said(versions, MADE_BY, "--tpu-name", "local")
    assert "in the last bits from an uninterrupted run: libtpu 0.0.41 -> 0.0.42" in line
    assert said({**versions, "jaxlib": "0.9"}, MADE_BY, "--runtime", "tensorflow") == []
    assert installed_versions()["numpy"] == np.__version__
