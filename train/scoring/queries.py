"""What a model is asked: a row of tokens some of which are masked, and the tokens that were there.

A text is scored by pseudo-log-likelihood (Salazar et al. 2020): each of its tokens is masked alone, and the logarithms
of their probabilities are added. Where a word has several tokens, the rest of it gives away the masked one; within-word
left to right (Kauf and Ivanova 2023) also masks the tokens of the word that follow.
"""

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub
from mlm_common.tokenizer import load_tokenizer, special_ids, vocabulary_size, word_starts
from train.model.architectures import check_architecture, max_positions
from train.model.pretrained_files import WEIGHTS_SUFFIXES, read_masked_lm_config
from train.scoring.material import Material, Word


class Query(NamedTuple):
    """A row, with masks, and what was at some of them.

    item: number of the sentence or word that it belongs to.
    """

    item: int
    ids: list[int]
    positions: list[int]
    targets: list[int]


@dataclass(frozen=True)
class Questions:
    """All that is asked of one model, or of checkpoints of one run.

    name: as it was given.
    models: {name: folder with its files, Hub id, or checkpoint of a run}; all have the same tokenizer.
    max_length: tokens of the longest row.
    of_sentences: for each token of each sentence of the pairs.
    of_tokens, of_words: for each token of each word, and for each word as a whole.
    places: int64 (words,), tokens before each word in its row.
    frequencies: float64 (ids,), of the tokens in the documents.
    """

    name: str
    models: dict[str, str]
    max_length: int
    pad_token_id: int
    of_sentences: list[Query]
    of_tokens: list[Query]
    of_words: list[Query]
    places: NDArray[np.int64]
    frequencies: NDArray[np.float64]


def ask(
    name: str,
    folder: str,
    material: Material,
    max_length: int,
    *,
    left_to_right: bool,
    checkpoints: dict[str, str] | None = None,
) -> Questions:
    """Make the questions for a model.

    Args:
        name: as it was given.
        folder: with its configuration and tokenizer, or its Hub id.
        checkpoints: {name: path}, of the run that the model in `folder` is of, if those are scored instead.

    Raises:
        InputError: there is no such model, or none for masked tokens; a sentence of a pair is longer than its rows;
            `left_to_right` with a tokenizer that does not show where a word starts.
    """
    with local_or_hub(folder, without=WEIGHTS_SUFFIXES) as local_folder:
        config = read_masked_lm_config(local_folder, name)
    check_architecture(config)
    tokenizer = load_tokenizer(folder)
    longest = min(max_length, tokenizer.model_max_length, max_positions(config) or max_length)
    asker = Asker(tokenizer, longest, left_to_right=left_to_right)
    of_tokens, of_words, places = asker.about_words(material.documents, material.words)
    counts = np.zeros(vocabulary_size(tokenizer))
    for ids in asker.encode(material.documents):
        counts += np.bincount(ids, minlength=len(counts))
    return Questions(
        name,
        checkpoints or {name: folder},
        longest,
        special_ids(tokenizer)["pad"],
        list(asker.about_sentences(material.sentences)),
        of_tokens,
        of_words,
        np.array(places, np.int64),
        counts / max(counts.sum(), 1),
    )


class Asker:
    """Makes the queries for one tokenizer.

    max_length: tokens of a row, with the two special ones at its ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_length: int, *, left_to_right: bool) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        ids = special_ids(tokenizer)
        self.start, self.end, self.mask = ids["cls"], ids["sep"], ids["mask"]
        self.left_to_right = left_to_right
        self.word_starts = word_starts(tokenizer) if left_to_right else None
        if left_to_right and self.word_starts is None:
            raise InputError("--left-to-right needs a tokenizer whose tokens show where a word starts; this has none.")

    def about_sentences(self, sentences: Sequence[str]) -> Iterator[Query]:
        """Ask for each token of each sentence.

        Raises:
            InputError: a sentence is longer than the model's rows, or has no token.
        """
        for item, ids in enumerate(self.encode(sentences)):
            if not 0 < len(ids) <= self.max_length - 2:
                raise InputError(
                    f"Minimal pairs must have sentences of 1 to {self.max_length - 2} tokens, what the model reads; "
                    f"{sentences[item][:60]!r} has {len(ids)}."
                )
            yield from self._each(item, ids, 0, len(ids))

    def about_words(
        self, documents: Sequence[str], words: Sequence[Word]
    ) -> tuple[list[Query], list[Query], list[int]]:
        """Ask for each token of each word, then for each word as a whole.

        Documents are cut into rows as long as the model reads; the row of a word that a cut would divide ends with it.

        Returns:
            Queries for single tokens, queries for whole words, and the number of tokens before each word in its row.
        """
        single: list[Query] = []
        whole: list[Query] = []
        places: list[int] = []
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encode = functools.lru_cache(maxsize=1)(functools.partial(self.tokenizer, **options))
        room = self.max_length - 2
        for item, word in enumerate(words):
            encoded = encode(documents[word.document])
            ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
            first = bisect.bisect_right(offsets, word.start, key=lambda offset: offset[1])
            stop = max(first, bisect.bisect_left(offsets, word.stop, key=lambda offset: offset[0]))
            begin = max(first // room * room, stop - room)
            row = ids[begin : begin + room]
            first, stop = max(first - begin, 0), stop - begin
            places.append(first)
            single += self._each(item, row, first, stop)
            positions = list(range(first + 1, stop + 1))
            if positions:
                whole.append(Query(item, self._masked(row, positions), positions, row[first:stop]))
        return single, whole, places

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _each(self, item: int, ids: list[int], first: int, stop: int) -> Iterator[Query]:
        for index in range(first, stop):
            positions = [index + 1]
            if self.word_starts is not None:
                following = index + 1
                while following < stop and not self.word_starts[ids[following]]:
                    following += 1
                    positions.append(following)
            yield Query(item, self._masked(ids, positions), positions[:1], [ids[index]])

    def _masked(self, ids: list[int], positions: Sequence[int]) -> list[int]:
        row = [self.start, *ids, self.end]
        for position in positions:
            row[position] = self.mask
        return row


def lengths_up_to(max_length: int) -> list[int]:
    """List lengths of rows for which programs are compiled: few, and a third of the tokens is padding at most."""
    lengths = [half * 2**power for power in range(2, 20) for half in (2, 3)]
    return [*(length for length in lengths if length < max_length), max_length]


def total_by_item(queries: Sequence[Query], nats: NDArray[np.float64], num_items: int) -> NDArray[np.float64]:
    """Add up what was answered about each item, (items,)."""
    totals = np.zeros(num_items)
    np.add.at(totals, [query.item for query in queries], nats)
    return totals
