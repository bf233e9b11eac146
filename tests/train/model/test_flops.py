"""The count of a step's operations, against the matrix products in TensorFlow's graph of loss and gradients."""

import math

import pytest
import tensorflow as tf

from tests.fixtures.tiny_models import PAD, tiny_config, tiny_model
from tests.fixtures.tiny_steps import RULE
from train.layers.random_bits import KEY_WORDS
from train.model.computation import step_flops
from train.step.train_step import PretrainingModel
from train.tasks.masked_lm import MaskedLanguageModeling

NUM_ROWS, LENGTH = 4, 30
TASK = MaskedLanguageModeling(RULE, PAD)
NUM_PREDICTIONS = TASK.num_predictions(NUM_ROWS * LENGTH)
# A model takes seconds to trace. The others are counted by the same formula.
COUNTED = ["roberta", *(pytest.param(name, marks=pytest.mark.slow) for name in ("electra", "deberta-v2", "modernbert"))]


def graph_flops(model: PretrainingModel) -> int:
    @tf.function(input_signature=[tf.TensorSpec((NUM_ROWS, LENGTH), tf.int32)], jit_compile=True)
    @tf.autograph.experimental.do_not_convert
    def gradients(input_ids):
        rows = model.prepare_batch({"input_ids": input_ids}, 0)
        keys = tf.zeros((NUM_ROWS + 1, KEY_WORDS), tf.uint32)
        return model._micro_batch_gradients(rows, keys[1:], keys[0])[0]

    flops = 0
    for op in gradients.get_concrete_function().graph.get_operations():
        assert op.type not in ("Einsum", "BatchMatMul", "BatchMatMulV3")
        # MPNet's pooler is computed and not used; the loss counts what is predicted by a product.
        if op.type in ("MatMul", "BatchMatMulV2") and "/pooler/" not in op.name and "loss/" not in op.name:
            transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
            flops += 2 * math.prod(op.outputs[0].shape) * op.inputs[0].shape[-2 if transposed else -1]
    return flops


@pytest.mark.parametrize("name", COUNTED)
def test_the_count_is_that_of_tensorflows_graph(name):
    # Of a local layer the scores within its window count, whatever else is computed: here that is the whole row.
    changes = {"local_attention": 2 * LENGTH} if name == "modernbert" else {}
    model = PretrainingModel(tiny_model(name, **changes), TASK, seed=0)
    config = model.network.config
    counted = step_flops(config, num_rows=NUM_ROWS, length=LENGTH, num_predictions=NUM_PREDICTIONS)
    flops = graph_flops(model)
    if "deberta" in name:
        # Its table of relative positions is copied once a row before the products, which saves nothing.
        assert counted == pytest.approx(flops, rel=0.01)
    else:
        assert counted == flops


def test_roberta_base_is_pinned():
    sizes = {"vocab_size": 32_000, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}
    config = tiny_config("roberta", **sizes, num_attention_heads=12)
    flops = step_flops(config, num_rows=16, length=512, num_predictions=16 * 80)
    assert flops == 6 * (8192 * 12 * (12 * 768**2 + 2 * 512 * 768) + 1280 * 768 * (768 + 32_000))
    assert flops == pytest.approx(4.83e12, rel=0.001)


def test_local_layers_of_a_modernbert_count_their_window():
    config = tiny_config("modernbert", local_attention=8, num_hidden_layers=5, global_attn_every_n_layers=3)
    short, long = (step_flops(config, num_rows=1, length=length, num_predictions=0) for length in (100, 200))
    # Two global layers, products of scores and values.
    assert long - 2 * short == 6 * 2 * 2 * 32 * (200**2 - 2 * 100**2)


def test_what_is_done_once_a_pass_counts_for_each_micro_batch():
    config = tiny_config("deberta-v2 as v3")
    shape = {"num_rows": 8, "length": 16, "num_predictions": 24}
    once, twice = (step_flops(config, **shape, num_micro_batches=number) for number in (1, 2))
    assert twice - once == 6 * 2 * 2 * 16 * 32**2
