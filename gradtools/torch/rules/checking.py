"""Whether an author's maps are what `gradtools.rule_contract` says, told by numbers.

A map is asked once for a rule and a signature, at the values at hand, in copies of them and with
the generators put back. Where there are none, as in code that is being compiled, the rule is
evaluated at made-up numbers, and a question that cannot be asked there is left for later.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError, warn
from gradtools.linearity import is_linear
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import filled, is_inexact, unwrapped
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules.transposing import in_eager

Tensor = torch.Tensor
Map = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
_LINEAR: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True, eq=False, repr=False)
class Question:
    """One map of a rule, to be asked about.

    Attributes:
        rule: Whose map it is.
        which: "tangent" or "cotangent", what it is linear in.
        run: `run(at, vs)`; results and entries may be None.
        at: What it reads.
        likes: What its vectors look like, None where there is none.
        avals: Shapes, dtypes and devices of what the rule is evaluated at, so that this can be
            done again where some lengths are open; empty: `run` holds for numbers of any origin.
    """

    rule: Rule
    which: str
    run: Map
    at: Sequence[Any]
    likes: Sequence[Any]
    avals: Sequence[Any] = ()

    def points(self) -> tuple[Map, list[Tensor], bool]:
        """The map at numbers: it, what it reads, and whether that is made up."""
        at = [value_of(x) for x in self.at]
        if not any(x is None for x in at):
            return self.run, [x.clone() for x in at], False
        if not self.avals or not any(None in _sizes(shape) for shape, _, _ in self.avals):
            return self.run, [_wave((x.shape, x.dtype, x.device), 0.5, 1.0) for x in self.at], True
        xs = [_wave(aval, 0.5, 1.0) for aval in self.avals]
        result = self.rule.at(*xs)
        run = result.tangent if self.which == "tangent" else result.cotangent
        assert run is not None
        return run, [x.detach() for x in result.saved(xs)], True

    @property
    def signature(self) -> Any:
        likes = [like and (_sizes(like[0]), like[1]) for like in self.likes]
        return tuple([(_sizes(x.shape), x.dtype) for x in self.at]), tuple(likes)


# --- is it zero at zero? -----------------------------------------------------------------


def hold_zero(question: Question) -> None:
    """Raises if a map is not zero at zero, as where the author forgot the tangent."""
    contract = question.rule.contract
    if contract is not None:
        contract.ask("zero", question.which, question.signature, of=lambda: _is_zero(question))


def _is_zero(question: Question) -> bool:
    """False where it cannot be told, as where the map raises at values that are made up.

    What it raises in plain eager code is the user's: a map that fails once need not do so again.
    """
    contract = question.rule.contract
    assert contract is not None
    try:
        wrong = _first_not_zero(question)
    except KernelMet:
        return False
    except Exception as error:
        if not in_eager() or any(value_of(x) is None for x in question.at):
            return False
        if not isinstance(error, GradtoolsError):
            error.add_note(
                f"{contract.name}: raised while the rule was called with a zero {question.which}, "
                "to check that it is linear. custom_rule(f, check='never') skips the check."
            )
        raise
    contract.hold_zero(question.which, wrong)
    return True


def _first_not_zero(question: Question) -> int | None:
    with upstream.disable_current_modes(), torch.no_grad(), restored(Randomness.now(question.at)):
        run, at, made_up = question.points()
        with _kernels_refused(made_up):
            ys = run(
                at, filled([None] * len(question.likes), [_concrete(x) for x in question.likes])
            )
        for i, y in enumerate(ys):
            moved = isinstance(y, Tensor) and bool(((y != 0) & ~y.isnan()).any())
            if moved and not _is_rounding(y, at):
                return i
    return None


def _is_rounding(y: Tensor, at: Sequence[Tensor]) -> bool:
    """Whether it is no more than what terms of such numbers leave that cancel."""
    if not is_inexact(y):
        return False
    sizes = [float(x.abs().max()) for x in at if is_inexact(x) and x.numel()]
    most = 8 * torch.finfo(y.dtype).eps * (1 + max(sizes, default=0.0))
    return bool((y.abs() <= most).all())


class KernelMet(Exception):
    """A host kernel was to run where there are no numbers for it, or none is asked for."""


class _Asking(threading.local):
    """Whether this thread asks; a default of the class, for a miss takes longer than a kernel."""

    now = False


ASKING = _Asking()


def refuse_kernel() -> None:
    """Ends a question that would run a host kernel."""
    if not is_compiling() and ASKING.now:
        raise KernelMet


@contextmanager
def _kernels_refused(yes: bool = True) -> Iterator[None]:
    before, ASKING.now = ASKING.now, yes
    try:
        yield
    finally:
        ASKING.now = before


# --- is it linear? -----------------------------------------------------------------------


def hold_linear(question: Question) -> None:
    """Sums and multiples must go through, else the map is not linear.

    Asked once of each rule, with vectors of its own, so that it draws no random numbers.
    """
    rule, which = question.rule, question.which
    hold_zero(question)
    if rule.origin in _LINEAR or (rule.contract is not None and rule.contract.check == "never"):
        return
    there = [like is not None for like in question.likes]

    def run(linear: Map, at: Sequence[Any], vs: Sequence[Any]) -> list[Any]:
        return linear(at, spread(vs, there))

    with upstream.disable_current_modes(), torch.no_grad(), restored(Randomness.now(question.at)):
        linear, at, made_up = question.points()
        likes = [like for like in question.likes if like]
        v, w = ([_wave(like, shift, 0.0) for like in likes] for shift in (1.0, 2.0))
        try:
            same = is_linear(partial(run, linear, at), v, w, _gap, _slack)
        except Exception as error:
            if not made_up:
                raise
            warn(
                f"rule {rule.name!r}: the other mode follows by transposing its {which} map, and "
                "whether that map is linear could not be checked, for at made-up values it "
                f"raises {type(error).__name__}: {error}"
            )
            same = True
    if not same:
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
            f"but that map is not linear in its {which}s. Give the missing map as well, or make "
            "this one linear."
        )
    if rule.contract is None or rule.contract.check == "first":
        _LINEAR.add(rule.origin)


# --- what does it return? ----------------------------------------------------------------


def abstract_eval(fun: Callable[..., list[Tensor]], *xs: Tensor) -> None:
    """Runs fun on copies of xs, or as it is being compiled on fake tensors like them.

    A mode of our own for fake tensors would import PyTorch's whole compiler, and leave tensors
    without numbers in what fun keeps for later calls.
    """
    with upstream.disable_current_modes(), torch.no_grad():
        mode = upstream.detect_fake_mode([unwrapped(x) for x in xs])
        values = [value_of(x) for x in xs]
        try:
            if mode is not None:
                with mode:
                    fun(*[torch.empty_like(x) if not is_plain(x) else _empty(x) for x in xs])
            elif not any(x is None for x in values):
                _run_on_copies(fun, values)
        except Exception:  # a function that does not run says nothing of its rule
            return


def value_pairs(
    fun: Any, xs: Sequence[Tensor], ys: Sequence[Tensor], twin: Any = None
) -> list[tuple[Any, Any]]:
    """`fun(*xs)` and ys as pairs of NumPy arrays; see `Backend.value_pairs`."""
    known = [value_of(x) for x in (*xs, *ys)]
    if any(x is None for x in known):
        return []
    drawn = Randomness.everywhere({x.device.type for x in known})
    with upstream.disable_current_modes(), torch.no_grad(), restored(drawn), _kernels_refused():
        try:
            own = [value_of(y) for y in fun(*[x.clone() for x in known[: len(xs)]])]
            if not drawn.stands() or len(own) != len(ys):
                return []
            return [(_numbers(a), _numbers(y)) for a, y in zip(own, known[len(xs) :], strict=True)]
        except Exception:  # a function that does not run says nothing of its rule
            return []


def _numbers(x: Tensor) -> Any:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return x.to("cpu", wide).resolve_conj().resolve_neg().numpy()


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run_on_copies(fun: Callable[..., list[Tensor]], xs: Sequence[Tensor]) -> None:
    try:
        with restored(Randomness.everywhere({x.device.type for x in xs})), _kernels_refused():
            fun(*[x.clone() for x in xs])
    except KernelMet:  # a kernel says by its `out` what it returns
        fun(*[torch.empty_like(x, device="meta") for x in xs])


# --- numbers -----------------------------------------------------------------------------


def _sizes(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The lengths of axes; those that PyTorch's compiler keeps open look alike, unhashable."""
    return tuple([n if isinstance(n, int) else None for n in shape])


def _concrete(like: Any) -> Any:
    """The same with lengths that are open as they are at present, which fixes none."""
    return like and ([_length(n) for n in like[0]], like[1], like[2])


def _length(n: Any) -> int:
    return n if isinstance(n, int) else upstream.size_hint(n, fallback=2)


def is_plain(x: Tensor) -> bool:
    """Whether x is of no subclass that computes otherwise."""
    return type(x) in (Tensor, torch.nn.Parameter)


def value_of(x: Any) -> Any:
    """The number behind a tensor, of one example under vmap; None where there is none.

    That is in code being compiled, and on the meta device.
    """
    if upstream.TracingContext.try_get() is not None or x.device.type == "meta":
        return None
    while upstream.is_wrapped(x):
        inner = upstream.get_unwrapped(x)
        batched_at = upstream.maybe_get_bdim(x)
        x = inner if batched_at < 0 else inner.select(batched_at, 0)
    return x.detach() if is_plain(x) else None


def _wave(aval: Any, shift: float, around: float) -> Any:
    """Numbers of few binary digits, as `is_linear` asks for."""
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
