"""Push a model to the Hub while it trains, without slowing or ending the training."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from mlm_common.background import LatestItemWorker
from mlm_common.hub.push import HubRepository
from mlm_common.hub.retries import Interruption
from train.config.settings import HubConfig
from train.publishing.publisher import Publication, Publisher
from train.runtime import supervisor
from train.runtime.plan import Plan

logger = logging.getLogger(__name__)

# How long a run that ends early may go on pushing; a spot machine has half of it.
GRACE_SECONDS = 60.0


def steps_of_pushes(config: HubConfig, plan: Plan) -> tuple[int, ...]:
    """Return the steps after which a model is pushed within a phase, without its last step."""
    if config.hub_model_id is None or config.hub_strategy == "end":
        return ()
    if config.hub_strategy in ("steps", "checkpoint"):
        return tuple(range(config.push_steps or plan.save_steps, plan.num_steps, config.push_steps or plan.save_steps))
    passes = range(plan.first_row // plan.num_rows + 1, plan.row_after(plan.num_steps) // plan.num_rows + 1)
    ends = (-((plan.first_row - plan.num_rows * epoch) // plan.global_batch_rows) for epoch in passes)
    return tuple(plan.first_step + steps for steps in ends if plan.first_step + steps < plan.num_steps)


class PushToHub:
    """Pushes the model while it is trained, without holding up or ending the training.

    The weights are copied on the training thread; another thread exports and uploads. While a push runs the next one
    waits, and of those that wait only the newest is kept. A push that fails is a warning. Use it as a context around
    `fit`: its end waits for the running push, after an exception also for the one that waits, both together at most
    `GRACE_SECONDS`. The last state is not pushed here.

    Args:
        publisher: exports and pushes; None on a worker that does not push.
        steps: of the whole run, after which to push; the same on all workers.
        metrics: returns the lines of `metrics.jsonl` so far.
    """

    def __init__(
        self, publisher: Publisher | None, steps: tuple[int, ...], *, metrics: Callable[[], Sequence[dict[str, Any]]]
    ):
        self.steps = steps
        self._publisher = publisher and replace(publisher, repository=_untagged(publisher))
        self._metrics = metrics
        self._pushes: LatestItemWorker[Publication] = LatestItemWorker(self._push)
        self._interruption = Interruption(no_retries=self._pushes.newer_waits)
        self._failed_steps: list[int] = []

    def __enter__(self) -> "PushToHub":
        if self.steps:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()  # they would disturb that of the training
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._pushes.drop_waiting()  # the run's last state is about to follow
            with supervisor.keep_reporting("push"):
                self._pushes.wait()
        elif not self._pushes.wait(GRACE_SECONDS):
            self._pushes.drop_waiting()
            self._interruption.cancel.set()
            logger.warning("the last push to the Hub was given up: it did not end within %.0f s", GRACE_SECONDS)
        if self._failed_steps:
            steps = ", ".join(f"{step:,}" for step in self._failed_steps)
            logger.warning("pushes to the Hub that failed while training: those of the steps %s", steps)

    def push(self, model: Any, step: int) -> None:
        """Copy the weights of a model in training, and pass them to the other thread."""
        # After a step that was not finite no weights change any more, and the run is about to end.
        if self._publisher is None or model.optimizer.is_stopped:
            return
        started_seconds = time.perf_counter()
        self._pushes.submit(self._publisher.take(model.network, step, self._metrics()))
        logger.info("step %d goes to the Hub; copied in %.3f s", step, time.perf_counter() - started_seconds)

    def _push(self, publication: Publication) -> None:
        assert self._publisher is not None
        message = f"Step {publication.step:,}"
        try:
            self._publisher.publish(publication, message, interruption=self._interruption)
        except Exception as error:  # of the Hub, the disk, Cloud Storage, or the network
            self._failed_steps.append(publication.step)
            logger.warning("step %d is not on the Hub; training continues. %s", publication.step, error)


def _untagged(publisher: Publisher) -> HubRepository | None:
    return publisher.repository and replace(publisher.repository, tag=None)
