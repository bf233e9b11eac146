"""Evaluation: every validation row once, with masks fixed by the row, so that the figures of any two runs compare."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from train.metrics.log import perplexity
from train.runtime import heartbeat
from train.tasks.masking_rule import EVALUATION_MLM_PROBABILITY
from train.train_step import PretrainingModel


@dataclass(frozen=True)
class Evaluation:
    """Figures over all masked tokens of the validation rows; the loss in nats."""

    loss: float
    masked_accuracy: float
    num_masked: int

    @property
    def perplexity(self) -> float:
        """E to the loss."""
        return perplexity(self.loss)


Evaluator = Callable[[Callable[[], bool]], Evaluation | None]


def build_evaluator(
    model: PretrainingModel, batches: Any, num_batches: int, strategy: tf.distribute.Strategy, *, jit_compile: bool
) -> Evaluator:
    """Return a function that evaluates the model as it is when called.

    It is called with one that tells whether to give up, which is asked before each batch; it returns None then.

    Args:
        batches: of `evaluation_batches`, distributed by `distribute_batches`; read anew at each call.
        num_batches: how many there are for each replica.
    """
    evaluation_step = functools.partial(model.evaluation_step, mlm_probability=EVALUATION_MLM_PROBABILITY)
    if jit_compile:
        evaluation_step = tf.function(evaluation_step, jit_compile=True)

    @tf.function
    def step(batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
        sums = strategy.run(evaluation_step, args=(batch,))
        # Every replica holds the global sums.
        return tuple(strategy.experimental_local_results(value)[0] for value in sums)

    def evaluate(gives_up: Callable[[], bool] = lambda: False) -> Evaluation | None:
        # Reading a figure from the device waits for it, so all are read at the end.
        sums: list[tuple[tf.Tensor, ...]] = []
        for batch in itertools.islice(batches, num_batches):
            if gives_up():
                return None
            heartbeat.report("evaluate", len(sums))
            sums.append(step(batch))
        loss, num_correct, num_masked = (sum(float(value) for value in column) for column in zip(*sums, strict=True))
        if not num_masked:
            return Evaluation(loss=0.0, masked_accuracy=0.0, num_masked=0)
        return Evaluation(loss / num_masked, num_correct / num_masked, int(num_masked))

    return evaluate
