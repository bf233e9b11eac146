"""Extractive question answering (Rajpurkar et al. 2016): at which tokens of a paragraph the answer begins and ends."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetuning.config.settings import QuestionData
from finetuning.data.questions import END, START, Question, Windows
from finetuning.data.rows import INDEX, INPUT_IDS
from finetuning.scores.questions import Answer, choose_answers, scores
from finetuning.tasks.task import ExampleTask
from train.data.features import Feature
from train.tasks.task import CardFigure, Mean, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

# The logit of padding: e to it is 0.
NEVER = -1e9
METRICS = ("exact_match", "f1")


class QuestionAnswering(ExampleTask):
    """Learns where the answer to a question stands.

    Args:
        windows: to evaluate on.
        data: how answers are chosen.
        may_have_no_answer: whether questions without an answer are trained on.
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
    """

    model_class = "TFAutoModelForQuestionAnswering"
    means = (Mean("loss", "loss", "num_rows"),)
    card = TaskCard(
        model_kind="model that answers questions about texts",
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
        evaluation="Over the {num_questions:,} questions to evaluate on, by which this checkpoint was chosen; exact "
        "match and F1 in per cent.",
    )

    def __init__(
        self,
        windows: Windows | None,
        data: QuestionData,
        *,
        may_have_no_answer: bool,
        pad_token_id: int,
        token_types: bool,
    ):
        super().__init__(pad_token_id=pad_token_id, token_types=token_types)
        self.windows = windows
        self.data = data
        self.may_have_no_answer = may_have_no_answer

    def features(self, length: int) -> dict[str, Feature]:
        """Name those of the text, and both ends of the answer."""
        return {**self.text_features(length), START: Feature(), END: Feature()}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, the mean of that of both ends, and `num_rows`; keep the logits of an evaluation."""
        import tensorflow as tf

        inputs = self.network_inputs(rows)
        outputs = network(inputs, training=training)
        # Padding cannot be an answer, so that the loss does not depend on how far a row is filled up.
        start, end = (
            tf.where(inputs["attention_mask"] > 0, tf.cast(logits, tf.float32), NEVER)
            for logits in (outputs.start_logits, outputs.end_logits)
        )  # (rows, length)
        losses = [
            tf.nn.sparse_softmax_cross_entropy_with_logits(rows[name], logits)
            for name, logits in ((START, start), (END, end))
        ]
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)
        sums = {"loss": tf.reduce_sum(tf.add_n(losses) / 2 * is_row), "num_rows": tf.reduce_sum(is_row)}
        if training:
            return sums
        padding = ((0, 0), (0, self.data.max_seq_length - rows[INPUT_IDS].shape[1]))
        kept = {"start": start, "end": end}
        kept = {name: tf.pad(logits, padding, constant_values=NEVER) for name, logits in kept.items()}
        return sums | kept | {INDEX: rows[INDEX]}

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute loss, exact match and F1 of the questions to evaluate on, and the numbers of questions and rows."""
        assert self.windows is not None
        return self.figures_of(sums, self.windows, self.answers(sums, self.windows))

    def figures_of(self, sums: Mapping[str, Any], windows: Windows, answers: list[Answer]) -> dict[str, float]:
        """Compute the same of these windows."""
        texts = [answer.text for answer in answers]
        counts = {"num_rows": windows.rows.num_rows, "num_questions": len(windows.questions)}
        return {"loss": super().figures(sums)["loss"]} | scores(windows.questions, texts) | counts

    def can_score(self, questions: Sequence[Question]) -> bool:
        """Return whether the answers to questions are known; if none has one, they may have been taken out."""
        is_known = all(one.answers is not None for one in questions)
        return is_known and (self.may_have_no_answer or any(one.answers for one in questions))

    def answers(self, sums: Mapping[str, Any], windows: Windows) -> list[Answer]:
        """Choose the answers to all questions, in their order."""
        return choose_answers(
            windows,
            self.in_order(sums, "start"),
            self.in_order(sums, "end"),
            num_best=self.data.n_best_size,
            max_answer_length=self.data.max_answer_length,
            null_threshold=self.data.null_score_diff_threshold if self.may_have_no_answer else None,
        )

    def score(self, figures: Mapping[str, float]) -> float:
        """Compute by what checkpoints are compared: F1."""
        return figures["f1"]

    def summarize(self, figures: Mapping[str, float]) -> str:
        """Summarize loss, F1 and exact match in a few words."""
        return f"{super().summarize(figures)}  F1 {figures['f1']:.2f} %  exact match {figures['exact_match']:.2f} %"

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Describe loss, exact match and F1 for people."""
        number = f"{figures['num_questions']:,} questions in {figures['num_rows']:,} windows"
        names = [name for name in figures if name in METRICS or "Ans_" in name]
        return {"validation loss": f"{figures['loss']:.4f}, of {number}"} | {
            name.replace("_", " "): f"{figures[name]:.2f} %" for name in names
        }

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Show the first row with its answer."""
        ids, start, end = (rows[name][0].numpy() for name in (INPUT_IDS, START, END))
        answer = tokenizer.decode(ids[start : end + 1]) if end else "none in this window"
        return {"first row": tokenizer.decode(ids[ids != self.pad_token_id]), "its answer": answer}
