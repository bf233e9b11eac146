"""Custom tasks: the one of recipes/ from its files to its results, and what may be wrong with others."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file
from sklearn.metrics import cohen_kappa_score, mean_absolute_error

from finetuning.data.examples import Examples
from finetuning.run_task import main
from finetuning.tasks.custom import load_task, read_labels
from mlm_common.errors import InputError
from tests.fixtures.finetuned_runs import NUM_REVIEWS, RECIPE, TASK, rating_flags, reviews
from tests.fixtures.results import config_of_export, predictions, results
from tests.fixtures.same_run import timeless_lines
from train.publishing.pytorch_format import pytorch_weights
from train.publishing.saved_model import read_saved_model


def best_step(folder: Path) -> int:
    return max(evaluations(folder), key=lambda line: (line["kappa"], -line["loss"], -line["step"]))["step"]


def evaluations(folder: Path) -> list[dict]:
    return [line for line in timeless_lines(folder / "run") if line["split"] == "validation"]


def test_it_learns_what_can_be_learned(rated):
    """The checkpoint of the best kappa is scored, next to what the most frequent number of stars would score."""
    evaluated = results(rated / "run", "eval")
    lines = timeless_lines(rated / "run")
    train, validation = ([line for line in lines if line["split"] == split] for split in ("train", "validation"))
    # --log-steps epoch, --eval-steps epoch
    assert [line["epoch"] for line in train] == [1, 2, 3, 4]
    assert [line["step"] for line in validation] == [line["step"] for line in train]
    assert evaluated["eval_kappa"] == max(line["kappa"] for line in validation) > 0.9
    assert evaluated["eval_guess_kappa"] == 0
    of_train, stars = ([rating for _, rating in reviews(split)] for split in ("train", "validation"))
    predicted_stars = [int(line) for line in predictions(rated / "run", "eval_predictions")]
    assert evaluated["eval_kappa"] == pytest.approx(
        cohen_kappa_score(stars, predicted_stars, weights="quadratic"), abs=1e-9
    )
    assert evaluated["eval_mean_absolute_error"] == pytest.approx(mean_absolute_error(stars, predicted_stars), abs=1e-9)
    guess = np.bincount(of_train).argmax()
    assert evaluated["eval_guess_mean_absolute_error"] == pytest.approx(np.abs(guess - np.array(stars)).mean())
    assert (evaluated["eval_samples"], evaluated["eval_is_degenerate"]) == (NUM_REVIEWS["validation"], False)
    predicted = np.array(predictions(rated / "run", "predict_results_test"), int)
    assert np.abs(predicted - [rating for _, rating in reviews("test")]).mean() < 0.3


def test_each_evaluation_that_is_the_best_so_far_is_saved(rated):
    """Besides the multiples of --save-steps, and the last step."""
    lines = evaluations(rated)
    kappas = [line["kappa"] for line in lines]
    best_so_far = {line["step"] for index, line in enumerate(lines) if line["kappa"] > max([-1, *kappas[:index]])}
    assert 5 in best_so_far < {5, 10, 15, 20}
    saved = {int(path.stem.removeprefix("step-")) for path in (rated / "run" / "checkpoints").glob("*.json")}
    assert saved == {9, 18, 20} | best_so_far


def test_the_export_has_the_encoder_and_the_head(rated):
    """Those of the best checkpoint, in PyTorch's layout."""
    export = rated / "run" / "export"
    config = config_of_export(rated / "run")
    assert config["architectures"] == ["RobertaModel"]
    weights = load_file(export / "model.safetensors")
    width = config["hidden_size"]
    head = {name: weight for name, weight in weights.items() if name.startswith("custom_head.")}
    assert {name: weight.shape for name, weight in head.items()} == {
        "custom_head.dense.weight": (width, width),
        "custom_head.dense.bias": (width,),
        "custom_head.dense_1.weight": (4, width),
        "custom_head.dense_1.bias": (4,),
    }
    saved = read_saved_model(str(rated / "run" / "checkpoints" / f"step-{best_step(rated):08d}"))
    of_checkpoint = pytorch_weights(saved.snapshot, len(saved.tokenizer))
    assert of_checkpoint.keys() == weights.keys()
    assert all((of_checkpoint[name] == weights[name]).all() for name in weights)
    text = (export / "README.md").read_text(encoding="utf-8")
    assert "names\n  that start with `custom_head.`" in text
    assert "encoder = AutoModel.from_pretrained(" in text
    assert str(RECIPE.parent) not in text


@pytest.mark.usefixtures("one_device")
def test_another_file_is_another_run(rated, tiny_start, tmp_path, run):
    """The same file elsewhere is the same run."""
    shutil.copytree(rated, tmp_path / "rated")
    for ending, status in (("", 0), ("\nMOST_STARS = 6\n", 2)):
        (tmp_path / "elsewhere.py").write_text(RECIPE.read_text(encoding="utf-8") + ending, encoding="utf-8")
        moved = rating_flags(tiny_start / "start", tmp_path / "rated", "--task", f"{tmp_path}/elsewhere.py:StarRatings")
        outcome = run(main, *moved, "--dry-run")
        assert outcome.status == status
    assert "contains a different run" in outcome.error


