"""What a model is asked, about units of a text and minimal pairs: rows with masked tokens, and what these were.

A text is scored by pseudo-log-likelihood (Salazar et al. 2020): each of its tokens is masked alone, and the logarithms
of their probabilities are added. Where a word has several tokens, the rest of it gives away the masked one; within-word
left to right (Kauf and Ivanova 2023) also masks the tokens of the word that follow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub
from mlm_common.tokenizer import load_tokenizer, special_ids, vocabulary_size, word_starts
from train.model.architectures import check_architecture, max_positions
from train.model.pretrained_files import WEIGHTS_SUFFIXES, read_masked_lm_config
from train.scoring.pairs import Pair
from train.scoring.texts import EncodedText, TextEncoder, Unit, byte_lengths, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# `<unk>` says that a word is unknown, not which. To spell it takes 8 bits per byte, if all bytes are equally probable.
NATS_PER_UNREAD_BYTE = np.log(256)


@dataclass(frozen=True)
class Material:
    """What every model is asked: units of `documents`, and pairs; either may be empty."""

    documents: Sequence[str]
    units: Sequence[Unit]
    pairs: Sequence[Pair]

    @property
    def num_bytes(self) -> NDArray[np.float64]:
        """Bytes of each unit."""
        texts = (self.documents[unit.document][unit.start : unit.stop] for unit in self.units)
        return np.array([len(text.encode()) for text in texts], np.float64)

    @property
    def has_word(self) -> NDArray[np.bool_]:
        """Whether each unit has a word; one of dots alone has none."""
        return np.array([unit.word_start < unit.word_stop for unit in self.units], np.bool_)

    def part(self, units: NDArray[np.int64], pairs: NDArray[np.int64]) -> "Material":
        return replace(self, units=[self.units[one] for one in units], pairs=[self.pairs[one] for one in pairs])


class Query(NamedTuple):
    """A row, with masks, and what was at some of them.

    item: number of the sentence or unit that it belongs to.
    """

    item: int
    ids: list[int]
    positions: list[int]
    targets: list[int]


class Answers(NamedTuple):
    """What was answered.

    nats: float64 (queries,), minus the logarithm of the probability of each query's targets.
    ranks: int32 (queries,), how many ids are more probable than the target, of the worst target of each query.
    """

    nats: NDArray[np.float64]
    ranks: NDArray[np.int32]


@dataclass(frozen=True)
class Questions:
    """All that is asked of one model, or of checkpoints of one run.

    name: as it was given.
    models: {name: folder with its files, Hub id, or checkpoint of a run}; all have the same tokenizer.
    max_length: tokens of the longest row.
    of_sentences: for each token of each sentence of the pairs.
    of_tokens, of_words: for each token of each unit, and for the words of each as a whole.
    sentence_nats, unit_nats: float64 (sentences,), (units,), what it costs to spell what the tokenizer cannot read.
    places: int64 (units,), tokens before each unit in its row.
    frequencies: float64 (ids,), of the tokens in the documents.
    unread: what the tokenizer cannot read of the documents.
    """

    name: str
    models: dict[str, str]
    max_length: int
    pad_token_id: int
    of_sentences: list[Query]
    of_tokens: list[Query]
    of_words: list[Query]
    sentence_nats: NDArray[np.float64]
    unit_nats: NDArray[np.float64]
    places: NDArray[np.int64]
    frequencies: NDArray[np.float64]
    unread: "Unread"

    def part(self, units: NDArray[np.int64], pairs: NDArray[np.int64]) -> "Questions":
        """Return those about some units and pairs, which are numbered from 0."""
        sentences = np.stack([2 * pairs, 2 * pairs + 1], axis=1).ravel()
        return replace(
            self,
            of_sentences=_renumbered(self.of_sentences, sentences),
            of_tokens=_renumbered(self.of_tokens, units),
            of_words=_renumbered(self.of_words, units),
            sentence_nats=self.sentence_nats[sentences],
            unit_nats=self.unit_nats[units],
            places=self.places[units],
        )


def _renumbered(queries: Sequence[Query], items: NDArray[np.int64]) -> list[Query]:
    numbers = {item: number for number, item in enumerate(items.tolist())}
    return [query._replace(item=numbers[query.item]) for query in queries if query.item in numbers]


class Unread(NamedTuple):
    """Fractions that a tokenizer cannot read: of the tokens, those that are `<unk>`; of the bytes, those lost."""

    tokens: float
    bytes: float


class Reader:
    """How one model reads documents and pairs.

    Args:
        name: as it was given.
        folder: with its configuration and tokenizer, or its Hub id.
        documents, pairs: what it reads.
        max_length: tokens of the longest row, if the model reads as many.
        left_to_right: mask the rest of a word with each of its tokens.
        checkpoints: {name: path}, of the run that the model in `folder` is of, if those are scored instead.

    Raises:
        InputError: it is no model for masked tokens, or cannot read the pairs.
    """

    def __init__(
        self,
        name: str,
        folder: str,
        documents: Sequence[str],
        pairs: Sequence[Pair],
        max_length: int,
        *,
        left_to_right: bool,
        checkpoints: dict[str, str] | None = None,
    ) -> None:
        with local_or_hub(folder, without=WEIGHTS_SUFFIXES) as local_folder:
            config = read_masked_lm_config(local_folder, name)
        check_architecture(config)
        tokenizer = load_tokenizer(folder)
        longest = min(max_length, tokenizer.model_max_length, max_positions(config) or max_length)
        self._name, self._models = name, checkpoints or {name: folder}
        self._asker = Asker(tokenizer, longest, left_to_right=left_to_right)
        self._documents = documents
        self.texts = [self._asker.encoder.encode(document) for document in documents]
        self._of_sentences, self._sentence_nats = self._asker.about_pairs(pairs)

    def ask(self, material: Material) -> Questions:
        """Make the questions about what it reads."""
        asker = self._asker
        of_tokens, of_words, places = asker.about_units(self.texts, material.units)
        counts = np.zeros(asker.num_ids)
        unread_nats = 0.0
        for document, text in zip(self._documents, self.texts, strict=True):
            counts += np.bincount(text.ids, minlength=len(counts))
            unread_nats += nats_to_spell(document, text.unread)
        frequencies = counts / max(counts.sum(), 1)
        num_bytes = max(sum(len(document.encode()) for document in self._documents), 1)
        return Questions(
            self._name,
            self._models,
            asker.max_length,
            asker.pad,
            self._of_sentences,
            of_tokens,
            of_words,
            self._sentence_nats,
            np.array([self._nats_of_unread(unit) for unit in material.units], np.float64),
            np.array(places, np.int64),
            frequencies,
            Unread(float(frequencies[asker.encoder.unk_id]), unread_nats / NATS_PER_UNREAD_BYTE / num_bytes),
        )

    def _nats_of_unread(self, unit: Unit) -> float:
        text = self._documents[unit.document][unit.start : unit.stop]
        return nats_to_spell(text, self.texts[unit.document].unread[unit.start : unit.stop])


def nats_to_spell(text: str, unread: NDArray[np.bool_]) -> float:
    return float(byte_lengths(text)[unread].sum() * NATS_PER_UNREAD_BYTE) if unread.any() else 0.0


class Asker:
    """Makes the queries for one tokenizer.

    max_length: tokens of a row, with the two special ones at its ends.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", max_length: int, *, left_to_right: bool) -> None:
        self.encoder, self.max_length = TextEncoder(tokenizer), max_length
        self.num_ids = vocabulary_size(tokenizer)
        ids = special_ids(tokenizer)
        self.start, self.end, self.mask, self.pad = ids["cls"], ids["sep"], ids["mask"], ids["pad"]
        self.word_starts = word_starts(tokenizer) if left_to_right else None
        if left_to_right and self.word_starts is None:
            raise InputError("--left-to-right needs a tokenizer whose tokens show where a word starts; this has none.")

    def about_pairs(self, pairs: Sequence[Pair]) -> tuple[list[Query], NDArray[np.float64]]:
        """Ask for each token of each sentence, the good one of each pair first.

        Pairs whose sentences have the same tokens are a tie, whatever the model; nothing is asked about them. Also
        return what it costs to spell what the tokenizer cannot read of each sentence.

        Raises:
            InputError: a sentence is longer than the model's rows, or has no token.
        """
        queries: list[Query] = []
        nats = np.zeros(2 * len(pairs))
        for number, pair in enumerate(pairs):
            sentences = (pair.good, pair.bad)
            encoded = [self.encoder.encode(sentence) for sentence in sentences]
            for sentence, (ids, *_) in zip(sentences, encoded, strict=True):
                if not 0 < len(ids) <= self.max_length - 2:
                    raise InputError(
                        f"Minimal pairs must have sentences of 1 to {self.max_length - 2} tokens, as the model reads; "
                        f"{sentence[:60]!r} has {len(ids)}."
                    )
            if np.array_equal(encoded[0].ids, encoded[1].ids):
                continue
            for item, (sentence, text) in enumerate(zip(sentences, encoded, strict=True), 2 * number):
                queries += self._each(item, text.ids.tolist(), 0, len(text.ids))
                nats[item] = nats_to_spell(sentence, text.unread)
        return queries, nats

    def about_units(
        self, texts: Sequence[EncodedText], units: Sequence[Unit]
    ) -> tuple[list[Query], list[Query], list[int]]:
        """Ask for each token of each unit, then for its words as a whole, if the tokenizer can read them.

        Documents are cut into rows as long as the model reads; the row of a unit that a cut would divide ends with it.
        Also return the number of tokens before each unit in its row.
        """
        single: list[Query] = []
        whole: list[Query] = []
        places: list[int] = []
        room = self.max_length - 2
        for item, unit in enumerate(units):
            text = texts[unit.document]
            first, stop = tokens_of(text, unit)
            begin = max(first // room * room, stop - room)
            places.append(max(first - begin, 0))
            if stop - first > room:  # more tokens than a row has: in parts
                for begin in range(first, stop, room):
                    row = text.ids[begin : begin + room].tolist()
                    single += self._each(item, row, 0, min(room, stop - begin))
                continue
            row = text.ids[begin : begin + room].tolist()
            single += self._each(item, row, first - begin, stop - begin)
            of_words = (text.stops[first:stop] > unit.word_start) & (text.starts[first:stop] < unit.word_stop)
            positions = (first - begin + 1 + np.flatnonzero(of_words)).tolist()
            targets = [row[position - 1] for position in positions]
            is_unread = self.encoder.unk_id in targets or text.unread[unit.word_start : unit.word_stop].any()
            if positions and not is_unread:
                whole.append(Query(item, self._masked(row, positions), positions, targets))
        return single, whole, places

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
    totals = np.zeros(num_items)
    np.add.at(totals, [query.item for query in queries], nats)
    return totals
