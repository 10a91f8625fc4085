"""Checks that transposed maps of a user's rule are linear and that captured tensors are constants.

Linearity is checked once per signature. The map is evaluated at copies of the current values, and
the states of random generators are restored afterwards. During compilation, tensors have no values,
so the map is evaluated at fixed numbers.

Autograd differentiates a rule with respect to its arguments only, so a derivative with respect to a
captured tensor would silently be zero. Closures are searched before each call. If the search misses
a captured tensor, an output of the rule at detached arguments requires grad, and this also raises
an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CellType
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rule_contract import Contract, is_linear
from gradtools.rules import Rule, avals_of, captured_objects, lengths_of, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual, is_wrapped
from gradtools.torch.modes import unpacked
from gradtools.torch.operation_marks import checking
from gradtools.torch.state import Randomness, restored

Tensor = torch.Tensor


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Context manager that disables modes, transforms, grad mode and saved-tensor hooks."""
    outside = upstream.temporarily_clear_interpreter_stack()
    with upstream.disable_current_modes(), outside, torch.no_grad(), unpacked():
        yield


def check_linear(rule: Rule, which: str, run: Any, at: Sequence[Any], likes: Sequence[Any]) -> None:
    """Raises an error if a map of a user's rule does not preserve sums and multiples.

    Runs once per signature, with fixed vectors, so that the check draws no random numbers.

    Args:
        rule: The rule.
        which: The name of the map, "tangent" or "cotangent".
        run: Called as `run(at, vs)`; entries of vs and of the result may be None.
        at: The residuals.
        likes: The shape, dtype and device of each vector, or None for an integer input.
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
                slack = lambda x: torch.finfo(x.dtype).eps ** 0.5
                same = is_linear(lambda vs: run(numbers, spread(vs, mask)), v, w, _gap, slack)
            except Exception:
                if not made_up:
                    raise
                return  # linearity is undecided
        if not same:
            raise GradtoolsError(
                f"rule {rule.name!r}: the other mode is derived by transposing its {which} map, "
                f"but that map is not linear in its {which}s. Give the missing map as well, or "
                "make this map linear."
            )

    if isinstance(rule.origin, Contract):
        kinds = tuple([one and (lengths_of(one[0]), one[1]) for one in likes])
        rule.origin.check_once("linear", which, avals_of(at), kinds, check=check)


def abstract_eval(fun: Callable[..., list[Tensor]], *xs: Tensor) -> None:
    """Evaluates fun at copies of xs. Does nothing if xs have no values.

    A FakeTensorMode is not used, because it imports PyTorch's compiler and fun might cache fake
    tensors. Host kernels are not called; instead, zeros with the kernel's `out` specs are returned.
    """
    values = [_value_of(x) for x in xs]
    if any(x is None for x in values):
        return
    drawn = Randomness.everywhere({x.device.type for x in values})
    # An error in f is suppressed here, since the following call of f raises the same error.
    with _undisturbed(), restored(drawn), checking(), suppress(Exception):
        fun(*[x.clone() for x in values])


# --- numbers -----------------------------------------------------------------------------


def _value_of(x: Any) -> Any:
    """Unwraps x, and selects the first example of each batch. Returns None if x has no values."""
    if upstream.TracingContext.try_get() is not None or x.device.type == "meta":
        return None
    if not upstream.is_wrapped(x):
        return x.detach() if type(x) in (Tensor, torch.nn.Parameter) else None
    axis, inner = upstream.maybe_get_bdim(x), _value_of(upstream.get_unwrapped(x))
    return inner if inner is None or axis < 0 else inner.select(axis, 0)


def _wave(aval: Any, shift: float, around: float) -> Any:
    """Returns a tensor of numbers with few binary digits, whose sums are exact (see `is_linear`).

    A symbolic size is replaced by its hint, which adds no guard.
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


# --- captured tensors --------------------------------------------------------------------


def closes_over_tracked(rule: Rule) -> bool:
    """Returns whether the functions of a rule capture a differentiated tensor.

    A rule has no derivative with respect to a captured tensor. A rule without a contract was
    derived from another rule, and is not checked.
    """
    if rule.contract is None:
        return False
    if closures_of(rule).captures(lambda x: x.requires_grad):
        return True
    if upstream.peek_interpreter_stack() is not None:
        return _captures(rule.user_functions, is_wrapped)
    return upstream.forward_level() >= 0 and _captures(rule.user_functions, is_dual)


def _captures(functions: Any, wanted: Callable[[Tensor], bool], attributes: bool = True) -> bool:
    """Returns whether functions capture a tensor x for which `wanted(x)` is True."""
    is_wanted = lambda x: isinstance(x, Tensor) and wanted(x)
    return any(True for _ in captured_objects(functions, is_wanted, Tensor, attributes))


def closures_of(rule: Rule) -> Closures:
    """Returns the cached `Closures` of the functions of a rule."""
    known: Closures | None = rule.__dict__.get("_closures")
    if known is None:
        known = rule.__dict__["_closures"] = Closures(rule.user_functions)
    return known


class Closures:
    """The tensors in the closures of functions. Closures are searched again if a cell is rebound.

    Captured rules are not searched, because a rule checks its closures when it is called.

    Attributes:
        empty: Whether the functions close over no cells, tensors or containers.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions = functions
        self._search()

    def _search(self) -> None:
        from gradtools.custom_rules import CustomRule

        is_kept = lambda x: isinstance(x, (CellType, Tensor, dict, list, set))
        leaves = Tensor, CustomRule
        objects = [*captured_objects(self._functions, is_kept, leaves, attributes=False)]
        self.empty = not objects
        self._tensors = [x for x in objects if isinstance(x, Tensor)]
        self._cells = [(x, _contents(x)) for x in objects if isinstance(x, CellType)]
        self._may_change = any(isinstance(x, (dict, list, set)) for x in objects)

    def captures(self, wanted: Callable[[Tensor], bool]) -> bool:
        """Returns whether a tensor x for which `wanted(x)` is True is captured."""
        for cell, content in self._cells:
            if _contents(cell) is not content:
                self._search()
                break
        if self._may_change:  # a container may change without a new object in its cell
            return _captures(self._functions, wanted, attributes=False)
        return any(map(wanted, self._tensors))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
