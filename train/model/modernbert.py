"""ModernBERT (Warner et al. 2024) for TensorFlow, of which transformers has the configuration and PyTorch classes only.

Variables bear the names that transformers' own rules turn into those of the PyTorch classes. Importing this module lets
transformers' auto classes make these from a `ModernBertConfig`.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from transformers import ModernBertConfig, TFAutoModel, TFAutoModelForMaskedLM, TFPreTrainedModel
from transformers.activations_tf import get_tf_activation
from transformers.modeling_tf_outputs import TFBaseModelOutput, TFMaskedLMOutput
from transformers.modeling_tf_utils import unpack_inputs

from train.layers.local_attention import can_use_blocks, in_blocks, is_near, with_halo
from train.model.block_attention import current_documents

# In the place of a score that does not count: far below any, and finite, so a query without keys gives no NaN.
NEVER = -1e30


def rotary_tables(length: int, head_size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute cosines and sines of each position's angles (Su et al. 2021), float32 (length, head size / 2)."""
    frequencies = base ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, np.newaxis] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(states: tf.Tensor, base: float) -> tf.Tensor:
    """Turn queries or keys, (batch, length, heads, head size), by their positions, in float32; the type is kept."""
    cosines, sines = (table[:, np.newaxis] for table in rotary_tables(states.shape[1], states.shape[3], base))
    first, second = tf.split(tf.cast(states, tf.float32), 2, axis=-1)
    turned = tf.concat([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return tf.cast(turned, states.dtype)


class _Built(tf_keras.layers.Layer):
    """A layer whose parts, all of them made by `__init__`, are built under its name, whatever calls them first."""

    built: bool

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(**kwargs)
        self.config = config

    def build(self, _input_shape: Any = None) -> None:
        if self.built:
            return
        self.built = True
        for part, width in self.parts():
            with tf.name_scope(part.name):
                part.build((None, None, width))

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within that have variables, and the width of what each takes."""
        raise NotImplementedError

    def _dense(self, units: int, use_bias: bool, deviation: float, name: str) -> tf_keras.layers.Dense:
        return tf_keras.layers.Dense(units, use_bias=use_bias, kernel_initializer=_initializer(deviation), name=name)

    def _norm(self, name: str) -> tf_keras.layers.LayerNormalization:
        config = self.config
        return tf_keras.layers.LayerNormalization(epsilon=config.norm_eps, center=config.norm_bias, name=name)

    @property
    def _out_deviation(self) -> float:
        """Size of the weights that write to the residual stream: less, the more of them there are."""
        return self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)


def _initializer(deviation: float) -> tf_keras.initializers.Initializer:
    return tf_keras.initializers.TruncatedNormal(stddev=deviation)


class TFModernBertTokenEmbeddings(tf_keras.layers.Layer):
    """The table, which the decoder uses as well."""

    built: bool

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(**kwargs)
        self.config = config

    def build(self, _input_shape: Any = None) -> None:
        """Make the table."""
        if self.built:
            return
        self.built = True
        shape = (self.config.vocab_size, self.config.hidden_size)
        initializer = _initializer(self.config.initializer_range)
        self.weight = self.add_weight(name="weight", shape=shape, initializer=initializer)

    def call(self, input_ids: tf.Tensor) -> tf.Tensor:
        """Look up ids, (batch, length) to (batch, length, hidden)."""
        return tf.cast(tf.gather(self.weight, input_ids), self.compute_dtype)


class TFModernBertEmbeddings(_Built):
    """Embeddings, normalized; positions come in by attention."""

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.tok_embeddings = TFModernBertTokenEmbeddings(config, name="tok_embeddings")
        self.norm = self._norm("norm")
        self.drop = tf_keras.layers.Dropout(config.embedding_dropout)

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within."""
        return [(self.tok_embeddings, self.config.hidden_size), (self.norm, self.config.hidden_size)]

    def call(self, input_ids: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Look up ids, (batch, length) to (batch, length, hidden)."""
        return self.drop(self.norm(self.tok_embeddings(input_ids)), training=training)


class TFModernBertAttention(_Built):
    """Attention to the whole row, or in a local layer to the tokens at most `reach` away."""

    def __init__(self, config: ModernBertConfig, index: int, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        is_global = index % config.global_attn_every_n_layers == 0
        self.reach: int | None = None if is_global else config.local_attention // 2
        local_base = config.global_rope_theta if config.local_rope_theta is None else config.local_rope_theta
        self.rotary_base = config.global_rope_theta if is_global else local_base
        self.Wqkv = self._dense(3 * config.hidden_size, config.attention_bias, config.initializer_range, "Wqkv")
        self.Wo = self._dense(config.hidden_size, config.attention_bias, self._out_deviation, "Wo")
        self.dropout = tf_keras.layers.Dropout(config.attention_dropout)  # of the probabilities
        self.out_drop = tf_keras.layers.Dropout(config.attention_dropout)

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within."""
        return [(self.Wqkv, self.config.hidden_size), (self.Wo, self.config.hidden_size)]

    def call(self, hidden_states: tf.Tensor, attended: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Attend, (batch, length, hidden); `attended` is bool (batch, length), false at padding."""
        _, length, width = hidden_states.shape
        states = tf.reshape(self.Wqkv(hidden_states), (-1, length, 3, self.num_heads, self.head_size))
        query, key, value = tf.unstack(states, axis=2)  # (batch, length, heads, head size)
        query = rotated(query * self.head_size**-0.5, self.rotary_base)
        key = rotated(key, self.rotary_base)
        documents = current_documents()
        of_queries: Any = documents
        of_keys: Any = documents
        if self.reach is not None and can_use_blocks(length, self.reach):
            query, of_queries = (in_blocks(tensor, self.reach) for tensor in (query, documents))
            key, value, attended, of_keys = (
                with_halo(tensor, self.reach) for tensor in (key, value, attended, documents)
            )
        allowed = attended[..., tf.newaxis, tf.newaxis, :]
        if self.reach is not None:
            allowed &= is_near(query.shape[-3], key.shape[-3], self.reach)
        if documents is not None:
            allowed &= of_queries[..., tf.newaxis, :, tf.newaxis] == of_keys[..., tf.newaxis, tf.newaxis, :]
        context = self._attend(query, key, value, allowed, training)
        context = tf.reshape(context, (hidden_states.shape[0], -1, width))[:, :length]
        return self.out_drop(self.Wo(context), training=training)

    def _attend(
        self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, allowed: tf.Tensor, training: bool
    ) -> tf.Tensor:
        query, key, value = (_swapped(states) for states in (query, key, value))  # (…, heads, length, head size)
        scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32)
        weights = tf.nn.softmax(tf.where(allowed, scores, NEVER), axis=-1)
        weights = self.dropout(tf.cast(weights, value.dtype), training=training)
        return _swapped(tf.matmul(weights, value))


def _swapped(states: tf.Tensor) -> tf.Tensor:
    """Let the axes of heads and tokens, third and second from last, change places."""
    *first, length, heads, size = range(states.shape.rank)
    return tf.transpose(states, (*first, heads, length, size))


class TFModernBertMLP(_Built):
    """A feed-forward network with a gate, GeGLU (Shazeer 2020)."""

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.Wi = self._dense(2 * config.intermediate_size, config.mlp_bias, config.initializer_range, "Wi")
        self.act = get_tf_activation(config.hidden_activation)
        self.drop = tf_keras.layers.Dropout(config.mlp_dropout)
        self.Wo = self._dense(config.hidden_size, config.mlp_bias, self._out_deviation, "Wo")

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within."""
        return [(self.Wi, self.config.hidden_size), (self.Wo, self.config.intermediate_size)]

    def call(self, hidden_states: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Compute (batch, length, hidden) of each token by itself."""
        inputs, gate = tf.split(self.Wi(hidden_states), 2, axis=-1)
        return self.Wo(self.drop(self.act(inputs) * gate, training=training))


class TFModernBertLayer(_Built):
    """Attention and feed-forward network, each added to what it reads."""

    def __init__(self, config: ModernBertConfig, index: int, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.attn_norm = self._norm("attn_norm") if index else None  # the embeddings are normalized already
        self.attn = TFModernBertAttention(config, index, name="attn")
        self.mlp_norm = self._norm("mlp_norm")
        self.mlp = TFModernBertMLP(config, name="mlp")

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within."""
        layers = (self.attn_norm, self.attn, self.mlp_norm, self.mlp)
        return [(layer, self.config.hidden_size) for layer in layers if layer is not None]

    def call(self, hidden_states: tf.Tensor, attended: tf.Tensor, training: bool = False) -> tuple[tf.Tensor]:
        """Compute the next hidden states, (batch, length, hidden), the only one of a tuple."""
        inputs = hidden_states if self.attn_norm is None else self.attn_norm(hidden_states)
        hidden_states += self.attn(inputs, attended, training=training)
        return (hidden_states + self.mlp(self.mlp_norm(hidden_states), training=training),)


class TFModernBertMainLayer(_Built):
    """The encoder, without a head."""

    config_class = ModernBertConfig

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.embeddings = TFModernBertEmbeddings(config, name="embeddings")
        self.layer = [TFModernBertLayer(config, at, name=f"layers_._{at}") for at in range(config.num_hidden_layers)]
        self.final_norm = self._norm("final_norm")

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within."""
        return [(part, self.config.hidden_size) for part in (self.embeddings, *self.layer, self.final_norm)]

    def call(
        self, input_ids: tf.Tensor, attention_mask: tf.Tensor | None = None, training: bool = False
    ) -> TFBaseModelOutput:
        """Compute the last hidden states of ids, (batch, length); `attention_mask` is 0 at padding."""
        attended = tf.ones_like(input_ids, tf.bool) if attention_mask is None else tf.cast(attention_mask, tf.bool)
        hidden_states = self.embeddings(input_ids, training=training)
        for layer in self.layer:
            hidden_states = layer(hidden_states, attended, training=training)[0]
        return TFBaseModelOutput(last_hidden_state=self.final_norm(hidden_states))


class TFModernBertPredictionHead(_Built):
    """What every task's head begins with."""

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.dense = self._dense(config.hidden_size, config.classifier_bias, self._out_deviation, "dense")
        self.act = get_tf_activation(config.classifier_activation)
        self.norm = self._norm("norm")

    def parts(self) -> list[tuple[Any, int]]:
        """List the layers within."""
        return [(self.dense, self.config.hidden_size), (self.norm, self.config.hidden_size)]

    def call(self, hidden_states: tf.Tensor) -> tf.Tensor:
        """Compute (…, hidden) of the last hidden states."""
        return self.norm(self.act(self.dense(hidden_states)))


class TFModernBertDecoder(tf_keras.layers.Layer):
    """The table of the embeddings once more, and a bias."""

    built: bool

    def __init__(self, config: ModernBertConfig, embeddings: TFModernBertTokenEmbeddings, **kwargs: Any):
        super().__init__(**kwargs)
        self.config = config
        self.embeddings = embeddings
        self.bias: tf.Variable | None = None

    def build(self, _input_shape: Any = None) -> None:
        """Make the bias."""
        if self.built:
            return
        self.built = True
        if self.config.decoder_bias:
            self.bias = self.add_weight(name="bias", shape=(self.config.vocab_size,), initializer="zeros")

    def call(self, hidden_states: tf.Tensor) -> tf.Tensor:
        """Compute the logits of each id, (…, vocabulary)."""
        logits = tf.matmul(hidden_states, tf.cast(self.embeddings.weight, hidden_states.dtype), transpose_b=True)
        return logits if self.bias is None else logits + tf.cast(self.bias, logits.dtype)


class TFModernBertModel(TFPreTrainedModel):
    """The encoder as a model, for heads that are put on it and for the classes below."""

    config_class = ModernBertConfig
    base_model_prefix = "model"
    built: bool

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.model = TFModernBertMainLayer(config, name="model")

    @property
    def parts(self) -> tuple[tf_keras.layers.Layer, ...]:
        """All layers."""
        return (self.model,)

    def build(self, _input_shape: Any = None) -> None:
        """Make all variables."""
        if self.built:
            return
        self.built = True
        for part in self.parts:
            with tf.name_scope(part.name):
                part.build((None, None, self.config.hidden_size))

    @unpack_inputs
    def call(
        self,
        input_ids: tf.Tensor | None = None,
        attention_mask: tf.Tensor | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002  (transformers fills these in)
        output_hidden_states: bool | None = None,  # noqa: ARG002
        return_dict: bool | None = None,  # noqa: ARG002
        training: bool = False,
    ) -> Any:
        """Compute the last hidden states, (batch, length, hidden), of ids (batch, length)."""
        return self.model(input_ids, attention_mask=attention_mask, training=training)


class TFModernBertWithHead(TFModernBertModel):
    """An encoder with the beginning of a head, for the classes below."""

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.head = TFModernBertPredictionHead(config, name="head")

    @property
    def parts(self) -> tuple[tf_keras.layers.Layer, ...]:
        """All layers."""
        return (self.model, self.head, self.last)

    @property
    def last(self) -> tf_keras.layers.Layer:
        """The layer after the head's beginning."""
        raise NotImplementedError


class TFModernBertForMaskedLM(TFModernBertWithHead):
    """Predicts masked tokens."""

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.decoder = TFModernBertDecoder(config, self.model.embeddings.tok_embeddings, name="decoder")

    @property
    def last(self) -> tf_keras.layers.Layer:
        """The decoder."""
        return self.decoder

    @unpack_inputs
    def call(
        self,
        input_ids: tf.Tensor | None = None,
        attention_mask: tf.Tensor | None = None,
        output_attentions: bool | None = None,  # noqa: ARG002  (transformers fills these in)
        output_hidden_states: bool | None = None,  # noqa: ARG002
        return_dict: bool | None = None,  # noqa: ARG002
        training: bool = False,
    ) -> TFMaskedLMOutput:
        """Compute logits, (batch, length, vocabulary), of ids (batch, length)."""
        outputs = self.model(input_ids, attention_mask=attention_mask, training=training)
        return TFMaskedLMOutput(logits=self.decoder(self.head(outputs[0])))


TFAutoModel.register(ModernBertConfig, TFModernBertModel, exist_ok=True)
TFAutoModelForMaskedLM.register(ModernBertConfig, TFModernBertForMaskedLM, exist_ok=True)
