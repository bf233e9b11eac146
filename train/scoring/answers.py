"""What models answer: how probable each finds the tokens that were masked, and how many it finds more probable."""

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
    """A masked language model on the devices of a runtime; each replica answers other batches.

    Args:
        network: a masked language model, of `train.model.build.new_network`.
        runtime: that it was built for. Each host answers all queries, so that all have the answers.
        num_ids: of the tokenizer; what the vocabulary has beyond, as padding, is no answer.
        pad_token_id: of the tokenizer.
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
        """Answer all queries, their rows padded to the next of the lengths; a program is compiled for each.

        `advance` is called with numbers of queries as they are answered.
        """
        nats, ranks = np.zeros(len(queries)), np.zeros(len(queries), np.int32)
        batches = list(_batches(queries, lengths, tokens_per_batch, self.pad_token_id))
        num_replicas = self.runtime.num_local_replicas
        while batches:
            # Batches of one length at once; the last replicas may repeat one.
            shape = batches[0].ids.shape
            number = next((n for n, one in enumerate(batches[:num_replicas]) if one.ids.shape != shape), num_replicas)
            now, batches = batches[:number], batches[number:]
            dealt = now + now[-1:] * (num_replicas - len(now))
            inputs = [self.runtime.deal(values.__getitem__) for values in zip(*(one[:3] for one in dealt), strict=True)]
            answered = self._answer(*inputs)
            for batch, its_nats, its_ranks in zip(now, *(values[: len(now)] for values in answered), strict=True):
                is_used = batch.queries >= 0
                np.add.at(nats, batch.queries[is_used], np.asarray(its_nats)[is_used])
                np.maximum.at(ranks, batch.queries[is_used], np.asarray(its_ranks)[is_used])
                advance(len(np.unique(batch.queries[is_used])))
        return Answers(nats, ranks)

    def _answer_batch(
        self, ids: tf.Tensor, positions: tf.Tensor, targets: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:  # (rows, length), (slots,), (slots,)
        attended = tf.cast(ids != self.pad_token_id, tf.int32)
        inputs = {"input_ids": ids, "attention_mask": attended}
        outputs, _ = predict_at(self.network, inputs, positions, training=False)
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
