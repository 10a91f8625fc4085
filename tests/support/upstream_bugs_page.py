"""What PyTorch gets wrong, measured: each row of the table of bugs, in PyTorch and in gradtools.

    python -m tests.support.upstream_bugs_page    # writes docs/upstream-bugs.md

Each example is a loss of a matrix; its derivatives along a direction are held against central
differences of the loss and of its gradient.
"""

from __future__ import annotations

import math
import pathlib
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_ad

import gradtools.torch as gt
from gradtools import GradtoolsError
from tests.support.upstream_bugs import (
    GRADIENT,
    GRADIENT_AGAIN,
    MAPPED,
    OF_STRIDED,
    TABLE,
    TANGENT,
    TANGENT_AGAIN,
    TANGENT_OF_GRADIENT,
    THIRD,
    Bug,
)

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "upstream-bugs.md"
RIGHT = "the right number"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """One wrong derivative: what its example gives."""

    row: Bug
    wrong: str
    plain: str
    ours: str


SHOWN = [(row, wrong) for row in TABLE for wrong, example in row.wrong.items() if example]


def row_of(row: Bug, wrong: str) -> Row:
    """Runs its example, as PyTorch does it and as gradtools does."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(3, 3, dtype=torch.float64, generator=generator) + 0.3
    t = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    f = eval(f"lambda x: {row.wrong[wrong]}", {"torch": torch, "x0": x})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _slope(_BY_DIFFERENCES.get(wrong, _along)(f, t), x, t)
        plain, ours = (_told(ways[wrong], f, x, t, expected) for ways in (_PLAIN, _OURS))
    return Row(row, wrong, plain, ours)


def _slope(f, x, t):
    """Central differences, extrapolated once."""
    slope = lambda h: (float(f(x + h * t)) - float(f(x - h * t))) / (2 * h)
    return (4 * slope(1e-4) - slope(2e-4)) / 3


def _along(f, t):
    """The derivative of f along t, by reverse mode."""

    def slope(x):
        x = x.detach().requires_grad_()
        return (torch.autograd.grad(f(x), x)[0] * t).sum()

    return slope


def _along_twice(f, t):
    """The second derivative of f along t, by reverse mode twice."""
    return lambda x: (_along(lambda x: (_gradient(f, x) * t).sum(), t))(x)


def _gradient(f, x):
    return torch.autograd.grad(f(x), x, create_graph=True)[0]


SCALES = torch.tensor([0.5, 1.5], dtype=torch.float64)


def _along_each(f, t):
    """The sum of the derivatives of x -> f(s x) along t, one s after the other."""
    return lambda x: sum(_along(lambda x, s=s: f(s * x), t)(x) for s in SCALES)


def _mapped(vmap, grad, f, t):
    """The same by vmap."""
    each = lambda x: vmap(lambda s: grad(lambda x: f(s * x))(x))(SCALES)
    return lambda x: (each(x) * t).sum()


# What is held against differences, where it is not the derivative of f along t.
_BY_DIFFERENCES = {
    GRADIENT: lambda f, t: f,
    OF_STRIDED: lambda f, t: f,
    TANGENT: lambda f, t: f,
    THIRD: _along_twice,
    MAPPED: _along_each,
}


def _told(way, f, x, t, expected) -> str:
    try:
        found = float(way(f, x.clone(), t))
    except GradtoolsError:
        return "a refusal"
    except (RuntimeError, NotImplementedError):
        return "an error"
    if math.isnan(found):
        return "NaN"
    if abs(found - expected) <= TOLERANCE * max(1e-3, abs(expected)):
        return RIGHT
    return "zero" if found == 0 else "another number"


def _tangent(f, x, t):
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
    return torch.zeros((), dtype=x.dtype) if found is None else found


def _pulled(f, x, t):
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return (g * t).sum()


def _gradient_of(tangent):
    def way(f, x, t):
        x = x.requires_grad_()
        slope = tangent(f, x, t)
        return (torch.autograd.grad(slope, x)[0] * t).sum() if slope.requires_grad else 0.0

    return way


def _pushed_gradient(f, x, t):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x, t).requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return forward_ad.unpack_dual((g * t).sum()).tangent


def _three_times(f, x, t):
    x = x.requires_grad_()
    second = (_gradient(lambda x: (_gradient(f, x) * t).sum(), x) * t).sum()
    return (torch.autograd.grad(second, x)[0] * t).sum()


def _plainly_mapped(f, x, t):
    return _along(_mapped(torch.func.vmap, torch.func.grad, f, t), t)(x)


_PLAIN = {
    THIRD: _three_times,
    MAPPED: _plainly_mapped,
    GRADIENT: lambda f, x, t: _along(f, t)(x),
    OF_STRIDED: lambda f, x, t: _along(f, t)(x),
    TANGENT: _tangent,
    TANGENT_AGAIN: _gradient_of(_tangent),
    TANGENT_OF_GRADIENT: _pushed_gradient,
    GRADIENT_AGAIN: _gradient_of(_pulled),
}


def _ours_three_times(f, x, t):
    along = lambda f: lambda x: (gt.grad(f)(x) * t).sum()
    return along(along(along(f)))(x)


_OURS = {
    THIRD: _ours_three_times,
    MAPPED: lambda f, x, t: (gt.grad(_mapped(gt.vmap, gt.grad, f, t))(x) * t).sum(),
    GRADIENT: lambda f, x, t: (gt.grad(f)(x) * t).sum(),
    OF_STRIDED: lambda f, x, t: (gt.grad(f)(x) * t).sum(),
    TANGENT: lambda f, x, t: gt.jvp(f, (x,), (t,))[1],
    TANGENT_AGAIN: lambda f, x, t: (gt.grad(lambda x: gt.jvp(f, (x,), (t,))[1])(x) * t).sum(),
    TANGENT_OF_GRADIENT: lambda f, x, t: (
        gt.hvp(f, (x,), (t,), mode="forward_over_reverse")[1][0] * t
    ).sum(),
    GRADIENT_AGAIN: lambda f, x, t: (gt.hvp(f, (x,), (t,), "reverse_over_reverse")[1][0] * t).sum(),
}

_HEAD = """# Wrong derivatives in the frameworks

