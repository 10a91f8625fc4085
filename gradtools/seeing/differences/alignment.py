"""Two graphs aligned: which operation of one is which of the other.

The two frameworks say the same in other words: one has softmax, the other its five steps; they
reshape and transpose at other places. So the programs are read as sequences of *steps*, without
those that only arrange data, and aligned in four passes, the surest first:

1. the common subsequence of most weight, where a pair of one name weighs more when its shapes,
   dtypes and modules agree as well (sequence alignment, after Needleman and Wunsch, 1970);
2. in the gaps between, an operation and the steps that it is made of elsewhere (`PARTS`);
3. what is left of one name and shape and reads what is already paired: parts that stand in another
   order;
4. what is left at the same place in a gap, of the same shape under another name: a change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gradtools.seeing.graphs.nodes import Node, PlainGraph, Value

ARRANGING = frozenset(
    {"reshape", "transpose", "broadcast", "squeeze", "expand_dims", "unsqueeze", "expand"}
    | {"identity", "copy", "call", "optimization_barrier", "constant", "iota"}
)
NAMES = {
    name: common
    for common, names in {
        "matmul": "dot_general einsum linear addmm",
        "maximum": "relu",
        "power": "square cube",
        "where": "select",
        "stop": "stop_gradient",
        "index": "embedding take gather slice take_along dynamic_slice",
        "scatter": "scatter_add scatter_along",
        "convolution": "conv_general_dilated",
    }.items()
    for name in names.split()
}
_MEAN = "sum divide multiply"
_NORM = f"mean variance {_MEAN} subtract power add rsqrt sqrt reciprocal maximum stop compare where"
_SOFT = "max maximum stop subtract exp sum divide where is_finite"
PARTS: Mapping[str, frozenset[str]] = {
    name: frozenset(parts.split())
    for name, parts in {
        "mean": _MEAN,
        "variance": f"mean {_MEAN} subtract power maximum where compare abs real conj",
        "deviation": f"mean variance {_MEAN} subtract power sqrt maximum where compare",
        "softmax": _SOFT,
        "log_softmax": f"{_SOFT} log logsumexp",
        "logsumexp": f"{_SOFT} log add",
        "cross_entropy": f"{_SOFT} log logsumexp log_softmax negate index mean where compare clip "
        "add one_hot multiply scatter concatenate",
        "layer_norm": _NORM,
        "batch_norm": f"{_NORM} update",
        "group_norm": _NORM,
        "rms_norm": _NORM,
        "standardize": _NORM,
        "norm": "power sum sqrt abs multiply conj real",
        "gelu": "multiply power add tanh erf erfc divide negate",
        "silu": "sigmoid multiply",
        "sigmoid": "negate exp add divide reciprocal",
        "inverse": "lu custom_linear_solve stop add compare cast triangular_solve",
        "solve": "lu custom_linear_solve stop triangular_solve",
        "log_sigmoid": "logaddexp exp log1p maximum abs negate add compare where subtract softplus",
        "softplus": "logaddexp exp log1p maximum abs negate add compare where subtract",
        "elu": "compare where expm1 multiply minimum maximum",
        "leaky_relu": "compare where multiply maximum",
        "matmul": "add multiply sum",
        "convolution": "add",
        "attention": f"{_SOFT} matmul multiply add softmax compare where",
        "scaled_dot_product_attention": f"{_SOFT} matmul multiply add softmax compare where",
        "dropout": "multiply divide where compare random_bits random_bernoulli bernoulli",
        "clip": "maximum minimum",
        "one_hot": "compare cast",
        "mse_loss": f"subtract power {_MEAN} mean",
        "reciprocal": "divide power",
        "rsqrt": "sqrt divide reciprocal power",
        "sigmoid_backward": "multiply subtract",
        "tanh_backward": "multiply subtract power",
        "threshold_backward": "where compare multiply",
        "native_layer_norm_backward": f"{_NORM} multiply",
    }.items()
}
_ON_INDICES = frozenset({"compare", "add", "where", "concatenate", "cast", "remainder"})
_AT_INDICES = frozenset({"index", "scatter", "update"})
_CELLS = 16_000_000  # of the table of weights; longer programs are cut where they surely agree


@dataclass(frozen=True)
class AlignedStep:
    """An operation that computes something.

    Attributes:
        node: It.
        name: Its name in the words of both.
        outputs: What it makes.
        reads: The steps that it reads, through all that only arranges data, by number.
        number: Its place in the sequence.
        turn: Its pass; what runs in the first and is read in later ones alone stands between.
    """

    node: Node
    name: str
    outputs: tuple[Value, ...]
    reads: frozenset[int]
    number: int
    turn: float = 0.0

    @property
    def size(self) -> tuple[int, ...]:
        """Its first output's shape, whatever the layout: sorted, without ones."""
        shape = self.outputs[0].shape if self.outputs else ()
        return tuple(sorted(n for n in shape if n != 1))


