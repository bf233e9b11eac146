"""Settings of stage 3: a flag that was renamed is still read by its former name, wherever settings come from."""

from pathlib import Path

import pytest

from mlm_common.errors import InputError
from train.config.settings import MAY_CHANGE, TrainingConfig, flags_marked
from train.config.sources import current_settings, parse_training_config
from train.runtime.plan import make_plan

REQUIRED = ("--train-dataset", "shards", "--output-dir", "out")


def parse(*flags: str) -> TrainingConfig:
    return parse_training_config([*REQUIRED, *flags], "")


@pytest.mark.parametrize("flags", [["--gradient-checkpointing"], ["--recompute"], ["--recompute", "true"]])
def test_a_former_flag_sets_the_same_field(flags: list[str]) -> None:
    assert parse(*flags) == parse("--gradient_checkpointing", "true")
    assert parse(*flags) != parse()


@pytest.mark.parametrize("text", ["recompute: true", '{"recompute": true}', "gradient-checkpointing: true"])
def test_a_settings_file_may_use_the_former_name(tmp_path: Path, text: str) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(text, encoding="utf-8")
    assert parse("--config-file", str(settings)) == parse("--gradient-checkpointing")
    assert parse("--config-file", str(settings), "--recompute", "false") == parse()


def test_settings_recorded_under_a_former_name_are_those_of_now() -> None:
    now = parse("--gradient-checkpointing").as_dict()
    recorded = {**now, "model": {**now["model"]}}
    recorded["model"]["recompute"] = recorded["model"].pop("gradient_checkpointing")
    assert "gradient_checkpointing" not in recorded["model"]
    assert current_settings(recorded) == now


def test_bfloat16_is_refused_in_a_step_that_xla_does_not_compile() -> None:
    with pytest.raises(InputError, match="--jit-compile must not be false with --bfloat16; received False"):
        parse("--bfloat16", "--jit-compile", "false")
    # TPUs compile all.
    assert parse("--bfloat16", "--jit-compile", "false", "--tpu-name", "local").hardware.bfloat16


def test_layers_for_tpus_are_refused_in_a_step_that_xla_does_not_compile() -> None:
    with pytest.raises(InputError, match="--jit-compile must not be false with --tpu-layers on; received False"):
        parse("--tpu-layers", "on", "--jit-compile", "false")
    assert parse("--tpu-layers", "on", "--jit-compile", "false", "--tpu-name", "local").hardware.tpu_layers == "on"


@pytest.mark.parametrize(("before", "now"), [(None, "auto"), (True, "on"), (False, "off"), ("on", "on")])
def test_layers_recorded_as_a_yes_or_no_are_read(before: bool | str | None, now: str) -> None:
    assert current_settings({"hardware": {"tpu_layers": before}}) == {"hardware": {"tpu_layers": now}}


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_on_and_off_are_words_in_a_settings_file(text: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(f"tpu_layers: {text}\n", encoding="utf-8")
    assert parse("--config-file", str(tmp_path / "settings.yaml")).hardware.tpu_layers == value


def test_no_former_name_is_a_setting_of_the_run() -> None:
    assert "--gradient-checkpointing" in flags_marked(MAY_CHANGE)
    assert "--recompute" not in flags_marked(MAY_CHANGE)


@pytest.mark.parametrize(
    ("flags", "minutes"),
    [
        ((), None),
        (("--tpu-name", "local"), 15),
        (("--tpu-name", "local", "--no-tpu"), None),
        (("--tpu-name", "local", "--save-minutes", "60"), 60),
        (("--tpu-name", "local", "--save-minutes", "0"), None),
        (("--save-minutes", "5"), 5),
    ],
)
def test_a_run_on_a_tpu_is_planned_to_save_each_quarter_of_an_hour_unless_told_otherwise(
    flags: tuple[str, ...], minutes: int | None
) -> None:
    config = parse(*flags)
    plan = make_plan(config.optimization, config.run, num_rows=1000, max_length=128, num_replicas=8)
    assert plan.save_minutes == minutes
    intervals = plan.describe(1)["save"]
    assert intervals.endswith(f" steps, and every {minutes} minutes" if minutes else " steps")
