"""Compares torchopt's implicit differentiation with `implicit_solution`; tests torchjd."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import gradtools.torch as gt

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def ridge(b, s, X, y):
    return ((X @ b - y) ** 2).mean() + (torch.exp(s) * b**2).sum()


def descended(s, X, y):
    b = torch.zeros(X.shape[1], dtype=X.dtype)
    for _ in range(400):
        b = b - 0.1 * torch.func.grad(ridge)(b, s, X, y)
    return b


def equilibrium(z, w, x):
    return torch.tanh(w @ z + x) - z


def iterated(w, x):
    z = torch.zeros_like(x)
    for _ in range(200):
        z = z + equilibrium(z, w, x)
    return z


@pytest.mark.parametrize("symmetric", [True, False], ids=["ridge", "equilibrium"])
def test_torchopts_implicit_gradients_are_ours(symmetric):
    torchopt = pytest.importorskip("torchopt", reason="torchopt is not installed")
    from torchopt.diff.implicit import custom_root
    from torchopt.linear_solve import solve_cg, solve_normal_cg

    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    if symmetric:
        F, solve, args = torch.func.grad(ridge), descended, (draw(3) - 2, draw(20, 3), draw(20))
    else:
        F, solve, args = equilibrium, iterated, (draw(4, 4) / 6, draw(4))
    exact = {"maxiter": 100, "rtol": 1e-12, "atol": 1e-14}
    solver = (solve_cg if symmetric else solve_normal_cg)(**exact)
    theirs = custom_root(F, argnums=1, solve=solver)(lambda start, *args: solve(*args))
    ours = gt.implicit_solution(F, solve, "cg" if symmetric else "gmres")
    assert torchopt.__version__

    by_theirs, by_ours = (args[0].clone().requires_grad_() for _ in range(2))
    start = torch.zeros(len(args[-1]) if not symmetric else 3, dtype=torch.float64)
    (theirs(start, by_theirs, *args[1:]) ** 3).sum().backward()
    (ours(by_ours, *args[1:]) ** 3).sum().backward()
    torch.testing.assert_close(by_ours.grad, by_theirs.grad, rtol=1e-7, atol=1e-10)


def test_rows_of_a_jacobian_go_to_torchjds_aggregators():
    aggregation = pytest.importorskip("torchjd.aggregation", reason="torchjd is not installed")
    torch.manual_seed(0)
    x, y, heads, shared = (
        torch.randn(*s) for s in ((8, 4), (2, 8), (2, 3), (4, 3))
    )  # fmt: skip
    losses = lambda w: ((torch.tanh(x @ w) @ heads.T - y.T) ** 2).mean(0)
    rows = gt.jacobian(losses)(shared)
    direction = aggregation.MGDA()(rows.flatten(1)).view_as(shared)
    assert all(float((direction * row).sum()) > -1e-6 for row in rows)
    one = gt.grad(lambda w: losses(w)[0])(shared)
    torch.testing.assert_close(rows[0], one)
