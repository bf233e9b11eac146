"""A larger model from a smaller one: exact tiles, the same logits at twice the width, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.errors import InputError
from tests.fixtures.arrays import assert_all_equal
from tests.fixtures.tiny_models import VOCABULARY, padded_batch, tiny_config, tiny_model, tiny_tokenizer
from tests.fixtures.tiny_run import run_flags
from train.model import growing
from train.model.build import build_network, encoder_layers
from train.model.from_pretrained import load_initial_weights, load_model
from train.model.growing import check_growth, tiled, wrapped
from train.publishing.pytorch_format import export_model
from train.run_mlm import main

TWICE = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128}


def grown_model(name: str, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Make a model with weights that say something, and a larger one from its export."""
    source = tiny_model(name)
    for number, variable in enumerate(source.weights):
        variable.assign_add(np.random.default_rng(number).normal(0, 0.1, variable.shape))
    export_model(source, tiny_tokenizer(), str(folder), model_max_length=30)
    config = tiny_config(name, **{"vocab_size": 256, **changes})
    model = build_network(config, vocabulary_size=VOCABULARY, seed=8)
    load_initial_weights(model, str(folder), VOCABULARY, grow_seed=0)
    return source, model


def test_the_middle_is_kept_and_wraps_around():
    for sizes, expected, middle in (
        ((3, 5, 1), [2, 0, 1, 2, 0], [1, 2, 3]),
        ((4, 8, 2), [2, 3, 0, 1, 2, 3, 0, 1], [2, 3, 4, 5]),
        ((4, 6, 2), [0, 1, 2, 3, 0, 1], [0, 1, 2, 3]),  # no head is cut
        ((3, 3, 2), [0, 1, 2], [0, 1, 2]),
    ):
        index, is_middle = wrapped(*sizes)
        assert index.tolist() == expected
        assert np.flatnonzero(is_middle).tolist() == middle


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 6), st.integers(0, 9), st.integers(0, 9))
def test_copies_of_inputs_give_copies_of_outputs(size, more_inputs, outputs, more_outputs, seed):
    generator = np.random.default_rng(seed)
    kernel, inputs = generator.normal(size=(size, outputs)), generator.normal(size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "NOISE_DEVIATION", 0.0)
        larger = tiled(kernel, (size + more_inputs, outputs + more_outputs), 1, 0, is_input=True)
    copied = inputs[wrapped(size, size + more_inputs, 1)[0]]
    expected = (inputs @ kernel)[wrapped(outputs, outputs + more_outputs, 1)[0]]
    np.testing.assert_allclose(copied @ larger, expected, atol=1e-5)


def test_copies_alone_get_noise():
    value = np.random.default_rng(1).normal(2, 3, (100, 100))
    larger = tiled(value, (150, 100), 1, 0, is_input=False)
    difference = larger - value[wrapped(100, 150, 1)[0]]
    np.testing.assert_allclose(larger[25:125], value, atol=1e-6)
    assert np.delete(difference, np.arange(25, 125), 0).std() == pytest.approx(0.1 * value.std(), rel=0.05)
    np.testing.assert_array_equal(larger, tiled(value, (150, 100), 1, 0, is_input=False))


@pytest.mark.parametrize("name", ["electra", "modernbert"])
def test_twice_the_width_computes_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setattr(growing, "NOISE_DEVIATION", 0.0)
    overrides = {"embedding_size": 32} if name == "electra" else {}
    source, model = grown_model(name, tmp_path, **TWICE, **overrides)
    batch, _ = padded_batch(source)
    np.testing.assert_allclose(model(batch).logits[..., :VOCABULARY], source(batch).logits, atol=1e-4)
    np.testing.assert_array_equal(model(batch).logits[..., VOCABULARY:], 0)


def test_layers_are_repeated_and_the_rest_is_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "train.model.growing")
    source, model = grown_model("roberta", tmp_path, num_hidden_layers=4, max_position_embeddings=50)
    small, large = encoder_layers(source), encoder_layers(model)
    for index, layer in enumerate(large):
        assert_all_equal(layer.weights, small[index // 2].weights)
    (message,) = caplog.messages
    num_weights = model.count_params() - 56 * (32 + 1)  # without padding of the vocabulary
    fraction = f"{100 * (1 - 18 * 32 / num_weights):.2f}%"
    untiled = "roberta/embeddings/position_embeddings/embeddings:0 from 32 on"
    assert message == f"tiled from --init-from: {fraction} of {num_weights:,} weights; initialized randomly: {untiled}"


@pytest.mark.parametrize(
    ("small", "large", "changes", "message"),
    [
        ("bert", "roberta", {}, "--grow needs two models of the same type, one of"),
        ("mobilebert", "mobilebert", {}, "--grow needs two models of the same type, one of"),
        ("bert", "bert", {"num_hidden_layers": 1}, r"num_hidden_layers is 1, and 2 in --init-from\."),
        (
            *("bert", "bert", {"hidden_size": 64}),
            "heads of the same width, .*; it is 16, and 8 in --init-from. Give .* num_attention_heads=8.",
        ),
    ],
)
def test_what_cannot_be_tiled_is_refused(small, large, changes, message):
    with pytest.raises(InputError, match=message):
        check_growth(tiny_config(small), tiny_config(large, **changes))


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_run_starts_from_a_smaller_one(finished_run, shards, tmp_path):
    flags = run_flags(shards, tmp_path / "run", "--init-from", str(finished_run), "--grow", "--max-steps", "1")
    larger = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128"
    assert main([*flags, "--config-overrides", larger, "--learning-rate", "1e-9"]) == 0
    small, large = (load_model(str(folder / "export")) for folder in (finished_run, tmp_path / "run"))
    table, larger_table = (model.roberta.embeddings.weight.numpy() for model in (small, large))
    np.testing.assert_allclose(larger_table[:, 16:48], table, atol=1e-6)
