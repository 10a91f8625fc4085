"""Evaluates a user's functions for the checks of `gradtools.rule_contract`.

A map that is to be transposed must be linear: it is evaluated once for a signature, at copies of
the current values, with random generators restored afterwards. In code that is being compiled there
are no values, and it is evaluated at made-up numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gradtools.custom_structure import avals_of, lengths_of
from gradtools.errors import GradtoolsError
from gradtools.rule_contract import Contract, is_linear
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.modes import unpacked
from gradtools.torch.operation_marks import running
from gradtools.torch.state import Randomness, restored

Tensor = torch.Tensor


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A block in which no mode, transform, graph or hook sees the evaluations of a check."""
    outside = upstream.temporarily_clear_interpreter_stack()
    with upstream.disable_current_modes(), outside, torch.no_grad(), unpacked():
        yield


def check_linear(rule: Rule, which: str, run: Any, at: Sequence[Any], likes: Sequence[Any]) -> None:
    """Raises if a map of a user's rule does not preserve sums and multiples.

    Runs once for a signature, with fixed vectors, so that it draws no random numbers.

    Args:
        rule: The rule.
        which: "tangent" or "cotangent", what the map is linear in.
        run: `run(at, vs)`; results and entries may be None.
        at: The residuals.
        likes: The shapes, dtypes and devices of its vectors, None for integers.
    """
    mask = [like is not None for like in likes]

    def check() -> None:
        with _undisturbed(), restored(Randomness.now(at)):
            numbers = [_value_of(x) for x in at]
            made_up = any(x is None for x in numbers)
            if made_up:
                numbers = [_wave((x.shape, x.dtype, x.device), 0.5, 1.0) for x in at]
            numbers = [x.clone() for x in numbers]
            v, w = ([_wave(like, shift, 0.0) for like in likes if like] for shift in (1.0, 2.0))
            try:
                same = is_linear(lambda vs: run(numbers, spread(vs, mask)), v, w, _gap, _slack)
            except Exception:
                if not made_up:
                    raise
                return  # undecided
        if not same:
            raise GradtoolsError(
                f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
                f"but that map is not linear in its {which}s. Give the missing map as well, or "
                "make this one linear."
            )

    if isinstance(rule.origin, Contract):
        kinds = tuple([one and (lengths_of(one[0]), one[1]) for one in likes])
        rule.origin.check_once("linear", which, avals_of(at), kinds, check=check)


class KernelReached(Exception):
    """A check (`running.checked`) reached a host kernel, which it must not run."""


def abstract_eval(fun: Callable[..., list[Tensor]], *xs: Tensor) -> None:
    """Runs fun on copies of xs, once for a signature, and nothing where they have no values.

    A FakeTensorMode would import PyTorch's compiler, and leave fake tensors in fun's caches. A host
    kernel does not run: on the meta device it returns its `out` specs.
    """
    values = [_value_of(x) for x in xs]
    if any(x is None for x in values):
        return
    drawn = Randomness.everywhere({x.device.type for x in values})
    with _undisturbed(), restored(drawn), suppress(Exception):  # f's own error surfaces in the call
        before, running.checked = running.checked, True
        try:
            fun(*[x.clone() for x in values])
        except KernelReached:
            running.checked = before
            fun(*[torch.empty_like(x, device="meta") for x in values])
        finally:
            running.checked = before


# --- numbers -----------------------------------------------------------------------------


def _value_of(x: Any) -> Any:
    """x without functorch's wrappers, of a batch one example; None where x has no values."""
    if upstream.TracingContext.try_get() is not None or x.device.type == "meta":
        return None
    if not upstream.is_wrapped(x):
        return x.detach() if type(x) in (Tensor, torch.nn.Parameter) else None
    axis, inner = upstream.maybe_get_bdim(x), _value_of(upstream.get_unwrapped(x))
    return inner if inner is None or axis < 0 else inner.select(axis, 0)


def _wave(aval: Any, shift: float, around: float) -> Any:
    """Test numbers of few binary digits, so that sums of them are exact; see `is_linear`.

    A SymInt counts as its size hint, which adds no guard.
    """
    shape, dtype, device = aval[:3]
    shape = [n if isinstance(n, int) else upstream.size_hint(n, fallback=2) for n in shape]
    device = "cpu" if device.type == "meta" else device
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=device)
    wave = torch.sin(torch.arange(1, math.prod(shape) + 1, device=device) * shift)
    wave = around + (8 * wave).round() / 16
    return wave.reshape(shape).to(dtype)


def _gap(a: Tensor, b: Tensor) -> float:
    alike = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(alike, 0.0).max()) if a.numel() else 0.0


def _slack(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps ** 0.5
