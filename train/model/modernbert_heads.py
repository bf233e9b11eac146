"""ModernBERT with the heads of fine-tuning: the same beginning, one more layer."""

from typing import Any

import tensorflow as tf
import tf_keras
from transformers import (
    ModernBertConfig,
    TFAutoModelForQuestionAnswering,
    TFAutoModelForSequenceClassification,
    TFAutoModelForTokenClassification,
)
from transformers.modeling_tf_outputs import (
    TFQuestionAnsweringModelOutput,
    TFSequenceClassifierOutput,
    TFTokenClassifierOutput,
)
from transformers.modeling_tf_utils import unpack_inputs

from train.model.modernbert import TFModernBertWithHead


class _Classifier(TFModernBertWithHead):
    """Classifies rows or tokens; the answer is made of the logits by `answer`."""

    def __init__(self, config: ModernBertConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        self.drop = tf_keras.layers.Dropout(config.classifier_dropout)
        initializer = tf_keras.initializers.TruncatedNormal(stddev=config.hidden_size**-0.5)
        self.classifier = tf_keras.layers.Dense(config.num_labels, kernel_initializer=initializer, name="classifier")

    @property
    def last(self) -> tf_keras.layers.Layer:
        """The classifier."""
        return self.classifier

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
        """Compute the logits of ids (batch, length)."""
        hidden_states = self.model(input_ids, attention_mask=attention_mask, training=training)[0]
        states = self.head(self.chosen(hidden_states, attention_mask))
        return self.answer(self.classifier(self.drop(states, training=training)))

    def chosen(self, hidden_states: tf.Tensor, attention_mask: tf.Tensor | None) -> tf.Tensor:  # noqa: ARG002
        """Choose what is classified: all tokens, unless a class says otherwise."""
        return hidden_states

    def answer(self, logits: tf.Tensor) -> Any:
        """Make the output of the class."""
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
        """Logits are (batch, labels)."""
        return TFSequenceClassifierOutput(logits=tf.squeeze(logits, axis=1))


class TFModernBertForTokenClassification(_Classifier):
    """Classifies tokens."""

    def answer(self, logits: tf.Tensor) -> TFTokenClassifierOutput:
        """Logits are (batch, length, labels)."""
        return TFTokenClassifierOutput(logits=logits)


class TFModernBertForQuestionAnswering(_Classifier):
    """Finds where an answer starts and ends."""

    def answer(self, logits: tf.Tensor) -> TFQuestionAnsweringModelOutput:
        """Logits are (batch, length) each."""
        start, end = tf.unstack(logits, axis=-1)
        return TFQuestionAnsweringModelOutput(start_logits=start, end_logits=end)


TFAutoModelForSequenceClassification.register(ModernBertConfig, TFModernBertForSequenceClassification, exist_ok=True)
TFAutoModelForTokenClassification.register(ModernBertConfig, TFModernBertForTokenClassification, exist_ok=True)
TFAutoModelForQuestionAnswering.register(ModernBertConfig, TFModernBertForQuestionAnswering, exist_ok=True)
