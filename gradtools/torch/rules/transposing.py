"""The transpose of a rule's jvp map, or of its vjp map, for the mode that it lacks.

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
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import SPENT, leaves_of
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import is_inexact, ones, unwrapped
from gradtools.torch.modes import unpacked

Tensor = torch.Tensor
Map = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
_graphs, _set_graphs = torch.is_grad_enabled, upstream.set_grad_enabled


def in_eager() -> bool:
    """Whether no torch.func transform and no compiler is active."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


def transposed(rule: Rule, linear: Map, at: Any, likes: Any, values: Sequence[Any]) -> list[Any]:
    """The transpose of `vs -> linear(at, vs)`, of vectors with these avals, at `values`.

    In eager code by autograd, otherwise by torch.func, which works under any transform. With
    gradients on, the result is differentiable in `at` and `values`.
    """
    if not likes:
        return []
    eager, graphs = in_eager(), _graphs()

    def run(*vs: Tensor) -> Sequence[Any]:
        if eager:
            own.level, own.vectors = EAGER, {*map(id, vs)} if graphs else None
        else:
            own.level = upstream.peek_interpreter_stack().level()
        try:
            return linear(at if graphs or not eager else [x.detach() for x in at], vs)
        finally:
            own.level = None

    def checked(*vs: Tensor) -> Sequence[Any]:
        outs = run(*vs)
        _refuse_cut(rule, outs, values)
        return outs

    with Transposing(rule) as own:
        if eager:
            return transposed_by_backward(rule, run, spent_ones(likes), values)
        return vjp(checked, [ones(*like) for like in likes])[1](values)


def spent_ones(likes: Sequence[Any]) -> list[Tensor]:
    """Leaves at which a map is transposed, which are constants to derivatives that it takes."""
    vs = [ones(*like).requires_grad_() for like in likes]
    for v in vs:
        setattr(v, SPENT, [True])
    return vs


def transposed_by_backward(
    rule: Rule, linear: Callable[..., Sequence[Any]], vs: Sequence[Tensor], values: Sequence[Any]
) -> list[Any]:
    """The transpose of a function of the leaves vs at `values`, by autograd itself.

    None for zeros. A third of the time of torch.func.
    """
    if upstream.saved_tensors_hooks_on(False) is not None:
        with unpacked():
            return transposed_by_backward(rule, linear, vs, values)
    graphs = _graphs()
    _set_graphs(True)
    try:
        outs, ends, given = linear(*vs), list[Tensor](), list[Tensor]()
        for y, v in zip(outs, values, strict=True):
            if y is not None and v is not None:
                if y.requires_grad:
                    ends.append(y)
                    given.append(v)
                else:
                    _refuse_cut(rule, (y,), (v,))
        if not ends:
            return [None] * len(vs)
        return list(upstream.run_engine(tuple(ends), tuple(given), graphs, graphs, tuple(vs), True))
    finally:
        _set_graphs(graphs)


def _refuse_cut(rule: Rule, outs: Sequence[Any], values: Sequence[Any]) -> None:
    """Raises if a result of a linear map, at vectors of ones, is not zero and has no graph.

    values: The vectors of the transpose; a result is not needed where its vector is zero.
    """
    for y, v in zip(outs, values, strict=True):
        if y is None or v is None or y.requires_grad:
            continue
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


# --- pullbacks ---------------------------------------------------------------------------


def vjp(fun: Callable[..., Sequence[Any]], xs: Sequence[Tensor]) -> tuple[list[Any], Any]:
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
    left = iter(outs)
    ys = [next(left) if m else None for m in mask]

    def pullback(cts: Sequence[Any]) -> list[Any]:
        pairs = zip(ys, cts, strict=True)
        full = [torch.zeros_like(y) if ct is None else ct for y, ct in pairs if y is not None]
        with unpacked():  # views, since what fun returns unchanged may be of a level that has ended
            return [v.view_as(v) for v in pull(tuple(full) or (torch.zeros(()),))]

    return ys, pullback


