"""How a run decides how it is computed: on a CPU, also as if this were a TPU."""

import dataclasses
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.results import read_json
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_run import run_flags
from train import has_bfloat16_instructions
from train.model.computation import Computation
from train.run_mlm import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

PROJECT = Path(__file__).parents[2]
TPU = ("--tpu-name", "local")


def computed(run: Path) -> dict[str, Any]:
    return read_json(run / "run.json")["computation"]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in logged(run)]


@pytest.mark.usefixtures("cpu_as_tpu")
def test_right_layers_are_used_on_a_tpu(shards, tmp_path, caplog, capsys):
    with caplog.at_level(logging.INFO):
        assert main(run_flags(shards, tmp_path / "run", *TPU, "--dropout", "0.1", "--modelled-step-ms", "0.5")) == 0
    assert "TPU-optimized layers are used; on the first rows they give loss 4." in caplog.text
    printed = capsys.readouterr().out
    assert "computation            compiled with XLA, TPU-optimized layers" in printed
    match = re.search(
        r"^([\d.]+) ms a step measured, 0\.5 ms modelled, measured / modelled ([\d.]+): (.*)", printed, re.M
    )
    assert float(match[2]) == pytest.approx(float(match[1]) / 0.5, rel=0.01)
    assert match[3].startswith("TPU v3-8, roberta, ")
    assert "parameters, compiled with XLA, TPU-optimized layers, float32, 4 rows x " in match[3]
    assert " tokens x 1 micro-batch x " in match[3]
    assert computed(tmp_path / "run") == dataclasses.asdict(Computation(True, True))
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "compiled with XLA, TPU-optimized layers" in card


@pytest.mark.skipif(not has_bfloat16_instructions(), reason="this CPU does not multiply bfloat16")
def test_without_xla_a_run_multiplies_in_bfloat16(finished_run, shards, tmp_path):
    assert main(run_flags(shards, tmp_path / "run", "--bfloat16", "--per-replica-batch-size", "8")) == 0
    assert not computed(tmp_path / "run")["jit_compile"]
    rounded, exact = losses(tmp_path / "run"), losses(finished_run)
    assert rounded == pytest.approx(exact, rel=0.005)
    assert rounded != pytest.approx(exact, rel=1e-5)


def test_a_step_that_xla_optimizes_fully_gives_the_same_losses(finished_run, shards, tmp_path):
    """Other tests let XLA optimize less, which compiles sooner."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    arguments = run_flags(shards, tmp_path / "run", "--jit-compile", "true", "--per-replica-batch-size", "8")
    subprocess.run([sys.executable, PROJECT / "train" / "run_mlm.py", *arguments], env=environment, check=True)
    assert computed(tmp_path / "run")["jit_compile"]
    assert losses(tmp_path / "run") == pytest.approx(losses(finished_run), rel=1e-4)
