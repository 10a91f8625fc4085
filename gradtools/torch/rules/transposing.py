"""Pullbacks of functions, and the transpose of a rule's map for the mode that it lacks.

A linear map is transposed by differentiating it. PyTorch does so for nonlinear maps as well;
`checking.py` checks linearity first.

Recursion must be broken where a rule applies itself to tangents. The forward rule of a linear
function may be the function, df(x)[t] = f(t). Transposing it needs the derivative of t -> f(t),
which by the rule is df(t)[s] = f(s), and so on without end. A linear function is its own
derivative, so there the function's code is transposed, as in JAX, which evaluates a `custom_jvp`
as plain code when it is transposed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import SPENT, leaves_of
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import is_inexact, ones, unwrapped
from gradtools.torch.modes import unpacked

Tensor = torch.Tensor
Fun = Callable[..., Sequence[Any]]
Map = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
_graphs, _set_graphs = torch.is_grad_enabled, upstream.set_grad_enabled


def in_eager() -> bool:
    """Whether no torch.func transform and no compiler is active."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


# --- pullbacks ---------------------------------------------------------------------------


def vjp(fun: Fun, xs: Sequence[Tensor]) -> tuple[list[Any], Any]:
    """The outputs of fun at xs, None for integers, and their pullback, of tensors or None.

    Like `torch.func.vjp`, and in eager mode by autograd itself. Runs inside of hooks on saved
    tensors, which torch.func refuses and which see nothing.
    """
    if in_eager() and upstream.forward_level() < 0:
        return _eager_vjp(fun, xs)
    mask: list[bool] = []

    def dense(*xs: Tensor) -> tuple[Tensor, ...]:
        ys = fun(*xs)
        mask[:] = [y is not None and is_inexact(y) for y in ys]
        return tuple([y for y, m in zip(ys, mask, strict=True) if m]) or (torch.zeros(()),)

    with unpacked():
        outs, pull = torch.func.vjp(dense, *xs)[:2]
    ys = spread(outs[: sum(mask)], mask)

    def pullback(cts: Sequence[Any]) -> list[Any]:
        pairs = zip(ys, cts, strict=True)
        full = [torch.zeros_like(y) if ct is None else ct for y, ct in pairs if y is not None]
        with unpacked():  # views, since what fun returns unchanged may be of a level that has ended
            return [v.view_as(v) for v in pull(tuple(full) or (torch.zeros(()),))]

    return ys, pullback


def _eager_vjp(fun: Fun, xs: Sequence[Tensor]) -> Any:
    """`vjp` at aliases of xs, whose pullback is differentiable where gradients are on."""
    spent = [False]
    with unpacked(), torch.enable_grad():
        at = [x.view_as(x) if x.requires_grad else _leaf(x, spent) for x in xs]
        outs = [y if y is not None and is_inexact(y) else None for y in fun(*at)]
    spent[0] = True

    def pullback(cts: Sequence[Any]) -> list[Any]:
        with unpacked():
            grads = _engine(outs, at, cts, True, _graphs())
        return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads, strict=True)]

    return outs, pullback


def _leaf(x: Tensor, spent: list[bool]) -> Tensor:
    """A leaf at x, which is a constant to other derivatives once it is spent."""
    leaf = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    setattr(leaf, SPENT, spent)
    return leaf


def _engine(
    outs: Sequence[Any], xs: Sequence[Tensor], cts: Sequence[Any], retain: bool, graphs: bool
) -> Sequence[Any]:
    """Autograd's pullback of cotangents to xs; None for zeros."""
    pairs = list[Any]()
    for y, ct in zip(outs, cts, strict=True):
        if y is not None and ct is not None and y.requires_grad:
            pairs.append((y, ct))
    if not pairs:
        return [None] * len(xs)
    ends, given = zip(*pairs, strict=True)
    return upstream.run_engine(ends, given, retain, graphs, tuple(xs), True)


def pull(fun: Fun, xs: Sequence[Tensor], cts: Sequence[Any]) -> list[Any]:
    """The pullback of `fun` at xs, of `cts` (None: zero)."""
    return list(vjp(fun, xs)[1](cts))


