import pytest

from mlm_common.errors import InputError
from train.config.settings import OptimizationConfig, RunConfig
from train.runtime.plan import make_plan


def plan_of(num_rows=1000, num_replicas=1, run=None, **optimization):
    config = OptimizationConfig(**{"per_replica_batch_size": 8, **optimization})
    return make_plan(config, run or RunConfig(), num_rows=num_rows, max_length=128, num_replicas=num_replicas)


def test_a_plan_is_pinned():
    plan = plan_of(num_replicas=4, gradient_accumulation_steps=2, num_epochs=3)
    assert (plan.global_batch_rows, plan.num_steps, plan.num_warmup_steps) == (64, 46, 2)
    assert (plan.eval_steps, plan.save_steps) == (4, 4)
    assert plan.num_tokens == 46 * 64 * 128
    assert plan.num_epochs == pytest.approx(2.944)
    text = plan.describe(num_parameters=2**30)
    assert text["parameters"] == "1,073,741,824"
    assert text["memory"].startswith("16.00 GiB")


def test_max_steps_wins_over_epochs():
    assert plan_of(max_steps=7, num_epochs=100).num_steps == 7


def test_warmup_may_be_turned_off():
    assert plan_of(warmup_steps=0).num_warmup_steps == 0


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"warmup_ratio": 0.29}, (29, 0)),
        ({"warmup_ratio": 0.29, "warmup_steps": 7}, (7, 0)),
        ({"schedule": "wsd"}, (5, 20)),
        ({"schedule": "wsd", "decay_ratio": 0.95}, (5, 95)),
    ],
)
def test_warmup_and_decay_are_shares_of_the_run(settings, steps):
    plan = plan_of(max_steps=100, **settings)
    assert (plan.num_warmup_steps, plan.num_decay_steps) == steps


def test_warmup_and_decay_must_fit_into_the_run():
    with pytest.raises(InputError, match=r"--warmup-steps and --decay-ratio must fit into .* 100 steps; .* 81 and 20"):
        plan_of(max_steps=100, schedule="wsd", warmup_steps=81)


def test_a_profile_must_end_within_the_run():
    assert plan_of(max_steps=100, run=RunConfig(profile="90:100")).num_steps == 100
    with pytest.raises(InputError, match=r"--profile must end within the run's 99 steps; received 90:100"):
        plan_of(max_steps=99, run=RunConfig(profile="90:100"))


@pytest.mark.parametrize("profile", ["5", "5:", ":5", "5:5", "6:5", "-1:5", "a:b", ""])
def test_a_profile_is_two_rising_numbers(profile):
    if profile:
        with pytest.raises(InputError, match="--profile must be START:STOP"):
            RunConfig(profile=profile)
    else:
        assert RunConfig().profiled_steps is None


def test_intervals_given_are_kept():
    plan = plan_of(run=RunConfig(eval_steps=5, save_steps=9))
    assert (plan.eval_steps, plan.save_steps) == (5, 9)


def test_a_batch_larger_than_the_data_set_is_refused():
    with pytest.raises(InputError, match=r"global batch of 64 rows .* 63 rows; lower"):
        plan_of(num_rows=63, num_replicas=8)


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(InputError, match=r"--warmup-steps must be below the run's 10 steps; received 10"):
        plan_of(max_steps=10, warmup_steps=10)
