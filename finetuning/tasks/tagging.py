"""Token classification: sentences whose words have tags, each learned and predicted at the first token of its word."""

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
    Part,
    class_loss,
    describe_loss,
    finetuned_card,
    is_degenerate,
)
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.metrics import check_packages, chosen_metric
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.tasks.task import Mean

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)

# Of tokens that no word begins with.
NO_TAG, NO_WORD = -100, -1
WORD = "word"
# What a space is in the tokens of SentencePiece and of byte-level BPE.
SPACE_MARKS = ("▁", "Ġ")
OUTSIDE = "O"
ENTITY_METRICS = ("f1", "precision", "recall", "accuracy")
TAG_METRICS = ("accuracy",)
# How the tags of entities begin, in the schemes IOB1, IOB2, IOE, IOBES and BILOU.
ENTITY_PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")
# Tags of entities of one kind, which they do not name.
BARE_TAGS = frozenset("BIESLU")
# What IOBES, which seqeval reads, has for the tags of BILOU.
IOBES_PREFIXES = {"L-": "E-", "U-": "S-", "L": "E", "U": "S"}
# The same written in other ways: as suffixes, with an underscore, or in lower case.
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
    """Words with their tags as in a table.

    name: of the table.
    words: of each sentence.
    tags: of each sentence; None where there are none.
    is_to_predict: whether they are of the test part.
    """

    name: str
    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]] | None
    is_to_predict: bool = False

    def with_tags_of(self, labels: Labels) -> "Sentences":
        """Write the tags as `labels` does; in a test part those that training does not have stay, and count as wrong.

        Raises:
            InputError: a tag that is unknown, or differs from a known one in white space or case alone.
        """
        if self.tags is None:
            return self
        if self.is_to_predict:
            found = labels.encode_to_score([tag for row in self.tags for tag in row], self.name)
            if not found.is_labelled.all():
                logger.warning("%s has words without a tag, so it is predicted but not scored.", self.name)
                return replace(self, tags=None)
            if found.unseen:
                names = ", ".join(map(repr, found.unseen[:5])) + (" …" if len(found.unseen) > 5 else "")
                logger.warning("%s has tags that training lacks, which count as wrong: %s.", self.name, names)
            all_names, tags = (*labels.names, *found.unseen), iter(found.encoded)
            return replace(self, tags=[[all_names[next(tags)] for _ in row] for row in self.tags])
        encoded = (labels.encode(row, f"{self.name}, sentence {index}") for index, row in enumerate(self.tags, start=1))
        return replace(self, tags=[[labels.names[tag] for tag in row] for row in encoded])


def read_sentences(data: TaggingData) -> dict[str, Sentences]:
    """Read {train, validation or test: sentences}, of those that are named."""
    tables = read_tables(data)
    tables["train"] = _with_words(tables["train"], data)
    return {split: _sentences(table, data, needs_tags=split != "test") for split, table in tables.items()}


def _with_words(table: Table, data: TaggingData) -> Table:
    """Leave out sentences without words, of which nothing can be learned."""
    kept = [row for row, words in enumerate(table.column(data.text_column_name, "--text-column-name")) if words != []]
    num_empty = len(next(iter(table.columns.values()))) - len(kept)
    if not num_empty:
        return table
    require(bool(kept), f"must have words in {table.name}", "--text-column-name", f"{num_empty:,} empty sentences")
    logger.warning("%s sentences of %s have no words, and are left out.", f"{num_empty:,}", table.name)
    columns = {name: [values[row] for row in kept] for name, values in table.columns.items()}
    return replace(table, columns=columns)


def read_sentences_to_predict(path: str, data: TaggingData) -> Sentences:
    """Read the words of a file, which `--file` names, without their tags."""
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
    """Encode the words of each sentence, with a space between, as text in pretraining was; cut to `max_length`.

    Features of tokens are the ids, `WORD`, the number of the word that begins there or `NO_WORD`, and `label`, its tag
    or `NO_TAG`.
    """
    check_room(tokenizer, max_length)
    names = (INPUT_IDS, TOKEN_TYPES) if token_types else (INPUT_IDS,)
    columns: dict[str, list[Any]] = {name: [] for name in (*names, WORD, "label")}
    for start in range(0, len(sentences.words), TEXTS_AT_ONCE):
        some = sentences.words[start : start + TEXTS_AT_ONCE]
        encoded = tokenizer(
            [" ".join(sentence) for sentence in some],
            truncation=True,
            max_length=max_length,
            return_token_type_ids=token_types,
            return_attention_mask=False,
            return_offsets_mapping=True,
        )
        for name in names:
            columns[name] += encoded[name]
        columns[WORD] += [_words_of_tokens(words, one) for words, one in zip(some, encoded.encodings, strict=True)]
    ids = {name: index for index, name in enumerate(labels.names)}
    for row, words in enumerate(columns[WORD]):
        tags: Any = np.full(len(words), NO_TAG, np.int32)
        if sentences.tags is not None:
            # The last is that of `NO_WORD`, for a sentence without words.
            encoded_tags = np.array([*(ids.get(tag, NO_TAG) for tag in sentences.tags[row]), NO_TAG], np.int32)
            tags = np.where(words == NO_WORD, NO_TAG, encoded_tags[words])
        columns["label"].append(tags)
    return join_rows(columns, {})


