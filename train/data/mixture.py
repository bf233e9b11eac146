"""The order in which the sources of a mixture take turns: a pure function of the weights, found at any position.

The weights form a binary tree (Huffman's). At each node the rows before position n are divided by rounding: of n rows,
floor(n * left / (left + right) + 1/2) go to the left. So the source of a position, its place in the source, and the
reverse follow by arithmetic, without state, whatever the batch, the hosts and the step at which a run resumes.

Each rounding is off by at most 1/2, and a source inherits the error of a node above it in proportion to its part of
that node. In Huffman's tree these parts fall at least as fast as 1/1, 1/2, 1/3, 1/5, 1/8 …, so the first n positions
hold n * weight rows of a source, give or take 1/2 for two sources and 1.7 for any number. A range of positions is the
difference of two such counts: off by at most 1 for two sources, 3.4 for any number.
"""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# Weights are whole numbers up to this sum, so that products of two of them fit into 64 bits.
MAX_SUM = 2**30


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
