"""Token classification: each word has a tag, learned and predicted at its first token."""

import functools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import TaggingConfig
from finetuning.data.labels import LabelReading, Labels, find_labels
from finetuning.data.rows import INDEX, EncodedRows
from finetuning.loop.model import open_start
from finetuning.loop.results import EVAL_NAME, named, shown_score, train_results, write_results
from finetuning.loop.training import FinetuningJob, Predict
from finetuning.tasks.metrics import check_packages, chosen_metric
from finetuning.tasks.rows import ExampleTask, with_metric
from finetuning.tasks.sentences import NO_TAG, NO_WORD, OUTSIDE, WORD, Sentences, encode_sentences, read_sentences
from mlm_common.cli.settings import require
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.tasks.task import CardFigure, Mean, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

    from train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")
TAG_METRICS = ("accuracy",)
# How the tags of entities begin, in the schemes IOB1, IOB2, IOE, IOBES and BILOU.
ENTITY_PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")
# What IOBES, which seqeval reads, has for the tags of BILOU.
IOBES_PREFIXES = {"L-": "E-", "U-": "S-"}
# The same written in other ways: as suffixes, or with an underscore.
OTHER_ENTITY_TAG = re.compile(r"[BIESLU]_.+|.+[-_][BIESLU]")
Tags = Sequence[Sequence[str]]
# The file with the tags of the test part, without its ending.
TAGS_NAME = "predictions"
USAGE = """```python
from transformers import pipeline

tag = pipeline("token-classification", model={model}{revision}, aggregation_strategy="first")
text = "A sentence to tag ."
for found in tag(text):
    print(round(float(found["score"]), 3), found["entity_group"], text[found["start"] : found["end"]])
```"""


