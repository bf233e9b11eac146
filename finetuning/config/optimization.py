"""Settings of the optimization: the settings of pretraining with defaults for short runs, and options of the losses."""

import math
from dataclasses import dataclass

from mlm_common.cli.settings import Public, flag, require
from train.config import Added, Changeable, Rounding
from train.config.learning import BATCH, OptimizationConfig

# The value of --class-weights that computes the weights from the class frequencies.
BALANCED = "balanced"


@dataclass(frozen=True)
class FinetuningOptimization(OptimizationConfig):
    """Batch, length of the run, optimizer, and the learning rate over the run."""

    per_replica_batch_size: Rounding[int] = flag(
        32,
        "Rows per replica at once. BERT used 32. Lower it if memory runs out.",
        alias="per_device_train_batch_size",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    num_epochs: Changeable[int] = flag(
        3,
        "Passes over the training examples. BERT used 3.",
        alias="num_train_epochs",
        group=BATCH,
        is_usual=True,
        at_least=1,
    )
    learning_rate: float = flag(
        2e-5, "Peak learning rate, reached after the warmup. BERT used 5e-5, 3e-5 and 2e-5.", is_usual=True, above=0
    )
    warmup_ratio: float = flag(
        0.1, "Fraction of the steps over which the learning rate rises from 0. BERT used 0.1.", at_least=0, below=1
    )
    weight_decay_rate: float = flag(
        0.01, "Decoupled weight decay, not applied to biases and layer norms.", alias="weight_decay", at_least=0
    )
    adam_beta2: float = flag(0.999, "Decay of the second moment. BERT used 0.999.", at_least=0, below=1)
    layer_lr_decay: Added[float] = flag(
        1.0,
        "Layer-wise learning rates: --learning-rate for the head, X times that rate for the last layer, X² times for "
        "the layer below it, and so on down to the embeddings. ELECTRA used 0.8 and 0.9. 1 turns it off.",
        above=0,
        at_most=1,
    )


@dataclass(frozen=True)
class SmoothedOptimization(FinetuningOptimization):
    """Settings of the optimization for tasks with one right class per row."""

    label_smoothing: Added[float] = flag(
        0.0,
        "Label smoothing: fraction of each label that the training loss divides equally among all classes. The "
        "evaluation loss does not use it.",
        at_least=0,
        below=1,
    )


@dataclass(frozen=True)
class ClassOptimization(SmoothedOptimization):
    """Settings of the optimization for classification and tagging."""

    class_weights: Added[Public[list[str]]] = flag(
        list,
        "Weights of the classes in the training loss: balanced, so that rare classes count as much as frequent ones, "
        "or a number for each class, in the order in which --dry-run lists them. The evaluation loss does not use "
        "them.",
        metavar="balanced|X",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = self.class_weights == [BALANCED] or all(map(_is_weight, self.class_weights))
        given = " ".join(self.class_weights)
        require(is_valid, f"must be {BALANCED}, or numbers above 0, one per class", "--class-weights", given)


def _is_weight(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
