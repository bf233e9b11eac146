"""The encoder of BERT, DistilBERT, ELECTRA, ModernBERT and RoBERTa: embeddings, then layers of attention.

`Anatomy` describes the differences between them. Layers compute with the functions of `train.layers.reference_layers`
or of `train.layers.tpu_layers`, from which the TPU's compiler makes faster programs. Both use the same weights.
"""

from types import ModuleType
from typing import Any

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from train.layers import reference_layers
from train.layers.attention import Rows, number_documents, positions_within
from train.layers.random_bits import KeyedDropout
from train.layers.recomputing import recomputed
from train.model.anatomy import Anatomy, attention_of
from train.model.architectures import architecture_of
from train.runtime.named_scopes import operations_named


def normal(deviation: float) -> tf_keras.initializers.Initializer:
    """Return an initializer that draws weights with this standard deviation, none beyond two deviations."""
    return tf_keras.initializers.TruncatedNormal(stddev=deviation)


def new_norm(anatomy: Anatomy, name: str) -> tf_keras.layers.LayerNormalization:
    return tf_keras.layers.LayerNormalization(epsilon=anatomy.norm_epsilon, center=anatomy.norm_has_bias, name=name)


class Embeddings(tf_keras.layers.Layer):
    """Adds up the embeddings of tokens, token types and positions, and normalizes the sum."""

    def __init__(self, anatomy: Anatomy, num_tokens: int):
        super().__init__(name="embeddings")
        self.anatomy, self.num_tokens = anatomy, num_tokens
        self.norm = new_norm(anatomy, anatomy.encoder_names["embeddings_norm"])
        self.dropout = KeyedDropout(anatomy.embedding_rate)
        self.token_types: tf.Variable | None = None
        self.positions: tf.Variable | None = None

    def build(self, _: Any) -> None:
        anatomy = self.anatomy
        self.weight = self._table(anatomy.encoder_names["tokens"], "weight", self.num_tokens)  # the head also uses it
        if anatomy.num_token_types:
            self.token_types = self._table("token_type_embeddings", "embeddings", anatomy.num_token_types)
        if anatomy.num_positions:
            self.positions = self._table("position_embeddings", "embeddings", anatomy.num_positions)

    def _table(self, part: str, name: str, num_rows: int) -> tf.Variable:
        with tf.name_scope(part):
            shape = (num_rows, self.anatomy.embedding_size)
            return self.add_weight(name=name, shape=shape, initializer=normal(self.anatomy.deviation))

    def call(
        self,
        tokens: tf.Tensor,
        token_types: tf.Tensor | None,
        positions: tf.Tensor,
        functions: ModuleType,
        training: bool,
    ) -> tf.Tensor:
        """Compute (batch, length, embedding size).

        Args:
            tokens: ids, int32 (batch, length), or their embeddings, (batch, length, embedding size).
            token_types: int32 (batch, length); None if all are 0.
            positions: rows in the table of positions, int32 (batch, length) or (1, length).
            functions: as in `Encoder`.
        """
        states = tokens if tokens.dtype.is_floating else tf.gather(self.weight, tokens)
        states = tf.cast(states, self.compute_dtype)
        if self.positions is not None:
            states += tf.gather(self.positions, positions)
        if self.token_types is not None:
            states += tf.gather(self.token_types, tf.zeros((1, 1), tf.int32) if token_types is None else token_types)
        return self.dropout(functions.normalize(self.norm, states), training=training)


