"""The canonical form of each operation, as a table of rules.

A rule is given the forms of what an operation reads, and gives that of what it makes. Without a
rule, or where one raises `NoForm`, an operation stands for itself. `LOOSELY` has the operations
that are written as what they are made of where two graphs are compared loosely. What reads and
writes at integer arrays stands in `canonical_indexing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, pi, prod, sqrt
from operator import eq, le, lt, ne
from string import ascii_letters
from typing import TYPE_CHECKING, Any, TypeVar

from gradtools.seeing.differences import canonical_indexing
from gradtools.seeing.differences.canonical_forms import CanonicalExpression, Form, NoForm, widened
from gradtools.seeing.graphs.nodes import Node

if TYPE_CHECKING:
    from gradtools.seeing.differences.canonical import Canonical

Rule = Callable[..., Form | list[Form]]
F = TypeVar("F", bound=Rule)
RULES: dict[str, Rule] = {**canonical_indexing.RULES}
LOOSELY: dict[str, Rule] = {}


def rule_of(operation: str, loosely: bool) -> Rule | None:
    """The rule of an operation, if there is one."""
    loose = LOOSELY.get(operation) if loosely else None
    return loose or RULES.get(operation)


def attributes_of(node: Node) -> tuple[tuple[str, Any], ...]:
    """What makes an operation what it is besides its operands, so that it can be compared."""
    return tuple(
        sorted((k, repr(v)) for k, v in node.attributes.items() if k not in ("name", "rule"))
    )


def _rule(names: str, table: dict[str, Rule] = RULES) -> Callable[[F], F]:
    def register(function: F) -> F:
        table.update(dict.fromkeys(names.split(), function))
        return function

    return register


# --- what only arranges ------------------------------------------------------------------


def _in_order(x: Form, order: Iterable[int]) -> Form:
    """A value with these of its axes, in this order."""
    places = [*order]
    return replace(
        x, dims=tuple(x.dims[p] for p in places), shape=tuple(x.shape[p] for p in places)
    )


def _with_axis(x: Form, axis: int) -> Form:
    """A value with an axis of length 1 at a place."""
    dims, shape = x.dims, x.shape
    return replace(
        x, dims=(*dims[:axis], (), *dims[axis:]), shape=(*shape[:axis], 1, *shape[axis:])
    )


@_rule("reshape squeeze expand_dims unsqueeze")
def _reshape(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    order = node.attributes.get("permutation", range(len(given[0].shape)))
    return c.reshaped(_in_order(given[0], order), shape)


@_rule("broadcast expand")
def _broadcast(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, axes = given[0], node.attributes.get("axes")
    axes = axes or range(len(shape) - len(x.shape), len(shape))
    dims: list[tuple[int, ...]] = [()] * len(shape)
    for p, axis in enumerate(axes):
        dims[axis] = x.dims[p]
    return Form(x.key, x.sizes, tuple(dims), shape)


@_rule("constant full")
def _constant(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    if given and not given[0].sizes:
        return Form(given[0].key, (), ((),) * len(shape), shape)
    value = node.attributes["value"]
    return c.held(node, shape) if isinstance(value, str) else c.number(float(value), shape)


@_rule("slice")
def _slice(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """One axis after the other: so a slice of a slice is a slice."""
    x, a = given[0], node.attributes
    strides = a.get("stride", (1,) * len(x.shape))
    parts = tuple(zip(a["start"], a["limit"], strides, strict=True))
    x = c.written_at(x, parts) or x
    for p, part in enumerate(parts):
        if part != (0, x.shape[p], 1) and x.shape[p] != len(range(*part)):
            x = c.sliced(x, p, *part)
    return _in_order(x, [p for p in range(len(x.shape)) if p not in a.get("drop", ())])


@_rule("pad slice_backward select_backward")
def _placed(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    """Something between zeros; what is placed twice is placed once. A negative pad is a slice."""
    x, a = given[0], node.attributes
    value = c.expressions.value(given[1].key) if len(given) > 1 else float(a.get("value", 0))
    axis = a.get("axis", 0)
    strides = [1] * len(shape)
    if node.operation == "pad":
        starts = a["low"]
        if any(a.get("interior", ())):
            raise NoForm
        if max(*a["low"], *a["high"], 0) == 0:
            for p, low in enumerate(starts):
                x = c.sliced(x, p, -low, shape[p] - low, 1) if x.shape[p] != shape[p] else x
            return [x]
        if min(*a["low"], *a["high"]) < 0:
            raise NoForm
    else:
        starts = [0] * len(shape)
        starts[axis] = a["index"] % shape[axis] if "index" in a else a.get("start", 0)
        strides[axis] = a.get("step", 1)
    if node.operation == "select_backward":
        x = _with_axis(x, axis)
    if all(x.shape[p] == shape[p] for p in range(len(shape))):
        return [x]
    at = tuple((x.dims[p] or (-1,), starts[p], strides[p], n) for p, n in enumerate(shape))
    inner = c.expressions.known[x.key]
    plain = c.fresh_axes(x.key, x.shape).dims == x.dims and 1 not in x.shape
    if isinstance(inner, CanonicalExpression) and inner.operation == "place" and plain:
        (_, before), (_, around) = inner.attributes
        if around == value and all(stride == 1 for *_, stride, _ in (*at, *before)):
            at = tuple(
                (dims, first + start, 1, n)
                for (dims, first, *_), (_, start, _, n) in zip(before, at, strict=True)
            )
            x = Form(inner.operands[0][0], (), (), ())
    key = c.expressions.number(
        CanonicalExpression("place", (("at", at), ("value", value)), ((x.key, ()),))
    )
    return [c.fresh_axes(key, shape)]


@_rule("stack")
def _stacked(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    axis = node.attributes.get("axis", 0)
    return c.joined(axis, [_with_axis(x, axis) for x in given], shape)


# --- what says it in a line

_SAME = "identity copy optimization_barrier clone checkpoint_name sharding_constraint"
RULES |= {
    **dict.fromkeys(_SAME.split(), lambda c, node, given, shape: given[0]),
    "transpose": lambda c, node, given, shape: _in_order(given[0], node.attributes["permutation"]),
    "concatenate": lambda c, node, given, shape: c.joined(node.attributes["axis"], given, shape),
    "compare": lambda c, node, given, shape: _compared(
        c, given[0], given[1], node.attributes["relation"], shape
    ),
    "relu": lambda c, node, given, shape: c.elementwise(
        "maximum", [*given, c.number(0.0)], (), True
    ),
    "silu": lambda c, node, given, shape: _times(c, *given, c.elementwise("sigmoid", given)),
    "multiply": lambda c, node, given, shape: _times(c, *given),
}


# --- element by element ------------------------------------------------------------------

_ELEMENTWISE = """
exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh
arctanh sigmoid log_sigmoid erf erfc erfinv lgamma digamma abs sign floor ceil round trunc real
imag conj angle is_finite is_nan logical_not cbrt softplus polygamma
stop floor_divide fmod arctan2 logaddexp complex logical_and logical_or logical_xor
where threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward elu_backward
leaky_relu_backward nextafter heaviside hypot softplus_backward
leaky_relu elu gelu remainder negate
"""
_COMMUTING = ("add", "multiply", "maximum", "minimum", "logical_and", "logical_or", "logical_xor")


@_rule(_ELEMENTWISE)
def _elementwise(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    if c.loosely and node.operation == "abs" and _is_positive(c, given[0].key):
        return given[0]
    if c.loosely and node.operation == "where":
        known = c.expressions.value(given[0].key)
        if known is not None:
            return widened(given[1] if known else given[2], shape)
    commutes = node.operation in _COMMUTING
    return c.elementwise(node.operation, given, attributes_of(node), commutes)


@_rule("cast")
def _cast(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    (x,) = given
    if c.loosely and _is_number_made(c, x.key):
        return x
    if c.loosely and c.dtype_of(node, 0) == "bool":
        return c.elementwise("where", [x, c.number(1.0), c.number(0.0)])
    if c.crossing and c.dtype_of(node, 0) == c.dtype_made(node):
        return x
    return c.elementwise("cast", given, (("dtype", node.attributes.get("dtype", "")),))


def _is_number_made(c: Canonical, key: int) -> bool:
    """Whether it is a number, or one of two."""
    made = c.expressions.known[key]
    if isinstance(made, CanonicalExpression) and made.operation == "where":
        return all(c.expressions.value(k) is not None for k, _ in made.operands[1:])
    return c.expressions.value(key) is not None


@_rule("remainder", LOOSELY)
def _remainder(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """Of the divisor's sign; JAX writes it as one of the dividend's sign, and what it lacks."""
    x, by = given
    relation = lambda a, b, sign: _compared(c, a, b, sign, ())
    rest = c.elementwise("fmod", [x, by])
    zero = c.number(0.0)
    apart = relation(relation(rest, zero, "<"), relation(by, zero, "<"), "!=")
    lacks = c.elementwise("logical_and", [apart, relation(rest, zero, "!=")], (), True)
    return c.elementwise("where", [lacks, c.combined("add", rest, by), rest])


def _compared(c: Canonical, a: Form, b: Form, relation: str, shape: Sequence[int]) -> Form:
    if relation in (">", ">="):
        a, b, relation = b, a, relation.replace(">", "<")
    values = [c.expressions.value(form.key) for form in (a, b)]
    if c.loosely and all(isinstance(value, float) for value in values):
        return c.number(float(_RELATIONS[relation](*values)), shape)
    return c.elementwise("compare", [a, b], (("relation", relation),), relation in ("==", "!="))


_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {"<": lt, "<=": le, "==": eq, "!=": ne}


def _is_positive(c: Canonical, key: int) -> bool:
    """Whether it is a power of e, or a sum of such."""
    expression = c.expressions.known[key]
    if not isinstance(expression, CanonicalExpression):
        return False
    if expression.operation == "sum":
        return _is_positive(c, expression.operands[0][0])
    return expression.operation == "exp"


@_rule("maximum minimum")
def _extreme(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    least = -inf if node.operation == "maximum" else inf
    left = [form for form in given if c.expressions.value(form.key) != least]
    return left[0] if len(left) == 1 else c.elementwise(node.operation, given, (), True)


@_rule("clip")
def _clip(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, *ends = given
    for name, operation, at in (("low", "maximum", 0), ("high", "minimum", 1)):
        limit = node.attributes.get(name)
        end = ends[at] if len(ends) == 2 else None if limit is None else c.number(float(limit))
        x = x if end is None else c.elementwise(operation, [x, end], (), True)
    return x


@_rule("add subtract")
def _add(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    a, b = given
    if "alpha" in node.attributes:
        b = _times(c, b, c.number(float(node.attributes["alpha"])))
    return c.combined(node.operation, a, b)


@_rule("negate", LOOSELY)
def _negate(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    return _times(c, given[0], c.number(-1.0))


@_rule("divide")
def _divide(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    a, b = given
    if not c.loosely or node.attributes:
        return c.elementwise("divide", given, attributes_of(node))
    return _times(c, a, _power(c, b, -1.0))


_EXPONENTS = {"square": 2.0, "cube": 3.0, "reciprocal": -1.0, "sqrt": 0.5, "rsqrt": -0.5}


@_rule("power square cube reciprocal sqrt rsqrt")
def _powers(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    exponent = _EXPONENTS.get(node.operation)
    if exponent is None and len(given) == 2 and not given[1].sizes:
        known = c.expressions.value(given[1].key)
        exponent = known if isinstance(known, float) else None
    if exponent is not None:
        return _power(c, given[0], exponent)
    return c.elementwise("power", given, attributes_of(node) if len(given) == 1 else ())


def _power(c: Canonical, x: Form, exponent: float) -> Form:
    value = c.expressions.value(x.key)
    if c.loosely and isinstance(value, float) and (value > 0 or (exponent == -1 and value)):
        return c.number(value**exponent, x.shape)
    inner = c.expressions.known[x.key]
    if c.loosely and isinstance(inner, CanonicalExpression) and inner.operation == "power":
        (base, _), (power, _) = inner.operands
        known = c.expressions.value(power)
        if isinstance(known, float) and exponent == -1:
            x = Form(base, x.sizes, x.dims, x.shape)
            exponent *= known
    return c.elementwise("power", [x, c.number(exponent)])


def _plus(c: Canonical, *terms: Form) -> Form:
    return c.flat("add", terms)


def _times(c: Canonical, *factors: Form) -> Form:
    return c.flat("multiply", factors)


# --- over axes ---------------------------------------------------------------------------


def _axes(node: Node, x: Form) -> Sequence[int]:
    if "axis" in node.attributes:
        return (node.attributes["axis"],)
    return node.attributes.get("axes") or range(len(x.shape))


def _rest_of(node: Node) -> tuple[tuple[str, Any], ...]:
    return tuple(p for p in attributes_of(node) if p[0] not in ("axes", "axis", "keep"))


@_rule("sum prod max min any all mean variance deviation norm logsumexp")
def _reduce(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, keep = given[0], bool(node.attributes.get("keep"))
    rest = [] if "window" in node.attributes else _rest_of(node)
    return c.reduced(node.operation, x, _axes(node, x), keep, rest)


@_rule("mean", LOOSELY)
def _mean_rule(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    return _mean(c, given[0], _axes(node, given[0]), bool(node.attributes.get("keep")))


def _mean(c: Canonical, x: Form, axes: Sequence[int], keep: bool, less: float = 0.0) -> Form:
    count = prod(x.shape[p] for p in axes) - less
    if count <= 0:  # the variance of one number, which is NaN
        raise NoForm
    return _times(c, c.reduced("sum", x, axes, keep), c.number(1.0 / count))


@_rule("variance", LOOSELY)
def _variance(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, axes, keep = given[0], _axes(node, given[0]), bool(node.attributes.get("keep"))
    less = float(node.attributes.get("correction", 0))
    return _mean(c, _power(c, _centred(c, x, axes), 2.0), axes, keep, less)


@_rule("deviation", LOOSELY)
def _deviation(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    return _power(c, _variance(c, node, given, shape), 0.5)


@_rule("norm", LOOSELY)
def _norm(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    if "ord" in node.attributes or c.dtype_of(node, 0).startswith("complex"):
        raise NoForm
    x, keep = given[0], bool(node.attributes.get("keep"))
    return _power(c, c.reduced("sum", _power(c, x, 2.0), _axes(node, x), keep), 0.5)


def _centred(c: Canonical, x: Form, axes: Sequence[int]) -> Form:
    return _plus(c, x, _times(c, _mean(c, x, axes, True), c.number(-1.0)))


@_rule("layer_norm", LOOSELY)
def _layer_norm(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    if "without" in node.attributes:
        raise NoForm
    x, axes = given[0], node.attributes["axes"]
    spread = _mean(c, _power(c, _centred(c, x, axes), 2.0), axes, True)
    spread = _plus(c, spread, c.number(float(node.attributes["eps"])))
    result = _times(c, _centred(c, x, axes), _power(c, spread, -0.5))
    result = _times(c, result, given[1]) if len(given) > 1 else result
    return _plus(c, result, given[2]) if len(given) > 2 else result


@_rule("softmax log_softmax", LOOSELY)
def _softmax(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, axes = given[0], _axes(node, given[0])
    if node.operation == "softmax":
        return _soft(c, x, axes)
    shifted, total = _shifted(c, x, axes)
    return c.combined("subtract", shifted, c.elementwise("log", [total]))


def _soft(c: Canonical, x: Form, axes: Sequence[int]) -> Form:
    shifted, total = _shifted(c, x, axes)
    return _times(c, c.elementwise("exp", [shifted]), _power(c, total, -1.0))


def _shifted(c: Canonical, x: Form, axes: Sequence[int]) -> tuple[Form, Form]:
    """x less what is greatest, and the sum of its exponential."""
    highest = c.elementwise("stop", [c.reduced("max", x, axes, True)])
    shifted = c.combined("subtract", x, highest)
    return shifted, c.reduced("sum", c.elementwise("exp", [shifted]), axes, True)


@_rule("logsumexp", LOOSELY)
def _logsumexp(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, axes = given[0], _axes(node, given[0])
    highest = c.reduced("max", x, axes, True)
    finite = c.elementwise("is_finite", [highest])
    highest = c.elementwise("where", [finite, highest, c.number(0.0)])
    highest = c.elementwise("stop", [highest])
    total = c.reduced("sum", c.elementwise("exp", [c.combined("subtract", x, highest)]), axes, True)
    result = _plus(c, c.elementwise("log", [total]), highest)
    return result if node.attributes.get("keep") else c.reshaped(result, shape)


@_rule("roll")
def _roll(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    (x,) = given
    if "axes" not in node.attributes or not node.attributes["axes"]:
        raise NoForm
    for axis, shift in zip(node.attributes["axes"], node.attributes["shifts"], strict=True):
        n = x.shape[axis]
        cut = -shift % max(1, n)
        if cut:
            x = c.joined(
                axis, [c.sliced(x, axis, cut, n, 1), c.sliced(x, axis, 0, cut, 1)], x.shape
            )
    return x


@_rule("sort")
def _sort(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    """What is sorted; where 0, 1, 2, .. is sorted alike, the order."""
    x, *others = given
    (axis,) = _axes(node, x)
    counting = [c.expressions.known[form.key] for form in others]
    if any(getattr(made, "operation", "") != "iota" for made in counting) or any(
        not form.dims[axis] for form in others
    ):
        raise NoForm
    rest = [(k, v) for k, v in _rest_of(node) if k not in ("num_keys", "stable")]
    names = "sort", *(["argsort"] * (len(node.outputs) - 1))
    return [c.along(name, x, axis, rest) for name in names]


@_rule("triangle", LOOSELY)
def _triangle(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """Zero on one side of a diagonal; written by the places of rows and columns."""
    (x,) = given
    row, column = (c.counting(x.shape[-2:], axis) for axis in (0, 1))
    offset = node.attributes.get("offset", 0) - bool(node.attributes["upper"])
    row = c.elementwise("add", [row, c.number(float(offset))], (), True) if offset else row
    below = _compared(c, column, row, "<=", ())
    kept = [c.number(0.0), x] if node.attributes["upper"] else [x, c.number(0.0)]
    return c.elementwise("where", [below, *kept])


@_rule("trace diagonal_matrix", LOOSELY)
def _on_diagonal(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """Zero beside the diagonal; of a trace the sum of it."""
    (x,) = given
    rank = 2 if node.operation == "trace" else 1
    if node.attributes or len(x.shape) != rank:
        raise NoForm
    n = x.shape[-1]
    if rank == 1:
        x = Form(x.key, x.sizes, (*x.dims, ()), (n, 1))
    row, column = (c.counting((x.shape[0], n), axis) for axis in (0, 1))
    met = _compared(c, row, column, "==", ())
    result = c.elementwise("where", [met, x, c.number(0.0)])
    return result if rank == 1 else c.reduced("sum", result, (0, 1))


@_rule("nll_loss_forward", LOOSELY)
def _nll_loss(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """Minus what is picked along the last axis, its mean or sum; no target is to be ignored."""
    if len(given) != 2 or len(given[0].shape) != 2:
        raise NoForm
    picked = canonical_indexing.taken(c, node, *given)
    return _times(c, _averaged(c, node, picked), c.number(-1.0))


@_rule("mse_loss", LOOSELY)
def _mse_loss(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    return _averaged(c, node, _power(c, c.combined("subtract", *given), 2.0))


def _averaged(c: Canonical, node: Node, losses: Form) -> Form:
    """By aten's number: 0 none, 1 mean, 2 sum."""
    axes, reduction = range(len(losses.shape)), node.attributes.get("reduction", 1)
    if reduction not in (0, 1, 2):
        raise NoForm
    if reduction == 1:
        return _mean(c, losses, axes, False)
    return c.reduced("sum", losses, axes) if reduction else losses


