"""Which tokens are predicted and what stands in their place; no TensorFlow, so that plans need none."""

import math
from dataclasses import dataclass

# The share that evaluation masks, whatever the training's, so that the figures of any two runs compare.
EVALUATION_MLM_PROBABILITY = 0.15
# How far, in standard deviations of the number of masked tokens, the slots of a row reach beyond the mean.
SLOT_DEVIATIONS = 4


@dataclass(frozen=True)
class MaskingRule:
    """Rates (BERT, Devlin et al. 2018, section 3.1) and the ids they apply to."""

    mask_token_id: int
    special_ids: tuple[int, ...]
    vocabulary_size: int
    mlm_probability: float = 0.15
    mask_token_rate: float = 0.8
    random_token_rate: float = 0.1

    def num_predictions(self, length: int) -> int:
        """Return the slots a row of `length` tokens has for predicted ones: a fixed number, as XLA needs.

        A row draws more than that about once in 30,000 times; the tokens over it stay unmasked.
        """
        mean = self.mlm_probability * length
        deviation = math.sqrt(length * self.mlm_probability * (1 - self.mlm_probability))
        return min(length, 8 * math.ceil((mean + SLOT_DEVIATIONS * deviation) / 8) or 8)
