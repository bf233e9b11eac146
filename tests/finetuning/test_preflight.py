"""A dry run that asks the TPU's compiler about the step: lowered as it is, the compiler itself replaced."""

import re
from typing import Any

import pytest

from finetuning.run_classification import main
from tests.fixtures.tiny_classification import flags
from train.checks.preflight import preflight, tpu_compiler
from train.checks.preflight.tpu_compiler import CompiledStep

GIB = 2**30
HLO = """HloModule step

ENTRY %main.0 (x: s32[8,30]) -> f32[] {
  %fusion.1 = f32[8]{0} fusion(%x), metadata={op_name="m/layer_._0/attention/self/Softmax"}, "estimated_cycles":"300"
}
"""


@pytest.mark.slow
def test_the_step_on_the_longest_rows_is_compiled(tiny_start, tmp_path, monkeypatch, run):
    asked: list[str] = []

    def compile_for_tpu(stablehlo: str, *_: Any, **__: Any) -> CompiledStep:
        asked.append(stablehlo)
        return CompiledStep(GIB, GIB, GIB, GIB, 0, GIB, 1e9, 1e6, HLO, {"libtpu": "0.1"})

    monkeypatch.setattr(preflight, "compile_for_tpu", compile_for_tpu)
    monkeypatch.setattr(tpu_compiler, "check_compiler", lambda _: None)
    outcome = run(main, *flags(tiny_start, tmp_path / "run", "--dry-run", "--topology", "v5e-8"))
    assert outcome.status == 0
    (stablehlo,) = asked
    assert re.search(r"@main\(%arg0: tensor<8x30xi32>", stablehlo)
    assert "all_reduce" in stablehlo
    assert "8 rows x 30 tokens x 1 micro-batch x 8 replicas" in outcome.out
    assert re.search(r"modelled MFU +\d", outcome.out)
    assert not (tmp_path / "run").exists()
