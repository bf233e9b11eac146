from dataclasses import replace

import numpy as np
import pytest

from mlm_common.errors import InputError
from tests.fixtures.plans import inputs_of
from tests.fixtures.tiny_models import (
    one_layer_model,
    padded_batch,
    tiny_config,
    tiny_tokenizer,
)
from tfrecord_prep.manifest import ShardSet
from train.config.learning import PretrainedModel
from train.model.architectures import ARCHITECTURES
from train.model.config import resolve_model_config


def resolved(folder, name, shards=None, **settings):
    tiny_config(name).save_pretrained(folder)
    inputs = inputs_of(tiny_tokenizer(), shards=shards)
    return resolve_model_config(PretrainedModel(pretrained_model_config=str(folder), **settings), inputs)


@pytest.mark.parametrize(
    ("name", "rate"), [("bert", 0.5), ("distilbert", 0.5), ("electra", 0.0), ("modernbert", 0.0), ("distilbert", 0.0)]
)
def test_dropout_is_that_of_every_layer(tmp_path, name, rate):
    names = ARCHITECTURES[name].dropouts
    unchanged = resolved(tmp_path, name).to_dict()
    assert [unchanged[dropout] for dropout in names] == [getattr(tiny_config(name), dropout) for dropout in names]
    changed = resolved(tmp_path, name, dropout=rate).to_dict()
    assert [changed[dropout] for dropout in names] == [rate] * len(names)
    model = one_layer_model(name, **dict.fromkeys(names, rate))
    inputs, _ = padded_batch(model)
    differs = np.abs(model(inputs, training=True).logits - model(inputs, training=False).logits).max() > 0
    assert differs == (rate > 0)


def test_block_attention_needs_shards_of_known_chunking(tmp_path):
    shards = ShardSet("shards", ("dataset-0-8.tfrecord",), (8,), 8, None, None)
    assert resolved(tmp_path, "bert", shards).vocab_size
    with pytest.raises(InputError, match="the chunking of shards is unknown, without a manifest"):
        resolved(tmp_path, "bert", shards, block_attention=True)
    assert resolved(tmp_path, "bert", replace(shards, paths=()), block_attention=True).vocab_size  # of the preflight
