"""Heads put on a pretrained encoder: initialized randomly, exported, recomputed in PyTorch."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from finetuning.tasks.custom import load_task
from mlm_common.tokenizer import vocabulary_size
from tests.fixtures.finetuned_runs import TASK
from tests.fixtures.made_once import made_once
from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_models import (
    CONFIGS,
    is_computed_here,
    one_layer_model,
    padded_batch,
    tiny_config,
    tiny_tokenizer,
)
from train.model.build import build_network
from train.model.from_pretrained import load_initial_weights
from train.model.pretrained_files import set_labels
from train.publishing.pytorch_format import export_model

pytestmark = pytest.mark.slow

NUM_IDS = vocabulary_size(tiny_tokenizer())
NAMES = tuple(filter(is_computed_here, ("bert", "distilbert", "modernbert", "roberta")))

# Computes, for each export, the outputs of the head, and prints what was not loaded and how far they are off.
READER = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModel

for folder in sorted(Path(sys.argv[1]).iterdir()):
    model, loading = AutoModel.from_pretrained(folder / "custom", output_loading_info=True)
    model.eval()
    arrays = np.load(folder / "tensorflow.npz")
    weights = load_file(folder / "custom" / "model.safetensors")
    head = {name: weight for name, weight in weights.items() if "custom_head" in name}
    ids, attended = (torch.tensor(arrays[name]).long() for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=attended).last_hidden_state
    pooled = (states * attended[..., None]).sum(1) / attended.sum(1, keepdim=True)
    wide = torch.tanh(pooled @ head["custom_head.dense.weight"].T + head["custom_head.dense.bias"])
    outputs = wide @ head["custom_head.dense_1.weight"].T + head["custom_head.dense_1.bias"]
    difference = float(np.abs(outputs.numpy() - arrays["outputs"]).max())
    print(json.dumps({
        "name": folder.name,
        "missing": sorted(map(str, loading["missing_keys"])),
        "unexpected": len(loading["unexpected_keys"]),
        "difference": difference,
    }))
"""


def write_heads(name: str, folder: Path) -> None:
    """Write `mlm/`, a pretrained model, `custom/`, with a head on its encoder, and what that says of some rows."""
    pretrained = one_layer_model(name)
    export_model(pretrained, tiny_tokenizer(), str(folder / "mlm"), model_max_length=30, vocabulary_size=NUM_IDS)
    task = load_task(TASK)(pad_token_id=pretrained.config.pad_token_id, token_types=False)
    tf_keras.utils.set_random_seed(5)
    network = task.adapt_network(one_layer_model(name, model_class="TFAutoModel", vocab_size=NUM_IDS))
    load_initial_weights(network, str(folder / "mlm"), NUM_IDS, "TFAutoModel", adapt_network=task.adapt_network)
    inputs, _ = padded_batch(network)
    inputs["input_ids"] = np.where(inputs["input_ids"] < NUM_IDS, inputs["input_ids"], 7)
    rows = {key: tf.constant(array) for key, array in inputs.items()}
    outputs = task.outputs(network, rows, training=False).numpy()
    np.savez(folder / "tensorflow.npz", outputs=outputs, **inputs)
    export_model(network, tiny_tokenizer(), str(folder / "custom"), model_max_length=30)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        for name in NAMES:
            (folder / name).mkdir()
            write_heads(name, folder / name)

    return made_once(tmp_path_factory, "custom-heads", make)


def test_pytorch_computes_the_same(exports, torch_python):
    read = [json.loads(line) for line in output_of(torch_python, READER, str(exports)).splitlines()]
    assert [report["name"] for report in read] == sorted(NAMES)
    for report in read:
        assert all("pooler" in key for key in report["missing"]), report
        assert report["unexpected"] == 4, report
        assert report["difference"] < 1e-4, report


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("distilbert", ("SequenceClassification",)),
        ("roberta", ("SequenceClassification", "TokenClassification", "QuestionAnswering")),
    ],
)
def test_a_head_starts_randomly(name, heads, exports):
    """On the encoder of a masked language model."""
    learned = by_name(one_layer_model(name))
    for head in heads:
        config = tiny_config(name, **{"n_layers" if "n_layers" in CONFIGS[name] else "num_hidden_layers": 1})
        config.vocab_size = NUM_IDS
        set_labels(config, {index: f"label {index}" for index in range(2 if head == "QuestionAnswering" else 3)})
        model_class = f"TFAutoModelFor{head}"
        network = build_network(config, vocabulary_size=NUM_IDS, seed=0, model_class=model_class)
        starts = []
        for seed in (1, 2):
            tf_keras.utils.set_random_seed(seed)
            mlm = str(exports / name / "mlm")
            load_initial_weights(network, mlm, NUM_IDS, model_class, adapt_network=lambda network: network)
            starts.append(by_name(network))
        # A pooler that a masked language model has is never trained, and is in no export.
        shared = [variable for variable in starts[0] if variable in learned and "pooler" not in variable]
        of_encoder = [variable for variable in shared if learned[variable].shape == starts[0][variable].shape]
        assert len(of_encoder) > 10
        for variable in of_encoder:
            np.testing.assert_array_equal(starts[0][variable], learned[variable])
        differing = [variable for variable in starts[0] if (starts[0][variable] != starts[1][variable]).any()]
        assert differing
        assert not set(differing) & set(of_encoder)


def by_name(network: object) -> dict[str, np.ndarray]:
    return {variable.name.partition("/")[2]: variable.numpy() for variable in network.weights}