@dataclass(frozen=True)
class Alignment:
    """Pairs of groups of steps, each with the numbers of one side's and the other's steps."""

    first: tuple[AlignedStep, ...]
    second: tuple[AlignedStep, ...]
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def left(self, side: int) -> list[int]:
        """The steps of one side that are in no pair."""
        paired = {number for pair in self.pairs for number in pair[side]}
        steps = (self.first, self.second)[side]
        return [step.number for step in steps if step.number not in paired]


def steps_of(graph: PlainGraph, whole: frozenset[str] = frozenset()) -> tuple[AlignedStep, ...]:
    """The steps of a graph, those of its bodies too.

    Args:
        graph: The graph.
        whole: The names of calls that stay one step although they have a program inside.
    """
    steps: list[AlignedStep] = []
    _collect(graph, {}, whole, steps)
    steps = _without_index_arithmetic(steps)
    first = {id(node) for _, node in forward_alone(graph).walk()}
    return tuple(
        replace(step, turn=0.5) if not step.node.phase and id(step.node) not in first else step
        for step in steps
    )


def _without_index_arithmetic(steps: list[AlignedStep]) -> list[AlignedStep]:
    """Leaves out what is done to integers that are read as indices alone.

    JAX writes out what PyTorch does inside: that a negative index counts from the end, and one
    array of the indices of several axes. Whether the indices are the same, the forms tell.
    """
    readers: dict[int, set[int]] = {step.number: set() for step in steps}
    for step in steps:
        for read in step.reads:
            readers[read].add(step.number)
    gone: set[int] = set()
    for step in reversed(steps):
        whole = step.name in _ON_INDICES and not any(v.is_inexact for v in step.outputs)
        read_by = readers[step.number]
        if whole and read_by and all(k in gone or steps[k].name in _AT_INDICES for k in read_by):
            gone.add(step.number)
    through: dict[int, frozenset[int]] = {}
    left: list[AlignedStep] = []
    for step in steps:
        reads = frozenset[int]().union(*(through[k] for k in step.reads))
        if step.number in gone:
            through[step.number] = reads
        else:
            through[step.number] = frozenset({len(left)})
            left.append(replace(step, reads=reads, number=len(left)))
    return left


def _collect(
    graph: PlainGraph,
    made: dict[int, frozenset[int]],
    whole: frozenset[str],
    steps: list[AlignedStep],
) -> None:
    for node in graph.nodes:
        reads = frozenset[int]().union(*(made.get(v, frozenset()) for v in node.inputs))
        name = common_name(node)
        if node.bodies and (name not in whole or _holds(node, name)):
            result, of = reads, dict[int, frozenset[int]]()
            for body in node.bodies:
                inner = {
                    value: made.get(node.inputs[i], frozenset())
                    for value, i in zip(body.graph.inputs, body.inputs, strict=True)
                }
                _collect(body.graph, inner, whole, steps)
                leaving = [inner.get(out, frozenset()) for out in body.graph.outputs]
                result = result.union(*leaving)
                for out, read in zip(node.outputs, [] if body.gate else leaving, strict=False):
                    of[out] = of.get(out, frozenset()) | read
            made.update(of if node.operation == "call" else dict.fromkeys(node.outputs, result))
            continue
        elif not node.bodies and is_arranging(graph, node):
            result = reads
        else:
            outputs = tuple(graph.values[v] for v in node.outputs)
            steps.append(AlignedStep(node, name, outputs, reads, len(steps), float(node.phase)))
            result = frozenset({steps[-1].number})
        made.update(dict.fromkeys(node.outputs, result))


def _holds(node: Node, name: str) -> bool:
    """Whether a call holds an operation of its own name."""
    inner = (part for body in node.bodies for _, part in body.graph.walk())
    return any(common_name(part) == name for part in inner)