def _words_of_tokens(words: Sequence[str], encoding: Encoding) -> NDArray[np.int32]:
    """Find for each token the word that begins with it, or `NO_WORD`.

    A token belongs to the word of its last character, since that of some tokenizers begins with the space before it.
    """
    ends = list(accumulate(len(word) + 1 for word in words))  # after the space that follows
    found, last = [], NO_WORD
    next_offsets = [*encoding.offsets[1:], (0, 0)]
    for token, (begin, end), following in zip(encoding.tokens, encoding.offsets, next_offsets, strict=True):
        word = int(np.searchsorted(ends, end - 1, side="right")) if end > begin else NO_WORD
        # A lone mark of a space that the text begins with has the offsets of the character after it.
        is_mark = token in SPACE_MARKS and following[0] == begin
        is_space = word != NO_WORD and (end == ends[word] or is_mark)
        if word in (NO_WORD, last) or is_space:
            found.append(NO_WORD)
        else:
            found.append(word)
            last = word
    return np.array(found, np.int32)


class Tagging(ExampleTask):
    """Learns the tag of each word; `metric`, by default the first, compares checkpoints.

    Raises:
        InputError: a tag with white space, which divides the tags of a sentence in the predictions.
    """

    model_class = "TFAutoModelForTokenClassification"
    means = (Mean("loss", "loss", "total_weight"), Mean("accuracy", "num_correct", "num_tagged"))
    class_loss: ClassLoss | None = None

    def __init__(self, labels: Labels, metric: str | None = None, *, max_length: int, **of_rows: Any):
        super().__init__(**of_rows)
        for one in labels.names:
            require(one.split() == [one], "must be without white space (rename it)", "Each tag", repr(one))
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
        """Add up `means` over the words with a tag; keep the tags of an evaluation."""
        import tensorflow as tf

        labels = rows["label"]
        logits = self._logits(network, rows, training=training)  # (rows, length, tags)
        is_tagged = tf.cast(labels != NO_TAG, tf.float32)  # (rows, length)
        known = tf.maximum(labels, 0)
        losses, weights = tf.nn.sparse_softmax_cross_entropy_with_logits(known, logits), tf.ones_like(is_tagged)
        if training and self.class_loss is not None:
            losses, weights = self.class_loss.losses(logits, known)
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
        sums = {
            "loss": tf.reduce_sum(losses * is_tagged),
            "total_weight": tf.reduce_sum(weights * is_tagged),
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

    def predictions(self, sums: Mapping[str, Any], part: Part) -> list[list[str]]:
        """Make the tags of all words; one that was cut off, or has no token, is outside of all entities."""
        outside = self.labels.names.index(OUTSIDE) if OUTSIDE in self.labels.names else 0
        tags = of_words(sums, "tag", part.examples, outside)
        return [[self.labels.names[tag] for tag in sentence] for sentence in tags]

    def scores_of(self, sums: Mapping[str, Any], predictions: Tags, part: Part) -> dict[str, float]:
        num_words = sum(map(len, part.examples.words))
        return scores(self.metrics, predictions, part.examples.tags) | {
            "num_rows": len(predictions),
            "num_words": num_words,
            "num_words_cut_off": num_words - int((sums[WORD] != NO_WORD).sum()),
            "is_degenerate": int(is_degenerate(np.array([tag for sentence in predictions for tag in sentence]))),
        }

    def text_of(self, predictions: Tags, part: Part) -> str:  # noqa: ARG002
        """Format a line for each sentence, the tags of its words with a space between."""
        return "".join(" ".join(one) + "\n" for one in predictions)

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --text "…"'

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        rows, cut_off = super().describe(figures), figures["num_words_cut_off"]
        if cut_off:
            rows["cut off"] = f"{cut_off:,} of {figures['num_words']:,} words, which count as outside of entities"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
        ids, labels = (rows[name][0].numpy() for name in (INPUT_IDS, "label"))
        tags = []
        for token, label in zip(tokenizer.convert_ids_to_tokens(ids.tolist()), labels, strict=True):
            if label != NO_TAG:
                weight = f" of weight {self.class_loss.weights[label]:.4g}" if self.class_loss is not None else ""
                tags.append(f"{token} {self.labels.names[label]}{weight}")
        return {"first row": self.first_text(rows, tokenizer), "its tags": ", ".join(tags)}


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
    is_bare = OUTSIDE in tag_names and {"B", "I"} & set(tag_names) and set(tag_names) <= {OUTSIDE, *BARE_TAGS}
    is_of_entities = is_bare or _are_most(tag_names, lambda name: name.startswith(ENTITY_PREFIXES))
    return ENTITY_METRICS if is_of_entities else TAG_METRICS


def hint_of(tag_names: Sequence[str]) -> str | None:
    """Return a hint where the tags look like those of entities but are not written as seqeval reads them."""
    if metrics_of(tag_names) == ENTITY_METRICS or not _are_most(tag_names, OTHER_ENTITY_TAG.fullmatch):
        return None
    example = next(name for name in tag_names if OTHER_ENTITY_TAG.fullmatch(name))
    return (
        f"Tags such as {example} look like those of entities, but without a prefix as in B-PER they are scored word by "
        "word, by accuracy alone. Rewrite them as B-PER, I-PER and O for the F1 of entities."
    )


def _are_most(tag_names: Sequence[str], holds: Callable[[str], object]) -> bool:
    names = [name for name in tag_names if name not in (OUTSIDE, OUTSIDE.lower())]
    return 2 * sum(bool(holds(name)) for name in names) > len(names)


def scores(metrics: Sequence[str], predictions: Tags, references: Tags) -> dict[str, float]:
    """Compute metrics over all words of all sentences; an entity is right if its bounds and its kind are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where no entity is predicted: 0
        from seqeval import metrics as seqeval

        iobes = [_as_iobes(references), _as_iobes(predictions)]
        return {name: float(getattr(seqeval, f"{name}_score")(*iobes)) for name in metrics}


def _as_iobes(tags: Tags) -> list[list[str]]:
    return [[IOBES_PREFIXES.get(tag[:2], tag[:2]) + tag[2:] for tag in sentence] for sentence in tags]


def baseline(train_tags: Tags, words: Sequence[Sequence[str]]) -> list[list[str]]:
    """Guess without the text: for each word the most frequent tag of the training part."""
    (tag, _), *_ = Counter(tag for sentence in train_tags for tag in sentence).most_common(1)
    return [[tag] * len(sentence) for sentence in words]


class TaggingJob(FinetuningJob[TaggingConfig]):
    """The job of `run_tagging.py`."""

    def open_run(self, config: TaggingConfig, cluster: Cluster) -> Run:
        check_packages("seqeval")
        start, data = open_start(config), config.data
        parts = read_sentences(data)
        check_shared_rows(
            {split: list(map(tuple, one.words)) for split, one in parts.items()},
            {split: one.name for split, one in parts.items()},
            [split for split, one in parts.items() if one.tags is None],
        )
        tags = parts["train"].tags
        assert tags is not None
        flat = [tag for sentence in tags for tag in sentence]
        known = start.labels_of("TokenClassification")
        reading = LabelReading("single_label_classification", similar_labels=data.similar_labels)
        labels = find_labels(flat, parts["train"].name, reading, known)
        if known is None:
            labels = replace(labels, names=tuple(sorted(labels.names, key=lambda name: name != OUTSIDE)))
        encoded = labels.encode(flat, parts["train"].name)
        described = labels.describe(encoded)
        described |= {"words": f"{data.text_column_name} of {parts['train'].name}", "tags": data.label_column_name}
        is_of_entities = metrics_of(labels.names) == ENTITY_METRICS
        described["scores"] = "F1 of whole entities" if is_of_entities else "accuracy of words"
        described["first tags"] = " ".join(map(str, tags[0]))
        if hint := hint_of(labels.names):
            logger.warning("%s", hint)

        def part(split: str, file: str = "") -> Part:
            sentences = parts[split].with_tags_of(labels)
            length, token_types = data.max_seq_length, start.token_types
            rows = encode_sentences(start.tokenizer, sentences, labels, max_length=length, token_types=token_types)
            unseen = {tag for row in sentences.tags or () for tag in row} - set(labels.names)
            has_no_loss = np.ones(len(sentences.words), bool) if unseen else None
            return Part(rows, sentences, file, is_scored=sentences.tags is not None, is_labelled=has_no_loss)

        train = part("train")
        self.validation = {"": part("validation", f"{EVAL_NAME}.txt")} if "validation" in parts else {}
        self.tests = [part("test", "predictions.txt")] if "test" in parts else []
        validation = self.validation.get("")
        task = Tagging(labels, data.metric_name, max_length=data.max_seq_length, **start.of_rows)
        task.class_loss = class_loss(config.optimization, labels.names, encoded)
        described |= describe_loss(task.class_loss, labels.names)
        if validation is not None:
            sentences = validation.examples
            task.guess = scores(task.metrics, baseline(train.examples.tags, sentences.words), sentences.tags)
        return start.run(task, train.rows, validation, cluster, labels.by_id, described=described)
