"""Tokenizers trained on text that spells special tokens: they still tokenize text, and text makes no special token."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlm_common.errors import InputError
from mlm_common.tokenizer import plain_text_tokenizer_json

SPECIAL_TOKENS = ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
TEXTS = ["a <unk> b [MASK] c [MASK]s the cat"] * 500


def bpe(**prefix: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **prefix))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, show_progress=False, **prefix)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.mark.parametrize("has_old_merges", [False, True])
@pytest.mark.parametrize("prefix", ["", "##"])
def test_merges_that_make_a_special_token_are_left_out(prefix, has_old_merges):
    tokenizer = bpe(**{"continuing_subword_prefix": prefix} if prefix else {})
    content = json.loads(tokenizer.to_str())
    made = {left + right[len(prefix) :] for left, right in content["model"]["merges"]}
    assert {"<unk>", "[MASK]", "[MASK]s"} <= made, "the case of this test"
    if has_old_merges:
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    plain = Tokenizer.from_str(plain_text_tokenizer_json(json.dumps(content)))
    assert plain.encode("the cat a b c").ids == tokenizer.encode("the cat a b c").ids
    special_ids = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS} - {tokenizer.token_to_id("<unk>")}
    for text in ("[MASK]", "a [MASK]s", "[MASK][MASK] <unk>"):
        ids = plain.encode(text).ids
        assert ids
        assert special_ids.isdisjoint(ids)


def test_a_tokenizer_that_cannot_be_changed_is_refused():
    content = json.loads(bpe().to_str())
    content["model"]["merges"].append(["no", "such"])
    with pytest.raises(InputError, match=r"must work without its special tokens \(<pad>, .*`no` out of vocab"):
        plain_text_tokenizer_json(json.dumps(content))
