"""Token classification: each word of a sentence has a tag, which is learned and predicted at the word's first token."""

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import TaggingConfig, TaggingData
from finetuning.data.examples import Table, read_table, read_tables
from finetuning.data.inputs import INDEX, INPUT_IDS, TEXTS_AT_ONCE, TOKEN_TYPES, EncodedRows, check_room, join_rows
from finetuning.data.labels import LabelReading, Labels, find_labels, is_missing, label_name
from finetuning.data.shared_rows import check_shared_rows
from finetuning.loop.model import open_start
from finetuning.loop.task import (
    EVAL_NAME,
    ClassLoss,
    ExampleTask,
    Split,
    class_loss,
    describe_loss,
    finetuned_card,
    is_degenerate,
)
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.metrics import check_packages, chosen_metric
from mlm_common.cli.console import counted
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.tasks.task import Mean

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)

# Tag id and word number of tokens that do not begin a word.
NO_TAG, NO_WORD = -100, -1
WORD = "word"
# How tokens of SentencePiece and of byte-level BPE write a space.
SPACE_MARKS = ("▁", "Ġ")
OUTSIDE = "O"
ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")
TAG_METRICS = ("accuracy",)
# Prefixes of entity tags in the schemes IOB1, IOB2, IOE, IOBES and BILOU.
ENTITY_PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")
# Entity tags that do not name a type, because all entities have the same type.
BARE_TAGS = frozenset("BIESLU")
# {prefix in BILOU: the same in IOBES, which seqeval reads}.
IOBES_PREFIXES = {"L-": "E-", "U-": "S-", "L": "E", "U": "S"}
# Entity tags in notations that seqeval does not read: with suffixes, with an underscore, or in lower case.
OTHER_ENTITY_TAG = re.compile(r"[BIESLU]_.+|.+[-_][BIESLU]|[bieslu](-.+)?")
Tags = Sequence[Sequence[str]]
USAGE = """```python
from transformers import pipeline

tag = pipeline("token-classification", model={model}{revision}, aggregation_strategy="first")
text = "A sentence to tag ."
for found in tag(text):
    print(round(float(found["score"]), 3), found["entity_group"], text[found["start"] : found["end"]])
```"""


@dataclass(frozen=True)
class Sentences:
    """Words with their tags, as in a table.

    Attributes:
        name: name of the table, used in error messages.
        words: the words of each sentence.
        tags: the tags of each sentence; None if the table has no tags.
        is_to_predict: whether this is the test split.
    """

    name: str
    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]] | None
    is_to_predict: bool = False

    def with_tags_of(self, labels: Labels) -> "Sentences":
        """Return the sentences with tags written as in `labels`.

        In a test split, tags that the training split does not have are kept; predictions for them count as wrong.

        Raises:
            InputError: a tag is unknown, or differs from a known tag only in white space or case.
        """
        if self.tags is None:
            return self
        if self.is_to_predict:
            scored = labels.encode_to_score([tag for row in self.tags for tag in row], self.name)
            if not scored.is_labelled.all():
                logger.warning("%s has words without a tag, so it is predicted but not scored.", self.name)
                return replace(self, tags=None)
            if scored.unseen:
                names = ", ".join(map(repr, scored.unseen[:5])) + (" …" if len(scored.unseen) > 5 else "")
                logger.warning("%s has tags that the training split lacks; they count as wrong: %s.", self.name, names)
            all_names, tags = (*labels.names, *scored.unseen), iter(scored.encoded)
            return replace(self, tags=[[all_names[next(tags)] for _ in row] for row in self.tags])
        encoded = (labels.encode(row, f"{self.name}, sentence {index}") for index, row in enumerate(self.tags, start=1))
        return replace(self, tags=[[labels.names[tag] for tag in row] for row in encoded])


def read_sentences(data: TaggingData) -> dict[str, Sentences]:
    """Read the sentences of all splits, {"train", "validation" or "test": sentences}."""
    tables = read_tables(data)
    tables["train"] = _with_words(tables["train"], data)
    return {split: _sentences(table, data, needs_tags=split != "test") for split, table in tables.items()}


