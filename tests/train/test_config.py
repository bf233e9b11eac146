"""Settings of stage 3: a flag that was renamed is still read by its former name, wherever settings come from."""

from pathlib import Path

import pytest

from mlm_common.errors import InputError
from train.config.settings import TrainingConfig, parse_training_config
from train.runtime.plan import make_plan

REQUIRED = ("--train-dataset", "shards", "--output-dir", "out")


def parse(*flags: str) -> TrainingConfig:
    return parse_training_config([*REQUIRED, *flags], "")


def test_bfloat16_is_refused_without_xla() -> None:
    with pytest.raises(InputError, match="--jit-compile must not be false with --bfloat16; received False"):
        parse("--bfloat16", "--jit-compile", "false")
    # TPUs compile all.
    assert parse("--bfloat16", "--jit-compile", "false", "--tpu-name", "local").hardware.bfloat16


def test_layers_for_tpus_are_refused_without_xla() -> None:
    with pytest.raises(InputError, match="--jit-compile must not be false with --tpu-layers on; received False"):
        parse("--tpu-layers", "on", "--jit-compile", "false")
    assert parse("--tpu-layers", "on", "--jit-compile", "false", "--tpu-name", "local").hardware.tpu_layers == "on"


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_on_and_off_are_words_in_a_settings_file(text: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(f"tpu_layers: {text}\n", encoding="utf-8")
    assert parse("--config-file", str(tmp_path / "settings.yaml")).hardware.tpu_layers == value


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
def test_a_run_on_a_tpu_saves_each_quarter_of_an_hour(flags: tuple[str, ...], minutes: int | None) -> None:
    config = parse(*flags)
    plan = make_plan(config.optimization, config.run, num_rows=1000, max_length=128, num_replicas=8)
    assert plan.save_minutes == minutes
    intervals = plan.describe(1)["save"]
    assert intervals.endswith(f" steps, and every {minutes} minutes" if minutes else " steps")