Sweeps over the operators of PyTorch and JAX compare every mode with reverse mode and with finite
differences (`python -m tests.support.run_sweeps` on your versions). This page is generated by
`python -m tests.support.upstream_bugs_page`; a test of each entry fails once upstream has fixed it.

## Wrong or missing in PyTorch {version}

gradtools differentiates f as PyTorch does, and gives the same numbers; `gradtools.testing.checked`
names a wrong one where it is taken. What gradtools itself chooses is right: attention where it
pushes tangents or takes a second derivative, norms in forward mode, in `per_example_grad` and in
Jacobians. In brackets: what plain PyTorch gives, if not another number.

| operation | what is wrong in PyTorch | right in gradtools | upstream |
|---|---|---|---|
"""
_CUSTOM = """
Also wrong in PyTorch, and so in gradtools:

- **Custom operators** (`torch.library`): forward mode through a registered backward gives zero.
- **`torch.autograd.Function`**: a backward that computes without a graph loses its derivative
  (torch#76185).
- **`torch.cond`, `scan`, `map`, `while_loop`**: forward mode gives zero.
- **TorchScript**: forward mode and second derivatives of `torch.func` give zero once something
  requires a gradient (torch#73972, torch#84681).
- **`torch.no_grad`** does not stop forward mode (pytorch#128600). In `frozen` and `mixed_partial`,
  which choose forward mode, it does.
- **`torch.compile`**: code that was compiled before loses tangents and second derivatives
  (pytorch#91469). `gt.compile` runs the function eagerly for these.

## JAX

**The sign of complex numbers**, z / |z|: up to version 0.10 JAX takes its derivative to be zero.
gradtools refuses a derivative through it where it sees the jaxpr: not inside a custom rule or a
`frozen` function, nor, for real arguments, in `jvp`, `vjp` and `linearize`, with `mode=`, or with
`disconnected_inputs="zeros"`. Write `z / jnp.abs(z)`.

**betaln** of two equal arguments has a wrong second derivative (jax#34353), in gradtools too.
"""


def page() -> str:
    """The page's text."""
    wrong: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for found in (row_of(*shown) for shown in SHOWN):
        of = found.row.operation, found.row.issue or "no report"
        given = "" if found.plain == "another number" else f" ({found.plain})"
        right = found.wrong if found.ours == RIGHT else ""
        wrong.setdefault(of, []).append((f"{found.wrong}{given}", right))
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (operation, issue), rows in wrong.items():
        what, right = (", ".join(filter(None, column)) for column in zip(*rows, strict=True))
        right = "all" if all(ours for _, ours in rows) else right or "none"
        alike.setdefault((what, right, issue), []).append(f"`{operation}`")
    text = _HEAD.replace("{version}", torch.__version__.partition("+")[0])
    rows = [f"| {', '.join(ops)} | {' | '.join(of)} |\n" for of, ops in alike.items()]
    return text + "".join(rows) + _CUSTOM


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
