"""The loss of classes in training: cross-entropy with weights of the classes and smoothed labels, as in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.optimization import BALANCED, SmoothedOptimization
from mlm_common.cli.settings import require

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy as PyTorch's `CrossEntropyLoss`; evaluations are without it, so that runs compare.

    weights: of the classes, by id.
    smoothing: the fraction of a label that is divided equally among all classes (Szegedy et al. 2015).
    """

    weights: tuple[float, ...]
    smoothing: float = 0.0

    def losses(self, logits: "tf.Tensor", labels: "tf.Tensor") -> tuple["tf.Tensor", "tf.Tensor"]:
        """Compute the loss of each label and its weight; a mean is the sum of losses divided by that of weights.

        Args:
            logits: float32 (…, classes).
            labels: class ids, int32 (…).
        """
        import tensorflow as tf

        num_classes, weights = len(self.weights), tf.constant(self.weights, tf.float32)
        targets = (1 - self.smoothing) * tf.one_hot(labels, num_classes) + self.smoothing / num_classes
        return -tf.reduce_sum(targets * weights * tf.nn.log_softmax(logits), axis=-1), tf.gather(weights, labels)


def class_loss(settings: SmoothedOptimization, names: Sequence[str], labels: NDArray[np.int32]) -> ClassLoss | None:
    """Make the loss that the flags ask for, by the names of the classes and the labels to train on; None without any.

    `balanced` weighs each class by the mean number of labels of a class divided by the number of its labels, as
    scikit-learn does.

    Raises:
        InputError: weights of other classes, or `balanced` and a class without labels.
    """
    given: Any = getattr(settings, "class_weights", [])
    if not given:
        return ClassLoss((1.0,) * len(names), settings.label_smoothing) if settings.label_smoothing else None
    if given != [BALANCED]:
        rule = f"must be {BALANCED} or {len(names)} numbers, for {', '.join(names)[:200]}"
        require(len(given) == len(names), rule, "--class-weights", " ".join(given))
        return ClassLoss(tuple(map(float, given)), settings.label_smoothing)
    counts = np.bincount(labels, minlength=len(names))
    absent = ", ".join(name for name, count in zip(names, counts, strict=True) if not count)
    rule = f"needs labels of each class to train on, or numbers instead of {BALANCED}"
    require(not absent, rule, "--class-weights", f"none of {absent[:200]}")
    return ClassLoss(tuple((len(labels) / (len(names) * counts)).tolist()), settings.label_smoothing)


def describe_loss(loss: ClassLoss | None, names: Sequence[str]) -> dict[str, str]:
    """Describe weights of classes in the plan of a run."""
    if loss is None or len(set(loss.weights)) == 1:
        return {}
    listed = [f"{name} {weight:.4g}" for name, weight in zip(names, loss.weights, strict=True)]
    return {"class weights": ", ".join(listed)[:500]}