@_rule("cumsum cumprod cummax cummin logcumsumexp flip argsort softmax log_softmax")
def _along(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    axes = _axes(node, given[0])
    if len(axes) != 1:
        raise NoForm
    return c.along(node.operation, given[0], axes[0], _rest_of(node))


@_rule("argmax argmin")
def _argument(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x = given[0]
    return c.reduced(node.operation, x, _axes(node, x), bool(node.attributes.get("keep")))


# --- products of arrays ------------------------------------------------------------------


@_rule("einsum dot_general")
def _einsum(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    if "subscripts" not in node.attributes:
        return _matmul(c, node, given, shape)
    return c.contracted(node.attributes["subscripts"], *given)


@_rule("matmul vdot")
def _matmul(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    a, b = given
    if node.operation == "vdot" and c.dtype_of(node, 0).startswith("complex"):
        a = c.elementwise("conj", [a])
    return _product(c, a, b)


def _product(c: Canonical, a: Form, b: Form) -> Form:
    return c.contracted(_subscripts(len(a.shape), len(b.shape)), a, b)


@_rule("max_pool avg_pool sum_pool")
def _pool(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    a, operation = node.attributes, node.operation
    if len(given) != 1 or a.keys() - {"window", "stride", "padding"} or "window" not in a:
        raise NoForm
    averages = operation == "avg_pool" and c.loosely and "padding" not in a
    operation = "sum_pool" if averages else operation
    key = c.of_whole(operation, attributes_of(node), given)
    result = c.fresh_axes(key, shape)
    return _times(c, result, c.number(1.0 / prod(a["window"]))) if averages else result


@_rule("lerp", LOOSELY)
def _lerp(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, end, weight = given
    return _plus(c, x, _times(c, weight, c.combined("subtract", end, x)))


@_rule("addcmul addcdiv", LOOSELY)
def _added_factor(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, a, b = given
    b = b if node.operation == "addcmul" else _power(c, b, -1.0)
    return _plus(c, x, _times(c, c.number(float(node.attributes.get("value", 1))), a, b))


@_rule("leaky_relu elu gelu", LOOSELY)
def _activation(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """As JAX writes them; at zero both sides of a kink are zero."""
    (x,), a = given, node.attributes
    zero, number = c.number(0.0), lambda n: c.number(float(n))
    if node.operation == "leaky_relu":
        kept = _compared(c, x, zero, ">=", shape)
        below = _times(c, number(a.get("negative_slope", 0.01)), x)
        return c.elementwise("where", [kept, x, below])
    if node.operation == "elu":
        if a.get("scale", 1) != 1 or a.get("input_scale", 1) != 1:
            raise NoForm
        kept = _compared(c, x, zero, ">", shape)
        below = c.elementwise("expm1", [c.elementwise("where", [kept, zero, x])])
        below = _times(c, number(a.get("alpha", 1)), below)
        return c.elementwise("where", [kept, x, below])
    half = _times(c, number(0.5), x)
    if a.get("approximate", "none") == "tanh":
        cubed = _times(c, number(0.044715), _power(c, x, 3.0))
        inner = _times(c, number(sqrt(2 / pi)), _plus(c, x, cubed))
        return _times(c, half, _plus(c, number(1.0), c.elementwise("tanh", [inner])))
    return _times(c, half, c.elementwise("erfc", [_times(c, number(-sqrt(0.5)), x)]))


@_rule("attention", LOOSELY)
def _attention(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """softmax(q kᵀ / √d) v, without a mask."""
    a = node.attributes
    if len(given) != 3 or a.keys() - {"scale"}:
        raise NoForm
    q, k, v = given
    batch = ascii_letters[: len(q.shape) - 2]
    scores = c.contracted(f"{batch}XZ,{batch}YZ->{batch}XY", q, k)
    scale = float(a.get("scale") or q.shape[-1] ** -0.5)
    weights = _soft(c, _times(c, scores, c.number(scale)), (len(q.shape) - 1,))
    return c.contracted(f"{batch}XY,{batch}YZ->{batch}XZ", weights, v)


@_rule("addmm baddbmm addmv")
def _added(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    if node.attributes:
        raise NoForm
    bias, a, b = given
    return _plus(c, bias, _product(c, a, b))


def _subscripts(a: int, b: int) -> str:
    """NumPy's matmul of two arrays of so many axes, in the words of einsum."""
    if not (a and b):
        raise NoForm
    batch = ascii_letters[: max(a, b, 2) - 2]
    first = batch[len(batch) - max(0, a - 2) :] + ("YZ" if a > 1 else "Z")
    second = batch[len(batch) - max(0, b - 2) :] + ("ZX" if b > 1 else "Z")
    return f"{first},{second}->{batch}{'Y' if a > 1 else ''}{'X' if b > 1 else ''}"


# What is written as what it is made of: loosely, or always.
WRITTEN_OUT = LOOSELY.keys() - {"negate", "remainder"} | {
    *("relu", "silu", "clip", "addmm", "baddbmm", "addmv", "matmul", "einsum"),
    *("reciprocal", "rsqrt", "square"),
}
