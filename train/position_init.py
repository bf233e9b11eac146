"""A start for tables of learned positions that lets attention find neighbours at once."""

from typing import Any

import numpy as np


def start_positions_as_sinusoids(model: Any) -> None:
    """Fill the position table of a new TF…ForMaskedLM with sinusoids, of the size its random start had.

    The table stays trainable and the architecture is as it was. Among sinusoids (Vaswani et al. 2017, section 3.5) a
    shift by n positions is the same rotation everywhere, so "the token before" is one thing to learn, where random
    rows would make it one for each position. benchmarks/position_init.py compares the two.

    Args:
        model: of an architecture that learns its positions (`train.architectures.learns_positions`).
    """
    tables = [variable for variable in model.trainable_variables if "position_embeddings" in variable.name]
    for table in tables:
        num_positions, width = table.shape
        root_mean_square = float(np.sqrt(np.mean(np.square(table.numpy()))))
        table.assign(sinusoids(num_positions, width) * root_mean_square * np.sqrt(2))


def sinusoids(num_positions: int, width: int) -> np.ndarray:
    """Return sines then cosines of wavelengths 2π to 20,000π: float32 (num_positions, width)."""
    half = -(-width // 2)
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(num_positions)[:, np.newaxis] * frequencies  # (num_positions, half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width].astype(np.float32)
