"""The jvp or vjp map that a rule lacks, by differentiating the one that it has, which is linear.

A linear map is transposed by differentiating it, which PyTorch does without asking whether it is
linear; `checking.py` asks.

One rule is of no use there: that which is applied to the tangents themselves. The forward rule of
a linear function may be the function, df(x)[t] = f(t). Its transpose asks for the derivative of
t -> f(t), which by the rule is df(t)[s] = f(s), and so on without end. What is linear is its own
derivative: there the function's own code is transposed, as JAX does, where a `custom_jvp` that
meets a transposition is evaluated as plain code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import surveyed
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import is_dual, is_inexact, is_wrapped
from gradtools.torch.plain_programs.backward_nodes import (
    corrected,
    corrected_vjp,
    wrong_nodes,
)

Tensor = torch.Tensor
Map = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def unpacked() -> AbstractContextManager[Any]:
    """A graph of our own that ends inside is saved as it is; no checkpoint keeps count of it."""
    if upstream.saved_tensors_hooks_on(False) is None:
        return nullcontext()
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def in_eager() -> bool:
    """Whether no transform of torch.func and no compiler is at work."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


def transposed(
    rule: Rule, linear: Map, at: Sequence[Any], examples: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """The transpose of `vs -> linear(at, vs)` (of vectors like `examples`) at `values`."""
    if not examples:
        return []
    plain = in_eager() and not torch.is_grad_enabled()
    if plain and not any(v is not None and (is_wrapped(v) or is_dual(v)) for v in values):
        return _by_backward(rule, linear, at, examples, values)
    return _by_vjp(rule, linear, at, examples, values)


def _by_backward(rule: Rule, linear: Map, at: Any, examples: Any, values: Any) -> list[Any]:
    """For numbers alone, by autograd itself, which takes a third of the time of torch.func."""
    with Transposing(rule) as own, torch.enable_grad():
        vs = [e.detach().requires_grad_() for e in examples]
        with own.traced(EAGER):
            outs = linear([x.detach() for x in at], vs)
        pairs = zip(outs, values, strict=True)
        kept = [(o, v) for o, v in pairs if o is not None and v is not None and o.requires_grad]
        if not kept:
            return [None] * len(vs)
        ends, given = zip(*kept, strict=True)
        with corrected(wrong_nodes(ends), again=False):
            return list(torch.autograd.grad(ends, vs, given, allow_unused=True))


def _by_vjp(rule: Rule, linear: Map, at: Any, examples: Any, values: Any) -> list[Any]:
    """`torch.func.vjp` takes no function without an output, as a map is that gives None."""
    for x in at:
        if x.layout not in (torch.strided, torch.sparse_coo):
            name = str(x.layout).removeprefix("torch.").lstrip("_")
            raise GradtoolsError(
                f"rule {rule.name!r}: one of its maps is transposed at a {name} tensor, which "
                "torch.func does not take. Give the missing map as well, or use sparse_coo."
            )
    came_out: list[int] = []

    def dense(*vs: Tensor) -> tuple[Tensor, ...]:
        with own.traced(upstream.peek_interpreter_stack().level()):
            out = linear(at, vs)
        came_out[:] = [i for i, o in enumerate(out) if o is not None]
        return tuple(out[i] for i in came_out) or (torch.zeros(()),)

    with Transposing(rule) as own:
        outs, pullback = corrected_vjp(dense, *examples)
        given = [values[i] for i in came_out] or [None]
        pairs = zip(outs, given, strict=True)
        filled = [torch.zeros_like(o) if v is None else v for o, v in pairs]
        # A view, because what a rule hands back as it was may be a wrapper of a level that ended.
        return [v.view_as(v) for v in pullback(tuple(filled))]


def vjp_of_inexact(
    fun: Callable[..., Sequence[Tensor]], *xs: Tensor
) -> tuple[list[Tensor], list[bool], Any]:
    """All outputs, which of them have a derivative, and the pullback of these."""
    carried: list[bool] = []

    def run(*xs: Tensor) -> Any:
        ys = fun(*xs)
        carried[:] = [is_inexact(y) for y in ys]
        pairs = list(zip(ys, carried, strict=True))
        return tuple([y for y, c in pairs if c]), [y for y, c in pairs if not c]

    result, pullback, others = corrected_vjp(run, *xs, has_aux=True)
    left = iter(others)
    return [next(left) if y is None else y for y in spread(result, carried)], carried, pullback


def pull(
    fun: Callable[..., list[Tensor]],
    xs: Sequence[Tensor],
    cts: Any,
    reached: list[bool] | None = None,
) -> list[Any]:
    """The pullback of `fun` at xs, of `cts` (None: zero), or of what they give at the outputs.

    reached: Is filled, if it is empty, with whether each of xs reaches the outputs.
    """

    def noting(*xs: Tensor) -> list[Tensor]:
        outs = fun(*xs)
        assert reached is not None
        if is_compiling():  # dynamo shows no graph
            reached.extend(True for _ in xs)
        else:
            leaves = {id(leaf) for leaf in surveyed(outs).leaves}
            reached.extend(id(x) in leaves for x in xs)
        return outs

    outs, carried, pullback = vjp_of_inexact(noting if reached == [] else fun, *xs)
    triples = zip(outs, cts(outs) if callable(cts) else cts, carried, strict=True)
    full = [torch.zeros_like(y) if ct is None else ct for y, ct, c in triples if c]
    del outs, triples  # as large as a tile
    return [v.view_as(v) for v in pullback(tuple(full))]


def push(fun: Callable[..., list[Tensor]], xs: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """The pushforward of `fun` at xs, of `dxs`, as the transpose of its pullback."""
    return value_and_push(fun, xs, dxs)[1]


def value_and_push(
    fun: Callable[..., list[Tensor]], xs: Sequence[Tensor], dxs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs and the pushforward, of one evaluation."""
    outs, carried, pullback = vjp_of_inexact(fun, *xs)
    zeros = [torch.zeros_like(y) for y, c in zip(outs, carried, strict=True) if c]
    again = torch.func.vjp(pullback, tuple(zeros))[1]
    return outs, spread([v.view_as(v) for v in again(tuple(dxs))[0]], carried)


# --- a rule that is applied to the tangents of its own map --------------------------------

EAGER = -1  # the level of autograd itself, beside the levels of torch.func


class _Here(threading.local):
    """This thread's transpositions under way, the innermost last."""

    def __init__(self) -> None:
        self.running: list[Transposing] = []


HERE = _Here()


class Transposing:
    """While one of the rule's maps is transposed.

    Attributes:
        rule: The rule.
        level: That of the vectors while the map is traced, on torch.func's levels or `EAGER`.
        by_code: Whether the rule's own code is transposed.
    """

    __slots__ = ("by_code", "level", "rule", "stack")

    def __init__(self, rule: Rule, level: int | None = None) -> None:
        self.rule, self.level = rule, level
        self.by_code = False

    def __enter__(self) -> Transposing:
        self.stack = HERE.running
        self.stack.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.stack.pop()
        if isinstance(error, GradtoolsError):
            self.explain(error)

    def explain(self, error: GradtoolsError) -> None:
        """Raises what says that it is the rule's own code that failed, where it is that."""
        if self.by_code:
            name = self.rule.name
            raise GradtoolsError(
                f"rule {name!r}: its forward rule applies {name} itself to tangents, so "
                f"reverse mode transposes the code of {name}, which failed: {error} Give it a "
                "reverse rule as well, with defvjp(fwd, bwd)."
            ) from error

    @contextmanager
    def traced(self, level: int) -> Iterator[None]:
        """While the map is traced, on this level of torch.func."""
        before, self.level = self.level, level
        try:
            yield
        finally:
            self.level = before


def in_own_transpose(rule: Rule, xs: Sequence[Tensor]) -> bool:
    """Whether the rule is applied to vectors through which its own map is being transposed.

    Its own, or that of a rule that its map applied in turn. A rule with a cotangent map needs no
    transposition there.
    """
    stack = HERE.running
    if not stack or rule.cotangent is not None or rule.linearize is not None:
        return False
    origins = [t.rule.origin for t in stack]
    if rule.origin not in origins:
        return False
    first = origins.index(rule.origin)
    levels = {t.level for t in stack[first:]}
    if not any(_is_tracked_at(levels, x) for x in xs):
        return False
    stack[first].by_code = True
    return True


def _is_tracked_at(levels: set[int | None], x: Tensor) -> bool:
    while upstream.is_wrapped(x):
        if upstream.is_gradtrackingtensor(x) and upstream.maybe_get_level(x) in levels:
            return True
        x = upstream.get_unwrapped(x)  # a batch does not say whether what it holds is tracked
    return EAGER in levels and x.requires_grad
