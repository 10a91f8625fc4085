"""Measures PyTorch's wrong derivatives, and whether `gradtools.testing.checked` reports them.

    python -m tests.support.upstream_bugs_page    # writes docs/upstream-bugs.md

Each example is a scalar loss of a matrix. Directional derivatives of the loss are compared with
central differences of the loss and of its gradient.
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
from gradtools.testing import DerivativeError, checked
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
RIGHT, NAMED = "the right number", "named"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """The results of PyTorch and of the gradtools operator in `checked` for one derivative."""

    row: Bug
    wrong: str
    plain: str
    ours: str


SHOWN = [(row, wrong) for row in TABLE for wrong, example in row.wrong.items() if example]


def row_of(row: Bug, wrong: str) -> Row:
    """Run the example with plain PyTorch and with gradtools' operator in `checked`."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(3, 3, dtype=torch.float64, generator=generator) + 0.3
    t = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    f = eval(f"lambda x: {row.wrong[wrong]}", {"torch": torch, "x0": x})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _slope(_BY_DIFFERENCES.get(wrong, _along)(f, t), x, t)
        plain = _told(_PLAIN[wrong], f, x, t, expected)
        with checked():
            ours = _told(_OURS[wrong], f, x, t, expected)
    return Row(row, wrong, plain, ours)


def _slope(f, x, t):
    """Return the central difference of f at x along t with one Richardson extrapolation."""
    slope = lambda h: (float(f(x + h * t)) - float(f(x - h * t))) / (2 * h)
    return (4 * slope(1e-4) - slope(2e-4)) / 3


def _along(f, t):
    """Return the derivative of f along t as a function of x, computed in reverse mode."""

    def slope(x):
        x = x.detach().requires_grad_()
        return (torch.autograd.grad(f(x), x)[0] * t).sum()

    return slope


def _along_twice(f, t):
    """Return the second derivative of f along t, computed by reverse mode applied twice."""
    return lambda x: (_along(lambda x: (_gradient(f, x) * t).sum(), t))(x)


def _gradient(f, x):
    return torch.autograd.grad(f(x), x, create_graph=True)[0]


SCALES = torch.tensor([0.5, 1.5], dtype=torch.float64)


def _along_each(f, t):
    """Return the sum over s of the derivatives of x -> f(s x) along t, computed one by one."""
    return lambda x: sum(_along(lambda x, s=s: f(s * x), t)(x) for s in SCALES)


def _mapped(vmap, grad, f, t):
    """Return the same sum of derivatives as `_along_each`, computed with vmap."""
    each = lambda x: vmap(lambda s: grad(lambda x: f(s * x))(x))(SCALES)
    return lambda x: (each(x) * t).sum()


# Functions whose finite differences along t give the expected derivative. The default is `_along`.
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
    except DerivativeError:
        return NAMED
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

gradtools differentiates f as the framework does, and returns the framework's results.
[`checked`](answers-for.md#check-the-rest) compares the derivatives of your program with finite
differences and reports wrong derivatives.

## PyTorch {version}

In the second column, parentheses contain the result of plain PyTorch if it is zero, NaN or an
error; in the third column, parentheses contain the result of gradtools. If the third column
contains "right in gradtools", gradtools returns the correct derivative: for example, the derivative
of attention if gradtools itself runs forward mode or computes a second derivative, and the
derivative of normalization layers in forward mode and under gradtools' own `vmap`. If a derivative
is a wrong number and the last column contains "no report", see [our reports](upstream/index.md).
`python -m tests.support.upstream_bugs_page` generates the table.

| wrong in PyTorch | derivative | found by `checked` | reported as |
|---|---|---|---|
"""
_MORE = """
The following derivatives are also wrong in PyTorch, and therefore in gradtools:

- **Custom operators** (`torch.library`): forward mode through a registered backward returns zero.
- **`torch.autograd.Function`**: a derivative with respect to saved intermediates is lost at second
  order (torch#76185): [double backward](double-backward.md).
- **`torch.cond`, `scan`, `map`, `while_loop`**: forward mode returns zero.
- **TorchScript**: forward mode and second derivatives of `torch.func` return zero if any tensor
  requires a gradient (torch#73972, torch#84681).
- **`torch.no_grad`** does not stop forward mode (torch#128600). `frozen` and `mixed_partial` choose
  forward mode internally, so they also stop tangents in `no_grad` blocks.
- **`torch.compile`**: compiled code loses tangents and second derivatives if uncompiled code
  differentiates it (torch#91469). `gt.compile` runs the function eagerly in forward mode.

## JAX

| wrong in JAX | derivative | reported as |
|---|---|---|
| `jnp.sign` of complex numbers, up to 0.10: write `z / jnp.abs(z)` | gradient (zero) | no report |
| `betaln` of two equal arguments | second derivative | jax#34353 |
"""
_ERROR = "raises PyTorch's error"
_FOUND = {NAMED: "yes", RIGHT: "right in gradtools", "an error": _ERROR, "a refusal": _ERROR}


def page() -> str:
    """Return the text of the page."""
    wrong: dict[tuple[str, str, str], list[str]] = {}
    for row in (row_of(*shown) for shown in SHOWN):
        given = "" if row.plain == "another number" else f" ({row.plain})"
        of = (
            row.row.operation,
            _FOUND.get(row.ours, f"no ({row.ours})"),
            row.row.issue or "no report",
        )
        wrong.setdefault(of, []).append(f"{row.wrong}{given}")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (operation, found, issue), what in wrong.items():
        alike.setdefault((", ".join(what), found, issue), []).append(f"`{operation}`")
    text = _HEAD.replace("{version}", torch.__version__.partition("+")[0])
    rows = [f"| {', '.join(ops)} | {' | '.join(of)} |\n" for of, ops in alike.items()]
    return text + "".join(rows) + _MORE


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
