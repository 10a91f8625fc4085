"""Defines transforms of PyTorch itself for custom rules; see `support_transforms`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from tests.conformance.support_transforms import Case, Pairs, Transform


def _leaf(c: Case) -> torch.Tensor:
    return c.array(c.X).requires_grad_()


def _autograd_grad(order: int) -> Any:
    """Differentiate the loss L, then x L', then x (x L')'.

    The factor x keeps the graph connected where a gradient is zero.
    """

    def run(c: Case) -> Pairs:
        x = _leaf(c)
        y = c.loss(x)
        for _ in range(order - 1):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = (g * x).sum()
        (found,) = torch.autograd.grad(y, x)
        g, h = c.gradient(c.X), c.hessian(c.X)
        hx = h @ c.X
        expected = [
            lambda: g,
            lambda: g + hx,
            lambda: g + 3 * hx + np.einsum("jkl,k,l", c.third(c.X), c.X, c.X),
        ]
        yield found, expected[order - 1]()

    return run


def _backward(c: Case) -> Pairs:
    x = _leaf(c)
    c.loss(x).backward(retain_graph=True)
    yield x.grad, c.gradient(c.X)


def _dual(c: Case) -> Pairs:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(c.f(forward_ad.make_dual(*c.arrays[:2])))
        yield out.primal, c.D[0]
        yield out.tangent, c.D[1] @ c.V


def _dual_over_reverse(c: Case) -> Pairs:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(_leaf(c), c.arrays[1])
        (g,) = torch.autograd.grad(c.loss(x), x, create_graph=True)
        # PyTorch returns None for a tangent that it can prove to be zero
        found = forward_ad.unpack_dual(g).tangent
        yield torch.zeros_like(g) if found is None else found, c.hessian(c.X) @ c.V


def _reverse_over_dual(c: Case) -> Pairs:
    x = _leaf(c)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(c.loss(forward_ad.make_dual(x, c.arrays[1])))
        (g,) = torch.autograd.grad(out.tangent, x)
    yield g, c.hessian(c.X) @ c.V


def _func_jacobian(which: str) -> Any:
    return lambda c: [(getattr(torch.func, which)(c.f)(c.arrays[0]), c.D[1])]


def _func_hessian(c: Case) -> Pairs:
    yield torch.func.hessian(c.loss)(c.arrays[0]), c.hessian(c.X)
    yield torch.func.jacrev(torch.func.jacrev(c.loss))(c.arrays[0]), c.hessian(c.X)


def _func_linearize(c: Case) -> Pairs:
    out, push = torch.func.linearize(c.f, c.arrays[0])
    yield out, c.D[0]
    yield push(c.arrays[1]), c.D[1] @ c.V


def _batched_grad(c: Case) -> Pairs:
    x = _leaf(c)
    y = c.f(x)
    cts = np.array([c.C, c.C[::-1]])
    (found,) = torch.autograd.grad(y, x, c.array(cts), is_grads_batched=True)
    yield found, cts @ c.D[1]


def _checkpointed(reentrant: bool) -> Any:
    def run(c: Case) -> Pairs:
        x = _leaf(c)
        checkpoint(c.loss, x, use_reentrant=reentrant).backward()
        yield x.grad, c.gradient(c.X)

    return run


def _checkpointed_twice(c: Case) -> Pairs:
    x = _leaf(c)
    y = checkpoint(c.loss, x, use_reentrant=False)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad((g * x).sum(), x)
    yield h, c.gradient(c.X) + c.hessian(c.X) @ c.X


def _gradcheck(c: Case) -> Pairs:
    ok = gradcheck(
        c.f,
        (_leaf(c),),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        check_undefined_grad=True,
    )
    yield float(ok), 1.0


def _gradgradcheck(c: Case) -> Pairs:
    check = partial(gradgradcheck, c.f, (_leaf(c),))
    ok = check(check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)
    yield float(ok), 1.0


def _compiled_backward(c: Case) -> Pairs:
    """Call `.backward()` outside of the compiled function."""
    x = _leaf(c)
    c.native.jit(c.loss)(x).backward()
    yield x.grad, c.gradient(c.X)


def _row(name: str, order: int, run: Any) -> Transform:
    return Transform(name, order, run, backend="torch")


TORCH = (
    _row("autograd.grad", 1, _autograd_grad(1)),
    _row("autograd.grad twice", 2, _autograd_grad(2)),
    _row("autograd.grad three times", 3, _autograd_grad(3)),
    _row("autograd.grad, is_grads_batched", 1, _batched_grad),
    _row("backward()", 1, _backward),
    _row("dual numbers", 1, _dual),
    _row("dual numbers over autograd.grad", 2, _dual_over_reverse),
    _row("autograd.grad over dual numbers", 2, _reverse_over_dual),
    _row("func.jacrev", 1, _func_jacobian("jacrev")),
    _row("func.jacfwd", 1, _func_jacobian("jacfwd")),
    _row("func.hessian and jacrev twice", 2, _func_hessian),
    _row("func.linearize", 1, _func_linearize),
    _row("backward() of checkpoint, reentrant", 1, _checkpointed(True)),
    _row("backward() of checkpoint", 1, _checkpointed(False)),
    _row("autograd.grad twice of checkpoint", 2, _checkpointed_twice),
    _row("gradcheck", 1, _gradcheck),
    _row("gradgradcheck", 2, _gradgradcheck),
    _row("backward() of a compiled value", 1, _compiled_backward),
)
