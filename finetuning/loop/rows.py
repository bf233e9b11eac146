"""A run of any task with one answer for each row: its parts, and its results written."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.sources import Settings
from finetuning.data.rows import EncodedRows
from finetuning.loop.results import named, train_results, write_predictions, write_results
from finetuning.loop.training import Job, Predict
from finetuning.tasks.rows import RowTask

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Examples as the model takes them, and their labels; None where they have none.

    is_labelled: bool (rows,), which of them have one; None where all have.
    """

    rows: EncodedRows
    labels: NDArray[Any] | None
    is_labelled: NDArray[np.bool_] | None = None


class RowsJob(Job[Settings]):
    """The job of such a run; `open_run` sets what else there is than the rows to train on.

    validation: {ending of the names of the figures: part}; the first is the one that checkpoints are chosen by.
    tests: {name of the predictions: part}.
    """

    validation: dict[str, Part]
    tests: dict[str, Part]

    def write_results(self, trainer: "Trainer", figures: dict[str, float] | None, step: int, predict: Predict) -> None:
        """Write the scores, and the predictions of the test parts."""
        run, task = trainer.run, trainer.run.task
        assert isinstance(task, RowTask)
        train = train_results(trainer, step)
        evaluated: dict[str, Any] = {}
        for ending, part in self.validation.items():
            of_part = figures if ending == "" else None
            if of_part is None and part.labels is not None:
                of_part = task.figures_of(predict(part.rows), part.labels)
            evaluated |= {f"{name}{ending}": value for name, value in named(of_part or {}).items()}
        if evaluated:
            evaluated |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        predicted: dict[str, Any] = {}
        predictions = {}
        for name, part in self.tests.items():
            totals = predict(part.rows)
            predictions[name] = [task.shown(one) for one in task.predictions(totals)]
            if part.labels is not None:
                predicted |= named(task.figures_of(totals, part.labels))
        write_more = self.more_results(task, predict)
        if not run.cluster.is_chief:
            return
        write_more(run.output_dir)
        write_results(run.output_dir, {"train": train, "eval": evaluated, "predict": predicted})
        for name, lines in predictions.items():
            write_predictions(run.output_dir, name, lines)
        if figures and figures["is_degenerate"]:
            logger.warning("All rows to evaluate on are predicted alike: nothing was learned.")

    def more_results(self, task: Any, predict: Predict) -> Callable[[str], None]:  # noqa: ARG002
        """Compute what else the run is to show, and return what writes it into the folder of the run."""
        return lambda _: None
