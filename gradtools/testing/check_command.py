"""`gradtools check`: compares the results of a dozen small programs with NumPy's results."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import numpy as np

import gradtools
from gradtools.testing.cross_checking.sides import in_double_precision

TOLERANCE = 1e-9
_X, _W = np.linspace(-1.0, 1.0, 20).reshape(10, 2), np.linspace(-0.5, 0.7, 6).reshape(2, 3)
_Y, _Z = np.linspace(0.1, 0.6, 12).reshape(3, 4), np.linspace(-0.3, 0.2, 12).reshape(3, 4)


class _Programs:
    """Test programs for one framework; each program returns its result and NumPy's result."""

    def __init__(self, gt: Any) -> None:
        self.gt, self.xp = gt, gt.xp

    def arrays(self, *xs: Any) -> list[Any]:
        return [self.gt.asarray(np.asarray(x)) for x in xs]

    def reversed_gradient(self) -> tuple[Any, Any]:
        f = lambda w: self.xp.abs(self.gt.reverse_gradient(w * 1.0) - w * 2.0)
        return self.gt.grad(f)(*self.arrays(1.0)), 3.0

    def minimax(self) -> tuple[Any, Any]:
        both = self.gt.minimax_value_and_grad(lambda a, c: self.xp.sum(a**2 * c), 0, 1)
        return both(*self.arrays(_Y, _Z))[1], (2 * _Y * _Z, -(_Y**2))

    def second_derivative_through_frozen(self) -> tuple[Any, Any]:
        y, z = self.arrays(_Y, _Z)
        G = self.gt.frozen(self._inner)
        slope = self.gt.grad(lambda y, z: self._outer(y, G(z)), 1)
        return self.gt.grad(lambda y: self.xp.sum(slope(y, z)))(y), self._mixed()

    def mixed_partial(self) -> tuple[Any, Any]:
        y, z, u = self.arrays(_Y, _Z, np.ones_like(_Z))
        return self.gt.mixed_partial(self._outer, self._inner, y, z, u), self._mixed()

    def _inner(self, z: Any) -> Any:
        return self.xp.exp(self.xp.sum(z, axis=1))

    def _outer(self, y: Any, g: Any) -> Any:
        return self.xp.sum((self.xp.sum(y, axis=1) + g) ** 3)

    def _mixed(self) -> Any:
        g = np.exp(_Z.sum(1))
        return np.repeat((24 * (_Y.sum(1) + g) * g)[:, None], 4, axis=1)

    def host_function_twice(self) -> tuple[Any, Any]:
        host, total = self.gt.host_function, self.xp.sum
        slope, cube = host(lambda x, c: 3 * x**2 * c), host(lambda x: x**3)
        second = lambda xc, d: (6 * xc[0] * xc[1] * d, 3 * xc[0] ** 2 * d)
        slope.defvjp(lambda x, c: (slope(x, c), (x, c)), second)
        cube.defvjp(lambda x: (cube(x), x), lambda x, c: (slope(x, c),))
        first = self.gt.grad(lambda x: total(cube(x)))
        return self.gt.grad(lambda x: total(first(x)))(*self.arrays(_Y)), 6 * _Y

    def loss_of_all_rows_in_chunks(self) -> tuple[Any, Any]:
        rows = self.gt.chunked(lambda w, x: self.xp.tanh(x @ w), 4, in_axes=(None, 0))
        loss = lambda w, x: self.xp.sum(self.xp.sum(rows(w, x), axis=0) ** 2)
        z = np.tanh(_X @ _W)
        return self.gt.grad(loss)(*self.arrays(_W, _X)), _X.T @ ((1 - z**2) * 2 * z.sum(0))

    def accumulated_gradients(self) -> tuple[Any, Any]:
        f = lambda a, b: self.xp.sum(a**2 + 5 * b)
        grads, total = self.gt.grad(f, (0, 1))(*self.arrays(_Y, _Z)), self.gt.GradientAccumulator()
        total.add(grads, weight=2)
        return (grads, total.sum()), ((2 * _Y, 5 + 0 * _Z), (4 * _Y, 10 + 0 * _Z))

    def derivative_inside_a_loss(self) -> tuple[Any, Any]:
        t, a, gt = np.linspace(0.0, 2.0, 7), 0.8, self.gt
        u = lambda a, t: self.xp.exp(-a * t**2)
        residual = lambda a, t: gt.grad(u, 1)(a, t) + 2 * t * u(a, t)
        loss = lambda a, t: self.xp.mean(gt.vmap(residual, in_axes=(None, 0))(a, t) ** 2)
        r, value = 2 * t * (1 - a) * np.exp(-a * t**2), np.exp(-a * t**2)
        slope = np.mean(2 * r * (-2 * t * value - 2 * t**3 * (1 - a) * value))
        return gt.grad(loss)(*self.arrays(a, t)), slope

    def complex_layer(self) -> tuple[Any, Any]:
        w, c = _Y + 1j * _Z, np.array([1.0, 2j, -1 + 1j])
        W, i, ct = self.arrays(w, _Z[0] - 1j, c)
        return self.gt.vjp(lambda i: W @ i, i)[1](ct)[0], w.conj().T @ c

    def straight_through_a_threshold(self) -> tuple[Any, Any]:
        sigmoid = lambda x: 1 / (1 + self.xp.exp(-x))
        through = self.gt.straight_through(lambda x: x > 0.3, surrogate=sigmoid)
        s = 1 / (1 + np.exp(-_Y))
        found = self.gt.value_and_grad(lambda x: self.xp.mean(through(x)))(*self.arrays(_Y))
        return found, (np.mean(_Y > 0.3), s * (1 - s) / _Y.size)

    def weighted_mean_of_microbatches(self) -> tuple[Any, Any]:
        n, total = np.arange(10.0), self.xp.sum
        loss = lambda w, x, n: total(n * total(x @ w, axis=1) ** 2) / total(n)
        mean = self.gt.microbatched_value_and_grad(loss, 4, weights=lambda w, x, n: total(n))
        slope = (_X.T @ (2 * n * (_X @ _W).sum(1)))[:, None] / n.sum() * np.ones(3)
        return mean(*self.arrays(_W, _X, n))[1], slope

    def edited_gradients_of_examples(self) -> tuple[Any, Any]:
        edited = lambda y: self.gt.transform_gradient(y, lambda c: 3 * c)
        each = self.gt.per_example_grad(lambda a, x: self.xp.sum(edited(a * x) ** 2))
        return each(*self.arrays(2.0, _X)), 12 * (_X**2).sum(1)


