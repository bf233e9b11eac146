"""What a run prints of its start and end."""

import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from mlm_common.cli.command_line import parse_arguments
from tests.fixtures.plans import config_of
from train.fill_mask import FillMaskConfig
from train.loop.phase import Phase
from train.loop.report import cpu_seconds, describe_baseline, describe_time_on_cpu, print_result
from train.tasks.masked_lm import MaskedLanguageModeling

FIGURES = {"loss": 5.89, "perplexity": 361.0, "masked_accuracy": 0.145, "num_masked_tokens": 900}


def test_the_next_command_is_one_that_parses(capsys):
    task = MaskedLanguageModeling.__new__(MaskedLanguageModeling)
    assert task.summarize(FIGURES) == "loss 5.89  accuracy 14.5%"
    phase: Any = SimpleNamespace(task=task, inputs=SimpleNamespace(unigram_entropy_nats=6.41))
    print_result(phase, FIGURES, {"exported": "step 3 of 3", "model": "my runs/it's/export"})
    printed = capsys.readouterr().out
    copying = "copying the tokens that masking leaves unchanged can gain 0.64"
    assert f"frequency baseline     6.41  the model is 0.52 below it; {copying}\n" in printed
    assert describe_baseline(6.5, 6.5) == "6.50  the model is not below it yet"
    assert describe_baseline(6.5, 5.54) == "6.50  the model is 0.96 below it, because it uses context"
    assert "exported               step 3 of 3" in printed
    python, script, *argv = shlex.split(printed.partition("next: ")[2])
    assert (python, script) == ("python", "train/fill_mask.py")
    (config,) = parse_arguments((FillMaskConfig,), argv, "")
    assert config.model == "my runs/it's/export"
    assert "[MASK]" in config.text[0]


def test_the_loss_of_a_source_is_compared_with_its_baseline():
    task = MaskedLanguageModeling.__new__(MaskedLanguageModeling)
    task.baselines = {"de": 6.3, "en": 5.8}
    figures = FIGURES | {"loss_de": 5.98, "loss_en": 5.97, "loss_zh": 6.77}
    shown = "  de 5.98 (0.32 below its baseline)  en 5.97 (0.17 above its baseline)  zh 6.77"
    assert task.summarize(figures).endswith(shown)
    described = task.describe(figures)
    assert [described[f"loss of {name}"] for name in ("de", "zh")] == ["5.9800 (0.32 below its baseline)", "6.7700"]


@pytest.mark.parametrize(("preset", "advises"), [("roberta-base", True), ("tiny-cpu", False)])
def test_a_long_run_on_a_cpu_is_warned_of_before_it_starts(preset, advises, monkeypatch):
    monkeypatch.setattr("train.loop.report.planned_step_flops", lambda *_: 10**13)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    phase: Any = Phase.__new__(Phase)
    task = SimpleNamespace(card=SimpleNamespace(predicts_tokens=True), num_predictions=lambda _: 1)
    phase.__dict__.update(
        config=config_of("--preset", preset), task=task, inputs=SimpleNamespace(num_eval_rows=0), model_config=None
    )
    plan: Any = SimpleNamespace(num_steps=100, max_length=8, evaluation_share=lambda _: 0.0)
    assert cpu_seconds(100 * 10**13) == 10_000
    text = describe_time_on_cpu(phase, plan, step=0)["time"]
    assert text.startswith("about 2.8 hours on this CPU, estimated")
    assert ("--preset tiny-cpu" in text) == advises
    assert ("train/tpu_preflight.py --topology v5e-8 --dry-run" in text) == advises
    assert describe_time_on_cpu(phase, plan, step=99)["time"] == "about 1.7 minutes on this CPU, estimated"
    assert describe_time_on_cpu(phase, plan, step=100) == {}
