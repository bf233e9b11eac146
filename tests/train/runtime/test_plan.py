"""The numbers of a run."""

import dataclasses
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError
from tests.fixtures.plans import config_of, make_plan, phase_of
from train.config.learning import OptimizationConfig
from train.config.settings import RunConfig
from train.loop.phase import make_plans
from train.loop.report import describe_numbers, warn_of_other_batch
from train.loop.run import Run
from train.runtime.plan import Plan


def plan_of(num_rows=1000, num_replicas=1, run=None, **optimization):
    config = OptimizationConfig(**{"per_replica_batch_size": 8, **optimization})
    return make_plan(config, run or RunConfig(), num_rows=num_rows, max_length=128, num_replicas=num_replicas)


def test_a_plan_is_pinned():
    assert plan_of(max_steps=7, num_epochs=100).num_steps == 7
    plan = plan_of(num_replicas=4, gradient_accumulation_steps=2, num_epochs=3)
    assert (plan.global_batch_rows, plan.num_steps, plan.num_warmup_steps) == (64, 46, 2)
    assert (plan.eval_steps, plan.save_steps) == (5, 5)
    assert plan.num_tokens == 46 * 64 * 128
    assert plan.num_epochs == pytest.approx(2.944)
    text = describe_numbers(plan, num_parameters=2**30)
    assert text["parameters"] == "1,073,741,824"
    assert text["memory"].startswith("16.00 GiB")
    assert describe_numbers(plan, 2**30, num_with_one_moment=2**29)["memory"].startswith("14.00 GiB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "wsd", "warmup_steps": 81}, "--warmup-steps and --decay-ratio must fit into .* 100 .* 81 and 20"),
        ({"warmup_steps": 100}, "--warmup-steps must be below the run's 100 steps; received 100"),
        ({"run": RunConfig(profile="90:101")}, "--profile must end within the run's 100 steps; received 90:101"),
        ({"num_rows": 63, "num_replicas": 8}, "global batch of 64 rows .* 63 rows; lower"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        plan_of(max_steps=100, **settings)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"warmup_steps": 0}, (0, 0)),
        ({"warmup_ratio": 0.29}, (29, 0)),
        ({"warmup_ratio": 0.29, "warmup_steps": 7}, (7, 0)),
        ({"schedule": "wsd"}, (5, 20)),
        ({"schedule": "wsd", "decay_ratio": 0.95}, (5, 95)),
    ],
)
def test_warmup_and_decay_are_shares_of_the_run(settings, steps):
    plan = plan_of(max_steps=100, **settings)
    assert (plan.num_warmup_steps, plan.num_decay_steps) == steps


@pytest.mark.parametrize("profile", ["5", ":5", "5:5", "-1:5", "a:b"])
def test_a_profile_is_two_rising_numbers(profile):
    assert RunConfig().profiled_steps is None
    with pytest.raises(InputError, match="--profile must be START:STOP"):
        RunConfig(profile=profile)


@pytest.mark.parametrize(
    ("num_steps", "num_eval_rows", "eval_steps", "save_steps"),
    [
        (1000, 0, 100, 100),
        (1000, 200, 100, 100),  # an evaluation takes as long as 8.3 steps, ten of them 7.7 % of the time
        (1000, 400, 200, 100),
        (1000, 10_000, 1000, 100),  # at the end alone, whatever it costs
        (19, 0, 2, 2),
        (3, 0, 1, 1),
    ],
)
def test_ten_evaluations_take_a_tenth_of_the_time_at_most(num_steps, num_eval_rows, eval_steps, save_steps):
    config = OptimizationConfig(per_replica_batch_size=8, max_steps=num_steps)
    phase = phase_of(config, RunConfig(), 10**6, 128, num_eval_rows=num_eval_rows)
    (plan,) = make_plans([phase], num_replicas=1)
    assert (plan.eval_steps, plan.save_steps) == (eval_steps, save_steps)
    num_evaluations = plan.num_evaluations_after(0)
    assert num_evaluations <= 10
    assert num_evaluations == 1 or plan.evaluation_share(num_eval_rows) <= 0.1
    assert plan.num_evaluations_after(num_steps - 1) == 1
    assert plan.num_evaluations_after(num_steps) == 0


def test_all_phases_end_with_an_evaluation():
    phase = phase_of(OptimizationConfig(max_steps=15), RunConfig(eval_steps=10), 1000, 128, num_eval_rows=9)
    first, second = make_plans([phase, phase], num_replicas=1)
    assert [first.num_evaluations_after(step) for step in (0, 9, 10, 14)] == [2, 2, 1, 1]  # steps 10 and 15
    assert [second.num_evaluations_after(step) for step in (15, 19, 20, 29)] == [2, 2, 1, 1]  # steps 20 and 30


