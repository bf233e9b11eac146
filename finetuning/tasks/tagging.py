"""Token classification: each word has a tag, learned and predicted at its first token."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.labels import Labels
from finetuning.data.rows import INDEX
from finetuning.data.tagged import NO_TAG, NO_WORD, WORD, Sentences
from finetuning.scores.classification import chosen_metric
from finetuning.scores.tagging import default_tag, is_degenerate, metrics_of, scores
from finetuning.tasks.task import ExampleTask, shown_score, with_metric
from mlm_common.cli.settings import require
from train.data.inputs import Feature
from train.tasks.task import CardFigure, Mean, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast
USAGE = """```python
from transformers import pipeline

tag = pipeline("token-classification", model={model}{revision}, aggregation_strategy="first")
text = "A sentence to tag ."
for found in tag(text):
    print(round(float(found["score"]), 3), found["entity_group"], text[found["start"] : found["end"]])
```"""


class Tagging(ExampleTask):
    """Learns the tag of each word.

    Args:
        labels: the tags.
        sentences: to evaluate on.
        metric: by which checkpoints are compared; by default the first.
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
        max_length: tokens of the longest row.
        guess: what a guess without the text would score, by metric.

    Raises:
        InputError: a tag with white space, which divides the tags of a sentence in the predictions.
    """

    model_class = "TFAutoModelForTokenClassification"
    means = (Mean("loss", "loss", "num_tagged"), Mean("accuracy", "num_correct", "num_tagged"))

    def __init__(
        self,
        labels: Labels,
        sentences: Sentences | None,
        metric: str | None = None,
        *,
        pad_token_id: int,
        token_types: bool,
        max_length: int,
        guess: Mapping[str, float] | None = None,
    ):
        super().__init__(pad_token_id=pad_token_id, token_types=token_types)
        for one in labels.names:
            require(one.split() == [one], "must be without white space (rename it)", "Each tag", repr(one))
        self.labels = labels
        self.sentences = sentences
        self.metrics = metrics_of(labels.names)
        self.metric = chosen_metric(self.metrics, metric)
        self.max_length = max_length
        self.guess: Mapping[str, float] = {} if guess is None else guess
        self.card = TaskCard(
            model_kind="model that tags words",
            task_name="Token classification",
            pipeline_tag="token-classification",
            figures=(
                CardFigure("loss", "loss", "loss", "Loss"),
                *(CardFigure(name, name, name, name) for name in self.metrics),
            ),
            tags=("token-classification",),
            training_verb="fine-tuned",
            start_words="from",
            usage=USAGE,
            evaluation="On the {num_words:,} words of {num_rows:,} validation sentences, which also decided which "
            "checkpoint was kept. Precision, recall and F1 count whole entities.",
        )

    def features(self, length: int) -> dict[str, Feature]:
        """Name those of the text, where words begin, and their tags."""
        return {**self.predicted_features(length), "label": Feature((length,), padding=NO_TAG)}

    def predicted_features(self, length: int) -> dict[str, Feature]:
        """Name those of the text, and where words begin."""
        return {**self.text_features(length), WORD: Feature((length,), padding=NO_WORD)}

    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Keep the tag of each token, and its probability."""
        import tensorflow as tf

        logits = self._logits(network, rows, training=False)
        tags = tf.argmax(logits, axis=-1, output_type=tf.int32)
        probabilities = tf.reduce_max(tf.nn.softmax(logits), axis=-1)
        kept = {"tag": self._of_one_length(tags), "probability": self._of_one_length(probabilities)}
        return kept | self._places(rows)

    def _logits(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the logits of all tokens, float32 (rows, length, tags)."""
        import tensorflow as tf

        return tf.cast(network(self.network_inputs(rows), training=training).logits, tf.float32)

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `num_correct` and `num_tagged` over the words with a tag; keep the tags of an evaluation."""
        import tensorflow as tf

        labels = rows["label"]
        logits = self._logits(network, rows, training=training)  # (rows, length, tags)
        is_tagged = tf.cast(labels != NO_TAG, tf.float32)  # (rows, length)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
        sums = {
            "loss": tf.reduce_sum(losses * is_tagged),
            "num_correct": tf.reduce_sum(tf.cast(predicted == labels, tf.float32) * is_tagged),
            "num_tagged": tf.reduce_sum(is_tagged),
        }
        return sums if training else sums | {"tag": self._of_one_length(predicted), **self._places(rows)}

    def _places(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        return {WORD: self._of_one_length(rows[WORD], NO_WORD), INDEX: rows[INDEX]}

    def _of_one_length(self, values: "tf.Tensor", padding: int = 0) -> "tf.Tensor":
        """Fill up to the longest rows, (rows, max_length), since what is kept is of all buckets."""
        import tensorflow as tf

        return tf.pad(values, ((0, 0), (0, self.max_length - values.shape[1])), constant_values=padding)

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute loss and metrics of the sentences to evaluate on, and the numbers of sentences and words."""
        assert self.sentences is not None
        return self.figures_of(sums, self.sentences)

    def figures_of(self, sums: Mapping[str, Any], sentences: Sentences) -> dict[str, float]:
        """Compute the same of these sentences, which have tags."""
        assert sentences.tags is not None
        predictions = self.predictions(sums, sentences)
        figures = {"loss": super().figures(sums)["loss"]} | scores(self.metrics, predictions, sentences.tags)
        return figures | {
            "num_rows": len(predictions),
            "num_words": sum(map(len, sentences.words)),
            "num_words_cut_off": sum(map(len, sentences.words)) - int((sums[WORD] != NO_WORD).sum()),
            "is_degenerate": int(is_degenerate(predictions)),
        }

    def predictions(self, sums: Mapping[str, Any], sentences: Sentences) -> list[list[str]]:
        """Make the tags of all words; one that was cut off, or has no token of its own, is outside of all entities."""
        tags = of_words(sums, "tag", sentences, default_tag(self.labels.names))
        return [[self.labels.names[tag] for tag in sentence] for sentence in tags]

    def score(self, figures: Mapping[str, float]) -> float:
        """Compute by what checkpoints are compared."""
        return -figures["loss"] if self.metric == "loss" else figures[self.metric]

    def summarize(self, figures: Mapping[str, float]) -> str:
        """Summarize loss and the metric that checkpoints are compared by in a few words."""
        return with_metric(super().summarize(figures), figures, self.metric)

    def next_command(self, model: str) -> str:
        """Return the command that predicts a text."""
        return f'{super().next_command(model)} --text "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Describe loss and metrics for people, beside what a guess without the text would score."""
        words = f"{figures['num_words']:,} words of {figures['num_rows']:,} sentences"
        rows = {"validation loss": f"{shown_score(figures['loss'])}, of {words}"}
        for name in self.metrics:
            guess = f"; a guess without the text: {shown_score(self.guess[name])}" if name in self.guess else ""
            rows[name] = f"{shown_score(figures[name])}{guess}"
        if figures["num_words_cut_off"]:
            rows["cut off"] = (
                f"{figures['num_words_cut_off']:,} words beyond the longest row, which count as outside of entities"
            )
        if figures["is_degenerate"]:
            rows["degenerate"] = "all words have the same tag: nothing was learned"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Show the first row with its tags."""
        labels = rows["label"][0].numpy()
        tags = " ".join(self.labels.names[label] for label in labels if label != NO_TAG)
        return {"first row": self.first_text(rows, tokenizer), "its tags": tags}


def of_words(sums: Mapping[str, Any], name: str, sentences: Sentences, default: float) -> list[NDArray[Any]]:
    """Look up for each word of each sentence what was kept of its first token under `name`; `default` without one."""
    values = [np.full(len(words), default) for words in sentences.words]
    for index, words, of_tokens in zip(sums[INDEX], sums[WORD], sums[name], strict=True):
        if index >= 0:
            begins = words != NO_WORD
            values[index][words[begins]] = of_tokens[begins]
    return values