def is_arranging(graph: PlainGraph, node: Node) -> bool:
    """Whether a node only arranges data; a cast does if it keeps the dtype."""
    if node.operation == "cast" and node.inputs:
        return graph.values[node.inputs[0]].dtype == graph.values[node.outputs[0]].dtype
    return node.operation in ARRANGING and not node.mark


def common_name(node: Node) -> str:
    """An operation's name in the words of both frameworks; a call's is its function's."""
    name = node.operation
    if name == "call":
        name = str(node.attributes.get("name", name))
    name = name.removeprefix("aten.").removeprefix("_").split(".")[0]
    return NAMES.get(name, name)


def names_in(graph: PlainGraph) -> frozenset[str]:
    """The names of all operations without a program inside."""
    return frozenset(common_name(node) for _, node in graph.walk() if not node.bodies)


def aligned(a: PlainGraph, b: PlainGraph) -> Alignment:
    """Two graphs, aligned."""
    first, second = steps_of(a, names_in(b)), steps_of(b, names_in(a))
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for turn in sorted({step.turn for step in (*first, *second)}):
        one = [step for step in first if step.turn == turn]
        two = [step for step in second if step.turn == turn]
        pairs += _of_one_pass(one, two)
    while _paired_by_reads(first, second, pairs, lambda step: step.name):  # in another order
        pass
    _paired_by_reads(first, second, pairs, lambda step: None)  # under two names
    return Alignment(first, second, tuple(sorted(pairs)))


# --- by weight ---------------------------------------------------------------------------

_Pairs = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _of_one_pass(first: Sequence[AlignedStep], second: Sequence[AlignedStep]) -> _Pairs:
    result: _Pairs = []
    matched = [*_matched(first, second)]
    ends = [(-1, -1), *matched, (len(first), len(second))]
    for (i, j), (next_i, next_j) in pairwise(ends):
        if i >= 0:
            result.append(((first[i].number,), (second[j].number,)))
        gap = first[i + 1 : next_i], second[j + 1 : next_j]
        result += _made_of(*gap)
    return result


def _matched(
    first: Sequence[AlignedStep], second: Sequence[AlignedStep]
) -> Iterator[tuple[int, int]]:
    """The common subsequence of most weight."""
    if len(first) * len(second) <= _CELLS:
        yield from _by_table(first, second)
        return
    half = _CELLS // max(1, len(second)) or 1
    cut, other = _sure_pair(first, second, half)
    yield from _matched(first[:cut], second[:other])
    for i, j in _matched(first[cut:], second[other:]):
        yield i + cut, j + other


