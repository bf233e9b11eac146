"""Encoders with heads for pretraining and fine-tuning. Weights have the names of transformers' TF classes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from train.layers.activations import ACTIVATION_FUNCTIONS
from train.layers.random_bits import KeyedDropout
from train.model.anatomy import anatomy_of
from train.model.architectures import architecture_of
from train.model.encoder import Encoder, new_norm, normal


class States(NamedTuple):
    """The encoder's last states, (batch, length, hidden), and the pooled state of the first token, (batch, hidden)."""

    last_hidden_state: tf.Tensor
    pooler_output: tf.Tensor


class Logits(NamedTuple):
    """Logits, (…, classes), and the encoder's last states, (batch, length, hidden)."""

    logits: tf.Tensor
    last_hidden_state: tf.Tensor


class PairLogits(NamedTuple):
    """Logits of tokens, (…, vocabulary), logits of pairs of texts, (batch, 2), and the encoder's last states."""

    prediction_logits: tf.Tensor
    seq_relationship_logits: tf.Tensor
    last_hidden_state: tf.Tensor


class SpanLogits(NamedTuple):
    """Logits of an answer's start and end, (batch, length) each, and the encoder's last states."""

    start_logits: tf.Tensor
    end_logits: tf.Tensor
    last_hidden_state: tf.Tensor


@dataclass(frozen=True)
class Transform:
    """The first part of a head: a dense layer, an activation, and a norm if `norm` is a name.

    Attributes:
        dense, norm: names of the layers.
        deviation: standard deviation of fresh weights; None for Keras's default initializer, as in ELECTRA.
    """

    dense: str
    activation: str
    norm: str | None = None
    use_bias: bool = True
    deviation: float | None = None


class Network(tf_keras.Model):
    """An encoder; subclasses add a head.

    Attributes:
        class_name: the name of transformers' TF class with this architecture and head.
        base_model_prefix: the name of the encoder, as an attribute and in the names of variables.
        family: `model_type`, or "roberta" for all architectures with RoBERTa's heads.
        dropout_layers: the dropout layers, in the order of their numbers (`train.layers.random_bits`).
    """

    head = "Model"

    def __init__(self, config: PretrainedConfig, name: str | None = None):
        class_name = f"TF{type(config).__name__.removesuffix('Config')}{self.head}"
        super().__init__(name=name or snake_case(class_name))
        anatomy, prefix = anatomy_of(config), architecture_of(config).prefix
        assert prefix is not None
        self.class_name, self.base_model_prefix = class_name, prefix
        self.config, self.anatomy = config, anatomy
        self.family = "roberta" if prefix.startswith("roberta") else config.model_type
        setattr(self, prefix, Encoder(config, anatomy))
        self.transform: tf_keras.layers.Dense | None = None
        self.transform_norm: tf_keras.layers.LayerNormalization | None = None
        self.make_head()

    @property
    def encoder(self) -> Encoder:
        return getattr(self, self.base_model_prefix)

    @property
    def dummy_inputs(self) -> dict[str, tf.Tensor]:
        """Rows for a first call, which creates the weights."""
        return {"input_ids": tf.zeros((2, 3), tf.int32)}

    @property
    def dropout_layers(self) -> list[KeyedDropout]:
        encoder = self.encoder
        of_layers = [
            dropout
            for layer in encoder.layer
            for dropout in (layer.probability_dropout, layer.attention_dropout, layer.feed_forward_dropout)
        ]
        of_embeddings = [encoder.embeddings.dropout]
        return [*of_layers, *of_embeddings] if self.family == "roberta" else [*of_embeddings, *of_layers]

    def make_head(self) -> None:
        """Make the layers of the head; by default the pooler, if the architecture has one."""
        if self.family in ("bert", "roberta"):
            self.make_transform(self.pooler)

    @property
    def pooler(self) -> Transform:
        """The first part of BERT's and RoBERTa's heads for rows, which read the state of a row's first token."""
        name = f"{self.base_model_prefix}/pooler/dense"
        return Transform(name, "tanh", deviation=self.config.initializer_range)

    @property
    def modernbert_transform(self) -> Transform:
        """The first part of every ModernBERT head."""
        config, deviation = self.config, self.anatomy.output_deviation
        return Transform("head/dense", config.classifier_activation, "head/norm", config.classifier_bias, deviation)

    def make_transform(self, transform: Transform, units: int | None = None) -> None:
        start = "glorot_uniform" if transform.deviation is None else normal(transform.deviation)
        units = units or self.anatomy.hidden_size
        self.transform = tf_keras.layers.Dense(
            units, use_bias=transform.use_bias, kernel_initializer=start, name=transform.dense
        )
        self.activate = ACTIVATION_FUNCTIONS[transform.activation]
        self.transform_norm = new_norm(self.anatomy, transform.norm) if transform.norm else None

    def transformed(self, states: tf.Tensor) -> tf.Tensor:
        """Apply the transform to states, (…, hidden), if the head has one."""
        if self.transform is None:
            return states
        states = self.activate(self.transform(states))
        return states if self.transform_norm is None else self.transform_norm(states)

    def encode(self, inputs: Mapping[str, tf.Tensor], *, training: bool) -> tf.Tensor:
        """Compute the encoder's last states, (batch, length, hidden).

        Args:
            inputs: `input_ids`, int32 (batch, length), or `inputs_embeds`, (batch, length, embedding size); optionally
                `attention_mask`, 0 at padding, and `token_type_ids`.
        """
        tokens = inputs["inputs_embeds"] if "inputs_embeds" in inputs else inputs["input_ids"]
        attended, token_types = inputs.get("attention_mask"), inputs.get("token_type_ids")
        return self.encoder(tokens, attended, token_types, training=training)

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        """Compute the outputs for rows; `inputs` is the same as in `encode`."""
        states = self.encode(inputs, training=training)
        return States(states, self.transformed(states[:, 0]))


