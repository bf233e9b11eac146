"""Masked language modelling (Devlin et al. 2018): the task, its head at the masked positions, and its loss."""

import functools
import math
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.tokenizer import WORD_STARTS_FILE, load_word_starts, special_ids, vocabulary_size, word_starts
from train.config.learning import EVALUATION_MLM_PROBABILITY, MaskingConfig
from train.config.settings import MASK
from train.data.inputs import Feature
from train.data.shards import TrainingInputs
from train.layers.tpu_functions import NUM_ONES
from train.runtime.named_scopes import custom_gradient, named
from train.tasks.masking import MaskedRows, MaskingRule, collect_predictions, mask_row_by_content, mask_rows
from train.tasks.task import CardFigure, Mean, Task, TaskCard

# Added to the logits of padding in the vocabulary: e to it is 0, and 0 times it is 0, as of infinity it would not be.
NEVER = -1e30
# One set of positions per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()

USAGE = """```python
from transformers import pipeline

fill_mask = pipeline("fill-mask", model={model}{revision})
for prediction in fill_mask({sentence}):
    print(round(prediction["score"], 3), prediction["sequence"])
```"""
MASKING = (
    "{masking[masking]}, {masking[mlm_probability]:.0%} of the tokens: {masking[mask_token_rate]:.0%} masked, "
    "{masking[random_token_rate]:.0%} random, the rest kept"
)
EVALUATION = (
    "Over {num_masked_tokens:,} masked tokens of rows that were not trained on, 15 % of each row, always the same."
)
LIMITS = """It predicts single masked tokens, in texts of at most {max_length} tokens. To other uses it
  must be trained further."""


