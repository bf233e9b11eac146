"""Queries about units of a text and minimal pairs: rows with masked tokens, and the tokens that were masked.

A text is scored by pseudo-log-likelihood (Salazar et al. 2020): each of its tokens is masked alone, and the logarithms
of the tokens' probabilities are added. If a word has several tokens, the other tokens give the masked token away. The
variant "within-word left to right" (Kauf and Ivanova 2023) therefore also masks the tokens that follow in the word.
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

# `<unk>` does not say which word it stands for. Spelling the word costs 8 bits per byte if all bytes are equally
# likely.
NATS_PER_UNREAD_BYTE = np.log(256)


@dataclass(frozen=True)
class Material:
    """The units of `documents` and the minimal pairs that all models are asked about. Either may be empty."""

    documents: Sequence[str]
    units: Sequence[Unit]
    pairs: Sequence[Pair]

    @property
    def num_bytes(self) -> NDArray[np.float64]:
        """Number of bytes of each unit."""
        texts = (self.documents[unit.document][unit.start : unit.stop] for unit in self.units)
        return np.array([len(text.encode()) for text in texts], np.float64)

    @property
    def has_word(self) -> NDArray[np.bool_]:
        """For each unit, whether it contains a word; a unit of dots, for example, does not."""
        return np.array([unit.word_start < unit.word_stop for unit in self.units], np.bool_)

    def part(self, units: NDArray[np.int64], pairs: NDArray[np.int64]) -> "Material":
        """Return the units and pairs with these numbers."""
        return replace(self, units=[self.units[unit] for unit in units], pairs=[self.pairs[pair] for pair in pairs])


class Query(NamedTuple):
    """A row with masked tokens. The model is asked about some of the masked tokens.

    Attributes:
        item: number of the sentence or unit that the query belongs to.
        ids: the ids of the row, with masks.
        positions: positions in the row that the model is asked about.
        targets: the ids that were masked at these positions.
    """

    item: int
    ids: list[int]
    positions: list[int]
    targets: list[int]


class Answers(NamedTuple):
    """The answers to queries.

    Attributes:
        nats: float64 (queries,), negative log-probability of each query's targets.
        ranks: int32 (queries,), number of ids more probable than the target; for several targets, the largest of these
            numbers.
    """

    nats: NDArray[np.float64]
    ranks: NDArray[np.int32]


@dataclass(frozen=True)
class Questions:
    """All questions to one model, or to the checkpoints of one run.

    Attributes:
        name: the model or run, as the user named it.
        models: {name: folder of a model, Hub id, or checkpoint of a run}; all have the same tokenizer.
        max_length: length of the longest row, in tokens.
        pad_token_id: the tokenizer's id for padding.
        sentence_queries: a query for each token of each sentence of the pairs.
        token_queries: a query for each token of each unit.
        word_queries: a query for each unit, with all of its words masked.
        sentence_nats: float64 (sentences,), cost in nats of spelling out the text of each sentence that the tokenizer
            cannot represent.
        unit_nats: float64 (units,), the same cost for each unit.
        offsets: int64 (units,), number of tokens before each unit in its row.
        frequencies: float64 (ids,), relative frequency of each id in the documents.
        unread: fraction of the documents that the tokenizer cannot read.
    """

    name: str
    models: dict[str, str]
    max_length: int
    pad_token_id: int
    sentence_queries: list[Query]
    token_queries: list[Query]
    word_queries: list[Query]
    sentence_nats: NDArray[np.float64]
    unit_nats: NDArray[np.float64]
    offsets: NDArray[np.int64]
    frequencies: NDArray[np.float64]
    unread: "Unread"

    def part(self, units: NDArray[np.int64], pairs: NDArray[np.int64]) -> "Questions":
        """Return the questions about the units and pairs with these numbers, renumbered from 0."""
        sentences = np.stack([2 * pairs, 2 * pairs + 1], axis=1).ravel()
        return replace(
            self,
            sentence_queries=_renumbered(self.sentence_queries, sentences),
            token_queries=_renumbered(self.token_queries, units),
            word_queries=_renumbered(self.word_queries, units),
            sentence_nats=self.sentence_nats[sentences],
            unit_nats=self.unit_nats[units],
            offsets=self.offsets[units],
        )


def _renumbered(queries: Sequence[Query], items: NDArray[np.int64]) -> list[Query]:
    numbers = {item: number for number, item in enumerate(items.tolist())}
    return [query._replace(item=numbers[query.item]) for query in queries if query.item in numbers]


class Unread(NamedTuple):
    """The fractions of a text that a tokenizer cannot read.

    Attributes:
        tokens: the fraction of the text's tokens that are `<unk>`.
        bytes: the fraction of the text's bytes that are lost.
    """

    tokens: float
    bytes: float


class Reader:
    """Reads documents and pairs with the tokenizer of one model.

    Args:
        name: the model or run, as the user named it.
        folder: folder with the model's configuration and tokenizer, or its Hub id.
        documents: the texts to read.
        pairs: the minimal pairs to read.
        max_length: length of the longest row, in tokens; less if the model reads only shorter rows.
        left_to_right: with each token, also mask the tokens that follow in its word.
        checkpoints: {name: path}, checkpoints of the same run, which are scored instead of the model in `folder`.

    Raises:
        InputError: the model is not a masked language model, or cannot read the pairs.
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
        """Return the questions to the model about the material."""
        asker = self._asker
        token_queries, word_queries, offsets = asker.about_units(self.texts, material.units)
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
            token_queries,
            word_queries,
            self._sentence_nats,
            np.array([self._nats_of_unread(unit) for unit in material.units], np.float64),
            np.array(offsets, np.int64),
            frequencies,
            Unread(float(frequencies[asker.encoder.unk_id]), unread_nats / NATS_PER_UNREAD_BYTE / num_bytes),
        )

    def _nats_of_unread(self, unit: Unit) -> float:
        text = self._documents[unit.document][unit.start : unit.stop]
        return nats_to_spell(text, self.texts[unit.document].unread[unit.start : unit.stop])


