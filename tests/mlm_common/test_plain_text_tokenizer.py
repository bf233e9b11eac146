"""Tokenizers trained on text that spells special tokens: they still tokenize text, and text makes no special token."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlm_common.errors import InputError
from mlm_common.tokenizer import plain_text_tokenizer_json
from tests.fixtures.tiny_corpus import flags, write_source
from tfrecord_prep import split
from tfrecord_prep.prepare_tfrecord_shards import main as prepare

SPECIAL_TOKENS = ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
TEXTS = ["a <unk> b [MASK] c [MASK]s the cat"] * 500


def bpe(**prefix: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **prefix))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, show_progress=False, **prefix)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, show_progress=False)
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
    check_plain_text(tokenizer, json.dumps(content))


def test_a_wordpiece_model_has_no_merges():
    tokenizer = wordpiece()
    check_plain_text(tokenizer, tokenizer.to_str())


def check_plain_text(tokenizer: Tokenizer, tokenizer_json: str) -> None:
    """Check that text makes no special token, and that other text is tokenized as before."""
    plain = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer_json))
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


def test_such_a_tokenizer_is_refused_before_any_work(tmp_path, monkeypatch, run):
    def refuse(_: str) -> str:
        raise InputError("The tokenizer cannot be used.")

    monkeypatch.setattr(split, "plain_text_tokenizer_json", refuse)
    refused = run(prepare, *flags(write_source(tmp_path), tmp_path / "out", "--dry-run"))
    assert (refused.status, refused.error) == (2, "error: The tokenizer cannot be used.")