class MaskedLanguageModeling(Task):
    """Predicts masked tokens, which `rule` chooses in training.

    Evaluation masks as BERT does, whatever the training, so that any two runs compare.
    """

    model_class = "TFAutoModelForMaskedLM"
    means: tuple[Mean, ...] = (Mean("loss", "loss", "num_masked"), Mean("masked_accuracy", "num_correct", "num_masked"))
    card = TaskCard(
        model_kind="masked language model",
        task_name="Masked language modeling",
        pipeline_tag="fill-mask",
        figures=(
            CardFigure("loss", "loss (nats)", "loss", "Loss (nats per masked token)"),
            CardFigure("perplexity", "perplexity", "perplexity", "Perplexity of masked tokens", num_decimals=2),
            CardFigure("masked_accuracy", "accuracy", "accuracy", "Accuracy at masked tokens"),
        ),
        loss_unit="nats per masked token",
        predicts_tokens=True,
        tags=("fill-mask", "masked-lm"),
        usage=USAGE,
        procedure={"masking": MASKING},
        evaluation=EVALUATION,
        limits=LIMITS,
    )

    def __init__(self, rule: MaskingRule, pad_token_id: int):
        self.rule = rule
        self.evaluation_rule = MaskingRule(
            rule.mask_token_id, rule.special_ids, rule.vocabulary_size, EVALUATION_MLM_PROBABILITY
        )
        self.pad_token_id = pad_token_id

    @classmethod
    def of(cls, inputs: TrainingInputs, masking: MaskingConfig) -> "MaskedLanguageModeling":
        """Make the task of a run.

        Raises:
            InputError: words must be masked, and it is not known which tokens start one.
        """
        return cls(masking_rule(inputs, masking), special_ids(inputs.tokenizer)["pad"])

    def features(self, length: int) -> dict[str, Feature]:
        """Name the token ids; rows of padding hold no token that could be masked."""
        return {"input_ids": Feature((length,), padding=self.pad_token_id)}

    def adapt_network(self, network: Any) -> Any:
        gather_before_head(network)
        return network

    def prepare_batch(self, batch: dict[str, tf.Tensor], row_keys: tf.Tensor) -> MaskedRows:
        return mask_rows(batch["input_ids"], row_keys, self.rule)

    def prepare_row(self, row: dict[str, tf.Tensor]) -> MaskedRows:
        return mask_row_by_content(row["input_ids"], self.evaluation_rule)

    def sums(self, network: Any, rows: MaskedRows, *, training: bool) -> dict[str, tf.Tensor]:
        """Add up `loss`, `num_correct` and `num_masked` over the masked tokens; see `masked_lm_loss`."""
        return self.outputs_and_sums(network, rows, {}, training=training)[1]

    def outputs_and_sums(
        self, network: Any, rows: MaskedRows, inputs: dict[str, tf.Tensor], *, training: bool
    ) -> tuple[Any, dict[str, tf.Tensor]]:
        """Return the network's outputs for the rows and further `inputs`, and the sums over masked tokens."""
        rule = self.rule if training else self.evaluation_rule
        predictions = collect_predictions(rows, rule.num_prediction_slots(rows.input_ids.shape.num_elements()))
        attended = tf.cast(rows.input_ids != self.pad_token_id, tf.int32)  # (batch, length)
        with predicting_at(predictions.positions):
            outputs = network({"input_ids": rows.input_ids, "attention_mask": attended, **inputs}, training=training)
        logits = outputs[0][0]  # of the first output, (1, num_predictions, vocabulary)
        return outputs, masked_lm_loss(
            logits, predictions.labels, predictions.weights, vocabulary_size=rule.vocabulary_size
        )

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute loss (nats), masked accuracy, perplexity, and the number of masked tokens."""
        return super().figures(sums) | {"num_masked_tokens": int(sums["num_masked"])}

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:
        """Compute the perplexity, e to the loss; infinite where that does not fit a float."""
        loss = means["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def summarize(self, figures: Mapping[str, float]) -> str:
        return f"{super().summarize(figures)}  accuracy {100 * figures['masked_accuracy']:.1f} %"

    def next_command(self, model: str) -> str:
        return f'python train/fill_mask.py --model {shlex.quote(model)} --text "… {MASK} …"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        loss, accuracy = figures["loss"], figures["masked_accuracy"]
        return {
            "validation loss": f"{loss:.4f} nats per masked token, perplexity {figures['perplexity']:.1f}",
            "masked accuracy": f"{accuracy:.4f} of {figures['num_masked_tokens']:,} masked tokens",
        }

    def describe_row(self, rows: MaskedRows, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
        return {
            "first row": tokenizer.decode(rows.original_ids[0]),
            "as masked": tokenizer.decode(rows.input_ids[0]),
        }

    def num_predictions(self, num_tokens: int) -> int:
        return self.rule.num_prediction_slots(num_tokens)


def masking_rule(inputs: TrainingInputs, masking: MaskingConfig) -> MaskingRule:
    """Make the rule of the training's masks.

    Raises:
        InputError: words must be masked, and it is not known which tokens start one.
    """
    return MaskingRule(
        masking=masking.masking,
        word_starts=None if masking.masking == "token" else _word_starts(inputs, masking),
        mask_token_id=special_ids(inputs.tokenizer)["mask"],
        special_ids=tuple(sorted(inputs.tokenizer.all_special_ids)),
        vocabulary_size=vocabulary_size(inputs.tokenizer),
        mlm_probability=masking.mlm_probability,
        mask_token_rate=masking.mask_token_rate,
        random_token_rate=masking.random_token_rate,
    )


def _word_starts(inputs: TrainingInputs, masking: MaskingConfig) -> NDArray[np.bool_]:
    """Read the table saved with the tokenizer; without one, derive it from the tokens."""
    starts = load_word_starts(inputs.tokenizer_source)
    if starts is None:
        starts = word_starts(inputs.tokenizer)
    if starts is None:
        raise InputError(
            f"--masking {masking.masking} needs a tokenizer whose tokens show where a word starts, or with a "
            f"{WORD_STARTS_FILE}; {inputs.tokenizer_source} has neither. Give --masking token, or prepare the shards "
            "with a tokenizer of train-unigram."
        )
    num_ids = vocabulary_size(inputs.tokenizer)
    if len(starts) != num_ids:
        raise InputError(
            f"{WORD_STARTS_FILE} must have an entry for each of the tokenizer's {num_ids} ids; that in "
            f"{inputs.tokenizer_source} has {len(starts)}. Save the tokenizer again."
        )
    return starts


# The head over the masked positions only, for any architecture. The head (a projection onto the vocabulary) costs as
# much as several encoder layers, and the loss reads it at the masked positions alone. Gathering the encoder's output
# before the head leaves transformers' code for both untouched.


@contextmanager
def predicting_at(positions: tf.Tensor) -> Iterator[None]:
    """A context in which models prepared by `gather_before_head` give logits at `positions` only, in their order.

    Args:
        positions: int32 (num_predictions,) into the rows of the batch laid end to end; a position may occur more
            than once. The logits are (1, num_predictions, vocabulary) instead of (batch, length, vocabulary): one
            list for the batch needs fewer spare slots than one for each row.

    Applies to the calls made by this thread, and to one model: the positions are those of its batch.
    """
    previous = getattr(_traced, "positions", None)
    _traced.positions = positions
    try:
        yield
    finally:
        _traced.positions = previous


def gather_before_head(model: Any) -> None:
    """Let `predicting_at` decide where `model` (any TF…ForMaskedLM of transformers) computes its head.

    Outside that context the model computes what it did before. Preparing a model twice changes nothing.
    """
    encoder = getattr(model, model.base_model_prefix)
    if getattr(encoder.call, "gathers_before_head", False):
        return
    encode = encoder.call

    @functools.wraps(encode)
    def encode_and_gather(*args: Any, **kwargs: Any) -> Any:
        outputs = encode(*args, **kwargs)
        positions = getattr(_traced, "positions", None)
        return outputs if positions is None else _gathered(outputs, positions)

    encode_and_gather.gathers_before_head = True  # type: ignore[attr-defined]
    encoder.call = encode_and_gather


def _gathered(outputs: Any, positions: tf.Tensor) -> Any:
    """Gather the last hidden state, always the first of the encoder's outputs, at `positions`."""
    rows = outputs[0]  # (batch, length, hidden)
    hidden = tf.gather(tf.reshape(rows, (-1, rows.shape[-1])), positions)[tf.newaxis]  # (1, num_predictions, hidden)
    if isinstance(outputs, tuple):
        return (hidden, *outputs[1:])
    return type(outputs)(**{**outputs, "last_hidden_state": hidden})


