"""A rule: a function that carries its own derivative.

Everything that bends a gradient is one thing, a value with its own tangent and cotangent map:

    y = f(x)        dy = J(x) dx        x' = J(x)^H y'

Both maps are linear, in dx and in y', and adjoint to each other under Re<u, v>. One of them
may be left out: it then is the transpose of the other. This module holds what is the same in
every framework: the record, the completion of a missing map, and the rule under vmap. How a
rule enters a framework's own differentiation stands in `torch/rules.py` and `jax/rules.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradtools.errors import GradtoolsError

Array = Any
Shape = tuple[int, ...]
Entries = Sequence[Any]  # arrays, or None for a zero


KEYS = map(str, itertools.count())  # text: dynamo makes integers symbolic
_BY_KEY: weakref.WeakValueDictionary[str, Rule] = weakref.WeakValueDictionary()


def by_key(key: str) -> Rule:
    """The rule with this key."""
    return _BY_KEY[key]


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """A function on a flat list of arrays, with its tangent and its cotangent map.

    Attributes:
        name: What messages call it.
        primal: `primal(*xs)` gives the list of outputs.
        tangent: `tangent(xs, dxs)` gives one tangent for each output. Entries of `dxs`, and of
            what is returned, may be None, a zero. It must be linear in `dxs`.
        cotangent: `cotangent(xs, cts)` gives one cotangent for each input, in gradtools' complex
            convention. Entries may be None, a zero. It must be linear in `cts`.
        passive: Positions of inputs that are never differentiated; their derivative is zero.
        uses: Positions of inputs that the linear maps read (default: all); the maps see None for
            the others, which are then not kept for the backward pass.
        reverse_only: Whether the cotangent map is not linear, so that no tangent map exists.
        captures: Whether a map may close over arrays of a running trace. False saves the search.
        closed_over: Positions of inputs that were closed over; to differentiate them raises.
        identity: Whether the outputs are inputs as they came.
        key: A text by which compiled code finds the rule again, see `by_key`.
        dx_shape: The shape of input i's tangent from the input's own. They differ only under
            vmap, where a tangent may carry the batch and its input not.
    """

    name: str
    primal: Callable[..., list[Array]]
    tangent: Callable[[Entries, Entries], list[Any]] | None = None
    cotangent: Callable[[Entries, Entries], list[Any]] | None = None
    passive: tuple[int, ...] = ()
    uses: tuple[int, ...] | None = None
    reverse_only: bool = False
    captures: bool = True
    closed_over: tuple[int, ...] = ()
    identity: bool = False
    key: str = field(default_factory=lambda: next(KEYS))
    dx_shape: Callable[[int, Shape], Shape] = lambda i, shape: shape

    def __post_init__(self) -> None:
        if self.tangent is None and self.cotangent is None:
            raise GradtoolsError(
                f"rule {self.name!r}: neither a tangent nor a cotangent map was given; "
                "give at least one, the other follows by transposition."
            )
        _BY_KEY[self.key] = self

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    def read(self, xs: Entries) -> list[Any]:
        """Those of the inputs that the linear maps read."""
        return list(xs) if self.uses is None else [xs[i] for i in self.uses]

    def placed(self, read: Entries, count: int) -> list[Any]:
        """The inverse of `read`: a list of `count` inputs, None where not read."""
        if self.uses is None:
            return list(read)
        return spread(read, [i in self.uses for i in range(count)])


def batched(rule: Rule, backend: Any, x_axes: Entries, dx_axes: Entries, size: int) -> Rule:
    """The rule of `vmap(rule)`.

    Args:
        rule: The rule of one example.
        backend: Whose `vmap_list` is used.
        x_axes: 0 or None for each input: whether it carries the batch in front.
        dx_axes: The same for each input's tangent and cotangent. Where it is None and the batch
            comes in elsewhere, the cotangent is summed over the batch.
        size: The batch size.
    """
    x_axes, dx_axes = tuple(x_axes), tuple(dx_axes)

    def primal(*xs: Array) -> list[Array]:
        return backend.vmap_list(lambda *x: rule.primal(*x), x_axes, size)(*xs)

    def tangent(xs: Entries, dxs: Entries) -> list[Any]:
        return _mapped(rule.tangent, backend, x_axes, dx_axes, size)(xs, dxs)

    def cotangent(xs: Entries, cts: Entries) -> list[Any]:
        found = _mapped(rule.cotangent, backend, x_axes, (0,) * len(cts), size)(xs, cts)
        return [
            ct if ct is None or axis == 0 else backend.sum_leading(ct)
            for ct, axis in zip(found, dx_axes, strict=True)
        ]

    def dx_shape(i: int, shape: Shape) -> Shape:
        inner = rule.dx_shape(i, shape if x_axes[i] is None else shape[1:])
        return inner if dx_axes[i] is None else (size, *inner)

    return replace(
        rule,
        key=next(KEYS),
        dx_shape=dx_shape,
        primal=primal,
        tangent=None if rule.tangent is None else tangent,
        cotangent=None if rule.cotangent is None else cotangent,
    )


def _mapped(linear: Any, backend: Any, x_axes: Entries, v_axes: Entries, size: int) -> Any:
    """`vmap` of a linear map whose entries, in and out, may be None."""

    def run(xs: Entries, vs: Entries) -> list[Any]:
        entries, axes = [*xs, *vs], [*x_axes, *v_axes]
        there = [e is not None for e in entries]
        came_out: list[bool] = []

        def one(*flat: Array) -> list[Array]:
            full = spread(flat, there)
            out = linear(full[: len(xs)], full[len(xs) :])
            came_out[:] = [o is not None for o in out]
            return [o for o in out if o is not None]

        in_axes = tuple(a for a, t in zip(axes, there, strict=True) if t)
        found = backend.vmap_list(one, in_axes, size)(*(e for e in entries if e is not None))
        return spread(found, came_out)

    return run


def spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """`values` at the places where mask is true, None elsewhere."""
    left = iter(values)
    return [next(left) if m else None for m in mask]
