"""A run of classification from its files to its results, and what others read of it."""

import logging
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from finetuning.config.optimization import FinetuningOptimization
from finetuning.glue_submission import main as submit
from finetuning.loop.training import warn_of_little_training
from tests.fixtures.results import config_of_export, predictions, read_json, results
from tests.fixtures.same_run import timeless_lines
from tests.fixtures.tiny_classification import LABELS, NUM_TEST, NUM_TRAIN, NUM_VALIDATION, examples
from train.model.from_pretrained import load_model

STEPS_OF_PASS = -(-NUM_TRAIN // 8)
PREDICTED = "predict_results_sst2"


def test_few_steps_and_a_rate_for_large_models_are_warned_of(monkeypatch, caplog):
    monkeypatch.setattr("finetuning.loop.training.count_parameters", lambda _: SimpleNamespace(total=1.5e6))
    for num_steps, rate in ((50, 5e-4), (6, 2e-5)):
        assert not caplog.messages
        config = SimpleNamespace(optimization=FinetuningOptimization(learning_rate=rate))
        phases, plans = [SimpleNamespace(config=config, model_config=None)], [SimpleNamespace(num_steps=num_steps)]
        run: Any = SimpleNamespace(cluster=SimpleNamespace(is_chief=True), plans=plans, phases=phases)
        warn_of_little_training(run)
    assert caplog.messages == [
        "6 steps are rarely enough to learn a task. For at least 50, use --num-epochs 25 or a smaller batch.",
        "--learning-rate 2e-05 suits larger models; a model of 1.5 million parameters learns faster at about 0.0005.",
    ]


def test_it_learns_what_can_be_learned(classified):
    """Every pass takes all rows, the last batch weighted; every row is evaluated once."""
    lines = timeless_lines(classified)
    assert lines[-1]["step"] == 4 * STEPS_OF_PASS
    validation = [line for line in lines if line["split"] == "validation"]
    assert [line["step"] for line in validation] == [9, 18, 27, 36]
    assert {line["num_rows"] for line in validation} == {NUM_VALIDATION}
    train = [line for line in lines if line["split"] == "train"]
    assert train[-1]["epoch"] == 4.0
    assert train[-1]["accuracy"] == 1.0
    assert predictions(classified, PREDICTED) == [label for _, label in examples(NUM_TEST, 9)]


def test_its_results_are_files(classified):
    evaluated, everything = results(classified, "eval"), results(classified, "all")
    labels = [label for _, label in examples(NUM_VALIDATION, len("dev"))]
    of_train = [label for _, label in examples(NUM_TRAIN, len("train"))]
    majority = max(LABELS, key=of_train.count)
    assert evaluated["eval_accuracy"] == 1.0
    assert evaluated["eval_guess_accuracy"] == pytest.approx(labels.count(majority) / NUM_VALIDATION)
    assert (evaluated["eval_samples"], evaluated["eval_is_degenerate"]) == (NUM_VALIDATION, False)
    assert results(classified, "train")["train_samples"] == NUM_TRAIN
    assert everything == results(classified, "train") | evaluated


def test_the_best_checkpoint_is_exported(classified):
    """The one with the highest accuracy, of equal ones that with the lowest loss, whatever --save-steps."""
    validation = [line for line in timeless_lines(classified) if line["split"] == "validation"]
    best = max(validation, key=lambda line: (line["accuracy"], -line["loss"], -line["step"]))
    assert results(classified, "eval")["eval_loss"] == best["loss"]
    assert results(classified, "eval")["epoch"] == best["step"] / STEPS_OF_PASS
    record = read_json(classified / "checkpoints" / f"step-{best['step']:08d}.json")
    assert record["validation_score"] == best["accuracy"]


def test_the_export_is_a_classifier(classified):
    """With names of its labels, and a card that says what it is."""
    export = classified / "export"
    config = config_of_export(classified)
    assert config["architectures"] == ["RobertaForSequenceClassification"]
    assert config["id2label"] == {str(index): name for index, name in enumerate(LABELS)}
    assert config["problem_type"] == "single_label_classification"
    _, metadata, text = (export / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert (about["pipeline_tag"], about["datasets"]) == ("text-classification", ["nyu-mll/glue"])
    assert "base_model" not in about  # the folder it started from is nobody's business
    assert "| source | GLUE (Wang et al. 2018), task sst2 |" in text
    assert "](confusion_matrix.png)" in text
    assert (export / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")
    assert "A text classifier, fine-tuned from a local checkpoint." in text


@pytest.mark.parametrize(
    ("names", "level", "message"),
    [
        (("x", "y"), logging.WARNING, "trained for other labels: negative, positive; this task has x, y."),
        (("x", "y", "z"), logging.INFO, "Layers that {} lacks are initialized randomly: "),
    ],
)
def test_a_line_says_what_becomes_of_the_head(classified, caplog, names, level, message):
    export = str(classified / "export")
    with caplog.at_level(logging.INFO, "train.model.from_pretrained"):
        load_model(export, "TFAutoModelForSequenceClassification", head_labels=dict(enumerate(names)))
    (record,) = [record for record in caplog.records if record.name == "train.model.from_pretrained"]
    assert (record.levelno, message.format(export) in record.getMessage()) == (level, True)


def test_predictions_become_a_submission(classified, tmp_path, run):
    outcome = run(submit, "--runs", classified, "--output", tmp_path / "glue.zip")
    assert "SST-2; missing: AX, CoLA, MNLI-m, MNLI-mm, MRPC" in outcome.out
    with zipfile.ZipFile(tmp_path / "glue.zip") as archive:
        assert archive.namelist() == ["SST-2.tsv"]
        rows = archive.read("SST-2.tsv").decode().split("\n")
    digits = {name: str(index) for index, name in enumerate(LABELS)}
    expected = [f"{index}\t{digits[name]}" for index, name in enumerate(predictions(classified, PREDICTED))]
    assert rows == ["index\tprediction", *expected, ""]
