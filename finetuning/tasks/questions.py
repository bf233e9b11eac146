"""Extractive question answering (Rajpurkar et al. 2016): at which tokens of a paragraph the answer begins and ends."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetuning.config.settings import QuestionData
from finetuning.data.questions import END, START, Question, Windows
from finetuning.data.rows import INDEX, INPUT_IDS
from finetuning.scores.questions import Answer, baseline, choose_answers, scores
from finetuning.tasks.task import ExampleTask
from train.data.inputs import Feature
from train.tasks.task import CardFigure, Mean, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

# The logit of padding: e to it is 0.
NEVER = -1e9
METRICS = ("exact_match", "f1")
# Written out, since transformers 5 has no pipeline for it.
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
    """Learns where the answer to a question stands.

    Args:
        windows: to evaluate on.
        data: how answers are chosen.
        may_have_no_answer: whether questions without an answer are trained on.
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
    """

    model_class = "TFAutoModelForQuestionAnswering"
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
        self.guess = {} if windows is None else baseline(windows.questions, may_have_no_answer=may_have_no_answer)

    def features(self, length: int) -> dict[str, Feature]:
        """Name those of the text, and both ends of the answer."""
        return {**self.text_features(length), START: Feature(), END: Feature()}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, the mean of that of both ends, and `num_rows`; keep the logits of an evaluation."""
        import tensorflow as tf

        start, end = self._logits(network, rows, training=training)
        losses = [
            tf.nn.sparse_softmax_cross_entropy_with_logits(rows[name], logits)
            for name, logits in ((START, start), (END, end))
        ]
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)
        sums = {"loss": tf.reduce_sum(tf.add_n(losses) / 2 * is_row), "num_rows": tf.reduce_sum(is_row)}
        return sums if training else sums | self._kept(start, end, rows)

    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Keep the logits of both ends."""
        return self._kept(*self._logits(network, rows, training=False), rows)

    def _logits(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> tuple["tf.Tensor", "tf.Tensor"]:
        """Compute the logits of both ends, float32 (rows, length) each."""
        import tensorflow as tf

        inputs = self.network_inputs(rows)
        outputs = network(inputs, training=training)
        # Padding cannot be an answer, so that the loss does not depend on how far a row is filled up.
        is_token = inputs["attention_mask"] > 0
        start, end = (
            tf.where(is_token, tf.cast(logits, tf.float32), NEVER)
            for logits in (outputs.start_logits, outputs.end_logits)
        )
        return start, end

    def _kept(self, start: "tf.Tensor", end: "tf.Tensor", rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Fill the logits up to the longest rows, since what is kept is of all buckets."""
        import tensorflow as tf

        padding = ((0, 0), (0, self.data.max_seq_length - rows[INPUT_IDS].shape[1]))
        kept = {"start": start, "end": end}
        kept = {name: tf.pad(logits, padding, constant_values=NEVER) for name, logits in kept.items()}
        return kept | {INDEX: rows[INDEX]}

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

    def next_command(self, model: str) -> str:
        """Return the command that answers a question."""
        return f'{super().next_command(model)} --question "…" --context "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Describe loss, exact match and F1, beside what the best guess without the question scores."""
        number = f"{figures['num_questions']:,} questions in {figures['num_rows']:,} windows"
        names = [name for name in figures if name in METRICS or "Ans_" in name]
        guess = {name: f"; a guess without the question: {self.guess[name]:.2f} %" for name in METRICS}
        return {"validation loss": f"{figures['loss']:.4f}, of {number}"} | {
            name.replace("_", " "): f"{figures[name]:.2f} %{guess.get(name, '')}" for name in names
        }

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Show the first row with its answer."""
        ids, start, end = (rows[name][0].numpy() for name in (INPUT_IDS, START, END))
        answer = tokenizer.decode(ids[start : end + 1]) if end else "none in this window of the text"
        return {"first row": tokenizer.decode(ids[ids != self.pad_token_id]), "its answer": answer}
