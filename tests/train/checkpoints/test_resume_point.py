"""What is said of a run that resumes: whether it is bit for bit the one that it would have been."""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import pytest

from train.checkpoints.resume import ResumePoint, describe_resume_point
from train.checkpoints.store import CheckpointRecord
from train.config.sources import parse_training_config
from train.runtime.plan import make_plan

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


def test_nothing_is_said_where_nothing_differs() -> None:
    assert said(LIBRARIES, MADE_BY) == said({**LIBRARIES, "numpy": "1.0"}, MADE_BY) == []


@pytest.mark.parametrize("name", ["publish_details", "hub_language", "keep_checkpoints"])
def test_a_setting_that_did_not_exist_yet_had_its_default(name: str) -> None:
    assert said(LIBRARIES, MADE_BY, without=name) == []
    (line,) = said(LIBRARIES, MADE_BY, "--keep-checkpoints", "5", without="keep_checkpoints")
    assert line == "changed since then: --keep-checkpoints 2 -> 5"


def test_what_was_decided_counts_and_not_what_left_it_open() -> None:
    (line,) = said(LIBRARIES, MADE_BY, changed={"jit_compile": True})
    assert line == "changed since then: --jit-compile True -> None"
    (line,) = said(LIBRARIES, MADE_BY, computation={"jit_compile": False, "tpu_layers": False})
    assert "in the last bits from an uninterrupted run: --jit-compile False -> True. Sums" in line


def test_where_nothing_was_decided_the_setting_counts() -> None:
    assert (
        said(LIBRARIES, MADE_BY, computation={})
        == said(LIBRARIES, MADE_BY, computation={}, changed={"tpu_layers": None})
        == []
    )
    line = said(LIBRARIES, MADE_BY, computation={}, changed={"tpu_layers": True})[1]
    assert "uninterrupted run: --tpu-layers on -> auto" in line


def test_another_libtpu_is_said_on_a_tpu_and_not_elsewhere() -> None:
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
def test_another_device_and_another_commit_are_said_and_so_is_what_was_not_recorded(
    made_by: dict[str, str], texts: list[str]
) -> None:
    assert said(LIBRARIES, made_by) == [f"note: the {text}, so the result may differ slightly" for text in texts]


@pytest.mark.parametrize(
    ("flags", "text"), [((), "starting from scratch"), (("--init-from", "x"), "starting from the weights of x")]
)
def test_a_new_run_says_what_it_starts_from(flags: tuple[str, ...], text: str) -> None:
    config = parse_training_config(["--train-dataset", "x", "--output-dir", "y", "--max-steps", "9", *flags], "")
    plan = make_plan(config.optimization, config.run, num_rows=1000, max_length=16, num_replicas=1)
    assert list(describe_resume_point(ResumePoint(), plan, config, LIBRARIES, COMPUTATION, MADE_BY)) == [text]
