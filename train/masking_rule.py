"""Which tokens are predicted and what stands in their place; no TensorFlow, so that plans need none."""

import math
from dataclasses import dataclass

# The share that evaluation masks, whatever the training's, so that the figures of any two runs compare.
EVALUATION_MLM_PROBABILITY = 0.15
# How far, in standard deviations of the number of masked tokens, the slots of a batch reach beyond its mean: a batch
# draws more about once in a hundred million times.
SLOT_DEVIATIONS = 6


@dataclass(frozen=True)
class MaskingRule:
    """Rates (BERT, Devlin et al. 2018, section 3.1) and the ids they apply to."""

    mask_token_id: int
    special_ids: tuple[int, ...]
    vocabulary_size: int
    mlm_probability: float = 0.15
    mask_token_rate: float = 0.8
    random_token_rate: float = 0.1


def num_prediction_slots(num_tokens: int, mlm_probability: float) -> int:
    """Return the slots for predicted tokens in a batch of `num_tokens`: a fixed number, as XLA needs."""
    mean = mlm_probability * num_tokens
    deviation = math.sqrt(num_tokens * mlm_probability * (1 - mlm_probability))
    slots = math.ceil((mean + SLOT_DEVIATIONS * deviation) / 8) * 8
    return min(num_tokens, max(8, slots))