def _with_words(table: Table, data: TaggingData) -> Table:
    """Leave out sentences without words, from which nothing can be learned."""
    kept = [row for row, words in enumerate(table.column(data.text_column_name, "--text-column-name")) if words != []]
    num_empty = len(next(iter(table.columns.values()))) - len(kept)
    if not num_empty:
        return table
    rule = f"must name a column of {table.name} with words"
    require(bool(kept), rule, "--text-column-name", f"{num_empty:,} empty sentences")
    logger.warning("Left out %s without words of %s.", counted(num_empty, "sentence"), table.name)
    columns = {name: [values[row] for row in kept] for name, values in table.columns.items()}
    return replace(table, columns=columns)


def read_sentences_to_predict(path: str, data: TaggingData) -> Sentences:
    """Read the words of a `--file` of `predict.py`, without tags."""
    return replace(_sentences(read_table(path, "--file", delimiter=data.delimiter), data, needs_tags=False), tags=None)


def _sentences(table: Table, data: TaggingData, *, needs_tags: bool) -> Sentences:
    words = table.column(data.text_column_name, "--text-column-name")
    tags = None
    if needs_tags or data.label_column_name in table.columns:
        tags = table.column(data.label_column_name, "--label-column-name")
    for row, sentence in enumerate(words, start=1):
        if not (isinstance(sentence, list) and all(isinstance(word, str) and word.strip() for word in sentence)):
            column = f"Column {data.text_column_name} of {table.name}"
            raise InputError(f"{column} must hold lists of words; row {row:,} has {sentence!r}.")
        if tags is not None and not (isinstance(tags[row - 1], list) and len(tags[row - 1]) == len(sentence)):
            raise InputError(
                f"Column {data.label_column_name} of {table.name} must hold a tag for each word; row {row:,} has "
                f"{len(sentence)} words and the tags {tags[row - 1]!r}."
            )
    if tags is None:
        return Sentences(table.name, words, None, is_to_predict=not needs_tags)
    if not needs_tags and all(is_missing(tag) for row in tags for tag in row):
        return Sentences(table.name, words, None)
    places = (f"row {row:,} of {table.name}" for row in range(1, len(tags) + 1))
    named = [[label_name(tag, place) for tag in row] for row, place in zip(tags, places, strict=True)]
    return Sentences(table.name, words, named, is_to_predict=not needs_tags)


def encode_sentences(
    tokenizer: PreTrainedTokenizerFast, sentences: Sentences, labels: Labels, *, max_length: int, token_types: bool
) -> EncodedRows:
    """Encode each sentence: join its words with spaces, like text in pretraining, and cut it to `max_length` tokens.

    The features of tokens are the ids; `WORD`, the number of the word that begins with the token, or `NO_WORD`; and
    `label`, the id of this word's tag, or `NO_TAG`.
    """
    check_room(tokenizer, max_length)
    names = (INPUT_IDS, TOKEN_TYPES) if token_types else (INPUT_IDS,)
    columns: dict[str, list[Any]] = {name: [] for name in (*names, WORD, "label")}
    for start in range(0, len(sentences.words), TEXTS_AT_ONCE):
        chunk = sentences.words[start : start + TEXTS_AT_ONCE]
        encoded = tokenizer(
            [" ".join(sentence) for sentence in chunk],
            truncation=True,
            max_length=max_length,
            return_token_type_ids=token_types,
            return_attention_mask=False,
            return_offsets_mapping=True,
        )
        for name in names:
            columns[name] += encoded[name]
        pairs = zip(chunk, encoded.encodings, strict=True)
        columns[WORD] += [_words_of_tokens(words, encoding) for words, encoding in pairs]
    ids = {name: index for index, name in enumerate(labels.names)}
    for row, words in enumerate(columns[WORD]):
        tags: Any = np.full(len(words), NO_TAG, np.int32)
        if sentences.tags is not None:
            # The last entry belongs to `NO_WORD`, the index -1, because a sentence may have no words.
            encoded_tags = np.array([*(ids.get(tag, NO_TAG) for tag in sentences.tags[row]), NO_TAG], np.int32)
            tags = np.where(words == NO_WORD, NO_TAG, encoded_tags[words])
        columns["label"].append(tags)
    return join_rows(columns, {})


