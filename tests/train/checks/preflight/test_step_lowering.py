import re

import pytest
import tensorflow as tf

from tests.fixtures.tiny_models import PAD, tiny_model
from tests.fixtures.tiny_steps import RULE, compiled_model
from train.checks.preflight.preflight import lower_train_step
from train.runtime.lowering import lower
from train.tasks.masked_lm import MaskedLanguageModeling


@pytest.fixture(scope="module")
def model():
    return compiled_model(tiny_model("roberta", num_hidden_layers=1), MaskedLanguageModeling(RULE, PAD))


@pytest.fixture(scope="module")
def text(model):
    return lower_train_step(model, num_rows=4, length=16, num_replicas=8)


def test_the_lowered_step_sums_and_updates_in_place(model, text):
    num_trained = len(model.network.trainable_variables)
    num_sums = 3  # loss, correct predictions, masked tokens
    assert text.count('"stablehlo.all_reduce"') == num_trained + num_sums
    assert set(re.findall(r"replica_groups = dense<(.*?)>", text)) == {"[[0, 1, 2, 3, 4, 5, 6, 7]]"}
    assert re.search(r"func\.func @main\(%arg0: tensor<4x16xi32>", text)
    assert "mhlo.copy" not in text
    num_assigned = 3 * num_trained + 1  # weights, two moments of each, and the number of the step
    num_assigned += sum(len(metric.variables) for metric in model.metrics)
    assert text.count("parameter_number") >= num_assigned


def test_values_are_freed(model, text):
    del text
    for variable in [*model.variables, *model.optimizer.variables]:
        assert tf.size(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)) == 1


@pytest.mark.slow
def test_the_step_can_be_lowered_again(model, text):
    again = lower_train_step(model, num_rows=4, length=16, num_replicas=8)
    first, second = (re.findall(r" = (\S+) .*?: (.*)", program) for program in (text, again))
    assert first == second


def test_a_structure_of_tensors_is_summed_one_by_one():
    def function(value):
        replica = tf.distribute.get_replica_context()
        total, doubled_totals = replica.all_reduce(tf.distribute.ReduceOp.SUM, (value, [2 * value]))
        return total, doubled_totals[0], replica.replica_id_in_sync_group * replica.num_replicas_in_sync

    text = lower(function, (tf.TensorSpec((2,), tf.float32),), 4).stablehlo
    assert text.count('"stablehlo.all_reduce"') == 2
    assert text.count("stablehlo.replica_id") == 1
    assert tf.distribute.get_replica_context().num_replicas_in_sync == 1  # outside
