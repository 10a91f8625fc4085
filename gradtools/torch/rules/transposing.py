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
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import SPENT, leaves_of
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import is_inexact, unwrapped
from gradtools.torch.modes import unpacked

Tensor = torch.Tensor
Map = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def in_eager() -> bool:
    """Whether no torch.func transform and no compiler is active."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


def transposed(
    rule: Rule, linear: Map, at: Sequence[Any], examples: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """The transpose of `vs -> linear(at, vs)` (of vectors like `examples`) at `values`."""
    if not examples:
        return []
    if in_eager():
        return transposed_by_backward(rule, linear, at, examples, values)
    refuse_layout(rule, other_layout(at))  # torch.func works under any transform
    present: list[int] = []

    def dense(*vs: Tensor) -> Sequence[Tensor]:
        own.level = upstream.peek_interpreter_stack().level()
        try:
            out = linear(at, vs)
        finally:
            own.level = None
        _refuse_cut(rule, out, values)
        present[:] = [i for i, o in enumerate(out) if o is not None]
        return [out[i] for i in present] or [torch.zeros(())]  # vjp needs an output

    with Transposing(rule) as own:
        return pull(dense, examples, lambda outs: [values[i] for i in present] or [None])


def other_layout(xs: Sequence[Any]) -> torch.layout | None:
    """The first layout that is neither strided nor sparse_coo; maps cannot be transposed in it."""
    for x in xs:
        if x is not None and x.layout is not torch.strided and x.layout is not torch.sparse_coo:
            return x.layout
    return None


def refuse_layout(rule: Rule, layout: torch.layout | None, which: str = "one of its maps") -> None:
    """Raises if a map must be transposed at a tensor of an unsupported layout."""
    if layout is not None:
        name = str(layout).removeprefix("torch.").lstrip("_")
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode follows by transposing {which}, which "
            f"takes strided tensors, and one is {name}. Give the missing map as well, use "
            "sparse_coo, or pass the tensor's values as an argument."
        )


def transposed_by_backward(
    rule: Rule, linear: Map, at: Any, examples: Any, values: Any
) -> list[Any]:
    """By autograd itself, which takes a third of the time of torch.func.

    With gradients on, the result is differentiable in `at` and `values`.
    """
    graphs = torch.is_grad_enabled()
    with unpacked(), Transposing(rule, EAGER) as own, torch.enable_grad():
        vs = [_leaf(e, [True]) for e in examples]
        own.vectors = {*map(id, vs)} if graphs else None
        outs = linear(at if graphs else [x.detach() for x in at], vs)
        own.level = None  # traced
        if False in [y is None or y.requires_grad for y in outs]:
            _refuse_cut(rule, outs, values)
        pairs = zip(outs, values, strict=True)
        kept = [(o, v) for o, v in pairs if o is not None and v is not None and o.requires_grad]
        if not kept:
            return [None] * len(vs)
        ends, given = zip(*kept, strict=True)
        return list(upstream.run_engine(ends, given, graphs, graphs, tuple(vs), True))


def _refuse_cut(rule: Rule, outs: Sequence[Any], values: Sequence[Any]) -> None:
    """Raises if a result of a linear map, at vectors of ones, is not zero and has no graph.

    values: The vectors of the transpose; a result is not needed where its vector is zero.
    """
    if rule.contract is None or not rule.contract.checked or is_compiling():
        return
    for y, v in zip(outs, values, strict=True):
        if y is None or v is None or y.requires_grad or upstream.TracingContext.try_get():
            continue
        if is_nonzero(unwrapped(y)) and is_nonzero(unwrapped(v)):
            raise GradtoolsError(
                f"rule {rule.name!r}: the other mode follows by transposing one of its maps, but "
                "PyTorch records no graph of that map, as under torch.no_grad or after detach. "
                "Compute it with gradients on, or give the missing map as well."
            )


def is_nonzero(x: Tensor) -> bool:
    """Whether an entry is neither zero nor NaN."""
    return x.device.type != "meta" and bool(((x != 0) & ~x.isnan()).any())


def vjp(fun: Callable[..., Any], *xs: Any, has_aux: bool = False) -> Any:
    """`torch.func.vjp`, in eager mode by autograd itself.

    Runs inside of hooks on saved tensors, which torch.func refuses and which see nothing.
    """
    if is_compiling():
        return torch.func.vjp(fun, *xs, has_aux=has_aux)  # type: ignore[misc]
    if in_eager() and upstream.forward_level() < 0:
        return _eager_vjp(fun, xs, has_aux)
    with unpacked():
        outs, pull, *aux = torch.func.vjp(fun, *xs, has_aux=has_aux)  # type: ignore[misc]

    def pullback(cts: Any) -> Any:
        with unpacked():
            return pull(cts)

    return outs, pullback, *aux


def _leaf(x: Tensor, spent: list[bool]) -> Tensor:
    """A leaf at x, which is a constant to other derivatives once it is spent."""
    leaf = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    setattr(leaf, SPENT, spent)
    return leaf


def _eager_vjp(fun: Callable[..., Any], xs: Sequence[Tensor], has_aux: bool) -> Any:
    """`vjp` at aliases of xs, whose pullback is differentiable where gradients are on."""
    spent = [False]
    with unpacked(), torch.enable_grad():
        at = tuple([x.view_as(x) if x.requires_grad else _leaf(x, spent) for x in xs])
        outs = fun(*at)
    spent[0] = True
    outs, *aux = outs if has_aux else (outs,)

    def pullback(cts: Any) -> Any:
        kept = [(y, ct) for y, ct in zip(outs, cts, strict=True) if y.requires_grad]
        grads: Sequence[Any] = (None,) * len(at)
        graphs = torch.is_grad_enabled()
        if kept:
            ends, given = zip(*kept, strict=True)
            with unpacked():
                grads = upstream.run_engine(ends, given, True, graphs, at, True)
        return tuple(
            [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads, strict=True)]
        )

    plain = not torch.is_grad_enabled() or not any(x.requires_grad for x in xs)
    return tuple([y.detach() for y in outs]) if plain else outs, pullback, *aux


def vjp_of_inexact(
    fun: Callable[..., Sequence[Tensor]], *xs: Tensor
) -> tuple[list[Tensor], list[bool], Any]:
    """All outputs, a mask of the floating and complex ones, and the pullback of these."""
    carried: list[bool] = []

    def run(*xs: Tensor) -> Any:
        ys = fun(*xs)
        carried[:] = [is_inexact(y) for y in ys]
        pairs = list(zip(ys, carried, strict=True))
        return tuple([y for y, c in pairs if c]), [y for y, c in pairs if not c]

    result, pullback, others = vjp(run, *xs, has_aux=True)
    left = iter(others)
    return [next(left) if y is None else y for y in spread(result, carried)], carried, pullback


def pull(
    fun: Callable[..., Sequence[Tensor]],
    xs: Sequence[Tensor],
    cts: Any,
    reached: list[bool] | None = None,
) -> list[Any]:
    """The pullback of `fun` at xs, of `cts` (None: zero), or of what they give at the outputs.

    reached: An empty list to fill with whether each of xs reaches the outputs.
    """

    def noting(*xs: Tensor) -> Sequence[Tensor]:
        outs = fun(*xs)
        assert reached is not None
        if is_compiling():  # dynamo shows no graph
            reached.extend(True for _ in xs)
        else:
            leaves = {*map(id, leaves_of(outs))}
            reached.extend(id(x) in leaves for x in xs)
        return outs

    outs, carried, pullback = vjp_of_inexact(noting if reached == [] else fun, *xs)
    triples = zip(outs, cts(outs) if callable(cts) else cts, carried, strict=True)
    full = [torch.zeros_like(y) if ct is None else ct for y, ct, c in triples if c]
    del outs, triples  # frees the memory of a tile
    # Views, since a tensor that fun returns unchanged may be a wrapper of a dead level.
    return [v.view_as(v) for v in pullback(tuple(full))]


def value_and_push(
    fun: Callable[..., list[Tensor]], xs: Sequence[Tensor], dxs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents, as the transpose of the pullback, of one evaluation."""
    outs, carried, pullback = vjp_of_inexact(fun, *xs)
    zeros = [torch.zeros_like(y) for y, c in zip(outs, carried, strict=True) if c]
    again = vjp(pullback, tuple(zeros))[1]
    return outs, spread([v.view_as(v) for v in again(tuple(dxs))[0]], carried)


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
        level: The torch.func level at which the map is traced, or `EAGER`.
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
        if tracked or (x.requires_grad and any(map(partial(_follows, x), stack[first:]))):
            stack[first].by_code = True
            return True
    return False


def _follows(x: Tensor, running: Transposing) -> bool:
    """Whether x depends on the vectors of a transposition that autograd itself takes."""
    if running.level != EAGER:
        return False
    return running.vectors is None or any(id(leaf) in running.vectors for leaf in leaves_of([x]))
