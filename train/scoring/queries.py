"""What a model is asked, about words of a text and minimal pairs: rows with masked tokens, and what these were.

A text is scored by pseudo-log-likelihood (Salazar et al. 2020): each of its tokens is masked alone, and the logarithms
of their probabilities are added. Where a word has several tokens, the rest of it gives away the masked one; within-word
left to right (Kauf and Ivanova 2023) also masks the tokens of the word that follow.
"""

import bisect
import functools
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub, read_file
from mlm_common.tokenizer import load_tokenizer, special_ids, special_token_ids, vocabulary_size, word_starts
from tfrecord_prep.manifest import ShardSet
from tfrecord_prep.records import decode_feature, read_records
from train.model.architectures import check_architecture, max_positions
from train.model.pretrained_files import WEIGHTS_SUFFIXES, read_masked_lm_config

# A character of Chinese or Japanese, or else letters and digits up to what is none.
CHARACTER = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(f"[{CHARACTER}]|[^\\W{CHARACTER}]+")
# One score of these has a standard error of at most 2.5 %.
MAX_PAIRS = 400
SEED = 0


@dataclass(frozen=True)
class Pair:
    """A sentence that speakers accept, and one nearly like it that they do not (Warstadt et al. 2020)."""

    good: str
    bad: str
    field: str
    term: str


class Word(NamedTuple):
    """A word of a text by the places of its characters."""

    document: int
    start: int
    stop: int


def read_pairs(paths: Sequence[str], flag: str = "--minimal-pairs") -> list[Pair]:
    """Read files in BLiMP's form: JSON lines with `sentence_good` and `sentence_bad`, .gz or not, local or `gs://`.

    Raises:
        InputError: a file that is missing or has another form.
    """
    pairs = []
    for path in paths:
        try:
            content = read_file(path)
            text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8-sig")
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise InputError(f"{flag} must name readable files; {path}: {error}") from error
        for number, line in enumerate(text.split("\n"), 1):  # JSON may have other separators of lines within texts
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                good, bad = row["sentence_good"], row["sentence_bad"]
                pairs.append(Pair(good, bad, row.get("field", ""), row.get("linguistics_term", row.get("UID", ""))))
                is_pair = isinstance(good, str) and isinstance(bad, str) and good != bad
            except (ValueError, KeyError, TypeError, AttributeError):
                is_pair = False
            if not is_pair:
                raise InputError(
                    f"{flag} takes lines of JSON with two different texts, sentence_good and sentence_bad; "
                    f"{path}, line {number}: {line[:80]}"
                )
    if not pairs:
        raise InputError(f"{flag} must name files with pairs; {', '.join(paths)} have none.")
    return pairs


def draw_words(documents: Sequence[str], num_words: int, seed: int) -> list[Word]:
    """Draw different words of the documents, all with the same probability; all words where there are fewer."""
    spans = [[match.span() for match in WORD.finditer(document)] for document in documents]
    ends = np.cumsum([len(of_document) for of_document in spans])
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        raise InputError("--text must have words; none was found.")
    drawn = np.random.default_rng(seed).choice(total, size=min(num_words, total), replace=False)
    words = []
    for number in np.sort(drawn).tolist():
        document = bisect.bisect_right(ends, number)
        words.append(Word(document, *spans[document][number - int(ends[document])]))  # from the end
    return words


@dataclass(frozen=True)
class Material:
    """What every model is asked: words of `documents`, and pairs; either may be empty."""

    documents: Sequence[str]
    words: Sequence[Word]
    pairs: Sequence[Pair]

    @property
    def sentences(self) -> list[str]:
        """The sentences of the pairs, the good one of each first."""
        return [sentence for pair in self.pairs for sentence in (pair.good, pair.bad)]


