"""Fine-tuning on longer rows than in pretraining: rotary positions extend, tables of positions do not."""

import json
import random

import numpy as np
import pytest

from finetuning.config.settings import ClassificationConfig, parse_finetuning_config
from finetuning.loop.model import note_of_longer_rows, with_positions
from finetuning.run_classification import main
from mlm_common.errors import InputError
from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_classification import WORDS, write_start
from tests.fixtures.tiny_models import tiny_config
from train.model.from_pretrained import load_model

LENGTH = 60
READER = """
import json, sys
import torch
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    print(json.dumps(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.tolist()))
"""


def config_of(*flags: str, length: int = LENGTH) -> ClassificationConfig:
    argv = ["--init-from", "work/model", "--output-dir", "work/run", "--max-seq-length", str(length), *flags]
    return parse_finetuning_config(ClassificationConfig, argv, "")


def positioned(model: str, *flags: str, length: int = LENGTH) -> str | None:
    config = config_of(*flags, length=length)
    return with_positions(config, tiny_config(model), "work/model").model.config_overrides


def test_rotary_positions_extend_with_a_warning():
    model = "modernbert"
    assert positioned(model) == f"max_position_embeddings={LENGTH}"
    assert positioned(model, "--config-overrides", "hidden_size=8") == f"hidden_size=8,max_position_embeddings={LENGTH}"
    note = note_of_longer_rows(config_of(), tiny_config(model))
    assert "pretrained on rows of 32 tokens, but --max-seq-length is 60" in note
    assert positioned(model, length=32) is None
    override = ("--config-overrides", "max_position_embeddings=99")
    assert positioned(model, *override) == override[1]
    for config in (config_of(length=32), config_of(*override)):
        assert not note_of_longer_rows(config, tiny_config(model))


def test_tables_of_positions_do_not(caplog):
    """Unless the user asks for it: then they start at random, as in pretraining."""
    with pytest.raises(InputError, match=r"work/model takes rows of at most 30 tokens, but .* is 60\. Use"):
        positioned("roberta")
    assert positioned("roberta", "--config-overrides", "max_position_embeddings=62")
    assert "after the first 30 are initialized randomly" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_the_export_has_the_same_logits_in_pytorch(tmp_path, torch_python):
    """On rows as long as those of fine-tuning."""
    draw = random.Random(1)
    lines = [f"{' '.join(draw.choices(WORDS, k=70))}\t{draw.choice('ab')}\n" for _ in range(16)]
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    flags = ["--init-from", str(write_start(tmp_path / "start", "modernbert")), "--output-dir", str(tmp_path / "run")]
    flags += ["--train-file", str(tmp_path / "train.tsv"), "--max-seq-length", str(LENGTH), "--max-steps", "2"]
    assert main([*flags, "--per-replica-batch-size", "8", "--learning-rate", "0.01"]) == 0
    export = str(tmp_path / "run" / "export")
    ids = np.random.default_rng(1).integers(5, 60, (2, LENGTH)).astype(np.int32)
    network = load_model(export, "TFAutoModelForSequenceClassification")
    ours = network({"input_ids": ids, "attention_mask": np.ones_like(ids)}).logits.numpy()
    assert network.config.max_position_embeddings == LENGTH
    theirs = json.loads(output_of(torch_python, READER, export, json.dumps(ids.tolist())))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
