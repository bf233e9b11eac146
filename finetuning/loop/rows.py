"""A run of any task with one answer for each row: its parts, and its results written."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.sources import Settings
from finetuning.data.rows import EncodedRows
from finetuning.loop.results import EVAL_NAME, named, predictions_text, train_results, write_results
from finetuning.loop.training import Job, Predict
from finetuning.tasks.rows import RowTask
from mlm_common.storage import Folder

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

    def write_results(
        self,
        trainer: "Trainer",
        figures: dict[str, float] | None,  # noqa: ARG002
        step: int,
        predict: Predict,
    ) -> dict[str, float] | None:
        """Predict the validation and test parts; write the predictions and, where there are labels, their scores."""
        run, task = trainer.run, trainer.phase.task
        assert isinstance(task, RowTask)
        train = train_results(trainer, step)
        predictions: dict[str, NDArray[Any]] = {}

        def figures_of(name: str, part: Part) -> dict[str, float]:
            totals = predict(part.rows)
            predictions[name] = task.predictions(totals)
            return task.figures_of(totals, part.labels, part.is_labelled) if part.labels is not None else {}

        validation = {ending: figures_of(f"{EVAL_NAME}{ending}", part) for ending, part in self.validation.items()}
        evaluated = {
            f"{name}{ending}": value for ending, part in validation.items() for name, value in named(part).items()
        }
        if evaluated:
            evaluated |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        predicted: dict[str, Any] = {}
        for name, part in self.tests.items():
            predicted |= named(figures_of(f"predict_results_{name}", part))
        first = validation.get("")
        if not run.cluster.is_chief:
            return first
        for name, of_part in predictions.items():
            run.folder.files.write_text(f"{name}.txt", predictions_text(map(task.shown, of_part)))
        if first:
            self.write_more(run.folder.files, task, predictions[EVAL_NAME])
        write_results(run.folder.files, {"train": train, "eval": evaluated, "predict": predicted})
        if first and first["is_degenerate"]:
            logger.warning("All validation rows have the same prediction: nothing was learned.")
        return first

    def write_more(self, folder: Folder, task: Any, predictions: NDArray[Any]) -> None:
        """Write what else shows the predictions of the validation part; by default nothing."""
