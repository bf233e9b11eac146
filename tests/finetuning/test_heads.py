"""Every architecture takes its encoder from a pretrained model, and initializes each head randomly."""

from pathlib import Path

import numpy as np
import pytest
import tf_keras

from mlm_common.tokenizer import vocabulary_size
from tests.fixtures.tiny_models import CONFIGS, SAME_CODE, one_layer_model, tiny_config, tiny_tokenizer
from train.config.learning import ModelConfig
from train.model.build import build_network
from train.model.from_pretrained import load_initial_weights
from train.model.pretrained_files import set_labels
from train.publishing.pytorch_format import export_model

pytestmark = pytest.mark.slow

HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
NUM_IDS = vocabulary_size(tiny_tokenizer())


def by_name(network: object) -> dict[str, np.ndarray]:
    return {variable.name.partition("/")[2]: variable.numpy() for variable in network.weights}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SAME_CODE])
def test_a_head_starts_randomly(name: str, tmp_path: Path) -> None:
    pretrained = one_layer_model(name)
    export_model(pretrained, tiny_tokenizer(), str(tmp_path), model_max_length=30, vocabulary_size=NUM_IDS)
    learned = by_name(pretrained)
    for head in HEADS:
        config = tiny_config(name, **{"n_layers" if "n_layers" in CONFIGS[name] else "num_hidden_layers": 1})
        config.vocab_size = NUM_IDS
        set_labels(config, {index: f"label {index}" for index in range(2 if head == "QuestionAnswering" else 3)})
        model_class = f"TFAutoModelFor{head}"
        network = build_network(config, ModelConfig(), vocabulary_size=NUM_IDS, seed=0, model_class=model_class)
        starts = []
        for seed in (1, 2):
            tf_keras.utils.set_random_seed(seed)
            load_initial_weights(network, str(tmp_path), NUM_IDS, model_class, adapt_network=lambda network: network)
            starts.append(by_name(network))
        # A pooler that a masked language model has is never trained, and is in no export.
        shared = [one for one in starts[0] if one in learned and "pooler" not in one]
        of_encoder = [one for one in shared if learned[one].shape == starts[0][one].shape]
        assert len(of_encoder) > 10
        for one in of_encoder:
            np.testing.assert_array_equal(starts[0][one], learned[one])
        differing = [one for one in starts[0] if (starts[0][one] != starts[1][one]).any()]
        assert differing
        assert not set(differing) & set(of_encoder)
