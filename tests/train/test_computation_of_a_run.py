"""What a run decides of how it is computed, and that it stays so when it resumes: on a CPU, also in a TPU's place."""

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run
from tests.fixtures.tiny_run import NUM_STEPS, forget_checkpoint, run_flags
from train import has_bfloat16_instructions
from train.model.computation import Computation
from train.run_mlm import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

DROPOUT = ("--dropout", "0.1")
TPU = (*DROPOUT, "--tpu-name", "local")


def computed(run: Path) -> dict[str, Any]:
    return read_json(run / "run.json")["computation"]


@pytest.mark.usefixtures("cpu_as_tpu")
def test_right_layers_are_used_on_a_tpu_from_start_to_end(shards, tmp_path, monkeypatch, caplog, capsys):
    with caplog.at_level(logging.INFO):
        assert main(run_flags(shards, tmp_path / "run", *TPU, "--modelled-step-ms", "0.5")) == 0
    assert "TPU-optimized layers are used; on the first rows they give loss 4." in caplog.text
    printed = capsys.readouterr().out
    assert "computation            compiled with XLA, TPU-optimized layers" in printed
    found = re.search(
        r"^([\d.]+) ms a step measured, 0\.5 ms modelled, measured / modelled ([\d.]+): (.*)", printed, re.M
    )
    assert float(found[2]) == pytest.approx(float(found[1]) / 0.5, rel=0.01)
    assert found[3].startswith("TPU v3-8, roberta, ")
    assert "parameters, compiled with XLA, TPU-optimized layers, float32, 4 rows x 1 x " in found[3]
    assert computed(tmp_path / "run") == dataclasses.asdict(Computation(True, True))
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "compiled with XLA, TPU-optimized layers" in card

    monkeypatch.setattr("train.step.proofs.prove_tpu_layers", lambda *_: pytest.fail("the layers were compared"))
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    forget_checkpoint(tmp_path / "resumed", NUM_STEPS)
    assert main(run_flags(shards, tmp_path / "resumed", *TPU)) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "run")
    printed = capsys.readouterr().out
    assert "because of --" not in printed
    assert "ms a step measured, not modelled (tpu_preflight.py): TPU v3-8" in printed


@pytest.mark.usefixtures("cpu_as_tpu")
def test_wrong_layers_are_not_used_on_a_tpu(shards, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr("train.layers.tpu_layers.attend", lambda query, *_, **__: 1.1 * query)
        assert main(run_flags(shards, tmp_path / "run", *TPU)) == 0
    assert "The run trains with the REFERENCE LAYERS: the TPU-optimized ones give loss " in caplog.text
    assert computed(tmp_path / "run") == dataclasses.asdict(Computation(True, False))

    assert main(run_flags(shards, tmp_path / "off", *TPU, "--tpu-layers", "off")) == 0
    assert_same_run(tmp_path / "off", tmp_path / "run")


@pytest.mark.skipif(not has_bfloat16_instructions(), reason="this CPU does not multiply bfloat16")
def test_without_xla_a_run_multiplies_in_bfloat16(shards, tmp_path):
    losses = {}
    for name, flag in (("exact", "--jit-compile=false"), ("rounded", "--bfloat16")):
        assert main(run_flags(shards, tmp_path / name, flag)) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert losses["rounded"] == pytest.approx(losses["exact"], rel=0.005)
    assert losses["rounded"] != losses["exact"]
