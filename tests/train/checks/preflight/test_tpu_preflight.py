"""The preflight from its flags to what it prints; the compiler itself is asked in test_tpu_preflight_compiler.py."""

import re

import pytest
import yaml

from mlm_common.cli.console import two_digits
from tests.fixtures.tiny_run import MODEL, write_shards
from train import tpu_preflight
from train.checks.preflight import preflight
from train.checks.preflight.hlo_costs import INTERCONNECT_BYTES_PER_SECOND, Operation, StepCosts
from train.checks.preflight.report import (
    StepReport,
    fits,
    planned_time,
    print_batches,
    print_report,
    report_lines,
    synthetic_inputs,
)
from train.checks.preflight.tpu_compiler import CompiledStep, DoesNotFitError, tpu_slice
from train.config.learning import MaskingConfig
from train.layers import tpu_layers
from train.runtime.machines import CHIPS
from train.step import sharding
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tpu_preflight import main

GIB = 2**30
BYTES_PER_ROW = GIB // 4
HLO = """HloModule step

ENTRY %main.0 (x: s32[8,16]) -> f32[] {
  %fusion.1 = f32[8]{0} fusion(%x), metadata={op_name="m/layer_._0/attention/self/Softmax"}, "estimated_cycles":"300"
  %fusion.2 = f32[8]{0} fusion(%x), metadata={op_name="AdamW/Sub"}, "estimated_cycles":"100"
}
"""