class Tagging(ExampleTask):
    """Learns the tag of each word.

    Args:
        labels: the tags.
        sentences: to evaluate on.
        metric: by which checkpoints are compared; by default the first.
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
        max_length: tokens of the longest row.
        guess: what a guess without the text would score, by metric.

    Raises:
        InputError: a tag with white space, which divides the tags of a sentence in the predictions.
    """

    model_class = "TFAutoModelForTokenClassification"
    means = (Mean("loss", "loss", "num_tagged"), Mean("accuracy", "num_correct", "num_tagged"))

    def __init__(
        self,
        labels: Labels,
        sentences: Sentences | None,
        metric: str | None = None,
        *,
        pad_token_id: int,
        token_types: bool,
        max_length: int,
        guess: Mapping[str, float] | None = None,
    ):
        super().__init__(pad_token_id=pad_token_id, token_types=token_types)
        for one in labels.names:
            require(one.split() == [one], "must be without white space (rename it)", "Each tag", repr(one))
        self.labels = labels
        self.sentences = sentences
        self.metrics = metrics_of(labels.names)
        self.metric = chosen_metric(self.metrics, metric)
        self.max_length = max_length
        self.guess: Mapping[str, float] = {} if guess is None else guess
        self.card = TaskCard(
            model_kind="model that tags words",
            task_name="Token classification",
            pipeline_tag="token-classification",
            figures=(
                CardFigure("loss", "loss", "loss", "Loss"),
                *(CardFigure(name, name, name, name) for name in self.metrics),
            ),
            tags=("token-classification",),
            training_verb="fine-tuned",
            start_words="from",
            usage=USAGE,
            evaluation="On the {num_words:,} words of {num_rows:,} validation sentences, which also decided which "
            "checkpoint was kept. Precision, recall and F1 count whole entities.",
        )

    def features(self, length: int) -> dict[str, Feature]:
        return {**self.predicted_features(length), "label": Feature((length,), padding=NO_TAG)}

    def predicted_features(self, length: int) -> dict[str, Feature]:
        return {**self.text_features(length), WORD: Feature((length,), padding=NO_WORD)}

    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Keep the tag of each token, and its probability."""
        import tensorflow as tf

        logits = self._logits(network, rows, training=False)
        tags = tf.argmax(logits, axis=-1, output_type=tf.int32)
        probabilities = tf.reduce_max(tf.nn.softmax(logits), axis=-1)
        kept = {"tag": self._of_one_length(tags), "probability": self._of_one_length(probabilities)}
        return kept | self._places(rows)

    def _logits(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the logits of all tokens, float32 (rows, length, tags)."""
        import tensorflow as tf

        return tf.cast(network(self.network_inputs(rows), training=training).logits, tf.float32)

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `num_correct` and `num_tagged` over the words with a tag; keep the tags of an evaluation."""
        import tensorflow as tf

        labels = rows["label"]
        logits = self._logits(network, rows, training=training)  # (rows, length, tags)
        is_tagged = tf.cast(labels != NO_TAG, tf.float32)  # (rows, length)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
        sums = {
            "loss": tf.reduce_sum(losses * is_tagged),
            "num_correct": tf.reduce_sum(tf.cast(predicted == labels, tf.float32) * is_tagged),
            "num_tagged": tf.reduce_sum(is_tagged),
        }
        return sums if training else sums | {"tag": self._of_one_length(predicted), **self._places(rows)}

    def _places(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        return {WORD: self._of_one_length(rows[WORD], NO_WORD), INDEX: rows[INDEX]}

    def _of_one_length(self, values: "tf.Tensor", padding: int = 0) -> "tf.Tensor":
        """Fill up to the longest rows, (rows, max_length), since what is kept is of all buckets."""
        import tensorflow as tf

        return tf.pad(values, ((0, 0), (0, self.max_length - values.shape[1])), constant_values=padding)

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        assert self.sentences is not None
        return self.figures_of(sums, self.sentences)

    def figures_of(self, sums: Mapping[str, Any], sentences: Sentences) -> dict[str, float]:
        assert sentences.tags is not None
        predictions = self.predictions(sums, sentences)
        figures = {"loss": super().figures(sums)["loss"]} | scores(self.metrics, predictions, sentences.tags)
        return figures | {
            "num_rows": len(predictions),
            "num_words": sum(map(len, sentences.words)),
            "num_words_cut_off": sum(map(len, sentences.words)) - int((sums[WORD] != NO_WORD).sum()),
            "is_degenerate": int(is_degenerate(predictions)),
        }

    def predictions(self, sums: Mapping[str, Any], sentences: Sentences) -> list[list[str]]:
        """Make the tags of all words; one that was cut off, or has no token, is outside of all entities."""
        tags = of_words(sums, "tag", sentences, default_tag(self.labels.names))
        return [[self.labels.names[tag] for tag in sentence] for sentence in tags]

    def score(self, figures: Mapping[str, float]) -> float:
        return -figures["loss"] if self.metric == "loss" else figures[self.metric]

    def summarize(self, figures: Mapping[str, float]) -> str:
        return with_metric(super().summarize(figures), figures, self.metric)

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --text "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        words = f"{figures['num_words']:,} words of {figures['num_rows']:,} sentences"
        rows = {"validation loss": f"{shown_score(figures['loss'])}, of {words}"}
        for name in self.metrics:
            guess = f"; a guess without the text: {shown_score(self.guess[name])}" if name in self.guess else ""
            rows[name] = f"{shown_score(figures[name])}{guess}"
        if figures["num_words_cut_off"]:
            rows["cut off"] = (
                f"{figures['num_words_cut_off']:,} words beyond the longest row, which count as outside of entities"
            )
        if figures["is_degenerate"]:
            rows["degenerate"] = "all words have the same tag: nothing was learned"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        labels = rows["label"][0].numpy()
        tags = " ".join(self.labels.names[label] for label in labels if label != NO_TAG)
        return {"first row": self.first_text(rows, tokenizer), "its tags": tags}


def of_words(sums: Mapping[str, Any], name: str, sentences: Sentences, default: float) -> list[NDArray[Any]]:
    """Look up for each word of each sentence what was kept of its first token under `name`; `default` without one."""
    values = [np.full(len(words), default) for words in sentences.words]
    for index, words, of_tokens in zip(sums[INDEX], sums[WORD], sums[name], strict=True):
        if index >= 0:
            begins = words != NO_WORD
            values[index][words[begins]] = of_tokens[begins]
    return values


def metrics_of(tag_names: Sequence[str]) -> tuple[str, ...]:
    """Choose the metrics of such tags: those of entities if most have a prefix. The first compares checkpoints."""
    return ENTITY_METRICS if _are_most(tag_names, lambda name: name.startswith(ENTITY_PREFIXES)) else TAG_METRICS


def hint_of(tag_names: Sequence[str]) -> str | None:
    """Return a hint where the tags look like those of entities but are not written as seqeval reads them."""
    if metrics_of(tag_names) == ENTITY_METRICS or not _are_most(tag_names, OTHER_ENTITY_TAG.fullmatch):
        return None
    example = next(name for name in tag_names if OTHER_ENTITY_TAG.fullmatch(name))
    return (
        f"Tags such as {example} look like those of entities, but without a prefix as in B-PER they are scored word by "
        "word, by accuracy alone. Rewrite them as B-PER and I-PER for the F1 of entities."
    )


def _are_most(tag_names: Sequence[str], holds: Callable[[str], object]) -> bool:
    names = [name for name in tag_names if name != OUTSIDE]
    return 2 * sum(bool(holds(name)) for name in names) > len(names)


def scores(metrics: Sequence[str], predictions: Tags, references: Tags) -> dict[str, float]:
    """Compute metrics over all words of all sentences; an entity is right if its bounds and its kind are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no entity is predicted: 0
        from seqeval import metrics as seqeval

        functions = {"f1": seqeval.f1_score, "precision": seqeval.precision_score, "recall": seqeval.recall_score}
        functions["accuracy"] = seqeval.accuracy_score
        iobes = [_as_iobes(references), _as_iobes(predictions)]
        return {name: float(functions[name](*iobes)) for name in metrics}


