"""Tests custom rules beyond plain eager code: export, dynamic shapes, threads and subclasses."""

from __future__ import annotations

import io
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import gradtools.torch as gt
from gradtools import GradtoolsWarning

D = torch.float64
X = torch.tensor([0.5, -0.2, 0.1], dtype=D)
KINDS = ("vjp", "jvp", "both")


def expm1(kind):
    f = gt.custom_rule(lambda x: torch.exp(x) - 1)
    if kind != "jvp":
        f.defvjp(lambda x: (torch.exp(x) - 1, torch.exp(x)), lambda e, ct: (ct * e,))
    if kind != "vjp":
        f.defjvp(lambda p, t: (torch.exp(p[0]) - 1, torch.exp(p[0]) * t[0]))
    return f


# --- torch.export -------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=D))
        self.f = f

    def forward(self, x):
        return self.f(x * self.w) + 2 * x


@pytest.mark.slow_at("vjp", "jvp")
@pytest.mark.sweep_at(("both", "True"))
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_has_the_values_and_says_that_it_has_no_rule(kind, strict):
    model = Model(expm1(kind))
    with pytest.warns(GradtoolsWarning, match=r"torch\.export: the program contains the values"):
        program = torch.export.export(model, (X,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    torch.testing.assert_close(again(2 * X), torch.expm1(2 * X * model.w) + 4 * X)
    x = X.clone().requires_grad_()
    # After export, autograd treats the rule's output as a constant but differentiates the other
    # term.
    torch.testing.assert_close(
        torch.autograd.grad(again(x).sum(), x)[0], torch.full((3,), 2.0, dtype=D)
    )


# --- torch.compile with dynamic shapes ------------------------------------------------------


def scaled(kind):
    plain = lambda x, y: (torch.exp(x) * y, {"s": x.sum(0)})
    f = gt.custom_rule(plain)
    if kind != "jvp":
        f.defvjp(
            lambda x, y: (plain(x, y), (torch.exp(x), y, x.shape[0])),
            lambda r, c: (c[0] * r[0] * r[1] + c[1]["s"].expand(r[2], -1), c[0] * r[0]),
        )
    if kind != "vjp":
        f.defjvp(
            lambda p, t: (
                plain(*p),
                (torch.exp(p[0]) * (p[1] * t[0] + t[1]), {"s": t[0].sum(0)}),
            )
        )
    return f, plain


def loss(f):
    def run(x, y):
        out, rest = f(x, y)
        return (out**2).sum() + (rest["s"] ** 3).sum()

    return run


WAYS = {
    "value": lambda f: f,
    "gt.grad": lambda f: gt.grad(f, argnums=(0, 1)),
    "torch.func.grad": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "gt.jvp": lambda f: lambda x, y: gt.jvp(f, (x, y), (y, x)),
    "gt.hvp": lambda f: lambda x, y: gt.hvp(f, (x, y), (y, x)),
}


OPEN = [("vjp", way, "dynamic=True") for way in WAYS]
OPEN += [("jvp", way, "dynamic=True") for way in ("torch.func.grad", "gt.hvp")]
OPEN += [(kind, "gt.grad", "mark_dynamic") for kind in KINDS]


@pytest.mark.whole_at("vjp-value-dynamic=True")
@pytest.mark.parametrize(("kind", "way", "how"), OPEN)
def test_one_program_serves_all_lengths(kind, way, how):
    torch._dynamo.reset()
    f, plain = scaled(kind)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    run = torch.compile(
        WAYS[way](loss(f)),
        backend=backend,
        dynamic=True if how == "dynamic=True" else None,
        fullgraph=True,
    )
    for n in (3, 5, 7):
        x = torch.linspace(-1, 1, 2 * n, dtype=D).reshape(n, 2)
        y = torch.linspace(1, 2, 2 * n, dtype=D).reshape(n, 2)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(y, 0)
        torch.testing.assert_close(run(x, y), WAYS[way](loss(plain))(x, y))
    assert len(graphs) == 1


# --- threads, as in DataParallel ------------------------------------------------------------


@pytest.mark.sweep_at("jvp", "both")
@pytest.mark.parametrize("kind", KINDS)
def test_threads_may_use_one_rule_at_first_and_with_other_shapes(kind):
    """The structure of the outputs depends on the shape, and threads use different shapes."""
    plain = lambda x: (torch.exp(x), x.sum(0)) if len(x) % 2 else {"a": torch.exp(x)}
    f = gt.custom_rule(plain)
    if kind != "jvp":
        f.defvjp(
            lambda x: (plain(x), (torch.exp(x), len(x))),
            lambda r, c: (c[0] * r[0] + c[1].expand(r[1], -1) if r[1] % 2 else c["a"] * r[0],),
        )
    if kind != "vjp":

        @f.defjvp
        def rule(p, t):
            (x,), (dx,) = p, t
            e = torch.exp(x) * dx
            return plain(x), (e, dx.sum(0)) if len(x) % 2 else {"a": e}

    total = lambda f, x: sum((y**2).sum() for y in tree_leaves(f(x)))
    wrong = []

    def work(k):
        try:
            for i in range(12):
                x = torch.linspace(-1, 1, 2 * (2 + (k + i) % 3), dtype=D).reshape(-1, 2)
                x.requires_grad_()
                found, expected = (torch.autograd.grad(total(g, x), x) for g in (f, plain))
                torch.testing.assert_close(found, expected)
                x = x.detach()
                pushed = [gt.jvp(lambda x, g=g: total(g, x), (x,), (x,))[1] for g in (f, plain)]
                torch.testing.assert_close(*pushed)
        except Exception as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong, wrong[0]


# --- tensor subclasses ----------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor subclass that implements __torch_dispatch__."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            x.shape,
            dtype=x.dtype,
            device=x.device,
            strides=x.stride(),
            requires_grad=x.requires_grad,
        )

    def __init__(self, x):
        self.wrapped = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = lambda x: x.wrapped if isinstance(x, Wrapper) else x
        outer = lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x
        kwargs = kwargs or {}
        out = tree_map(outer, func(*tree_map(inner, args), **tree_map(inner, kwargs)))
        return return_and_correct_aliasing(func, args, kwargs, out)


class Named(torch.Tensor):
    """A tensor subclass that only has the default __torch_function__."""


class OwnParameter(torch.nn.Parameter):
    pass


SUBCLASSES = {
    "__torch_dispatch__": lambda: Wrapper(X.clone()).requires_grad_(),
    "__torch_function__": lambda: X.clone().as_subclass(Named).requires_grad_(),
    "Parameter": lambda: torch.nn.Parameter(X.clone()),
    "of Parameter": lambda: OwnParameter(X.clone()),
}


def numbers(x):
    return getattr(x, "wrapped", x).detach().as_subclass(torch.Tensor)


@pytest.mark.parametrize("name", SUBCLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_takes_tensors_of_a_subclass(kind, name):
    f = expm1(kind)
    for _ in range(3):
        x = SUBCLASSES[name]()
        y = f(x)
        (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        e = torch.exp(X)
        assert type(y) is type(x + x)
        torch.testing.assert_close(numbers(y), e - 1)
        torch.testing.assert_close(numbers(g), 2 * (e - 1) * e)
        torch.testing.assert_close(numbers(h), 2 * (2 * e - 1) * e)