class Query(NamedTuple):
    """A row, with masks, and what was at some of them.

    item: number of the sentence or word that it belongs to.
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
    """Make the questions for a model; InputError if it is not one for masked tokens, or cannot answer them.

    Args:
        name: as it was given.
        folder: with its configuration and tokenizer, or its Hub id.
        checkpoints: {name: path}, of the run that the model in `folder` is of, if those are scored instead.
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
        """Ask for each token of each sentence; InputError if one is longer than the model's rows, or has no token."""
        for item, ids in enumerate(self.encode(sentences)):
            if not 0 < len(ids) <= self.max_length - 2:
                raise InputError(
                    f"Minimal pairs must have sentences of 1 to {self.max_length - 2} tokens, as the model reads; "
                    f"{sentences[item][:60]!r} has {len(ids)}."
                )
            yield from self._each(item, ids, 0, len(ids))

    def about_words(
        self, documents: Sequence[str], words: Sequence[Word]
    ) -> tuple[list[Query], list[Query], list[int]]:
        """Ask for each token of each word, then for each word as a whole.

        Documents are cut into rows as long as the model reads; the row of a word that a cut would divide ends with it.
        Also return the number of tokens before each word in its row.
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
    totals = np.zeros(num_items)
    np.add.at(totals, [query.item for query in queries], nats)
    return totals


@dataclass(frozen=True)
class Sample:
    """What a model in training is asked at each evaluation, always the same.

    of_sentences: for each token of the sentences of the pairs, the good one of each first.
    of_tokens, of_words: for each token of each word, and for each word as a whole.
    word_bytes: float64 (words,).
    """

    of_sentences: list[Query]
    of_tokens: list[Query]
    of_words: list[Query]
    word_bytes: NDArray[np.float64]

    def figures(
        self, answer: Callable[[Sequence[Query], Sequence[int], int], Answers], max_length: int, tokens_per_batch: int
    ) -> dict[str, float]:
        """Score what answers: `pairs_accuracy`, `bits_per_byte` and `word_accuracy`, those that are asked for."""
        figures = {}
        if self.of_sentences:
            longest = max(len(query.ids) for query in self.of_sentences)
            length = next(one for one in lengths_up_to(max_length) if one >= longest)
            nats = answer(self.of_sentences, [length], tokens_per_batch).nats
            good, bad = total_by_item(self.of_sentences, nats, self.of_sentences[-1].item + 1).reshape(-1, 2).T
            figures["pairs_accuracy"] = float(np.mean(np.where(good == bad, 0.5, good < bad)))
        if self.of_words:
            nats = answer(self.of_tokens, [max_length], tokens_per_batch).nats
            figures["bits_per_byte"] = float(nats.sum() / np.log(2) / self.word_bytes.sum())
            ranks = answer(self.of_words, [max_length], tokens_per_batch).ranks
            figures["word_accuracy"] = float(np.mean(ranks == 0))
        return figures


def draw_sample(
    pairs: Sequence[Pair], num_words: int, shards: ShardSet | None, tokenizer: PreTrainedTokenizerFast, max_length: int
) -> Sample:
    """Draw at most `MAX_PAIRS` pairs, and a word of each of `num_words` rows from all over the shards.

    Raises:
        InputError: a sentence is longer than the rows; or the tokenizer does not show where words start.
    """
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.choice(len(pairs), min(MAX_PAIRS, len(pairs)), replace=False))
    sentences = [sentence for index in drawn for sentence in (pairs[index].good, pairs[index].bad)]
    of_sentences = list(Asker(tokenizer, max_length, left_to_right=False).about_sentences(sentences))
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
        for row in rows_from_all_over(shards, num_words):
            if spans := word_spans(row, starts, special):
                first, stop = spans[random.integers(len(spans))]
                ask = functools.partial(_masked, len(word_bytes), row, mask)
                of_tokens += [ask([position]) for position in range(first, stop)]
                of_words.append(ask(list(range(first, stop))))
                word_bytes.append(len(tokenizer.decode(row[first:stop]).strip().encode()) or 1)
    return Sample(of_sentences, of_tokens, of_words, np.array(word_bytes, np.float64))


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
