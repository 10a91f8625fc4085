"""Pullbacks of functions, and the transpose of a rule's map for the mode that it lacks.

A linear map v -> L(v) is transposed by differentiating it. PyTorch does so for nonlinear maps as
well; `checking.py` checks linearity first.

Recursion must be broken where a rule applies itself to tangents. The forward rule of a linear
function may be the function, df(x)[t] = f(t). Transposing it needs the derivative of t -> f(t),
which by the rule is df(t)[s] = f(s), and so on without end. A linear function is its own
derivative, so there the function's code is transposed, as in JAX, which evaluates a `custom_jvp`
as plain code when it is transposed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def in_eager() -> bool:
    """Whether no torch.func transform and no compiler is active."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


# --- pullbacks ---------------------------------------------------------------------------


def pull(fun: Fun, xs: Sequence[Tensor], cts: Sequence[Any]) -> list[Any]:
    """The pullback of `fun` at xs, of cotangents; None, also among these, stands for zeros."""
    return list(_vjp(fun, xs)[1](cts))


def push(fun: Fun, xs: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """The tangents of the outputs, as the transpose of the pullback; dual levels do not nest."""
    outs, pullback = _vjp(fun, xs)
    mask = [y is not None for y in outs]
    zeros = [torch.zeros_like(y) for y in outs if y is not None]
    return spread(pull(lambda *cts: pullback(spread(cts, mask)), zeros, dxs), mask)


def _vjp(fun: Fun, xs: Sequence[Tensor], eager: bool | None = None) -> tuple[list[Any], Any]:
    """The outputs of fun at xs, None for integers, and their pullback, of tensors or None.

    In eager mode by autograd itself, at aliases of xs: a third of the time of torch.func, which
    works under any transform. Where gradients are on, the pullback is differentiable. Hooks on
    saved tensors, which torch.func refuses, see nothing.

    eager: Whether by autograd; None: if no tensor may have a tangent, which an alias would lose.
    """
    if in_eager() and upstream.forward_level() < 0 if eager is None else eager:
        spent = [False]
        with unpacked(), torch.enable_grad():
            at = [x.view_as(x) if x.requires_grad else _leaf(x, spent) for x in xs]
            outs = [y if y is not None and is_inexact(y) else None for y in fun(*at)]
        spent[0] = True
        return outs, lambda cts: _pulled(outs, at, cts)
    mask: list[bool] = []

    def dense(*xs: Tensor) -> tuple[Tensor, ...]:
        ys = fun(*xs)
        mask[:] = [y is not None and is_inexact(y) for y in ys]
        return tuple([y for y, m in zip(ys, mask, strict=True) if m]) or (torch.zeros(()),)

    with unpacked():
        dense_outs, dense_pull = torch.func.vjp(dense, *xs)[:2]
    ys = spread(dense_outs[: sum(mask)], mask)

    def pullback(cts: Sequence[Any]) -> list[Any]:
        pairs = zip(ys, cts, strict=True)
        full = [torch.zeros_like(y) if ct is None else ct for y, ct in pairs if y is not None]
        with unpacked():  # views, since what fun returns unchanged may be of a level that has ended
            return [v.view_as(v) for v in dense_pull(tuple(full) or (torch.zeros(()),))]

    return ys, pullback


def _leaf(x: Tensor, spent: list[bool]) -> Tensor:
    """A leaf at x, which is a constant to other derivatives once it is spent."""
    leaf = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    setattr(leaf, SPENT, spent)
    return leaf


def _pulled(outs: Sequence[Any], xs: Sequence[Tensor], cts: Sequence[Any]) -> Sequence[Any]:
    """Autograd's pullback of cotangents to xs; None for zeros."""
    pairs = list[Any]()
    for y, ct in zip(outs, cts, strict=True):
        if y is not None and ct is not None and y.requires_grad:
            pairs.append((y, ct))
    if not pairs:
        return [None] * len(xs)
    ends, given = zip(*pairs, strict=True)
    with unpacked():
        return upstream.run_engine(ends, given, True, torch.is_grad_enabled(), tuple(xs), True)


# --- the transpose of a rule's map -------------------------------------------------------


def transposed(
    rule: Rule, linear: Map, at: Sequence[Tensor], likes: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """The transpose of `vs -> linear(at, vs)`, of vectors with these avals, at `values`.

    With gradients on, the result is differentiable in `at` and `values`. None for zeros, and for
    the vectors of integers, whose aval is None.
    """
    mask = [like is not None for like in likes]
    if not any(mask):
        return [None] * len(likes)
    eager = in_eager()
    alone = eager and not torch.is_grad_enabled() and upstream.forward_level() < 0
    at = [x.detach() for x in at] if alone else at

    def run(*vs: Tensor) -> Sequence[Any]:
        level = None if eager else upstream.peek_interpreter_stack().level()
        with applying_to(rule, level if level or alone else {*map(id, vs)}):
            outs = linear(at, spread(vs, mask))
        for y, v in zip(outs, values, strict=True):
            if y is not None and v is not None and not y.requires_grad:
                _refuse_cut(rule, y, v)
        return outs

    vectors = [ones(*like) for like in likes if like is not None]
    return spread(_vjp(run, vectors, eager)[1](values), mask)


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


Vectors = set[int] | int | None
"""What tells the vectors of a map from other tensors: the ids of these leaves, the level of
torch.func at which the map is traced, or None if no other tensor requires grad."""


class _Ongoing(threading.local):
    """This thread's maps that run in order to be transposed, the innermost last.

    Each is the `origin` of its rule, and its vectors.
    """

    def __init__(self) -> None:
        self.maps: list[tuple[Any, Vectors]] = []


ongoing = _Ongoing()


@contextmanager
def applying_to(rule: Rule, vectors: Vectors) -> Iterator[None]:
    """A block in which a map of the rule runs at these vectors, in order to be transposed."""
    ongoing.maps.append((rule.origin, vectors))
    try:
        yield
    finally:
        ongoing.maps.pop()


def in_own_transpose(rule: Rule, xs: Sequence[Tensor]) -> bool:
    """Whether xs depend on vectors to which the rule's own tangent map is applied.

    Also if that map applied another rule, which applies this one. A rule with a cotangent map
    needs no transposition.
    """
    maps = ongoing.maps
    origins = [origin for origin, _ in maps]
    if rule.cotangent is not None or rule.linearize is not None or rule.origin not in origins:
        return False
    inner = [vectors for _, vectors in maps[origins.index(rule.origin) :]]
    ids = set[int]().union(*[v for v in inner if isinstance(v, set)])
    for x in xs:
        while upstream.is_wrapped(x):  # a BatchedTensor does not show a tracked inner tensor
            if upstream.is_gradtrackingtensor(x) and upstream.maybe_get_level(x) in inner:
                return True
            x = upstream.get_unwrapped(x)
        if x.requires_grad and (
            None in inner or (ids and any(id(leaf) in ids for leaf in leaves_of([x])))
        ):
            return True
    return False