def snake_case(class_name: str) -> str:
    """Return the name that Keras gives a model of this class: tf_bert_for_masked_lm for TFBertForMaskedLM."""
    parted = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", class_name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", parted).lower()


class MaskedLM(Network):
    """Predicts masked tokens: the logits are products with the token embeddings, plus a bias."""

    head = "ForMaskedLM"

    def make_head(self) -> None:
        deviation, units = self.config.initializer_range, None
        if self.family == "bert":
            parts = "mlm___cls/predictions/transform/"
            transform = Transform(f"{parts}dense", self.anatomy.activation, f"{parts}LayerNorm", deviation=deviation)
            self.bias_name = "mlm___cls/predictions"
        elif self.family == "roberta":
            transform = Transform("lm_head/dense", "gelu", "lm_head/layer_norm", deviation=deviation)
            self.bias_name = "lm_head"
        elif self.family == "distilbert":
            activation = self.anatomy.activation
            transform = Transform("vocab_transform", activation, "vocab_layer_norm", deviation=deviation)
            self.bias_name = "vocab_projector"
        elif self.family == "electra":
            transform = Transform("generator_predictions/dense", "gelu", "generator_predictions/LayerNorm")
            self.bias_name, units = "generator_lm_head", self.anatomy.embedding_size
        else:
            transform, self.bias_name = self.modernbert_transform, "decoder"
        self.make_transform(transform, units)
        self.bias: tf.Variable | None = None

    def build(self, _: Any) -> None:
        if getattr(self.config, "decoder_bias", True):
            with tf.name_scope(self.bias_name):
                self.bias = self.add_weight(name="bias", shape=(self.config.vocab_size,), initializer="zeros")

    def token_logits(self, states: tf.Tensor, predict_at: tf.Tensor | None) -> tf.Tensor:
        """Compute (batch, length, vocabulary), or (1, num_predictions, vocabulary)."""
        if predict_at is not None:
            states = tf.gather(tf.reshape(states, (-1, states.shape[-1])), predict_at)[tf.newaxis]
        states = self.transformed(states)
        logits = tf.matmul(states, tf.cast(self.encoder.embeddings.weight, states.dtype), transpose_b=True)
        return logits if self.bias is None else logits + tf.cast(self.bias, logits.dtype)

    def call(  # type: ignore[override]
        self, inputs: Mapping[str, tf.Tensor], predict_at: tf.Tensor | None = None, training: bool = False
    ) -> Any:
        """Compute the outputs for rows; `inputs` is the same as in `encode`.

        Args:
            predict_at: positions to predict at, int32 (num_predictions,), as indices into the concatenated rows;
                positions may repeat. By default the head predicts at all positions. With `predict_at`, the logits are
                (1, num_predictions, vocabulary) instead of (batch, length, vocabulary). The head costs as much as
                several layers, and one list for the whole batch needs fewer spare slots than one list per row.
        """
        states = self.encode(inputs, training=training)
        return Logits(self.token_logits(states, predict_at), states)


