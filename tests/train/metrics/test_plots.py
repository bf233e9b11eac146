"""What the plots of runs say, read from their SVG files, in which each text is a comment."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from finetuning.config.settings import QuestionData
from finetuning.tasks.questions import QuestionAnswering
from tests.fixtures.recorded_runs import train_line, validation_line, write_run
from train.metrics.run_curves import RunCurves, draw_run, draw_runs, read_runs
from train.tasks.task import task_record

ANSWERS = task_record(QuestionAnswering(QuestionData(), may_have_no_answer=False, pad_token_id=1, token_types=False))


def texts(svg: bytes) -> list[str]:
    return re.findall(r"<!-- (.*?) -->", svg.decode(), re.DOTALL)


def run_of(folder: Path, **settings: Any) -> RunCurves:
    (run,) = read_runs([str(write_run(folder, **settings))])
    return run


def test_the_plot_names_the_model_and_labels_each_line(tmp_path):
    shown = texts(draw_run(run_of(tmp_path / "run", mlm_probability=0.3), "svg"))
    assert {
        "tiny-roberta-cpu (RoBERTa, 1.7 M parameters): validation loss 5.25",
        "30 steps, 3.8 k tokens, less than a minute of training",
        "training 5.50",
        "validation 5.25",
        "frequency baseline 6.00",
        "tokens, padding included",
        "Validation masks 15% of the tokens, training 30%. Validation is easier: more of the text is visible.",
    } <= set(shown)


def test_the_plot_has_double_resolution_and_is_reproducible(tmp_path):
    run = run_of(tmp_path / "run")
    png = draw_run(run)
    assert imread(io.BytesIO(png)).shape[:2] == (900, 1600)
    assert png == draw_runs([run])
    assert not [text for text in texts(draw_run(run, "svg")) if "masks" in text]  # the rates do not differ


@pytest.mark.parametrize(
    "lines",
    [[], [validation_line(5, 6.5)], [train_line(10, float("nan"), 2.0, 64.0)]],
    ids=["nothing", "an evaluation", "not finite"],
)
def test_a_run_with_hardly_a_line_can_be_drawn(lines, tmp_path):
    run = RunCurves("run", run_of(tmp_path / "run").record, lines)
    assert draw_runs([run, run]).startswith(b"\x89PNG")


def test_phases_have_their_names_and_the_tokens_of_each(tmp_path):
    lines = [{**line, "phase": 1 + (line["step"] > 20)} for line in run_of(tmp_path / "run").lines]
    record = run_of(tmp_path / "other").record
    record["plan"]["before"] = [{"num_steps": 20, "global_batch_rows": 8, "max_length": 4}]
    settings = record["settings"]
    record["phases"] = [{"name": name, "plan": record["plan"], "settings": settings} for name in ("short", "long")]
    shown = texts(draw_run(RunCurves("run", record, lines), "svg"))
    assert "long" in shown
    assert "30 steps, 1.9 k tokens, less than a minute of training" in shown


@pytest.mark.parametrize("with_guess", [True, False])
def test_fine_tuning_shows_the_metric_and_its_best(tmp_path, with_guess):
    task = ANSWERS | {"guess": 2.0 if with_guess else None}
    record = run_of(tmp_path / "run", unigram_entropy_nats=None).record | {"task": task}
    record["settings"]["model"]["init_from"] = "work/model"
    scores = ((10, 4.0), (20, 61.5), (30, 55.0))
    lines = [{"step": step, "split": "validation", "loss": 3.0, "f1": score} for step, score in scores]
    shown = texts(draw_run(RunCurves("run", record, lines), "svg"))
    assert {"Question answering, RoBERTa, 1.7 M parameters: best F1 61.5", "best 61.5", "F1 55.0"} <= set(shown)
    assert ("guess 2.0" in shown) == with_guess


def test_the_comparison_labels_runs_and_a_shared_baseline(tmp_path):
    runs = [run_of(tmp_path / name) for name in ("a", "b")]
    shown = texts(draw_runs(runs, file_format="svg"))
    # In both panels.
    for label in (f"{runs[0].name} 5.25", f"{runs[1].name} 5.25", "frequency baseline 6.00"):
        assert shown.count(label) == 2
    other = run_of(tmp_path / "c", unigram_entropy_nats=6.5)
    assert "frequency baseline 6.00" not in texts(draw_runs([*runs, other], file_format="svg"))
    assert texts(draw_runs([*runs, *runs], file_format="svg")).count(f"{runs[0].name} 5.25") == 2
