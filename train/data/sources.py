"""The sources of a mixture: their folders and weights, and the order in which they take turns.

The order is a pure function of the weights, found at any position: they form a binary tree (Huffman's). At each node
the rows before position n are divided by rounding: of n rows, floor(n * left / (left + right) + 1/2) go to the left. So
the source of a position, its place in the source, and the reverse follow by arithmetic, without state, whatever the
batch, the hosts and the step at which a run resumes.

Each rounding is off by at most 1/2, and a source inherits the error of a node above it in proportion to its part of
that node. In Huffman's tree these parts fall at least as fast as 1/1, 1/2, 1/3, 1/5, 1/8 …, so the first n positions
hold n * weight rows of a source, give or take 1/2 for two sources and 1.7 for any number. A range of positions is the
difference of two such counts: off by at most 1 for two sources, 3.4 for any number. With three or more
sources, at most 1 is not always possible: every order of the weights 11 : 7 : 5 exceeds it within eleven rows.
"""

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.mixture import (
    HUB_PREFIX,
    MIXTURE_NAME,
    named_folders,
    named_weights,
    read_mixture,
    sampling_weights,
)
from mlm_common.storage import open_folder
from tfrecord_prep.manifest import ShardSet
from train.config.learning import DataConfig

# By which fractions may miss a sum of 1, as 0.333 three times does.
MAX_ROUNDING = 0.005
# Weights are whole numbers up to this sum, so that products of two of them fit into 64 bits.
MAX_SUM = 2**30


@dataclass(frozen=True)
class Source:
    """A source of a mixture: its shards, and its weight relative to the others' (see `Interleaving`).

    first_row: rows of it that earlier phases used.
    """

    name: str
    train: ShardSet
    evaluation: ShardSet | None
    weight: int
    first_row: int = 0

    @property
    def identity(self) -> str:
        """What the rows are; without checksums also the name."""
        return "\n".join([*shard_identities(self.train), *([] if self.train.manifest else [self.name])])

    @property
    def num_tokens(self) -> int:
        return num_tokens_of(self.train)


def source_folders(
    text: str, flag: str, split: Literal["train", "validation"], hub_commits: dict[str, str]
) -> tuple[dict[str, str], dict[str, float | None]]:
    """Find the folders of a split, by source, and the weights of a prepared mixture; the name of a single one is "".

    Those on the Hub are fetched; from which commits, is added to `hub_commits`.
    """
    if not text:
        return {}, {}
    folders = named_folders(text, flag)
    if any(path.startswith(HUB_PREFIX) for path in folders.values()):
        from tfrecord_prep.hub_shards import HubShards  # for such an address alone

        hub = HubShards(hub_commits)
        folders = {name: hub.local_folder(path, split) for name, path in folders.items()}
    mixture = read_mixture(folders[""]) if "" in folders else None
    if mixture is None:
        return folders, {}
    named = {name: getattr(one, split) for name, one in mixture.items()}
    found = {name: open_folder(folders[""]).path_of(folder) for name, folder in named.items() if folder is not None}
    require(bool(found), f"must have a folder of {split} shards", flag, folders[""])
    return found, {name: one.weight for name, one in mixture.items()}


def source_weights(
    config: DataConfig, shards: Mapping[str, ShardSet], prepared: Mapping[str, float | None]
) -> tuple[dict[str, float], int | None]:
    """Compute the weights of the sources, by the flags, the mixture's file or their rows; and the rows of an epoch."""
    for flag, pairs in (("--source-weights", config.source_weights), ("--source-passes", config.source_passes)):
        if not pairs:
            continue
        given = named_weights(pairs, flag, shards)
        if flag == "--source-passes":
            rows = {name: given[name] * one.num_rows for name, one in shards.items()}
            return rows, max(1, round(sum(rows.values())))
        total = sum(given.values())
        require(abs(total - 1) <= MAX_ROUNDING, "must have a sum of 1", flag, f"{total:g}")
        return given, None
    if config.sampling_alpha is not None:
        return sampling_weights({name: num_tokens_of(one) for name, one in shards.items()}, config.sampling_alpha), None
    weights = {name: prepared.get(name) for name in shards}
    missing = [name for name, weight in weights.items() if weight is None]
    if 0 < len(missing) < len(weights):
        raise InputError(
            f"{MIXTURE_NAME} of --train-dataset must give each source a weight, or none; {missing[0]} has none. Pass "
            "--source-weights or --sampling-alpha."
        )
    return {name: weights[name] or one.num_rows for name, one in shards.items()}, None


def num_tokens_of(shards: ShardSet) -> int:
    """Count the tokens, without padding; rows, where no manifest says them."""
    return shards.manifest.totals.num_tokens if shards.manifest else shards.num_rows


def shard_identities(shards: ShardSet) -> list[str]:
    """List what identifies these shards: names, and checksums where a manifest has them."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]


@dataclass(frozen=True)
class Branch:
    """A node of the tree, as seen from below: the weights of the node and of its parent, and whether it is the left."""

    weight: int
    parent_weight: int
    is_left: bool


@dataclass(frozen=True)
class Interleaving:
    """The order of sources with these weights: whole numbers above 0, of a sum of at most MAX_SUM."""

    weights: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Interleaving":
        """Make it from any weights above 0; whole numbers stay as they are, where their sum allows."""
        total = sum(weights)
        if all(weight == int(weight) for weight in weights) and total <= MAX_SUM:
            return cls(tuple(map(int, weights)))
        scale = (MAX_SUM - len(weights)) / total
        return cls(tuple(max(1, round(weight * scale)) for weight in weights))

    @functools.cached_property
    def branches(self) -> tuple[tuple[Branch, ...], ...]:
        """The branches from each source up to the root; none where it is the only one."""
        paths: list[list[Branch]] = [[] for _ in self.weights]
        heap = [(weight, index, [index]) for index, weight in enumerate(self.weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            right, left = heapq.heappop(heap), heapq.heappop(heap)
            weight = left[0] + right[0]
            for (part, _, members), is_left in ((left, True), (right, False)):
                for member in members:
                    paths[member].append(Branch(part, weight, is_left))
            heapq.heappush(heap, (weight, left[1], left[2] + right[2]))
        return tuple(map(tuple, paths))

    def num_rows(self, source: int, position: int) -> int:
        """Count the rows of a source before a position."""
        for branch in reversed(self.branches[source]):
            other = branch.parent_weight - branch.weight
            left = branch.weight if branch.is_left else other
            num_left = (2 * position * left + branch.parent_weight) // (2 * branch.parent_weight)
            position = num_left if branch.is_left else position - num_left
        return position

    def position(self, source: int, row: int) -> int:
        """Find the position of a source's row, both counted from 0."""
        for branch in self.branches[source]:
            row = (branch.parent_weight * (2 * row + 1) - branch.is_left) // (2 * branch.weight)
        return row
