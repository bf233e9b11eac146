"""What a model in training is asked at each evaluation: pairs, and words of the validation shards."""

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

# One score of these has a standard error of at most 2.5%.
MAX_PAIRS = 400
SEED = 0


@dataclass(frozen=True)
class Sample:
    """What a model in training is asked at each evaluation, always the same.

    of_sentences: for each token of the sentences of the pairs, the good one of each first.
    sentence_nats: float64 (sentences,), what it costs to spell what the tokenizer cannot read.
    of_tokens, of_words: for each token of each word, and for each word as a whole.
    word_bytes: float64 (words,), with the space before each word.
    """

    of_sentences: list[Query]
    sentence_nats: NDArray[np.float64]
    of_tokens: list[Query]
    of_words: list[Query]
    word_bytes: NDArray[np.float64]

    def figures(
        self, answer: Callable[[Sequence[Query], Sequence[int], int], Answers], max_length: int, tokens_per_batch: int
    ) -> dict[str, float]:
        """Score what answers: `pairs_accuracy`, `bits_per_byte` and `word_accuracy`, those that are asked for."""
        figures = {}
        if num_sentences := len(self.sentence_nats):
            longest = max((len(query.ids) for query in self.of_sentences), default=0)  # none are asked about ties
            length = next(one for one in lengths_up_to(max_length) if one >= longest)
            nats = answer(self.of_sentences, [length], tokens_per_batch).nats
            totals = self.sentence_nats + total_by_item(self.of_sentences, nats, num_sentences)
            good, bad = totals.reshape(-1, 2).T
            figures["pairs_accuracy"] = float(np.mean(np.where(good == bad, 0.5, good < bad)))
        if self.of_words:
            nats = answer(self.of_tokens, [max_length], tokens_per_batch).nats
            figures["bits_per_byte"] = float(nats.sum() / np.log(2) / self.word_bytes.sum())
            ranks = answer(self.of_words, [max_length], tokens_per_batch).ranks
            figures["word_accuracy"] = float(np.mean(ranks == 0))
        return figures


def draw_sample(
    pairs: Sequence[Pair],
    num_words: int,
    shards: ShardSet | None,
    tokenizer: "PreTrainedTokenizerFast",
    max_length: int,
) -> Sample:
    """Draw at most `MAX_PAIRS` pairs, and a word of each of `num_words` rows from all over the shards.

    Raises:
        InputError: a sentence is longer than the rows; or the tokenizer does not show where words start.
    """
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.choice(len(pairs), min(MAX_PAIRS, len(pairs)), replace=False))
    asker = Asker(tokenizer, max_length, left_to_right=False)
    of_sentences, sentence_nats = asker.about_pairs([pairs[index] for index in drawn])
    of_tokens: list[Query] = []
    of_words: list[Query] = []
    word_bytes: list[int] = []
    if num_words and shards is not None:
        starts = word_starts(tokenizer)
        if starts is None:
            raise InputError("--score-words needs a tokenizer whose tokens show where a word starts; this has none.")
        special = np.zeros(vocabulary_size(tokenizer), np.bool_)
        special[list(special_token_ids(tokenizer))] = True
        mask = int(tokenizer.mask_token_id)
        rows = rows_from_all_over(shards, num_words)
        _warn_of_unknown(rows, asker.encoder.unk_id)
        for row in rows:
            if spans := word_spans(row, starts, special):
                first, stop = spans[random.integers(len(spans))]
                ask = functools.partial(_masked, len(word_bytes), row, mask)
                of_tokens += [ask([position]) for position in range(first, stop)]
                of_words.append(ask(list(range(first, stop))))
                text_begins = int(np.append(0, np.flatnonzero(special[row[:first]]) + 1)[-1])
                # A row that begins within a document lacks what is before its first word; any token will do.
                before = row[text_begins:first] if first else row[:1]
                with_word = np.concatenate([before, row[first:stop]])
                word_bytes.append(max(1, _num_bytes(tokenizer, with_word) - _num_bytes(tokenizer, before)))
    return Sample(of_sentences, sentence_nats, of_tokens, of_words, np.array(word_bytes, np.float64))


def _num_bytes(tokenizer: "PreTrainedTokenizerFast", ids: NDArray[np.int64]) -> int:
    return len(tokenizer.decode(ids, clean_up_tokenization_spaces=False).encode())


def _warn_of_unknown(rows: Sequence[NDArray[np.int64]], unk_id: int) -> None:
    num_unknown, num_ids = sum(int((row == unk_id).sum()) for row in rows), sum(map(len, rows))
    if num_unknown:
        logger.warning(
            "%.1f%% of the tokens that --score-words draws from are <unk>. Words with one are not scored: shards do "
            "not have their text.",
            100 * num_unknown / num_ids,
        )


def rows_from_all_over(shards: ShardSet, num_rows: int) -> list[NDArray[np.int64]]:
    """Read the token ids of every n-th row, `num_rows` in all; all rows where there are fewer."""
    wanted = set(np.linspace(0, shards.num_rows - 1, min(num_rows, shards.num_rows)).astype(int).tolist())
    rows, first = [], 0
    for path, num_in_shard in zip(shards.paths, shards.num_rows_per_shard, strict=True):
        if wanted.intersection(range(first, first + num_in_shard)):
            records = enumerate(read_records(read_file(path)), first)
            rows += [decode_feature(record, "input_ids") for number, record in records if number in wanted]
        first += num_in_shard
    return rows


def word_spans(row: NDArray[np.int64], starts: NDArray[np.bool_], special: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Find the words of a row, as whole-word masking takes them, without those that a row's end may have cut."""
    is_special = special[row]
    begins = np.flatnonzero(starts[row] | is_special | np.append(False, is_special[:-1]))
    return [(int(first), int(stop)) for first, stop in itertools.pairwise(begins) if not is_special[first]]


def _masked(item: int, row: NDArray[np.int64], mask_token_id: int, positions: list[int]) -> Query:
    ids = row.copy()
    ids[positions] = mask_token_id
    return Query(item, ids.tolist(), positions, row[positions].tolist())
