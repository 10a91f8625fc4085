"""Compares custom rules in PyTorch with the documented behavior of autograd.Function.

A program calls an autograd.Function as in PyTorch's documentation, or a `custom_rule` with the same
formulas. The Function computes the expected result. Programs for which custom_rule deliberately
differs are in EXCEPTIONS with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.autograd.forward_ad as forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt
from tests.support.torch_functions import MappedCube

D = torch.float64
X = torch.tensor([[0.5, -1.2, 0.7], [2.0, 0.1, -0.3]], dtype=D)
Y = torch.tensor([[1.5, 0.2, -0.7], [1.0, 1.1, 0.3]], dtype=D)


def leaf(x=X):
    return x.clone().requires_grad_()


# --- Functions as in PyTorch's documentation, and the same formulas as rules ----------------


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0]


class Sinh(torch.autograd.Function):
    """A Function that saves an intermediate, so its double backward is wrong (torch#76185)."""

    @staticmethod
    def forward(ctx, x):
        e = x.exp()
        ctx.save_for_backward(e)
        return (e - 1 / e) / 2

    @staticmethod
    def backward(ctx, ct):
        (e,) = ctx.saved_tensors
        return ct * (e + 1 / e) / 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, ct):
        x, y = ctx.saved_tensors
        return ct * y, ct * x