# Cross-entropy and accuracy as sums, so that batches and replicas add up exactly.


@named("loss")
def masked_lm_loss(
    logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, *, vocabulary_size: int | None = None
) -> dict[str, tf.Tensor]:
    """Add up cross-entropy, correct predictions and number of masked tokens over the slots in use.

    Args:
        logits: (num_predictions, vocabulary), any float type; the loss is computed in float32.
        labels: int32 (num_predictions,).
        weights: float32 (num_predictions,), 1 where a slot is used, else 0.
        vocabulary_size: ids from here on cannot be predicted and get no gradient; by default there are none.

    Returns:
        Float32 scalars: `loss` (nats), `num_correct`, `num_masked`.
    """
    # Of the logits as they are: in float32, they would be kept for this alone.
    label_logits = tf.stop_gradient(tf.cast(tf.gather(logits, labels, batch_dims=labels.shape.rank), tf.float32))
    logits = _without_padding(tf.cast(logits, tf.float32), vocabulary_size)
    losses = _cross_entropy(logits, labels, label_logits)  # (num_predictions,)
    correct = _is_first_largest(logits, labels, label_logits)  # (num_predictions,)
    return {
        "loss": tf.reduce_sum(losses * weights),
        "num_correct": tf.reduce_sum(correct * weights),
        "num_masked": tf.reduce_sum(weights),
    }


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_logits: tf.Tensor) -> tf.Tensor:
    """Compute nats, float32 (num_predictions,), as `sparse_softmax_cross_entropy_with_logits` does.

    That one reads all logits a second time to find those of the labels.
    """

    @custom_gradient
    def compute(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        log_total = tf.reduce_logsumexp(logits, axis=-1)

        def gradient(by_losses: tf.Tensor) -> tf.Tensor:
            probabilities = tf.exp(logits - log_total[..., tf.newaxis])
            return (probabilities - tf.cast(_is_label(logits, labels), tf.float32)) * by_losses[..., tf.newaxis]

        return log_total - label_logits, gradient

    return compute(logits)


def _is_first_largest(logits: tf.Tensor, labels: tf.Tensor, label_logits: tf.Tensor) -> tf.Tensor:
    """Return, as float32 0 or 1 (num_predictions,), where `argmax` of the logits is the label.

    A TPU counts by a product the logits that are larger, or equal and before it, in a sixth of the time of an `argmax`.
    """
    is_before = tf.range(logits.shape[-1]) < labels[..., tf.newaxis]
    limits = label_logits[..., tf.newaxis]
    beats_label = (logits > limits) | ((logits == limits) & is_before)
    # XLA may compare logits that it has not rounded to bfloat16 with the label's, which it has.
    beats_label &= ~_is_label(logits, labels)
    num_better = tf.matmul(tf.cast(beats_label, tf.float32), tf.ones((logits.shape[-1], NUM_ONES)))[..., 0]
    return tf.cast(num_better == 0, tf.float32)


def _is_label(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.range(logits.shape[-1]) == labels[..., tf.newaxis]


def _without_padding(logits: tf.Tensor, vocabulary_size: int | None) -> tf.Tensor:
    """Give ids from `vocabulary_size` on the probability 0; logits of the same shape.

    XLA computes the sum within the softmax, where a slice would be a copy of all logits.
    """
    padded_size = logits.shape[-1]
    if vocabulary_size in (None, padded_size):
        return logits
    return logits + tf.constant(np.where(np.arange(padded_size) < vocabulary_size, 0, NEVER), tf.float32)