def compiled_step(rows=8, hlo=HLO):
    bytes_of = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes"), 2 * GIB)
    bytes_of |= dict.fromkeys(("temp_bytes", "peak_bytes"), BYTES_PER_ROW * rows) | {"generated_code_bytes": GIB // 2}
    versions = {"jax": "0.10", "libtpu": "0.1"}
    return CompiledStep(**bytes_of, num_flops=1e9, num_bytes_accessed=1e6, hlo=hlo, versions=versions)


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that knows how many rows a step takes, and for which memory is a quarter GiB a row; its questions."""
    asked = []

    def compile_for_tpu(stablehlo, tpu, *, python, what):  # noqa: ARG001
        rows, length = map(int, re.search(r"@main\(%arg0: tensor<(\d+)x(\d+)xi32>", stablehlo).groups())
        asked.append((rows, length, tpu.name))
        compiled = compiled_step(rows)
        if compiled.memory_bytes > tpu.chip.usable_memory_bytes:
            raise DoesNotFitError(compiled.memory_bytes, tpu.chip.usable_memory_bytes)
        return compiled

    monkeypatch.setattr(preflight, "compile_for_tpu", compile_for_tpu)
    monkeypatch.setattr(tpu_preflight, "check_compiler", lambda _: None)
    return asked


@pytest.fixture
def quick_lowering(monkeypatch):
    """Lowering that only gives the rows, where the step itself does not matter."""

    def lower_train_step(model, *, num_rows, length, num_replicas):  # noqa: ARG001
        return f"@main(%arg0: tensor<{num_rows}x{length}xi32>"

    monkeypatch.setattr(preflight, "lower_train_step", lower_train_step)


def flags(*extra_flags, topology="v5e-8"):
    return ["--topology", topology, "--preset", "tiny-roberta-cpu", "--config-overrides", MODEL, *extra_flags]


ASSUMED = ("--max-length", "16", "--vocab-size", "100")


@pytest.mark.usefixtures("quick_lowering")
def test_a_step_before_there_are_shards(compiler, run):
    batch = ("--per-replica-batch-size", "4", "--gradient-accumulation-steps", "2")
    status, printed, _ = run(main, *flags(*ASSUMED, *batch, "--max-steps", "1000"))
    assert status == 0
    assert compiler == [(8, 16, "v5e-8")]  # both micro-batches
    assert "Modelled by the TPU's compiler (jax 0.10, libtpu 0.1)" in printed
    assert printed.startswith(
        "It fits: 4.5 of 15.8 GiB per chip. 1,000 steps would take less than a minute (modelled).\n"
    )
    assert "For two programs on a v4, published times are within about 20%" in printed
    milliseconds = re.search(r"\nWith --modelled-step-ms ([\d.e-]+) the run compares", printed)[1]
    assert re.search(r"modelled step time +([\d.e-]+) ms", printed)[1] == two_digits(float(milliseconds))
    assert "4 rows x 16 tokens x 2 micro-batches x 8 replicas = 1,024 tokens" in printed
    assert re.search(r"75\.0%      0\.00 M  attention\n 25\.0%      0\.00 M  optimizer", printed)


@pytest.mark.usefixtures("quick_lowering")
def test_a_step_of_shards(compiler, run, tmp_path):
    shards = write_shards(tmp_path)
    shard_flags = ("--train-dataset", shards / "train", "--per-replica-batch-size", "1")
    outcome = run(main, *flags(*shard_flags, topology="v4-8"))
    assert compiler == [(1, 16, "v4-8")]
    assert re.match(r"It fits: .* per chip\. 1 epoch \(\d+ steps\) would take", outcome.out)


@pytest.mark.usefixtures("quick_lowering")
def test_each_phase_before_there_are_shards(compiler, run, tmp_path):
    phases = [
        {"name": "short", "train_dataset": "none/16", "max_length": 16, "max_steps": 9},
        {"name": "long", "train_dataset": "none/32", "max_length": 32, "max_steps": 3, "per_replica_batch_size": 2},
    ]
    settings = {"per_replica_batch_size": 4, "global_batch_size": 64, "warmup_steps": 5}
    (tmp_path / "phases.yaml").write_text(yaml.safe_dump({"settings": settings, "phases": phases}), encoding="utf-8")
    printed = run(main, *flags("--phases", tmp_path / "phases.yaml", "--vocab-size", "100")).out
    assert compiler == [(8, 16, "v5e-8"), (8, 32, "v5e-8")]
    assert "\nshort\n" in printed
    assert "4 rows x 16 tokens x 2 micro-batches x 8 replicas" in printed
    assert "2 rows x 32 tokens x 4 micro-batches x 8 replicas" in printed.partition("\nlong\n")[2]
    assert re.search(r"\. 3 steps would take less than a minute", printed)


def test_a_dry_run_compiles_nothing_and_needs_no_compiler(compiler, run, monkeypatch):
    monkeypatch.delattr(tpu_preflight, "check_compiler")
    monkeypatch.delattr(preflight, "build_preflight")
    batch = ("--per-replica-batch-size", "4", "--global-batch-size", "64", "--max-steps", "1000")
    printed = run(main, *flags(*ASSUMED, *batch, "--dry-run")).out
    assert compiler == []
    assert "v5e-8: 8 chips, 8 replicas" in printed
    assert "4 rows x 16 tokens x 2 micro-batches x 8 replicas = 1,024 tokens" in printed
    assert "1,000 steps, 1,024,000 tokens" in printed
    assert "Nothing was compiled" in printed


@pytest.mark.usefixtures("quick_lowering")
def test_the_largest_batch_is_searched(compiler, run):
    printed = run(main, *flags(*ASSUMED, "--find-batch-size", "--per-replica-batch-size", "16")).out
    assert [rows for rows, *_ in compiler] == [16, 32, 48, 56]  # (15.75 - 2.5) GiB hold 53 rows
    assert printed.startswith("The largest batch that fits is --per-replica-batch-size 48. 1,000 steps would take")
    assert re.search(r"\n +48 14\.50 .*\n +56 16\.50   does not fit\n", printed)
    assert "48 rows x 16 tokens" in printed


@pytest.mark.usefixtures("quick_lowering")
@pytest.mark.parametrize(
    ("bytes_per_row", "batch_flags", "message"),
    [
        (GIB // 4, "--per-replica-batch-size 64", "the largest per-replica batch that fits is about 48"),
        (10 * GIB, "--per-replica-batch-size 8 --global-batch-size 64", "82.5 of 15.8 GiB per chip, and a"),
        (10 * GIB, "--find-batch-size", "Not even 8 rows of 16 tokens fit into a chip of v5e-8"),
    ],
)
def test_a_step_that_does_not_fit(compiler, run, monkeypatch, bytes_per_row, batch_flags, message):
    monkeypatch.setitem(globals(), "BYTES_PER_ROW", bytes_per_row)
    outcome = run(main, *flags(*ASSUMED, *batch_flags.split()))
    assert len(compiler) == 1 or batch_flags == "--find-batch-size"
    assert outcome.status == 1
    assert message in outcome.err
    if bytes_per_row == GIB // 4:
        assert "--per-replica-batch-size 32 --gradient-accumulation-steps 2 keeps the global batch" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--topology v5e-8 --max-length 16", "before you have shards, --max-length and --vocab-size"),
        ("--topology v5e-8 --train-dataset x --vocab-size 16", "only for a preflight without shards"),
        ("--topology v9-8 --max-length 16 --vocab-size 100", "there is no TPU slice v9-8. The slices are v2-8"),
        ("--topology v5e-8 --max-length 16 --vocab-size 5", "--vocab-size must be above the 5"),
    ],
)
def test_bad_input_is_refused(compiler, run, arguments, message):
    assert message in run(main, "--preset", "tiny-roberta-cpu", *arguments.split()).refusal
    assert compiler == []


def test_synthetic_inputs_have_the_projects_special_ids():
    inputs = synthetic_inputs(max_length=32, vocab_size=50)
    rule = MaskedLanguageModeling.of(inputs, MaskingConfig()).evaluation_rule
    assert (rule.vocabulary_size, rule.mask_token_id, rule.special_ids) == (50, 4, (0, 1, 2, 3, 4))
    assert MaskedLanguageModeling.of(inputs, MaskingConfig(masking="whole_word")).rule.word_starts.all()


def report(**changes):
    operations = (Operation("m/layer_._#/attention/self/Softmax", "attention", 1_500_000), Operation("x", "other", 0))
    costs = StepCosts(operations, num_not_estimated=3, num_loops_of_unknown_length=0)
    fields = {"rows": 16, "length": 512, "num_micro_batches": 4, "needed_flops": 10**11, "num_steps": 86_400_000}
    return StepReport(**{"tpu": tpu_slice("v3-8"), "compiled": compiled_step(16), "costs": costs, **fields, **changes})


def test_figures_of_a_step_are_pinned():
    step = report(tpu=tpu_slice("v5e-8"))
    assert step.seconds == pytest.approx(1e-3)
    assert step.replica_tokens == 4 * 16 * 512
    assert step.slice_tokens_per_second == pytest.approx(8 * 4 * 16 * 512 / 1e-3)
    assert step.peak_fraction == pytest.approx(1e11 / 1e-3 / 197e12)
    lines = report_lines(step)
    assert lines["memory per chip"] == "6.50 of 15.75 GiB, 9.25 free"
    assert lines["operations"].startswith("0.004 TFLOP")
    assert fits(step) == "It fits: 6.5 of 15.8 GiB per chip."
    assert planned_time(step) == "86,400,000 steps would take about 1 day (modelled)."
    assert lines["modelled tokens/s"] == "33,000,000 per chip, 260,000,000 for the slice"
    assert lines["between chips"] == "nothing"
    assert "loops" not in lines


def test_what_goes_between_chips_is_modelled():
    def line(topology, **collectives):
        return report_lines(report(tpu=tpu_slice(topology), collectives=collectives))["between chips"]

    gigabyte = 10**9
    assert line("v5e-8", all_reduce=gigabyte) == (
        "1.75 GB sent by each chip (all-reduce of 1.00 GB): at least 8.8 ms at the published 200 GB/s, modelled"
    )
    both = line("v3-8", all_reduce=gigabyte // 10, reduce_scatter=gigabyte, all_gather=gigabyte)  # of 4 chips
    assert both.startswith("1.65 GB sent by each chip (all-reduce of 0.10 GB, reduce-scatter of 1.00 GB, all-gather of")
    assert line("v5e-1", all_reduce=gigabyte) == "nothing"
    assert INTERCONNECT_BYTES_PER_SECOND.keys() == CHIPS.keys()


@pytest.mark.slow
def test_a_step_with_a_sharded_optimizer_is_compared_with_one_without(run, monkeypatch):
    compiled = []

    def compile_for_tpu(stablehlo, *_, **__):
        compiled.append("stablehlo.reduce_scatter" in stablehlo)
        if limit_bytes and not compiled[-1]:
            raise DoesNotFitError(20 * GIB, limit_bytes)
        return compiled_step()

    lowered: dict[bool, str] = {}

    def lower_once(model, **sizes):
        if (is_sharded := model.optimizer.sharding is not None) not in lowered:
            lowered[is_sharded] = lower_train_step(model, **sizes)
        return lowered[is_sharded]

    lower_train_step = preflight.lower_train_step
    monkeypatch.setattr(preflight, "lower_train_step", lower_once)
    monkeypatch.setattr(preflight, "compile_for_tpu", compile_for_tpu)
    monkeypatch.setattr(tpu_preflight, "check_compiler", lambda _: None)
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 512)
    for limit_bytes in (0, 15 * GIB):
        outcome = run(main, *flags(*ASSUMED, "--max-steps", "10", "--shard-optimizer"))
        assert outcome.status == 0
        sharded, whole = outcome.out.split("\nthe same step without --shard-optimizer\n")
        assert "reduce-scatter of" in sharded
        if limit_bytes:
            assert whole.startswith("It does not fit: the step needs 20.00 GiB")
        else:
            assert whole.startswith("memory per chip      4.50 of 15.75 GiB")
            assert "reduce-scatter" not in whole
            assert re.search(r"between chips +0.00 GB sent by each chip \(all-reduce of 0.00 GB\)", whole)
    assert compiled == [True, False] * 2


def test_a_step_accepted_just_about_has_no_head_room():
    step = report(tpu=tpu_slice("v3-8"), compiled=compiled_step(60))
    accepted = "17.50 of 15.48 GiB, which the compiler accepts: at most 15.00 are in use at one time"
    assert report_lines(step)["memory per core"] == accepted
    assert fits(step) == "It only just fits into the 15.5 GiB per core: leave some room."


def test_what_is_not_known_of_a_step_is_said_and_smaller_batches_of_the_same_cycles_are_faster(capsys):
    costs = StepCosts((Operation("copy", "copies", 1000),), 0, num_loops_of_unknown_length=1)
    print_report(report(needed_flops=None, num_steps=None, costs=costs), with_operations=True)
    printed = capsys.readouterr().out
    for text in ("not known for this architecture", " 1,000 steps would take", "1 of unknown length", "copies"):
        assert text in printed
    print_batches({16: report(), 24: report(rows=24, num_micro_batches=2)})
    assert "16 rows are the fastest of these; raise --gradient-accumulation-steps" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_lowering", "compiler")
def test_the_model_is_that_of_a_run_on_a_tpu(monkeypatch):
    built = []
    build_model = preflight.build_model

    def remember(config, *others):
        model = build_model(config, *others)
        built.append((config, model.network))
        return model

    monkeypatch.setattr(preflight, "build_model", remember)
    assert main(flags(*ASSUMED, "--no-tpu", "--max-steps", "10", "--bfloat16")) == 0
    ((config, network),) = built
    assert config.hardware.wants_tpu
    assert network.encoder.functions is tpu_layers
