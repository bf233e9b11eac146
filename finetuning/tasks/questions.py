"""Extractive question answering (Rajpurkar et al. 2016): find the first and last token of the answer in a paragraph."""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from finetuning.config.settings import QuestionConfig, QuestionData
from finetuning.data.inputs import INDEX, INPUT_IDS
from finetuning.data.shared_rows import check_shared_rows
from finetuning.loop.model import open_start
from finetuning.loop.task import ExampleTask, Split
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.squad import baseline, read_questions, scores
from finetuning.tasks.windows import END, START, Answer, Windows, choose_answers, make_windows
from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED
from mlm_common.storage import Folder
from train.checkpoints.store import newest_records
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.tasks.task import CardFigure, Mean, TaskCard, shown_loss

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Logit of padding. The probability of padding becomes 0.
NEVER = -1e9
METRICS = ("exact_match", "f1")
# Names of the head's two outputs in the model's configuration.
ENDS = {0: "start", 1: "end"}
# The settings that determine how answers are chosen. Scores are comparable only if these settings are equal.
ANSWER_SETTINGS = ("n_best_size", "max_answer_length", "null_score_diff_threshold")
# Code for the model card. The code does not use a pipeline, because transformers 5 has no pipeline for this task.
USAGE = """```python
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model}{revision})
model = AutoModelForQuestionAnswering.from_pretrained({model}{revision})
question, context = "Who wrote the notes?", "The notes were written by Ada Lovelace in 1843."

inputs = tokenizer(question, context, truncation="only_second", return_offsets_mapping=True, return_tensors="pt")
offsets, of_context = inputs.pop("offset_mapping")[0], [part == 1 for part in inputs.sequence_ids()]
with torch.no_grad():
    outputs = model(**inputs)
scores = outputs.start_logits[0, :, None] + outputs.end_logits[0]  # (start, end)
may_be = torch.ones_like(scores).triu().tril(29).bool() & torch.tensor(of_context)[:, None] & torch.tensor(of_context)
start, end = divmod(scores.where(may_be, -torch.inf).argmax().item(), len(offsets))
print(context[offsets[start, 0] : offsets[end, 1]].strip())
```

This reads the first {max_length} tokens; longer texts need several overlapping windows."""


