"""The table of functions in both backends: the same numbers to 1e-12."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from tests.support.derivative_table import SCENARIOS, close, draw_like, leaves, lower, make_problem

SAME = 1e-12
BACKENDS = ("torch", "jax")
REAL = [s for s in SCENARIOS if "complex" not in s.name and "holomorphic" not in s.name]


def _both(scenario: Any) -> list[Any]:
    return [make_problem(scenario, importlib.import_module(f"gradtools.{b}"), b) for b in BACKENDS]


def _agree(found: list[Any]) -> None:
    """To 1e-12 of the larger of each leaf's own norm and the tree's."""
    torch_side, jax_side = (leaves(lower(tree)) for tree in found)
    size = max((float(np.abs(x).max()) for x in jax_side if x.size), default=0.0)
    close(torch_side, jax_side, SAME, floor=size)


def _pulled(p: Any) -> Any:
    out, pullback = p.gt.vjp(p.of_primals(), *p.lifted(p.primals))
    return out, pullback(p.lifted(draw_like(lower(out), np.random.default_rng(1))))


def _pushed(p: Any) -> Any:
    return p.gt.jvp(p.of_primals(), *p.lifted((p.primals, p.draws(2, 1)[0])))


def _linearized(p: Any) -> Any:
    xs, ts = p.lifted((p.primals, p.draws(2, 1)[0]))
    out, push = p.gt.linearize(p.of_primals(), *xs)
    return out, push(*ts)


def _product(p: Any, mode: str) -> Any:
    return p.gt.hvp(p.of_primals("loss"), *p.lifted((p.primals, p.draws(3, 1)[0])), mode)


def _called(p: Any, operator: str, f: Any) -> Any:
    taken = getattr(p.gt, operator)(f, p.scenario.active)
    return taken(*p.framework_args(), **p.scenario.kwargs)


OPERATORS = {
    "value_and_grad": lambda p: _called(p, "value_and_grad", p.loss),
    "vjp": _pulled,
    "jvp": _pushed,
    "linearize": _linearized,
    "hvp, auto": lambda p: _product(p, "auto"),
    "hvp, forward over reverse": lambda p: _product(p, "forward_over_reverse"),
    "hvp, reverse over reverse": lambda p: _product(p, "reverse_over_reverse"),
    "jacobian": lambda p: _called(p, "jacobian", p.f),
    "hessian": lambda p: _called(p, "hessian", p.loss),
}


@pytest.mark.sampled(140, 248)
@pytest.mark.sweep_at(
    ("hessian", "a network over a pytree"),
    ("hessian", "a network in weights and data"),
    ("hessian", "a linear solve"),
)
@pytest.mark.parametrize(
    ("operator", "scenario"),
    [
        pytest.param(operator, scenario, id=f"{operator}-{scenario}")
        for operator in OPERATORS
        for scenario in (REAL if operator in ("jacobian", "hessian") else SCENARIOS)
    ],
)
def test_both_backends_agree(operator, scenario):
    _agree([OPERATORS[operator](p) for p in _both(scenario)])


@pytest.mark.slow_at("None", "2")
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_gradients_of_single_examples_agree(chunk_size, rng):
    w, x = rng.normal(size=4), rng.normal(size=(5, 4))
    found = []
    for b in BACKENDS:
        gt = importlib.import_module(f"gradtools.{b}")
        f = lambda w, x: gt.xp.exp(gt.xp.sin(gt.xp.sum(w * x)))
        each = gt.per_example_grad(f, chunk_size=chunk_size)
        found.append(each(gt.asarray(w), gt.asarray(x)))
    _agree(found)


def test_players_directions_agree(rng):
    args = [rng.normal(size=3) for _ in range(3)]
    found = []
    for b in BACKENDS:
        gt = importlib.import_module(f"gradtools.{b}")
        f = lambda x, y, z: gt.xp.sum(gt.xp.sin(x * y) * gt.xp.exp(z))
        found.append(gt.minimax_value_and_grad(f, (0, 2), 1)(*map(gt.asarray, args)))
    _agree(found)


def test_mixed_partials_agree(rng):
    y, z, *us = (rng.normal(size=3) for _ in range(4))
    found = []
    for b in BACKENDS:
        gt = importlib.import_module(f"gradtools.{b}")
        G = lambda z: gt.xp.sin(z) * z
        f = lambda y, g: gt.xp.sum(gt.xp.exp(y * g))
        arrays = [gt.asarray(a) for a in (y, z, *us)]
        found.append(gt.mixed_partial(f, G, *arrays[:2], arrays[2:]))
    _agree(found)


def test_complex_mixed_partials_agree_with_double_backward(rng):
    y, z, u = (rng.normal(size=3) + 1j * rng.normal(size=3) for _ in range(3))
    found = []
    for b in BACKENDS:
        gt = importlib.import_module(f"gradtools.{b}")
        xp = gt.xp
        G = lambda z: xp.exp(1j * z) + xp.conj(z) * z
        f = lambda y, g: xp.sum(xp.real(y * y * xp.conj(g)) * xp.imag(g))
        ly, lz, lu = map(gt.asarray, (y, z, u))
        mixed = gt.mixed_partial(f, G, ly, lz, lu)
        inner = lambda y: gt.grad(lambda z: f(y, G(z)))(lz)
        twice = gt.grad(lambda y: xp.sum(xp.real(xp.conj(lu) * inner(y))))(ly)
        close(lower(mixed), lower(twice), SAME)
        found.append(mixed)
    _agree(found)
