"""Multiple choice: which of several texts follows another, answers a question or completes a sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.choice import ChoiceConfig
from finetuning.data.choices import Choices, check_number, columns_of, encode_labels, names_of, read_choices
from finetuning.data.examples import read_tables
from finetuning.data.inputs import ATTENTION_MASK, INDEX, INPUT_IDS, EncodedRows
from finetuning.data.labels import Labels
from finetuning.loop.model import ReadModel, open_start
from finetuning.loop.task import EVAL_NAME, Part, finetuned_card
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.class_loss import class_loss
from finetuning.tasks.classification import TextClassification
from finetuning.tasks.metrics import baseline, check_packages, scores
from finetuning.tasks.rows import ON_ROWS
from mlm_common.storage import Folder
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

METRICS = ("accuracy",)
USAGE = """```python
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model}{revision})
model = AutoModelForMultipleChoice.from_pretrained({model}{revision})
context, choices = "The cup fell.", ["It broke.", "It sang."]
rows = tokenizer([context] * len(choices), choices, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    logits = model(**{{name: row.unsqueeze(0) for name, row in rows.items()}}).logits
print(choices[int(logits.argmax())])
```"""


class MultipleChoice(TextClassification):
    """Learns which choice of a row is right, by one number for each choice; rows are (choices, length).

    Args:
        names: of the choices, by their place.
        metric: by which checkpoints are compared.
    """

    model_class = "TFAutoModelForMultipleChoice"

    def __init__(self, names: Sequence[str], metric: str | None = None, **of_rows: Any):
        labels = Labels("single_label_classification", tuple(names))
        super().__init__(labels, METRICS, metric, **of_rows)
        self.card = finetuned_card(
            "model that chooses one of several texts",
            "Multiple choice",
            "multiple-choice",
            {"accuracy": "accuracy"},
            tags=("multiple-choice",),
            usage=USAGE,
            evaluation=ON_ROWS,
        )

    def text_features(self, length: int) -> dict[str, Feature]:
        """Name what `TextClassification` does, of each choice."""
        shape = (len(self.labels.names), length)
        return {
            name: replace(one, shape=shape) if one.shape else one for name, one in super().text_features(length).items()
        }

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        from train.layers.random_bits import dropping_out_texts

        with dropping_out_texts(range(len(self.labels.names))):
            return super().outputs(network, rows, training=training)  # (rows, choices)

    def write_more(self, folder: Folder, predictions: NDArray[Any], part: Part) -> None:
        """Write nothing: which place is taken for which says little."""

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --choices "…" "…"'

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        names = (INPUT_IDS, ATTENTION_MASK)
        texts = {
            f"choice {name}": self.first_text({key: rows[key][:, place] for key in names}, tokenizer)
            for place, name in enumerate(self.labels.names)
        }
        return texts | {"right": self.shown(rows["label"][0].numpy())}


def encode_choices(model: ReadModel, choices: Choices, max_length: int, labels: NDArray[np.int32]) -> EncodedRows:
    """Encode each choice after its context, as a pair of texts; rows have one label each."""
    contexts = [context for context, row in zip(choices.contexts, choices.choices, strict=True) for _ in row]
    texts = model.encode_texts((contexts, [one for row in choices.choices for one in row]), max_length)
    of_rows: Mapping[str, NDArray[Any]] = {"label": labels, INDEX: np.arange(len(labels), dtype=np.int32)}
    return replace(texts, of_rows=of_rows, texts_per_row=choices.num_choices)


class ChoiceJob(FinetuningJob[ChoiceConfig]):
    """The job of `run_multiple_choice.py`."""

    def open_run(self, config: ChoiceConfig, cluster: Cluster) -> Run:
        check_packages("sklearn")
        start, data = open_start(config), config.data
        tables = read_tables(data)
        columns = columns_of(tables["train"].columns, tables["train"].name, data)
        parts = {split: read_choices(one, columns, needs_labels=split != "test") for split, one in tables.items()}
        names = names_of(parts["train"], columns)

        def part(split: str, file: str = "") -> Part:
            one = parts[split]
            check_number(one, len(names))
            labels = encode_labels(one, names, may_be_missing=split == "test")
            is_labelled = labels >= 0
            rows = encode_choices(start, one, data.max_seq_length, np.maximum(labels, 0))
            return Part(rows, labels, file, bool(is_labelled.any()), None if is_labelled.all() else is_labelled)

        train = part("train")
        self.validation = {"": part("validation", f"{EVAL_NAME}.txt")} if "validation" in parts else {}
        self.tests = [part("test", "predict_results_test.txt")] if "test" in parts else []
        validation = self.validation.get("")
        task = MultipleChoice(names, data.metric_name, **start.of_rows)
        task.class_loss = class_loss(config.optimization, names, train.examples)
        if validation is not None:
            guess = baseline(task.labels, train.examples, validation.rows.num_rows)
            task.guess = scores(METRICS, guess, validation.examples)
        read_as = (columns.context, *([columns.question] if columns.question else []), *columns.choices)
        described = {"texts": ", ".join(read_as), "labels": f"{columns.label} of {parts['train'].name}"}
        described |= {"choices": ", ".join(names), "first label": task.shown(train.examples[0])}
        return start.run(task, train.rows, validation, cluster, task.labels.by_id, described=described)
