"""Recomputation in PyTorch gives correct results or raises an error."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gradtools.torch as gt  # noqa: E402

# --- frozen functions in low precision


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inside", ["checkpoint", "chunked", "frozen", "twice"])
def test_frozen_of_a_recomputed_function_in_fewer_bits(low, inside):
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(16, 16, generator=generator) / 4).to(low)
    z = torch.randn(8, 16, generator=generator).double()
    y = torch.randn(16, generator=generator).double()

    def net(z):
        return ((z.to(low) @ weights).tanh() @ weights).double()

    def net_by_three(z):  # a matrix product with fewer rows may round differently
        return torch.cat([net(part) for part in z.split(3)])

    def slope(G):
        def inner(y):
            return (gt.grad(lambda z: (y * G(z)).sin().sum())(z) ** 2).sum()

        return gt.grad(inner)(y)

    wrapped = {
        "checkpoint": lambda: gt.frozen(gt.checkpoint(net)),
        "chunked": lambda: gt.frozen(gt.chunked(net, 3)),
        "frozen": lambda: gt.frozen(gt.frozen(net)),
        "twice": lambda: gt.frozen(gt.checkpoint(gt.chunked(net, 3))),
    }[inside]()
    expected = slope(net_by_three if inside in ("chunked", "twice") else net)
    tolerance = 8 * torch.finfo(low).eps * expected.abs().max().item()
    torch.testing.assert_close(slope(wrapped), expected, rtol=0, atol=tolerance)


# --- a host kernel with internal state


class _Solver:
    """A solver that caches the last argument and the last result."""

    x = y = None

    def __call__(self, x):
        if self.x is None or not np.array_equal(self.x, x):
            self.x, self.y = x, np.sin(x)
        return self.y


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "a row"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_kernel_that_keeps_its_argument_keeps_a_copy(layout, differentiated):
    f = gt.host_function(_Solver())
    f.defjvp(lambda p, t: (f(*p), torch.cos(p[0]) * t[0]))
    base = torch.full((3, 3), 0.1)
    p = {"contiguous": base, "transposed": base.T, "a row": base[1]}[layout]
    for _ in range(3):
        x = p.detach().requires_grad_(differentiated)
        torch.testing.assert_close(f(x).detach(), torch.sin(p))
        p.add_(0.1)