def _sure_pair(
    first: Sequence[AlignedStep], second: Sequence[AlignedStep], near: int
) -> tuple[int, int]:
    """Where to cut two long programs: at steps that exist once in each; else in proportion."""
    once = [_once(steps) for steps in (first, second)]
    shared = [(i, once[1][key]) for key, i in once[0].items() if key in once[1]]
    inner = [(i, j) for i, j in shared if i and j]
    if inner:
        return min(inner, key=lambda pair: abs(pair[0] - near))
    cut = max(1, min(near, len(first) // 2))
    return cut, cut * len(second) // len(first)


def _once(steps: Sequence[AlignedStep]) -> dict[tuple[object, ...], int]:
    result: dict[tuple[object, ...], list[int]] = {}
    for i, step in enumerate(steps):
        result.setdefault((step.name, step.size, _scope(step)), []).append(i)
    return {key: places[0] for key, places in result.items() if len(places) == 1}


def _by_table(first: Sequence[AlignedStep], second: Sequence[AlignedStep]) -> list[tuple[int, int]]:
    weights = _weights(first, second)
    best = np.zeros((len(first) + 1, len(second) + 1), np.float32)
    for i in range(len(first)):
        diagonal = best[i, :-1] + weights[i]
        np.maximum.accumulate(np.maximum(best[i, 1:], diagonal), out=best[i + 1, 1:])
    pairs, i, j = [], len(first), len(second)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _weights(first: Sequence[AlignedStep], second: Sequence[AlignedStep]) -> np.ndarray:
    """What a pair weighs: 2 for the name, 1 each for size, dtype and modules; 0: no pair."""
    names, sizes, dtypes, scopes = (
        _numbered([key(s) for s in first], [key(s) for s in second])
        for key in (lambda s: s.name, lambda s: s.size, _dtypes, _scope)
    )
    same = [np.equal.outer(*pair).astype(np.float32) for pair in (names, sizes, dtypes, scopes)]
    return same[0] * (2.0 + same[1] + 0.5 * same[2] + 0.75 * same[3])


def _numbered(first: Sequence[object], second: Sequence[object]) -> tuple[np.ndarray, np.ndarray]:
    numbers: dict[object, int] = {}
    one, two = (
        np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
        for keys in (first, second)
    )
    return one, two


def _dtypes(step: AlignedStep) -> tuple[str, ...]:
    return tuple(value.dtype for value in step.outputs)


def _scope(step: AlignedStep) -> str:
    """The modules around a step, in letters that both frameworks' names share."""
    return "/".join(re.sub(r"[^a-z0-9]", "", name.lower()) for name in step.node.scope)


# --- what is made of what ----------------------------------------------------------------


def _made_of(first: Sequence[AlignedStep], second: Sequence[AlignedStep]) -> _Pairs:
    """Operations of a gap, with the steps on the other side that they are made of."""
    result = [(a, b) for a, b in _wholes(first, second)]
    taken = {number for _, parts in result for number in parts}
    left = [step for step in second if step.number not in taken]
    used = {number for whole, _ in result for number in whole}
    rest = [step for step in first if step.number not in used]
    return result + [(parts, whole) for whole, parts in _wholes(left, rest)]


def _wholes(
    wholes: Sequence[AlignedStep], others: Sequence[AlignedStep]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each operation that is made of parts, with the consecutive ones that end in its result."""
    start = 0
    for whole in wholes:
        parts = PARTS.get(whole.name)
        if parts is None:
            continue
        stretch = _stretch(whole, parts, others, start)
        if stretch:
            start = stretch[-1] + 1
            yield (whole.number,), tuple(others[i].number for i in stretch)


def _stretch(
    whole: AlignedStep, parts: frozenset[str], others: Sequence[AlignedStep], start: int
) -> list[int]:
    """The longest run of parts from `start` on that ends in something of the whole's size."""
    while start < len(others) and others[start].name not in parts:
        start += 1
    stop = start
    while stop < len(others) and others[stop].name in parts:
        stop += 1
    while stop > start and others[stop - 1].size != whole.size:
        stop -= 1
    return list(range(start, stop))


# --- what is left ------------------------------------------------------------------------


def _paired_by_reads(
    first: Sequence[AlignedStep],
    second: Sequence[AlignedStep],
    pairs: _Pairs,
    called: Callable[[AlignedStep], str | None],
) -> bool:
    """Pairs what is left, of one size and called alike, that reads what is paired already.

    Returns:
        Whether there was any.
    """
    left = Alignment(tuple(first), tuple(second), tuple(pairs))
    partner = {a: set(two) for one, two in pairs for a in one}
    others, count = [second[j] for j in left.left(1)], len(pairs)
    for step in (first[i] for i in left.left(0)):
        expected = {j for read in step.reads for j in partner.get(read, ())}
        alike = lambda x: (called(x), x.size, x.turn)
        for other in others:
            meet = expected & other.reads or not step.reads | other.reads
            if alike(step) == alike(other) and meet:
                pairs.append(((step.number,), (other.number,)))
                partner[step.number] = {other.number}
                others.remove(other)
                break
    return len(pairs) > count


def forward_alone(graph: PlainGraph) -> PlainGraph:
    """The first pass, and of it what its own outputs are made of.

    How a derivative is written is each framework's own: what it keeps, in which steps.
    """
    first = [node for node in graph.nodes if not node.phase]
    later = {v for node in graph.nodes if node.phase for v in node.outputs}
    entering = {v for node in first for v in (*node.inputs, *node.outputs)}
    outputs = [v for v in graph.outputs if v not in later and (v in entering or v in graph.inputs)]
    outputs = [v for v in outputs if "gradient of " not in graph.values[v].name]
    needed, nodes = set(outputs), []
    for node in reversed(first):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            nodes.append(node)
    inputs = tuple(v for v in graph.inputs if not graph.values[v].name.startswith("cotangent of "))
    captured = tuple(v for v in graph.captured if v in needed)
    nodes = nodes[::-1]
    return replace(
        graph, nodes=tuple(nodes), inputs=inputs, outputs=tuple(outputs), captured=captured
    )
