"""Parameters counted by arithmetic are those that Keras counts, and weights in matrices those that Muon trains."""

from typing import Any

import pytest
import tensorflow as tf
from transformers import PretrainedConfig

from tests.fixtures.tiny_models import CONFIGS, tiny_config
from train.config.learning import OptimizationConfig
from train.model.architectures import ARCHITECTURES
from train.model.build import new_network
from train.model.computation import Parameters, count_parameters
from train.step.optimizer import count_with_one_moment

# Sizes that have nothing in common, so that no mistake cancels another.
ODD: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 40, "embedding_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 57, "hidden_dim": 57, "type_vocab_size": 3, "max_position_embeddings": 37,
}  # fmt: skip
HEADS = (
    "MaskedLM", "PreTraining", "SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering",
)  # fmt: skip


def built(config: PretrainedConfig, model_class: str) -> Parameters:
    with tf.Graph().as_default():  # where weights take no memory
        network = tf.autograph.experimental.do_not_convert(new_network)(model_class, config)
        muon = OptimizationConfig(optimizer="muon")
        return Parameters(int(network.count_params()), count_with_one_moment(muon, network))


@pytest.mark.parametrize("name", ["electra without projection", "modernbert without biases"])
def test_of_a_masked_language_model(name):
    config = tiny_config(name)
    assert count_parameters(config, "TFAutoModelForMaskedLM") == built(config, "TFAutoModelForMaskedLM")


@pytest.mark.parametrize(
    "name",
    [
        "electra",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("bert", "distilbert", "modernbert", "roberta", "roberta-prelayernorm")
        ),
    ],
)
def test_of_every_head_at_odd_sizes(name):
    sizes = {key: size for key, size in ODD.items() if key in tiny_config(name).to_dict() or key in CONFIGS[name]}
    for head in HEADS:
        if head == "PreTraining" and not ARCHITECTURES[name].has_pair_head:
            continue
        config = tiny_config(name, **sizes, num_labels=5 if head.endswith("Classification") else 2)
        model_class = f"TFAutoModelFor{head}"
        assert (head, count_parameters(config, model_class)) == (head, built(config, model_class))
    config = tiny_config(name, **sizes)
    assert count_parameters(config, "TFAutoModel") == built(config, "TFAutoModel")


def test_others_are_not_guessed():
    assert count_parameters(tiny_config("roformer")) is None
    assert count_parameters(tiny_config("bert"), "TFAutoModelForNextSentencePrediction") is None
