"""`MaskingRule`: which tokens are masked, and how. This module does not import TensorFlow."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.tokenizer import WORD_STARTS_FILE, load_word_starts, special_ids, vocabulary_size, word_starts
from train.config.learning import MaskingConfig
from train.data.shards import TrainingInputs

# A batch has slots for this number of standard deviations above the mean number of masked tokens. About one batch in a
# hundred million has more masked tokens.
SLOT_DEVIATIONS = 6
# A batch also has slots for this number of additional units (minus one token each), because long units are rare in a
# batch, and their number varies more than a normal distribution predicts.
SPARE_UNITS = 2
# Where the number of slots may vary, it is a multiple of this number, so that few different shapes occur.
SLOT_MULTIPLE = 32
# Longer words and spans are divided, so that the number of masked tokens varies little in any text.
MAX_WORD_TOKENS = 8
MAX_SPAN_TOKENS = 20

Masking = Literal["token", "whole_word", "span"]
MAX_UNIT_TOKENS: dict[Masking, int] = {"token": 1, "whole_word": MAX_WORD_TOKENS, "span": MAX_SPAN_TOKENS}


@dataclass(frozen=True)
class MaskingRule:
    """Which tokens are masked, and how (Devlin et al. 2018, BERT, section 3.1).

    Attributes:
        mask_token_id: id of [MASK].
        special_ids: ids that are never masked, and never used as a random token.
        vocabulary_size: number of ids of the tokenizer.
        mlm_probability: fraction of the tokens to predict.
        mask_token_rate: fraction of the predicted tokens that is replaced by [MASK].
        random_token_rate: fraction of the predicted tokens that is replaced by a random token.
        masking: the kind of unit that is masked: token, whole word or span.
        word_starts: whether a word starts with the id, bool (vocabulary_size,). Needed for words and spans.
    """

    mask_token_id: int
    special_ids: tuple[int, ...]
    vocabulary_size: int
    mlm_probability: float = 0.15
    mask_token_rate: float = 0.8
    random_token_rate: float = 0.1
    masking: Masking = "token"
    word_starts: NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)

    def num_prediction_slots(self, num_tokens: int) -> int:
        """Return the number of slots for predicted tokens in a batch of `num_tokens`. XLA needs a fixed number.

        Without XLA, only the slots that a batch needs are computed, and this is their maximum number.

        The variance assumes the worst case, in which all units have the maximum length. In real text it is lower.
        """
        max_unit_tokens, probability = MAX_UNIT_TOKENS[self.masking], self.mlm_probability
        deviation = math.sqrt(num_tokens * max_unit_tokens * probability * (1 - probability))
        spare = SPARE_UNITS * (max_unit_tokens - 1)
        slots = math.ceil((probability * num_tokens + SLOT_DEVIATIONS * deviation + spare) / 8) * 8
        return min(num_tokens, max(8, slots))


def masking_rule(inputs: TrainingInputs, masking: MaskingConfig) -> MaskingRule:
    return MaskingRule(
        masking=masking.masking,
        word_starts=None if masking.masking == "token" else _word_starts(inputs, masking),
        mask_token_id=special_ids(inputs.tokenizer)["mask"],
        special_ids=tuple(sorted(inputs.tokenizer.all_special_ids)),
        vocabulary_size=vocabulary_size(inputs.tokenizer),
        mlm_probability=masking.mlm_probability,
        mask_token_rate=masking.mask_token_rate,
        random_token_rate=masking.random_token_rate,
    )


def _word_starts(inputs: TrainingInputs, masking: MaskingConfig) -> NDArray[np.bool_]:
    """Read the table of word starts saved with the tokenizer; without such a table, derive it from the tokens."""
    starts = load_word_starts(inputs.tokenizer_source)
    if starts is None:
        starts = word_starts(inputs.tokenizer)
    if starts is None:
        raise InputError(
            f"--masking {masking.masking} needs a tokenizer whose tokens show where a word starts, or that has a "
            f"{WORD_STARTS_FILE}; {inputs.tokenizer_source} has neither. Use --masking token, or prepare the shards "
            "with a tokenizer of train_unigram.py."
        )
    num_ids = vocabulary_size(inputs.tokenizer)
    if len(starts) != num_ids:
        raise InputError(
            f"{WORD_STARTS_FILE} must have an entry for each of the tokenizer's {num_ids} ids; that in "
            f"{inputs.tokenizer_source} has {len(starts)}. Save the tokenizer again."
        )
    return starts