@pytest.mark.parametrize(("num_steps", "log_steps"), [(3, 1), (142, 2), (1100, 22), (2500, 50), (10**6, 50)])
def test_the_log_has_fifty_lines_or_one_each_fifty_steps(num_steps, log_steps):
    assert plan_of(max_steps=num_steps).log_steps() == log_steps


@pytest.mark.parametrize(
    ("num_rows", "fills_passes", "num_steps"), [(1000, False, 375), (1001, False, 375), (9, True, 6)]
)
def test_an_epoch_is_the_steps_of_a_pass_rounded_up(num_rows, fills_passes, num_steps):
    """So that three passes are evaluated and saved three times, the last time at the end."""
    settings = OptimizationConfig(per_replica_batch_size=8, num_epochs=3)
    run = RunConfig(eval_steps="epoch", save_steps="epoch", log_steps="epoch")
    phase = phase_of(settings, run, num_rows, 128, fills_passes=fills_passes, num_eval_rows=100)
    (plan,) = make_plans([phase], num_replicas=1)
    assert plan.num_steps == num_steps
    assert plan.eval_steps == plan.save_steps == plan.log_steps(run.log_steps) == -(-num_rows // 8)
    assert plan.num_evaluations_after(0) == 3


HALF = "Pass --per-replica-batch-size 16 --gradient-accumulation-steps 1 to keep it."


@pytest.mark.parametrize(
    ("num_replicas", "flags", "warning"),
    [
        (8, "", None),
        (4, "--gradient-accumulation-steps 8", None),
        (4, "--global-batch-size 512", None),
        (4, "", "512 rows instead of 1,024. Pass --gradient-accumulation-steps 8 to keep it."),
        (64, "", f"8,192 rows instead of 1,024. {HALF}"),
        (8, "--preset roberta-base", None),
        (2, "--preset tiny-cpu", f"64 rows instead of 32. {HALF}"),
    ],
)
def test_what_becomes_of_a_presets_batch(num_replicas, flags, warning, caplog):
    config = config_of("--preset", "roberta-base-v5e-8", *flags.split())
    plan = make_plan(config.optimization, config.run, num_rows=10**6, max_length=512, num_replicas=num_replicas)
    with caplog.at_level(logging.WARNING):
        warn_of_other_batch(config, plan)
    made_for = "tiny-cpu is tuned for 1 replica" if flags else "roberta-base-v5e-8 is tuned for 8 replicas"
    said = f"{made_for}; on {num_replicas} the global batch is {warning}"
    assert [record.getMessage() for record in caplog.records] == ([said] if warning else [])


@given(
    num_replicas=st.integers(1, 64),
    rows_at_once=st.integers(1, 9),
    num_micro_batches=st.integers(1, 5),
    num_rows=st.integers(1, 10**5),
    length=st.sampled_from([{"num_epochs": 1}, {"num_epochs": 7}, {"max_steps": 1}, {"max_steps": 1000}]),
    num_eval_rows=st.integers(0, 10**5),
)
def test_plans_of_any_number_of_replicas_agree_with_the_settings(
    num_replicas, rows_at_once, num_micro_batches, num_rows, length, num_eval_rows
):
    """And so do plans that are read from a record."""
    batch = {"per_replica_batch_size": rows_at_once, "gradient_accumulation_steps": num_micro_batches}
    optimization = OptimizationConfig(**batch, **length, warmup_steps=0)
    phase = phase_of(optimization, RunConfig(), num_rows, 128, num_eval_rows=num_eval_rows)
    batch_rows = num_replicas * rows_at_once * num_micro_batches
    if batch_rows > num_rows:
        with pytest.raises(InputError, match=f"global batch of {batch_rows:,} rows"):
            make_plans([phase], num_replicas)
        return
    (plan,) = make_plans([phase], num_replicas)
    assert (plan.num_replicas, plan.global_batch_rows) == (num_replicas, batch_rows)
    num_epochs = length.get("num_epochs")
    assert plan.num_steps == (num_epochs * num_rows // batch_rows if num_epochs else length["max_steps"])
    assert plan.row_after(plan.num_steps) == plan.num_steps * batch_rows
    assert plan.tokens_after(plan.num_steps) == plan.num_tokens == plan.num_steps * batch_rows * 128
    assert plan.eval_steps % plan.save_steps == 0
    assert Plan.from_record(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
    run = Run((phase,)).planned(num_replicas)
    assert run.plans == (plan,)
    assert run.planned(num_replicas) is run
