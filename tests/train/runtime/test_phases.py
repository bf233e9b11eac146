"""Phases as they are read, planned, told apart and refused; tests/train/test_phases.py trains some."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import tensorflow as tf
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError
from tests.fixtures.plans import config_of, phase_of
from tests.fixtures.tiny_phases import phases_flags, phases_with
from train.checkpoints.resume import ResumePoint, check_checkpoint, fingerprint_of_phases
from train.config.phases import PhaseSettings, phases_of
from train.config.settings import parse_training_config
from train.loop.lifecycle import Pretraining
from train.loop.phase import make_plans
from train.loop.report import describe_plan
from train.runtime.machines import Cluster
from train.runtime.plan import Plan
from train.runtime.run_folder import RunFolder
from train.step.schedule import build_schedule

FLAGS = ["--train-dataset", "shards", "--output-dir", "run", "--warmup-steps", "3"]


def phases_in(folder, *phases, settings=None, flags=FLAGS) -> tuple[PhaseSettings, ...]:
    return phases_in_file(folder, yaml.safe_dump({"settings": settings or {}, "phases": phases}), flags)


def phases_in_file(folder, content, flags=FLAGS) -> tuple[PhaseSettings, ...]:
    (folder / "phases.yaml").write_text(content, encoding="utf-8")
    return phases_of(parse_training_config([*flags, "--phases", str(folder / "phases.yaml")], ""))


def plans_of(phases, num_rows=1000, num_replicas=1) -> tuple[Plan, ...]:
    to_plan, before = [], None
    for phase in phases:
        config = phase.config
        settings = {"has_separate_schedule": phase.has_separate_schedule, "name": phase.name}
        settings["continues_rows"] = config.data.train_dataset == before
        before = config.data.train_dataset
        to_plan.append(phase_of(config.optimization, config.run, num_rows, config.data.max_length or 16, **settings))
    return make_plans(to_plan, num_replicas)


def rates(phases, plans):
    step_rates = []
    for phase, plan in zip(phases, plans, strict=True):
        schedule = build_schedule(phase.config.optimization, **plan.schedule_steps)
        step_rates += schedule(tf.range(plan.first_step, plan.num_steps)).numpy().tolist()
    return step_rates


def test_settings_of_the_file_stand_between_preset_and_flags(tmp_path):
    settings = {"preset": "roberta-small", "adam-beta1": 0.8, "learning_rate": 0.5}
    (phase,) = phases_in(tmp_path, {"max_steps": 9}, settings=settings, flags=[*FLAGS, "--learning-rate", "0.25"])
    optimization = phase.config.optimization
    assert (optimization.adam_beta1, optimization.learning_rate, optimization.max_steps) == (0.8, 0.25, 9)
    assert (optimization.gradient_accumulation_steps, phase.config.model.preset) == (8, "roberta-small")
    assert not phase.has_separate_schedule


def test_a_phase_has_what_it_names_and_else_what_the_run_has(tmp_path):
    first, second = phases_in(
        tmp_path,
        {"max_steps": 10},
        {"name": "long", "num-epochs": 2, "train_dataset": "long", "learning_rate": "1e-5", "mlm_probability": 0.3}
        | {"config_overrides": "rope_theta=5.0"},
        flags=[*FLAGS, "--config-overrides", "num_hidden_layers=2"],
    )
    overrides = [phase.config.model.config_overrides for phase in (first, second)]
    assert overrides == ["num_hidden_layers=2", "num_hidden_layers=2,rope_theta=5.0"]
    assert (first.name, second.name) == ("phase 1", "long")
    assert (first.config.data.train_dataset, second.config.data.train_dataset) == ("shards", "long")
    assert (second.config.optimization.learning_rate, second.config.masking.mlm_probability) == (1e-5, 0.3)
    assert (second.has_separate_schedule, second.config.optimization.warmup_steps) == (True, 0)
    assert first.config.optimization.warmup_steps == 3


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"max_steps": 1, "seed": 3}, "Phase `phase 2`: --seed must be the same in all phases; .* received 3"),
        ({"max_steps": 1, "sceed": 3}, "unknown flag sceed; did you mean --seed"),
        ({"mlm_probability": 0.3}, "--max-steps or --num-epochs, but not both, is required in each phase"),
        ({"max_steps": 1, "mlm_probability": 2}, "Phase `phase 2`: --mlm-probability must be above 0 and at most 1"),
        ({"max_steps": 1, "config_overrides": "num_hidden_layers=3"}, "may only change settings that do not affect w"),
    ],
)
def test_what_a_phase_may_not_have(tmp_path, settings, rule):
    with pytest.raises(InputError, match=rule):
        phases_in(tmp_path, {"max_steps": 1}, settings)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        *((content, "") for content in ("", "3", "phases: []", "phases: {}", "steps: [1]", "[]", "[3]")),
        ("{scale: .inf, phases: [{max_steps: 3}]}", r"must have a `scale` above 0 and at most 1,000; received inf"),
        ("{scale: 0.1, phases: [{num_epochs: 3}]}", "does not multiply num_epochs; .* scale of 0.1 and num_epochs: 3"),
        ("[{max_steps: 3, max_steps: 4}]", "`max_steps` is given twice"),
        ("[{max_steps: 3, max-steps: 4}]", "must name each flag only once"),
        ("[{name: '', max_steps: 3}]", "must have text for the `name` of a phase; received ''"),
    ],
)
def test_values_in_the_file_that_cannot_be_meant(tmp_path, content, rule):
    with pytest.raises(InputError, match=rf"phases\.yaml.* {rule}" if rule else r"phases\.yaml"):
        phases_in_file(tmp_path, content)


@pytest.mark.parametrize(("scale", "steps", "expected"), [(0.1, 25, 2), (0.1, 1, 1), (2, "'15'", 30), (1, "'15'", 15)])
def test_the_scale_multiplies_steps_however_they_are_written(tmp_path, scale, steps, expected):
    (phase,) = phases_in_file(tmp_path, f"{{scale: {scale}, phases: [{{name: 1, max_steps: {steps}}}]}}")
    assert (phase.name, phase.config.optimization.max_steps) == ("1", expected)
    (phase,) = phases_in_file(tmp_path, "{scale: 1.0, phases: [{num_epochs: 3}]}")
    assert phase.config.optimization.num_epochs == 3


def test_the_length_is_that_of_the_phases(tmp_path):
    for flag in ("--max-steps", "--num-epochs"):
        with pytest.raises(InputError, match=f"{flag} must be left out with --phases"):
            phases_in(tmp_path, {"max_steps": 1}, flags=[*FLAGS, flag, "3"])


def test_one_schedule_spans_the_phases_without_a_separate_one(tmp_path):
    phases = phases_in(tmp_path, {"max_steps": 900}, {"max_steps": 100, "train_dataset": "long"})
    alone = phases_in(tmp_path, {"max_steps": 1000})
    together = rates(phases, plans_of(phases))
    assert together == rates(alone, plans_of(alone))
    assert together[:3] == pytest.approx([1e-4 / 3, 2e-4 / 3, 1e-4])
    assert together[-1] == pytest.approx(1e-4 / 997)


def test_a_schedule_of_its_own_begins_and_ends_with_the_phase(tmp_path):
    own = {"learning_rate": 4e-5, "schedule": "wsd", "decay_ratio": 1.0}
    phases = phases_in(tmp_path, {"max_steps": 5, "schedule": "constant"}, {"max_steps": 4, **own})
    falling = [4e-5 * (1 - (step / 4) ** 0.5) for step in range(4)]
    assert rates(phases, plans_of(phases)) == pytest.approx([1e-4 / 3, 2e-4 / 3, 1e-4, 1e-4, 1e-4, *falling])


def test_a_warmup_of_a_later_phase_is_named_by_it(tmp_path):
    phases = phases_in(tmp_path, {"max_steps": 5}, {"max_steps": 10, "learning_rate": 1.0, "warmup_ratio": 0.4})
    assert plans_of(phases)[1].num_warmup_steps == 4
    with pytest.raises(InputError, match=r"Phase `phase 2`: --warmup-steps must be below the run's 2 steps"):
        plans_of(phases_in(tmp_path, {"max_steps": 5}, {"max_steps": 2, "warmup_steps": 2}))


def test_the_global_batch_says_how_much_is_accumulated(tmp_path):
    settings = {"per_replica_batch_size": 4, "global_batch_size": 64, "warmup_ratio": 0.0}
    flags = FLAGS[:4]
    (phase,) = phases_in(tmp_path, {"max_steps": 1}, settings=settings, flags=flags)
    for num_replicas, num_micro_batches in ((1, 16), (2, 8), (16, 1)):
        (plan,) = plans_of([phase], num_replicas=num_replicas)
        assert (plan.global_batch_rows, plan.num_micro_batches) == (64, num_micro_batches)
    for num_replicas in (3, 32):
        with pytest.raises(InputError, match=rf"must be a multiple of the {4 * num_replicas} rows that {num_replicas}"):
            plans_of([phase], num_replicas=num_replicas)
    with pytest.raises(InputError, match=r"--gradient-accumulation-steps is computed from --global-batch-size: .* 2"):
        phases_in(tmp_path, {"max_steps": 1, "gradient_accumulation_steps": 2}, settings=settings)
    (phase,) = phases_in(
        tmp_path, {"max_steps": 1, "global_batch_size": 64}, settings={"gradient_accumulation_steps": 3}, flags=flags
    )
    assert plans_of([phase], num_replicas=2)[0].global_batch_rows == 64


@given(
    phases=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.sampled_from([8, 32])), min_size=1, max_size=5),
    num_rows=st.integers(9, 50),
)
def test_phases_use_rows_and_tokens_as_their_steps_do(phases, num_rows):
    """Rows of one data set are used in their order, without a gap, until a phase has another."""
    config, to_plan = config_of(), []
    for index, (num_steps, batch_rows, length) in enumerate(phases):
        settings = {"max_steps": num_steps, "per_replica_batch_size": batch_rows, "warmup_steps": 0}
        optimization = SimpleNamespace(**{**vars(config.optimization), **settings})
        same = index > 0 and phases[index - 1][2] == length
        to_plan.append(phase_of(optimization, config.run, num_rows, length, continues_rows=same))
    plans = make_plans(to_plan, 1)
    row = step = num_tokens = 0
    for (num_steps, batch_rows, _), phase, plan in zip(phases, to_plan, plans, strict=True):
        row = row if phase.inputs.has_rows_of(None) else 0
        assert (plan.first_step, plan.row_after(step)) == (step, row)
        step, row, num_tokens = step + num_steps, row + num_steps * batch_rows, num_tokens + plan.num_tokens
        assert (plan.num_steps, plan.row_after(step)) == (step, row)
        assert plans[-1].tokens_after(step) == num_tokens
        assert Plan.from_record(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
    assert sum(steps * rows * length for steps, rows, length in phases) == num_tokens


def record_at(plan, step):
    return SimpleNamespace(step=step, plan=plan)


def test_a_checkpoint_is_of_phases_that_stayed_as_they_were(tmp_path):
    def planned(*lengths):
        return plans_of(phases_in(tmp_path, *({"max_steps": length} for length in lengths)))

    record = record_at(planned(10, 10, 10)[1], 15)
    check_checkpoint(record, planned(10, 8, 99)[1])
    with pytest.raises(InputError, match=r"phase 1 ended after step 10 .* and now would end after step 11"):
        check_checkpoint(record, planned(11, 10, 10)[1])
    with pytest.raises(InputError, match=r"would end after step 14, .* from step 15.* Raise .* of phase 2"):
        check_checkpoint(record, planned(10, 4, 10)[1])


@pytest.mark.parametrize("begun_phase", [0, 1, 2])
def test_only_phases_that_are_begun_must_stay(tmp_path, begun_phase):
    first, second = {"rate": 1.0, "own": 1}, {"rate": 2.0, "own": 1}
    record = {"fingerprint": fingerprint_of_phases([first, second, second])}
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")

    def check(*phases):
        asked = fingerprint_of_phases([first, *phases])
        RunFolder(tmp_path).check(record, asked, resume="auto", overwrite=False, begun_phase=begun_phase)

    check(second, second)
    for phases, changed in (((second, first), 2), ((first, second), 1), ((first, first), 1)):
        if changed > begun_phase:
            check(*phases)
            continue
        with pytest.raises(InputError, match=rf"phase {changed + 1}: rate: 2.0 there, 1.0 now.* only later phases may"):
            check(*phases)


def test_a_run_is_opened_phase_by_phase(phase_shards, tmp_path):
    """One model fits the rows of all; the second phase has the rows of the first, the third has others."""
    config = parse_training_config(phases_flags(phase_shards, tmp_path / "run"), "")
    run = Pretraining().open_run(config, Cluster()).planned(1)
    assert {phase.model_config.max_position_embeddings for phase in run.phases} == {34}
    plans = run.plans
    assert [(plan.first_row, plan.first_step_of_rows, plan.num_steps) for plan in plans] == [
        (0, 0, 5), (40, 0, 9), (0, 9, 14),
    ]  # fmt: skip
    described = describe_plan(run, run.phases[2], plans[2], 0, ResumePoint(plans[2].first_step))
    assert described["phase"] == "3 of 3: long rows"
    hashes = [run.fingerprint_sha256(index) for index in range(3)]
    assert len(set(hashes)) == 3
    ahead = phases_flags(phase_shards, tmp_path / "other", phases_with(2, mlm_probability=0.4))
    other = Pretraining().open_run(parse_training_config(ahead, ""), Cluster())
    assert [other.fingerprint_sha256(index) for index in range(2)] == hashes[:2]
    assert other.fingerprint_sha256(2) != hashes[2]
    longer = phases_flags(phase_shards, tmp_path / "longer", phases_with(2, max_length=64))
    with pytest.raises(InputError, match=r"Phase `long rows`: --max-length must be the shards' 32 .* received 64"):
        Pretraining().open_run(parse_training_config(longer, ""), Cluster())
