"""Pseudo-log-likelihoods beside those of minicons, and of a direct computation in PyTorch."""

import json

import numpy as np
import pytest
import tensorflow as tf
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.fixtures.other_environments import output_of
from tests.fixtures.tiny_models import tiny_model
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from train.model.from_pretrained import load_model
from train.publishing.pytorch_format import export_model
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.scoring.answers import QueriedModel
from train.scoring.pairs import Pair
from train.scoring.queries import Asker, total_by_item

pytestmark = pytest.mark.slow

SENTENCES = ["the model of language", "a mask, the language models", "masked"]
# Prints for each export the log-likelihoods of the sentences, by each method.
SCORER = """
import json, sys
from pathlib import Path
import torch
from minicons.scorer import MaskedLMScorer
from transformers import AutoModelForMaskedLM, AutoTokenizer

sentences = json.loads(sys.argv[2])

def direct(model, tokenizer, sentence):
    ids = torch.tensor(tokenizer(sentence)["input_ids"])
    total = 0.0
    for position in range(1, len(ids) - 1):
        masked = ids.clone()
        masked[position] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=masked[None]).logits[0, position]
        total += float(torch.log_softmax(logits, -1)[ids[position]])
    return total

for folder in sorted(Path(sys.argv[1]).iterdir()):
    scorer = MaskedLMScorer(str(folder), "cpu")
    by_token = lambda scores: scores.sum(0).item()
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    print(json.dumps({
        "name": folder.name,
        "direct": [direct(model, tokenizer, sentence) for sentence in sentences],
        "minicons": [scorer.sequence_score([sentence], reduction=by_token)[0] for sentence in sentences],
        "minicons, left to right": [
            scorer.sequence_score([sentence], reduction=by_token, PLL_metric="within_word_l2r")[0]
            for sentence in sentences
        ],
    }))
"""


def test_scores_are_those_of_minicons_and_pytorch(torch_python, tmp_path):
    ours = {}
    roles = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    for architecture, kind in (("bert", "wordpiece"), ("roberta", "byte_level"), ("modernbert", "unigram")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), **roles)
        framed = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
        template = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=framed)
        tokenizer.backend_tokenizer.post_processor = template
        size = len(tokenizer)
        model = tiny_model(architecture, vocab_size=size, max_position_embeddings=62, pad_token_id=1)
        folder = tmp_path / "exports" / f"{architecture} {kind}"
        export_model(model, tokenizer, str(folder), model_max_length=60)
        network = load_model(str(folder))
        answering = QueriedModel(network, TensorFlowRuntime(tf.distribute.get_strategy()), size, 1)
        for left_to_right in (False, True):
            pairs = [Pair(sentence, "another one", "", "") for sentence in SENTENCES]
            queries, _ = Asker(tokenizer, 60, left_to_right=left_to_right).about_pairs(pairs)
            nats = answering.answer(queries, [16, 24, 32, 60]).nats
            ours[folder.name, left_to_right] = -total_by_item(queries, nats, 2 * len(pairs))[::2]
    printed = output_of(torch_python, SCORER, str(tmp_path / "exports"), json.dumps(SENTENCES)).splitlines()
    results = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(results) == len(ours) / 2
    for result in results:
        name = result["name"]
        np.testing.assert_allclose(ours[name, False], result["direct"], atol=1e-4, err_msg=name)
        np.testing.assert_allclose(ours[name, False], result["minicons"], atol=1e-4, err_msg=name)
        # Of text without punctuation: to minicons a comma is a word, here it belongs to the word before it.
        left_to_right = result["minicons, left to right"]
        for index in (0, 2):
            assert ours[name, True][index] == pytest.approx(left_to_right[index], abs=1e-4), name
