"""A run of question answering: its questions and model opened, its results written."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finetuning.config.settings import QuestionConfig, QuestionData
from finetuning.data.questions import END, START, Windows, make_windows, read_questions
from finetuning.loop.model import open_start
from finetuning.loop.results import answers_text, named, train_results, write_results
from finetuning.loop.training import Job, Predict
from finetuning.scores.questions import Answer
from finetuning.tasks.questions import METRICS, QuestionAnswering
from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED
from mlm_common.storage import Folder
from train.checkpoints.store import CheckpointRecord, newest_record
from train.loop.run import Run
from train.metrics.log import read_metrics
from train.metrics.log_files import VALIDATION
from train.runtime.machines import Cluster

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

# What the two outputs of the head are called where they need a name.
ENDS = {0: "start", 1: "end"}
# How an answer is chosen: evaluations with different values cannot be compared.
ANSWER_SETTINGS = ("n_best_size", "max_answer_length", "null_score_diff_threshold")


class QuestionJob(Job[QuestionConfig]):
    """The job of `run_qa.py`."""

    def open_run(self, config: QuestionConfig, cluster: Cluster) -> Run:
        """Read the questions, cut their paragraphs into windows, and make task and model configuration of them.

        Raises:
            InputError: whatever is wrong with questions, tokenizer or model; answer settings that differ from those of
                the evaluations of an incomplete run.
        """
        start, data = open_start(config), config.data
        parts = read_questions(data)
        if data.predicts and not {"test", "validation"} & parts.keys():
            raise InputError("--do-predict needs questions to predict; received neither --test-file nor validation.")
        windows = {
            split: make_windows(
                start.tokenizer, questions, data, token_types=start.token_types, to_train=split == "train"
            )
            for split, questions in parts.items()
        }
        for split, one in windows.items():
            _warn(split, one, data)
        self.test, validation = windows.get("test"), windows.get("validation")
        may_have_no_answer = any(not one.answers for one in parts["train"])
        task = QuestionAnswering(validation, data, may_have_no_answer=may_have_no_answer, **start.of_rows)
        eval_rows = validation.rows if validation else None
        described = _describe(windows["train"], validation)
        recorded = {"may_have_no_answer": may_have_no_answer}
        train_rows = windows["train"].rows
        run = start.run(task, train_rows, eval_rows, cluster, ENDS, described=described, recorded=recorded)
        check_answer_settings(run, data)
        return run

    def write_results(
        self,
        trainer: "Trainer",
        figures: dict[str, float] | None,  # noqa: ARG002  (perhaps logged with other answer settings)
        step: int,
        predict: Predict,
    ) -> dict[str, float] | None:
        """Write the answers to the questions of the test part, or else of the validation part, and the scores of both.

        Returns:
            The figures of the validation part; None without one.
        """
        run, task = trainer.run, trainer.phase.task
        assert isinstance(task, QuestionAnswering)
        scored: dict[str, dict[str, float]] = {}
        predicted: tuple[Windows, list[Answer]] | None = None
        for part, windows in (("eval", task.windows), ("predict", self.test)):
            if windows is not None:
                totals = predict(windows.rows)
                predicted = windows, task.answers(totals, windows)
                if part == "eval" or task.can_score(windows.questions):
                    scored[part] = task.figures_of(totals, *predicted)
        if run.cluster.is_chief:
            results = {"train": train_results(trainer, step)}
            results |= {part: named(one) for part, one in scored.items()}
            if "eval" in scored:
                results["eval"] |= {f"guess_{name}": task.guess[name] for name in METRICS}
                results["eval"]["epoch"] = results["train"]["epoch"]
                _warn_of_other_settings(trainer.start.checkpoint, task.data)
            write_results(run.folder.files, results)
            if predicted is not None:
                _write_answers(run.folder.files, *predicted, may_have_no_answer=task.may_have_no_answer)
        return scored.get("eval")


def _write_answers(folder: Folder, windows: Windows, answers: Sequence[Answer], *, may_have_no_answer: bool) -> None:
    files: dict[str, list[Any]] = {
        "predictions": [one.text for one in answers],
        "nbest_predictions": [one.best for one in answers],
    }
    if may_have_no_answer:
        files["null_odds"] = [one.null_odds for one in answers]
    for name, values in files.items():
        folder.write_text(f"{name}.json", answers_text(windows.questions, values))


def _describe(windows: Windows, validation: Windows | None) -> dict[str, str]:
    """Describe the questions in the plan, with the first answer to train on as its tokens give it back."""
    parts = [(windows, "train"), *([(validation, "evaluate")] if validation else [])]
    rows = [f"{len(one.questions):,} questions → {one.rows.num_rows:,} windows to {verb} on" for one, verb in parts]
    described = {"rows": "; ".join(rows)}
    num, num_answered = len(windows.questions), sum(bool(one.answers) for one in windows.questions)
    described["answers"] = f"{num_answered / num:.1%} of the questions have one"
    ends = np.asarray(windows.rows.of_rows[END], np.int64)
    row = int(np.argmax(ends > 0))
    if ends[row] > 0:
        begin, end = windows.rows.starts[row] + np.array([windows.rows.of_rows[START][row], ends[row]])
        context = windows.questions[windows.question[row]].context
        described["first answer"] = context[windows.begins[begin] : windows.ends[end]].strip()
    return described


def _warn(split: str, windows: Windows, data: QuestionData) -> None:
    """Say how many questions of a part are not used as they are written, and what becomes of them."""
    to_train, num = split == "train", len(windows.questions)
    if windows.too_long:
        logger.warning(
            "%d of %d questions of the %s part are too long for --max-seq-length %d with --doc-stride %d: they are %s. "
            "Lower --doc-stride, or raise --max-seq-length.",
            *(len(windows.too_long), num, split, data.max_seq_length, data.stride),
            "not trained on" if to_train else "answered with an empty text",
        )
    if windows.not_found:
        logger.warning(
            "%d of %d questions of the %s part have an answer that is longer than a window or has no token: they %s.",
            *(len(windows.not_found), num, split),
            "are not trained on" if to_train else "cannot be answered in full",
        )


def check_answer_settings(run: Run, data: QuestionData) -> None:
    """Check that all evaluations of a run choose answers with the same settings, since they choose the checkpoint.

    Raises:
        InputError: a run that is not complete was begun with others.
    """
    record = None if run.starts_over else newest_record(run.folder)
    if record is None or run.phases[0].inputs.num_evaluation_batches(1) == 0 or _is_complete(run, record):
        return
    changed = changed_answer_settings(record, data)
    if changed:
        before = ", ".join(f"{flag} {old}" for flag, (old, _) in changed.items())
        now = ", ".join(f"{flag} {new}" for flag, (_, new) in changed.items())
        raise InputError(
            f"The best checkpoint of {run.folder} is chosen by evaluations with {before}, and the run is not "
            f"complete (step {record.step:,}); received {now}. Complete it with {before}, then run the command again "
            f"with {now}: all answers and scores are then computed with that."
        )


def _is_complete(run: Run, record: CheckpointRecord) -> bool:
    """Return whether nothing is left to train or to evaluate after the newest checkpoint."""
    then, now = record.settings["optimization"], run.config.optimization
    if record.step < record.plan["num_steps"] or any(
        then.get(name) != getattr(now, name) for name in ("num_epochs", "max_steps")
    ):
        return False
    lines = read_metrics(run.folder, record.num_written_log_lines, record.unwritten_log_lines)
    return any(line["split"] == VALIDATION and line["step"] == record.step for line in lines)


def changed_answer_settings(record: CheckpointRecord, data: QuestionData) -> dict[str, tuple[Any, Any]]:
    """Collect {flag: (value then, value now)} of the answer settings that have changed since a checkpoint."""
    then = record.settings["data"]
    values = {name: (then.get(name, REDACTED), getattr(data, name)) for name in ANSWER_SETTINGS}
    return {flag_of(name): (old, new) for name, (old, new) in values.items() if old not in (new, REDACTED)}


def _warn_of_other_settings(record: CheckpointRecord | None, data: QuestionData) -> None:
    changed = changed_answer_settings(record, data) if record else {}
    if changed:
        logger.warning(
            "The checkpoint was chosen by evaluations with %s; all answers and scores written now are by %s.",
            ", ".join(f"{flag} {old}" for flag, (old, _) in changed.items()),
            ", ".join(f"{flag} {new}" for flag, (_, new) in changed.items()),
        )