class Gram(torch.autograd.Function):
    """A Function with a residual that is not an array, and with the documented use of autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.scale = 0.5
        return ctx.scale * (x @ x.T)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return ctx.scale * ((ct + ct.T) @ x)


def reverse(f, fwd, bwd, **told):
    rule = gt.custom_rule(f, **told)
    rule.defvjp(fwd, bwd)
    return rule


def both(f, fwd, bwd, jvp):
    rule = reverse(f, fwd, bwd)
    rule.defjvp(jvp)
    return rule


def _sinh(x):
    e = x.exp()
    return (e - 1 / e) / 2, e


def _exp(x):
    y = x.exp()
    return y, y


cube = both(
    lambda x: x**3,
    lambda x: (x**3, x),
    lambda x, ct: (3 * x**2 * ct,),
    lambda p, t: (p[0] ** 3, 3 * p[0] ** 2 * t[0]),
)
exp = reverse(torch.exp, _exp, lambda y, ct: (ct * y,))
sinh = reverse(lambda x: _sinh(x)[0], _sinh, lambda e, ct: (ct * (e + 1 / e) / 2,))
product = reverse(
    lambda x, y: x * y, lambda x, y: (x * y, (x, y)), lambda r, ct: (ct * r[1], ct * r[0])
)
identity = reverse(lambda x: x.view_as(x), lambda x: (x.view_as(x), None), lambda _, ct: (2 * ct,))
gram = reverse(
    torch.autocast("cpu", enabled=False)(lambda x: 0.5 * (x @ x.T)),
    torch.autocast("cpu", enabled=False)(lambda x: (0.5 * (x @ x.T), (x, 0.5))),
    lambda r, ct: (r[1] * ((ct + ct.T) @ r[0]),),
)


def forward(f, jvp):
    rule = gt.custom_rule(f)
    rule.defjvp(jvp)
    return rule


FORWARD = {
    "cube": forward(lambda x: x**3, lambda p, t: (p[0] ** 3, 3 * p[0] ** 2 * t[0])),
    "exp": forward(torch.exp, lambda p, t: ((y := torch.exp(*p)), y * t[0])),
    "sinh": forward(
        torch.sinh, lambda p, t: ((_sinh(*p)[0]), (p[0].exp() + (-p[0]).exp()) / 2 * t[0])
    ),
    "product": forward(lambda x, y: x * y, lambda p, t: (p[0] * p[1], t[0] * p[1] + p[0] * t[1])),
}
PAIRS = {
    "cube": (MappedCube.apply, cube),
    "exp": (Exp.apply, exp),
    "sinh": (Sinh.apply, sinh),
    "product": (Product.apply, product),
    "gram": (Gram.apply, gram),
}


# --- programs -------------------------------------------------------------------------------


class Program(NamedTuple):
    name: str  # The name of the pair in PAIRS.
    run: object  # run(f) returns a pytree or raises an error.


def grads(f, *xs, **told):
    return torch.autograd.grad(f(*xs).sum(), xs, **told)


def twice(f):
    x = leaf()
    (g,) = grads(f, x, create_graph=True)
    return torch.autograd.grad((g**2).sum(), x)


def with_hooks(f):
    x, seen = leaf(), []
    y = f(x)
    y.register_hook(lambda ct: seen.append(ct.clone()) or 2 * ct)
    y.grad_fn.register_hook(lambda gs, cts: seen.append(gs[0].clone()))
    y.sum().backward()
    return x.grad, seen


def saved_is_changed(f):
    x = leaf()
    z = x * 1
    y = f(z)
    z.add_(1)
    y.sum().backward()


def output_is_changed(f):
    x = leaf()
    y = f(x)
    y.mul_(3)
    return torch.autograd.grad(y.sum(), x)


def freed(f):
    x = leaf()
    y = f(x).sum()
    y.backward()
    y.backward()


def kept(f):
    x = leaf()
    y = f(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


def forward_mode(f):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(X, Y))))


def packed(f):
    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.tensor):
        y = f(x)
    return torch.autograd.grad(y.sum(), x)


def autocast(f):
    x = leaf(X.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = f(x)
    return y, torch.autograd.grad(y.sum(), x)


def batched_grads(f):
    x = leaf()
    basis = torch.eye(X.numel(), dtype=D).reshape(-1, *X.shape)
    return torch.autograd.grad(f(x), x, basis, is_grads_batched=True)


def in_anomaly_mode(f):
    with torch.autograd.detect_anomaly():
        return grads(f, leaf())


PROGRAMS = {
    "setup_context, save_for_backward": Program("cube", lambda f: grads(f, leaf())),
    "saves its output": Program("exp", lambda f: grads(f, leaf())),
    "saves an intermediate": Program("sinh", lambda f: grads(f, leaf())),
    "one of two requires grad": Program("product", lambda f: grads(lambda x: f(x, Y), leaf())),
    "one tensor twice": Program("product", lambda f: grads(lambda x: f(x, x), leaf())),
    "no tensor requires grad": Program("product", lambda f: (f(X, Y), f(X, Y).requires_grad)),
    "no_grad": Program("cube", lambda f: torch.no_grad()(f)(leaf()).requires_grad),
    "double backward": Program("cube", twice),
    "double backward, saved intermediate": Program("sinh", twice),
    "hooks": Program("cube", with_hooks),
    "a saved tensor written in place": Program("cube", saved_is_changed),
    "an output written in place": Program("cube", output_is_changed),
    "a saved output written in place": Program("exp", output_is_changed),
    "a graph that was freed": Program("exp", freed),
    "a graph that is kept": Program("exp", kept),
    "jvp": Program("cube", forward_mode),
    "generate_vmap_rule": Program(
        "cube", lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(X)
    ),
    "saved_tensors_hooks": Program("cube", packed),
    "autocast, custom_fwd and custom_bwd": Program("gram", autocast),
    "checkpoint": Program(
        "exp", lambda f: grads(lambda x: checkpoint(f, x, use_reentrant=False), leaf())
    ),
    "batched cotangents": Program("exp", batched_grads),
    "an empty tensor": Program("cube", lambda f: grads(f, leaf(X[:0]))),
    "a scalar": Program("cube", lambda f: grads(f, leaf(X[0, 0]))),
    "an expanded tensor": Program("cube", lambda f: grads(lambda x: f(x.expand(4, 3)), leaf(X[0]))),
    "a transposed tensor": Program("exp", lambda f: grads(lambda x: f(x.T), leaf())),
    "complex": Program("product", lambda f: grads(lambda z: f(z, z).real, leaf(X + 1j * Y))),
    "a parameter": Program("exp", lambda f: grads(f, torch.nn.Parameter(X.clone()))),
    "anomaly mode": Program("exp", in_anomaly_mode),
}

EXCEPTIONS = {
    "double backward, saved intermediate": "the Function treats the intermediate as a constant",
}
FORWARD_EXCEPTIONS = {
    "hooks": "the node passes the cotangent to the tangent's graph",
    "a saved tensor written in place": "the forward rule computes 3 x^2 before the in-place write",
    "complex": "the Function omits the conjugate in a product's cotangent",
}


def outcome(program, f):
    """Return the result of the program, or RuntimeError if the program raises that error."""
    try:
        return program.run(f)
    except RuntimeError:
        return RuntimeError


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("given", ["the function", "forward"])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in EXCEPTIONS])
def test_a_rule_does_what_a_function_does(name, given):
    program = PROGRAMS[name]
    native, ours = PAIRS[program.name]
    expected = outcome(program, native)
    if given == "forward":
        if program.name not in FORWARD or name in FORWARD_EXCEPTIONS:
            pytest.skip(FORWARD_EXCEPTIONS.get(name, "the program has no forward rule"))
        ours = FORWARD[program.name]
    for _ in range(3):  # later calls use the caches of the first call
        found = outcome(program, ours)
        if isinstance(expected, type):
            assert found is expected
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["a tree", "an identity"])
def test_a_forward_rule_is_computed_again_as_it_was_computed(name, reentrant):
    """A checkpoint counts saved tensors, so all calls of a rule must save equally many tensors."""
    f, jvp, slope = {
        "a tree": (
            lambda x: (x.sin(), x),
            lambda p, t: ((p[0].sin(), p[0]), (p[0].cos() * t[0], 3 * t[0])),
            lambda x: x.cos() + 3,
        ),
        "an identity": (lambda x: x, lambda p, t: (p[0], -2 * t[0]), lambda x: -2 + 0 * x),
    }[name]
    rule = gt.custom_rule(f)
    rule.defjvp(jvp)
    run = lambda x: sum(y.sum() for y in tree_leaves(rule(x)))
    for _ in range(3):
        x = leaf()
        checkpoint(run, x, use_reentrant=reentrant).backward()
        torch.testing.assert_close(x.grad, slope(x.detach()))


def test_a_saved_intermediate_is_differentiated():
    with pytest.raises(RuntimeError, match="does not require grad"):
        twice(Sinh.apply)
    for _ in range(3):
        torch.testing.assert_close(twice(sinh), twice(torch.sinh))


# --- invalid rules --------------------------------------------------------------------------


def test_a_check_neither_draws_random_numbers_nor_changes_what_is_saved():
    def bwd(x, ct):
        return (ct * x.mul_(1) * torch.rand(()),)

    rule = reverse(torch.sin, lambda x: (torch.sin(x), x.clone()), bwd)
    for _ in range(2):
        torch.manual_seed(0)
        found = torch.autograd.grad(rule(x := leaf()).sum(), x)[0]
        torch.manual_seed(0)
        torch.testing.assert_close(found, X * torch.rand(()))
