"""Tests second derivatives and tangents of compiled functions, which plain PyTorch loses.

The test of torch#91469 asserts the upstream bug and fails if the bug has been fixed.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import gradtools.torch as gt
from gradtools import GradtoolsError

X = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)


def our_cube():
    cube = gt.custom_rule(lambda x: x.detach() ** 3)
    cube.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x**2 * c,))
    return cube


@pytest.mark.slow
def test_91469_there_is_no_compiled_double_backward():
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(compiled(lambda x: (x**3).sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(g.sum(), x)
    cube = our_cube()
    loss = lambda x: cube(x).sum()
    second = lambda f: gt.grad(lambda x: gt.grad(f)(x).sum())
    run = compiled(loss)
    # PyTorch raises no error if `alias`, which is not a leaf, is differentiated
    alias = x.view_as(x)
    (g,) = torch.autograd.grad(run(alias), alias, create_graph=True)
    assert torch.autograd.grad(g.sum(), x, allow_unused=True) == (None,)
    with pytest.raises(GradtoolsError, match="no compiled double backward"):
        second(run)(X)
    close(compiled(second(loss))(X), 6 * X)


def test_a_compiled_function_has_its_tangent_beside_a_graph():
    run = gt.compile(lambda x: torch.sin(x) * x, backend="eager")
    with forward_ad.dual_level():
        y = run(forward_ad.make_dual(X.clone().requires_grad_(), torch.ones_like(X)))
        close(forward_ad.unpack_dual(y).tangent, torch.cos(X) * X + torch.sin(X))
        assert y.requires_grad


@pytest.mark.slow_at("False")
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_function_has_its_tangent_after_its_value_was_compiled(whole):
    torch._dynamo.reset()
    run = gt.compile(lambda x: x * x, backend="aot_eager", fullgraph=whole)
    for _ in range(2):
        run(X)
    close(gt.jvp(run, (X,), (torch.ones_like(X),))[1], 2 * X)
    with torch.no_grad():
        close(gt.jvp(run, (X,), (torch.ones_like(X),))[1], 2 * X)