class QuestionAnswering(ExampleTask):
    """Learns where in a paragraph a question's answer is and, for some data sets, whether the paragraph has an answer.

    Args:
        data: settings of rows and answers.
        may_have_no_answer: whether some training questions have no answer.
        task_arguments: arguments of `ExampleTask`.
    """

    model_class = "TFAutoModelForQuestionAnswering"
    metrics = METRICS
    metric = "f1"
    means = (Mean("loss", "loss", "num_rows"),)
    card = TaskCard(
        model_kind="question answering model",
        task_name="Question answering",
        pipeline_tag="question-answering",
        figures=(
            CardFigure("loss", "loss", "loss", "Loss"),
            CardFigure("exact_match", "exact match", "exact_match", "Exact match"),
            CardFigure("f1", "F1", "f1", "F1"),
        ),
        tags=("question-answering",),
        training_verb="fine-tuned",
        start_words="from",
        usage=USAGE,
        evaluation="On the {num_questions:,} validation questions, which also decided which checkpoint was kept. Exact "
        "match and F1 are in percent.",
    )

    def __init__(self, data: QuestionData, *, may_have_no_answer: bool, **task_arguments: Any):
        super().__init__(**task_arguments)
        self.data = data
        self.may_have_no_answer = may_have_no_answer

    def features(self, length: int) -> dict[str, Feature]:
        return {**self.text_features(length), START: Feature(), END: Feature()}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, the mean of the losses of start and end, and `num_rows`.

        In an evaluation, also return the logits.
        """
        import tensorflow as tf

        start, end = self._logits(network, rows, training=training)
        losses = [
            tf.nn.sparse_softmax_cross_entropy_with_logits(rows[name], logits)
            for name, logits in ((START, start), (END, end))
        ]
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)
        sums = {"loss": tf.reduce_sum(tf.add_n(losses) / 2 * is_row), "num_rows": tf.reduce_sum(is_row)}
        return sums if training else sums | self._padded(start, end, rows)

    def prediction_outputs(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        return self._padded(*self._logits(network, rows, training=False), rows)

    def _logits(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> tuple["tf.Tensor", "tf.Tensor"]:
        """Compute the logits of the start and of the end, float32 (rows, length) each."""
        import tensorflow as tf

        inputs = self.network_inputs(rows)
        outputs = network(inputs, training=training)
        # Make padding impossible as an answer, so that the loss does not depend on the padded length.
        is_token = inputs["attention_mask"] > 0
        start, end = (
            tf.where(is_token, tf.cast(logits, tf.float32), NEVER)
            for logits in (outputs.start_logits, outputs.end_logits)
        )
        return start, end

    def _padded(self, start: "tf.Tensor", end: "tf.Tensor", rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Pad the logits to (rows, max_seq_length), so that logits from all buckets can be concatenated."""
        import tensorflow as tf

        padding = ((0, 0), (0, self.data.max_seq_length - rows[INPUT_IDS].shape[1]))
        outputs = {"start": start, "end": end}
        outputs = {name: tf.pad(logits, padding, constant_values=NEVER) for name, logits in outputs.items()}
        return outputs | {INDEX: rows[INDEX]}

    def predictions(self, sums: Mapping[str, Any], split: Split) -> list[Answer]:
        return choose_answers(
            split.examples,
            self.in_order(sums, "start"),
            self.in_order(sums, "end"),
            num_best=self.data.n_best_size,
            max_answer_length=self.data.max_answer_length,
            null_threshold=self.data.null_score_diff_threshold if self.may_have_no_answer else None,
        )

    def compute_scores(self, sums: Mapping[str, Any], predictions: list[Answer], split: Split) -> dict[str, float]:  # noqa: ARG002
        questions = split.examples.questions
        counts = {"num_rows": split.rows.num_rows, "num_questions": len(questions)}
        return scores(questions, [answer.text for answer in predictions]) | counts

    def format_predictions(self, predictions: list[Answer], split: Split) -> str:
        return by_id(split, (answer.text for answer in predictions))

    def write_extra_files(self, folder: Folder, predictions: list[Answer], split: Split) -> None:
        """Write the best answers to each question, and `null_odds` if questions may have no answer."""
        folder.write_text("nbest_predictions.json", by_id(split, (answer.best for answer in predictions)))
        if self.may_have_no_answer:
            folder.write_text("null_odds.json", by_id(split, (answer.null_odds for answer in predictions)))

    def summarize(self, figures: Mapping[str, float]) -> str:
        in_percent = f"F1 {figures['f1']:.2f}%  exact match {figures['exact_match']:.2f}%"
        return f"loss {shown_loss(figures['loss'])}  {in_percent}"

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --question "…" --context "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        number = f"{figures['num_questions']:,} questions in {figures['num_rows']:,} windows"
        names = [name for name in figures if name in METRICS or "Ans_" in name]
        guess = {name: f"; a guess without the question: {self.guess[name]:.2f}%" for name in METRICS}
        return {"validation loss": f"{figures['loss']:.4f}, of {number}"} | {
            name.replace("_", " "): f"{figures[name]:.2f}%{guess.get(name, '')}" for name in names
        }

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        ids, start, end = (rows[name][0].numpy() for name in (INPUT_IDS, START, END))
        answer = f"{tokenizer.decode(ids[start : end + 1])}, tokens {start} to {end}"
        if not end:
            answer = "none in this window of the text: token 0"
        return {"first row": self.first_text(rows, tokenizer), "its answer": answer}


