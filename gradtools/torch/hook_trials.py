"""Hooks that f sets on gradients: what their result loses when it is differentiated is refused.

A hook may replace a cotangent by a solve, as a deep equilibrium model does, without a graph: the
gradient is right then, and its derivative lacks a term, in silence. So where a derivative of the
gradient is asked for, f runs once more, its effects undone, and each hook that it sets is tried:
with h(x, ct) what the hook makes of a cotangent at f's inputs x, autograd's derivative of h is
compared with central differences, in x and in ct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import LostDerivativeError, is_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import OWN, all_behind, is_spent, surveyed, tracked_in
from gradtools.torch.double_backward_trials import differs, told, wave
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.nondifferentiable import beside
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.replaying.guards import mark, marked
from gradtools.torch.rerunning import Trying, put_back

Tensor = torch.Tensor
Hook = Callable[[Tensor], Any]


def gated_at_hooks(
    caller: str,
    fun: Fun,
    leaves: Sequence[Tensor],
    aliases: Sequence[Tensor],
    outs: Sequence[Any],
    cts: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    linear: bool = False,
) -> list[Tensor | None]:
    """The gradient of `outs = fun(*leaves)`, with gates at what its hooks lose.

    aliases: The leaves' names in the graph of outs.
    linear: Whether hooks have to be linear maps.
    """
    pairs = [(y, ct) for y, ct in zip(outs, cts, strict=True) if ct is not None]
    outs, cts = [y for y, _ in pairs if y.requires_grad], [ct for _, ct in pairs]
    survey = surveyed(outs)
    nodes = all_behind([y.grad_fn for y in outs])
    inputs = tracked_in(nodes, aliases)
    behind = [ct for ct in cts if ct is not None and ct.requires_grad]
    captured = [x for x in survey.leaves if not is_spent(x)]
    seen: list[Any] = []

    def lost() -> set[str]:
        if not seen:
            with upstream.temporarily_clear_interpreter_stack():
                seen.append(_Trial(fun, leaves, captured).lost(linear))
        result: set[str] = seen[0]
        return result

    def ask(which: str) -> None:
        try:
            found = lost()
        except Exception as error:
            raise LostDerivativeError(
                f"{caller}: f sets a hook on a gradient, and the gradient is to be differentiated. "
                "What the hook makes of it may silently lose its derivative, so it is tried "
                f"once, by finite differences, and this one could not be: {told(error)}. Use "
                "gt.transform_gradient, or a gt.custom_rule."
            ) from error
        if NONLINEAR in found:
            raise LostDerivativeError(
                f"{caller}: f sets a hook on a gradient that is not linear in it, and a derivative "
                f"of the gradient is asked for, where {caller} takes the pullback for linear. Set "
                "the hook outside of what is computed again."
            )
        if which in found or (found and which == "inputs"):  # on which what comes in may depend
            along = " or ".join(_ALONG[k] for k in sorted(found))
            raise LostDerivativeError(
                f"{caller}: f sets a hook on a gradient whose result autograd cannot differentiate "
                f"with respect to {along} (it solves or computes under no_grad, or by "
                "torch.autograd.grad without create_graph=True), so that a second derivative is "
                "lost. Write the hook of PyTorch's operations, or use gt.custom_rule."
            )

    there = [g for g in grads if g is not None]
    if upstream.forward_level() >= 0:
        ask("inputs")
        ask("cotangents")
    if not there or not torch.is_grad_enabled():
        return list(grads)
    if not any(g.requires_grad for g in there) and (inputs or behind):
        try:
            if not lost():
                return list(grads)  # a gate would make of a constant something that leads on
        except Exception:  # of which the gate tells
            pass
    for which, sources in (("cotangents", behind), ("inputs", inputs)):
        if sources:
            there = list(beside(there, sources, partial(ask, which), which == "inputs"))
    left = iter(there)
    return [None if g is None else next(left) for g in grads]


NONLINEAR = "nonlinear"
_ALONG = {"inputs": "f's inputs or parameters", "cotangents": "what comes in"}


class _Hooks(TorchFunctionMode):
    """Inside, the hooks that are set on tensors are seen, and copies stand for some tensors.

    A captured parameter itself is not moved: another thread may read it, or step.
    """

    def __init__(self, xs: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Hook]] = []
        self._copies = {id(x): y for x, y in zip(xs, copies, strict=True)}

    def _within(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(self._within, x)) if type(x) in (list, tuple) else x
        return self._copies.get(id(x), x)

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is torch.Tensor.register_hook:
            hook = args[1] if len(args) > 1 else (kwargs or {})["hook"]
            # A program that is computed again tries what is set in it by itself.
            if not (mark() or getattr(hook, "__module__", "").startswith(OWN[0])):
                self.seen.append((args[0], hook))
        kwargs = {k: self._within(x) for k, x in (kwargs or {}).items()}
        return fun(*self._within(tuple(args)), **kwargs)


class _Trial:
    """The hooks of f as maps of its inputs, of the leaves that it captured, and of cotangents."""

    def __init__(self, fun: Fun, leaves: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        self.fun, self.captured = fun, captured
        self.xs = [x.detach().clone() for x in leaves]
        self.randomness = Randomness.now([*self.xs, *captured])
        self.run: Any = lambda xs: fun(*xs)[0]
        if isinstance(fun, Trying):
            self.run = Trying(self.run, fun.roots)

    def lost(self, linear: bool) -> set[str]:
        """Along what a hook loses its derivative; and whether one is not linear, if asked for."""
        result = set()
        with restored(self.randomness), torch.inference_mode(False), torch.enable_grad():
            with self.hooks(0.0) as (_, hooks):
                cts = [wave(torch.ones_like(x), 2.0).detach() for x, _ in hooks]
            for i, ct in enumerate(cts):
                if linear and not self._is_linear(i, ct):
                    result.add(NONLINEAR)
                if self._differ(ct, partial(self._along_inputs, i, ct)):
                    result.add("inputs")
                if self._differ(ct, partial(self._along_cotangents, i, ct)):
                    result.add("cotangents")
        return result

    def _differ(self, ct: Tensor, at: Callable[[float, bool], float]) -> bool:
        known, size = at(0.0, True), abs(at(0.0, False))
        for part in (1.0, 0.125):  # a longer step may pass a kink
            h = part * torch.finfo(ct.dtype).eps ** 0.3
            first, second = ((at(s, False) - at(-s, False)) / (2 * s) for s in (h, 2 * h))
            if not differs(known, first, second, size, ct.dtype):
                return False
        return True

    def _is_linear(self, i: int, ct: Tensor) -> bool:
        with self.hooks(0.0) as (_, hooks):
            known, *others = [_number(hooks[i][1], s * ct) for s in (1.0, -0.5, 1e4)]
        pairs = zip((-0.5, 1e4), others, strict=True)
        slack = torch.finfo(ct.dtype).eps ** 0.5
        # What is not finite, as in half precision, tells nothing.
        return all(not y.isfinite() or abs(y / s - known) <= slack * abs(known) for s, y in pairs)

    def _along_inputs(self, i: int, ct: Tensor, step: float, slope: bool) -> float:
        """A number of hook i with its inputs moved by a step; its derivative there."""
        with self.hooks(step) as (xs, hooks):
            total = _number(hooks[i][1], ct)
            return _slope(total, xs, 1.5) if slope else float(total.detach())

    def _along_cotangents(self, i: int, ct: Tensor, step: float, slope: bool) -> float:
        with self.hooks(0.0) as (_, hooks):
            moved = (ct + step * wave(ct, 1.5)).requires_grad_()
            total = _number(hooks[i][1], moved)
            return _slope(total, [moved], 1.5) if slope else float(total.detach())

    @contextmanager
    def hooks(self, step: float) -> Iterator[tuple[list[Tensor], list[tuple[Tensor, Hook]]]]:
        """f's inputs, moved by a step with what it captured, and the hooks that f sets there."""
        xs = [x + step * wave(x, 1.5) if is_inexact(x) else x for x in self.xs]
        xs = [x.detach().requires_grad_(is_inexact(x)) for x in xs]
        copies = [(x + step * wave(x, 1.5)).detach().requires_grad_() for x in self.captured]
        if self.randomness is not None:
            self.randomness.restore()
        hooks = _Hooks(self.captured, copies)
        with put_back(self.run, self.xs), marked(""), hooks:  # what is set in it is the user's
            self.run([x.view_as(x) for x in xs])
            yield [*xs, *copies], hooks.seen


def _number(hook: Hook, ct: Tensor) -> Tensor:
    """Re<w, h(ct)>."""
    out = hook(ct)
    out = ct if out is None else out
    return (out.conj() * wave(torch.ones_like(out), 3.0)).real.sum()


def _slope(total: Tensor, xs: Sequence[Tensor], shift: float) -> float:
    xs = [x for x in xs if x.requires_grad]
    if not (total.requires_grad and xs):
        return 0.0
    try:
        grads = torch.autograd.grad(total, xs, allow_unused=True)
    except RuntimeError as error:  # once_differentiable raises on some ways only
        if not is_of("torch", error):
            raise
        return 0.0
    pairs = [(x, g) for x, g in zip(xs, grads, strict=True) if g is not None]
    return sum(float((g.conj() * wave(x, shift)).real.sum()) for x, g in pairs)
