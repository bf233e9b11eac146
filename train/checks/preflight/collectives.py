"""What the replicas of a slice send each other in a step, counted in the program that goes to the compiler.

The compiler's cost model has no cycles for it. Its time is modelled here as the bytes over what the links of a chip
carry, which is the least it can take: nothing is known of latency, nor of what overlaps with computation.
"""

import math
import re
from collections import Counter

from train.checks.preflight.tpu_compiler import TpuSlice

# How often the bytes of a tensor leave a chip, but for its own part of them: a sum is a scatter and a gather.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
# Bytes a second that all links of a chip send together. v2 and v3: four links of 496 and 656 Gbit/s (Jouppi et al.
# 2020, "A Domain-Specific Supercomputer for Training Deep Neural Networks"); v4: six of 50 GB/s (Jouppi et al. 2023,
# arXiv 2304.01433); v5e, v5p and v6e: 1,600, 4,800 and 3,200 Gbit/s (cloud.google.com/tpu/docs/v5e, v5p and v6e, which
# now write sent and received bytes together, twice as many).
INTERCONNECT_BYTES_PER_SECOND = {"v2": 248e9, "v3": 328e9, "v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 400e9}
# The types come after the last of an operation's attributes, and after what adds up, if it has that.
COLLECTIVE = re.compile(
    r"stablehlo\.(?P<name>all_reduce|reduce_scatter|all_gather)\"?\(.*?"
    r" : \(tensor<(?P<operand>[^>]*)>\) -> tensor<(?P<result>[^>]*)>",
    re.DOTALL,
)
ELEMENT_BITS = re.compile(r"\d+$")


def collective_bytes(stablehlo: str) -> dict[str, int]:
    """Add up the bytes of the whole tensors that go between replicas, by operation, in a module given as text."""
    sizes: Counter[str] = Counter()
    for match in COLLECTIVE.finditer(stablehlo):
        sizes[match["name"]] += max(_num_bytes(match["operand"]), _num_bytes(match["result"]))
    return dict(sizes)


def sent_bytes(collectives: dict[str, int], tpu: TpuSlice) -> float:
    """Compute the bytes that each chip sends, of what `collective_bytes` returns."""
    return sum(PASSES[name] * size for name, size in collectives.items()) * (1 - 1 / tpu.num_chips)


def sending_seconds(collectives: dict[str, int], tpu: TpuSlice) -> float:
    return sent_bytes(collectives, tpu) / INTERCONNECT_BYTES_PER_SECOND[tpu.chip.generation]


def _num_bytes(tensor: str) -> int:
    """Count the bytes of a type, as in `96x768xf32`."""
    *sizes, element = tensor.split("x")
    bits = ELEMENT_BITS.search(element)
    return math.prod(map(int, sizes)) * (int(bits[0]) // 8 if bits else 1)
