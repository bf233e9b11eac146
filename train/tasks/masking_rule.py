"""What training masks: rates, the ids they apply to, and what is masked as a whole. It needs no TensorFlow."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.tokenizer import WORD_STARTS_FILE, load_word_starts, special_ids, vocabulary_size, word_starts
from train.config.learning import MaskingConfig
from train.data.shards import TrainingInputs

# How many standard deviations of the number of masked tokens the slots of a batch reach beyond its mean: a batch draws
# more about once in a hundred million times.
SLOT_DEVIATIONS = 6
# Further slots, in units less a token: a batch has few long units, and a small number varies more than the normal.
SPARE_UNITS = 2
# Longer words and spans are masked in several units: so the number of masked tokens varies little, whatever the text.
MAX_WORD_TOKENS = 8
MAX_SPAN_TOKENS = 20

Masking = Literal["token", "whole_word", "span"]
MAX_UNIT_TOKENS: dict[Masking, int] = {"token": 1, "whole_word": MAX_WORD_TOKENS, "span": MAX_SPAN_TOKENS}


@dataclass(frozen=True)
class MaskingRule:
    """Rates (BERT, Devlin et al. 2018, section 3.1), the ids they apply to, and what is masked as a whole.

    word_starts: bool (vocabulary_size,), whether a word starts with an id; words and spans need it.
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
        """Count the slots for predicted tokens in a batch of `num_tokens`: a fixed number, as XLA needs.

        The variance is that of the worst case, where all units are as long as they may be; in any text it is less.
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
    """Read the table saved with the tokenizer; without one, derive it from the tokens."""
    starts = load_word_starts(inputs.tokenizer_source)
    if starts is None:
        starts = word_starts(inputs.tokenizer)
    if starts is None:
        raise InputError(
            f"--masking {masking.masking} needs a tokenizer whose tokens show where a word starts, or with a "
            f"{WORD_STARTS_FILE}; {inputs.tokenizer_source} has neither. Give --masking token, or prepare the shards "
            "with a tokenizer of train_unigram.py."
        )
    num_ids = vocabulary_size(inputs.tokenizer)
    if len(starts) != num_ids:
        raise InputError(
            f"{WORD_STARTS_FILE} must have an entry for each of the tokenizer's {num_ids} ids; that in "
            f"{inputs.tokenizer_source} has {len(starts)}. Save the tokenizer again."
        )
    return starts