class EncoderLayer(tf_keras.layers.Layer):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: PretrainedConfig, anatomy: Anatomy, index: int):
        names, hidden_size = anatomy.layer_names, anatomy.hidden_size
        super().__init__(name=f"{anatomy.encoder_names['layers']}_._{index}")
        self.anatomy, self.attention = anatomy, attention_of(config, index)

        def dense(part: str, units: int, deviation: float, *, use_bias: bool) -> tf_keras.layers.Dense:
            return tf_keras.layers.Dense(
                units, use_bias=use_bias, kernel_initializer=normal(deviation), name=names[part]
            )

        reading, writing, has_bias = anatomy.deviation, anatomy.output_deviation, anatomy.attention_has_bias
        # Three matrices, or a single one that makes queries, keys and values.
        projections = ["query_key_value"] if "query_key_value" in names else ["query", "key", "value"]
        units = 3 * hidden_size // len(projections)
        self.projections = [dense(part, units, reading, use_bias=has_bias) for part in projections]
        self.attention_output = dense("attention_output", hidden_size, writing, use_bias=has_bias)
        is_normalized = index == 0 and not anatomy.normalizes_first
        self.attention_norm = None if is_normalized else new_norm(anatomy, names["attention_norm"])
        has_bias, inner_size = anatomy.feed_forward_has_bias, anatomy.inner_size
        self.expansion = dense("expansion", inner_size * (2 if anatomy.is_gated else 1), reading, use_bias=has_bias)
        self.contraction = dense("contraction", hidden_size, writing, use_bias=has_bias)
        self.feed_forward_norm = new_norm(anatomy, names["feed_forward_norm"])
        self.probability_dropout = KeyedDropout(anatomy.probability_rate)
        self.attention_dropout = KeyedDropout(anatomy.attention_rate)
        self.feed_forward_dropout = KeyedDropout(anatomy.feed_forward_rate)

    def call(self, states: tf.Tensor, rows: Rows, functions: ModuleType, training: bool) -> tf.Tensor:
        """Compute the next states, (batch, length, hidden), with `functions` as in `Encoder`."""
        anatomy = self.anatomy
        with operations_named("attention"):
            attended = functions.attention(self, states, rows, training)  # (batch, length, hidden)
            states += self.attention_dropout(attended, training=training)
        if not anatomy.is_pre_norm:
            states = functions.normalize(self.attention_norm, states)
        with operations_named("feed_forward"):
            inner = functions.expanded(self, states)  # (batch, length, inner)
            if anatomy.is_gated:
                states += functions.project(self.contraction, self.feed_forward_dropout(inner, training=training))
            else:
                states += self.feed_forward_dropout(functions.project(self.contraction, inner), training=training)
        return states if anatomy.is_pre_norm else functions.normalize(self.feed_forward_norm, states)


class Encoder(tf_keras.layers.Layer):
    """Embeddings and layers, without a head.

    Attributes:
        functions: the module whose functions the layers use: `train.layers.reference_layers` or
            `train.layers.tpu_layers`.
        recomputes_layers: keep only the input of each layer, and compute the layer again for its gradient.
        separates_documents: let tokens attend only within their document, which a [SEP] ends, and count positions from
            the document's start. The configuration has the ids of [SEP] and padding.
    """

    def __init__(self, config: PretrainedConfig, anatomy: Anatomy):
        super().__init__(name=architecture_of(config).prefix)
        self.config, self.anatomy = config, anatomy
        self.embeddings = Embeddings(anatomy, config.vocab_size)
        is_projected = anatomy.embedding_size != anatomy.hidden_size
        self.projection = (
            tf_keras.layers.Dense(anatomy.hidden_size, name="embeddings_project") if is_projected else None
        )
        self.layer = [EncoderLayer(config, anatomy, index) for index in range(anatomy.num_layers)]
        final_norm = anatomy.encoder_names.get("final_norm")
        self.final_norm = new_norm(anatomy, final_norm) if final_norm else None
        self.functions: ModuleType = reference_layers
        self.recomputes_layers = False
        self.separates_documents = False

    def call(
        self,
        tokens: tf.Tensor,
        attended: tf.Tensor | None = None,
        token_types: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        """Compute the last states, (batch, length, hidden).

        Args:
            tokens: ids, int32 (batch, length), or their embeddings, (batch, length, embedding size).
            attended: (batch, length), 0 at padding; None if there is no padding.
            token_types: int32 (batch, length); None if all are 0.
        """
        documents = None
        if self.separates_documents:
            documents = number_documents(tokens, self.config.sep_token_id, self.config.pad_token_id)
        if attended is None:
            attended = tf.ones(tf.shape(tokens)[:2], tf.bool)
        rows = Rows(tf.cast(attended, tf.bool), documents)
        positions = self.positions(tokens, documents)
        functions = self.functions
        states = self.embeddings(tokens, token_types, positions, functions, training=training)
        if self.projection is not None:
            states = functions.project(self.projection, states)
        for layer in self.layer:
            if self.recomputes_layers:
                states = recomputed(_computing(layer, functions, training), states, *filter(tf.is_tensor, rows))
            else:
                states = layer(states, rows, functions, training=training)
        return functions.normalize(self.final_norm, states)

    def positions(self, tokens: tf.Tensor, documents: tf.Tensor | None) -> tf.Tensor:
        """Return the tokens' rows in the table of positions, int32 (batch, length) or (1, length)."""
        first = self.anatomy.first_position
        if documents is not None:
            return positions_within(documents) + first
        if first and not tokens.dtype.is_floating:
            is_token = tf.cast(tokens != first - 1, tf.int32)
            return tf.cumsum(is_token, axis=1) * is_token + first - 1
        return tf.range(first, first + tokens.shape[1])[tf.newaxis]


def _computing(layer: EncoderLayer, functions: ModuleType, training: bool) -> Any:
    """Return a layer as a function of tensors alone: the states, and the fields of `Rows` that are not None."""
    return lambda states, attended, documents=None: layer(
        states, Rows(attended, documents), functions, training=training
    )
