"""Runs with `--optimizer muon`: what the plan and the doctor count of their moments."""

import math
import re

import pytest
from safetensors import safe_open

from tests.fixtures.tiny_run import run_flags
from train.checks.machine import check_run
from train.config.settings import parse_training_config
from train.run_mlm import main

MUON = ("--optimizer", "muon")
LARGE = "num_hidden_layers=24,hidden_size=1024,num_attention_heads=16,intermediate_size=4096"


def test_the_plan_counts_one_moment_of_matrices(shards, tmp_path, run):
    large = (*run_flags(shards, tmp_path / "run", "--config-overrides", LARGE), "--dry-run")
    plans = [run(main, *large, *optimizer).out for optimizer in ((), MUON)]
    number = int(re.search(r"parameters +([\d,]+)", plans[0])[1].replace(",", ""))
    in_matrices = 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 1024**2
    for plan, numbers in zip(plans, (4 * number, 4 * number - in_matrices), strict=True):
        assert f"memory {4 * numbers / 2**30:.2f} GiB per device" in " ".join(plan.split())


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_checkpoint_has_the_moments_that_the_doctor_counts(shards, tmp_path):
    extra_flags = (*MUON, "--max-steps", "1")
    assert main(run_flags(shards, tmp_path / "run", *extra_flags)) == 0
    with safe_open(tmp_path / "run" / "checkpoints" / "step-00000001.safetensors", "numpy") as file:
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in file.keys() if "_moment/" in name]  # noqa: SIM118
    counted = check_run(parse_training_config(run_flags(shards, tmp_path / "new", *extra_flags), ""))
    assert sum(sizes) == 2 * counted["num_parameters"] - counted["num_with_one_moment"]
    assert counted["num_with_one_moment"] == 4 * 32**2 + 2 * 32 * 64 + 32**2
