import numpy as np
import pytest
import transformers.models.auto.modeling_auto as modeling_auto

from tests.fixtures.tiny_models import (
    CONFIGS,
    SAME_CODE,
    each_architecture,
    of_transformers_4,
    one_layer_model,
    tiny_config,
    tiny_model,
)
from train.model.architectures import pytorch_class
from train.model.weight_names import pytorch_name, to_pytorch, to_tensorflow, variables_within

# {end of an auto class: part of the name of transformers' table of its classes}.
HEADS = {
    "": "",
    "ForMaskedLM": "FOR_MASKED_LM_",
    "ForPreTraining": "FOR_PRETRAINING_",
    "ForSequenceClassification": "FOR_SEQUENCE_CLASSIFICATION_",
    "ForTokenClassification": "FOR_TOKEN_CLASSIFICATION_",
    "ForMultipleChoice": "FOR_MULTIPLE_CHOICE_",
    "ForQuestionAnswering": "FOR_QUESTION_ANSWERING_",
}
HAVE_NO_PRETRAINING = ("convbert", "deberta-v2", "modernbert", "rembert", "roformer")
NAMES_OF_TABLES = (".pos_proj.", ".pos_q_proj.", ".key_conv_attn_layer.")


def heads_of(model_type: str) -> list[str]:
    return [head for head in HEADS if head != "ForPreTraining" or model_type not in HAVE_NO_PRETRAINING]


def assert_named_as_by_transformers(network):
    """Compare with transformers 4, but for what the tables of architectures correct."""
    from transformers import modeling_tf_pytorch_utils as rules

    model_type = network.config.model_type
    variables = variables_within(network)
    assert len(variables) == len(network.weights)
    for name, variable in variables.items():
        values = np.random.default_rng(0).random(variable.shape).astype(np.float32)
        theirs, transpose = rules.convert_tf_weight_name_to_pt_weight_name(variable.name, tf_weight_shape=values.shape)
        array = to_pytorch(name, values, model_type)
        if any(part in theirs for part in NAMES_OF_TABLES):
            assert array.size == values.size
        else:
            assert pytorch_name(name, model_type) == theirs
            np.testing.assert_array_equal(array, rules.apply_transpose(transpose, values, pt_to_tf=False))
        np.testing.assert_array_equal(to_tensorflow(name, array, values.shape, model_type), values)


@of_transformers_4
@pytest.mark.parametrize("name", each_architecture())
def test_weights_have_the_names_and_layouts_of_transformers_rules(name):
    assert_named_as_by_transformers(one_layer_model(name))


@of_transformers_4
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head"),
    [
        (name, head)
        for name, config in CONFIGS.items()
        if name not in (*SAME_CODE, "camembert", "xlm-roberta")
        for head in heads_of(config["model_type"])
    ],
)
def test_weights_of_each_head_have_the_names_and_layouts_of_transformers_rules(name, head):
    assert_named_as_by_transformers(tiny_model(name, f"TFAutoModel{head}"))


def test_kernels_of_images_and_names_that_only_look_like_kernels():
    """A custom task's head may hold them."""
    values = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    assert pytorch_name("custom_head/conv/kernel:0", "bert") == "custom_head.conv.weight"
    array = to_pytorch("custom_head/conv/kernel:0", values, "bert")
    assert array.shape == (5, 4, 2, 3)
    assert array[1, 2, 0, 1] == values[0, 1, 2, 1]
    np.testing.assert_array_equal(to_tensorflow("custom_head/conv/kernel:0", array, values.shape, "bert"), values)
    name = "custom_head/gru/recurrent_kernel:0"
    assert pytorch_name(name, "bert") == "custom_head.gru.recurrent_kernel"
    np.testing.assert_array_equal(to_pytorch(name, values[0, 0], "bert"), values[0, 0])


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if name == config["model_type"]])
def test_the_classes_of_pytorch_are_those_of_transformers(name):
    for head in heads_of(name):
        theirs = getattr(modeling_auto, f"MODEL_{HEADS[head]}MAPPING_NAMES")[name]
        assert pytorch_class(f"TFAutoModel{head}", tiny_config(name)) == theirs
