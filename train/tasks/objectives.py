"""The tasks by the names that `--objective` has for them."""

from train.config.settings import TrainingConfig
from train.data.shards import TrainingInputs
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.pair_pretraining import NextSentencePrediction, SentenceOrderPrediction

OBJECTIVES: dict[str, type[MaskedLanguageModeling]] = {
    "mlm": MaskedLanguageModeling,
    "mlm+nsp": NextSentencePrediction,
    "mlm+sop": SentenceOrderPrediction,
}


def task_of(config: TrainingConfig, inputs: TrainingInputs) -> MaskedLanguageModeling:
    """Make the task of a run, or of one of its phases.

    Raises:
        InputError: its inputs do not suit it.
    """
    return OBJECTIVES[config.model.objective].of(inputs, config.masking)
