"""Muon against NumPy and PyTorch; orthogonalized matrices of any shape; which weights of a network are matrices."""

import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError
from tests.fixtures.arrays import assert_all_close
from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_models import each_architecture, tiny_model
from tests.fixtures.tiny_steps import two_cpus
from train.config.learning import OptimizationConfig
from train.model.build import hidden_matrices
from train.step import sharding
from train.step.optimizer import build_optimizer
from train.step.orthogonal import COEFFICIENTS, orthogonalized, orthogonalized_in_shares
from train.step.sharding import Sharding

RATE, MUON_RATE, DECAY, MOMENTUM = 0.01, 0.03, 0.1, 0.9
# Two square matrices and a tall one side by side, a wide one, and a table that AdamW updates.
SHAPES = {"layer/fused/kernel": (6, 12), "layer/wide/kernel": (3, 8), "embeddings/weight": (6, 4)}
NUM_MATRICES = (2, 1, 0)
NUM_STEPS = 20


def new_arrays(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape) for shape in SHAPES.values()]


def newton_schulz(matrix):
    """As its authors write it, for a wide matrix, in float64."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    x = matrix / max(np.linalg.norm(matrix), 1e-30)
    for a, b, c in COEFFICIENTS:
        squares = x @ x.T
        x = a * x + (b * squares + c * squares @ squares) @ x
    return x


def trained(rate_factors=(), **settings):
    """Train for some steps and return the variables and the gradients that they were given."""
    variables = [
        tf.Variable(array, name=name, dtype=tf.float32) for name, array in zip(SHAPES, new_arrays(0), strict=True)
    ]
    config = OptimizationConfig(
        optimizer="muon", learning_rate=RATE, weight_decay_rate=DECAY, schedule="constant", muon_momentum=MOMENTUM,
        **settings,
    )  # fmt: skip
    optimizer = build_optimizer(
        config, rate_factors=rate_factors, num_matrices=NUM_MATRICES, num_steps=NUM_STEPS, num_warmup_steps=0
    )
    optimizer.build(variables)
    gradients = [new_arrays(1 + step) for step in range(NUM_STEPS)]
    for given_gradients in gradients:
        tensors = [tf.constant(gradient, tf.float32) for gradient in given_gradients]
        optimizer.apply_scaled(tensors, variables, factor=tf.constant(1.0), is_finite=tf.constant(True))
    return optimizer, variables, gradients


@pytest.mark.parametrize("factors", [(), (0.5, 0.25, 1.0)])
def test_updates_are_those_of_the_paper(factors):
    """Factors are those of `--layer-lr-decay`."""
    _, variables, gradients = trained(factors, muon_learning_rate=MUON_RATE)
    for index, num_matrices in enumerate(NUM_MATRICES[:2]):
        weight, moment = new_arrays(0)[index], 0.0
        rate = MUON_RATE * (factors[index] if factors else 1)
        for gradient in (given_gradients[index] for given_gradients in gradients):
            moment = MOMENTUM * moment + (1 - MOMENTUM) * gradient
            direction = MOMENTUM * moment + (1 - MOMENTUM) * gradient
            parts = np.split(direction, num_matrices, axis=1)
            scale = 0.2 * np.sqrt(max(parts[0].shape))
            change = np.concatenate([newton_schulz(part) for part in parts], axis=1)
            weight = weight - rate * DECAY * weight - rate * scale * change
        np.testing.assert_allclose(variables[index], weight, rtol=1e-4, atol=1e-5)


def test_other_variables_and_networks_without_matrices_are_updated_as_by_adamw():
    _, variables, gradients = trained()
    expected = [
        tf.Variable(array, dtype=tf.float32, name=name) for name, array in zip(SHAPES, new_arrays(0), strict=True)
    ]
    config = OptimizationConfig(learning_rate=RATE, weight_decay_rate=DECAY, schedule="constant")
    adamw = build_optimizer(config, num_steps=NUM_STEPS, num_warmup_steps=0)
    adamw.build(expected)
    for given_gradients in gradients:
        tensors = [tf.constant(gradient, tf.float32) for gradient in given_gradients]
        adamw.apply_scaled(tensors, expected, factor=tf.constant(1.0), is_finite=tf.constant(True))
    assert_all_close(variables[2:], expected[2:], rtol=1e-6)


def test_a_matrix_has_one_moment():
    optimizer, variables, _ = trained()
    state = optimizer.state_of(dict(zip(SHAPES, variables, strict=True)))
    firsts = [f"first_moment/{name}" for name in SHAPES]
    assert list(state) == ["iterations", *firsts, "second_moment/embeddings/weight"]


TORCH_MUON = """
import json, sys
import torch
given = json.loads(sys.argv[1])
weights = [torch.nn.Parameter(torch.tensor(one, dtype=torch.float32)) for one in given["weights"]]
muon = torch.optim.Muon(
    weights, lr=given["rate"], weight_decay=given["decay"], momentum=given["momentum"], adjust_lr_fn="match_rms_adamw"
)
for gradients in given["gradients"]:
    for weight, gradient in zip(weights, gradients):
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
    muon.step()
