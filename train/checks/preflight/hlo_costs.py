"""What a TPU program costs, by its text: cycles of the compiled HLO by kind of layer, and bytes between replicas.

libtpu writes beside each operation the `estimated_cycles` of its cost model, and the name of the TensorFlow operation
that it comes from. Operations that are fused count for the one whose result is written. Not estimated are copies that
run during the computation, lookups and sums in tables (gather, scatter), and what goes between replicas. Not counted
are branches named as hardly ever taken.

What the replicas send each other is counted in the StableHLO that goes to the compiler. Its time is modelled as the
bytes over what the links of a chip carry, which is the least it can take: nothing is known of latency, nor of what
overlaps with computation.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from train.checks.preflight.tpu_compiler import TpuSlice

# The first pattern that is found in an operation's name says what it belongs to.
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
# Names for parts of memory, and a 64-bit integer taken apart.
FREE_CALLS = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer|Sharding|X64\w*)"')
NOT_ESTIMATED = ("fusion", "gather", "scatter", "custom-call", "sort", "rng")

COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) ?\b(?P<opcode>[a-z][a-z0-9-]*)\(")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
# libtpu drops the turns of a loop it knows; a loop that counts from 0 compares with their number, or the most of them.
CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
COUNTS_UP = re.compile(r" compare\(.*%([\w.-]+)\), direction=LT")
NUM_TURNS = re.compile(r"%([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")
RARELY_TAKEN = re.compile(r'op_name="[^"]*/rarely/')  # the scope `RARELY`
FUSED = re.compile(r"\bcalls=%?([\w.-]+)")

# How often the bytes of a tensor leave a chip, but for its own part of them: a sum is a scatter and a gather.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
# Bytes a second that all links of a chip send together. v2 and v3: four links of 496 and 656 Gbit/s (Jouppi et al.
# 2020, "A Domain-Specific Supercomputer for Training Deep Neural Networks"); v4: six of 50 GB/s (Jouppi et al. 2023,
# arXiv 2304.01433); v5e, v5p and v6e: 1,600, 4,800 and 3,200 Gbit/s (cloud.google.com/tpu/docs/v5e, v5p and v6e, which
# now write sent and received bytes together, twice as many).
INTERCONNECT_BYTES_PER_SECOND = {"v2": 248e9, "v3": 328e9, "v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 400e9}
# The types come after the last of an operation's attributes, and after what adds up, if it has that.
COLLECTIVE = re.compile(
    r"stablehlo\.(?P<name>all_reduce|reduce_scatter|all_gather|all_to_all)\"?\(.*?"
    r" : \(tensor<(?P<operand>[^>]*)>\) -> tensor<(?P<result>[^>]*)>",
    re.DOTALL,
)
ELEMENT_BITS = re.compile(r"\d+$")


@dataclass(frozen=True)
class Operation:
    """Operations of one name, over all layers and turns of loops."""

    name: str
    kind: str
    num_cycles: int


@dataclass(frozen=True)
class StepCosts:
    """Modelled cycles of one run of a program.

    operations: most expensive first.
    num_not_estimated: operations that take time and have no estimate.
    num_loops_of_unknown_length: loops whose turns cannot be told from the text; they count as one.
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
    """Add up the costs of a compiled module, given as text; the body of a loop counts once for each of its turns."""
    computations, entry = _computations(hlo)
    cycles: Counter[str] = Counter()
    num_not_estimated = num_unknown = 0
    for line, num_times in _lines_run(computations, entry, 1):
        instruction = INSTRUCTION.match(line)
        if instruction is None:
            continue
        opcode, estimate = instruction["opcode"], CYCLES.search(line)
        if opcode == "while" and _num_turns(line, computations) is None:
            num_unknown += 1
        if estimate:
            cycles[_name(line, instruction["name"], computations)] += num_times * int(estimate[1])
        elif opcode in NOT_ESTIMATED and not FREE_CALLS.search(line):
            num_not_estimated += 1
    operations = (Operation(name, kind_of(name), num_cycles) for name, num_cycles in cycles.most_common())
    return StepCosts(tuple(operations), num_not_estimated, num_unknown)


def kind_of(name: str) -> str:
    """Find the kind of layer that an operation of this name belongs to, a key of `KINDS` or `OTHER`."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Split a module into the lines of each computation by its name, and the name of the one that is run."""
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
        raise ValueError("a compiled HLO module has a line that begins with ENTRY")
    return computations, entry


def _lines_run(computations: dict[str, list[str]], name: str, num_times: int) -> Iterator[tuple[str, int]]:
    """Yield the lines of a computation, and of those that it runs, with how often each is run."""
    for line in computations.get(name, ()):
        yield line, num_times
        instruction = INSTRUCTION.match(line)
        if instruction and instruction["opcode"] in ("while", "call", "conditional", "async-start"):
            num_turns = _num_turns(line, computations) or 1
            for called in CALLED.findall(line):
                if any(map(RARELY_TAKEN.search, computations.get(called, ()))):
                    continue
                yield from _lines_run(computations, called, num_times * num_turns)


def _num_turns(line: str, computations: dict[str, list[str]]) -> int | None:
    """Find the turns of a loop that counts from 0 to a constant, or at most to it; None for another, or no loop."""
    condition = CONDITION.search(line)
    lines = computations.get(condition[1], []) if condition else []
    constants = {found[1]: int(found[2]) for found in map(NUM_TURNS.search, lines) if found}
    limits = {found[1] for found in map(COUNTS_UP.search, lines) if found and found[1] in constants}
    return constants[limits.pop()] if len(limits) == 1 else None


def _name(line: str, own_name: str, computations: dict[str, list[str]]) -> str:
    """Find the TensorFlow name behind an operation, numbers (of layers, of repeated names) as `#`.

    A fusion without one has that of the last named operation in it; failing that, its HLO name.
    """
    found = OP_NAME.search(line)
    fused = FUSED.search(line)
    if found is None and fused:
        names = [OP_NAME.search(inner) for inner in computations.get(fused[1], ())]
        found = next((name for name in reversed(names) if name), None)
    return re.sub(r"\d+", "#", found[1] if found else own_name.rstrip("0123456789."))


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
