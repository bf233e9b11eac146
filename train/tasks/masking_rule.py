"""Which tokens are predicted and what stands in their place; no TensorFlow, so that plans need none."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# The share that evaluation masks, whatever the training's, so that the figures of any two runs compare.
EVALUATION_MLM_PROBABILITY = 0.15
# How far, in standard deviations of the number of masked tokens, the slots of a batch reach beyond its mean: a batch
# draws more about once in a hundred million times.
SLOT_DEVIATIONS = 6
# Slots more, in units less a token: of long units a batch draws few, and few reach further than the normal.
SPARE_UNITS = 2
# Longer words and spans are masked in several units: so the number of masked tokens varies little, whatever the text.
MAX_WORD_TOKENS = 8
MAX_SPAN_TOKENS = 20

Masking = Literal["token", "whole_word", "span"]
MAX_UNIT_TOKENS: dict[Masking, int] = {"token": 1, "whole_word": MAX_WORD_TOKENS, "span": MAX_SPAN_TOKENS}


@dataclass(frozen=True)
class MaskingRule:
    """Rates (BERT, Devlin et al. 2018, section 3.1), the ids they apply to, and what is masked as a whole.

    word_starts: bool (vocabulary_size,), whether a word begins with an id; words and spans need it.
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
        """Count the slots for predicted tokens in a batch of `num_tokens`: a fixed number, as XLA needs."""
        return num_prediction_slots(num_tokens, self.mlm_probability, MAX_UNIT_TOKENS[self.masking])


def num_prediction_slots(num_tokens: int, mlm_probability: float, max_unit_tokens: int = 1) -> int:
    """Count the slots for predicted tokens in a batch of `num_tokens` that are masked in units.

    The variance is that of the worst case, where all units are as long as they may be; in any text it is less.
    """
    mean = mlm_probability * num_tokens
    deviation = math.sqrt(num_tokens * max_unit_tokens * mlm_probability * (1 - mlm_probability))
    spare = SPARE_UNITS * (max_unit_tokens - 1)
    slots = math.ceil((mean + SLOT_DEVIATIONS * deviation + spare) / 8) * 8
    return min(num_tokens, max(8, slots))