def push(fun: Fun, xs: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """The tangents of the outputs, as the transpose of the pullback; dual levels do not nest."""
    outs, pullback = vjp(fun, xs)
    mask = [y is not None for y in outs]
    zeros = [torch.zeros_like(y) for y in outs if y is not None]
    return spread(pull(lambda *cts: pullback(spread(cts, mask)), zeros, dxs), mask)


# --- the transpose of a rule's map -------------------------------------------------------


def transposed(
    rule: Rule,
    linear: Map,
    at: Any,
    likes: Any,
    values: Sequence[Any],
    known: list[Tensor] | None = None,
) -> Any:
    """The transpose of `vs -> linear(at, vs)`, of vectors with these avals, at `values`.

    In eager code by autograd, a third of the time of torch.func, which works under any transform.
    With gradients on, the result is differentiable in `at` and `values`. None for zeros.

    known: A list that keeps the vectors at which the map is traced, for later calls.
    """
    if not likes:
        return []
    eager, graphs = in_eager(), _graphs()
    if eager and upstream.saved_tensors_hooks_on(False) is not None:
        with unpacked():
            return transposed(rule, linear, at, likes, values, known)
    own, running = Transposing(rule.origin), ONGOING.running
    at = at if graphs or not eager else [x.detach() for x in at]

    def run(*vs: Tensor) -> Sequence[Any]:
        own.level = EAGER if eager else upstream.peek_interpreter_stack().level()
        own.vectors = {*map(id, vs)} if eager and graphs else None
        try:
            outs = linear(at, vs)
        finally:
            own.level = None
        for y, v in zip(outs, values, strict=True):
            if y is not None and v is not None and not y.requires_grad:
                _refuse_cut(rule, y, v)
        return outs

    running.append(own)
    try:
        if not eager:
            return vjp(run, [ones(*like) for like in likes])[1](values)
        vs = [] if graphs or known is None else known
        if not vs:
            vs += [ones(*like).requires_grad_() for like in likes]
        _set_graphs(True)
        return _engine(run(*vs), vs, values, graphs, graphs)
    finally:
        _set_graphs(graphs)
        running.pop()


def _refuse_cut(rule: Rule, y: Tensor, v: Tensor) -> None:
    """Raises if a result y of a linear map, at vectors of ones, is not zero and has no graph.

    v: The vector of the transpose; y is not needed where it is zero.
    """
    if rule.contract is None or not rule.contract.checked or is_compiling():
        return
    if upstream.TracingContext.try_get() is None and _is_nonzero(y) and _is_nonzero(v):
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode follows by transposing one of its maps, but "
            "PyTorch records no graph of that map, as under torch.no_grad or after detach. "
            "Compute it with gradients on, or give the missing map as well."
        )


def _is_nonzero(x: Tensor) -> bool:
    """Whether an entry is neither zero nor NaN."""
    x = unwrapped(x)
    return x.device.type != "meta" and bool(((x != 0) & ~x.isnan()).any())


# --- a rule that is applied to the tangents of its own map --------------------------------

EAGER = -1  # autograd's own level, below the levels of torch.func


@dataclass(slots=True)
class Transposing:
    """A running transposition of one of a rule's maps.

    Attributes:
        origin: The `origin` of the rule.
        level: The torch.func level at which the map is traced, or `EAGER`; None elsewhere.
        vectors: The ids of the leaves at which it is traced; None if they alone require grad.
    """

    origin: Any
    level: int | None = None
    vectors: set[int] | None = None


class _Ongoing(threading.local):
    """This thread's running transpositions, the innermost last."""

    def __init__(self) -> None:
        self.running: list[Transposing] = []


ONGOING = _Ongoing()


def in_own_transpose(rule: Rule, xs: Sequence[Tensor]) -> bool:
    """Whether xs depend on vectors of a running transposition of the rule's own tangent map.

    Also if that map applied another rule, which applies this one. A rule with a cotangent map
    needs no transposition.
    """
    running = ONGOING.running
    if not running or rule.cotangent is not None or rule.linearize is not None:
        return False
    origins = [t.origin for t in running]
    if rule.origin not in origins:
        return False
    inner = running[origins.index(rule.origin) :]
    levels = {t.level for t in inner}
    eager = [t.vectors for t in inner if t.level == EAGER]
    alone, vectors = None in eager, set[int]().union(*filter(None, eager))
    for x in xs:
        while upstream.is_wrapped(x):  # a BatchedTensor does not show a tracked inner tensor
            if upstream.is_gradtrackingtensor(x) and upstream.maybe_get_level(x) in levels:
                return True
            x = upstream.get_unwrapped(x)
        if x.requires_grad and (
            alone or (vectors and any(id(leaf) in vectors for leaf in leaves_of([x])))
        ):
            return True
    return False
