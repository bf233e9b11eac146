import pytest
import tensorflow as tf

from tests.fixtures.tiny_models import one_layer_model, padded_batch
from train.checks.preflight.hlo_costs import KINDS, OTHER, collective_bytes, kind_of, sent_bytes, step_costs
from train.checks.preflight.tpu_compiler import tpu_slice
from train.runtime.lowering import lower
from train.step.sharding import Sharding

LAYER = "tf_bert_for_masked_lm/bert/encoder/layer_._{}/"


def instruction(name, opcode, *, cycles=None, op_name=None, shape="bf16[16,512]{1,0:T(8,128)}", attributes=""):
    """A line as libtpu writes it."""
    metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
    config = f'"window_config":{{"kernel_window_bounds":[],"estimated_cycles":"{cycles}"}}' if cycles else ""
    return f"  %{name} = {shape} {opcode}(%a, %b){attributes}{metadata}, backend_config={{{config}}}\n"


def loop(num_turns_line, direction="LT"):
    return (
        "%condition (t: (s32[])) -> pred[] {\n"
        + num_turns_line
        + f"  ROOT %compare = pred[]{{:T(512)}} compare(%element, %constant.1), direction={direction}\n}}\n\n"
        + "%body (t: (s32[])) -> (s32[]) {\n"
        + instruction("fusion.7", "fusion", cycles=1000, op_name="while/" + LAYER.format(0) + "attention/self/MatMul")
        + "}\n\n"
    )


def module(*lines, before=""):
    return f"HloModule m, is_scheduled=true\n\n{before}ENTRY %main.0 (x: s32[16,512]) -> f32[] {{\n{''.join(lines)}}}\n"


def test_cycles_are_summed_over_layers_and_grouped():
    costs = step_costs(
        module(
            instruction("fusion.1", "fusion", cycles=30, op_name=LAYER.format(0) + "attention/self/Softmax"),
            instruction("fusion.2", "fusion", cycles=50, op_name=LAYER.format(11) + "attention/self/Softmax"),
            instruction("fusion.3", "fusion", cycles=70, op_name="gradient_tape/bert/mlm___cls/MatMul"),
            instruction("bitcast.3", "bitcast"),
        )
    )
    assert costs.num_cycles == 150
    assert costs.cycles_by_kind == {"attention": 80, "head and loss": 70}
    assert costs.operations[0].name == LAYER.format("#") + "attention/self/Softmax"
    assert (costs.num_not_estimated, costs.num_loops_of_unknown_length) == (0, 0)


WHILE = instruction(
    "while.8", "while", shape="(s32[]{:T(128)}, /*index=1*/f32[4]{0})", attributes=", condition=%condition, body=%body"
)


FOUR = "  %constant.1 = s32[]{:T(128)} constant(4)\n"


@pytest.mark.parametrize(
    ("line", "direction", "num_turns", "num_unknown"), [(FOUR, "LT", 4, 0), ("", "LT", 1, 1), (FOUR, "GT", 1, 1)]
)
def test_a_loop_counts_for_each_turn_or_once_and_is_told(line, direction, num_turns, num_unknown):
    update = instruction("f", "fusion", cycles=5, op_name="AdamW/Sub")
    costs = step_costs(module(WHILE, update, before=loop(line, direction)))
    assert costs.cycles_by_kind == {"attention": 1000 * num_turns, "optimizer": 5}
    assert costs.num_loops_of_unknown_length == num_unknown


def test_a_loop_that_may_end_earlier_counts_with_the_most_turns():
    lines = """  %constant.2 = s32[]{:T(128)} constant(4)
  %compare.2 = pred[]{:T(512)} compare(%element, %constant.2), direction=LT
  ROOT %and = pred[]{:T(512)} and(%compare.2, %compare)
"""
    costs = step_costs(module(WHILE, before=loop(lines).replace("  ROOT %compare =", "  %compare =")))
    assert (costs.num_cycles, costs.num_loops_of_unknown_length) == (4000, 0)


