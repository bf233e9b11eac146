"""Runs of several seeds: each with a folder of its own, all on one table."""

import json
from pathlib import Path

import pytest

from finetuning.config.settings import ClassificationConfig
from finetuning.config.sources import parse_finetuning_config
from finetuning.loop.seeds import seeds_table, with_seed
from finetuning.run_classification import main
from mlm_common.errors import InputError
from tests.fixtures.tiny_classification import flags


def test_the_table() -> None:
    results = {
        3: {"eval_accuracy": 0.5, "eval_guess_accuracy": 0.1, "eval_samples": 9, "epoch": 1.0},
        1: {"eval_accuracy": 0.7, "eval_guess_accuracy": 0.1, "eval_samples": 9, "epoch": 2.0},
    }
    table = seeds_table(results)
    assert table["seeds"] == [3, 1]
    assert list(table["scores"]) == ["eval_accuracy"]
    figures = table["scores"]["eval_accuracy"]
    assert (figures["values"], figures["mean"]) == ([0.5, 0.7], pytest.approx(0.6))
    assert figures["deviation"] == pytest.approx(0.2 / 2**0.5)
    assert seeds_table({3: results[3]})["scores"]["eval_accuracy"]["deviation"] == 0


def test_a_run_of_one_seed(tmp_path: Path) -> None:
    config = parse_finetuning_config(ClassificationConfig, flags(tmp_path, tmp_path / "run", "--seeds", "5", "6"), "")
    one = with_seed(config, 6)
    assert (one.run.seed, one.run.seeds, one.run.output_dir) == (6, [], str(tmp_path / "run" / "seed-6"))
    assert one.data == config.data


@pytest.mark.parametrize(
    ("more", "message"),
    [(("--seeds", "1", "1"), "--seeds must differ"), (("--seeds", "1", "--hub-model-id", "a/b"), "of one model")],
)
def test_what_cannot_be(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_finetuning_config(ClassificationConfig, flags(tmp_path, tmp_path / "run", *more), "")


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_two_seeds(tiny_start: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = flags(tiny_start, tmp_path / "run", "--seeds", "1", "2", "--max-steps", "3", "--no-load-best-model-at-end")
    assert main(argv) == 0
    table = json.loads((tmp_path / "run" / "seeds_results.json").read_text())
    losses = table["scores"]["eval_loss"]["values"]
    assert losses[0] != losses[1]
    assert f"of {losses[0]:.4f}, {losses[1]:.4f}" in capsys.readouterr().out
    assert len(list((tmp_path / "run").glob("seed-*/export/model.safetensors"))) == 2
