"""Defines the rule of `clip_gradient`, which clips the modulus of each entry and the norm.

x' = c(y'),    c(y')_i = y'_i min(1, max_value / |y'_i|), then times min(1, max_norm / |y'|)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtools.arguments.checks import as_float
from gradtools.arguments.wording import describe
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule

ARRAY = "array"  # a placeholder for a bound that is an array


def clip_rule(backend: Backend, count: int, max_norm: Any, max_value: Any) -> Rule:
    """Makes the rule of `clip_gradient` for `count` leaves.

    Each bound is a number, None, or `ARRAY`; `ARRAY` makes the bound an additional input of the
    rule.
    """
    inputs = tuple(range(count, count + [max_norm, max_value].count(ARRAY)))

    def cotangent(limits: Any, cts: Any) -> list[Any]:
        norm, value = max_norm, max_value
        if norm is ARRAY:
            norm = _nan_if_negative(backend, limits[0])
        if value is ARRAY:
            value = _nan_if_negative(backend, limits[-1])
        clipped = list(cts[:count])
        if value is not None:
            clipped = [_clip_modulus(backend, ct, value) for ct in clipped]
        if norm is not None:
            clipped = backend.clipped_by_norm(clipped, norm) or clip_norm(backend, clipped, norm)
        return clipped + [None] * len(inputs)

    return Rule(
        "clip_gradient",
        primal=lambda *xs: list(xs[:count]),
        cotangent=cotangent,
        nondifferentiable=inputs,
        saves=inputs,
        reaches="identity",
        reverse_only=True,
    )


def _clip_modulus(backend: Backend, ct: Array, bound: Any) -> Array:
    if not backend.is_complex(ct):
        return backend.clip(ct, bound)
    xp = backend.xp
    bound = backend.real_scalar(bound, ct)
    inside = xp.abs(ct) <= bound  # False if the bound is NaN, so that the result is NaN
    size = xp.abs(xp.where(inside, xp.ones_like(ct), ct))
    return ct * xp.where(inside, xp.ones_like(size), bound / size)


def clip_norm(backend: Any, cts: list[Array], bound: Any) -> list[Array]:
    """Computes cts * min(1, bound / norm); dividing the cotangents by `unit` avoids overflow."""
    xp = backend.xp
    wide = [_wide(backend, ct) for ct in cts]
    largest_of = [xp.max(xp.abs(ct)) for ct in wide if 0 not in ct.shape]
    if not largest_of:
        return cts
    largest = backend.stop_gradient(_of_all(xp, xp.max, largest_of))
    # The reciprocal of unit is never denormal: XLA would flush a denormal reciprocal to zero.
    unit = xp.maximum(largest / 4, xp.full_like(largest, xp.finfo(largest.dtype).smallest_normal))
    scaled = [ct / unit for ct in wide]
    total = _of_all(xp, xp.sum, [_squares(backend, ct) for ct in scaled if 0 not in ct.shape])
    # The lower bound 0.5 prevents a division by zero if all cotangents are zero.
    size = xp.sqrt(xp.maximum(total, xp.full_like(total, 0.5)))
    bound = backend.real_scalar(bound, size)
    inside, factor = unit * size <= bound, bound / size
    pairs = zip(cts, scaled, strict=True)
    return [xp.where(inside, ct, backend.cast(c * factor, ct)) for ct, c in pairs]


def _of_all(xp: Any, reduce: Callable[[Array], Array], numbers: list[Array]) -> Array:
    return numbers[0] if len(numbers) == 1 else reduce(xp.stack(numbers))


def _wide(backend: Backend, ct: Array) -> Array:
    """Casts a 16-bit cotangent to float32, for an accurate sum of squares."""
    narrow = backend.dtype_name(ct) in ("float16", "bfloat16")
    return backend.cast(ct, "float32") if narrow else ct


def _squares(backend: Backend, ct: Array) -> Array:
    xp = backend.xp
    if not backend.is_complex(ct):
        return xp.sum(ct * ct)
    re, im = xp.real(ct), xp.imag(ct)
    return xp.sum(re * re + im * im)


def _nan_if_negative(backend: Backend, bound: Array) -> Array:
    """Returns the bound, or NaN in place of a negative bound, which would reverse the gradient."""
    xp = backend.xp
    return xp.where(bound < 0, xp.full_like(bound, xp.nan), bound)


def bound_of(backend: Backend, name: str, bound: Any) -> Any:
    """Converts a bound of `clip_gradient` to an argument of `clip_rule`."""
    if bound is None:
        return None
    is_number = isinstance(bound, (int, float))
    if not is_number:
        backend.check_array(bound, name)
        if not has_real_dtype(bound) or getattr(bound, "shape", ()) != ():
            raise GradtoolsError(
                f"clip_gradient: {name} is {describe(backend, bound)}; it must be a real number, "
                "or an array of shape () with a real number."
            )
    known = bound if is_number else _known_number(backend, bound)
    if known is not None and known < 0:
        raise GradtoolsError(f"clip_gradient: {name} is {known}; it must not be negative.")
    if not is_number:
        return ARRAY
    number = as_float("clip_gradient", name, bound)
    compiles = backend.compiles_rules or backend.compiler.is_tracing()
    return ARRAY if compiles else number


def _known_number(backend: Backend, x: Any) -> Any:
    """Returns the number x, or the number in an array x; returns None if x is not on the host."""
    if backend.compiler.is_tracing():
        return None
    return backend.number_on_host(x) if backend.is_array(x) else x


def has_real_dtype(x: Any) -> bool:
    """Returns whether x is an array of real numbers."""
    dtype = str(getattr(x, "dtype", "complex"))
    return not any(kind in dtype for kind in ("complex", "object", "str", "<U"))
