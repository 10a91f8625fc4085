"""Trials: does a piece of the user's code lose the derivative of its gradient in silence?

Autograd cannot tell a constant from what was computed outside of it. So such code is run once more,
and autograd's derivative of its gradient g is compared with the central difference

    (g(x + h v) - g(x - h v)) / 2 h

A kind of such code is a `Suspect`: custom Functions in `double_backward.py`, hooks in
`hook_trials.py`. Its gradient gets gates (`nondifferentiable.py`), which refuse what a trial lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtools.errors import LostDerivativeError, is_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.nondifferentiable import gated_where_lost

Tensor = torch.Tensor


class Untestable(Exception):
    """Code cannot be tried; the text is the reason."""


class Suspect:
    """Code in one graph that may lose the derivative of its gradient.

    Attributes:
        caller: The operator's name.
    """

    caller: str

    def fine(self, forward: bool) -> bool | None:
        """Whether it is known to lose nothing in this mode; None without a trial."""
        return None

    def lost(self, forward: bool) -> set[str]:
        """What a trial in this mode finds lost: the derivative along "inputs" or "cotangents".

        Raises:
            Untestable: It cannot be tried.
        """
        raise NotImplementedError

    def says(self, which: str, lost: set[str] | Untestable) -> str | None:
        """The text of the refusal along these, given what a trial found; None if it is fine."""
        raise NotImplementedError

    def refuse(self, which: str, forward: bool = False) -> None:
        """Raises if it loses, or may lose, the derivative of its gradient along these."""
        if self.fine(forward):
            return
        cause = None
        try:
            text = self.says(which, self.lost(forward))
        except Untestable as why:
            cause, text = why, self.says(which, why)
        if text:
            raise LostDerivativeError(f"{self.caller}: {text}") from cause

    def gated(
        self,
        grads: Sequence[Any],
        behind: Sequence[Tensor],
        inputs: Sequence[Tensor],
        pushed: bool,
        attached: Callable[[], Sequence[Any] | None] = lambda: None,
    ) -> Sequence[Any]:
        """Its gradients, with gates to the cotangents and the inputs on which they may depend.

        behind: The cotangents that are differentiated.
        inputs: The inputs that are.
        pushed: Whether the gradients are pushed along in forward mode, where there are no gates.
        attached: Makes gradients with graphs, if that is how the code loses nothing.
        """
        there = [g for g in grads if isinstance(g, Tensor)]
        if not there or self.fine(pushed):
            return grads
        if pushed:
            self.refuse("inputs", True)
            self.refuse("cotangents", True)
        if not torch.is_grad_enabled():
            return grads
        # A gate would give a constant gradient a graph.
        if not any(map(is_tracked, there)) and (behind or inputs):
            fine = self.fine(False)
            if fine is None:
                try:
                    fine = not self.lost(False)
                except Untestable:  # the gate will report it
                    fine = False
            if fine:
                return grads
            made = attached()
            if made:
                return made
        return gated_where_lost(grads, behind, inputs, self.refuse)


def is_tracked(x: Tensor | None) -> bool:
    """Whether a tensor requires a gradient at any of its levels."""
    while x is not None and not x.requires_grad and upstream.is_wrapped(x):
        x = upstream.get_unwrapped(x)
    return x is not None and x.requires_grad


# --- numbers ---------------------------------------------------------------------------------


def differ(at: Callable[[float], Sequence[float]], known: Sequence[float], eps: float) -> bool:
    """Whether derivatives differ from central differences with the steps h and 2 h.

    at: The differentiated numbers after a step.
    known: Their derivatives.
    """
    sizes, wrong = [*map(abs, at(0.0))], set(range(len(known)))
    for part in (1.0, 0.125):  # a long step may cross a kink
        h = part * eps**0.3
        ends = [at(step) for step in (h, -h, 2 * h, -2 * h)]
        for i in [*wrong]:
            first, second = ((ends[k][i] - ends[k + 1][i]) / (h * (k + 2)) for k in (0, 2))
            error = 10 * abs(first - second) + 100 * eps**0.7 * sizes[i]
            if abs(known[i] - first) <= error + 1e-3 * abs(first):
                wrong.discard(i)
        if not wrong:
            return False
    return True


def paired(ys: Sequence[Tensor | None], ws: Sequence[Any] | None = None) -> Tensor:
    """Re<w, y>, a number that depends on all entries; by default w has the size of one."""
    ws = ws or [None if y is None else wave(torch.ones_like(y), 3.0) for y in ys]
    terms = [(y.conj() * w).real.sum() for y, w in zip(ys, ws, strict=True) if y is not None]
    return sum(terms[1:], terms[0]) if terms else torch.zeros(())


def slope(total: Tensor, xs: Sequence[Tensor], vs: Sequence[Tensor]) -> float:
    """Autograd's derivative of a number along vs; 0 where it has no graph."""
    if not (total.requires_grad and xs):
        return 0.0
    try:
        grads = torch.autograd.grad(total, xs, allow_unused=True, retain_graph=True)
    except NotImplementedError:
        raise
    except RuntimeError as error:  # once_differentiable raises on some ways only
        if not is_of("torch", error):
            raise
        return 0.0
    pairs = [(g, v) for g, v in zip(grads, vs, strict=True) if g is not None]
    return sum(float((g.conj() * v).real.sum()) for g, v in pairs)


def on_one_line(error: BaseException) -> str:
    """An error's type and text on one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ").rstrip(" :")


def wave(x: Tensor, shift: float) -> Tensor:
    """A deterministic tensor of x's shape and magnitude."""
    at = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
    wave = torch.sin(at * shift + shift).reshape(x.shape)
    if not x.numel():
        return x.detach()
    size = x.detach().abs().square().mean().sqrt()
    size = torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))
    if x.is_complex():
        wave = torch.complex(wave, torch.cos(at * shift).reshape(x.shape))
    return (wave * size).to(x.dtype)