print(json.dumps([weight.tolist() for weight in weights]))
"""


@pytest.mark.slow
def test_updates_are_those_of_torch(torch_python):
    """To the precision of bfloat16, in which torch orthogonalizes."""
    _, variables, gradients = trained()

    def matrices(arrays):
        return [*np.split(np.asarray(arrays[0]), 2, axis=1), np.asarray(arrays[1])]

    given_to_torch = {
        "weights": [matrix.tolist() for matrix in matrices(new_arrays(0))],
        "gradients": [[matrix.tolist() for matrix in matrices(arrays)] for arrays in gradients],
        "rate": RATE,
        "decay": DECAY,
        "momentum": MOMENTUM,
    }
    torch_weights = json.loads(output_of(torch_python, TORCH_MUON, json.dumps(given_to_torch)))
    for weight, expected, start in zip(matrices(variables), torch_weights, matrices(new_arrays(0)), strict=True):
        moved = np.linalg.norm(np.asarray(expected) - start)
        assert np.linalg.norm(weight - np.asarray(expected)) < 0.02 * moved


SIZES = st.integers(1, 9)


@given(SIZES, SIZES, st.integers(0, 99), st.sampled_from([1e-12, 1e-3, 1.0, 1e6]))
def test_singular_values_come_near_1_and_vectors_stay(num_rows, num_columns, seed, scale):
    """Of tall, wide and square matrices, of one row or column, large and small, some of a lower rank."""
    random = np.random.default_rng(seed)
    rank = random.integers(1, min(num_rows, num_columns) + 1)
    left, right = random.normal(size=(num_rows, rank)), random.normal(size=(rank, num_columns))
    (u, values, v) = np.linalg.svd(left @ right, full_matrices=False)
    values = np.where(np.arange(len(values)) < rank, np.linspace(1, 0.1, len(values)), 0)
    orthogonal = orthogonalized(tf.constant(scale * (u * values) @ v, tf.float32)).numpy().astype(np.float64)
    assert orthogonal.shape == (num_rows, num_columns)
    in_its_bases = u.T @ orthogonal @ v.T
    singular = np.diag(in_its_bases)
    assert np.all((singular[:rank] > 0.6) & (singular[:rank] < 1.3))
    assert np.all(np.abs(singular[rank:]) < 1e-3)
    np.testing.assert_allclose(in_its_bases - np.diag(singular), 0, atol=1e-3)


def test_zeros_stay_and_matrices_of_a_stack_are_as_alone():
    assert not orthogonalized(tf.zeros((2, 3, 5))).numpy().any()
    stack = np.random.default_rng(0).normal(size=(4, 7, 3)).astype(np.float32)
    alone = [orthogonalized(tf.constant(matrix)) for matrix in stack]
    assert_all_close(orthogonalized(tf.constant(stack)), alone, rtol=1e-5, atol=1e-6)


# Of whole matrices, and the axis along which replicas divide each: more of one shape, in both directions, than there
# are replicas, fewer of others, and one that every replica has whole.
DIVIDED = [((4, 6), 0), ((4, 6), 1), ((3, 5), None), ((6, 4), 0), ((6, 4), 1), ((4, 6), 0), ((4, 4), 1), ((2, 8), 0)]


def test_replicas_that_share_the_matrices_find_those_of_one(monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 1)
    random = np.random.default_rng(0)
    matrices = [random.normal(size=shape).astype(np.float32) for shape, _ in DIVIDED]
    axes = [axis for _, axis in DIVIDED]

    def on_replica():
        shards = [
            matrix if axis is None else tf.gather(np.split(matrix, 2, axis), sharding.replica_index())
            for matrix, axis in zip(matrices, axes, strict=True)
        ]
        return orthogonalized_in_shares(list(map(tf.convert_to_tensor, shards)), axes, Sharding(2, by_xla=False))

    strategy = two_cpus()
    for matrix, per_replica in zip(matrices, strategy.run(on_replica), strict=True):
        for value in strategy.experimental_local_results(per_replica):
            np.testing.assert_allclose(value, orthogonalized(tf.constant(matrix)), atol=1e-5)


# Query, key, value, what follows them, and the two of the feed-forward layer; and what some have beside them.
NUM_OF_A_LAYER = {
    **dict.fromkeys(("albert", "bert", "camembert", "distilbert", "electra", "mpnet", "rembert", "roberta"), 6),
    **dict.fromkeys(("deberta-v2", "roberta-prelayernorm", "roformer", "xlm-roberta"), 6),
    "convbert": 8,  # makes kernels, and multiplies values
    "deberta-v2 without shared keys": 8,  # positions, as keys and as queries
    "mobilebert": 15,  # four feed-forward layers and three bottlenecks
    "modernbert": 7,  # gates
}


@pytest.mark.parametrize("name", each_architecture("deberta-v2 without shared keys"))
def test_matrices_of_each_architecture(name):
    model = tiny_model(name)
    counts = hidden_matrices(model)
    assert len(counts) == len(model.trainable_variables)
    of_head = []
    for variable, count in zip(model.trainable_variables, counts, strict=True):
        is_kernel = variable.name.endswith("kernel:0") and len(variable.shape) == 2
        if any(part in variable.name for part in ("layer_._", "layers_._", "layer_groups_._")):
            assert (count > 0) == is_kernel
        elif count:
            of_head.append(variable)
    num_layers = 1 if name == "albert" else 2
    assert sum(counts) == NUM_OF_A_LAYER[name] * num_layers + len(of_head)
    (dense,) = of_head
    assert dense.name.endswith(("/dense/kernel:0", "/vocab_transform/kernel:0"))
    assert model.config.vocab_size not in dense.shape


@pytest.mark.parametrize("setting", [{"muon_learning_rate": 0.1}, {"muon_momentum": 0.9}])
def test_its_settings_are_refused_with_another_optimizer(setting):
    with pytest.raises(InputError, match=r"--muon-\S+ needs --optimizer muon; received 0.\d with adamw"):
        OptimizationConfig(**setting)
    OptimizationConfig(optimizer="muon", **setting)
