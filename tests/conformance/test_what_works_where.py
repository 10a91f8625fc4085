"""Tests that every cell of the support table in docs/support.md is correct."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import gradtools

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

COLUMNS = ("eager", "compile", "vmap", "reverse", "forward")
X = np.array([0.3, -0.7, 1.2])
T = np.array([1.0, 2.0, 3.0])


def table() -> dict[str, tuple[str, ...]]:
    """Return a dict that maps each operator to the cells of its row."""
    section = PAGE.read_text(encoding="utf-8").split("<!--")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {name: tuple(row[1:]) for row in rows[1:] for name in row[0].split("`")[1::2]}


@dataclass(frozen=True)
class Program:
    """A function that calls an operator, its value, and the diagonal of its Jacobian."""

    function: object
    value: object
    slope: object


def programs(gt) -> dict[str, Program]:
    cube, total = lambda x: x**3, lambda x: (x**3).sum()
    ones = gt.asarray(np.ones((2, 3)))
    steady = gt.asarray(np.ones(3))
    edited = lambda edit: gt.grad(lambda x: total(edit(x)))
    return {
        "grad": Program(gt.grad(total), lambda x: 3 * x**2, lambda x: 6 * x),
        "value_and_grad": Program(
            lambda x: gt.value_and_grad(total)(x)[1], lambda x: 3 * x**2, lambda x: 6 * x
        ),
        "vjp": Program(lambda x: gt.vjp(cube, x)[1](x)[0], lambda x: 3 * x**3, lambda x: 9 * x**2),
        "jvp": Program(
            lambda x: gt.jvp(cube, (x,), (x,))[1], lambda x: 3 * x**3, lambda x: 9 * x**2
        ),
        "linearize": Program(
            lambda x: gt.linearize(cube, x)[1](x), lambda x: 3 * x**3, lambda x: 9 * x**2
        ),
        "jacobian": Program(
            lambda x: gt.jacobian(cube)(x).sum(0), lambda x: 3 * x**2, lambda x: 6 * x
        ),
        "hessian": Program(
            lambda x: gt.hessian(total)(x).sum(0), lambda x: 6 * x, lambda x: 6 + 0 * x
        ),
        "hvp": Program(
            lambda x: gt.hvp(total, (x,), (x,))[1][0], lambda x: 6 * x**2, lambda x: 12 * x
        ),
        "per_example_grad": Program(
            lambda x: gt.per_example_grad(lambda w, row: (w**3 * row).sum())(x, ones).sum(0),
            lambda x: 6 * x**2,
            lambda x: 12 * x,
        ),
        "minimax_value_and_grad": Program(
            lambda x: gt.minimax_value_and_grad(lambda a, b: (a**3 * b).sum(), 0, 1)(x, x)[1][1],
            lambda x: -(x**3),
            lambda x: -3 * x**2,
        ),
        "mixed_partial": Program(
            lambda y: gt.mixed_partial(
                lambda y, g: (y**3 * g).sum(), lambda z: z**2, y, steady, steady
            ),
            lambda y: 6 * y**2,
            lambda y: 12 * y,
        ),
        "vmap": Program(gt.vmap(lambda x: x**3), lambda x: x**3, lambda x: 3 * x**2),
        "compile": Program(compiled(gt, cube, whole=False), lambda x: x**3, lambda x: 3 * x**2),
        "reverse_gradient": Program(
            edited(lambda x: gt.reverse_gradient(x, 0.5)),
            lambda x: -1.5 * x**2,
            lambda x: 1.5 * x,
        ),
        "scale_gradient": Program(
            edited(lambda x: gt.scale_gradient(x, 0.5)), lambda x: 1.5 * x**2, lambda x: 1.5 * x
        ),
        "stop_gradient": Program(
            gt.grad(lambda x: (x**2 * gt.stop_gradient(x)).sum()),
            lambda x: 2 * x**2,
            lambda x: 2 * x,
        ),
        "straight_through": Program(
            gt.grad(lambda x: (gt.straight_through(gt.xp.round, lambda x: x**2)(x) * x).sum()),
            lambda x: np.round(x) + 2 * x**2,
            lambda x: 6 * x,
        ),
        # The gradient 3 x^2 is clipped to 1, and the cotangent 6 x t of its derivative is also
        # clipped.
        "clip_gradient": Program(
            edited(lambda x: gt.clip_gradient(x, max_value=1.0)),
            lambda x: np.minimum(3 * x**2, 1),
            lambda x: np.where(3 * x**2 < 1, np.clip(6 * x * T, -1, 1) / T, 0),
        ),
        "transform_gradient": Program(
            edited(lambda x: gt.transform_gradient(x, lambda c: 2 * c)),
            lambda x: 6 * x**2,
            lambda x: 24 * x,
        ),
        "replace_gradient": Program(
            edited(lambda x: gt.replace_gradient(x, steady)), np.ones_like, np.zeros_like
        ),
    }


def result(gt, column: str, program: Program) -> tuple[object, np.ndarray]:
    """Return the computed and the expected result of a program for a column of the table."""
    x, t = gt.asarray(X), gt.asarray(T)
    if column == "eager":
        return program.function(x), program.value(X)
    if column == "compile":
        return compiled(gt, program.function)(x), program.value(X)
    if column == "vmap":
        rows = np.stack([X, 2 * X])
        return gt.vmap(program.function)(gt.asarray(rows)), program.value(rows)
    if column == "reverse":
        return gt.vjp(program.function, x)[1](t)[0], program.slope(X) * T
    return gt.jvp(program.function, (x,), (t,))[1], program.slope(X) * T


def compiled(gt, function, whole=True):
    if gt.__name__ == "gradtools.jax":
        return gt.compile(function)
    importlib.import_module("torch._dynamo").reset()
    return gt.compile(function, fullgraph=whole, backend="aot_eager")


def test_the_table_has_a_row_for_each_program(gt):
    assert set(table()) == set(programs(gt))
    assert all(len(cells) == len(COLUMNS) for cells in table().values())


@pytest.mark.sampled(torch=(24, 57), jax=(34, 100))
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("operator", table())
def test_a_cell_of_the_table_is_true(gt, backend_name, operator, column):
    cell = table()[operator][COLUMNS.index(column)]
    program = programs(gt)[operator]
    if cell == "refused":
        with pytest.raises(gradtools.GradtoolsError, match="reverse rule only"):
            result(gt, column, program)
        return
    if cell == "JAX" and backend_name == "torch":
        with pytest.raises(Exception, match="transform_gradient"):
            result(gt, column, program)
        return
    assert cell in ("yes", "JAX")
    found, expected = result(gt, column, program)
    np.testing.assert_allclose(gt.to_numpy(found), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["round", "sign"])
def test_what_the_pages_call_connected_with_derivative_zero(gt, name):
    grad = gt.grad(lambda x: getattr(gt.xp, name)(x).sum())(gt.asarray(X))
    assert gt.to_numpy(grad).tolist() == [0, 0, 0]
