"""The contrastive loss beside a direct computation, where rows share queries and passages."""

import numpy as np
import pytest
import tensorflow as tf

from finetuning.tasks.contrast import contrastive_losses


def direct_losses(vectors: np.ndarray, texts: np.ndarray, temperature: float, *, is_symmetric: bool) -> list[float]:
    """Compute the loss of each row: a query and a passage that any row has as query and positive are no negatives."""
    pairs = {(query, positive) for query, positive, *_ in texts.tolist() if query >= 0}
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    num_rows, num_texts = texts.shape
    losses = []
    for row in range(num_rows):
        query, positive = texts[row, :2]
        logits = [units[row, 0] @ units[row, 1]]
        for other in range(num_rows):
            for column in range(1, num_texts):
                is_own = (other, column) == (row, 1)
                if not is_own and texts[other, column] >= 0 and (query, texts[other, column]) not in pairs:
                    logits.append(units[row, 0] @ units[other, column])
        back = [logits[0]]
        for other in range(num_rows):
            if other != row and texts[other, 0] >= 0 and (texts[other, 0], positive) not in pairs:
                back.append(units[row, 1] @ units[other, 0])
        of_row = [
            np.log(np.exp(np.array(cosines) / temperature).sum()) - cosines[0] / temperature
            for cosines in (logits, back)
        ]
        losses.append(float(np.mean(of_row)) if is_symmetric else float(of_row[0]))
    return losses


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_positives_of_a_query_in_any_row_are_not_its_negatives(seed, is_symmetric):
    draw = np.random.default_rng(seed)
    vectors = draw.normal(size=(12, 4, 6)).astype(np.float32)
    texts = draw.integers(0, 6, (12, 4)).astype(np.int32)
    texts[-1] = -1
    losses, _ = contrastive_losses(
        tf.constant(vectors), tf.constant(texts), temperature=0.5, dims=[6], is_symmetric=is_symmetric
    )
    expected = direct_losses(vectors, texts, 0.5, is_symmetric=is_symmetric)
    np.testing.assert_allclose(losses.numpy()[:-1], expected[:-1], rtol=1e-5)


def test_a_positive_that_another_row_brings():
    """Rows (q0, p0), (q1, p1), (q0, p1): both passages answer q0, and only p0 is a negative of q1."""
    vectors = np.random.default_rng(1).normal(size=(3, 2, 4)).astype(np.float32)
    texts = np.array([[0, 0], [1, 1], [0, 1]], np.int32)
    losses, is_right = contrastive_losses(
        tf.constant(vectors), tf.constant(texts), temperature=1.0, dims=[4], is_symmetric=False
    )
    np.testing.assert_allclose(losses.numpy()[[0, 2]], 0, atol=1e-6)
    assert losses[1] > 0
    assert is_right.numpy()[[0, 2]].tolist() == [1, 1]
