"""The sources of a mixture: their folders, their weights, and the order in which their rows alternate.

The order depends only on the weights, and can be computed at any position. The weights form a binary (Huffman) tree. At
each node the rows before position n are divided by rounding: of n rows, floor(n * left / (left + right) + 1/2) go to
the left. So no state is needed to compute which row of which source is at a position, or at which position a row is.
The results do not depend on the batch, the hosts, or the step at which a run resumes.

Each rounding has an error of at most 1/2, and a source inherits the error of a node above it in proportion to its share
of that node. In a Huffman tree these shares fall at least as fast as 1/1, 1/2, 1/3, 1/5, 1/8 …. So the first n
positions contain n * weight rows of a source, with an error of at most 1/2 for two sources and 1.7 for any number of
sources. The number of rows in a range of positions is the difference of two such counts, so its error is at most 1 for
two sources and 3.4 for any number. With three or more sources, no order keeps the error of all ranges at 1 or less:
with the weights 11 : 7 : 5, every order exceeds it within eleven rows.
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

# The sum of the given fractions may differ from 1 by this much, as in 3 * 0.333.
MAX_ROUNDING = 0.005
# Weights are integers with at most this sum, so that the product of two weights fits into 64 bits.
MAX_SUM = 2**30


@dataclass(frozen=True)
class Source:
    """A source of a mixture.

    Attributes:
        name: name of the source.
        train: training shards.
        evaluation: validation shards, if there are any.
        weight: weight relative to the other sources, see `Interleaving`.
        first_row: number of rows that earlier phases used.
    """

    name: str
    train: ShardSet
    evaluation: ShardSet | None
    weight: int
    first_row: int = 0

    @property
    def identity(self) -> str:
        """Text that identifies the rows. If the shards have no checksums, it includes the source's name."""
        return "\n".join([*shard_identities(self.train), *([] if self.train.manifest else [self.name])])

    @property
    def num_tokens(self) -> int:
        return num_tokens_of(self.train)


def source_folders(
    text: str, flag: str, split: Literal["train", "validation"], hub_commits: dict[str, str]
) -> tuple[dict[str, str], dict[str, float | None]]:
    """Return the folders of a split, and the weights of a prepared mixture, both by source.

    Shards on the Hub are downloaded, and their commits are added to `hub_commits`. A single data set has the name "".
    """
    if not text:
        return {}, {}
    folders = named_folders(text, flag)
    if any(path.startswith(HUB_PREFIX) for path in folders.values()):
        from tfrecord_prep.hub_shards import HubShards  # only needed for shards on the Hub

        hub = HubShards(hub_commits)
        folders = {name: hub.local_folder(path, split) for name, path in folders.items()}
    mixture = read_mixture(folders[""]) if "" in folders else None
    if mixture is None:
        return folders, {}
    names = {name: getattr(source, split) for name, source in mixture.items()}
    paths = {name: open_folder(folders[""]).path_of(folder) for name, folder in names.items() if folder is not None}
    require(bool(paths), f"must have a folder of {split} shards", flag, folders[""])
    return paths, {name: source.weight for name, source in mixture.items()}


def source_weights(
    config: DataConfig, shards: Mapping[str, ShardSet], prepared: Mapping[str, float | None]
) -> tuple[dict[str, float], int | None]:
    """Return the weights of the sources, from the flags, the mixture's file, or their numbers of rows.

    Returns:
        {name: weight}, and the number of rows of an epoch if `--source-passes` sets it, else None.
    """
    for flag, pairs in (("--source-weights", config.source_weights), ("--source-passes", config.source_passes)):
        if not pairs:
            continue
        given = named_weights(pairs, flag, shards)
        if flag == "--source-passes":
            rows = {name: given[name] * shard_set.num_rows for name, shard_set in shards.items()}
            return rows, max(1, round(sum(rows.values())))
        total = sum(given.values())
        require(abs(total - 1) <= MAX_ROUNDING, "must have a sum of 1", flag, f"{total:g}")
        return given, None
    if config.sampling_alpha is not None:
        num_tokens = {name: num_tokens_of(shard_set) for name, shard_set in shards.items()}
        return sampling_weights(num_tokens, config.sampling_alpha), None
    weights = {name: prepared.get(name) for name in shards}
    missing = [name for name, weight in weights.items() if weight is None]
    if 0 < len(missing) < len(weights):
        raise InputError(
            f"{MIXTURE_NAME} of --train-dataset must give a weight to every source or to none; {missing[0]} has none. "
            "Pass --source-weights or --sampling-alpha."
        )
    return {name: weights[name] or shard_set.num_rows for name, shard_set in shards.items()}, None


def num_tokens_of(shards: ShardSet) -> int:
    """Return the number of tokens without padding; without a manifest, the number of rows."""
    return shards.manifest.totals.num_tokens if shards.manifest else shards.num_rows


def shard_identities(shards: ShardSet) -> list[str]:
    """Identify each shard: its name, and its checksum if there is a manifest."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]


@dataclass(frozen=True)
class Branch:
    """A node of the tree with its link to the parent.

    Attributes:
        weight: weight of the node.
        parent_weight: weight of the parent.
        is_left: the node is the left child of its parent.
    """

    weight: int
    parent_weight: int
    is_left: bool


@dataclass(frozen=True)
class Interleaving:
    """The order in which the rows of several sources alternate.

    Attributes:
        weights: integers above 0, with a sum of at most MAX_SUM.
    """

    weights: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Interleaving":
        """Create an order from any weights above 0. Integers are not changed unless their sum is too large."""
        total = sum(weights)
        if all(weight == int(weight) for weight in weights) and total <= MAX_SUM:
            return cls(tuple(map(int, weights)))
        scale = (MAX_SUM - len(weights)) / total
        return cls(tuple(max(1, round(weight * scale)) for weight in weights))

    @functools.cached_property
    def branches(self) -> tuple[tuple[Branch, ...], ...]:
        """For each source the branches from its leaf up to the root; empty if there is only one source."""
        paths: list[list[Branch]] = [[] for _ in self.weights]
        heap = [(weight, index, [index]) for index, weight in enumerate(self.weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            right, left = heapq.heappop(heap), heapq.heappop(heap)
            weight = left[0] + right[0]
            for (child_weight, _, members), is_left in ((left, True), (right, False)):
                for member in members:
                    paths[member].append(Branch(child_weight, weight, is_left))
            heapq.heappush(heap, (weight, left[1], left[2] + right[2]))
        return tuple(map(tuple, paths))

    def num_rows(self, source: int, position: int) -> int:
        """Return the number of rows of a source before a position."""
        for branch in reversed(self.branches[source]):
            other = branch.parent_weight - branch.weight
            left = branch.weight if branch.is_left else other
            num_left = (2 * position * left + branch.parent_weight) // (2 * branch.parent_weight)
            position = num_left if branch.is_left else position - num_left
        return position

    def position(self, source: int, row: int) -> int:
        """Return the position of a source's row, both counted from 0."""
        for branch in self.branches[source]:
            row = (branch.parent_weight * (2 * row + 1) - branch.is_left) // (2 * branch.weight)
        return row
