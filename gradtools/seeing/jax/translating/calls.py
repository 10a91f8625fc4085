"""Translates equations with inner jaxprs: calls, loops, branches, custom rules; and random draws.

- A call is opened. A function of JAX's own that the vocabulary has a word for is written by that
  word (`_WORDS`): its inside, such as the LU factors of a determinant, says less.
- Loops and branches keep their programs as bodies; what they close over comes as operands.
- A function with a rule of its own is a ``custom_rule``. Its backward program is what JAX itself
  pulls back, so all that a rule may be, edited gradients too, comes out as JAX has it.
- A draw of `jax.random` from a key that is known is one node ``random``, with its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.errors import MissingRuleError
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, is_of_random
from gradtools.jax.operation_marks import function_name, is_chunk
from gradtools.seeing.formulas.expressions import kind_of, placeholder
from gradtools.seeing.formulas.recorded import body_of
from gradtools.seeing.graphs.nodes import Body, PlainGraph
from gradtools.seeing.jax import source_lines
from gradtools.seeing.jax.bridged_calls import called_inside, crossing
from gradtools.seeing.jax.translating.folding import evaluated, forwarded, pulled
from gradtools.seeing.jax.translating.writing import Entry, Known

_MOST_ROUNDS = 64
_DEEPEST = 2  # a formula is differentiated twice at most
_RANDOM = ("random_bits", "threefry2x32", "random_gamma")


def opened(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry] | None:
    """The results of an equation with programs inside; None for any other."""
    name = eqn.primitive.name
    if name == "platform_index":
        return [Known(np.asarray(_platform(eqn.params["platforms"])))]
    if name in (*jaxprs.CALLS, *jaxprs.RULED):
        return _call(w, eqn, entries)
    if name in _RULES:
        return _rule(w, eqn, entries)
    return _CONTROL[name](w, eqn, entries) if name in _CONTROL else None


def _is_known(entry: Entry) -> bool:
    return not isinstance(entry, int)


def native_name(eqn: Any) -> str:
    """What an equation without a translation is called."""
    kernel = getattr(eqn.params.get("call"), "kernel", None)
    return getattr(kernel, "name", None) or eqn.primitive.name


def _platform(platforms: Sequence[Any]) -> int:
    here = jax.default_backend()
    return next(k for k, names in enumerate(platforms) if names is None or here in names)


# --- calls -------------------------------------------------------------------------------


def _call(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
    (program,) = jaxprs.programs_of(eqn)
    jaxpr = program.jaxpr
    own = bool(source_lines.is_own(jaxpr)) and not source_lines.is_gradtools(jaxpr)
    if own:
        result = _draw(w, eqn, jaxpr, entries) or _word(w, eqn, jaxpr, entries)
        if result is not None:
            return result
    ruled = own and eqn.primitive.name == "custom_jvp_call"
    if ruled and jaxprs.uses_primitive(jaxpr, lambda e: e.primitive.name in _UNDERIVABLE):
        return list(w.marked(eqn, _name(eqn, jaxpr), [w.number(e) for e in entries]))
    if _has_rule(eqn, jaxpr, own) and w.depth < _DEEPEST:
        return custom_rule(w, eqn, entries, _name(eqn, jaxpr), _of_rule(eqn), again=True)
    return _run(w, program, entries)


def _of_rule(eqn: Any) -> Callable[[Any, list[Entry]], Sequence[Entry]]:
    """What JAX takes for the value once it differentiates: what the rule gives, not f.

    Where the rule calls f, it has its rule there again; where it does not, it has lost it.
    """
    closed = jax.make_jaxpr(lambda *xs: forwarded(eqn)(xs))(*_avals(eqn.invars))

    def run(w: Any, entries: list[Entry]) -> Sequence[Entry]:
        return _run(w, closed, entries)

    return run


def _has_rule(eqn: Any, jaxpr: Any, own: bool) -> bool:
    """Whether its derivative may be another than that of what it computes.

    The rules that JAX gives its own functions say what their code says, but for numerical care.
    """
    if not jaxprs.is_ruled(eqn) or is_chunk(jaxpr):
        return False
    return not (own and eqn.primitive.name == "custom_jvp_call")


_UNDERIVABLE = ("while", "bitcast_convert_type", "zeta")  # what JAX's code with a rule may hold


def _name(eqn: Any, jaxpr: Any) -> str:
    name = eqn.params.get("name") or function_name(jaxpr)
    return str(name).lstrip("_").rpartition(".")[2] or eqn.primitive.name


# --- random draws ------------------------------------------------------------------------

_DRAWS = {"normal": "ε", "uniform": "u", "bernoulli": "m", "permutation": "π", "shuffle": "π"}


def _draw(w: Any, eqn: Any, jaxpr: Any, entries: Sequence[Entry]) -> list[Entry] | None:
    """A draw of jax.random of which all is known."""
    known = [e.value for e in entries if isinstance(e, Known)]
    if not is_of_random(jaxpr) or len(known) < len(entries) or not _draws(jaxpr):
        return None
    name = _DRAWS.get(_name(eqn, jaxpr).removesuffix("_real"), "ξ")
    values = evaluated(eqn, known)
    if any(jnp.issubdtype(v.dtype, jax.dtypes.extended) for v in values):
        return [Known(v) for v in values]
    return [w.number(Known(np.asarray(v), name)) for v in values]


def _draws(jaxpr: Any) -> bool:
    return jaxprs.uses_primitive(jaxpr, lambda eqn: eqn.primitive.name in _RANDOM)


# --- words -------------------------------------------------------------------------------


def _word(w: Any, eqn: Any, jaxpr: Any, entries: Sequence[Entry]) -> list[Entry] | None:
    """A function of JAX's own by the vocabulary's word for it, if it has this form."""
    word = _WORDS.get(_name(eqn, jaxpr))
    if word is None or all(map(_is_known, entries)):
        return None
    first = len(w._nodes)
    result = word(w, jaxpr, *entries)
    if result is None:
        return None
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    w.tell(eqn, first, results)
    return results


def _unary(operation: str, **attributes: Any) -> Callable[..., Any]:
    def word(w: Any, jaxpr: Any, *entries: Entry) -> int | None:
        if len(entries) != 1 or jaxpr.outvars[0].aval.shape != jaxpr.invars[0].aval.shape:
            return None
        return w(operation, w.number(entries[0]), **attributes)

    return word


def _binary(operation: str) -> Callable[..., Any]:
    def word(w: Any, jaxpr: Any, *entries: Entry) -> int | None:
        if len(entries) != 2:
            return None
        return w(operation, *map(w.number, entries))

    return word


def _with_number(operation: str, name: str, usual: float) -> Callable[..., Any]:
    """Of an array, and perhaps of a number that is known."""

    def word(w: Any, jaxpr: Any, x: Entry, *given: Entry) -> int | None:
        a = w.scalar(w.number(given[0])) if given else usual
        return None if a is None else w(operation, w.number(x), **{name: float(a)})

    return word


def _clip(w: Any, jaxpr: Any, *entries: Entry) -> int | None:
    """With bounds that are numbers; one of them may be missing."""
    if len(entries) != 3 or jaxpr.invars[0].aval.shape != jaxpr.outvars[0].aval.shape:
        return None
    x, low, high = map(w.number, entries)
    a, b = w.scalar(low), w.scalar(high)
    return None if a is None or b is None else w("clip", x, low=a, high=b)


def _logaddexp(w: Any, jaxpr: Any, a: Entry, b: Entry) -> int:
    x, y = w.number(a), w.number(b)
    if w.is_zero(y):
        return w("softplus", x)
    return w("softplus", y) if w.is_zero(x) else w("logaddexp", x, y)


def _one_hot(w: Any, jaxpr: Any, i: Entry) -> int | None:
    shape, out = jaxpr.invars[0].aval.shape, jaxpr.outvars[0].aval
    return w("one_hot", w.number(i), size=out.shape[-1]) if out.shape[:-1] == shape else None


def _rolled(w: Any, jaxpr: Any, x: Entry) -> int | None:
    """Each axis is cut in two and put together again the other way round."""
    eqns = jaxpr.eqns
    if [e.primitive.name for e in eqns] != ["slice", "slice", "concatenate"] * (len(eqns) // 3):
        return None
    axes = tuple(int(e.params["dimension"]) for e in eqns[2::3])
    starts = [e.params["start_indices"][a] for e, a in zip(eqns[::3], axes, strict=True)]
    number = w.number(x)
    shifts = tuple(w.shape(number)[a] - int(s) for s, a in zip(starts, axes, strict=True))
    return w("roll", number, shifts=shifts, axes=axes)


def _diagonal(w: Any, jaxpr: Any, x: Entry) -> int | None:
    """Which diagonal it is shows in what becomes of 0, 1, 2, ..."""
    number = w.number(x)
    shape = w.shape(number)
    if len(shape) < 2:
        return None
    first, result = _of_counts(jaxpr, shape)
    for i in range(len(shape)):
        for j in range(len(shape)):
            for k in range(1 - shape[i], shape[j]) if i != j else ():
                if np.array_equal(np.diagonal(first, k, i, j), result):
                    return w("diagonal", number, offset=k, axes=(i, j))
    return None


def _diag(w: Any, jaxpr: Any, x: Entry) -> int | None:
    number = w.number(x)
    shape = w.shape(number)
    if len(shape) != 1:
        return _diagonal(w, jaxpr, x)
    first, result = _of_counts(jaxpr, shape)
    for k in range(1 - result.shape[0], result.shape[0]):
        if np.array_equal(np.diag(first, k), result):
            return w("diagonal_matrix", number, offset=k)
    return None


def _of_counts(jaxpr: Any, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    given = jnp.asarray(counts, jaxpr.invars[0].aval.dtype)
    with jax.ensure_compile_time_eval():
        (result,) = jax.core.eval_jaxpr(jaxpr, [], given)
    return counts, np.asarray(result)


def _traced(w: Any, jaxpr: Any, x: Entry, offset: Entry | None = None) -> int | None:
    names = {e.primitive.name for e in jaxpr.eqns}
    number = w.number(x)
    if offset is None:
        on_diagonal = _offset_is_zero(jaxpr)
    else:
        on_diagonal = isinstance(offset, Known) and not np.any(offset.value)
    plain = len(w.shape(number)) == 2 and on_diagonal
    return w("trace", number) if plain and "reduce_sum" in names else None


def _offset_is_zero(jaxpr: Any) -> bool:
    adds = [e for e in jaxpr.eqns if e.primitive.name == "add"]
    return all(getattr(e.invars[1], "val", None) == 0 for e in adds)


def _matrix(operation: str, same_shape: bool = False) -> Callable[..., Any]:
    """Of one matrix."""

    def word(w: Any, jaxpr: Any, *entries: Entry) -> Any:
        shape = jaxpr.invars[0].aval.shape
        if len(entries) != 1 or len(shape) < 2 or shape[-1] != shape[-2]:
            return None
        if same_shape and jaxpr.outvars[0].aval.shape != shape:
            return None
        return w(operation, w.number(entries[0]))

    return word


def _eigh(w: Any, jaxpr: Any, a: Entry) -> Any:
    both = any(e.primitive.name == "add" for e in jaxpr.eqns)
    return w("eigh", w.number(a)) if both and len(jaxpr.outvars) == 2 else None


def _solve(w: Any, jaxpr: Any, *entries: Entry) -> int | None:
    """Of one vector, or as many matrices as there are of a."""
    if len(entries) != 2:
        return None
    a, b = map(w.number, entries)
    out, left, right = jaxpr.outvars[0].aval.shape, w.shape(a), w.shape(b)
    fits = right[:-1] == left[:-1] if len(right) == len(left) else right == left[:-1]
    return w("solve", a, b) if out == right and fits else None


def _searched(w: Any, jaxpr: Any, ordered: Entry, values: Entry) -> int | None:
    """How many of the ordered numbers are below; which side counts shows in a trial."""
    a, v = w.number(ordered), w.number(values)
    if len(w.shape(a)) != 1:
        return None
    dtypes = [var.aval.dtype for var in jaxpr.invars]
    with jax.ensure_compile_time_eval():
        trial = [jnp.arange(w.shape(a)[0]).astype(dtypes[0]), jnp.zeros(w.shape(v), dtypes[1])]
        first = int(np.max(jax.core.eval_jaxpr(jaxpr, [], *trial)[0], initial=0))
    lower = w("reshape", v, shape=(*w.shape(v), 1))
    below = w("compare", a, lower, relation="<=" if first else "<")
    return w("sum", below, axes=(len(w.shape(v)),))


_WORDS: dict[str, Callable[..., Any]] = {
    "searchsorted": _searched,
    "relu": _unary("relu"),
    "silu": _unary("silu"),
    "log_sigmoid": _unary("log_sigmoid"),
    "elu": _with_number("elu", "alpha", 1.0),
    "leaky_relu": _with_number("leaky_relu", "negative_slope", 0.01),
    "clip": _clip,
    "logaddexp": _logaddexp,
    "hypot": _binary("hypot"),
    "remainder": _binary("remainder"),
    "floor_divide": _binary("floor_divide"),
    "one_hot": _one_hot,
    "roll_static": _rolled,
    "diagonal": _diagonal,
    "diag": _diag,
    "trace": _traced,
    "det": _matrix("det"),
    "slogdet": _matrix("slogdet"),
    "inv": _matrix("inverse", same_shape=True),
    "expm": _matrix("expm", same_shape=True),
    "eigh": _eigh,
    "pinv": lambda w, jaxpr, *entries: (
        w("pinv", w.number(entries[0])) if len(entries) == 1 else None
    ),
    "solve": _solve,
}


# --- loops and branches ------------------------------------------------------------------


def _body(
    w: Any,
    run: Callable[[Any, list[Entry]], Sequence[Entry]],
    entries: Sequence[Entry],
    avals: Sequence[Any],
    deeper: bool = False,
) -> PlainGraph:
    """A program inside, of its inputs; what is known of them is known inside, too."""
    inner = w.inner(deeper)
    given: list[Entry] = [
        entry if _is_known(entry) else inner.input("", aval.shape, str(aval.dtype))
        for entry, aval in zip(entries, avals, strict=True)
    ]
    return inner.graph(*[inner.number(out) for out in run(inner, given)])


def _program(w: Any, found: Any) -> tuple[Any, list[Entry]]:
    """A program's equations, and what it holds, as operands."""
    program = jaxprs.HeldJaxpr.of(found)
    return program.jaxpr, [w.held(c) for c in program.consts]


