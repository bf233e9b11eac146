"""Our networks of BERT and its kin compute what transformers' classes for TensorFlow do, from the same weights."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.tiny_models import PAD, VOCABULARY, of_transformers_4, tiny_config, tiny_model
from train.layers.random_bits import dropping_out_by, key_dropout, key_of, row_keys
from train.model import legacy
from train.model.build import build_network, new_network, recompute_layers
from train.model.networks import Network

HEADS = (
    "", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForMultipleChoice", "ForTokenClassification",
    "ForQuestionAnswering",
)  # fmt: skip
# Sums of the absolute values of fresh weights.
PINNED = {
    "model/embeddings/tok_embeddings/weight:0": 91.9427,
    "model/layers_._0/attn/Wqkv/kernel:0": 45.2342,
    "model/layers_._0/attn/Wo/kernel:0": 7.4069,
    "model/layers_._0/mlp/Wi/kernel:0": 59.0980,
    "model/layers_._0/mlp/Wo/kernel:0": 14.6807,
    "model/layers_._1/mlp/Wo/kernel:0": 14.6411,
    "head/dense/kernel:0": 7.3174,
}
RATES = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
# Those that have code of their own in transformers, which has no ModernBERT for TensorFlow.
UNLIKE = ("bert", "roberta", "electra", "roberta-prelayernorm", "distilbert")
FEW_HEADS = ("ForMaskedLM", "ForSequenceClassification")
MORE_HEADS = tuple(head for head in HEADS if head not in FEW_HEADS)


def rows_of(network: tf_keras.Model, head: str = "") -> dict[str, np.ndarray]:
    """Make three rows of length 12, 7 and 10, padded, of two texts; of two choices where the head takes these."""
    shape = (3, 2) if head == "ForMultipleChoice" else (3,)
    lengths = np.resize([12, 7, 10], shape)[..., np.newaxis]
    attended = np.arange(12) < lengths
    ids = np.random.default_rng(3).integers(5, VOCABULARY, attended.shape)
    rows = {"input_ids": np.where(attended, ids, PAD), "attention_mask": attended}
    if network.config.model_type != "distilbert":
        rows["token_type_ids"] = np.broadcast_to(np.arange(12) > 4, attended.shape)
    return {name: values.astype(np.int32) for name, values in rows.items()}


def theirs_and_ours(name: str, head: str = "ForMaskedLM", **changes) -> list[tf_keras.Model]:
    """Build both with the same weights."""
    config = tiny_config(name, num_labels=2, **({"type_vocab_size": 2} | changes))
    networks = [make(f"TFAutoModel{head}", config) for make in (legacy.new_network, new_network)]
    assert isinstance(networks[1], Network)
    theirs, ours = (by_name(network) for network in networks)
    assert {key: weight.shape for key, weight in theirs.items()} == {key: weight.shape for key, weight in ours.items()}
    for index, (key, weight) in enumerate(sorted(ours.items())):
        weight.assign_add(tf.random.stateless_normal(weight.shape, (7, index), stddev=0.1))
        theirs[key].assign(weight)
    return networks


def by_name(network: tf_keras.Model) -> dict[str, tf.Variable]:
    return {weight.name.partition("/")[2]: weight for weight in network.weights}


def outputs_and_gradients(network: tf_keras.Model, rows: dict, *, training: bool = False) -> tuple[list, dict]:
    """Compute the logits, or the last states without a head, and the gradients of a sum of them by name."""
    with tf.GradientTape() as tape:
        returned = network(rows, training=training)
        fields = returned._asdict() if isinstance(network, Network) else dict(returned)
        outputs = [values for key, values in fields.items() if key.endswith("logits")] or [fields["last_hidden_state"]]
        loss = tf.add_n([tf.reduce_sum(tf.sin(values)) for values in outputs])
    gradients = tape.gradient(loss, network.trainable_variables, unconnected_gradients="zero")
    names = [weight.name.partition("/")[2] for weight in network.trainable_variables]
    return outputs, {
        key: tf.convert_to_tensor(gradient).numpy() for key, gradient in zip(names, gradients, strict=True)
    }


def assert_equal(theirs: tuple[list, dict], ours: tuple[list, dict]) -> None:
    assert len(theirs[0]) == len(ours[0])
    for their_output, our_output in zip(theirs[0], ours[0], strict=True):
        np.testing.assert_allclose(our_output, their_output, atol=1e-5)
    assert theirs[1].keys() == ours[1].keys()
    for key, gradient in theirs[1].items():
        np.testing.assert_allclose(ours[1][key], gradient, rtol=1e-4, atol=1e-5 * max(1, np.abs(gradient).max()))


@of_transformers_4
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *((name, FEW_HEADS) for name in UNLIKE),
        *(pytest.param(name, MORE_HEADS, marks=pytest.mark.slow) for name in UNLIKE),
    ],
)
def test_heads_compute_what_those_of_transformers_do(name, heads):
    for head in heads:
        theirs, ours = theirs_and_ours(name, head)
        assert ours.class_name == type(theirs).__name__
        assert ours.base_model_prefix == theirs.base_model_prefix
        assert theirs.name.startswith(ours.name)
        rows = rows_of(ours, head)
        assert_equal(outputs_and_gradients(theirs, rows), outputs_and_gradients(ours, rows))


@of_transformers_4
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert", "ForMaskedLM"),
        ("roberta", "ForSequenceClassification"),
        ("electra", "ForMultipleChoice"),
        ("roberta-prelayernorm", "ForMaskedLM"),
    ],
)
def test_what_is_dropped_is_what_they_drop(name, head):
    networks = theirs_and_ours(name, head, **RATES)
    figures = []
    for network in networks:
        key_dropout(network)
        num_texts = 6 if head == "ForMultipleChoice" else 3
        with dropping_out_by(row_keys((5, 6), num_texts), key_of((5, 6))):
            figures.append(outputs_and_gradients(network, rows_of(network, head), training=True))
    assert_equal(*figures)
    plain, _ = outputs_and_gradients(networks[1], rows_of(networks[1], head))
    assert np.abs(plain[0] - figures[1][0][0]).max() > 0.01


@of_transformers_4
@pytest.mark.parametrize(
    "name", ["roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "electra"))]
)
def test_recomputed_layers_give_the_same_gradients(name):
    theirs, ours = theirs_and_ours(name, **RATES)
    recompute_layers(ours)
    figures = []
    for network in (theirs, ours):
        key_dropout(network)
        with dropping_out_by(row_keys((5, 6), 3), key_of((5, 6))):
            figures.append(outputs_and_gradients(network, rows_of(network), training=True))
    assert_equal(*figures)


@of_transformers_4
@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), [("bert", HEADS), *((name, FEW_HEADS) for name in UNLIKE[1:])])
def test_fresh_weights_are_distributed_as_theirs(name, heads):
    sizes = {"dim": 96} if name == "distilbert" else {"hidden_size": 96, "intermediate_size": 128}
    for head in heads:
        config = tiny_config(name, initializer_range=0.05, **sizes)
        theirs, ours = (by_name(make(f"TFAutoModel{head}", config)) for make in (legacy.new_network, new_network))
        for key, weight in ours.items():
            if weight.shape.num_elements() > 999:
                assert np.std(weight) == pytest.approx(np.std(theirs[key]), rel=0.1)
                assert np.abs(weight).max() == pytest.approx(np.abs(theirs[key]).max(), rel=0.2)
            else:
                assert bool(np.std(weight)) is bool(np.std(theirs[key]))


@of_transformers_4
@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "distilbert"])
def test_bfloat16_is_near_theirs(name):
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    networks = theirs_and_ours(name)
    tf_keras.mixed_precision.set_global_policy("float32")
    theirs, ours = (network(rows_of(network)).logits for network in networks)
    assert ours.dtype == theirs.dtype == tf.bfloat16
    network = theirs_and_ours(name)[1]
    exact = network(rows_of(network)).logits
    of_theirs, of_ours = (np.abs(tf.cast(logits, tf.float32) - exact).mean() for logits in (theirs, ours))
    assert of_ours < max(1.1 * of_theirs, 2e-2)


def test_fresh_weights_of_a_seed_stay():
    """Their order is that in which layers are called; the figures of the quick start depend on it."""
    network = build_network(tiny_config("modernbert"), vocabulary_size=VOCABULARY, seed=5)
    sums = {name: float(np.abs(weight.numpy()).sum()) for name, weight in by_name(network).items()}
    assert {name: sums[name] for name in PINNED} == pytest.approx(PINNED, rel=1e-5)


def test_the_numbers_of_dropout_layers_stay():
    """Another order would be another draw for every run."""
    for name, first in {"bert": "embeddings", "roberta": "layer", "modernbert": "embeddings"}.items():
        network = tiny_model(name, "TFAutoModelForSequenceClassification")
        key_dropout(network)
        encoder = network.encoder
        of_layers = [
            number
            for layer in encoder.layer
            for number in (
                layer.probability_dropout.number, layer.attention_dropout.number, layer.feed_forward_dropout.number,
            )
        ]  # fmt: skip
        if first == "layer":
            assert (of_layers, encoder.embeddings.dropout.number, network.dropout.number) == ([0, 1, 2, 3, 4, 5], 6, 7)
        else:
            assert (network.dropout.number, encoder.embeddings.dropout.number, of_layers) == (0, 1, [2, 3, 4, 5, 6, 7])
