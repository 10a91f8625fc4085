"""Hooks on gradients where f is pushed along: refused by name, for forward mode passes them by."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.errors import LostDerivativeError

D = torch.float64
Z, U = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4), torch.linspace(2, -1, 12, dtype=D).cos()
U, Y = U.reshape(3, 4), torch.linspace(0.5, 1, 4, dtype=D)

HOOKS = {
    "full": lambda m: m.register_full_backward_hook(lambda m, gi, go: (0.5 * gi[0],)),
    "pre": lambda m: m.register_full_backward_pre_hook(lambda m, go: (0.5 * go[0],)),
    "old": lambda m: m.register_backward_hook(lambda m, gi, go: tuple(0.5 * g for g in gi)),
}


class Hooked(nn.Module):
    """z -> tanh(W sin z), with a hook on the gradient in it."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(4, 4, dtype=D), nn.Tanh()
        self.kind = kind
        if kind in HOOKS:
            HOOKS[kind](self.layer)

    def forward(self, z):
        h = self.first(z.sin())
        if self.kind == "tensor":
            h.register_hook(lambda g: 0.5 * g)
        return self.layer(h)


def f(y, g):
    return (torch.tanh(g * y) * y).sum()


def along_y(G):
    """What mixed_partial is, by PyTorch's own double backward."""
    y, z = Y.clone().requires_grad_(), Z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(y, G(z)), z, create_graph=True)
    return torch.autograd.grad((slope * U).sum(), y)[0]


FORWARD = {
    "mixed_partial": lambda G: gt.mixed_partial(f, G, Y, Z, U),
    "mixed_partial, several": lambda G: gt.mixed_partial(f, G, Y, Z, [U, 2 * U]),
    "jvp": lambda G: gt.jvp(G, (Z,), (U,)),
    "jacobian": lambda G: gt.jacobian(lambda z: G(z).sum(), mode="forward")(Z),
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook", "ignore:Using non-full")
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("kind", [*HOOKS, "tensor"])
@pytest.mark.parametrize("operator", FORWARD)
def test_a_hook_that_edits_a_gradient_is_refused_in_forward_mode(operator, kind, tracked):
    G = Hooked(kind).requires_grad_(tracked)
    edited, plain = along_y(G), along_y(Hooked("none"))
    torch.testing.assert_close(edited, plain / 2)  # the hooks do edit
    name = operator.partition(",")[0]
    told = (
        rf"{name}: (a Tanh in f has a backward hook|f sets a hook on a tensor|f holds a function)"
    )
    with pytest.raises(GradtoolsError, match=told):
        FORWARD[operator](G)
    with torch.no_grad(), pytest.raises(GradtoolsError, match=told):
        FORWARD[operator](G)
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.filterwarnings("ignore:frozen. .* lacks")
def test_the_routes_that_are_named_give_the_edited_derivative():
    G = Hooked("full").requires_grad_(False)
    through = lambda y: (gt.grad(lambda z: f(y, gt.frozen(G)(z)))(Z) * U).sum()
    torch.testing.assert_close(gt.grad(through)(Y), along_y(G))
    pushed, edited = gt.linearize(Hooked("none"), Z)[1](U), gt.linearize(G, Z)[1](U)
    torch.testing.assert_close(edited, pushed / 2)


def test_hooks_that_edit_nothing_there_are_no_reason_to_refuse():
    """Of parameters, of what has no tangent, that are removed again, and in a derivative inside."""
    plain = Hooked("none")
    plain.first.weight.register_hook(lambda g: 0 * g)
    fixed = Hooked("full").requires_grad_(False)

    def beside(z):
        removed = z.sin()
        handle = removed.register_hook(lambda g: 0 * g) if removed.requires_grad else None
        if handle is not None:
            handle.remove()
        return plain(z) * fixed(Y)

    expected = torch.func.jvp(lambda z: Hooked("none")(z) * Hooked("none")(Y), (Z,), (U,))
    for own, theirs in zip(gt.jvp(beside, (Z,), (U,)), expected, strict=True):
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("push", ["jvp", "jacobian", "hvp"])
def test_forward_over_reverse_refuses_a_hook_that_reverse_mode_would_apply_again(push):
    """Reverse over reverse applies 2g twice, as `scale_gradient`; forward mode once."""

    def f(hook, edit=lambda x: x):
        def value(x):
            z = edit(x * 1)
            if hook is not None and z.requires_grad:
                z.register_hook(hook)
            return (z * z).sum()

        return value

    x = torch.tensor([2.0], dtype=D)
    ways = {
        "jvp": lambda f: gt.jvp(gt.grad(f), (x,), (torch.ones_like(x),))[1],
        "jacobian": lambda f: gt.jacobian(gt.grad(f), mode="forward")(x)[0],
        "hvp": lambda f: gt.hvp(f, (x,), (torch.ones_like(x),), mode="forward_over_reverse")[1][0],
    }
    scaled = f(None, lambda x: gt.scale_gradient(x, 2.0))
    for same in (f(lambda g: 2 * g), scaled):
        assert gt.hessian(same)(x).item() == 8.0
    assert ways[push](scaled).item() == 8.0
    assert ways[push](f(lambda g: None)).item() == 2.0
    assert ways[push](f(lambda g: g.nan_to_num())).item() == 2.0
    with pytest.raises(LostDerivativeError, match="hook on a gradient that edits it"):
        ways[push](f(lambda g: 2 * g))

    def constant(x):  # no second derivative goes through the hook
        z = x * x
        z.register_hook(lambda g: 2 * g)
        return z.sum()

    assert ways[push](constant).item() == 4.0


def test_the_hooks_of_another_thread_are_not_looked_at():
    from concurrent.futures import ThreadPoolExecutor

    G = Hooked("full")
    with ThreadPoolExecutor(1) as pool:

        def g(z):
            return z * pool.submit(lambda: G(Z).detach()).result()

        assert torch.equal(gt.jvp(g, (Z,), (U,))[1], U * G(Z))


def test_a_counter_of_operations_looks_on_in_forward_mode():
    net = nn.Sequential(nn.Linear(4, 4, dtype=D), nn.Tanh(), nn.Linear(4, 2, dtype=D))
    counted = FlopCounterMode(display=False)
    with counted:
        found = gt.jvp(net, (Z,), (U,))
    (expected,) = torch.autograd.functional.jvp(net, Z, U)[1:]
    torch.testing.assert_close(found[1].detach(), expected)
    assert counted.get_total_flops() >= 2 * 2 * (3 * 4 * 4 + 3 * 4 * 2)


def test_a_hook_in_a_checkpoint_under_vmap_is_refused_in_words():
    def f(w, x):
        def inner(x):
            y = x * w
            y.register_hook(lambda g: 2 * g)
            return y.sin()

        return gt.checkpoint(inner)(x).sum()

    with pytest.raises(GradtoolsError, match=r"hook on a gradient .* or computed by checkpoint"):
        gt.per_example_grad(f)(Y, Z)
