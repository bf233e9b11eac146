"""A custom task from training to the Hub's card: nothing in between knows the task."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from huggingface_hub import ModelCard
from transformers import TFAutoModelForSequenceClassification

from tests.fixtures.tiny_run import run_flags
from train.compare_runs import comparison_table
from train.config.settings import parse_training_config
from train.data.inputs import Feature
from train.export import main as export
from train.layers.random_bits import draw_bits, fall_under
from train.loop.fitting import fit
from train.loop.lifecycle import Pretraining, build_publisher, prepare
from train.loop.run import Run
from train.loop.trainer import Trainer, build_trainer
from train.metrics.log import read_metrics
from train.metrics.run_curves import read_runs
from train.model.from_pretrained import load_model
from train.tasks.task import CardFigure, Mean, Task, TaskCard

LENGTH, NUM_IDS, FIRST_ID, PAD = 16, 48, 5, 1
NUM_TRAIN_ROWS, NUM_EVAL_ROWS, NUM_STEPS = 64, 21, 24


class RowClassification(Task):
    """Classifies rows of two kinds by their `label`; in training a tenth of the tokens is hidden."""

    model_class = "TFAutoModelForSequenceClassification"
    means = (Mean("loss", "loss", "num_rows"), Mean("accuracy", "num_correct", "num_rows"))
    card = TaskCard(
        model_kind="classifier of rows",
        task_name="Text classification",
        pipeline_tag="text-classification",
        figures=(CardFigure("loss", "loss", "loss", "Loss"), CardFigure("accuracy", "share", "accuracy", "Accuracy")),
    )

    def features(self, length: int) -> dict[str, Feature]:
        return {"input_ids": Feature((length,), padding=PAD), "label": Feature(padding=-1)}

    def prepare_batch(self, batch: dict[str, tf.Tensor], row_keys: tf.Tensor) -> dict[str, tf.Tensor]:
        is_hidden = fall_under(draw_bits(row_keys, batch["input_ids"].shape[1:]), 0.1)
        return batch | {"input_ids": tf.where(is_hidden, PAD, batch["input_ids"])}

    def sums(self, network: Any, rows: dict[str, tf.Tensor], *, training: bool) -> dict[str, tf.Tensor]:
        ids, labels = rows["input_ids"], rows["label"]
        inputs = {"input_ids": ids, "attention_mask": tf.cast(ids != PAD, tf.int32)}
        logits = tf.cast(network(inputs, training=training).logits, tf.float32)
        counts = tf.cast(labels >= 0, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        is_right = tf.argmax(logits, axis=-1, output_type=tf.int32) == labels
        return {
            "loss": tf.reduce_sum(losses * counts),
            "num_correct": tf.reduce_sum(tf.cast(is_right, tf.float32)),
            "num_rows": tf.reduce_sum(counts),
        }

    def figures(self, sums: Any) -> dict[str, float]:
        return super().figures(sums) | {"num_rows": int(sums["num_rows"])}


def write_rows(folder: Path, num_rows: int, seed: int) -> None:
    """Write a shard of rows whose tokens are of the first half of the ids, label 0, or of the second, label 1."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, num_rows)
    half = (NUM_IDS - FIRST_ID) // 2
    rows = FIRST_ID + half * labels[:, None] + generator.integers(0, half, (num_rows, LENGTH))
    with tf.io.TFRecordWriter(str(folder / f"dataset-0-{num_rows}.tfrecord")) as writer:
        for row, label in zip(rows, labels, strict=True):
            features = {"input_ids": row, "label": [label]}
            feature = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=values)) for name, values in features.items()
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def trainer_of(run: Run) -> Trainer:
    trainer = build_trainer(run, 0, tf.distribute.OneDeviceStrategy("/device:CPU:0"))
    trainer.restore()
    return trainer


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("classification")
    write_rows(folder / "train", NUM_TRAIN_ROWS, seed=0)
    write_rows(folder / "validation", NUM_EVAL_ROWS, seed=1)
    steps = ("--max-steps", str(NUM_STEPS), "--log-steps", "8", "--eval-steps", "12", "--save-steps", "12")
    more = ("--gradient-accumulation-steps", "2", "--learning-rate", "0.02")
    more += ("--tokenizer", str(shards / "train" / "tokenizer"))
    run = prepare(parse_training_config(run_flags(folder, folder / "run", *more, *steps), ""), Pretraining())
    return dataclasses.replace(run, phases=(dataclasses.replace(run.phases[0], task=RowClassification()),))