PROGRAMS = {k: f for k, f in vars(_Programs).items() if k[0] != "_" and k != "arrays"}


def error_of(gt: Any, name: str) -> float:
    """Returns the largest error of a program's result relative to NumPy's result."""
    found, expected = map(gt._api._backend.flatten, PROGRAMS[name](_Programs(gt)))
    pairs = [(gt.to_numpy(x), np.asarray(y)) for x, y in zip(found[0], expected[0], strict=True)]
    return max(float(np.max(np.abs(x - y)) / max(1.0, np.max(np.abs(y)))) for x, y in pairs)


def check(options: argparse.Namespace) -> int:
    """Runs all programs; returns 0 if all agree, 1 if one fails, 2 if no framework is installed."""
    wanted = ("torch", "jax") if options.backend == "both" else (options.backend,)
    here = [name for name in wanted if name in gradtools.available_backends()]
    if not here:
        print(f"gradtools check: {' and '.join(wanted)}: not installed", file=sys.stderr)
        return 2
    failed = 0
    for backend in here:
        gt = import_module(f"gradtools.{backend}")
        with ExitStack() as inside:
            inside.enter_context(in_double_precision(backend == "jax"))
            if backend == "torch" and (torch := import_module("torch")).cuda.is_available():
                inside.enter_context(torch.device("cuda"))
            device = getattr(gt.asarray(1.0), "device", "")
            print(f"{backend}: {import_module(backend).__version__}, device {device}")
            for name in PROGRAMS:
                try:
                    error = error_of(gt, name)
                    said = f"off by {error:.0e}"
                except Exception as raised:  # reported as a failure of the program
                    error, said = np.inf, f"{type(raised).__name__}: {raised}"
                failed += (wrong := not error <= TOLERANCE)
                print(f"  {'FAILED' if wrong else 'ok':<8}{name.replace('_', ' '):<36}{said}")
    print(f"{len(PROGRAMS) * len(here) - failed} of {len(PROGRAMS) * len(here)} agree with NumPy")
    return 1 if failed else 0