def nats_to_spell(text: str, unread: NDArray[np.bool_]) -> float:
    return float(byte_lengths(text)[unread].sum() * NATS_PER_UNREAD_BYTE) if unread.any() else 0.0


class Asker:
    """Builds queries for one tokenizer.

    Args:
        tokenizer: the tokenizer.
        max_length: length of the longest row in tokens, including the special tokens at its start and end.
        left_to_right: with each token, also mask the tokens that follow in its word.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", max_length: int, *, left_to_right: bool) -> None:
        self.encoder, self.max_length = TextEncoder(tokenizer), max_length
        self.num_ids = vocabulary_size(tokenizer)
        ids = special_ids(tokenizer)
        self.start, self.end, self.mask, self.pad = ids["cls"], ids["sep"], ids["mask"], ids["pad"]
        self.word_starts = word_starts(tokenizer) if left_to_right else None
        if left_to_right and self.word_starts is None:
            raise InputError("--left-to-right needs a tokenizer whose tokens show where words start; these do not.")

    def about_pairs(self, pairs: Sequence[Pair]) -> tuple[list[Query], NDArray[np.float64]]:
        """Build a query for each token of each sentence, the good sentence of each pair first.

        There are no queries for pairs whose sentences have the same tokens, because both sentences get the same score.

        Returns:
            The queries; and float64 (sentences,), the cost in nats of spelling out the text that the tokenizer cannot
            represent.

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
                        f"Sentences of minimal pairs must have 1 to {self.max_length - 2} tokens, the model's limit; "
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
        """Build a query for each token of each unit, and a query for all words of the unit together.

        Documents are cut into rows of the model's maximum length. A unit that a cut would divide gets a row that ends
        with the unit. There is no query for words that the tokenizer cannot read.

        Returns:
            The queries for tokens, the queries for words, and the number of tokens before each unit in its row.
        """
        single: list[Query] = []
        whole: list[Query] = []
        offsets: list[int] = []
        room = self.max_length - 2
        for item, unit in enumerate(units):
            text = texts[unit.document]
            first, stop = tokens_of(text, unit)
            begin = max(first // room * room, stop - room)
            offsets.append(max(first - begin, 0))
            if stop - first > room:  # the unit is longer than a row: ask about it in parts
                for begin in range(first, stop, room):
                    row = text.ids[begin : begin + room].tolist()
                    single += self._each(item, row, 0, min(room, stop - begin))
                continue
            row = text.ids[begin : begin + room].tolist()
            single += self._each(item, row, first - begin, stop - begin)
            is_in_word = (text.stops[first:stop] > unit.word_start) & (text.starts[first:stop] < unit.word_stop)
            positions = (first - begin + 1 + np.flatnonzero(is_in_word)).tolist()
            targets = [row[position - 1] for position in positions]
            is_unread = self.encoder.unk_id in targets or text.unread[unit.word_start : unit.word_stop].any()
            if positions and not is_unread:
                whole.append(Query(item, self._masked(row, positions), positions, targets))
        return single, whole, offsets

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
    """Return the lengths of rows for which programs are compiled: a few, with at most a third of padding per row."""
    lengths = [half * 2**power for power in range(2, 20) for half in (2, 3)]
    return [*(length for length in lengths if length < max_length), max_length]


def total_by_item(queries: Sequence[Query], nats: NDArray[np.float64], num_items: int) -> NDArray[np.float64]:
    totals = np.zeros(num_items)
    np.add.at(totals, [query.item for query in queries], nats)
    return totals
