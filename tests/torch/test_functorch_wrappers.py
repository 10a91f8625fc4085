"""What tensors inside of transforms are known by: levels of forward mode, parts of subclasses."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import gradtools.torch as gt
from gradtools.torch.functorch_wrappers import is_pushed

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)


def _seen(transform):
    seen = []
    transform(lambda x: seen.append(is_pushed()) or x * 2)
    return seen


@pytest.mark.parametrize(
    ("transform", "pushes"),
    [
        (lambda f: f(X), False),
        (lambda f: torch.vmap(f)(X), False),
        (lambda f: torch.func.grad(lambda x: f(x).sum())(X), False),
        (lambda f: torch.func.jvp(f, (X,), (X,)), True),
        (lambda f: torch.func.jvp(torch.vmap(f), (X,), (X,)), True),
        (lambda f: torch.vmap(lambda x: torch.func.jvp(f, (x,), (x,)))(X), True),
    ],
    ids=["no transform", "vmap", "grad", "jvp", "jvp of vmap", "vmap of jvp"],
)
def test_forward_mode_of_torch_func_is_seen_at_any_depth(transform, pushes):
    assert _seen(transform) == [pushes]


def test_the_outermost_level_of_dual_numbers_is_forward_mode():
    with forward_ad.dual_level():
        assert _seen(lambda f: f(X)) == [True]
    assert _seen(lambda f: f(X)) == [False]


def test_zeros_for_an_output_of_no_use_have_the_parts_of_a_wrapper_subclass():
    received = []

    def bwd(x, cts):
        received[:] = cts
        return (2 * x * cts[0] + 3 * cts[1],)

    rule = gt.custom_rule(lambda x: (x**2, 3 * x))
    rule.defvjp(lambda x: ((x**2, 3 * x), x), bwd)
    x = TwoTensor(X.clone(), X + 1).requires_grad_()
    (found,) = torch.autograd.grad(rule(x)[0].sum(), x)
    assert [type(ct) for ct in received] == [TwoTensor, TwoTensor]
    assert not received[1].a.any() and not received[1].b.any()
    torch.testing.assert_close(found.a, 2 * X)
    torch.testing.assert_close(found.b, 2 * X + 2)
