import numpy as np
import pytest

from tests.fixtures.tiny_models import one_layer_model
from train.model.architectures import ARCHITECTURES, learns_positions
from train.model.build import sinusoids, start_positions_as_sinusoids


def position_table(model):
    (table,) = (variable for variable in model.trainable_variables if "position_embeddings" in variable.name)
    return table


def test_values_are_pinned():
    expected = [[0, 0, 1, 1], [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)]]
    np.testing.assert_allclose(sinusoids(2, 4), expected, rtol=1e-6)
    assert sinusoids(3, 5).shape == (3, 5)


def test_the_inner_product_of_positions_depends_on_distance():
    table = sinusoids(50, 64)
    products = table @ table.T
    for distance in (0, 1, 7):
        diagonal = np.diag(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)


@pytest.mark.parametrize("name", ["roberta", "bert", "electra"])
def test_only_the_position_table_changes_and_keeps_its_size(name):
    model, untouched = one_layer_model(name), one_layer_model(name)
    start_positions_as_sinusoids(model)
    table, before = position_table(model).numpy(), position_table(untouched).numpy()
    direction = sinusoids(*table.shape)
    scale = table[3, 0] / direction[3, 0]
    np.testing.assert_allclose(table, direction * scale, rtol=1e-4, atol=1e-6)
    assert np.sqrt((table**2).mean()) == pytest.approx(np.sqrt((before**2).mean()), rel=0.1)
    for variable, other in zip(model.trainable_variables, untouched.trainable_variables, strict=True):
        if "position_embeddings" not in variable.name:
            np.testing.assert_array_equal(variable.numpy(), other.numpy())


@pytest.mark.parametrize("name", [*ARCHITECTURES, "deberta-v2 as v3"])
def test_models_that_learn_positions_have_one_table_of_them(name):
    model = one_layer_model(name)
    tables = [variable for variable in model.trainable_variables if "position_embeddings" in variable.name]
    assert len(tables) == learns_positions(model.config)
