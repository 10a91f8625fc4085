"""Checks numerically that a user's maps satisfy `gradtools.rule_contract`.

A map is evaluated once for a rule and a signature, at copies of the current values, with random
generators restored afterwards. Where there are no values, as in code that is being compiled, it is
evaluated at made-up numbers, and a check that fails to run there is postponed.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gradtools.custom_structure import avals_of
from gradtools.errors import GradtoolsError, warn
from gradtools.rule_contract import is_linear
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import unwrapped
from gradtools.torch.modes import unpacked
from gradtools.torch.randomness import Randomness, restored

Tensor = torch.Tensor
Map = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
_PLAIN = (Tensor, torch.nn.Parameter)
_LINEAR: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True, eq=False, repr=False)
class CheckedMap:
    """A linear map of a rule at some residuals, to be checked.

    Attributes:
        rule: The rule.
        which: "tangent" or "cotangent", what it is linear in.
        run: `run(at, vs)`; results and entries may be None.
        at: The residuals.
        likes: The shapes, dtypes and devices of its vectors, None for integers.
        avals: Those of the rule's inputs, at which it is evaluated again if lengths are symbolic;
            empty if `run` is valid for any residuals.
    """

    rule: Rule
    which: str
    run: Map
    at: Sequence[Any]
    likes: Sequence[Any]
    avals: Sequence[Any] = ()

    @property
    def signature(self) -> Any:
        """The shapes and dtypes of residuals and vectors."""
        likes = [like and (_sizes(like[0]), like[1]) for like in self.likes]
        return avals_of(self.at), tuple(likes)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A block in which no mode, transform, graph or hook sees the evaluations of a check."""
    outside = upstream.temporarily_clear_interpreter_stack()
    with upstream.disable_current_modes(), outside, torch.no_grad(), unpacked():
        yield


@contextmanager
def _at_numbers(linear_map: CheckedMap) -> Iterator[tuple[Map, list[Tensor], bool]]:
    """The map, concrete residuals, and whether these are made up, for an undisturbed block."""
    rule, run, avals = linear_map.rule, linear_map.run, linear_map.avals
    with _undisturbed(), restored(Randomness.now(linear_map.at)):
        at = [value_of(x) for x in linear_map.at]
        made_up = any(x is None for x in at)
        if not made_up:
            at = [x.clone() for x in at]
        elif avals and any(None in _sizes(shape) for shape, _, _ in avals):
            xs = [_wave(aval, 0.5, 1.0) for aval in avals]
            linearized = rule.at(*xs)
            chosen = linearized.tangent if linear_map.which == "tangent" else linearized.cotangent
            assert chosen is not None
            run, at = chosen, [x.detach() for x in linearized.saved(xs)]
        else:
            at = [_wave((x.shape, x.dtype, x.device), 0.5, 1.0) for x in linear_map.at]
        yield run, at, made_up


# --- host kernels, which a check must not run --------------------------------------------


class KernelReached(Exception):
    """A check reached a host kernel, which it must not run."""


class _Checking(threading.local):
    """Whether this thread runs a check without kernels. A class attribute is read fastest."""

    active = False


CHECKING = _Checking()


def refuse_kernel() -> None:
    """Aborts a check that would run a host kernel."""
    if not is_compiling() and CHECKING.active:
        raise KernelReached


@contextmanager
def _kernels_refused(yes: bool = True) -> Iterator[None]:
    before, CHECKING.active = CHECKING.active, yes
    try:
        yield
    finally:
        CHECKING.active = before


# --- is it linear? -----------------------------------------------------------------------


def check_linear(linear_map: CheckedMap) -> None:
    """Raises if a map does not preserve sums and multiples.

    Runs once for a signature, with fixed vectors, so that it draws no random numbers.
    """
    rule, which = linear_map.rule, linear_map.which
    contract = rule.contract

    def check() -> None:
        _check_linear(linear_map)

    if contract is None:
        if rule.origin not in _LINEAR:
            check()
            _LINEAR.add(rule.origin)
    else:
        contract.check_once("linear", which, linear_map.signature, check=check)


def _check_linear(linear_map: CheckedMap) -> None:
    rule, which = linear_map.rule, linear_map.which
    mask, same = [like is not None for like in linear_map.likes], True
    likes = [like for like in linear_map.likes if like]
    with _at_numbers(linear_map) as (linear, at, made_up):
        v, w = ([_wave(like, shift, 0.0) for like in likes] for shift in (1.0, 2.0))
        try:
            same = is_linear(lambda vs: linear(at, spread(vs, mask)), v, w, _gap, _slack)
        except Exception as error:
            if not made_up:
                raise
            warn(
                f"rule {rule.name!r}: the other mode follows by transposing its {which} map, and "
                "whether that map is linear could not be checked, for at made-up values it "
                f"raises {type(error).__name__}: {error}"
            )
    if not same:
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
            f"but that map is not linear in its {which}s. Give the missing map as well, or make "
            "this one linear."
        )


# --- what does it return? ----------------------------------------------------------------


def abstract_eval(fun: Callable[..., list[Tensor]], *xs: Tensor) -> None:
    """Runs fun on copies of xs, or on fake tensors while it is being compiled.

    A FakeTensorMode of our own would import PyTorch's compiler, and leave fake tensors in fun's
    caches.
    """
    with _undisturbed(), suppress(Exception):  # f's own error will surface in the real call
        mode = upstream.detect_fake_mode([unwrapped(x) for x in xs])
        values = [value_of(x) for x in xs]
        if mode is not None:
            made = lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device)
            with mode:
                fun(*[made(x) if type(x) in _PLAIN else torch.empty_like(x) for x in xs])
        elif not any(x is None for x in values):
            try:
                drawn = Randomness.everywhere({x.device.type for x in values})
                with restored(drawn), _kernels_refused():
                    fun(*[x.clone() for x in values])
            except KernelReached:  # on the meta device a kernel returns its `out` specs
                fun(*[torch.empty_like(x, device="meta") for x in values])


# --- numbers -----------------------------------------------------------------------------


def _sizes(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The lengths of axes; None for a SymInt, which is not hashable."""
    return tuple([n if isinstance(n, int) else None for n in shape])


def _concrete(like: Any) -> Any:
    """`like` with size hints for SymInts, which adds no guard."""
    if not like:
        return like
    lengths = [n if isinstance(n, int) else upstream.size_hint(n, fallback=2) for n in like[0]]
    return lengths, like[1], like[2]


def value_of(x: Any) -> Any:
    """The concrete tensor inside functorch wrappers, one example of it under vmap.

    None in code being compiled and on the meta device.
    """
    if upstream.TracingContext.try_get() is not None or x.device.type == "meta":
        return None
    axes = []
    while upstream.is_wrapped(x):
        axes.append(upstream.maybe_get_bdim(x))
        x = upstream.get_unwrapped(x)
    for axis in reversed(axes):
        x = x if axis < 0 else x.select(axis, 0)
    return x.detach() if type(x) in _PLAIN else None


def _wave(aval: Any, shift: float, around: float) -> Any:
    """Test numbers of few binary digits, so that sums of them are exact; see `is_linear`."""
    shape, dtype, device = _concrete(aval)
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
