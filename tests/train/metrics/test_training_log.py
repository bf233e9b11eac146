import dataclasses
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.fixtures.tiny_models import tiny_config
from train.config.learning import DataConfig, MaskingConfig, ModelConfig, OptimizationConfig
from train.config.settings import HardwareConfig, RunConfig, TrainingConfig
from train.metrics.training_log import Throughput, TrainingDivergedError, TrainingLog
from train.model.flops import full_speed_step_seconds, step_flops
from train.runtime.machines import ACCELERATOR_TYPE_VARIABLE, CHIPS
from train.runtime.plan import PhaseToPlan, make_plan, make_plans


def config_of(**hardware):
    return TrainingConfig(
        DataConfig(train_dataset="shards"),
        ModelConfig(),
        MaskingConfig(),
        OptimizationConfig(per_replica_batch_size=4, gradient_accumulation_steps=3, max_steps=10),
        HardwareConfig(**hardware),
        RunConfig(output_dir="run"),
    )


def plan_of(config):
    return make_plan(config.optimization, config.run, num_rows=1000, max_length=16, num_replicas=8)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_rates_are_over_training_alone(clock):
    throughput = Throughput(plan_of(config_of()), full_speed_step_seconds=0.1)
    clock[0] += 3
    with throughput.clock_stopped():
        clock[0] += 10
    clock[0] += 1
    assert throughput.figures(num_steps=8, wait_seconds=1.0) == {
        "step_seconds": 0.5,
        "tokens_per_second": 2 * 96 * 16,
        "input_wait_share": 0.25,
        "mfu": 0.2,
    }
    clock[0] += 2
    figures = throughput.figures(num_steps=2, wait_seconds=0.0)
    assert (figures["step_seconds"], figures["input_wait_share"], figures["mfu"]) == (1.0, 0.0, 0.1)


def test_without_a_known_chip_there_is_no_share_of_its_peak(clock):
    throughput = Throughput(plan_of(config_of()), None)
    clock[0] += 1
    assert "mfu" not in throughput.figures(num_steps=1, wait_seconds=0.0)


def test_full_speed_is_that_of_all_replicas(monkeypatch):
    monkeypatch.setenv(ACCELERATOR_TYPE_VARIABLE, "v3-8")
    config = config_of(tpu_name="local")
    flops = step_flops(tiny_config("roberta"), num_rows=96, length=16, num_predictions=24 * 10)
    seconds = full_speed_step_seconds(config, tiny_config("roberta"), plan_of(config), num_predictions=10)
    assert seconds == pytest.approx(flops / 8 / CHIPS["v3"].peak_flops_per_second)


@pytest.mark.parametrize(
    ("hardware", "accelerator_type", "model"),
    [({}, "v3-8", "roberta"), ({"tpu_name": "mine"}, "v3-8", "roberta"), ({"tpu_name": "local"}, "v9-8", "roberta"),
     ({"tpu_name": "local"}, "v3-8", "convbert")],
)  # fmt: skip
def test_full_speed_of_what_is_not_known(monkeypatch, hardware, accelerator_type, model):
    monkeypatch.setenv(ACCELERATOR_TYPE_VARIABLE, accelerator_type)
    config = config_of(**hardware)
    assert full_speed_step_seconds(config, tiny_config(model), plan_of(config), num_predictions=10) is None


def test_losses_rise_within_a_phase():
    config = config_of()
    lines = [{"step": step, "split": "train", "loss": 1.0} for step in range(1, 6)]
    phase = PhaseToPlan(dataclasses.replace(config.optimization, max_steps=5), config.run, 1000, 16)
    first, second = make_plans((phase, phase), 8)
    for plan, is_refused in ((first, True), (second, False)):
        written = SimpleNamespace(lines=lines, is_chief=False)
        about = {"start_step": 5, "logged_step": 5, "num_skipped_rows": 0, "max_loss_rise": 1.0}
        log = TrainingLog(None, written, plan, **about, take_wait_seconds=lambda: 0.0, throughput=None)
        with pytest.raises(TrainingDivergedError) if is_refused else nullcontext():
            log._check_rise(6, 9.0)