def test_a_fusion_without_a_name_takes_that_of_what_is_in_it():
    fused = "%fused_computation.5 (p: f32[8]) -> f32[8] {\n"
    fused += instruction("add.1", "add", op_name=LAYER.format(3) + "output/LayerNorm/batchnorm/add")
    fused += "  ROOT %r = f32[8]{0} bitcast(%add.1)\n}\n\n"
    lines = (
        instruction("fusion.9", "fusion", cycles=10, attributes=", kind=kLoop, calls=%fused_computation.5"),
        instruction("copy.12", "copy", cycles=4),
    )
    costs = step_costs(module(*lines, before=fused))
    assert costs.cycles_by_kind == {"layer norm": 10, "copies": 4}
    assert costs.operations[1].name == "copy"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gradient_tape/tf_roberta_for_masked_lm/roberta/encoder/layer_._#/attention/self/MatMul_#", "attention"),
        ("tf_roberta_for_masked_lm/roberta/encoder/layer_._#/attention/self/dropout/dropout/GreaterEqual", "dropout"),
        ("tf_roberta_for_masked_lm/roberta/encoder/layer_._#/attention/output/LayerNorm/moments/mean", "layer norm"),
        ("tf_roberta_for_masked_lm/roberta/encoder/layer_._#/intermediate/dense/Tensordot/MatMul", "feed-forward"),
        ("tf_distil_bert_for_masked_lm/distilbert/transformer/layer_._#/ffn/lin1/Tensordot", "feed-forward"),
        ("tf_roberta_for_masked_lm/roberta/embeddings/Gather", "embeddings"),
        ("SparseSoftmaxCrossEntropyWithLogits/SparseSoftmaxCrossEntropyWithLogits", "head and loss"),
        ("while/stateless_random_uniform_#/shift", "dropout"),
        ("masks/RightShift_#", "masks"),
        ("row_keys_#/Mul_#", "masks"),
        ("global_norm/L#Loss", "optimizer"),
        ("AdamW/AssignSubVariableOp_#", "optimizer"),
        ("XlaAllReduce_#", "sum over replicas"),
        ("copy", "copies"),
        ("something", OTHER),
    ],
)
def test_kinds_of_operations(name, kind):
    assert kind in (*KINDS, OTHER)
    assert kind_of(name) == kind


def test_no_matrix_product_counts_for_layer_norms():
    model = one_layer_model("roberta-prelayernorm")  # which is named after a layer
    inputs, _ = padded_batch(model)
    call = tf.function(tf.autograph.experimental.do_not_convert(lambda: model(inputs)))
    operations = call.get_concrete_function().graph.get_operations()
    kinds = {
        is_product: {
            kind_of(f"gradient_tape/{operation.name}")
            for operation in operations
            if ("MatMul" in operation.type) == is_product
        }
        for is_product in (True, False)
    }
    assert "layer norm" in kinds[False]
    assert {"attention", "feed-forward", "head and loss"} <= kinds[True]
    assert "layer norm" not in kinds[True]


def test_a_branch_hardly_ever_taken_is_left_out():
    branches = "".join(
        f"%{name} (t: f32[8]) -> f32[8] {{\n{instruction('f', 'fusion', cycles=cycles, op_name=op_name)}}}\n\n"
        for name, cycles, op_name in (("mostly", 3, "attention/self/cond/Sum"), ("else", 500, "self/cond/rarely/Max"))
    )
    attributes = ", true_computation=%mostly, false_computation=%else"
    costs = step_costs(module(instruction("c", "conditional", attributes=attributes), before=branches))
    assert costs.cycles_by_kind == {"attention": 3}


def test_what_replicas_exchange_is_counted_but_for_what_stays():
    parts = tf.TensorSpec((8, 3, 5), tf.bfloat16)
    counted = collective_bytes(lower(Sharding(8, by_xla=True).exchange, (parts,), 8).stablehlo)
    assert counted == {"all_to_all": 8 * 3 * 5 * 2}
    assert sent_bytes(counted, tpu_slice("v5e-8")) == 7 * 3 * 5 * 2
