"""ModernBERT (Warner et al. 2024) for TensorFlow; transformers has only its configuration and PyTorch classes.

Variables have the names that transformers' rules turn into those of the PyTorch classes. Importing this module lets
transformers' auto classes make these from a `ModernBertConfig`.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
import transformers
from transformers import ModernBertConfig, TFPreTrainedModel
from transformers.activations_tf import get_tf_activation
from transformers.modeling_tf_outputs import (
    TFBaseModelOutput,
    TFMaskedLMOutput,
    TFMultipleChoiceModelOutput,
    TFQuestionAnsweringModelOutput,
    TFSequenceClassifierOutput,
    TFTokenClassifierOutput,
)
from transformers.modeling_tf_utils import unpack_inputs

from train.layers.cpu_functions import split_dense
from train.model.attention import can_use_blocks, current_documents, in_blocks, is_near, with_halo

# Replaces a score that does not count: far below any, and finite, so a query without keys gives no NaN.
NEVER = -1e30


def rotary_tables(length: int, head_size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute cosines and sines of each position's angles (Su et al. 2021), float32 (length, head size / 2)."""
    frequencies = base ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, np.newaxis] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(states: tf.Tensor, base: float) -> tf.Tensor:
    """Rotate queries or keys, (batch, length, heads, head size), by their positions, in float32; the type is kept."""
    cosines, sines = (table[:, np.newaxis] for table in rotary_tables(states.shape[1], states.shape[3], base))
    first, second = tf.split(tf.cast(states, tf.float32), 2, axis=-1)
    turned = tf.concat([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return tf.cast(turned, states.dtype)


class _Layer(tf_keras.layers.Layer):
    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(**kwargs)
        self.config = config

    def _dense(self, units: int, use_bias: bool, deviation: float, name: str) -> tf_keras.layers.Dense:
        return tf_keras.layers.Dense(units, use_bias=use_bias, kernel_initializer=_initializer(deviation), name=name)

    def _norm(self, name: str) -> tf_keras.layers.LayerNormalization:
        config = self.config
        return tf_keras.layers.LayerNormalization(epsilon=config.norm_eps, center=config.norm_bias, name=name)

    @property
    def _out_deviation(self) -> float:
        """Size of the weights that write to the residual stream: less, the more of them there are."""
        return self.config.initializer_range / math.sqrt(2 * max(1, self.config.num_hidden_layers))


def _initializer(deviation: float) -> tf_keras.initializers.Initializer:
    return tf_keras.initializers.TruncatedNormal(stddev=deviation)


class TFModernBertTokenEmbeddings(_Layer):
    """The table, which the decoder uses as well."""

    def build(self, _: Any) -> None:
        shape = (self.config.vocab_size, self.config.hidden_size)
        initializer = _initializer(self.config.initializer_range)
        self.weight = self.add_weight(name="weight", shape=shape, initializer=initializer)

    def call(self, input_ids: tf.Tensor) -> tf.Tensor:
        """Look up ids, (batch, length) to (batch, length, hidden)."""
        return tf.cast(tf.gather(self.weight, input_ids), self.compute_dtype)


class TFModernBertEmbeddings(_Layer):
    """Embeddings, normalized; positions come in by attention."""

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.tok_embeddings = TFModernBertTokenEmbeddings(config, name="tok_embeddings")
        self.norm = self._norm("norm")
        self.drop = tf_keras.layers.Dropout(config.embedding_dropout)

    def call(self, input_ids: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.drop(self.norm(self.tok_embeddings(input_ids)), training=training)


class TFModernBertAttention(_Layer):
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
        context = tf.reshape(context, (hidden_states.shape[0], -1, width))
        if context.shape[1] != length:  # filled up with 0 to whole blocks
            context = context[:, :length]
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


class TFModernBertMLP(_Layer):
    """A feed-forward network with a gate, GeGLU (Shazeer 2020)."""

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.Wi = self._dense(2 * config.intermediate_size, config.mlp_bias, config.initializer_range, "Wi")
        self.act = get_tf_activation(config.hidden_activation)
        self.drop = tf_keras.layers.Dropout(config.mlp_dropout)
        self.Wo = self._dense(config.hidden_size, config.mlp_bias, self._out_deviation, "Wo")

    def build(self, input_shape: Any) -> None:
        with tf.name_scope(self.Wi.name):
            self.Wi.build(input_shape)  # `split_dense` does not call it

    def call(self, hidden_states: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Compute (batch, length, hidden) of each token by itself."""
        inputs, gate = split_dense(self.Wi, hidden_states, 2)
        return self.Wo(self.drop(self.act(inputs) * gate, training=training))


class TFModernBertLayer(_Layer):
    """Attention and feed-forward network, each added to what it reads."""

    def __init__(self, config: ModernBertConfig, index: int, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.attn_norm = self._norm("attn_norm") if index else None  # the embeddings are normalized already
        self.attn = TFModernBertAttention(config, index, name="attn")
        self.mlp_norm = self._norm("mlp_norm")
        self.mlp = TFModernBertMLP(config, name="mlp")

    def call(self, hidden_states: tf.Tensor, attended: tf.Tensor, training: bool = False) -> tuple[tf.Tensor]:
        """Compute the next hidden states, (batch, length, hidden), the only one of a tuple."""
        inputs = hidden_states if self.attn_norm is None else self.attn_norm(hidden_states)
        hidden_states += self.attn(inputs, attended, training=training)
        return (hidden_states + self.mlp(self.mlp_norm(hidden_states), training=training),)


class TFModernBertMainLayer(_Layer):
    """The encoder, without a head."""

    config_class = ModernBertConfig

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.embeddings = TFModernBertEmbeddings(config, name="embeddings")
        self.layer = [TFModernBertLayer(config, at, name=f"layers_._{at}") for at in range(config.num_hidden_layers)]
        self.final_norm = self._norm("final_norm")

    def call(
        self, input_ids: tf.Tensor, attention_mask: tf.Tensor | None = None, training: bool = False
    ) -> TFBaseModelOutput:
        """Compute the last hidden states of ids, (batch, length); `attention_mask` is 0 at padding."""
        attended = tf.ones_like(input_ids, tf.bool) if attention_mask is None else tf.cast(attention_mask, tf.bool)
        hidden_states = self.embeddings(input_ids, training=training)
        for layer in self.layer:
            hidden_states = layer(hidden_states, attended, training=training)[0]
        return TFBaseModelOutput(last_hidden_state=self.final_norm(hidden_states))


class TFModernBertPredictionHead(_Layer):
    """The first part of every task's head."""

    def __init__(self, config: ModernBertConfig, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.dense = self._dense(config.hidden_size, config.classifier_bias, self._out_deviation, "dense")
        self.act = get_tf_activation(config.classifier_activation)
        self.norm = self._norm("norm")

    def call(self, hidden_states: tf.Tensor) -> tf.Tensor:
        """Compute (…, hidden) of the last hidden states."""
        return self.norm(self.act(self.dense(hidden_states)))


class TFModernBertDecoder(_Layer):
    """The table of the embeddings, and a bias."""

    def __init__(self, config: ModernBertConfig, embeddings: TFModernBertTokenEmbeddings, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.embeddings = embeddings
        self.bias: tf.Variable | None = None

    def build(self, _: Any) -> None:
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

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.model = TFModernBertMainLayer(config, name="model")

    def build_in_name_scope(self) -> None:
        """Make the weights, which transformers asks for before it loads them."""
        self(self.dummy_inputs)

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
        """Compute the outputs for ids (batch, length); `attention_mask` is 0 at padding."""
        encoded = self.model(input_ids, attention_mask=attention_mask, training=training)
        return self.outputs_from(encoded, attention_mask, training)

    def outputs_from(self, encoded: TFBaseModelOutput, attention_mask: tf.Tensor | None, training: bool) -> Any:  # noqa: ARG002
        """Make the outputs from the encoder's, whose hidden states are (batch, length, hidden)."""
        return encoded


class _WithHead(TFModernBertModel):
    """An encoder with the beginning of a head."""

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.head = TFModernBertPredictionHead(config, name="head")


class TFModernBertForMaskedLM(_WithHead):
    """Predicts masked tokens."""

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.decoder = TFModernBertDecoder(config, self.model.embeddings.tok_embeddings, name="decoder")

    def outputs_from(self, encoded: TFBaseModelOutput, attention_mask: tf.Tensor | None, training: bool) -> Any:  # noqa: ARG002
        """Compute logits, (batch, length, vocabulary)."""
        return TFMaskedLMOutput(logits=self.decoder(self.head(encoded[0])))


class _Classifier(_WithHead):
    """Classifies rows or tokens; `answer` makes the outputs from the logits."""

    num_outputs: int | None = None  # of each row or token; by default the number of labels

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.drop = tf_keras.layers.Dropout(config.classifier_dropout)
        initializer = tf_keras.initializers.TruncatedNormal(stddev=config.hidden_size**-0.5)
        num_outputs = self.num_outputs or config.num_labels
        self.classifier = tf_keras.layers.Dense(num_outputs, kernel_initializer=initializer, name="classifier")

    def outputs_from(self, encoded: TFBaseModelOutput, attention_mask: tf.Tensor | None, training: bool) -> Any:
        states = self.head(self.chosen(encoded[0], attention_mask))
        return self.answer(self.classifier(self.drop(states, training=training)))

    def chosen(self, hidden_states: tf.Tensor, attention_mask: tf.Tensor | None) -> tf.Tensor:  # noqa: ARG002
        """Choose what is classified, all tokens by default."""
        return hidden_states

    def answer(self, logits: tf.Tensor) -> Any:
        raise NotImplementedError


class TFModernBertForSequenceClassification(_Classifier):
    """Classifies rows by their first token or the mean of all, as `classifier_pooling` says."""

    def chosen(self, hidden_states: tf.Tensor, attention_mask: tf.Tensor | None) -> tf.Tensor:
        """Pool to (batch, 1, hidden)."""
        if self.config.classifier_pooling == "cls":
            return hidden_states[:, :1]
        weights = tf.ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
        weights = tf.cast(weights, hidden_states.dtype)[..., tf.newaxis]  # (batch, length, 1)
        return tf.reduce_sum(hidden_states * weights, 1, keepdims=True) / tf.reduce_sum(weights, 1, keepdims=True)

    def answer(self, logits: tf.Tensor) -> TFSequenceClassifierOutput:
        return TFSequenceClassifierOutput(logits=tf.squeeze(logits, axis=1))  # (batch, labels)


class TFModernBertForMultipleChoice(TFModernBertForSequenceClassification):
    """Chooses one of several texts by one number for each."""

    num_outputs = 1

    def call(
        self,
        input_ids: tf.Tensor | None = None,
        attention_mask: tf.Tensor | None = None,
        training: bool = False,
        **_: Any,
    ) -> TFMultipleChoiceModelOutput:
        """Compute logits (batch, choices) of ids (batch, choices, length)."""
        if isinstance(input_ids, dict):
            input_ids, attention_mask = input_ids["input_ids"], input_ids.get("attention_mask")
        assert input_ids is not None
        flat = [one if one is None else tf.reshape(one, (-1, one.shape[2])) for one in (input_ids, attention_mask)]
        found = super().call(flat[0], attention_mask=flat[1], training=training)
        return TFMultipleChoiceModelOutput(logits=tf.reshape(found.logits, (-1, input_ids.shape[1])))


class TFModernBertForTokenClassification(_Classifier):
    """Classifies tokens."""

    def answer(self, logits: tf.Tensor) -> TFTokenClassifierOutput:
        return TFTokenClassifierOutput(logits=logits)  # (batch, length, labels)


class TFModernBertForQuestionAnswering(_Classifier):
    """Finds where an answer starts and ends."""

    def answer(self, logits: tf.Tensor) -> TFQuestionAnsweringModelOutput:
        start, end = tf.unstack(logits, axis=-1)  # (batch, length) each
        return TFQuestionAnsweringModelOutput(start_logits=start, end_logits=end)


for name, model_class in {
    "TFAutoModel": TFModernBertModel,
    "TFAutoModelForMaskedLM": TFModernBertForMaskedLM,
    "TFAutoModelForSequenceClassification": TFModernBertForSequenceClassification,
    "TFAutoModelForMultipleChoice": TFModernBertForMultipleChoice,
    "TFAutoModelForTokenClassification": TFModernBertForTokenClassification,
    "TFAutoModelForQuestionAnswering": TFModernBertForQuestionAnswering,
}.items():
    getattr(transformers, name).register(ModernBertConfig, model_class, exist_ok=True)
