"""Which classes are taken for which."""

import numpy as np

from finetuning.scores.plots import confusion_counts, draw_confusion


def test_confusion() -> None:
    counts = confusion_counts(np.array([0, 0, 2, 2, 2]), np.array([0, 1, 2, 2, 0]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 2]]
    assert draw_confusion(counts, ("a", "b", "c")).startswith(b"\x89PNG")
