"""What is shown of the first row of a batch: what the model sees, what it predicts, and the weights of the loss."""

from typing import Any

import tensorflow as tf

from finetuning.config.settings import QuestionData
from finetuning.data.labels import Labels
from finetuning.loop.task import ClassLoss
from finetuning.tasks.choice import MultipleChoice
from finetuning.tasks.questions import QuestionAnswering
from finetuning.tasks.tagging import NO_TAG, Tagging
from tests.fixtures.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LABELS = Labels("single_label_classification", ("O", "KIND"))
OF_ROWS: dict[str, Any] = {"pad_token_id": 1, "token_types": False}


def row_of(text: str, length: int, **more: Any) -> dict[str, tf.Tensor]:
    """Make a batch of one row, filled up to a length, and its features."""
    ids = TOKENIZER(text)["input_ids"]
    padding = length - len(ids)
    rows = {"input_ids": [ids + [1] * padding], "attention_mask": [[1] * len(ids) + [0] * padding], **more}
    return {name: tf.constant(value) for name, value in rows.items()}


def test_tags():
    task = Tagging(LABELS, max_length=8, **OF_ROWS)
    rows = row_of("the list", 6, label=[[NO_TAG, 0, 1, NO_TAG, NO_TAG, NO_TAG]])
    assert task.describe_row(rows, TOKENIZER) == {"first row": "[CLS] the list[SEP]", "its tags": "▁the O, ▁list KIND"}
    task.class_loss = ClassLoss((1.0, 2.5))
    assert task.describe_row(rows, TOKENIZER)["its tags"] == "▁the O of weight 1, ▁list KIND of weight 2.5"


def test_answers():
    task = QuestionAnswering(QuestionData(), may_have_no_answer=True, **OF_ROWS)
    rows = row_of("the list of a file", 9, start_position=[2], end_position=[3])
    described = task.describe_row(rows, TOKENIZER)
    assert described == {"first row": "[CLS] the list of a file[SEP]", "its answer": "list of, tokens 2 to 3"}
    rows |= {"start_position": tf.constant([0]), "end_position": tf.constant([0])}
    assert task.describe_row(rows, TOKENIZER)["its answer"] == "none in this window of the text: token 0"


def test_choices():
    first, second = row_of("the list", 8), row_of("a file", 8)
    rows = {name: tf.stack([first[name], second[name]], axis=1) for name in first} | {"label": tf.constant([1])}
    described = MultipleChoice(("A", "B"), **OF_ROWS).describe_row(rows, TOKENIZER)
    assert described == {"choice A": "[CLS] the list[SEP]", "choice B": "[CLS] a file[SEP]", "right": "B"}
