"""The step of embeddings, executed as the replicas of a slice, against one replica with the whole batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from finetuning.tasks.embedding import Embedding, Encoder
from tests.fixtures.replicas import Case, execute, lower, values_of, variables_of
from tests.fixtures.tiny_models import PAD, VOCABULARY, one_layer_model
from tests.fixtures.tiny_steps import compiled_model

NUM_ROWS, NUM_STEPS = 16, 2


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Make rows of a query and two passages, some of them the same texts, the last row of padding."""
    draw = np.random.default_rng(seed)
    batch: dict[str, np.ndarray] = {}
    for prefix, shape in (("", (NUM_ROWS, 8)), ("passage_", (NUM_ROWS, 2, 12))):
        lengths = draw.integers(3, shape[-1] + 1, shape[:-1])
        mask = (np.arange(shape[-1]) < lengths[..., np.newaxis]).astype(np.int32)
        ids = draw.integers(5, VOCABULARY, shape, dtype=np.int32)
        texts = draw.integers(0, 12, shape[:-1], dtype=np.int32)
        texts[-1] = -1
        batch |= {f"{prefix}input_ids": np.where(mask, ids, PAD), f"{prefix}attention_mask": mask}
        batch |= {"passage_index": texts} if prefix else {"index": np.append(np.arange(15), -1), "text": texts}
    return {name: array.astype(np.int32) for name, array in batch.items()}


@pytest.mark.slow
def test_replicas_and_micro_batches_make_the_step_of_one():
    """Dropout, texts that occur twice and padding take part; all negatives are kept."""
    settings = SimpleNamespace(temperature=0.1, symmetric_loss=True, matryoshka_dims=[8])
    task = Embedding(Encoder("mean", 32, None, ("", ""), 12), 2, settings, pad_token_id=PAD, token_types=False)
    network = one_layer_model("roberta", model_class="TFAutoModel", hidden_dropout_prob=0.1)
    model, batches = compiled_model(network, task), [batch_of(seed) for seed in range(NUM_STEPS)]
    start = values_of(model)
    model.num_micro_batches = 4
    program = lower(model, model.train_step, batches[0], 4)
    case = Case([program], start, [(0, batch) for batch in batches])
    model.num_micro_batches = 1
    losses = [
        float(model.train_step({name: tf.constant(array) for name, array in batch.items()})["loss"])
        for batch in batches
    ]
    expected = {name: np.asarray(variable.numpy()) for name, variable in variables_of(model).items()}
    (results,) = execute([case])
    for result, loss in zip(results, losses, strict=True):
        np.testing.assert_allclose(result.outputs[0], loss, rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(results[-1].state[name][0], value, rtol=1e-4, atol=2e-5, err_msg=name)
