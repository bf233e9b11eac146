"""Compute the cost of a TPU program from its text: the cycles of its operations, and the bytes sent between replicas.

libtpu annotates each operation with the `estimated_cycles` of its cost model, and with the name of the TensorFlow
operation that it comes from. The cycles of a fusion are attributed to the operation whose result it writes. There are
no estimates for copies that run in parallel with computation, for lookups and sums in tables (gather, scatter), or for
communication between replicas. Branches marked as rarely taken are not counted.

The bytes that replicas send each other are counted in the StableHLO that the compiler reads. The time to send these
bytes is estimated as their number divided by the bandwidth of a chip's links. This is a lower bound that ignores
latency; how much of the time overlaps with computation is unknown.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from train.checks.preflight.tpu_compiler import TpuSlice

# The kind of an operation is the first kind whose pattern occurs in the operation's name.
KINDS = {
    "sum over replicas": r"XlaAllReduce|all-reduce|all_reduce",
    "optimizer": r"(^|/)optimizer(_#)?/|AdamW|AdamWeightDecay|global_norm",
    "masks": r"(^|/)(masks|row_keys)(_#)?/",
    "layer norm": r"(LayerNorm|layer_norm|NoNorm|(attn_|mlp_|final_|/)norm)(_#)?(/|$)|moments|batchnorm",
    "head and loss": r"lm_head|/mlm|predictions|vocab_|generator|/(head|decoder)/|(^|/)loss(_#)?/|CrossEntropy|ArgMax",
    "dropout": r"dropout|^(while/)?[Ss]tateless",
    "attention": r"attention|attn|/self/",
    "feed-forward": r"intermediate|/output|/mlp/|ffn|lin1|lin2|feed_forward|bottleneck",
    "embeddings": r"embeddings|Gather|UnsortedSegmentSum|AddN|wte|wpe",
    "copies": r"^copy|^bitcast|^transpose|^slice|^convert|^broadcast",
}
OTHER = "other"
# Calls that take no time: they name parts of memory, or split a 64-bit integer.
FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer|Sharding|X64\w*)"')
NOT_ESTIMATED = ("fusion", "gather", "scatter", "custom-call", "sort", "rng")

COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) ?\b(?P<opcode>[a-z][a-z0-9-]*)\(")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
# The text does not say how often a loop repeats. A loop that counts up from 0 compares its counter with the number of
# repetitions, or with the largest possible number.
CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
COUNTS_UP = re.compile(r" compare\(.*%([\w.-]+)\), direction=LT")
INT_CONSTANT = re.compile(r"%([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")
RARELY_TAKEN = re.compile(r'op_name="[^"]*/rarely/')  # operations in the scope `RARELY`
FUSED = re.compile(r"\bcalls=%?([\w.-]+)")

# The number of times that a chip sends a tensor. Each time it sends all but one of `num_chips` equal parts, see
# `sent_bytes`. A sum is a scatter followed by a gather.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
# Bytes per second that all links of a chip send together. v2 and v3: four links of 496 and 656 Gbit/s (Jouppi et al.
# 2020, "A Domain-Specific Supercomputer for Training Deep Neural Networks"); v4: six of 50 GB/s (Jouppi et al. 2023,
# arXiv 2304.01433); v5e, v5p and v6e: 1,600, 4,800 and 3,200 Gbit/s (cloud.google.com/tpu/docs/v5e, v5p and v6e; these
# pages now add sent and received bytes, which doubles the numbers).
INTERCONNECT_BYTES_PER_SECOND = {"v2": 248e9, "v3": 328e9, "v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 400e9}
# In the text, the types come after the operation's attributes and, for a sum, after the function that adds.
COLLECTIVE = re.compile(
    r"stablehlo\.(?P<name>all_reduce|reduce_scatter|all_gather|all_to_all)\"?\(.*?"
    r" : \(tensor<(?P<operand>[^>]*)>\) -> tensor<(?P<result>[^>]*)>",
    re.DOTALL,
)
ELEMENT_BITS = re.compile(r"\d+$")


@dataclass(frozen=True)
class Operation:
    """All operations of one name, added up over layers and repetitions of loops."""

    name: str
    kind: str
    num_cycles: int


@dataclass(frozen=True)
class StepCosts:
    """Estimated cycles of one run of a program.

    Attributes:
        operations: the operations, most expensive first.
        num_not_estimated: number of operations that take time but have no estimate.
        num_loops_of_unknown_length: number of loops whose length cannot be read from the text; their bodies count once.
    """

    operations: tuple[Operation, ...]
    num_not_estimated: int
    num_loops_of_unknown_length: int

    @property
    def num_cycles(self) -> int:
        return sum(operation.num_cycles for operation in self.operations)

    @property
    def cycles_by_kind(self) -> dict[str, int]:
        cycles: Counter[str] = Counter()
        for operation in self.operations:
            cycles[operation.kind] += operation.num_cycles
        return dict(cycles.most_common())


def step_costs(hlo: str) -> StepCosts:
    """Add up the costs of a compiled module, given as text. The body of a loop counts once per repetition."""
    computations, entry = _computations(hlo)
    cycles: Counter[str] = Counter()
    num_not_estimated = num_unknown = 0
    for line, num_times in _lines_run(computations, entry, 1):
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            continue
        opcode, estimate = instruction["opcode"], CYCLES.search(line)
        if opcode == "while" and _num_repetitions(line, computations) is None:
            num_unknown += 1
        if estimate:
            cycles[_name(line, instruction["name"], computations)] += num_times * int(estimate[1])
        elif opcode in NOT_ESTIMATED and not FREE_CALLS.search(line):
            num_not_estimated += 1
    operations = (Operation(name, kind_of(name), num_cycles) for name, num_cycles in cycles.most_common())
    return StepCosts(tuple(operations), num_not_estimated, num_unknown)


def kind_of(name: str) -> str:
    """Return the kind of the operation with this name: a key of `KINDS`, or `OTHER`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation of a module, by name, and the name of the module's entry computation."""
    computations: dict[str, list[str]] = {}
    entry = ""
    lines: list[str] = []
    for line in hlo.splitlines():
        header = COMPUTATION.match(line)
        if header:
            lines = computations[header["name"]] = []
            entry = header["name"] if header["entry"] else entry
        else:
            lines.append(line)
    if not entry:
        raise ValueError("a compiled HLO module must have a line that starts with ENTRY")
    return computations, entry