def test_the_losses_and_predictions_of_the_recipe():
    """Three stars are more than one and two, not more than three and four."""
    task = load_task(TASK)(pad_token_id=1, token_types=False)
    logits = np.array([[3.0, 1.0, -1.0, -2.0]], np.float32)
    expected = np.log1p(np.exp([-3.0, -1.0, -1.0, -2.0])).sum()
    assert task.losses(tf.constant(logits), tf.constant([3])).numpy() == pytest.approx([expected], rel=1e-6)
    assert task.predict(logits).tolist() == [3]
    assert task.scores(np.array([1, 3, 5]), np.array([1, 4, 5]))["mean_absolute_error"] == pytest.approx(1 / 3)


def test_the_mean_of_the_tokens_leaves_padding_out():
    task = load_task(TASK)(pad_token_id=1, token_types=False)
    states = tf.constant([[[2.0], [4.0], [99.0]], [[99.0], [99.0], [99.0]]])
    assert task.pooled(states, tf.constant([[1, 1, 0], [0, 0, 0]])).numpy().tolist() == [[3.0], [0.0]]


def test_what_labels_say():
    """Their form, the metrics, and what a guess scores: the most frequent one, or the mean."""

    class Numbers(load_task(TASK)):  # type: ignore[misc]
        def scores(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
            return {"error": float(np.abs(predictions - labels).mean()), "largest": float(predictions.max())}

    task = Numbers(pad_token_id=1, token_types=False)
    task.see_labels(np.array([3, 1, 3], np.int32), np.array([1, 2], np.int32), "largest")
    assert (task.label.shape, task.label.dtype) == ((), "int64")
    assert (task.metrics, task.metric, task.guess) == (("error", "largest"), "largest", {"error": 1.5, "largest": 3.0})
    assert task.score({"error": 2.0, "largest": 5.0}) == 5.0
    task.see_labels(np.array([[0.0, 1.0], [1.0, 2.0]], np.float32), np.array([[0.5, 0.5]], np.float32), None)
    assert (task.label.shape, task.label.dtype, task.guess["error"]) == ((2,), "float32", 0.5)
    with pytest.raises(InputError, match="--metric-name must be one of error, largest, loss; received f1"):
        task.see_labels(np.array([1, 2], np.int32), None, "f1")
    with pytest.raises(InputError, match="Labels to train on must differ; received 3 times 2"):
        task.see_labels(np.array([2, 2, 2], np.int32), None, None)


def labels_of(train: list, validation: list) -> dict[str, np.ndarray]:
    text = (["t"] * len(train),)
    return read_labels({"train": Examples("a", text, train), "validation": Examples("b", text, validation)})


def test_labels_are_whole_numbers_or_rounded_fractions():
    assert {array.dtype for array in labels_of([1, 2], [1, 3]).values()} == {np.dtype(np.int32)}
    labels = labels_of([1, 2, 3], [0.1, 16_777_216, -2e-5])
    assert {array.dtype for array in labels.values()} == {np.dtype(np.float32)}
    assert labels["validation"].tolist() == np.array([0.1, 16_777_216, -2e-5], np.float32).tolist()


NUMBERS = "Labels of a custom task must be numbers, or lists of numbers that all have the same length; labels of b"


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        ([1, 2], ["x", "y"], NUMBERS),
        ([1, 2], [1.0, float("nan")], NUMBERS),
        ([1, 2], [[1, 2], [3, 4]], r"must have the same shape; in a it is \(\), in b \(2,\)"),
        ([1, 2], [1, 3_000_000_000], r"32 bits \(int32\); row 2 of b has 3000000000, which would become -1294967296"),
        ([1.5, 1e-60], [1, 2], "has 1e-60, which would become 0.0"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_labels_that_are_no_numbers_or_do_not_fit_are_refused(train, validation, message):
    with pytest.raises(InputError, match=message):
        labels_of(train, validation)


HEADS = {
    "return [layers.Dense(2, name='decoder'), layers.Dense(2)]": None,
    "return [layers.Dense(2, name='a'), layers.Dense(2, name='a')]": "must have different names",
}


@pytest.mark.parametrize("head", HEADS)
def test_weights_of_a_head_have_different_names(head, tmp_path):
    """A layer may have the name of one in transformers of which only the first ids are kept."""
    from tests.fixtures.tiny_models import tiny_model

    own = f"    def head(self, config):\n        import tf_keras\n        layers = tf_keras.layers\n        {head}\n"
    (tmp_path / "task.py").write_text(
        f"{RECIPE.read_text(encoding='utf-8')}\n\nclass Other(StarRatings):\n{own}", encoding="utf-8"
    )
    task = load_task(f"{tmp_path}/task.py:Other")(pad_token_id=1, token_types=False)
    network = tiny_model("roberta", "TFAutoModel", num_hidden_layers=1)
    if HEADS[head]:
        with pytest.raises(InputError, match=HEADS[head]):
            task.adapt_network(network)
        return
    names = {weight.name for weight in task.adapt_network(network).custom_head.weights}
    assert names == {weight.name for weight in task.adapt_network(network).custom_head.weights}
    shapes = {
        name: weight.shape for name, weight in pytorch_weights(network, 1).items() if name.startswith("custom_head.")
    }
    assert shapes["custom_head.decoder.weight"] == (2, 32)
    assert shapes["custom_head.decoder.bias"] == (2,)
