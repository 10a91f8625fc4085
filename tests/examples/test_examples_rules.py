"""Tests that the comparison of kinds of custom rules in docs/own-rules.md is correct."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.support_matrix import transforms, wanted_of
from tests.conformance.support_ways import WAYS

PAGE = Path(__file__).parents[2] / "docs" / "own-rules.md"
COLUMNS = ("reverse", "forward", "reverse twice", "forward over reverse", "forward twice")
EXPECTED = 12.0  # both derivatives of x^3 at 2: 3 x^2 and 6 x


def table() -> dict[str, tuple[str, ...]]:
    """Return a dict that maps the name of each row, without backticks, to its cells."""
    section = PAGE.read_text(encoding="utf-8").split("## Comparison with the frameworks")[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {row[0].replace("`", ""): tuple(row[1:]) for row in rows if row[0] != "reverse"}


# --- the cube by each kind of rule -------------------------------------------------------


def jax_custom_vjp():
    import jax

    f = jax.custom_vjp(lambda x: x**3)
    f.defvjp(lambda x: (f(x), x), lambda x, c: (3 * x**2 * c,))
    return f


def jax_custom_jvp():
    import jax

    f = jax.custom_jvp(lambda x: x**3)
    f.defjvp(lambda xs, dxs: (f(*xs), 3 * xs[0] ** 2 * dxs[0]))
    return f


def jax_pure_callback():
    import jax

    return lambda x: jax.pure_callback(lambda x: np.asarray(x) ** 3, x, x)


def torch_function(forward_mode=False):
    import torch

    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, c):
            return 3 * ctx.saved_tensors[0] ** 2 * c

    if forward_mode:
        Cube.jvp = staticmethod(lambda ctx, dx: 3 * ctx.saved_tensors[0] ** 2 * dx)
    return Cube.apply


@functools.cache
def torch_custom_op():
    import torch

    op = torch.library.custom_op(
        "gradtools_tests::own_rules_cube",
        lambda x: x**3,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    op.register_autograd(
        lambda ctx, c: 3 * ctx.saved_tensors[0] ** 2 * c,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


OURS = {  # names of the rules in the support matrix, whose tests run these cells
    "custom_rule, only defvjp": "defvjp",
    "custom_rule, only defjvp": "defjvp",
    "host_function, vjp and double backward": "host: double backward",
}
TRANSFORMS = {
    "reverse": ("gt.grad", "native grad"),
    "forward": ("gt.jvp", "native jvp"),
    "reverse twice": ("gt second order rr", "native second order rr"),
    "forward over reverse": ("gt second order fr", "native second order fr"),
    "forward twice": ("gt second order ff", "native second order ff"),
}
THEIRS = {
    "jax.custom_vjp": ("jax", jax_custom_vjp),
    "jax.custom_jvp": ("jax", jax_custom_jvp),
    "jax.pure_callback, no rule": ("jax", jax_pure_callback),
    "torch.autograd.Function, backward": ("torch", torch_function),
    "torch.autograd.Function, backward and jvp": ("torch", lambda: torch_function(True)),
    "torch.library.custom_op, register_autograd": ("torch", torch_custom_op),
}

REFUSED = {
    "jax.custom_vjp": "forward-mode",
    "jax.pure_callback, no rule": "do not support JVP",
    "torch.autograd.Function, backward": "jvp",
    "torch.library.custom_op, register_autograd": "setup_context",
}


def derivative(column, transforms, f, x, one):
    """Compute the derivative for one column of the table with the framework's own transforms."""
    grad, jvp = transforms.grad, lambda f: lambda x: transforms.jvp(f, (x,), (one,))[1]
    first, second = {
        "reverse": (grad, None),
        "forward": (jvp, None),
        "reverse twice": (grad, grad),
        "forward over reverse": (grad, jvp),
        "forward twice": (jvp, jvp),
    }[column]
    return float(second(first(f))(x) if second else first(f)(x))


def transforms_of(backend):
    return importlib.import_module("torch.func" if backend == "torch" else "jax")


def test_every_row_is_tested():
    assert set(table()) == {*OURS, *THEIRS}
    assert all(len(cells) == len(COLUMNS) for cells in table().values())


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", OURS)
def test_a_cell_of_ours(backend_name, row, column):
    cell, way = table()[row][COLUMNS.index(column)], WAYS[OURS[row]]
    found = [t for t in transforms(backend_name) if t.name in TRANSFORMS[column]]
    refused = [wanted_of(backend_name, transform, way) is not None for transform in found]
    assert refused == [cell == "refused"] * 2


@pytest.mark.slow_at(("torch.autograd.Function, backward", "reverse twice"))
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", THEIRS)
def test_a_cell_of_theirs(row, column):
    backend, make = THEIRS[row]
    pytest.importorskip(backend)
    gt = importlib.import_module(f"gradtools.{backend}")
    x, one = (gt.asarray(np.float32(v)) for v in (2.0, 1.0))
    cell = table()[row][COLUMNS.index(column)]
    check(cell, row, lambda: derivative(column, transforms_of(backend), make(), x, one))


def check(cell, row, found):
    assert cell in ("yes", "refused", "wrong")
    if cell == "refused":
        with pytest.raises(Exception, match=REFUSED[row]):
            found()
    else:
        assert (abs(found() - EXPECTED) < 1e-5) == (cell == "yes")


@pytest.mark.slow_at("torch", "u05_cpp_extension-CXX")
@pytest.mark.parametrize(
    ("name", "variable"), [("u05_c_kernel", "CC"), ("u05_cpp_extension", "CXX")]
)
def test_without_a_compiler_an_example_says_so(name, variable, backend_name, monkeypatch):
    examples = PAGE.parents[1] / "examples"
    monkeypatch.setenv(variable, "no-such-compiler")
    done = subprocess.run(
        [sys.executable, examples / f"{name}.py", "--backend", backend_name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        rf"{backend_name}:\n  left out: no C.* compiler.* {variable}\n", done.stdout
    )
