"""A run of question answering: its questions and model opened, its results written."""

import json
from typing import TYPE_CHECKING, Any

from finetuning.config.settings import QuestionConfig
from finetuning.data.questions import make_windows, read_questions
from finetuning.loop.model import open_start
from finetuning.loop.results import named, train_results, write_results
from finetuning.loop.training import Job, Predict
from finetuning.tasks.questions import QuestionAnswering
from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from train.loop.run import Run
from train.runtime.cluster import Cluster

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

# What the two outputs of the head are called where they need a name.
ENDS = {0: "start", 1: "end"}


class QuestionJob(Job[QuestionConfig]):
    """The job of `run_qa.py`."""

    def open_run(self, config: QuestionConfig, cluster: Cluster) -> Run:
        """Read the questions, cut their paragraphs into windows, and make task and model configuration of them.

        Raises:
            InputError: whatever is wrong with questions, tokenizer or model.
        """
        start, data = open_start(config), config.data
        parts = read_questions(data)
        if data.predicts and not {"test", "validation"} & parts.keys():
            raise InputError("--do-predict needs questions to predict; received neither --test-file nor validation.")
        windows = {
            split: make_windows(start.tokenizer, questions, data, token_types=start.token_types)
            for split, questions in parts.items()
            if split != "test" or data.predicts
        }
        self.predicted = windows.get("test") or windows.get("validation")
        validation = windows.get("validation")
        may_have_no_answer = any(not one.answers for one in parts["train"])
        task = QuestionAnswering(validation, data, may_have_no_answer=may_have_no_answer, **start.of_rows)
        return start.run(task, windows["train"].rows, validation.rows if validation else None, cluster, ENDS)

    def write_results(self, trainer: "Trainer", figures: dict[str, float] | None, step: int, predict: Predict) -> None:
        """Write the scores, and the answers to the questions of the test part, or else of the validation part."""
        run, task = trainer.run, trainer.run.task
        assert isinstance(task, QuestionAnswering)
        train = train_results(trainer, step)
        evaluated = named(figures or {}) | ({"epoch": train["epoch"]} if figures else {})
        predicted, windows = {}, self.predicted
        if windows is not None:
            totals = predict(windows.rows)
            answers = task.answers(totals, windows)
            if windows is not task.windows and all(one.answers is not None for one in windows.questions):
                predicted = named(task.figures_of(totals, windows, answers))
        if not run.cluster.is_chief:
            return
        write_results(run.output_dir, {"train": train, "eval": evaluated, "predict": predicted})
        if windows is None:
            return
        folder, ids = open_folder(run.output_dir), [one.id for one in windows.questions]
        files: dict[str, list[Any]] = {
            "predictions": [one.text for one in answers],
            "nbest_predictions": [one.best for one in answers],
        }
        if task.may_have_no_answer:
            files["null_odds"] = [one.null_odds for one in answers]
        for name, values in files.items():
            content = dict(zip(ids, values, strict=True))
            folder.write_text(f"{name}.json", json.dumps(content, indent=4, ensure_ascii=False) + "\n")
