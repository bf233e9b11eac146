"""Runs with `--optimizer muon`: killed and resumed, and what the plan and the doctor count of their moments."""

import math
import re
import signal

import pytest
from safetensors import safe_open

from tests.fixtures.killable_runs import KillableRuns
from tests.fixtures.same_run import assert_same_run
from tests.fixtures.tiny_run import MODEL, run_flags
from train.checks.machine import check_run
from train.config.settings import parse_training_config
from train.run_mlm import main

MUON = ("--optimizer", "muon")
LARGE = "num_hidden_layers=24,hidden_size=1024,num_attention_heads=16,intermediate_size=4096"


def test_the_plan_counts_one_moment_of_matrices(shards, tmp_path, run):
    large = (*run_flags(shards, tmp_path / "run", "--config-overrides", LARGE), "--dry-run")
    plans = [run(main, *large, *more).out for more in ((), MUON)]
    number = int(re.search(r"parameters +([\d,]+)", plans[0])[1].replace(",", ""))
    in_matrices = 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 1024**2
    for plan, numbers in zip(plans, (4 * number, 4 * number - in_matrices), strict=True):
        assert f"memory {4 * numbers / 2**30:.2f} GiB per device" in " ".join(plan.split())


@pytest.mark.slow
def test_killed_and_resumed_it_ends_the_same(shards, tmp_path):
    """And its checkpoint has as many moments as the doctor counts."""
    dropout = f"{MODEL},hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1"
    more = (*MUON, "--config-overrides", dropout, "--save-steps", "2")
    whole, killed = (run_flags(shards, tmp_path / name, *more) for name in ("whole", "killed"))
    with KillableRuns(num_devices=1) as runs:
        assert runs.run(whole) == 0
        assert runs.run_and_signal(killed, "train", 2, signal.SIGKILL, 0.0) == -signal.SIGKILL
        assert runs.run(killed) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    with safe_open(tmp_path / "whole" / "checkpoints" / "step-00000006.safetensors", "numpy") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys() if "_moment/" in name]  # noqa: SIM118
    counted = check_run(parse_training_config(run_flags(shards, tmp_path / "new", *more), ""))
    assert sum(sizes) == 2 * counted["num_parameters"] - counted["num_with_one_moment"]
    assert counted["num_with_one_moment"] == 4 * 32**2 + 2 * 32 * 64 + 32**2