def _lines_run(computations: dict[str, list[str]], name: str, num_times: int) -> Iterator[tuple[str, int]]:
    """Yield the lines of a computation and of all that it calls, each with the number of times that the line runs."""
    for line in computations.get(name, ()):
        yield line, num_times
        instruction = INSTRUCTION.match(line)
        if instruction and instruction["opcode"] in ("while", "call", "conditional", "async-start"):
            num_repetitions = _num_repetitions(line, computations) or 1
            for called in CALLED.findall(line):
                if any(map(RARELY_TAKEN.search, computations.get(called, ()))):
                    continue
                yield from _lines_run(computations, called, num_times * num_repetitions)


def _num_repetitions(line: str, computations: dict[str, list[str]]) -> int | None:
    """Return the maximum number of repetitions of a loop, if it counts from 0 to a constant; None otherwise."""
    condition = CONDITION.search(line)
    lines = computations.get(condition[1], []) if condition else []
    constants = {match[1]: int(match[2]) for match in map(INT_CONSTANT.search, lines) if match}
    limits = {match[1] for match in map(COUNTS_UP.search, lines) if match and match[1] in constants}
    return constants[limits.pop()] if len(limits) == 1 else None


def _name(line: str, hlo_name: str, computations: dict[str, list[str]]) -> str:
    """Return the TensorFlow name of an operation, with `#` in place of each number in it.

    Such a number is the index of a layer, or distinguishes operations of the same name.

    A fusion without a TensorFlow name gets the last TensorFlow name among its operations, or else its HLO name.
    """
    match = OP_NAME.search(line)
    fused = FUSED.search(line)
    if match is None and fused:
        matches = [OP_NAME.search(fused_line) for fused_line in computations.get(fused[1], ())]
        match = next((fused_match for fused_match in reversed(matches) if fused_match), None)
    return re.sub(r"\d+", "#", match[1] if match else hlo_name.rstrip("0123456789."))


def collective_bytes(stablehlo: str) -> dict[str, int]:
    """Return the total size in bytes of the tensors that replicas exchange, by operation, in a module given as text."""
    sizes: Counter[str] = Counter()
    for match in COLLECTIVE.finditer(stablehlo):
        sizes[match["name"]] += max(_num_bytes(match["operand"]), _num_bytes(match["result"]))
    return dict(sizes)


def sent_bytes(collectives: dict[str, int], tpu: TpuSlice) -> float:
    """Return the number of bytes that each chip sends, given the result of `collective_bytes`."""
    return sum(PASSES[name] * size for name, size in collectives.items()) * (1 - 1 / tpu.num_chips)


def _num_bytes(tensor: str) -> int:
    """Return the number of bytes of a tensor of this type, such as `96x768xf32`."""
    *sizes, element = tensor.split("x")
    bits = ELEMENT_BITS.search(element)
    return math.prod(map(int, sizes)) * (int(bits[0]) // 8 if bits else 1)
