"""What models answer: how probable each finds the tokens that were masked, and how many it finds more probable.

Answers are kept in a file, so that scoring that was killed continues with the next model.
"""

import bisect
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from transformers.utils import SAFE_WEIGHTS_NAME

from mlm_common.errors import InputError
from mlm_common.storage import Folder
from train.config.learning import ModelConfig
from train.model.build import build_network
from train.model.from_pretrained import load_model
from train.model.pretrained_files import WEIGHTS_SUFFIXES, find_file, find_weights, read_config
from train.publishing.saved_model import transformers_folder
from train.scoring.queries import Answers, Material, Query, Questions, lengths_up_to, total_by_item
from train.tasks.heads import gather_before_head, predicting_at

TOKENS_PER_BATCH = 8192
RANDOM_SEED = 0
NO_TOKEN = np.iinfo(np.int32).max


class Batch(NamedTuple):
    """Queries of similar length for one replica; static shapes for each length.

    ids: int32 (rows, length).
    positions, targets: int32 (slots,), places in the rows laid end to end, and the ids that were there.
    queries: int32 (slots,), the number of the query that each slot belongs to; -1 in slots that are not used.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    targets: NDArray[np.int32]
    queries: NDArray[np.int32]


class QueriedModel:
    """A masked language model on the devices of a strategy; each replica answers other batches.

    Args:
        network: prepared by `gather_before_head`.
        strategy: that it was built in.
        num_ids: of the tokenizer; what the vocabulary has beyond, as padding, is no answer.
        pad_token_id: of the tokenizer.
        num_workers: of the strategy; each answers all queries, so that all have the answers.
    """

    def __init__(
        self, network: Any, strategy: tf.distribute.Strategy, num_ids: int, pad_token_id: int, num_workers: int = 1
    ) -> None:
        self.network, self.strategy = network, strategy
        self.num_ids, self.pad_token_id = num_ids, pad_token_id
        self.num_replicas = strategy.num_replicas_in_sync // num_workers

    def answer(
        self, queries: Sequence[Query], lengths: Sequence[int], tokens_per_batch: int = TOKENS_PER_BATCH
    ) -> Answers:
        """Answer all queries, their rows padded to the next of the lengths; a program is compiled for each."""
        nats, ranks = np.zeros(len(queries)), np.zeros(len(queries), np.int32)
        batches = list(_batches(queries, lengths, tokens_per_batch, self.pad_token_id))
        num_replicas = self.num_replicas
        while batches:
            # Batches of one length at once; the last replicas may repeat one.
            shape = batches[0].ids.shape
            number = next((n for n, one in enumerate(batches[:num_replicas]) if one.ids.shape != shape), num_replicas)
            now, batches = batches[:number], batches[number:]
            dealt = now + now[-1:] * (num_replicas - len(now))
            inputs = [
                self.strategy.experimental_distribute_values_from_function(
                    lambda context, values=values: tf.constant(values[context.replica_id_in_sync_group % num_replicas])
                )
                for values in zip(*(one[:3] for one in dealt), strict=True)
            ]
            answered = (self.strategy.experimental_local_results(values) for values in self._answer(*inputs))
            for batch, its_nats, its_ranks in zip(now, *(values[: len(now)] for values in answered), strict=True):
                is_used = batch.queries >= 0
                np.add.at(nats, batch.queries[is_used], its_nats.numpy()[is_used])
                np.maximum.at(ranks, batch.queries[is_used], its_ranks.numpy()[is_used])
        return Answers(nats, ranks)

    @tf.function
    def _answer(self, *inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.strategy.run(self._answer_batch, args=inputs)

    def _answer_batch(
        self, ids: tf.Tensor, positions: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:  # (rows, length), (slots,), (slots,)
        attended = tf.cast(ids != self.pad_token_id, tf.int32)
        with predicting_at(positions):
            outputs = self.network({"input_ids": ids, "attention_mask": attended}, training=False)
        logits = tf.cast(outputs[0][0], tf.float32)[:, : self.num_ids]  # (slots, ids)
        of_targets = tf.gather(logits, targets, batch_dims=1)  # (slots,)
        num_better = tf.reduce_sum(tf.cast(logits > of_targets[:, tf.newaxis], tf.int32), axis=-1)
        return tf.reduce_logsumexp(logits, axis=-1) - of_targets, num_better


def _batches(
    queries: Sequence[Query], lengths: Sequence[int], tokens_per_batch: int, pad_token_id: int
) -> Iterator[Batch]:
    """Cut the queries into batches, the shortest first; the last of a length is filled up with rows of padding."""
    order = sorted(range(len(queries)), key=lambda number: len(queries[number].ids))
    most_targets = max((len(query.targets) for query in queries), default=1)
    at = 0
    while at < len(order):
        length = lengths[bisect.bisect_left(lengths, len(queries[order[at]].ids))]
        num_rows = max(1, tokens_per_batch // length)
        num_slots = max(min(2, most_targets) * num_rows, most_targets)  # few words have more than two tokens
        ids = np.full((num_rows, length), pad_token_id, np.int32)
        slots = np.zeros((3, num_slots), np.int32)
        slots[2] = -1
        row = slot = 0
        while row < num_rows and at < len(order):
            query = queries[order[at]]
            num_targets = len(query.targets)
            if len(query.ids) > length or slot + num_targets > num_slots:
                break
            ids[row, : len(query.ids)] = query.ids
            place = slice(slot, slot + num_targets)
            slots[0, place] = row * length + np.asarray(query.positions)
            slots[1, place], slots[2, place] = query.targets, order[at]
            row, slot, at = row + 1, slot + num_targets, at + 1
        yield Batch(ids, *slots)


class Measured(NamedTuple):
    """What one model answered.

    sentences: float64 (sentences,), nats of each sentence of the pairs.
    words: float64 (words,), nats of the tokens of each word, masked one by one.
    ranks: int32 (words,), ids more probable than the right one, of the worst token of each word masked as a whole.
    """

    sentences: NDArray[np.float64]
    words: NDArray[np.float64]
    ranks: NDArray[np.int32]


class KeptAnswers:
    """Measurements in a file of JSON, by a hash of what was asked and of the weights; without a file only in memory."""

    def __init__(self, folder: Folder | None, name: str) -> None:
        self._folder, self._name = folder, name
        self._content: dict[str, dict[str, list[float]]] = {}
        if folder is not None and folder.exists(name):
            try:
                self._content = json.loads(folder.read_text(name))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise InputError(f"{folder.path_of(name)} is damaged. Delete it, and run the command again.") from error

    def get(self, key: str, measure: Callable[[], Measured]) -> Measured:
        """Look up what is kept under the key; if nothing is, measure and keep it."""
        if key not in self._content:
            self._content[key] = {part: values.tolist() for part, values in measure()._asdict().items()}
            if self._folder is not None:
                self._folder.write_bytes(self._name, json.dumps(self._content).encode())
        kept = self._content[key]
        return Measured(*(np.array(kept[part], dtype) for part, dtype in zip(Measured._fields, "ddi", strict=True)))


class Measurer:
    """Asks questions of models of one architecture, in one network: the programs are compiled once.

    weights_sha256: hash of the `model.safetensors` of each model that was measured; None where it has no such file.
    """

    def __init__(
        self, questions: Questions, material: Material, strategy: tf.distribute.Strategy, kept: KeptAnswers
    ) -> None:
        self._questions, self._material, self._strategy, self._kept = questions, material, strategy, kept
        self._model: QueriedModel | None = None
        self.weights_sha256: dict[str, str | None] = {}
        asked = (questions.max_length, questions.of_sentences, questions.of_tokens, questions.of_words)
        self._asked = json.dumps(asked).encode()

    def of_models(self) -> dict[str, Measured]:
        measured = {}
        for name, path in self._questions.models.items():
            with transformers_folder(path) as folder:
                files = sorted(Path(find_weights(folder).path).parent.iterdir())
                hashes = {
                    file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                    for file in files
                    if file.suffix in WEIGHTS_SUFFIXES
                }
                self.weights_sha256[name] = hashes.get(SAFE_WEIGHTS_NAME)
                measured[name] = self._measure(folder, load_model, hashes.values())
        return measured

    def of_random_weights(self) -> Measured:
        """Measure the network as it would be before its training."""
        num_ids = len(self._questions.frequencies)
        with transformers_folder(next(iter(self._questions.models.values()))) as folder:
            build = functools.partial(
                build_network, read_config(folder), ModelConfig(), vocabulary_size=num_ids, seed=RANDOM_SEED
            )
            return self._measure(folder, lambda _: build(), ["random"])

    def _measure(self, folder: str, load: Callable[[str], Any], weights: Iterable[str]) -> Measured:
        key = hashlib.sha256(self._asked + Path(str(find_file(folder, "config.json"))).read_bytes())
        key.update("".join(weights).encode())

        def measure() -> Measured:
            with self._strategy.scope():
                network = load(folder)
            if self._model is None:
                gather_before_head(network)
                num_ids = len(self._questions.frequencies)
                self._model = QueriedModel(network, self._strategy, num_ids, self._questions.pad_token_id)
            else:
                self._model.network.set_weights(network.get_weights())
            answer = functools.partial(self._model.answer, lengths=lengths_up_to(self._questions.max_length))
            return measured_of(self._questions, self._material, answer)

        return self._kept.get(key.hexdigest(), measure)


def measured_of(questions: Questions, material: Material, answer: Callable[[Sequence[Query]], Answers]) -> Measured:
    ranks = np.full(len(material.words), NO_TOKEN)
    for query, rank in zip(questions.of_words, answer(questions.of_words).ranks, strict=True):
        ranks[query.item] = rank
    of_tokens, of_sentences = answer(questions.of_tokens), answer(questions.of_sentences)
    return Measured(
        total_by_item(questions.of_sentences, of_sentences.nats, 2 * len(material.pairs)),
        total_by_item(questions.of_tokens, of_tokens.nats, len(material.words)),
        ranks,
    )


def measure_by_frequency(questions: Questions, material: Material) -> Measured:
    """Measure a guess without context: from the frequencies of tokens; of sentences, by their number of tokens."""
    by_token = measured_of(questions, material, functools.partial(by_frequency, frequencies=questions.frequencies))
    num_tokens = total_by_item(questions.of_sentences, np.ones(len(questions.of_sentences)), 2 * len(material.pairs))
    return by_token._replace(sentences=num_tokens)


def by_frequency(queries: Sequence[Query], frequencies: NDArray[np.float64]) -> Answers:
    """Answer as one would who knows how frequent each token is, and nothing of the rest of the row."""
    with np.errstate(divide="ignore"):
        of_ids = -np.log(frequencies)
    num_better = np.searchsorted(np.sort(of_ids), of_ids).astype(np.int32)
    return Answers(
        np.array([of_ids[query.targets].sum() for query in queries]),
        np.array([num_better[query.targets].max() for query in queries], np.int32),
    )
