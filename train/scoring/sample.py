"""Scores at each evaluation during training: minimal pairs, and words of the validation shards."""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.storage import read_file
from mlm_common.tokenizer import special_token_ids, vocabulary_size, word_starts
from tfrecord_prep.manifest import ShardSet
from tfrecord_prep.records import decode_feature, read_records
from train.scoring.pairs import Pair
from train.scoring.queries import Answers, Asker, Query, lengths_up_to, total_by_item

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Maximum number of pairs. With this number the standard error of the score is at most 2.5%.
MAX_PAIRS = 400
SEED = 0


@dataclass(frozen=True)
class Sample:
    """The queries that a model is asked at each evaluation during training, which are always the same.

    Attributes:
        sentence_queries: a query for each token of the sentences of the pairs, the good sentence of each pair first.
        sentence_nats: float64 (sentences,), cost in nats of spelling out the text that the tokenizer cannot represent.
        token_queries: a query for each token of each word.
        word_queries: a query for each word as a whole.
        word_bytes: float64 (words,), number of bytes of each word, including the space before it.
    """

    sentence_queries: list[Query]
    sentence_nats: NDArray[np.float64]
    token_queries: list[Query]
    word_queries: list[Query]
    word_bytes: NDArray[np.float64]

    def figures(
        self, answer: Callable[[Sequence[Query], Sequence[int], int], Answers], max_length: int, tokens_per_batch: int
    ) -> dict[str, float]:
        """Score a model, given the function `answer` that asks it.

        Args:
            answer: answers queries, given the lengths of rows and the number of tokens in a batch.
            max_length: length of the longest row, in tokens.
            tokens_per_batch: number of tokens in a batch.

        Returns:
            `pairs_accuracy` if there are pairs; `bits_per_byte` and `word_accuracy` if there are words.
        """
        figures = {}
        if num_sentences := len(self.sentence_nats):
            longest = max((len(query.ids) for query in self.sentence_queries), default=0)  # equal pairs have no queries
            length = next(length for length in lengths_up_to(max_length) if length >= longest)
            nats = answer(self.sentence_queries, [length], tokens_per_batch).nats
            totals = self.sentence_nats + total_by_item(self.sentence_queries, nats, num_sentences)
            good, bad = totals.reshape(-1, 2).T
            figures["pairs_accuracy"] = float(np.mean(np.where(good == bad, 0.5, good < bad)))
        if self.word_queries:
            nats = answer(self.token_queries, [max_length], tokens_per_batch).nats
            figures["bits_per_byte"] = float(nats.sum() / np.log(2) / self.word_bytes.sum())
            ranks = answer(self.word_queries, [max_length], tokens_per_batch).ranks
            figures["word_accuracy"] = float(np.mean(ranks == 0))
        return figures


def draw_sample(
    pairs: Sequence[Pair],
    num_words: int,
    shards: ShardSet | None,
    tokenizer: "PreTrainedTokenizerFast",
    max_length: int,
) -> Sample:
    """Draw at most `MAX_PAIRS` pairs, and one word from each of `num_words` rows that are spread over the shards.

    Raises:
        InputError: a sentence is longer than the rows; or the tokenizer does not show where words start.
    """
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.choice(len(pairs), min(MAX_PAIRS, len(pairs)), replace=False))
    asker = Asker(tokenizer, max_length, left_to_right=False)
    sentence_queries, sentence_nats = asker.about_pairs([pairs[index] for index in drawn])
    token_queries: list[Query] = []
    word_queries: list[Query] = []
    word_bytes: list[int] = []
    if num_words and shards is not None:
        starts = word_starts(tokenizer)
        if starts is None:
            raise InputError("--score-words needs a tokenizer whose tokens show where words start; these do not.")
        special = np.zeros(vocabulary_size(tokenizer), np.bool_)
        special[list(special_token_ids(tokenizer))] = True
        mask = int(tokenizer.mask_token_id)
        rows = rows_from_all_over(shards, num_words)
        _warn_of_unknown(rows, asker.encoder.unk_id)
        for row in rows:
            if spans := word_spans(row, starts, special):
                first, stop = spans[random.integers(len(spans))]
                ask = functools.partial(_masked, len(word_bytes), row, mask)
                token_queries += [ask([position]) for position in range(first, stop)]
                word_queries.append(ask(list(range(first, stop))))
                text_start = int(np.append(0, np.flatnonzero(special[row[:first]]) + 1)[-1])
                # Count the word's bytes in context. If the word starts the row, the row's first token serves as the
                # context.
                context = row[text_start:first] if first else row[:1]
                with_word = np.concatenate([context, row[first:stop]])
                word_bytes.append(max(1, _num_bytes(tokenizer, with_word) - _num_bytes(tokenizer, context)))
    return Sample(sentence_queries, sentence_nats, token_queries, word_queries, np.array(word_bytes, np.float64))


def _num_bytes(tokenizer: "PreTrainedTokenizerFast", ids: NDArray[np.int64]) -> int:
    return len(tokenizer.decode(ids, clean_up_tokenization_spaces=False).encode())


def _warn_of_unknown(rows: Sequence[NDArray[np.int64]], unk_id: int) -> None:
    num_unknown, num_ids = sum(int((row == unk_id).sum()) for row in rows), sum(map(len, rows))
    if num_unknown:
        logger.warning(
            "%.1f%% of the tokens that --score-words draws from are <unk>. Words with <unk> are not scored, because "
            "shards do not contain their text.",
            100 * num_unknown / num_ids,
        )


def rows_from_all_over(shards: ShardSet, num_rows: int) -> list[NDArray[np.int64]]:
    """Read the token ids of `num_rows` evenly spaced rows, or of all rows if there are fewer rows."""
    numbers = set(np.linspace(0, shards.num_rows - 1, min(num_rows, shards.num_rows)).astype(int).tolist())
    rows, first = [], 0
    for path, num_in_shard in zip(shards.paths, shards.num_rows_per_shard, strict=True):
        if numbers.intersection(range(first, first + num_in_shard)):
            records = enumerate(read_records(read_file(path)), first)
            rows += [decode_feature(record, "input_ids") for number, record in records if number in numbers]
        first += num_in_shard
    return rows


def word_spans(row: NDArray[np.int64], starts: NDArray[np.bool_], special: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, stop) of each word of a row, as in whole-word masking; skip a word that the row's end may cut."""
    is_special = special[row]
    begins = np.flatnonzero(starts[row] | is_special | np.append(False, is_special[:-1]))
    return [(int(first), int(stop)) for first, stop in itertools.pairwise(begins) if not is_special[first]]


def _masked(item: int, row: NDArray[np.int64], mask_token_id: int, positions: list[int]) -> Query:
    ids = row.copy()
    ids[positions] = mask_token_id
    return Query(item, ids.tolist(), positions, row[positions].tolist())
