"""ELECTRA (Clark et al. 2020): a generator fills in masked tokens, and a discriminator finds the replaced tokens.

    python train/run_mlm.py --task recipes/replaced_tokens.py:ReplacedTokens \\
        --pretrained-model-config google/electra-small-discriminator --mask-token-rate 1 --random-token-rate 0 \\
        --train-dataset work/shards/train --eval-dataset work/shards/validation --output-dir work/electra

The loss is the generator's loss per masked token plus 50 times the discriminator's loss per token. The generator and
the discriminator share their embeddings, and only the discriminator is exported. With `:GradientDisentangled`
(DeBERTa-v3, He et al. 2021, section 3.3) the discriminator's loss does not change the shared token embeddings. Instead,
it trains a delta that the discriminator adds to them.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from mlm_common.errors import InputError
from train.layers.random_bits import draw_bits, fold_in
from train.model.architectures import DELTA, TRAINING_ONLY
from train.model.networks import MaskedLM
from train.tasks.heads import Delta, put_part
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.masking import MaskedRows, fill_in, key_of_content
from train.tasks.task import CardFigure, Mean, PretrainingTask, TaskCard

# Width of the generator relative to the discriminator, and weight of the discriminator's loss.
GENERATOR_SIZE, DISCRIMINATOR_WEIGHT = 0.25, 50.0
# Number of the random stream from which a row's tokens are sampled. The row's masks use other streams, see
# `train.tasks.masking`.
SAMPLE = 32


class Rows(NamedTuple):
    """Masked rows, random bits to sample the replacements, and weights."""

    masked: MaskedRows
    draws: tf.Tensor  # uint32 (batch, length), random bits with which tokens are sampled
    weights: tf.Tensor  # float32 (batch,), weight of the discriminator's loss per token, relative to the generator's


class ReplacedTokens(PretrainingTask):
    """Trains an ELECTRA. In evaluations, masks and samples depend only on the content of a row."""

    model_class = "TFAutoModelForPreTraining"
    allows_new_head = True  # an export to start from has no generator
    means = (
        Mean("loss", "loss", "num_masked"),
        Mean("generator_loss", "generator_loss", "num_masked"),
        Mean("discriminator_loss", "discriminator_loss", "num_tokens"),
        Mean("discriminator_accuracy", "num_right", "num_tokens"),
    )
    card = TaskCard(
        model_kind="discriminator of replaced tokens (ELECTRA)",
        task_name="Replaced-token detection",
        pipeline_tag="feature-extraction",
        figures=(CardFigure("discriminator_loss", "loss (nats)", "loss", "Loss (nats per token)"),),
        loss_unit="nats, the generator's per masked token plus 50 times the discriminator's per token",
        procedure=MaskedLanguageModeling.card.procedure,
    )

    def __init__(self, masking: MaskedLanguageModeling):
        self.masking = masking
        self.num_predictions = masking.num_predictions  # type: ignore[method-assign]

    @classmethod
    def of(cls, inputs: Any, masking: Any) -> "ReplacedTokens":
        return cls(MaskedLanguageModeling.of(inputs, masking))

    def check_model(self, model_config: Any, settings: Any) -> None:
        if (kind := model_config.model_type) != "electra" or settings.block_attention:
            raise InputError(f"ReplacedTokens needs an electra, without --block-attention; received a {kind}.")

    def features(self, length: int) -> dict[str, Any]:
        return self.masking.features(length)

    def adapt_network(self, network: Any) -> Any:
        """Add a generator to the discriminator, with shared embeddings."""
        config = copy.deepcopy(network.config)
        head_size = config.hidden_size // config.num_attention_heads
        config.num_attention_heads = max(1, round(GENERATOR_SIZE * config.num_attention_heads))
        config.hidden_size = head_size * config.num_attention_heads
        config.intermediate_size = round(GENERATOR_SIZE * config.intermediate_size)
        generator = MaskedLM(config, name=TRAINING_ONLY)
        put_part(network, TRAINING_ONLY, lambda: generator, lambda: generator(generator.dummy_inputs, training=False))
        # The embeddings are shared after the generator is built, because `put_part` rejects weights whose names lack
        # the generator's name.
        generator.electra.embeddings = network.electra.embeddings
        return network

    def prepare_batch(self, batch: dict[str, tf.Tensor], row_keys: tf.Tensor) -> Rows:
        masked = self.masking.prepare_batch(batch, row_keys)
        draws = draw_bits(fold_in(row_keys, SAMPLE), masked.input_ids.shape[1:])
        return Rows(masked, draws, tf.fill(draws.shape[:1], DISCRIMINATOR_WEIGHT))

    def prepare_row(self, row: dict[str, tf.Tensor]) -> Rows:
        draws = draw_bits(fold_in(key_of_content(row["input_ids"]), SAMPLE), row["input_ids"].shape)
        return Rows(self.masking.prepare_row(row), draws[0], tf.constant(DISCRIMINATOR_WEIGHT))

    def apply_global_weights(self, rows: Rows, add_up: Callable[[tf.Tensor], tf.Tensor]) -> Rows:
        """Scale the discriminator's weights to the number of masked tokens, by which the whole loss is divided later.

        The discriminator's loss then contributes 50 times its mean over tokens.
        """
        num_masked = add_up(tf.reduce_sum(tf.cast(rows.masked.is_masked, tf.float32)))
        num_tokens = add_up(tf.reduce_sum(self.attended(rows)))
        return rows._replace(weights=rows.weights * tf.math.divide_no_nan(num_masked, num_tokens))

    def attended(self, rows: Rows) -> tf.Tensor:
        """Return 1 for tokens and 0 for padding."""
        return tf.cast(rows.masked.original_ids != self.masking.pad_token_id, tf.float32)  # (batch, length)

    def read(self, network: Any, ids: tf.Tensor) -> dict[str, tf.Tensor]:  # noqa: ARG002
        """Return the discriminator's input for these token ids."""
        return {"input_ids": ids}

    def sums(self, network: Any, rows: Rows, *, training: bool) -> dict[str, tf.Tensor]:
        outputs, _, sums = self.masking.outputs_and_sums(network.training_only, rows.masked, {}, training=training)
        ids = fill_in(rows.masked, outputs[0][0][:, : self.masking.rule.vocabulary_size], rows.draws)
        attended = self.attended(rows)
        inputs = {**self.read(network, ids), "attention_mask": tf.cast(attended, tf.int32)}
        logits = tf.cast(network(inputs, training=training)[0], tf.float32)  # (batch, length)
        is_replaced = ids != rows.masked.original_ids
        losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(is_replaced, tf.float32), logits) * attended
        return sums | {
            "loss": sums["loss"] + tf.reduce_sum(losses * rows.weights[:, tf.newaxis]),
            "generator_loss": sums["loss"],
            "discriminator_loss": tf.reduce_sum(losses),
            "num_right": tf.reduce_sum(tf.cast((logits > 0) == is_replaced, tf.float32) * attended),
            "num_tokens": tf.reduce_sum(attended),
        }

    def derived_figures(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"loss": means["generator_loss"] + DISCRIMINATOR_WEIGHT * means["discriminator_loss"]}

    def describe_row(self, rows: Rows, tokenizer: Any) -> dict[str, str]:
        return self.masking.describe_row(rows.masked, tokenizer)


class GradientDisentangled(ReplacedTokens):
    """Keeps the discriminator's gradient out of the token embeddings, which the generator uses, too."""

    def adapt_network(self, network: Any) -> Any:
        super().adapt_network(network)
        table, ids = network.electra.embeddings.weight, network.dummy_inputs["input_ids"]
        return put_part(network, DELTA, lambda: Delta(table, network.name), lambda: network.delta(ids))

    def read(self, network: Any, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        shared = tf.stop_gradient(tf.gather(network.electra.embeddings.weight, ids))
        return {"inputs_embeds": shared + tf.cast(network.delta(ids), shared.dtype)}
