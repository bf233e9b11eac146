"""Ask models how probable the right token is at a mask, and how many tokens are more probable."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mlm_common.cli.console import no_progress
from train.runtime.runtime import Runtime
from train.scoring.queries import Answers, Query
from train.tasks.heads import predict_at

TOKENS_PER_BATCH = 8192


class Batch(NamedTuple):
    """Queries of similar length for one replica, with static shapes for each length.

    A slot is one masked token that the model is asked about.

    Attributes:
        ids: int32 (rows, length).
        positions: int32 (slots,), position of each slot's token in the rows laid end to end.
        targets: int32 (slots,), the id that was masked.
        queries: int32 (slots,), number of the query that the slot belongs to; -1 in unused slots.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    targets: NDArray[np.int32]
    queries: NDArray[np.int32]


class QueriedModel:
    """A masked language model on the devices of a runtime; each replica answers the queries of different batches.

    Args:
        network: a masked language model, built by `train.model.build.new_network`.
        runtime: the runtime that the network was built for. Each host answers all queries, so that all hosts have all
            answers.
        num_ids: number of ids of the tokenizer. Further ids, which pad the model's vocabulary, are never answers.
        pad_token_id: the tokenizer's id for padding.
    """

    def __init__(self, network: Any, runtime: Runtime, num_ids: int, pad_token_id: int) -> None:
        self.network, self.runtime = network, runtime
        self.num_ids, self.pad_token_id = num_ids, pad_token_id
        self._answer = runtime.on_replicas(self._answer_batch, jit_compile=False)

    def answer(
        self,
        queries: Sequence[Query],
        lengths: Sequence[int],
        tokens_per_batch: int = TOKENS_PER_BATCH,
        advance: Callable[[int], object] = no_progress,
    ) -> Answers:
        """Answer all queries.

        Args:
            queries: the queries, in any order.
            lengths: lengths to which rows are padded. A program is compiled for each length.
            tokens_per_batch: number of tokens that a replica reads at once.
            advance: called after each batch with the number of queries in it.
        """
        nats, ranks = np.zeros(len(queries)), np.zeros(len(queries), np.int32)
        batches = list(_batches(queries, lengths, tokens_per_batch, self.pad_token_id))
        num_replicas = self.runtime.num_local_replicas
        while batches:
            # Take one batch per replica, all of one length; if there are too few, the last replicas repeat a batch.
            shape = batches[0].ids.shape
            first_batches = enumerate(batches[:num_replicas])
            number = next((index for index, batch in first_batches if batch.ids.shape != shape), num_replicas)
            current, batches = batches[:number], batches[number:]
            per_replica = current + current[-1:] * (num_replicas - len(current))
            columns = zip(*(batch[:3] for batch in per_replica), strict=True)
            answers = self._answer(*(self.runtime.deal(values.__getitem__) for values in columns))
            answers = (values[: len(current)] for values in answers)
            for batch, batch_nats, batch_ranks in zip(current, *answers, strict=True):
                is_used = batch.queries >= 0
                np.add.at(nats, batch.queries[is_used], np.asarray(batch_nats)[is_used])
                np.maximum.at(ranks, batch.queries[is_used], np.asarray(batch_ranks)[is_used])
                advance(len(np.unique(batch.queries[is_used])))
        return Answers(nats, ranks)

    def _answer_batch(
        self, ids: tf.Tensor, positions: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:  # (rows, length), (slots,), (slots,)
        """Return for each slot the nats and the rank of its target."""
        attended = tf.cast(ids != self.pad_token_id, tf.int32)
        inputs = {"input_ids": ids, "attention_mask": attended}
        outputs, _ = predict_at(self.network, inputs, positions, training=False)
        logits = tf.cast(outputs[0][0], tf.float32)[:, : self.num_ids]  # (slots, ids)
        target_logits = tf.gather(logits, targets, batch_dims=1)  # (slots,)
        num_better = tf.reduce_sum(tf.cast(logits > target_logits[:, tf.newaxis], tf.int32), axis=-1)
        return tf.reduce_logsumexp(logits, axis=-1) - target_logits, num_better


def _batches(
    queries: Sequence[Query], lengths: Sequence[int], tokens_per_batch: int, pad_token_id: int
) -> Iterator[Batch]:
    """Divide the queries into batches, the shortest first; fill the last batch of a length with rows of padding."""
    order = sorted(range(len(queries)), key=lambda number: len(queries[number].ids))
    most_targets = max((len(query.targets) for query in queries), default=1)
    num_placed = 0
    while num_placed < len(order):
        length = lengths[bisect.bisect_left(lengths, len(queries[order[num_placed]].ids))]
        num_rows = max(1, tokens_per_batch // length)
        num_slots = max(min(2, most_targets) * num_rows, most_targets)  # few words have more than two tokens
        ids = np.full((num_rows, length), pad_token_id, np.int32)
        slots = np.zeros((3, num_slots), np.int32)
        slots[2] = -1
        row = slot = 0
        while row < num_rows and num_placed < len(order):
            query = queries[order[num_placed]]
            num_targets = len(query.targets)
            if len(query.ids) > length or slot + num_targets > num_slots:
                break
            ids[row, : len(query.ids)] = query.ids
            query_slots = slice(slot, slot + num_targets)
            slots[0, query_slots] = row * length + np.asarray(query.positions)
            slots[1, query_slots], slots[2, query_slots] = query.targets, order[num_placed]
            row, slot, num_placed = row + 1, slot + num_targets, num_placed + 1
        yield Batch(ids, *slots)