def _eager_vjp(fun: Callable[..., Sequence[Any]], xs: Sequence[Tensor]) -> Any:
    """`vjp` at aliases of xs, whose pullback is differentiable where gradients are on."""
    spent = [False]
    with unpacked(), torch.enable_grad():
        at = [x.view_as(x) if x.requires_grad else _leaf(x, spent) for x in xs]
        outs = [y if y is not None and is_inexact(y) else None for y in fun(*at)]
    spent[0] = True

    def pullback(cts: Sequence[Any]) -> list[Any]:
        pairs = zip(outs, cts, strict=True)
        kept = [p for p in pairs if p[0] is not None and p[1] is not None and p[0].requires_grad]
        if not kept:
            return [torch.zeros_like(x) for x in xs]
        ends, given = zip(*kept, strict=True)
        with unpacked():
            grads = upstream.run_engine(ends, given, True, _graphs(), tuple(at), True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads, strict=True)]

    return outs, pullback


def _leaf(x: Tensor, spent: list[bool]) -> Tensor:
    """A leaf at x, which is a constant to other derivatives once it is spent."""
    leaf = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    setattr(leaf, SPENT, spent)
    return leaf


def pull(
    fun: Callable[..., Sequence[Tensor]], xs: Sequence[Tensor], cts: Sequence[Any]
) -> list[Any]:
    """The pullback of `fun` at xs, of `cts` (None: zero)."""
    return list(vjp(fun, xs)[1](cts))


def push(
    fun: Callable[..., Sequence[Tensor]], xs: Sequence[Tensor], dxs: Sequence[Any]
) -> list[Any]:
    """The tangents of the outputs, as the transpose of the pullback; dual levels do not nest."""
    outs, pullback = vjp(fun, xs)
    mask = [y is not None for y in outs]
    zeros = [torch.zeros_like(y) for y in outs if y is not None]

    def pulled(*cts: Tensor) -> list[Any]:
        left = iter(cts)
        return list(pullback([next(left) if m else None for m in mask]))

    left = iter(vjp(pulled, zeros)[1](dxs))
    return [next(left) if m else None for m in mask]


# --- a rule that is applied to the tangents of its own map --------------------------------

EAGER = -1  # autograd's own level, below the levels of torch.func


class _Ongoing(threading.local):
    """This thread's running transpositions, the innermost last."""

    def __init__(self) -> None:
        self.running: list[Transposing] = []


ONGOING = _Ongoing()


class Transposing:
    """Context manager around the transposition of one of a rule's maps.

    Attributes:
        rule: The rule.
        level: The torch.func level at which the map is traced, or `EAGER`; None elsewhere.
        by_code: Whether the rule met itself, so that its own code is transposed.
        vectors: The ids of the leaves at which the map is transposed; None if they alone require
            grad.
    """

    __slots__ = ("by_code", "level", "rule", "stack", "vectors")

    def __init__(self, rule: Rule, level: int | None = None) -> None:
        self.rule, self.level = rule, level
        self.by_code = False
        self.vectors: set[int] | None = None

    def __enter__(self) -> Transposing:
        self.stack = ONGOING.running
        self.stack.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.stack.pop()
        if isinstance(error, GradtoolsError):
            self.explain(error)

    def explain(self, error: GradtoolsError) -> None:
        """Re-raises the error, naming the rule, if the rule's own code was being transposed."""
        if self.by_code:
            name = self.rule.name
            raise GradtoolsError(
                f"rule {name!r}: its forward rule applies {name} itself to tangents, so "
                f"reverse mode transposes the code of {name}, which failed: {error} Give it a "
                "reverse rule as well, with defvjp(fwd, bwd)."
            ) from error


def in_own_transpose(rule: Rule, xs: Sequence[Tensor]) -> bool:
    """Whether xs are vectors of a running transposition of the rule's own tangent map.

    Also if that map applied another rule, which applies this one. A rule with a cotangent map
    needs no transposition.
    """
    stack = ONGOING.running
    if not stack or rule.cotangent is not None or rule.linearize is not None:
        return False
    first = next((i for i, t in enumerate(stack) if t.rule.origin is rule.origin), None)
    if first is None:
        return False
    levels = {t.level for t in stack[first:]}
    for x in xs:
        tracked = False
        while upstream.is_wrapped(x):  # a BatchedTensor does not show a tracked inner tensor
            tracked = tracked or (
                upstream.is_gradtrackingtensor(x) and upstream.maybe_get_level(x) in levels
            )
            x = upstream.get_unwrapped(x)
        if tracked or (x.requires_grad and any(_follows(x, t) for t in stack[first:])):
            stack[first].by_code = True
            return True
    return False


def _follows(x: Tensor, running: Transposing) -> bool:
    """Whether x depends on the vectors of a transposition that autograd itself takes."""
    if running.level != EAGER:
        return False
    return running.vectors is None or any(id(leaf) in running.vectors for leaf in leaves_of([x]))