def _words_of_tokens(words: Sequence[str], encoding: Encoding) -> NDArray[np.int32]:
    """Return for each token the number of the word that begins with this token, or `NO_WORD`.

    A token belongs to the word of its last character, because tokens of some tokenizers begin with the space before
    the word.
    """
    ends = list(accumulate(len(word) + 1 for word in words))  # positions after the space that follows each word
    numbers, last = [], NO_WORD
    next_offsets = [*encoding.offsets[1:], (0, 0)]
    for token, (begin, end), following in zip(encoding.tokens, encoding.offsets, next_offsets, strict=True):
        word = int(np.searchsorted(ends, end - 1, side="right")) if end > begin else NO_WORD
        # If a text begins with a token that consists only of a space mark, this token has the offsets of the next
        # character.
        is_mark = token in SPACE_MARKS and following[0] == begin
        is_space = word != NO_WORD and (end == ends[word] or is_mark)
        if word in (NO_WORD, last) or is_space:
            numbers.append(NO_WORD)
        else:
            numbers.append(word)
            last = word
    return np.array(numbers, np.int32)


class Tagging(ExampleTask):
    """Learns the tag of each word.

    Args:
        labels: the tags to learn.
        metric: the metric by which checkpoints are compared; by default the first metric.
        max_length: maximum number of tokens per row.
        task_arguments: arguments of `ExampleTask`.

    Raises:
        InputError: a tag contains white space, which separates tags in the file of predictions.
    """

    model_class = "TFAutoModelForTokenClassification"
    means = (Mean("loss", "loss", "total_weight"), Mean("accuracy", "num_correct", "num_tagged"))
    class_loss: ClassLoss | None = None

    def __init__(self, labels: Labels, metric: str | None = None, *, max_length: int, **task_arguments: Any):
        super().__init__(**task_arguments)
        for name in labels.names:
            require(name.split() == [name], "must be without white space (rename it)", "Each tag", repr(name))
        self.labels = labels
        self.metrics = metrics_of(labels.names)
        self.metric = chosen_metric(self.metrics, metric)
        self.max_length = max_length
        self.card = finetuned_card(
            "model that tags words",
            "Token classification",
            "token-classification",
            dict(zip(self.metrics, self.metrics, strict=True)),
            tags=("token-classification",),
            usage=USAGE,
            evaluation="On the {num_words:,} words of {num_rows:,} validation sentences, which also decided which "
            "checkpoint was kept. Precision, recall and F1 count whole entities.",
        )

    def features(self, length: int) -> dict[str, Feature]:
        return {**self.prediction_features(length), "label": Feature((length,), padding=NO_TAG)}

    def prediction_features(self, length: int) -> dict[str, Feature]:
        return {**self.text_features(length), WORD: Feature((length,), padding=NO_WORD)}

    def prediction_outputs(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Return the predicted tag of each token, and its probability."""
        import tensorflow as tf

        logits = self._logits(network, rows, training=False)
        tags = tf.argmax(logits, axis=-1, output_type=tf.int32)
        probabilities = tf.reduce_max(tf.nn.softmax(logits), axis=-1)
        outputs = {"tag": self._padded(tags), "probability": self._padded(probabilities)}
        return outputs | self._words_and_rows(rows)

    def _logits(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the logits of all tokens, float32 (rows, length, tags)."""
        import tensorflow as tf

        return tf.cast(network(self.network_inputs(rows), training=training).logits, tf.float32)

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up the totals of `means` over the words that have a tag. In an evaluation, also return the tags."""
        import tensorflow as tf

        labels = rows["label"]
        logits = self._logits(network, rows, training=training)  # (rows, length, tags)
        is_tagged = tf.cast(labels != NO_TAG, tf.float32)  # (rows, length)
        tag_ids = tf.maximum(labels, 0)
        losses, weights = tf.nn.sparse_softmax_cross_entropy_with_logits(tag_ids, logits), tf.ones_like(is_tagged)
        if training and self.class_loss is not None:
            losses, weights = self.class_loss.losses(logits, tag_ids)
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
        sums = {
            "loss": tf.reduce_sum(losses * is_tagged),
            "total_weight": tf.reduce_sum(weights * is_tagged),
            "num_correct": tf.reduce_sum(tf.cast(predicted == labels, tf.float32) * is_tagged),
            "num_tagged": tf.reduce_sum(is_tagged),
        }
        return sums if training else sums | {"tag": self._padded(predicted), **self._words_and_rows(rows)}

    def _words_and_rows(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        return {WORD: self._padded(rows[WORD], NO_WORD), INDEX: rows[INDEX]}

    def _padded(self, values: "tf.Tensor", padding: int = 0) -> "tf.Tensor":
        """Pad values to (rows, max_length), so that values from all buckets can be concatenated."""
        import tensorflow as tf

        return tf.pad(values, ((0, 0), (0, self.max_length - values.shape[1])), constant_values=padding)

    def predictions(self, sums: Mapping[str, Any], split: Split) -> list[list[str]]:
        """Return the tags of all words. Words that were cut off, or have no token, get the tag O."""
        outside = self.labels.names.index(OUTSIDE) if OUTSIDE in self.labels.names else 0
        tags = values_of_words(sums, "tag", split.examples, outside)
        return [[self.labels.names[tag] for tag in sentence] for sentence in tags]

    def compute_scores(self, sums: Mapping[str, Any], predictions: Tags, split: Split) -> dict[str, float]:
        num_words = sum(map(len, split.examples.words))
        return scores(self.metrics, predictions, split.examples.tags) | {
            "num_rows": len(predictions),
            "num_words": num_words,
            "num_words_cut_off": num_words - int((sums[WORD] != NO_WORD).sum()),
            "is_degenerate": int(is_degenerate(np.array([tag for sentence in predictions for tag in sentence]))),
        }

    def format_predictions(self, predictions: Tags, split: Split) -> str:  # noqa: ARG002
        """Format a line for each sentence: the tags of its words, separated by spaces."""
        return "".join(" ".join(tags) + "\n" for tags in predictions)

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --text "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        rows, cut_off = super().describe(figures), figures["num_words_cut_off"]
        if cut_off:
            rows["cut off"] = f"{cut_off:,} of {figures['num_words']:,} words, which count as outside entities"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
        ids, labels = (rows[name][0].numpy() for name in (INPUT_IDS, "label"))
        tags = []
        for token, label in zip(tokenizer.convert_ids_to_tokens(ids.tolist()), labels, strict=True):
            if label != NO_TAG:
                weight = f" of weight {self.class_loss.weights[label]:.4g}" if self.class_loss is not None else ""
                tags.append(f"{token} {self.labels.names[label]}{weight}")
        return {"first row": self.first_text(rows, tokenizer), "its tags": ", ".join(tags)}


def values_of_words(sums: Mapping[str, Any], name: str, sentences: Sentences, default: float) -> list[NDArray[Any]]:
    """Return, by sentence, the values `sums[name]` of the words' first tokens; words without tokens get `default`."""
    values = [np.full(len(words), default) for words in sentences.words]
    for index, words, token_values in zip(sums[INDEX], sums[WORD], sums[name], strict=True):
        if index >= 0:
            begins = words != NO_WORD
            values[index][words[begins]] = token_values[begins]
    return values


def metrics_of(tag_names: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics for tags: metrics of entities if most tags have an entity prefix. The default comes first."""
    is_bare = OUTSIDE in tag_names and {"B", "I"} & set(tag_names) and set(tag_names) <= {OUTSIDE, *BARE_TAGS}
    is_of_entities = is_bare or _are_most(tag_names, lambda name: name.startswith(ENTITY_PREFIXES))
    return ENTITY_METRICS if is_of_entities else TAG_METRICS


def hint_of(tag_names: Sequence[str]) -> str | None:
    """Return a hint if tags look like entity tags in a notation that seqeval does not read."""
    if metrics_of(tag_names) == ENTITY_METRICS or not _are_most(tag_names, OTHER_ENTITY_TAG.fullmatch):
        return None
    example = next(name for name in tag_names if OTHER_ENTITY_TAG.fullmatch(name))
    return (
        f"Tags such as {example} look like tags of entities, but without a prefix as in B-PER they are scored word by "
        "word, by accuracy only. To get the F1 of entities, rewrite them as B-PER, I-PER and O."
    )


def _are_most(tag_names: Sequence[str], holds: Callable[[str], object]) -> bool:
    """Return whether a condition holds for more than half of the tags other than O."""
    names = [name for name in tag_names if name not in (OUTSIDE, OUTSIDE.lower())]
    return 2 * sum(bool(holds(name)) for name in names) > len(names)


def scores(metrics: Sequence[str], predictions: Tags, references: Tags) -> dict[str, float]:
    """Compute metrics over all words of all sentences.

    An entity is right if its bounds and its type are right.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns if no entity is predicted; the metric is then 0
        from seqeval import metrics as seqeval

        iobes = [_as_iobes(references), _as_iobes(predictions)]
        return {name: float(getattr(seqeval, f"{name}_score")(*iobes)) for name in metrics}


def _as_iobes(tags: Tags) -> list[list[str]]:
    return [[IOBES_PREFIXES.get(tag[:2], tag[:2]) + tag[2:] for tag in sentence] for sentence in tags]


def baseline(train_tags: Tags, words: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return predictions that ignore the text: the most frequent tag of the training split for every word."""
    (tag, _), *_ = Counter(tag for sentence in train_tags for tag in sentence).most_common(1)
    return [[tag] * len(sentence) for sentence in words]


class TaggingJob(FinetuningJob[TaggingConfig]):
    """The job of `run_tagging.py`."""

    def open_run(self, config: TaggingConfig, cluster: Cluster) -> Run:
        check_packages("seqeval")
        start, data = open_start(config), config.data
        sentences = read_sentences(data)
        check_shared_rows(
            {split: list(map(tuple, read.words)) for split, read in sentences.items()},
            {split: read.name for split, read in sentences.items()},
            [split for split, read in sentences.items() if read.tags is None],
        )
        train_name, tags = sentences["train"].name, sentences["train"].tags
        assert tags is not None
        flat = [tag for sentence in tags for tag in sentence]
        model_labels = start.labels_of("TokenClassification")
        reading = LabelReading("single_label_classification", similar_labels=data.similar_labels)
        labels = find_labels(flat, train_name, reading, model_labels)
        if model_labels is None:
            labels = replace(labels, names=tuple(sorted(labels.names, key=lambda name: name != OUTSIDE)))
        encoded = labels.encode(flat, train_name)
        plan_lines = labels.describe(encoded)
        plan_lines |= {"words": f"{data.text_column_name} of {train_name}", "tags": data.label_column_name}
        is_of_entities = metrics_of(labels.names) == ENTITY_METRICS
        plan_lines["scores"] = "F1 of whole entities" if is_of_entities else "accuracy of words"
        plan_lines["first tags"] = " ".join(map(str, tags[0]))
        if hint := hint_of(labels.names):
            logger.warning("%s", hint)

        def make_split(split: str, file: str = "") -> Split:
            tagged = sentences[split].with_tags_of(labels)
            length, token_types = data.max_seq_length, start.token_types
            rows = encode_sentences(start.tokenizer, tagged, labels, max_length=length, token_types=token_types)
            unseen = {tag for row in tagged.tags or () for tag in row} - set(labels.names)
            # With unseen tags no loss can be computed. So set `is_labelled`, which prevents the loss, although all rows
            # are scored.
            is_labelled = np.ones(len(tagged.words), bool) if unseen else None
            return Split(rows, tagged, file, is_scored=tagged.tags is not None, is_labelled=is_labelled)

        train = make_split("train")
        self.validation = {"": make_split("validation", f"{EVAL_NAME}.txt")} if "validation" in sentences else {}
        self.tests = [make_split("test", "predictions.txt")] if "test" in sentences else []
        validation = self.validation.get("")
        task = Tagging(labels, data.metric_name, max_length=data.max_seq_length, **start.task_arguments)
        task.class_loss = class_loss(config.optimization, labels.names, encoded)
        plan_lines |= describe_loss(task.class_loss, labels.names)
        if validation is not None:
            evaluated = validation.examples
            task.guess = scores(task.metrics, baseline(train.examples.tags, evaluated.words), evaluated.tags)
        return start.run(task, train.rows, validation, cluster, labels.by_id, plan_lines=plan_lines)