@pytest.fixture(scope="module")
def trained(run: Run) -> tuple[Trainer, dict[str, float]]:
    """Train, export and publish it as the command does."""
    trainer = trainer_of(run)
    record = trainer.record_run()
    figures = fit(trainer)
    assert figures is not None
    publisher = build_publisher(trainer, record)
    assert publisher is not None
    trainer.publish(publisher, figures)
    return trainer, figures


def test_it_is_trained_evaluated_and_resumed(run: Run, trained: tuple[Trainer, dict[str, float]]) -> None:
    trainer, figures = trained
    lines = read_metrics(run.folder)
    train = [line for line in lines if line["split"] == "train"]
    validation = [line for line in lines if line["split"] == "validation"]
    assert train[-1]["loss"] < 0.5 * train[0]["loss"]
    assert train[-1]["accuracy"] > 0.9
    assert [line["step"] for line in validation] == [12, NUM_STEPS]
    # Rows of padding fill up the last batch of four, and count for nothing.
    assert set(figures) == {"loss", "accuracy", "num_rows"}
    assert figures["num_rows"] == NUM_EVAL_ROWS
    assert figures["accuracy"] * NUM_EVAL_ROWS == pytest.approx(round(figures["accuracy"] * NUM_EVAL_ROWS), abs=1e-6)
    assert validation[-1] == {"step": NUM_STEPS, "split": "validation"} | figures

    weights = [variable.numpy() for variable in trainer.model.network.weights]
    for path in Path(run.folder.path, "checkpoints").glob(f"step-{NUM_STEPS:08d}.*"):
        path.unlink()
    again = trainer_of(run)
    assert again.start.step == 12
    assert fit(again) == figures
    for variable, values in zip(again.model.network.weights, weights, strict=True):
        np.testing.assert_array_equal(variable, values)


def test_it_is_exported(run: Run, trained: tuple[Trainer, dict[str, float]], tmp_path: Path) -> None:
    """By the run, and from its checkpoint by one who knows nothing of the task; transformers loads it either way."""
    assert (
        export(
            [str(Path(run.folder.path, "checkpoints", f"step-{NUM_STEPS:08d}")), str(tmp_path), "--formats=pytorch,tf"]
        )
        == 0
    )
    by_the_run = Path(run.folder.path, "export")
    for path in by_the_run.rglob("*"):
        if path.is_file() and path.name != "loss.png":  # which says how long training took, and the run was resumed
            assert (tmp_path / path.relative_to(by_the_run)).read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["RobertaForSequenceClassification"]

    network = trained[0].model.network
    ids = np.random.default_rng(2).integers(FIRST_ID, NUM_IDS, (3, LENGTH), dtype=np.int32)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    loaded = load_model(str(by_the_run), RowClassification.model_class)
    np.testing.assert_allclose(loaded(inputs).logits, network(inputs).logits, atol=1e-6)
    (tmp_path / "model.safetensors").unlink()
    loaded = TFAutoModelForSequenceClassification.from_pretrained(tmp_path)
    np.testing.assert_allclose(loaded(inputs).logits, network(inputs).logits, atol=1e-6)


def test_its_card_says_what_the_task_says(run: Run, trained: tuple[Trainer, dict[str, float]]) -> None:
    card = ModelCard.load(Path(run.folder.path, "export", "README.md"))
    about = card.data.to_dict()
    assert (about["pipeline_tag"], about["tags"]) == ("text-classification", ["tensorboard"])
    assert "widget" not in about
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results == {name: round(trained[1][name.lower()], 4) for name in ("Loss", "Accuracy")}
    assert {result.task_type for result in card.data.eval_results} == {"text-classification"}
    assert "# Classifier of rows\n\nA classifier of rows, pretrained from scratch." in card.text
    assert 'AutoModelForSequenceClassification.from_pretrained(".")' in card.text
    assert f"| {NUM_STEPS} | {trained[1]['loss']:.4f} | {trained[1]['accuracy']:.4f} |" in card.text
    for word in ("masked", "masking", "fill"):
        assert word not in card.text.lower()


def test_its_run_is_compared(run: Run, trained: tuple[Trainer, dict[str, float]]) -> None:
    assert f"{trained[1]['loss']:.4f}" in comparison_table(read_runs([run.folder.path]))
