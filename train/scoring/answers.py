"""What a model answers: how probable it finds the tokens that were masked, and how many it finds more probable."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mlm_common.storage import local_or_hub
from train.config.learning import ModelConfig
from train.model.build import build_network
from train.model.from_pretrained import load_model
from train.model.pretrained_files import read_config
from train.scoring.queries import Query
from train.tasks.masked_lm_head import gather_before_head, predicting_at

SHORTEST_LENGTH = 16
TOKENS_PER_BATCH = 8192
RANDOM_SEED = 0


class Answers(NamedTuple):
    """What was answered.

    nats: float64 (queries,), minus the logarithm of the probability of each query's targets.
    ranks: int32 (queries,), how many ids are more probable than the target, of the worst target of each query.
    """

    nats: NDArray[np.float64]
    ranks: NDArray[np.int32]


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


class Model:
    """A masked language model on the devices of a strategy.

    Args:
        folder: with an export, or a Hub id.
        strategy: each replica answers batches of its own.
        num_ids: of the tokenizer; what the vocabulary has beyond, as padding, is no answer.
        pad_token_id: of the tokenizer.
        random_weights: the network as it would be before its training.
    """

    def __init__(
        self,
        folder: str,
        strategy: tf.distribute.Strategy,
        num_ids: int,
        pad_token_id: int,
        *,
        random_weights: bool = False,
    ) -> None:
        self.strategy, self.num_ids, self.pad_token_id = strategy, num_ids, pad_token_id
        with strategy.scope(), local_or_hub(folder) as local_folder:
            if random_weights:
                config = read_config(local_folder)
                self.network = build_network(config, ModelConfig(), vocabulary_size=num_ids, seed=RANDOM_SEED)
            else:
                self.network = load_model(local_folder)
        gather_before_head(self.network)

    def answer(self, queries: Sequence[Query], max_length: int, tokens_per_batch: int = TOKENS_PER_BATCH) -> Answers:
        """Answer all queries; their rows have at most `max_length` tokens."""
        nats, ranks = np.zeros(len(queries)), np.zeros(len(queries), np.int32)
        batches = list(_batches(queries, max_length, tokens_per_batch, self.pad_token_id))
        num_replicas = self.strategy.num_replicas_in_sync
        while batches:
            # Batches of one length at once; the last replicas may repeat one.
            shape = batches[0].ids.shape
            number = next((n for n, one in enumerate(batches[:num_replicas]) if one.ids.shape != shape), num_replicas)
            now, batches = batches[:number], batches[number:]
            dealt = now + now[-1:] * (num_replicas - len(now))
            inputs = [
                self.strategy.experimental_distribute_values_from_function(
                    lambda context, values=values: tf.constant(values[context.replica_id_in_sync_group])
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


def _batches(queries: Sequence[Query], max_length: int, tokens_per_batch: int, pad_token_id: int) -> Iterator[Batch]:
    """Cut the queries into batches, the shortest first; the last of a length is filled up with rows of padding."""
    order = sorted(range(len(queries)), key=lambda number: len(queries[number].ids))
    at, length = 0, SHORTEST_LENGTH
    while at < len(order):
        while length < len(queries[order[at]].ids):
            length = min(2 * length, max_length)
        num_rows = max(1, tokens_per_batch // length)
        num_slots = max(2 * num_rows, length)
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
