"""Compares gt.checkpoint with the plain function inside and outside of torch.func's transforms."""

from functools import partial

import pytest
import torch
from torch import nn

import gradtools.torch as gt

D = torch.float64
X = torch.linspace(0.1, 1.2, 12, dtype=D).reshape(4, 3)


@pytest.mark.parametrize("where", ["derivative in vmap", "vmap in derivative"])
@pytest.mark.parametrize("size", [None, 4])
def test_draws_in_a_vmap_over_other_arguments_are_as_in_a_plain_call(where, size):
    """vmap does not batch the checkpoint's input, but batches its output, because draws differ."""
    x = X[:, 0] if size is None else X
    plain = torch.nn.Dropout(0.5)
    found = []
    for f in (plain, gt.checkpoint(plain)):
        rows = lambda x, f=f: (f(x) ** 2).sum()
        mapped = lambda g, x: torch.vmap(lambda c: c * g(x), randomness="different")(X[:, 1])
        if size is not None:
            rows = lambda x, rows=rows: torch.vmap(rows, randomness="different")(x).sum()
        torch.manual_seed(0)
        if where == "derivative in vmap":
            found.append(mapped(torch.func.grad(rows), x))
        else:
            found.append(torch.func.grad(lambda x, rows=rows: mapped(rows, x).sum())(x))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-15)
    assert found[0].count_nonzero() > 0


def test_rows_of_rows_of_cotangents():
    found, expected = (
        torch.vmap(torch.vmap(lambda c, f=f: torch.func.vjp(f, X)[1](c)[0]))(cts)
        for cts in [torch.stack([torch.stack([X, X.sin()]), torch.stack([X.cos(), 2 * X])])]
        for f in (gt.checkpoint(lambda x: x.sin() * x.sum()), lambda x: x.sin() * x.sum())
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wrap", [gt.checkpoint, lambda f: gt.chunked(f, 2, in_axes=(0, None))])
def test_second_derivatives_in_a_batch_with_parameters_that_require_grad(wrap):
    layer, w = torch.nn.Linear(3, 2).to(D), torch.tensor([0.5, -1.0], dtype=D)
    plain = lambda x, w: torch.sin(layer(x) * w)
    batch = torch.stack([X, 2 * X])
    programs = [
        lambda f, x: gt.hvp(lambda w: f(x, w).sum(), (w,), (w,), mode="forward_over_reverse")[1][0],
        lambda f, x: torch.func.hessian(lambda w: f(x, w).sum())(w),
        lambda f, x: torch.func.hessian(lambda w: f(x, w).sum(0))(w),
    ]
    for program in programs:
        result, expected = (gt.vmap(partial(program, f))(batch) for f in (wrap(plain), plain))
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("wrap", [gt.checkpoint, lambda f: gt.chunked(f, 2)])
def test_a_pullback_of_torch_func_depends_on_the_parameters_after_its_transform(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad(
            torch.func.vjp(f, z)[1](torch.ones_like(z))[0].square().sum(),
            [z, *model.parameters()],
            allow_unused=True,
        )
        for f in (wrap(model), model)
    )
    torch.testing.assert_close(found, expected)


PER_ROW = {
    "torch.func": lambda f, w: torch.vmap(torch.func.grad(f), (None, 0))(w, X),
    "gradtools": lambda f, w: gt.vmap(gt.grad(f), (None, 0))(w, X),
    "per example": lambda f, w: gt.per_example_grad(f)(w, X),
    "rows of weights": lambda f, w: torch.vmap(torch.func.grad(f), (0, None))(
        w * X[:3, :, None], X
    ),
}


@pytest.mark.parametrize("gradients", PER_ROW.values(), ids=PER_ROW)
@pytest.mark.parametrize("wrap", [gt.checkpoint, lambda f: gt.chunked(f, 1)])
@pytest.mark.parametrize("depth", [2, 3])
def test_recomputations_inside_of_recomputations_differentiate_what_they_capture(
    gradients, wrap, depth
):
    def nested(w, x):
        f = lambda x: torch.tanh(x @ w)
        for _ in range(depth):
            f = wrap(f)
        return f(x[None]).square().sum()

    w = torch.linspace(-1, 1, 6, dtype=D).reshape(3, 2)
    expected = gradients(lambda w, x: torch.tanh(x @ w).square().sum(), w)
    torch.testing.assert_close(gradients(nested, w), expected)


INSIDE = {
    "grad": lambda f, x: gt.grad(f)(x),
    "vjp": lambda f, x: gt.vjp(torch.sin, x)[1](x.cos())[0] + x * f(x),
    "hvp": lambda f, x: gt.hvp(f, (x,), (x,))[1][0],
    "jvp": lambda f, x: gt.jvp(lambda x: x * f(x), (x,), (x,))[1],
    "hessian": lambda f, x: gt.hessian(f)(x) @ x,
    "torch.func.vjp": lambda f, x: x * torch.func.vjp(f, x)[1](torch.ones(()))[0],
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_checkpoint_that_is_mapped_may_hold_a_derivative(name):
    """A pullback may run after its torch.func level ends; its tensors do not count as captured."""
    w = torch.randn(3, requires_grad=True)
    rows = torch.randn(4, 3, requires_grad=True)
    inner = lambda x: INSIDE[name](lambda x: (x.sin() * x * w).sum(), x)
    for map_ in (gt.vmap, lambda f: gt.chunked(gt.vmap(f), 2)):
        found, plain = (
            torch.autograd.grad(map_(f)(rows).square().sum(), (w, rows))
            for f in (gt.checkpoint(inner), inner)
        )
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("remade", [gt.checkpoint, gt.frozen])
def test_a_recomputed_jacobian_of_a_rule_that_computes_derivatives_is_mapped(remade):
    """The rule of the solution creates levels of torch.func beneath the level of f."""
    root = gt.implicit_solution(lambda z, t: z**2 - t, lambda t: t.sqrt())
    x = torch.linspace(1, 2, 8, dtype=torch.float64).reshape(2, 4)
    slope = (0.5 / x.sqrt()).diag_embed()
    torch.testing.assert_close(gt.vmap(remade(gt.jacobian(root)))(x), slope)
    total = gt.grad(lambda x: remade(gt.jacobian(root))(x).square().sum())
    torch.testing.assert_close(gt.vmap(total)(x), -0.25 / x.square())


@pytest.mark.parametrize("remade", [gt.checkpoint, gt.frozen])
def test_labels_and_masks_are_arguments_and_not_captured_tensors(remade):
    w, x = torch.linspace(-1, 1, 9).reshape(3, 3), torch.linspace(-2, 2, 15).reshape(5, 3)
    labels = torch.tensor([0, 1, 2, 0, 1])
    loss = lambda w, x, y: torch.nn.functional.cross_entropy(x @ w, y)
    masked = lambda x: remade(lambda x, m: (x.sin() * m).sum())(x, x > 0)
    expected = gt.per_example_grad(loss)(w, x, labels)
    torch.testing.assert_close(gt.per_example_grad(remade(loss))(w, x, labels), expected)
    each = gt.vmap(gt.grad(remade(loss)), in_axes=(None, 0, 0))(w, x, labels)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(torch.func.grad(masked)(x), x.cos() * (x > 0))
    torch.testing.assert_close(gt.vmap(gt.grad(masked))(x), x.cos() * (x > 0))
