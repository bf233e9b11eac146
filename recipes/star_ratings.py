"""A custom task in one file: predict how many stars a review gives, using the order of the stars.

    python finetuning/run_task.py --task recipes/star_ratings.py:StarRatings --init-from work/model \\
        --train-file reviews/train.tsv --validation-file reviews/validation.tsv --output-dir work/stars

Data: tables with a column `review` and a column `stars`, 1 to 5. Head: for each number of stars below 5, a logit that
the review gives more stars (Frank and Hall 2001), computed from the mean of the tokens. Metric: Cohen's kappa with
quadratic weights, for which an error of two stars is four times as bad as an error of one star.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import ExamplesConfig
from finetuning.data.examples import Examples, read_tables
from finetuning.tasks.custom import CustomTask
from mlm_common.errors import InputError

MOST_STARS = 5
# {stars as written in a table: number}. Integers in a column with gaps are often read as 4.0 instead of 4.
STARS = {text: stars for stars in range(1, MOST_STARS + 1) for text in (f"{stars}", f"{stars}.0")}


class StarRatings(CustomTask):
    """Learns the number of stars of a review."""

    errors = ("mean_absolute_error",)

    def read(self, data: ExamplesConfig) -> Mapping[str, Examples]:
        """Read the files or the data set that the flags name."""
        examples = {}
        for split, table in read_tables(data).items():
            if "review" not in table.columns:
                raise InputError(f"{table.name} must have a column review; it has {', '.join(table.columns)}.")
            stars = [STARS.get(str(value).strip()) for value in table.columns.get("stars", ())] or None
            if stars and None in stars:
                row = stars.index(None)
                value = table.columns["stars"][row]
                raise InputError(f"Stars must be 1 to {MOST_STARS}; row {row + 1:,} of {table.name} has {value!r}.")
            examples[split] = Examples(table.name, (table.columns["review"],), stars)
        return examples

    def head(self, config: Any) -> list[Any]:
        """Return a dense layer as wide as the encoder, dropout, and the layer of the logits."""
        from tf_keras import layers

        return [layers.Dense(config.hidden_size, "tanh"), layers.Dropout(0.1), layers.Dense(MOST_STARS - 1)]

    def losses(self, outputs: Any, labels: Any) -> Any:
        """Compute the sum of the cross-entropies of all logits of each row, (rows,)."""
        import tensorflow as tf

        is_more = tf.cast(labels[:, tf.newaxis] > tf.range(1, MOST_STARS), tf.float32)  # (rows, logits)
        return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(is_more, outputs), axis=-1)

    def predict(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Count the logits above 0, each of which says that there are more stars."""
        return 1 + (outputs > 0).sum(axis=-1)

    def scores(self, predictions: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Compute kappa, which decides which checkpoint is best, and the mean error in stars."""
        from sklearn.metrics import cohen_kappa_score

        kappa = cohen_kappa_score(labels, predictions, weights="quadratic")
        return {"kappa": float(kappa), "mean_absolute_error": float(np.abs(predictions - labels).mean())}