class PairPretraining(MaskedLM):
    """Predicts masked tokens in two texts, and classifies how the two texts are related (BERT)."""

    head = "ForPreTraining"

    def make_head(self) -> None:
        super().make_head()
        start = normal(self.config.initializer_range)
        name = self.pooler.dense
        self.pair_pooler = tf_keras.layers.Dense(self.anatomy.hidden_size, "tanh", kernel_initializer=start, name=name)
        self.pair_classifier = tf_keras.layers.Dense(2, kernel_initializer=start, name="nsp___cls/seq_relationship")

    def call(  # type: ignore[override]
        self, inputs: Mapping[str, tf.Tensor], predict_at: tf.Tensor | None = None, training: bool = False
    ) -> Any:
        states = self.encode(inputs, training=training)
        of_pairs = self.pair_classifier(self.pair_pooler(states[:, 0]))
        return PairLogits(self.token_logits(states, predict_at), of_pairs, states)


class ReplacedTokenDetection(Network):
    """Decides for each token whether it was replaced (ELECTRA's discriminator): logits are (batch, length)."""

    head = "ForPreTraining"

    def make_head(self) -> None:
        self.make_transform(Transform("discriminator_predictions/dense", self.anatomy.activation))
        self.prediction = tf_keras.layers.Dense(1, name="discriminator_predictions/dense_prediction")

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        states = self.encode(inputs, training=training)
        return Logits(tf.squeeze(self.prediction(self.transformed(states)), axis=-1), states)


@dataclass(frozen=True)
class Classification:
    """A head that classifies: an optional transform, dropout, and a dense layer for the outputs.

    Attributes:
        rate: dropout rate.
        deviation: standard deviation of fresh weights of the dense layer.
        name: name of the dense layer.
        drops_first: also apply dropout before the transform.
        is_numbered_last: number the head's dropout layer after the encoder's layers (`train.layers.random_bits`), not
            before them.
    """

    transform: Transform | None
    rate: float
    deviation: float
    name: str = "classifier"
    drops_first: bool = False
    is_numbered_last: bool = False


