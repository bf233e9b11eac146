"""Plots of scores."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlm_common.figures import image_of, new_figure

# Of more classes a matrix cannot be read.
MAX_CLASSES = 30


def confusion_counts(
    references: NDArray[np.int32], predictions: NDArray[np.int64], num_classes: int
) -> NDArray[np.int64]:
    """Count rows by class and prediction, (classes, classes); a row's class is the first index."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(counts, (references, predictions), 1)
    return counts


def draw_confusion(counts: NDArray[np.int64], names: Sequence[str]) -> bytes:
    """Draw counts of `confusion_counts` as a PNG image: each line in shares of its class, with the counts."""
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    inches = 2.5 + 0.45 * len(names)
    with new_figure(figsize=(inches, inches)) as figure:
        axes = figure.subplots()
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for row, column in np.ndindex(*counts.shape):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=color, fontsize=8)
        axes.set(xlabel="prediction", ylabel="label")
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_title("Rows by label and prediction", loc="left", weight="bold")
        return image_of(figure)