def _run(w: Any, found: Any, entries: Sequence[Entry]) -> list[Entry]:
    """What a program gives for these operands, written out."""
    jaxpr, held = _program(w, found)
    return list(w.run(jaxpr, [*held, *entries]))


def _numbers(w: Any, entries: Sequence[Entry]) -> tuple[int, ...]:
    return tuple(w.number(e) for e in entries if not _is_known(e))


def _avals(xs: Sequence[Any]) -> list[Any]:
    return [x.aval for x in xs]


def _made(eqn: Any, extra: int = 0) -> list[Any]:
    return [placeholder("", v.aval.shape, kind_of(v.aval.dtype)) for v in eqn.outvars]


def _scan(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
    jaxpr, held = _program(w, *jaxprs.programs_of(eqn))
    consts, carried = jaxprs.scan_counts(eqn)
    length, reverse = int(eqn.params["length"]), bool(eqn.params["reverse"])
    fixed = [*held, *entries[:consts]]
    carry, xs = entries[consts : consts + carried], entries[consts + carried :]
    if _draws(jaxpr) and length <= _MOST_ROUNDS:
        return _unrolled(w, jaxpr, fixed, carry, xs, length, reverse)
    loop: list[Entry] = [w.number(e) for e in carry]
    slices: list[Entry] = [w.number(e) for e in xs]
    run = lambda inner, given: inner.run(jaxpr, given)
    graph = _body(w, run, [*fixed, *loop, *slices], _avals([*jaxpr.constvars, *jaxpr.invars]))
    moving = _numbers(w, fixed)
    inputs = (*moving, *loop, *slices)
    attributes = {"consts": len(moving), "carries": carried, "length": length, "reverse": reverse}
    pairs = tuple((k, len(moving) + k) for k in range(carried))
    body = Body(graph, tuple(range(len(inputs))), carries=pairs)
    return _added(w, eqn, "scan", inputs, attributes, [body])


def _added(
    w: Any, eqn: Any, operation: str, inputs: Any, attributes: Any, bodies: Any
) -> list[Entry]:
    first = len(w._nodes)
    result = list(w._node(operation, inputs, _made(eqn), attributes, bodies))
    w.tell(eqn, first, result)
    return result


def _unrolled(
    w: Any, jaxpr: Any, fixed: Any, carry: Any, xs: Any, length: int, reverse: bool
) -> list[Entry]:
    """A loop that draws: each round has its own numbers, so it is written out."""
    rounds: list[Any] = [None] * length
    for t in range(length)[:: -1 if reverse else 1]:
        slices = [_at(w, x, t) for x in xs]
        outs = w.run(jaxpr, [*fixed, *carry, *slices])
        carry, rounds[t] = outs[: len(carry)], outs[len(carry) :]
    return [
        *carry,
        *(_stacked(w, [r[k] for r in rounds]) for k in range(len(rounds[0]) if rounds else 0)),
    ]


def _at(w: Any, x: Entry, t: int) -> Entry:
    if isinstance(x, Known):
        return Known(x.value[t], x.drawn)
    shape = w.shape(x)
    start, limit = (t, *(0 for _ in shape[1:])), (t + 1, *shape[1:])
    return w("reshape", w("slice", x, start=start, limit=limit), shape=shape[1:])


def _stacked(w: Any, entries: Sequence[Entry]) -> Entry:
    known = [e.value for e in entries if isinstance(e, Known)]
    if len(known) == len(entries):
        return Known(jnp.stack(known))
    return w("stack", *map(w.number, entries), axis=0)


def _while(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
    p = eqn.params
    first, second = p["cond_nconsts"], p["body_nconsts"]
    carry: list[Entry] = [w.number(e) for e in entries[first + second :]]
    parts, bodies, numbers = [], [], []
    owned = entries[:first], entries[first : first + second]
    for program, own in zip(jaxprs.programs_of(eqn), owned, strict=True):
        jaxpr, held = _program(w, program)
        fixed = [*held, *own]
        run = lambda inner, given, jaxpr=jaxpr: inner.run(jaxpr, given)
        bodies.append(_body(w, run, [*fixed, *carry], _avals([*jaxpr.constvars, *jaxpr.invars])))
        numbers.append(_numbers(w, fixed))
        parts.append(len(numbers[-1]))
    inputs = (*numbers[0], *numbers[1], *carry)
    at = tuple(range(len(inputs)))
    before = parts[0] + parts[1]
    inner = [
        Body(bodies[0], (*at[: parts[0]], *at[before:]), gate=True),
        Body(bodies[1], at[parts[0] :]),
    ]
    attributes = {"condition_consts": parts[0], "body_consts": parts[1]}
    return _added(w, eqn, "while", inputs, attributes, inner)


def _cond(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
    branches = [_program(w, branch) for branch in jaxprs.programs_of(eqn)]
    index, operands = entries[0], entries[1:]
    if isinstance(index, Known):
        k = min(max(int(index.value), 0), len(branches) - 1)
        jaxpr, own = branches[k]
        return list(w.run(jaxpr, [*own, *operands]))
    held = [h for _, own in branches for h in own]
    fixed = [*held, *operands]
    avals = [v.aval for j, _ in branches for v in j.constvars] + _avals(eqn.invars[1:])
    bodies, before = [], 0
    for jaxpr, own in branches:
        n, m = before, before + len(own)
        run = lambda inner, given, jaxpr=jaxpr, n=n, m=m: inner.run(
            jaxpr, [*given[n:m], *given[len(held) :]]
        )
        bodies.append(_body(w, run, fixed, avals))
        before = m
    inputs = (w.number(index), *_numbers(w, fixed))
    at = tuple(range(1, len(inputs)))
    return _added(w, eqn, "cond", inputs, {}, [Body(b, at) for b in bodies])


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}


# --- rules -------------------------------------------------------------------------------

_RULES = tuple(
    f"gradtools_{name}" for name in ("primal", "evaluation", "value", "tangent", "cotangent")
)


def _rule(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
    """A rule of gradtools' own: its value, or one of its linear maps."""
    rule, name = eqn.params["rule"], eqn.primitive.name
    if name == "gradtools_primal" and rule.name == "scale_gradient":
        factor = w.scalar(w.number(entries[1]))
        if factor is not None:
            return [w("scale_gradient", w.number(entries[0]), scale=factor)]
    if name == "gradtools_primal" and (result := _crossed(w, eqn, entries)) is not None:
        return result
    linear = name in ("gradtools_tangent", "gradtools_cotangent")
    plain = linear or rule.name.startswith("frozen") or w.depth >= _DEEPEST
    if plain:
        return _written_out(eqn, w, entries)
    try:
        return custom_rule(w, eqn, entries, rule.name, partial(_written_out, eqn))
    except MissingRuleError:  # the backward pass of a kernel may have no derivative of its own
        if not w.depth:
            raise
        return _written_out(eqn, w, entries)


def _crossed(w: Any, eqn: Any, entries: Sequence[Entry]) -> list[Entry] | None:
    """A call of a function of another framework: what that one writes, as one node."""
    crossed = crossing(eqn)
    if crossed is None:
        return None
    for body in called_inside(eqn):
        *before, eqn = body.jaxpr.eqns
        laid_out = body.jaxpr.replace(eqns=before, outvars=eqn.invars)
        entries = w.run(laid_out, [*map(w.held, body.consts), *entries])
    numbers = [w.number(entry) for entry in entries]
    values = [w.concrete(number) for number in numbers]
    avals = [v.aval for v in eqn.invars]
    if any(value is None for value in values):
        return None
    xs = [np.asarray(value, a.dtype) for value, a in zip(values, avals, strict=True)]
    result = crossed.inside.formula(xs, crossed.batch)
    if result is None:
        return None
    held = [
        w.number(w.new(jnp.asarray(np.asarray(result.held[v])), result.values[v].name))
        for v in result.captured
    ]
    return _added(w, eqn, "call", (*numbers, *held), {}, [body_of(result)])


def _written_out(eqn: Any, w: Any, entries: Sequence[Entry]) -> list[Entry]:
    """What a primitive of gradtools runs, equation by equation."""
    closed = jax.make_jaxpr(partial(eqn.primitive.impl, **eqn.params))(*_avals(eqn.invars))
    return _run(w, closed, entries)


def without_derivative(jaxpr: Any) -> set[Any]:
    """Variables whose derivative nobody takes: only values that a rule hands on are made of them.

    JAX stops them, which says nothing in a formula.
    """
    if not any(eqn.primitive.name == "gradtools_value" for eqn in jaxpr.eqns):
        return set()
    caller = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        read = eqn.invars
        if eqn.primitive.name == "gradtools_value":
            first = eqn.params["xs"]
            read = [*read[:first], *read[first + len(eqn.outvars) :]]
        elif not caller.intersection(eqn.outvars):
            continue
        caller.update(v for v in read if not isinstance(v, Literal))
    return {v for eqn in jaxpr.eqns for v in eqn.outvars} - caller


def custom_rule(
    w: Any,
    eqn: Any,
    entries: Sequence[Entry],
    name: str,
    value: Callable[[Any, list[Entry]], Sequence[Entry]],
    again: bool = False,
) -> list[Entry]:
    """A node ``custom_rule``: residuals are the operands themselves.

    again: Its value holds the rule again, where the rule lasts; the node itself has it once.
    """
    avals = _avals(eqn.invars)
    operands: list[Entry] = [w.number(e) for e in entries]
    forward = _body(w, lambda inner, xs: [*value(inner, xs), *xs], operands, avals, again)
    closed = jax.make_jaxpr(pulled(eqn))(avals, _avals(eqn.outvars))
    run = lambda inner, xs: _run(inner, closed, xs)
    every = [*avals, *_avals(eqn.outvars)]
    backward = _body(w, run, [0] * len(every), every, deeper=True)
    attributes = {"name": name, "residuals": len(operands), "once": again and not w.depth}
    bodies = [Body(forward, tuple(range(len(operands)))), Body(backward, ())]
    return _added(w, eqn, "custom_rule", tuple(operands), attributes, bodies)
