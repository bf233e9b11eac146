"""The card of whole runs: what it and the last lines of the run say of a model, and that it never costs the run."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_phases import phases_flags, phases_with
from train.publishing import model_card
from train.run_mlm import main


def phases_without_last_evaluation() -> list[dict[str, Any]]:
    first, second, _ = phases_with()
    return [first | {"max_steps": 3}, second | {"max_steps": 2, "eval_dataset": None}]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_the_card_has_no_evaluation_of_an_earlier_phase(
    phase_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(phases_flags(phase_shards, tmp_path / "run", phases_without_last_evaluation())) == 0
    assert re.findall(r"^validation .*", capsys.readouterr().out, flags=re.MULTILINE) == []
    card = (tmp_path / "run" / "export" / "README.md").read_text(encoding="utf-8")
    assert "The model of step 5 was not evaluated; the newest evaluation is of step 3." in card
    assert "model-index" not in card
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()


def test_a_dry_run_builds_the_card_of_each_phase(
    phase_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def build(_record: Any, _tokenizer: Any, publication: Any, _files: Any) -> str:
        steps.append(publication.step)
        return str(1 // (5 - publication.step))

    monkeypatch.setattr(model_card, "model_card", build)
    flags = phases_flags(phase_shards, tmp_path / "run", phases_without_last_evaluation(), "--dry-run")
    assert main(flags) == 0
    assert steps == [3, 5]
    assert "the model's card cannot be built, so the export would have a minimal one: ZeroDivisionError:" in caplog.text
