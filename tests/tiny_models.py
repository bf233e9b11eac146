"""Tiny configurations, one or more of each architecture: {name: arguments of `AutoConfig.for_model`}."""

from typing import Any

VOCABULARY = 200
PAD, MASK = 1, 4
IDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
# Two layers of width 32, with positions for rows of 30 and those that the RoBERTa family leaves out.
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    **IDS,
}
DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "type_vocab_size": 0,
    "position_biased_input": False,
}
MOBILEBERT = {"hidden_size": 48, "embedding_size": 16, "intra_bottleneck_size": 16, "tie_word_embeddings": False}

# The first of each `model_type` bears its name.
CONFIGS: dict[str, dict[str, Any]] = {
    "albert": {**BERT, "model_type": "albert", "embedding_size": 16},
    "albert with two groups": {**BERT, "model_type": "albert", "embedding_size": 16, "num_hidden_groups": 2},
    "bert": {**BERT, "model_type": "bert"},
    "bert with tanh gelu": {**BERT, "model_type": "bert", "hidden_act": "gelu_new"},
    "camembert": {**BERT, "model_type": "camembert"},
    "convbert": {**BERT, "model_type": "convbert", "embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3},
    "convbert with groups": {
        **BERT, "model_type": "convbert", "embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3, "num_groups": 2,
    },
    "deberta-v2": {**BERT, "model_type": "deberta-v2"},
    "deberta-v2 as v3": {**BERT, **DEBERTA_V3, "model_type": "deberta-v2"},
    "deberta-v2 without shared keys": {**BERT, **DEBERTA_V3, "model_type": "deberta-v2", "share_att_key": False},
    "distilbert": {
        "model_type": "distilbert", "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
        "max_position_embeddings": 32, **IDS,
    },
    "electra": {**BERT, "model_type": "electra", "embedding_size": 16},
    "electra without projection": {**BERT, "model_type": "electra", "embedding_size": 32},
    "mobilebert": {**BERT, **MOBILEBERT, "model_type": "mobilebert"},
    "mpnet": {**BERT, "model_type": "mpnet"},
    "rembert": {
        **BERT, "model_type": "rembert", "input_embedding_size": 16, "output_embedding_size": 24,
        "tie_word_embeddings": False,
    },
    "roberta": {**BERT, "model_type": "roberta"},
    "roberta with tanh gelu": {**BERT, "model_type": "roberta", "hidden_act": "gelu_new"},
    "roberta padded with id 0": {**BERT, "model_type": "roberta", "pad_token_id": 0},
    "roberta-prelayernorm": {**BERT, "model_type": "roberta-prelayernorm"},
    "roformer": {**BERT, "model_type": "roformer", "embedding_size": 16},
    "xlm-roberta": {**BERT, "model_type": "xlm-roberta"},
}  # fmt: skip


def tiny_config(name: str, **changes: Any) -> Any:
    """Return the configuration of that name, with these settings changed."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**CONFIGS[name], **changes})


def tiny_model(name: str, **changes: Any) -> Any:
    """Return a built TF…ForMaskedLM with random weights, biases too, so that a mixed-up weight shows."""
    import tensorflow as tf
    import tf_keras
    from transformers import TFAutoModelForMaskedLM

    from train.architectures import align_padding_positions

    tf_keras.utils.set_random_seed(1)
    model = TFAutoModelForMaskedLM.from_config(tiny_config(name, **changes))
    align_padding_positions(model)
    model(model.dummy_inputs)
    for index, variable in enumerate(model.trainable_variables):
        noise = tf.random.stateless_normal(variable.shape, (7, index), stddev=0.1)
        variable.assign_add(tf.cast(noise, variable.dtype))
    return model


def padded_batch(model: Any) -> tuple[dict[str, Any], Any]:
    """Return (inputs of three rows of length 12, 7 and 10, padded; their attention mask as array)."""
    import numpy as np

    attended = np.arange(12) < np.array([[12], [7], [10]])  # (batch, length)
    ids = np.random.default_rng(3).integers(5, VOCABULARY, attended.shape)
    ids[:, 3] = MASK
    ids = np.where(attended, ids, model.config.pad_token_id)
    return {"input_ids": ids.astype(np.int32), "attention_mask": attended.astype(np.int32)}, attended


def tiny_tokenizer() -> Any:
    """Return a unigram PreTrainedTokenizerFast of fewer than `VOCABULARY` pieces, with the ids above."""
    import string

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ("the", "of", "a", "function", "list", "value", "returns", "file", "model", "name", "is", "in", "text")
    pieces = [(token, 0.0) for token in ("[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]")]
    pieces += [(f"▁{word}", -3.0) for word in words]
    pieces += [("▁", -4.0), *((character, -6.0) for character in string.ascii_letters + string.digits + ".,")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    backend.add_special_tokens(["[CLS]", "<pad>", "[SEP]", "<unk>"])
    backend.add_special_tokens([AddedToken("[MASK]", lstrip=True, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        cls_token="[CLS]",
        pad_token="<pad>",
        sep_token="[SEP]",
        unk_token="<unk>",
        mask_token=AddedToken("[MASK]", lstrip=True, special=True),
    )
