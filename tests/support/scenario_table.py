"""Defines small programs with arguments, orders of differentiation and tags.

Each program is written once with `gt.xp` for all backends, and tests are generated from the
records. Vectors have four entries if the length does not matter, because JAX compiles an operation
again for each new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

Program = Callable[..., Any]
Tags = frozenset[str]


@dataclass(frozen=True)
class Scenario:
    """A program and the arguments at which it is differentiated.

    Attributes:
        name: A unique name.
        function: A function ``f(gt, *args)`` of the namespace of a backend and its arrays.
        args: NumPy arrays or pytrees of NumPy arrays.
        shape: The kind of the first argument: "number", "vector", "matrix", "pytree" or "empty".
        dtype: The floating-point dtype of the arguments.
        order: The highest order of derivatives, from 0 to 2, that both frameworks define at the
            arguments.
        tags: Special properties: "kink", "large", "tiny", "complex", "integer", "several",
            "linear algebra", "network", "cancels".
    """

    name: str
    function: Program
    args: tuple[Any, ...]
    shape: str
    dtype: str = "float64"
    order: int = 2
    tags: Tags = frozenset()

    def bind(self, gt: Any) -> Program:
        """Return the program as a function of one backend's arrays."""
        return partial(self.function, gt)


def _draw(*shape: int, seed: int = 0, dtype: str = "float64") -> Any:
    drawn = np.random.default_rng([seed, *shape]).standard_normal(shape)
    if dtype.startswith("complex"):
        drawn = drawn + 1j * np.random.default_rng([seed + 1, *shape]).standard_normal(shape)
    return np.asarray(drawn).astype(dtype)


