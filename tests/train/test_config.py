"""Settings that depend on each other, and words that YAML takes for something else."""

from dataclasses import replace

import pytest

from mlm_common.errors import InputError
from tests.fixtures.plans import config_of, plan_of
from train.config.settings import saved_on_tpus
from train.loop.report import describe_numbers


@pytest.mark.parametrize("needs_xla", ["--bfloat16", "--tpu-layers on"])
def test_what_needs_xla_is_refused_without_it(needs_xla, monkeypatch):
    monkeypatch.setattr("train.has_bfloat16_instructions", lambda: False)
    flags = (*needs_xla.split(), "--jit-compile", "false")
    with pytest.raises(InputError, match=f"--jit-compile must not be false with {needs_xla}.*; received False"):
        config_of(*flags)
    assert config_of(*flags, "--tpu-name", "local")  # which compiles all


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_on_and_off_are_words_in_a_settings_file(text, value, tmp_path):
    (tmp_path / "settings.yaml").write_text(f"tpu_layers: {text}\n", encoding="utf-8")
    assert config_of("--config-file", tmp_path / "settings.yaml").hardware.tpu_layers == value


@pytest.mark.parametrize(
    ("flags", "minutes"),
    [
        ("", None),
        ("--tpu-name local", 15),
        ("--tpu-name local --no-tpu", None),
        ("--tpu-name local --save-minutes 60", 60),
        ("--tpu-name local --save-minutes 0", None),
        ("--save-minutes 5", 5),
    ],
)
def test_a_run_on_a_tpu_saves_each_quarter_of_an_hour(flags, minutes):
    config = config_of(*flags.split())
    plan = plan_of(replace(config, run=saved_on_tpus(config.run, config.hardware)), num_replicas=8)
    assert plan.save_minutes == minutes
    assert describe_numbers(plan, 1)["save"].endswith(f" steps, and every {minutes} minutes" if minutes else " steps")


@pytest.mark.parametrize("in_file", [False, True])
def test_settings_of_a_presets_optimizer_are_left_out_with_another(in_file, tmp_path):
    preset = ("--preset", "tiny-cpu")
    optimization = config_of(*preset).optimization
    assert (optimization.optimizer, optimization.muon_learning_rate, optimization.muon_momentum) == ("muon", 0.012, 0.9)
    assert config_of(*preset, "--muon-momentum", "0.8").optimization.muon_momentum == 0.8
    assert config_of(*preset, "--optimizer", "muon").optimization.muon_momentum == 0.9
    (tmp_path / "settings.yaml").write_text("optimizer: lamb\n", encoding="utf-8")
    given = ("--config-file", tmp_path / "settings.yaml") if in_file else ("--optimizer", "lamb")
    optimization = config_of(*preset, *given).optimization
    assert (optimization.optimizer, optimization.muon_learning_rate, optimization.muon_momentum) == ("lamb", None, 0.95)
    with pytest.raises(InputError, match=r"--muon-momentum needs --optimizer muon; received 0.8 with lamb"):
        config_of(*preset, *given, "--muon-momentum", "0.8")


@pytest.mark.parametrize("in_file", [False, True])
def test_a_global_batch_replaces_the_accumulation_of_a_preset(in_file, tmp_path):
    preset = ("--preset", "roberta-base-v5e-8")
    assert config_of(*preset).optimization.gradient_accumulation_steps == 4
    (tmp_path / "settings.yaml").write_text("global-batch-size: 512\n", encoding="utf-8")
    given = ("--config-file", tmp_path / "settings.yaml") if in_file else ("--global_batch_size=512",)
    optimization = config_of(*preset, *given).optimization
    assert (optimization.gradient_accumulation_steps, optimization.global_batch_size) == (1, 512)
    with pytest.raises(InputError, match=r"--gradient-accumulation-steps is computed from --global-batch-size: .* 4"):
        config_of(*preset, *given, "--gradient-accumulation-steps", "4")