def _as_iobes(tags: Tags) -> list[list[str]]:
    return [[IOBES_PREFIXES.get(tag[:2], tag[:2]) + tag[2:] for tag in sentence] for sentence in tags]


def baseline(train_tags: Tags, words: Sequence[Sequence[str]]) -> list[list[str]]:
    """Guess without the text: for each word the most frequent tag of the training part."""
    (tag, _), *_ = Counter(tag for sentence in train_tags for tag in sentence).most_common(1)
    return [[tag] * len(sentence) for sentence in words]


def is_degenerate(predictions: Tags) -> bool:
    """Return whether all words of several have the same tag: nothing was learned."""
    counts = Counter(tag for sentence in predictions for tag in sentence)
    return len(counts) == 1 and counts.total() > 1


def default_tag(tag_names: Sequence[str]) -> int:
    """Choose what a word has that the model did not see, since its row was cut: `O`, or the first tag."""
    return tag_names.index(OUTSIDE) if OUTSIDE in tag_names else 0


class TaggingJob(FinetuningJob[TaggingConfig]):
    """The job of `run_tagging.py`."""

    def open_run(self, config: TaggingConfig, cluster: Cluster) -> Run:
        """Read and encode the sentences, and make task and model configuration of them.

        Raises:
            InputError: whatever is wrong with sentences, tags, tokenizer or model.
        """
        check_packages("seqeval")
        start, data = open_start(config), config.data
        parts = read_sentences(data)
        tags = parts["train"].tags
        assert tags is not None
        is_tagger = any("ForTokenClassification" in name for name in start.model_config.architectures or ())
        flat = [tag for sentence in tags for tag in sentence]
        known = start.model_config.id2label if is_tagger else None
        reading = LabelReading("single_label_classification", similar_labels=data.similar_labels)
        labels = find_labels(flat, parts["train"].name, reading, known)
        if not is_tagger:
            labels = Labels(labels.problem_type, tuple(sorted(labels.names, key=lambda name: name != OUTSIDE)), reading)
        described = labels.describe(labels.encode(flat, parts["train"].name))
        described |= {"words": f"{data.text_column_name} of {parts['train'].name}", "tags": data.label_column_name}
        described["first tags"] = " ".join(map(str, tags[0]))
        parts = {split: sentences.with_tags_of(labels) for split, sentences in parts.items()}
        if hint := hint_of(labels.names):
            logger.warning("%s", hint)
        encode = functools.partial(encode_sentences, max_length=data.max_seq_length, token_types=start.token_types)
        rows = {split: encode(start.tokenizer, sentences, labels) for split, sentences in parts.items()}
        self.validation = (parts["validation"], rows["validation"]) if "validation" in parts else None
        self.test = (parts["test"], rows["test"]) if "test" in parts and data.predicts else None
        validation = parts.get("validation")
        guess = {}
        if validation is not None and validation.tags is not None:
            guessed = baseline(parts["train"].tags or (), validation.words)
            guess = scores(metrics_of(labels.names), guessed, validation.tags)
        settings = {"max_length": data.max_seq_length, "guess": guess, **start.of_rows}
        task = Tagging(labels, validation, data.metric_name, **settings)
        return start.run(task, rows["train"], rows.get("validation"), cluster, labels.by_id, described=described)

    def write_results(self, trainer: "Trainer", step: int, predict: Predict) -> dict[str, float] | None:
        """Tag the validation and test parts; write the tags and, where the right ones are known, their scores."""
        run, task = trainer.run, trainer.phase.task
        assert isinstance(task, Tagging)
        train = train_results(trainer, step)
        tags: dict[str, list[list[str]]] = {}

        def figures_of(name: str, sentences: Sentences, rows: EncodedRows) -> dict[str, float]:
            totals = predict(rows)
            tags[name] = task.predictions(totals, sentences)
            return task.figures_of(totals, sentences) if sentences.tags is not None else {}

        evaluated = figures_of(EVAL_NAME, *self.validation) if self.validation else None
        predicted = figures_of(TAGS_NAME, *self.test) if self.test else {}
        if not run.cluster.is_chief:
            return evaluated
        for name, of_part in tags.items():
            run.folder.files.write_text(f"{name}.txt", tags_text(of_part))
        eval_results = named(evaluated or {})
        if evaluated:
            eval_results |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        write_results(run.folder.files, {"train": train, "eval": eval_results, "predict": named(predicted)})
        return evaluated


def tags_text(tags: Iterable[Iterable[str]]) -> str:
    """Format tags: a line for each sentence, the tags of its words with a space between."""
    return "".join(" ".join(one) + "\n" for one in tags)
