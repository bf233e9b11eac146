"""Lower learning rates for lower layers, as ELECTRA (Clark et al. 2020) and BEiT (Bao et al. 2021) were fine-tuned."""

import re
from typing import Any

from train.model.build import encoder_layers


def layer_rate_factors(network: Any, decay: float) -> tuple[float, ...]:
    """Compute the factor of the learning rate for each trainable variable of a TF model, in their order.

    1 for the head, and for a pooler or a norm after the layers; `decay` for the last layer, its square for the layer
    before; for the embeddings, and whatever else is below the layers, one power more than for the first layer. Layers
    that are used several times (ALBERT's) count once.
    """
    layers = encoder_layers(network)
    powers = {
        id(variable): len(layers) - index
        for index, layer in enumerate(layers)
        for variable in layer.trainable_variables
    }
    below = re.compile(rf"/{network.base_model_prefix}/(?!(pooler|final_norm|LayerNorm)/)")
    for variable in network.trainable_variables:
        powers.setdefault(id(variable), len(layers) + 1 if below.search(variable.name) else 0)
    return tuple(decay ** powers[id(variable)] for variable in network.trainable_variables)
