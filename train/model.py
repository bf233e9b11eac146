"""The masked-LM that is trained: transformers' TF class with fresh weights."""

from typing import Any

import tf_keras
from transformers import PretrainedConfig, TFAutoModelForMaskedLM

from train.architectures import align_padding_positions
from train.config import ModelConfig
from train.position_init import start_positions_as_sinusoids
from train.recompute import recompute_layers
from train.tpu_layers import compute_as_suits_tpu
from train.vocabulary_padding import clear_padding


def build_masked_lm(
    model_config: PretrainedConfig,
    settings: ModelConfig,
    *,
    vocabulary_size: int,
    seed: int,
    tpu_layers: bool = False,
) -> Any:
    """Return a TF…ForMaskedLM with fresh weights, the same for the same seed.

    Args:
        model_config: of `resolve_model_config`, its vocabulary padded.
        settings: how the weights start, and whether activations are computed twice.
        vocabulary_size: ids of the tokenizer; what is padding in the model starts as 0.
        seed: fixes the weights.
        tpu_layers: compute layers as suits XLA on a TPU, where that is known for the architecture.
    """
    tf_keras.utils.set_random_seed(seed)
    masked_lm = TFAutoModelForMaskedLM.from_config(model_config)
    masked_lm(masked_lm.dummy_inputs, training=False)
    align_padding_positions(masked_lm)
    if settings.position_init == "sinusoidal":
        start_positions_as_sinusoids(masked_lm)
    clear_padding(masked_lm, vocabulary_size)
    if tpu_layers:
        compute_as_suits_tpu(masked_lm)
    if settings.recompute:
        recompute_layers(masked_lm)
    return masked_lm
