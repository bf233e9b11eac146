"""Metrics of classes and numbers, the baseline that ignores the text, and the plot of a confusion matrix."""

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.labels import Labels, ProblemType
from finetuning.loop.task import COMBINED
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.figures import image_of, new_figure

# Metrics of tasks outside GLUE. The first metric decides which checkpoint is best.
DEFAULT_METRICS: dict[ProblemType, tuple[str, ...]] = {
    "single_label_classification": ("accuracy", "f1_macro"),
    "multi_label_classification": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("pearson", "spearmanr", "mse"),
}
# A confusion matrix with more classes is unreadable.
MAX_PLOTTED_CLASSES = 30
# Metrics for which lower is better.
ERRORS = ("mse",)


def check_packages(*modules: str) -> None:
    """Check that the packages of these modules, which compute metrics, are installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"Metrics need {module}, which is missing: python3 install.py --with finetuning")


def with_mean(metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the metrics, and the name of their mean if `scores` computes it."""
    has_mean = len(metrics) > 1 and not set(metrics) & set(ERRORS)
    return (*metrics, COMBINED) if has_mean else tuple(metrics)


def chosen_metric(metrics: Sequence[str], name: str | None) -> str:
    """Return the metric by which checkpoints are compared: `--metric-name`, or else the task's first metric.

    Raises:
        InputError: the task has no such metric.
    """
    choices = [*metrics, "loss"]
    require(name in (None, *choices), f"must be one of {', '.join(choices)}", "--metric-name", name)
    return name or metrics[0]


def predict(logits: NDArray[Any], problem_type: ProblemType) -> NDArray[Any]:
    """Convert logits (rows, labels) to class ids (rows,), to 0 and 1 (rows, labels), or to numbers (rows,)."""
    if problem_type == "regression":
        return logits[:, 0]
    if problem_type == "multi_label_classification":
        return (logits > 0).astype(np.int32)  # probability above one half
    return np.argmax(logits, axis=-1)


def probabilities(logits: NDArray[np.float32], problem_type: ProblemType) -> NDArray[np.float64]:
    """Compute the probability of each class, (rows, labels).

    The probabilities sum to 1 if a row has one class; if it may have several classes, they are independent.
    """
    logits = logits.astype(np.float64)
    if problem_type == "multi_label_classification":
        return 1 / (1 + np.exp(-logits))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def scores(metrics: Sequence[str], predictions: NDArray[Any], references: NDArray[Any]) -> dict[str, float]:
    """Compute metrics in float64, and their mean `combined_score` if there are several metrics.

    A correlation with a constant is 0, and so is the F1 of a class that is never predicted.
    """
    if predictions.dtype == np.float32:  # otherwise sums would be computed in float32
        predictions, references = predictions.astype(np.float64), references.astype(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about constants and about classes that are never predicted
        functions = metric_functions()
        computed = {name: float(functions[name](references, predictions)) for name in metrics}
    computed = {name: 0.0 if math.isnan(value) else value for name, value in computed.items()}
    if COMBINED in with_mean(metrics):
        computed[COMBINED] = float(np.mean(list(computed.values())))
    return computed


def metric_functions() -> dict[str, Callable[[NDArray[Any], NDArray[Any]], float]]:
    """Return {name as in GLUE: function of (references, predictions)}."""
    from scipy import stats
    from sklearn import metrics

    return {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "f1_macro": functools.partial(metrics.f1_score, average="macro", zero_division=0.0),
        "f1_micro": functools.partial(metrics.f1_score, average="micro", zero_division=0.0),
        "matthews_correlation": metrics.matthews_corrcoef,
        "mse": metrics.mean_squared_error,
        "pearson": lambda references, predictions: stats.pearsonr(predictions, references)[0],
        "spearmanr": lambda references, predictions: stats.spearmanr(predictions, references)[0],
    }


def baseline(labels: Labels, train_labels: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return the best constant prediction for `num_rows` rows, which ignores the text.

    For one class per row, the prediction is the most frequent class; for several classes per row, all classes that more
    than half of the rows have; for numbers, the mean.
    """
    if labels.problem_type == "single_label_classification":
        guess: Any = np.bincount(train_labels, minlength=len(labels.names)).argmax()
    elif labels.problem_type == "multi_label_classification":
        guess = (train_labels.mean(axis=0) > 0.5).astype(np.int32)
    else:
        guess = train_labels.mean()
    return np.repeat(np.asarray(guess)[np.newaxis], num_rows, axis=0)


def draw_confusion(counts: NDArray[np.int64], names: Sequence[str]) -> bytes:
    """Plot a confusion matrix as a PNG image. Colors show what fraction of each label's rows got each prediction.

    Args:
        counts: number of rows by label and prediction, (classes, classes).
        names: names of the classes.
    """
    fractions = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    inches = 2.5 + 0.45 * len(names)
    with new_figure(figsize=(inches, inches)) as figure:
        axes = figure.subplots()
        axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
        for row, column in np.ndindex(*counts.shape):
            color = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=color, fontsize=8)
        axes.set(xlabel="prediction", ylabel="label")
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title("Rows by label and prediction", loc="left", weight="bold")
        return image_of(figure)