def _attention(gt: Any, q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.T / 2.0
    weights = gt.xp.exp(scores - gt.xp.max(scores, axis=-1, keepdims=True))
    return (weights / gt.xp.sum(weights, axis=-1, keepdims=True)) @ v


def _layer_norm(gt: Any, x: Any, scale: Any) -> Any:
    centred = x - gt.xp.mean(x, axis=-1, keepdims=True)
    return scale * centred / gt.xp.sqrt(gt.xp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def _logsumexp(gt: Any, x: Any) -> Any:
    top = gt.xp.max(x)
    return top + gt.xp.log(gt.xp.sum(gt.xp.exp(x - top)))


def _softmax(gt: Any, x: Any) -> Any:
    e = gt.xp.exp(x)
    return e / gt.xp.sum(e, axis=-1, keepdims=True)


def _branch(gt: Any, x: Any) -> Any:
    return x * x * x if x[0] > 0 else gt.xp.exp(x)


def _mixed(gt: Any, p: Any) -> Any:
    xp = gt.xp
    return {"power": xp.abs(p["z"]) ** 2 * p["x"], "phase": p["z"] * xp.exp(1j * p["x"])}


def forms() -> Iterator[Scenario]:
    """Yield scenarios with additional pytrees and functions, which only some tests use."""
    empty = lambda gt, p: gt.xp.sum(p["e"]) + gt.xp.sin(p["x"])
    both = {"z": _draw(2, dtype="complex128"), "x": _draw(2, seed=3)}
    yield Scenario("linear", lambda gt, x: 2.0 * x, (_draw(3),), "vector")
    yield Scenario("complex from real", lambda gt, x: gt.xp.exp(1j * x) * x, (_draw(3),), "vector")
    yield Scenario("a branch on values", _branch, (np.array([0.7, -1.2, 0.4]),), "vector")
    tree = {"e": np.zeros((2, 0)), "x": _draw(2)}
    yield Scenario("an empty and a nonempty leaf", empty, (tree,), "pytree")
    pair = [np.asarray(_draw()), _draw(2)]
    yield Scenario("a scalar array in a list", lambda gt, p: [p[0] * p[1]], (pair,), "pytree")
    yield Scenario("real and complex leaves", _mixed, (both,), "pytree", "complex128")


@lru_cache
def smooth_programs() -> tuple[Scenario, ...]:
    """Return the smooth scenarios in double precision whose values are neither large nor tiny."""
    special = {"kink", "large", "tiny", "cancels"}
    wide = (s for s in scenarios() if s.order == 2 and s.dtype in ("float64", "complex128"))
    every = (*wide, *forms())
    unused = "an unused argument"
    return tuple(s for s in every if not special & s.tags and s.name != unused)


def program_of(name: str) -> Scenario:
    """Return the scenario with this name."""
    return next(s for s in (*forms(), *scenarios()) if s.name == name)


def _at(name: str, f: Program, args: Any, tags: Collection[str] = (), order: int = 2) -> Scenario:
    """Return a scenario for a program and one argument or a tuple of arguments."""
    args = args if isinstance(args, tuple) else (args,)
    first = leaf = args[0]
    while isinstance(leaf, dict | list | tuple):
        leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
    shape = "pytree"
    if first is leaf:
        shape = ("number", "vector", "matrix")[first.ndim] if first.size else "empty"
    return Scenario(name, f, args, shape, str(leaf.dtype), order, frozenset(tags))


def _each(rows: dict[str, tuple[Any, ...]]) -> Iterator[Scenario]:
    """Yield the scenarios of a table that maps names to programs, arguments, tags and orders."""
    return (_at(name, *row) for name, row in rows.items())


def scenarios() -> Iterator[Scenario]:
    """Yield the scenarios of all groups except `forms`."""
    yield from _elementwise()
    yield from _of_shapes()
    yield from _rearranged()
    yield from _factored()
    yield from _scales()
    yield from _kinks()
    yield from _complex()


def _elementwise() -> Iterator[Scenario]:
    """Yield scenarios of smooth elementwise functions of one array."""
    vector, positive = _draw(4), np.abs(_draw(4)) + 0.5
    points = dict.fromkeys("sin cos tan exp expm1 tanh sinh cosh square".split(), vector)
    points |= dict.fromkeys("log log1p sqrt".split(), positive)
    points |= {"acosh": positive + 1.0, "asinh": positive, "atan": positive}
    for name, x in points.items():
        yield _at(name, lambda gt, x, name=name: getattr(gt.xp, name)(x), x)
    for name in ("sin", "exp", "tanh", "square"):
        f = lambda gt, x, name=name: getattr(gt.xp, name)(x)
        yield _at(f"{name} in float32", f, vector.astype("float32"))


def _of_shapes() -> Iterator[Scenario]:
    """Yield scenarios of programs that combine entries, for arguments of every shape."""
    several, network, integer = {"several"}, {"several", "network"}, {"integer"}
    linalg = {"several", "linear algebra"}
    x, v, square = _draw(3, 4), _draw(4), _draw(3, 3) + 4 * np.eye(3)
    qkv = (x, _draw(5, 4, seed=1), _draw(5, 2, seed=2))
    params = {"w": [_draw(4, 5), _draw(5, 2)], "b": _draw(5)}

    def two_layers(gt: Any, params: Any, x: Any) -> Any:
        hidden = gt.xp.tanh(x @ params["w"][0] + params["b"])
        return gt.xp.mean((hidden @ params["w"][1]) ** 2)

    def recurrence(gt: Any, h: Any, w: Any) -> Any:
        for _ in range(4):
            h = gt.xp.tanh(w @ h)
        return h

    taken = lambda gt, table, rows: gt.xp.sin(gt.xp.take(table, rows, axis=0))
    masked = lambda gt, x, mask: gt.xp.sum(gt.xp.where(mask, x**2, 0.5 * x))
    mask = np.array([True, False, True, False])
    numbers = (np.float64(1.5), np.float64(-0.7))
    tree = lambda gt, x: {"a": gt.xp.sin(x), "b": [gt.xp.sum(x), x * 2]}
    yield from _each(
        {
            "cube of a number": (lambda gt, x: x**3, (np.float64(1.5),)),
            "number in float32": (lambda gt, x: x**3, (np.float32(1.5),)),
            "product of two numbers": (lambda gt, x, y: x * y + x / y, numbers, several),
            "mean of squares": (lambda gt, x: gt.xp.mean(x**2), (x,)),
            "softmax of rows": (_softmax, (x,)),
            "sum of a softmax": (lambda gt, x: gt.xp.sum(_softmax(gt, x)), (x,), {"cancels"}),
            "logsumexp": (_logsumexp, (v,)),
            "layer norm": (_layer_norm, (x, v), network),
            "attention": (_attention, qkv, network),
            "network of two layers": (two_layers, (params, x), network),
            "recurrence": (recurrence, (_draw(3), _draw(3, 3)), network),
            "product of matrices": (lambda gt, a, b: a @ b, (x, x.T), linalg),
            "solve": (lambda gt, a, b: gt.xp.linalg.solve(a, b), (square, _draw(3, 2)), linalg),
            "inverse": (lambda gt, a: gt.xp.linalg.inv(a), (square,), linalg),
            "determinant": (lambda gt, a: gt.xp.linalg.det(a), (square,), linalg),
            "norm away from 0": (lambda gt, x: gt.xp.linalg.vector_norm(x), v, linalg),
            "output of a tree": (tree, (v,)),
            "an integer and a float output": (lambda gt, x: (x**2, gt.xp.argmax(x)), (v,), integer),
            "rows taken by integers": (taken, (_draw(5, 2), np.array([0, 3, 3])), integer),
            "masked by booleans": (masked, (v, mask), integer),
            "sum of an empty array": (lambda gt, x: gt.xp.sum(x**2), (np.zeros(0),)),
            "empty output": (lambda gt, x: x * 2.0, (np.zeros((0, 3)),)),
            "an unused argument": (
                *(lambda gt, x, y: gt.xp.sum(x**2), (_draw(3), _draw(2)), several),
            ),
        }
    )


def _rearranged() -> Iterator[Scenario]:
    """Yield scenarios of programs that rearrange, sum or select entries."""
    x, v, several = _draw(3, 4), _draw(4), {"several"}
    apart = np.array([1.2, -2.1, 0.1, 2.3])  # entries that are far from kinks and from each other
    picked = lambda gt, x: gt.xp.take(x, gt.asarray(np.array([3, 0, 0])), axis=0) ** 2
    tree = {"a": [_draw(2), _draw(2, seed=3)], "b": (_draw(2, 2),)}
    nested = lambda gt, p: {"y": (p["b"][0] @ p["a"][0], gt.xp.sin(p["a"][1]) * p["a"][0])}
    angle = lambda gt, x, y: gt.xp.atan2(x, y) * gt.xp.hypot(x, y)
    bilinear = lambda gt, x, a, y: gt.xp.sum(x @ a * y, axis=-1)
    args = (np.abs(_draw(4)) + 0.5, np.abs(_draw(4, seed=4)) + 0.5)
    three = (_draw(2, 3), _draw(3, 4, seed=5), _draw(2, 4, seed=6))
    yield from _each(
        {
            "transposed and reshaped": (lambda gt, x: gt.xp.reshape(x.T**2, (2, 6)), x),
            "slices of a matrix": (lambda gt, x: gt.xp.sin(x[1:, ::2]) * x[0, 1], x),
            "rolled and flipped": (lambda gt, x: gt.xp.roll(x, 1) * gt.xp.flip(x, axis=0), v),
            "joined with itself": (lambda gt, x: gt.xp.concat([x, x**2]), v),
            "stacked": (lambda gt, x: gt.xp.stack([x, gt.xp.exp(x)], axis=1), v),
            "broadcast": (lambda gt, x: gt.xp.broadcast_to(x, (2, 4)) * x, v),
            "cumulative sum": (lambda gt, x: gt.xp.cumulative_sum(x**2, axis=0), v),
            "outer product": (lambda gt, x: gt.xp.tensordot(x, x**2, axes=0), v),
            "lower triangle": (lambda gt, x: gt.xp.tril(x[:, :3]) ** 2, x),
            "sorted": (lambda gt, x: gt.xp.sort(x) * gt.xp.sin(x), apart),
            "largest of each row": (lambda gt, x: gt.xp.max(x, axis=1) ** 2, x + 3 * np.eye(3, 4)),
            "clipped, both sides": (lambda gt, x: gt.xp.clip(x, -0.6, 0.6) * x, apart),
            "chosen by sign": (lambda gt, x: gt.xp.where(x > 0.6, gt.xp.exp(x), x**3), apart),
            "product of entries": (lambda gt, x: gt.xp.prod(x + 2), v),
            "variance of columns": (lambda gt, x: gt.xp.var(x, axis=0), x),
            "picked by integers": (picked, v),
            "differences": (lambda gt, x: (x[1:] - x[:-1]) ** 3, v),
            "convolved by hand": (lambda gt, x: x[:-2] * 0.5 + x[1:-1] ** 2 - x[2:], v),
            "nested tree in and out": (nested, tree, several),
            "power of two arrays": (lambda gt, x, a: x**a + a**x, args, several),
            "angle and length": (angle, args, several),
            "bilinear form": (bilinear, three, several),
            "a number without axes": (lambda gt, x: gt.xp.exp(x) * x, _draw()),
        }
    )


def _factored() -> Iterator[Scenario]:
    """Yield scenarios of linear algebra, such as inverses and decompositions."""
    x, linalg = _draw(3, 3) / 2 + np.diag([3.0, 0.5, -1.5]), {"linear algebra"}
    positive = lambda gt, a: a @ a.T + 3 * gt.xp.eye(3, dtype=a.dtype)
    log_det = lambda gt, a: gt.xp.linalg.slogdet(positive(gt, a))[1]
    cholesky = lambda gt, a: gt.xp.linalg.cholesky(positive(gt, a))
    eigenvalues = lambda gt, a: gt.xp.linalg.eigvalsh(positive(gt, a))
    yield from _each(
        {
            "log determinant": (log_det, x, linalg),
            "Cholesky factor": (cholesky, x, linalg),
            "eigenvalues": (eigenvalues, x, linalg),
            "trace of a cube": (lambda gt, a: gt.xp.linalg.trace(a @ a @ a), x, linalg),
            "singular values": (lambda gt, a: gt.xp.linalg.svdvals(a), x, linalg),
        }
    )


def _scales() -> Iterator[Scenario]:
    """Yield scenarios with large numbers, tiny numbers, or both."""
    large, tiny, both = {"large"}, {"tiny"}, {"large", "tiny"}
    x = _draw(4)
    cube = lambda gt, x: gt.xp.sum(x**3)
    apart = lambda gt, x, y: gt.xp.sum(x**2) + 1e-25 * gt.xp.sum(gt.xp.sin(y))
    overflow = lambda gt, x: gt.xp.sum(gt.xp.exp(x))
    yield from _each(
        {
            "cubes of 1e80": (cube, (x * 1e80,), large),
            "cubes of 1e-80": (cube, (x * 1e-80,), tiny),
            "values of 1e-300": (lambda gt, x: x * 1e-300, (x,), tiny),
            "values of 1e300": (lambda gt, x: x * 1e300, (x,), large),
            "large and tiny in one array": (
                *(lambda gt, x: x**2, (np.array([1e30, 1.0, 1e-30]),), both),
            ),
            "a tiny and a large leaf": (apart, (x, _draw(3)), {*both, "several"}),
            "cubes of 1e10 in float32": (cube, ((x * 1e10).astype("float32"),), large),
            "cubes of 1e-8 in float32": (cube, ((x * 1e-8).astype("float32"),), tiny),
            "logsumexp of 1000": (_logsumexp, (_draw(5) + 1000,), large),
            "a sum that overflows": (overflow, (np.array([800.0, 1.0]),), large, 0),
            "NaN in and out": (lambda gt, x: x * 2.0, (np.array([np.nan, np.inf, 1.0]),), large),
        }
    )


def _kinks() -> Iterator[Scenario]:
    """Yield scenarios at points where the derivative is a convention of both frameworks."""
    kink = {"kink"}
    tied, weights = np.array([1.0, 1.0, 0.0]), np.array([1.0, 2.0, 3.0])
    equal = (np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    sqrt, product = lambda gt, x: gt.xp.sqrt(x), lambda gt, x: gt.xp.prod(x)
    yield from _each(
        {
            "relu at 0": (lambda gt, x: gt.xp.where(x > 0, x, 0 * x), (np.float64(0.0),), kink),
            "maximum of equal arrays": (
                *(lambda gt, x, y: gt.xp.maximum(x, y), equal, {"kink", "several"}),
            ),
            "max with ties": (lambda gt, x: gt.xp.max(x), (tied,), kink),
            "sort with ties": (lambda gt, x: gt.xp.sort(x) * gt.asarray(weights), (tied,), kink),
            "product with a zero": (product, (np.array([0.0, 2.0, 3.0]),), kink),
            "square root near 0": (sqrt, (np.array([1e-30, 1e-8]),), {"kink", "tiny"}),
            "square root at 0": (sqrt, (np.array([0.0, 1.0]),), kink, 1),
            "round at a half": (lambda gt, x: gt.xp.round(x), (np.array([0.5, 1.5, 0.2]),), kink),
        }
    )


def _complex() -> Iterator[Scenario]:
    """Yield scenarios with complex arguments and real or complex outputs."""
    z, tags, both = _draw(4, dtype="complex128"), {"complex"}, {"complex", "several"}
    squared = lambda gt, z: gt.xp.sum(gt.xp.abs(z) ** 2)
    phase = lambda gt, z: gt.xp.abs(z) * gt.xp.sin(gt.xp.imag(z))
    affine = (lambda gt, w, z, x: w @ (z * x), (_draw(2, 4, dtype="complex128"), z, _draw(4)))
    yield from _each(
        {
            "squared modulus": (squared, z, tags),
            "complex square": (lambda gt, z: z * z, z, tags),
            "complex conjugate": (lambda gt, z: gt.xp.conj(z) * z**2, z, tags),
            "real part": (lambda gt, z: gt.xp.real(z) ** 2, z, tags),
            "complex exponential": (lambda gt, z: gt.xp.exp(z), z, tags),
            "modulus and phase": (phase, z, tags),
            "Fourier transform": (lambda gt, z: gt.xp.fft.fft(z) * z, z, tags),
            "complex affine": (*affine, both),
            "squared modulus in complex64": (squared, z.astype("complex64"), tags),
        }
    )
