"""Whether a Function's backward is right when differentiated again: one call is tried.

With g(x, ct) the gradient that a torch.autograd.Function gives, autograd's derivative of g is
compared with

    (g(x + h v, ct) - g(x - h v, ct)) / 2 h

and the same in ct. What is lost, and who is refused, is said in double_backward.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd import function

from gradtools.errors import is_of
from gradtools.torch.modes import dual_level
from gradtools.torch.patches import functions_applied
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules.transposing import unpacked
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor
Args = tuple[Any, ...]


@contextmanager
def standing_in(call: Callable[[Any, Any, Args], Any]) -> Iterator[None]:
    """Inside, `call(kind, apply, args)` stands for the calls of Functions in this thread."""
    busy = False

    def around(kind: Any, apply: Any, args: Args, kwargs: Any) -> Any:
        nonlocal busy
        if busy or kwargs or not issubclass(kind, function.Function):
            return apply(*args, **kwargs)
        busy = True
        try:
            return call(kind, apply, args)
        finally:
            busy = False

    with functions_applied(around, of_rules=False):
        yield


class Untried(Exception):
    """A call cannot be tried; its text says why."""


class _Loud(Exception):
    """The derivative of a gradient raises: it is not lost in silence."""


@dataclass(frozen=True, eq=False, repr=False)
class SeenCall:
    """The arguments of one call of a class, copied.

    Attributes:
        args: The arguments; tensors that required grad do so.
        twins: Those that are no tensors, copied where they hold a tensor argument that requires
            grad, as a module holds its parameters; None if they cannot be copied.
        held: These tensors, as the twins hold them.
    """

    args: Args
    twins: Args | None
    held: list[Tensor]

    @classmethod
    def of(cls, args: Args) -> SeenCall:
        copies = tuple([_copied(x) if isinstance(x, Tensor) else x for x in args])
        others = [None if isinstance(x, Tensor) else x for x in args]
        moving = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        known = _held_by(others)
        held = {id(x): _copied(x) for x in moving if id(x) in known}
        if not held:
            return cls(copies, None, [])
        private = list(held.values())
        try:
            twins = tuple([copy.deepcopy(x, dict(held)) for x in others])
        except Exception:  # a tensor that is computed, a generator, a lock
            return cls(copies, None, private)
        return cls(copies, None if _held_by(twins) & {*held} else twins, private)

    def reads_elsewhere(self, apply: Callable[..., Any]) -> bool:
        """Whether an output or gradient changes with an argument that is held elsewhere.

        Then it is an argument for autograd's sake alone, and a trial that moves it sees nothing.
        """
        if not self.held or self.twins is None:
            return bool(self.held)
        pairs = zip(self.args, self.twins, strict=True)
        args = tuple([x if isinstance(x, Tensor) else twin for x, twin in pairs])
        trial = Trial.of(apply, args)
        before = trial.numbers()
        with torch.no_grad():
            for x in self.held:
                x += _wave(x, 1.5)
        after = trial.numbers()
        return len(before) != len(after) or not all(map(torch.equal, before, after))


def _held_by(xs: Sequence[Any]) -> set[int]:
    """The ids of the tensors that these hold."""
    return {id(x) for x, _ in Snapshot.of(list(xs), []).reached.watched}


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


@dataclass(frozen=True, eq=False, repr=False)
class Trial:
    """One call of a class, as a map g of its differentiated arguments xs and of cotangents cts.

    Attributes:
        apply: Calls it.
        args: With tensors in no graph.
        moving: Which of the arguments are xs.
        randomness: Where the generators stood.
        ws: Of g only Re<w, g> is looked at.
    """

    apply: Callable[..., Any]
    args: Args
    moving: list[int]
    randomness: Randomness | None
    ws: list[Tensor]

    @classmethod
    def of(cls, apply: Any, args: Args) -> Trial:
        """A call with these arguments, of which those that require grad are differentiated."""
        moving = [k for k, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        plain = tuple([x.detach() if isinstance(x, Tensor) else x for x in args])
        tensors = [x for x in plain if isinstance(x, Tensor)]
        waves = [_wave(plain[k], 3.0) for k in moving]
        return cls(apply, plain, moving, Randomness.now(tensors), waves)

    def lost(self, forward: bool) -> set[str] | None:
        """What autograd does not see, here and nearby.

        None if that tells nothing of the class: the derivative of g raises, or g is zero.

        Raises:
            Untried: There are no finite differences of g.
        """
        result: set[str] | None = None
        errors: list[Exception] = []
        for shift in (0.0, 0.1):
            try:
                with restored(self.randomness), torch.inference_mode(False), unpacked():
                    xs = [self.args[k] + shift * _wave(self.args[k], 1.0) for k in self.moving]
                    found = self._lost_at(xs, forward)
                result = result if found is None else found | (result or set())
            except Exception as error:
                errors.append(error)
        if result is not None or len(errors) < 2 or any(isinstance(e, _Loud) for e in errors):
            return result
        raise Untried(f"near its arguments it raises {told(errors[0])}") from errors[0]

    def _lost_at(self, xs: list[Tensor], forward: bool) -> set[str] | None:
        cts = self._vectors(xs)
        if not self._value([*xs, *cts], len(xs)):
            return None
        result = set()
        for k in range(len(xs)):
            if self._loses([*xs, *cts], k, len(xs), forward):
                result.add("inputs")
        for k in range(len(xs), len(xs) + len(cts)):
            if self._loses([*xs, *cts], k, len(xs), forward):
                result.add("cotangents")
        return result

    def numbers(self) -> list[Tensor]:
        """The outputs and the gradient."""
        with restored(self.randomness), torch.inference_mode(False), unpacked():
            xs = [self.args[k] for k in self.moving]
            outs = [y.detach().clone() for y in self._called(xs)[1]]
            return [*outs, *[g for g in self._gradient(xs, outs, False) if g is not None]]

    def _vectors(self, xs: list[Tensor]) -> list[Tensor]:
        """What g is linear in: cotangents."""
        return [_wave(y, 2.0) for y in self._called(xs)[1]]

    def _loses(self, point: list[Tensor], k: int, count: int, forward: bool) -> bool:
        """Whether the derivative along entry k is another than finite differences say."""
        try:
            return self._loses_along(_wave(point[k], 1.5), point, k, count, forward)
        except _Loud:
            raise
        except Exception:  # it may check what it is given, such as signs: along x these stay
            v = _wave(torch.ones_like(point[k]), 1.5) * point[k]
            return self._loses_along(v, point, k, count, forward)

    def _loses_along(
        self, v: Tensor, point: list[Tensor], k: int, count: int, forward: bool
    ) -> bool:
        eps = torch.finfo(v.dtype).eps
        first, second = (self._slope(point, k, v, count, h) for h in (eps**0.3, 2 * eps**0.3))
        size = abs(self._value(point, count))
        error = 10 * abs(first - second) + 100 * eps**0.7 * size
        try:
            known = (self._pushed if forward else self._pulled)(point, k, v, count)
        except Exception as why:
            if abs(first) <= error:
                return False  # too small to be told from rounding
            raise _Loud from why
        return not abs(known - first) <= error + 1e-3 * abs(first)

    def _slope(self, point: list[Tensor], k: int, v: Tensor, count: int, h: float) -> float:
        ends = [
            self._value([*point[:k], point[k] + s * v, *point[k + 1 :]], count) for s in (h, -h)
        ]
        return (ends[0] - ends[1]) / (2 * h)

    def _value(self, point: list[Tensor], count: int) -> float:
        return float(self._paired(self._gradient(point[:count], point[count:], False)).detach())

    def _pulled(self, point: list[Tensor], k: int, v: Tensor, count: int) -> float:
        point = [x.detach() for x in point]
        point[k] = point[k].requires_grad_()
        total = self._paired(self._gradient(point[:count], point[count:], True))
        if not total.requires_grad:
            return 0.0
        try:
            (slope,) = torch.autograd.grad(total, [point[k]], allow_unused=True)
        except NotImplementedError:
            raise
        except RuntimeError as error:  # once_differentiable raises on some ways only
            if not is_of("torch", error):
                raise
            return 0.0
        return 0.0 if slope is None else float((slope.conj() * v).real.sum())

    def _pushed(self, point: list[Tensor], k: int, v: Tensor, count: int) -> float:
        point = [*point[:k], forward_ad.make_dual(point[k], v), *point[k + 1 :]]
        total = self._paired(self._gradient(point[:count], point[count:], True))
        tangent = forward_ad.unpack_dual(total).tangent
        return 0.0 if tangent is None else float(tangent)

    def _called(self, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Arguments that are differentiated, and outputs."""
        self_args = [x.clone() if isinstance(x, Tensor) else x for x in self.args]
        tracked = [x if x.requires_grad else x.requires_grad_() for x in (x.view_as(x) for x in xs)]
        for k, x in zip(self.moving, tracked, strict=True):
            self_args[k] = x.clone()  # no leaf nor a view of one, which it may not change in place
        if self.randomness is not None:
            self.randomness.restore()
        with torch.enable_grad():
            outs = self.apply(*self_args)
        outs = outs if isinstance(outs, tuple | list) else (outs,)
        return tracked, [y for y in outs if isinstance(y, Tensor) and y.requires_grad]

    def _gradient(self, xs: Any, cts: Any, again: bool) -> Any:
        tracked, outs = self._called(xs)
        return torch.autograd.grad(outs, tracked, cts, create_graph=again, allow_unused=True)

    def _paired(self, grads: Sequence[Tensor | None]) -> Tensor:
        terms = [
            (g.conj() * w).real.sum()
            for g, w in zip(grads, self._weights(grads), strict=True)
            if g is not None
        ]
        return sum(terms[1:], terms[0]) if terms else torch.zeros(())

    def _weights(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return self.ws


class TangentTrial(Trial):
    """The same of the tangent that a class's own jvp gives: g of xs and of their tangents."""

    def _vectors(self, xs: list[Tensor]) -> list[Tensor]:
        return [_wave(x, 2.0) for x in xs]

    def _gradient(self, xs: Any, cts: Any, again: bool) -> Any:
        with dual_level():
            pairs = zip(xs, cts, strict=True)
            outs = self._called([forward_ad.make_dual(x, t) for x, t in pairs])[1]
            return [forward_ad.unpack_dual(y).tangent for y in outs]

    def _weights(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return [_wave(torch.ones_like(g), 3.0) if g is not None else torch.zeros(()) for g in grads]


def told(error: BaseException) -> str:
    """An error's type and text, on one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ").rstrip(" :")


def _wave(x: Tensor, shift: float) -> Tensor:
    """Numbers of x's size, drawn from no generator."""
    at = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
    wave = torch.sin(at * shift + shift).reshape(x.shape)
    if not x.numel():
        return x.detach()
    size = x.detach().abs().square().mean().sqrt()
    size = torch.where((size > 0) & size.isfinite(), size, torch.ones_like(size))
    if x.is_complex():
        wave = torch.complex(wave, torch.cos(at * shift).reshape(x.shape))
    return (wave * size).to(x.dtype)
