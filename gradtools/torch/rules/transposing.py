"""The transpose of a rule's map, for the mode that the rule lacks.

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
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import ones, unwrapped
from gradtools.torch.modes import unpacked

Tensor = torch.Tensor
Map = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


def in_eager() -> bool:
    """Whether no torch.func transform and no compiler is active."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


def transposed(
    rule: Rule,
    linear: Map,
    at: Sequence[Tensor],
    likes: Sequence[Any],
    values: Sequence[Any],
    known: list[Tensor] | None = None,
) -> list[Any]:
    """The transpose of `vs -> linear(at, vs)`, of vectors with these avals, at `values`.

    In eager code by autograd, a third of the time of torch.func, which works under any transform.
    With gradients on, the result is differentiable in `at` and `values`. None for zeros, and for
    the vectors of integers, whose aval is None.

    known: For a map at tensors without tangents: a list that keeps the vectors of ones at which the
        map is traced, for later calls.
    """
    mask = [like is not None for like in likes]
    if not any(mask):
        return [None] * len(likes)
    if upstream.saved_tensors_hooks_on(False) is not None:  # torch.func refuses to run inside them
        with unpacked():
            return transposed(rule, linear, at, likes, values, known)
    eager, graphs = in_eager(), torch.is_grad_enabled()
    alone = eager and not graphs and (known is not None or upstream.forward_level() < 0)
    at = [x.detach() for x in at] if alone else at
    pairs = list[Any]()  # of results that have a graph, and their values

    def run(*vs: Tensor) -> tuple[Tensor, ...]:
        vectors: Vectors = None if alone else {*map(id, vs)}
        if not eager:
            vectors = upstream.peek_interpreter_stack().level()
        outs = applied_to(vectors, rule, linear, at, spread(vs, mask))
        for y, v in zip(outs, values, strict=True):
            if y is not None and v is not None:
                if y.requires_grad:
                    pairs.append((y, v))
                elif rule.contract is not None and rule.contract.checked:
                    _refuse_cut(rule, y, v)
        return tuple([y for y, _ in pairs])

    vs = known if alone and known else [ones(*like) for like in likes if like is not None]
    if not eager:
        pull = torch.func.vjp(lambda *vs: run(*vs) or (torch.zeros(()),), *vs)[1]
        pulled = pull(tuple([v for _, v in pairs]) or (torch.zeros(()),))
        # Views, since what the map returns unchanged may be of a level that has ended.
        return spread([v.view_as(v) for v in pulled], mask)
    if alone and known is not None:
        known[:] = vs
    upstream.set_grad_enabled(True)
    try:
        ys = run(*[v.requires_grad_() for v in vs])
    finally:
        upstream.set_grad_enabled(graphs)
    if not ys:
        return [None] * len(likes)
    given = tuple([v for _, v in pairs])
    return spread(upstream.run_engine(ys, given, graphs, graphs, tuple(vs), True), mask)


def _refuse_cut(rule: Rule, y: Tensor, v: Tensor) -> None:
    """Raises if a result y of a linear map, at vectors of ones, is not zero and has no graph.

    v: The vector of the transpose; y is not needed where it is zero.
    """
    if upstream.TracingContext.try_get() is None and all(
        bool((unwrapped(x) != 0).any()) for x in (y, v)
    ):
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode follows by transposing one of its maps, but "
            "PyTorch records no graph of that map, as under torch.no_grad or after detach. "
            "Compute it with gradients on, or give the missing map as well."
        )


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


def applied_to(vectors: Vectors, rule: Rule, run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)`, a map of the rule at these vectors, which runs in order to be transposed."""
    ongoing.maps.append((rule.origin, vectors))
    try:
        return run(*args)
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