class RowClassifier(Network):
    """Classifies rows by their first token.

    ModernBERT with the setting `classifier_pooling: mean` classifies rows by the mean of all tokens instead.
    """

    head = "ForSequenceClassification"

    def make_head(self) -> None:
        head = self.classification_head = self.classification()
        if head.transform is not None:
            self.make_transform(head.transform)
        self.dropout = KeyedDropout(head.rate)
        self.classifier = tf_keras.layers.Dense(
            self.num_outputs, kernel_initializer=normal(head.deviation), name=head.name
        )

    @property
    def num_outputs(self) -> int:
        return self.config.num_labels

    def classification(self) -> Classification:
        config, deviation = self.config, self.config.initializer_range
        if self.family == "modernbert":
            return Classification(self.modernbert_transform, config.classifier_dropout, config.hidden_size**-0.5)
        if self.family == "distilbert":
            transform = Transform("pre_classifier", "relu", deviation=deviation)
            return Classification(transform, config.seq_classif_dropout, deviation)
        if self.family == "bert":
            return Classification(self.pooler, self.classifier_rate, deviation)
        activation = "gelu" if self.family == "electra" else "tanh"
        transform = Transform("classifier/dense", activation, deviation=deviation)
        return Classification(transform, self.classifier_rate, deviation, "classifier/out_proj", True, True)

    @property
    def classifier_rate(self) -> float:
        if self.family == "distilbert":
            return self.config.dropout
        rate = self.config.classifier_dropout
        return self.config.hidden_dropout_prob if rate is None else rate

    @property
    def dropout_layers(self) -> list[KeyedDropout]:
        of_encoder = super().dropout_layers
        is_last = self.classification_head.is_numbered_last
        return [*of_encoder, self.dropout] if is_last else [self.dropout, *of_encoder]

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        states = self.encode(inputs, training=training)
        return Logits(self.class_logits(self.pooled(states, inputs.get("attention_mask")), training), states)

    def class_logits(self, states: tf.Tensor, training: bool) -> tf.Tensor:
        """Compute logits, (…, outputs), from states, (…, hidden)."""
        if self.classification_head.drops_first:
            states = self.dropout(states, training=training)
        return self.classifier(self.dropout(self.transformed(states), training=training))

    def pooled(self, states: tf.Tensor, attended: tf.Tensor | None) -> tf.Tensor:
        """Pool the states of rows, (batch, length, hidden), to (batch, hidden)."""
        if getattr(self.config, "classifier_pooling", "cls") == "cls":
            return states[:, 0]
        weights = tf.ones(states.shape[:2]) if attended is None else attended
        weights = tf.cast(weights, states.dtype)[..., tf.newaxis]  # (batch, length, 1)
        return tf.reduce_sum(states * weights, axis=1) / tf.reduce_sum(weights, axis=1)


class MultipleChoice(RowClassifier):
    """Chooses one of several texts, with one logit for each; rows are (batch, choices, length)."""

    head = "ForMultipleChoice"

    @property
    def num_outputs(self) -> int:
        return 1

    def classification(self) -> Classification:
        config = self.config
        if self.family in ("distilbert", "modernbert"):
            return super().classification()
        if self.family != "electra":
            return Classification(self.pooler, config.hidden_dropout_prob, config.initializer_range)
        transform = Transform("sequence_summary/summary", config.summary_activation, deviation=config.initializer_range)
        rate = config.summary_last_dropout
        return Classification(transform, rate, config.initializer_range, is_numbered_last=True)

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        """Compute logits, (batch, choices)."""
        num_choices = inputs["input_ids"].shape[1]
        of_texts = {name: tf.reshape(values, (-1, values.shape[2])) for name, values in inputs.items()}
        outputs = super().call(of_texts, training=training)
        return outputs._replace(logits=tf.reshape(outputs.logits, (-1, num_choices)))

    @property
    def dummy_inputs(self) -> dict[str, tf.Tensor]:
        return {"input_ids": tf.zeros((2, 2, 3), tf.int32)}


class TokenClassifier(RowClassifier):
    """Classifies tokens: logits are (batch, length, labels)."""

    head = "ForTokenClassification"

    def classification(self) -> Classification:
        if self.family == "modernbert":
            return super().classification()
        return Classification(None, self.classifier_rate, self.config.initializer_range)

    def pooled(self, states: tf.Tensor, attended: tf.Tensor | None) -> tf.Tensor:  # noqa: ARG002
        return states


class QuestionAnswering(TokenClassifier):
    """Finds where an answer starts and ends."""

    head = "ForQuestionAnswering"

    def classification(self) -> Classification:
        if self.family == "modernbert":
            return super().classification()
        rate = self.config.qa_dropout if self.family == "distilbert" else 0.0
        return Classification(None, rate, self.config.initializer_range, "qa_outputs", is_numbered_last=not rate)

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool = False) -> Any:
        logits, states = super().call(inputs, training=training)
        start, end = tf.unstack(logits, axis=-1)  # (batch, length) each
        return SpanLogits(start, end, states)
