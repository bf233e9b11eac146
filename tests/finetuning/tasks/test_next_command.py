"""What a fine-tuning run says to type next: a command that parses."""

import shlex
from typing import Any

import pytest

from finetuning.config.prediction import PredictionConfig
from finetuning.tasks.classification import TextClassification
from finetuning.tasks.questions import QuestionAnswering
from finetuning.tasks.tagging import Tagging
from mlm_common.cli.command_line import parse_arguments


@pytest.mark.parametrize("task_class", [TextClassification, Tagging, QuestionAnswering])
def test_the_next_command_predicts(task_class: Any) -> None:
    task = task_class.__new__(task_class)
    python, script, *argv = shlex.split(task.next_command("my runs/export"))
    assert (python, script) == ("python", "finetuning/predict.py")
    (config,) = parse_arguments((PredictionConfig,), argv, "")
    assert config.model == "my runs/export"


@pytest.mark.parametrize(
    ("task_class", "metric", "summary"),
    [
        (TextClassification, "accuracy", "loss 0.31  accuracy 0.8125"),
        (Tagging, "loss", "loss 0.31"),
        (QuestionAnswering, "f1", "loss 0.31  F1 6.00 %  exact match 1.38 %"),
    ],
)
def test_an_evaluation_is_summarized(task_class: Any, metric: str, summary: str) -> None:
    task = task_class.__new__(task_class)
    task.metric = metric
    assert task.summarize({"loss": 0.312, "accuracy": 0.8125, "f1": 6.0, "exact_match": 1.38}) == summary
