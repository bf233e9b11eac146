"""Sentences whose words have tags, and the rows that a model takes: the tag of a word is learned at its first token."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import TaggingData
from finetuning.data.examples import SPLITS, read_tables
from finetuning.data.labels import Labels, is_missing, label_name
from finetuning.data.rows import INDEX, INPUT_IDS, TEXTS_AT_ONCE, TOKEN_TYPES, EncodedRows, check_room
from finetuning.data.tables import Table, read_table
from mlm_common.errors import InputError

logger = logging.getLogger(__name__)

# Of tokens that no word begins with.
NO_TAG, NO_WORD = -100, -1
WORD = "word"
# What a space is in the tokens of SentencePiece and of byte-level BPE.
SPACE_MARKS = ("▁", "Ġ")
OUTSIDE = "O"


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
        """Write the tags as `labels` does; without any in a test part that has others than training.

        Raises:
            InputError: a tag that is unknown, or differs from a known one in white space or case alone.
        """
        if self.tags is None:
            return self
        if self.is_to_predict:
            flat = [tag for row in self.tags for tag in row]
            num_unknown = int((~labels.encode_known(flat, self.name)[1]).sum())
            if num_unknown:
                logger.warning(
                    "%d of %d tags of %s do not occur in training, so it is predicted but not scored.",
                    *(num_unknown, len(flat), self.name),
                )
                return replace(self, tags=None)
        encoded = (labels.encode(row, f"{self.name}, sentence {index}") for index, row in enumerate(self.tags, start=1))
        return replace(self, tags=[[labels.names[tag] for tag in row] for row in encoded])


def read_sentences(data: TaggingData) -> dict[str, Sentences]:
    """Read {train, validation or test: sentences}, of those that are named.

    Raises:
        InputError: a file, a column or a tag is not there.
        HubAwayError: the Hub cannot be reached.
    """
    tables = read_tables(data)
    return {split: _sentences(tables[split], data, needs_tags=split != "test") for split in SPLITS if split in tables}


def read_sentences_to_predict(path: str, data: TaggingData) -> Sentences:
    """Read the words of a file, which `--file` names, without their tags.

    Raises:
        InputError: there is no such file, column or word.
    """
    return replace(_sentences(read_table(path, "--file"), data, needs_tags=False), tags=None)


def _sentences(table: Table, data: TaggingData, *, needs_tags: bool) -> Sentences:
    words = table.column(data.text_column_name, "--text-column-name")
    tags = None
    if needs_tags or data.label_column_name in table.columns:
        tags = table.column(data.label_column_name, "--label-column-name")
    for row, sentence in enumerate(words, start=1):
        if not (isinstance(sentence, list) and all(isinstance(word, str) and word.strip() for word in sentence)):
            raise InputError(
                f"Column {data.text_column_name} of {table.name} must hold lists of words; row {row:,} has "
                f"{sentence!r}."
            )
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
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sentences,
    labels: Labels,
    *,
    max_length: int,
    token_types: bool,
) -> EncodedRows:
    """Encode the words of each sentence, with a space between, as text in pretraining was; cut to `max_length`.

    Features of tokens are the ids, `WORD`, the number of the word that begins there or `NO_WORD`, and `label`, its tag
    or `NO_TAG`.

    Raises:
        InputError: `max_length` leaves no room for words.
    """
    check_room(tokenizer, max_length)
    ids: list[Sequence[int]] = []
    types: list[Sequence[int]] = []
    words: list[NDArray[np.int32]] = []
    tags: list[NDArray[np.int32]] = []
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
        ids += encoded["input_ids"]
        types += encoded["token_type_ids"] if token_types else []
        words += [_words_of_tokens(sentence, one) for sentence, one in zip(some, encoded.encodings, strict=True)]
    for row, of_tokens in enumerate(words):
        if sentences.tags is None:
            tags.append(np.full(len(of_tokens), NO_TAG, np.int32))
            continue
        encoded_tags = labels.encode(sentences.tags[row], f"{sentences.name}, sentence {row + 1:,}")
        tags.append(np.where(of_tokens == NO_WORD, NO_TAG, encoded_tags[of_tokens]).astype(np.int32))
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    features: dict[str, Sequence[Any]] = {INPUT_IDS: ids, WORD: words, "label": tags}
    if token_types:
        features[TOKEN_TYPES] = types
    joined = {name: np.concatenate([np.asarray(row, np.int32) for row in rows]) for name, rows in features.items()}
    return EncodedRows(starts, joined, {INDEX: np.arange(len(ids), dtype=np.int32)})


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