class QuestionJob(FinetuningJob[QuestionConfig]):
    """The job of `run_qa.py`."""

    def open_run(self, config: QuestionConfig, cluster: Cluster) -> Run:
        start, data = open_start(config), config.data
        questions = read_questions(data)
        if data.predicts and not {"test", "validation"} & questions.keys():
            raise InputError(
                "--do-predict needs questions to predict; received neither a test split nor a validation split."
            )
        check_shared_rows(
            {
                split: [(question.context, question.question) for question in of_split]
                for split, of_split in questions.items()
            },
            {split: getattr(data, f"{split}_file") or f"{data.dataset_name}, split {split}" for split in questions},
            ["test"] if any(question.answers is None for question in questions.get("test", ())) else [],
        )
        may_have_no_answer = any(not question.answers for question in questions["train"])
        task = QuestionAnswering(data, may_have_no_answer=may_have_no_answer, **start.task_arguments)

        def make_split(split: str) -> Split:
            is_train, of_split = split == "train", questions[split]
            windows = make_windows(start.tokenizer, of_split, data, token_types=start.token_types, to_train=is_train)
            _warn(split, windows, data)
            # If no question of the test split has an answer, the answers may have been removed.
            has_answers = may_have_no_answer or any(question.answers for question in of_split)
            are_known = all(question.answers is not None for question in of_split)
            is_scored = split != "test" or (has_answers and are_known)
            return Split(windows.rows, windows, "predictions.json", is_scored)

        train = make_split("train")
        self.validation = {"": make_split("validation")} if "validation" in questions else {}
        self.tests = [make_split("test")] if "test" in questions else []
        validation = self.validation.get("")
        if validation is not None:
            guess = baseline(questions["validation"], may_have_no_answer=may_have_no_answer)
            task.guess = {name: guess[name] for name in METRICS}
        plan_lines = _describe(train.examples, validation.examples if validation else None)
        run_info = {"may_have_no_answer": may_have_no_answer}
        return start.run(task, train.rows, validation, cluster, ENDS, plan_lines=plan_lines, run_info=run_info)

    def check(self, run: Run) -> None:
        """Warn if the settings for choosing answers have changed since earlier checkpoints were scored."""
        super().check(run)
        if run.starts_over or not self.validation or not run.cluster.is_chief:
            return
        assert isinstance(run.config, QuestionConfig)
        settings, last_steps = dataclasses.asdict(run.config.data), dict[str, int]()
        for record in newest_records(run.folder):
            earlier = {name: value for name, value in record.settings["data"].items() if value != REDACTED}
            last_steps.setdefault(_flags(settings | earlier), record.step)
        last_steps.pop(_flags(settings), None)
        if last_steps:
            logger.warning(
                "Evaluations %s; later evaluations, and the final answers and scores, use %s. The best checkpoint is "
                "chosen by the scores of all evaluations.",
                ", ".join(f"up to step {step} used {flags}" for flags, step in last_steps.items()),
                _flags(settings),
            )


def _flags(data: Mapping[str, Any]) -> str:
    """Format the settings that determine how answers are chosen as flags."""
    return " ".join(f"{flag_of(name)} {data[name]}" for name in ANSWER_SETTINGS)


def _describe(windows: Windows, validation: Windows | None) -> dict[str, str]:
    """Describe the questions for the printed plan. The first answer is decoded from the encoded training rows."""
    uses = {"train": windows} | ({"evaluate": validation} if validation else {})
    rows = [
        f"{len(used.questions):,} questions → {used.rows.num_rows:,} windows to {verb} on"
        for verb, used in uses.items()
    ]
    plan_lines = {"rows": "; ".join(rows)}
    num, num_answered = len(windows.questions), sum(bool(question.answers) for question in windows.questions)
    plan_lines["answers"] = f"{num_answered / num:.1%} of the questions have one"
    ends = np.asarray(windows.rows.row_values[END], np.int64)
    row = int(np.argmax(ends > 0))
    if ends[row] > 0:
        begin, end = windows.rows.starts[row] + np.array([windows.rows.row_values[START][row], ends[row]])
        context = windows.questions[windows.question[row]].context
        plan_lines["first answer"] = context[windows.begins[begin] : windows.ends[end]].strip()
    return plan_lines


def _warn(split: str, windows: Windows, data: QuestionData) -> None:
    """Warn about a split's questions that are too long, or that have an answer outside all windows."""
    to_train, num = split == "train", len(windows.questions)
    if windows.too_long:
        logger.warning(
            "%d of %d questions of the %s split are too long for --max-seq-length %d with --doc-stride %d, so they are "
            "%s. Lower --doc-stride, or raise --max-seq-length.",
            *(len(windows.too_long), num, split, data.max_seq_length, data.stride),
            "not trained on" if to_train else "answered with an empty text",
        )
    if windows.not_found:
        logger.warning(
            "%d of %d questions of the %s split have an answer that is longer than a window or has no token, so they "
            "%s.",
            *(len(windows.not_found), num, split),
            "are not trained on" if to_train else "cannot be answered in full",
        )


def by_id(split: Split, values: Iterable[Any]) -> str:
    """Format a value for each question of a split as JSON, {id: value}."""
    values_by_id = dict(zip((question.id for question in split.examples.questions), values, strict=True))
    return json.dumps(values_by_id, indent=4, ensure_ascii=False) + "\n"
