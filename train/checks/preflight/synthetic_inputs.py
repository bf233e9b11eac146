"""Inputs made of numbers, for asking what a run would cost before there are shards."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tfrecord_prep.manifest import ShardSet
from train.data.shards import TrainingInputs

# In the place of the tokenizer's folder.
SYNTHETIC = "(synthetic)"


def synthetic_inputs(*, max_length: int, vocab_size: int) -> TrainingInputs:
    """Make inputs of that row length and vocabulary, without any row.

    The tokenizer has the project's special ids, and made-up words for the rest of its vocabulary.

    Raises:
        InputError: the vocabulary has no place for more than special tokens.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise InputError(f"--vocab-size must be above the {len(SPECIAL_TOKENS)} special tokens; received {vocab_size}.")
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    vocabulary |= {f"▁word{index}": index for index in range(len(vocabulary), vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # so that whole words can be masked: each token is one
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return TrainingInputs(
        train_shards=ShardSet("", (), (), num_rows=0, manifest=None, tokenizer_folder=None),
        eval_shards=None,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend, **names),
        tokenizer_source=SYNTHETIC,
        max_length=max_length,
    )
