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
from gradtools.torch.plain_programs.rows import (
    GRADIENT,
    GRADIENT_AGAIN,
    MAPPED,
    OF_STRIDED,
    TABLE,
    TANGENT,
    TANGENT_AGAIN,
    TANGENT_OF_GRADIENT,
    THIRD,
    PlainProgram,
)
from tests.support.sweeps import DIFFERS, jax_ledger, torch_ledger, twins

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "upstream-bugs.md"
RIGHT = "the right number"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """One wrong derivative: what its example gives."""

    row: PlainProgram
    wrong: str
    plain: str
    ours: str


SHOWN = [(row, wrong) for row in TABLE for wrong in row.wrong if wrong in row.examples]


def row_of(row: PlainProgram, wrong: str) -> Row:
    """Runs its example, as PyTorch does it and as gradtools does."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(3, 3, dtype=torch.float64, generator=generator) + 0.3
    t = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    f = eval(f"lambda x: {row.examples[wrong]}", {"torch": torch, "x0": x})
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

_HEAD = """# What the frameworks get wrong

PyTorch's table of operators holds some 670 programs, JAX's namespaces some 500 functions. The
sweeps of `tests/support/sweeps` send each through every way of differentiating that
gradtools has, and hold what comes out against the framework's own reverse mode, its double
backward, the dot-product test and finite differences. This page is what they found in the
frameworks. It is written by `python -m tests.support.upstream_bugs_page` from the table in
`gradtools/torch/plain_programs/rows.py` and from the ledgers of the sweeps; a test runs each row,
and fails when upstream has fixed one.

In a checkout, `python -m tests.support.run_sweeps` runs the sweeps on your machine and versions.

## PyTorch {version}: wrong or missing, and computed by plain programs

gradtools differentiates these operations by programs of simple ones, which are right at every
order. A first derivative still runs the fused kernel: the program takes over where the kernel's
gradient is wrong, where it is differentiated again, and where a tangent is pushed. All operators do
so, in eager code, inside `torch.func` and in compiled code. `x` is a 3 by 3 matrix, `x0` its value;
each example is a loss of it.

| operation | example | what is wrong | plain PyTorch gives | gradtools gives | upstream |
|---|---|---|---|---|---|
"""
_CUSTOM = """
**Custom operators.** Forward mode through an operator of `torch.library` that has a registered
backward and nothing else gives zero in plain PyTorch, in silence; so do PyTorch's own such ones
(`linear_cross_entropy` with `options=`). gradtools never trusts a custom operator with forward
mode: it transposes its backward. That backward is tried by finite differences, once for each
class, where a second derivative depends on it; what autograd loses there (a backward under
`no_grad`, through NumPy, from a detached or an intermediate value, torch#76185) is refused, with
the operator's name, and so is one that cannot be tried (it raises near its arguments, or f cannot
be evaluated a second time). The same holds for a `torch.autograd.Function`, and for a
`torch::autograd::Function` of C++ that an operator of `torch.ops` calls; one that is bound to
Python in another way cannot be tried, and its second derivative is refused.

**Operators that take functions** (`torch.cond`, `scan`, `map`, `while_loop`): plain forward mode
gives zero, in silence (no report was found). gradtools pushes tangents through what these run.

**TorchScript.** In what `torch.jit` optimised, plain forward mode and the second derivatives of
`torch.func` give zero, in silence, as soon as something that requires a gradient takes part, such
as a module's weights (torch#73972, torch#84681). gradtools refuses these; in reverse mode, at any
order, TorchScript is right.

**Under `torch.no_grad`** plain forward mode goes on (pytorch#128600); gradtools' stops, but in
compiled code.

**Complex numbers under a dispatch mode.** Forward over reverse mode of `linalg.pinv` gives another
number while any `TorchDispatchMode` is active (no report was found); `frozen` keeps clear of that.

**Weight normalisation** (`nn.utils.parametrizations.weight_norm`, no report was found): compiled
code shows its operation, `torch._weight_norm`, to no mode, so there the derivative of its gradient
is PyTorch's number. Take that derivative outside of what is compiled.

**Logical operations in place** (`x.logical_not_()` and its like, of a floating tensor) pass the
gradient of the numbers that they overwrite, as if these were still there (no report was found). No
graph shows that: `grad` and `vjp` in eager code, and `dependence`, give what PyTorch gives. What
pushes a tangent, and compiled code, is right. Write `torch.logical_not(x)`.

**PyTorch's own operators.** Beyond the table reverse mode is trusted as it is. A pullback of
PyTorch's own (`backward()` of a loss, `torch.autograd.grad`) gives PyTorch's number, and so do
`torch.func.grad` and `torch.func.vmap` that f calls itself, in eager code: use `gt.grad`, `gt.vmap`
and `gt.per_example_grad` there. So does a function that `torch.compile` compiled before gradtools
differentiates it. The gradient of a normalisation by PyTorch's own `vmap`, which takes mean and
deviation for constants (functorch#534), is refused where the graph shows it, which is unless the
loss is linear in the normalisation.

## JAX: refused

**The sign of complex numbers**, z / |z|, turns with z. JAX takes its derivative for zero up to
version 0.10, as that of a real sign (no report was found), so that a gradient through it lacks a
term. gradtools refuses a derivative that goes through one, wherever it sees the jaxpr: in all
operators where the arguments are complex; where real ones become complex on the way, in `grad`,
`value_and_grad`, `hessian`, and `hvp` and `jacobian` of no given mode. Of real arguments `jvp`,
`vjp`, `linearize`, the two of a given mode, and `grad` with `disconnected_inputs="zeros"` do not
see it, nor does what stands in a rule or a `frozen` function of yours: there it is JAX's
number. Write `z / jnp.abs(z)`.

**betaln** of two equal arguments has a wrong second derivative (jax#34353): whether they are equal
is not known while a program is traced, so it is JAX's number in gradtools too.

## Reported, not fixed

What else the sweeps found is the frameworks' own number in gradtools too. What stands under both
frameworks was found by holding one against the other; the program has its name in JAX.

| framework | program | in which way | what comes out | why | upstream |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The page's text."""
    text = _HEAD.replace("{version}", torch.__version__.partition("+")[0])
    for found in (row_of(*shown) for shown in SHOWN):
        row, wrong = found.row, found.wrong
        issue = row.issue or "no report was found"
        example = _cell(row.examples[wrong].replace("torch.nn.functional.", "F."))
        text += (
            f"| `{row.operation}` | `{example}` | {wrong} | {found.plain} | {found.ours} "
            f"| {issue} |\n"
        )
    text += _CUSTOM
    told: dict[tuple[str, str, str], list[str]] = {}
    for framework, lines in (
        ("PyTorch", torch_ledger.DEFECTS),
        ("JAX", jax_ledger.LEDGER),
        ("both", [line for line in twins.LEDGER if not line.upstream.startswith("jax")]),
    ):
        for line in lines:
            if line.way != "why_zero" and (line.upstream or line.result == DIFFERS):
                key = (
                    framework,
                    line.program,
                    f"{line.result} | {_cell(line.reason)} | {line.upstream}",
                )
                told.setdefault(key, []).append(line.way.replace("*", "").strip() or "all")
    for (framework, program, rest), ways in told.items():
        name = program.replace("*", "…")
        text += f"| {framework} | `{name}` | {', '.join(dict.fromkeys(ways))} | {rest} |\n"
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
