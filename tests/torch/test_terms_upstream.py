"""What plain PyTorch gets wrong or cannot put together, and what gradtools does in its place.

Each test holds the upstream bug as it is today: it fails, and so tells, when upstream is mended.
"""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

L = torch.tensor([[2.0, 0.0, 0.0], [-0.7, 3.0, 0.0], [0.4, 1.1, 1.5]], dtype=torch.float64)
T = torch.tensor([[0.3, 0.0, 0.0], [1.0, -0.2, 0.0], [0.5, 0.7, 0.9]], dtype=torch.float64)
B = torch.tensor([[1.0, 2.0], [-1.0, 3.0], [0.5, 0.2]], dtype=torch.float64)


def differences(f, x, t):
    """Central differences, extrapolated once."""
    slope = lambda h: (f(x + h * t) - f(x - h * t)) / (2 * h)
    return (4 * slope(1e-4) - slope(2e-4)) / 3


def off(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def by_one(t):
    """Two factors that depend on one number, of the report."""
    one, zero = torch.ones_like(t), torch.zeros_like(t)
    parts = (2 * one, zero, t, 3 * one, 3 * one, zero, 2 * t + 1, 2 * one)
    return torch.stack(parts).reshape(2, 2, 2)


def reported(t):
    b = torch.tensor([[1, 2], [-1, 3]], dtype=t.dtype)
    w = torch.tensor([[[1, 2], [3, 4]], [[2, -1], [4, 3]]], dtype=t.dtype)
    return (torch.cholesky_solve(b, by_one(t)) * w).sum()


def test_196682_the_tangent_of_cholesky_inverse_is_wrong_in_silence():
    """When this fails PyTorch has mended it: take it out of terms.py."""
    expected = differences(torch.cholesky_inverse, L, T)
    assert off(torch.func.jvp(torch.cholesky_inverse, (L,), (T,))[1], expected) > 0.01
    assert off(gt.jvp(torch.cholesky_inverse, (L,), (T,))[1], expected) < 1e-9


def test_196694_the_tangent_of_cholesky_solve_is_wrong_in_silence():
    """When this fails PyTorch has mended it: take it out of terms.py."""
    t = torch.tensor(-7.0, dtype=torch.float64)
    expected = torch.tensor(-11 / 3, dtype=torch.float64)
    assert off(torch.func.jvp(reported, (t,), (torch.ones_like(t),))[1], expected) > 1
    assert off(gt.jvp(reported, (t,), (torch.ones_like(t),))[1], expected) < 1e-12


WAYS = {
    "inverse": torch.cholesky_inverse,
    "inverse, a method": lambda L: L.cholesky_inverse(),
    "inverse, upper": lambda L: torch.cholesky_inverse(L.mT, upper=True),
    "inverse, by name": lambda L: torch.cholesky_inverse(input=L),
    "solve": lambda L: torch.cholesky_solve(B, L),
    "solve, a method": lambda L: B.cholesky_solve(L),
    "solve, upper": lambda L: torch.cholesky_solve(B, L.mT, True),
    "solve, both": lambda L: torch.cholesky_solve(L[:, :2] ** 2, L),
    "solve, by name": lambda L: torch.cholesky_solve(B, input2=L),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_goes_another_way_has_the_value_and_the_tangents(name):
    f = WAYS[name]
    value, pushed = gt.jvp(f, (L,), (T,))
    torch.testing.assert_close(value, f(L), rtol=1e-12, atol=0)
    assert off(pushed, differences(f, L, T)) < 1e-9
    columns = gt.jacobian(f, mode="forward")(L)
    assert off((columns * T).sum((-2, -1)), differences(f, L, T)) < 1e-9
    rows = gt.jacobian(f, mode="reverse")(L).tril()  # above the diagonal f does not look
    torch.testing.assert_close(columns, rows, rtol=1e-9, atol=1e-12)


def test_complex_factors_have_their_tangents_too():
    Lc, Tc = torch.complex(L, 0.3 * L.tril(-1)), torch.complex(T, 0.2 * T.tril(-1))
    for f in (torch.cholesky_inverse, lambda L: torch.cholesky_solve(B.to(L.dtype), L)):
        assert off(gt.jvp(f, (Lc,), (Tc,))[1], differences(f, Lc, Tc)) < 1e-9


# --- what cannot be put together ----------------------------------------------------------------


def test_forward_mode_takes_no_argument_whose_entries_share_memory():
    x = torch.ones(2, dtype=torch.float64).expand(3, 2)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        torch.func.jvp(lambda x: x**2, (x,), (torch.ones(3, 2, dtype=torch.float64),))
    pushed = gt.jvp(lambda x: x**2, (x,), (torch.ones(3, 2, dtype=torch.float64),))[1]
    assert torch.equal(pushed, torch.full((3, 2), 2.0, dtype=torch.float64))


def test_functorchs_forward_mode_does_not_nest_in_dual_numbers():
    x = torch.ones(3)
    f = lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1]
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="Nested"):
        f(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(GradtoolsError, match=r"^jvp: f holds torch.func.jvp.*Use gt.jvp"):
        gt.jvp(f, (x,), (x,))


def test_functorch_does_not_take_the_hooks_of_a_checkpoint():
    held = lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        torch.func.grad(held)(torch.ones(3))


def test_a_checkpoint_computes_again_without_the_tangents():
    squares = lambda x: (x * x).sum()
    held = lambda x: torch.utils.checkpoint.checkpoint(squares, x, use_reentrant=False)
    x = torch.ones(3, requires_grad=True)
    pushed = torch.func.jvp(held, (x,), (x,))[1]
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="number of tensors"):
        torch.autograd.grad(pushed, x)


def test_a_compiled_function_has_no_forward_mode():
    compiled = torch.compile(torch.sin, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        with pytest.raises(NotImplementedError, match="must implement the jvp function"):
            compiled(dual)


def test_dynamo_does_not_resume_what_breaks_the_graph_inside_torch_func():
    """Chunks leave the graph. No report of this was found upstream."""
    torch._dynamo.reset()
    cube = torch.compiler.disable(lambda x: x**3)
    x = torch.ones(3, dtype=torch.float64)
    slope = torch.compile(lambda x: torch.func.grad(lambda x: cube(x).sum())(x), backend="eager")
    with pytest.raises(AssertionError, match="False != True"):
        slope(x)
    torch._dynamo.reset()
    assert torch._C._functorch.peek_interpreter_stack() is None


@pytest.mark.slow
def test_91469_chunked_twice_is_right_where_torch_compile_leaves_it_to_python():
    """PyTorch has no compiled double backward: a pullback of ours is left to Python."""
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 6, dtype=torch.float64)
    chunked = gt.chunked(lambda x: x**3, 2)
    loss = lambda x: (chunked(x) ** 2).sum()
    twice = lambda x: gt.hvp(loss, (x,), (x,), mode="reverse_over_reverse")[1][0]
    torch.testing.assert_close(twice(x), 30 * x**5)
    torch.testing.assert_close(gt.compile(twice, backend="aot_eager")(x), 30 * x**5)
    torch._dynamo.reset()


def test_a_term_that_is_lost_where_no_mode_looks_in_is_refused():
    """An operator that is composed of others calls them beneath what modes of Python see."""
    library = torch.library.Library("gradtools_lost_terms", "DEF")
    library.define("normed(Tensor x) -> Tensor")
    normed = lambda x: torch.nn.functional.layer_norm(x, (3,)) ** 2
    library.impl("normed", normed, "CompositeImplicitAutograd")
    pushed = lambda f: gt.grad(lambda x: gt.jvp(f, (x,), (T,))[1].sum())
    with pytest.raises(GradtoolsError, match=r"jvp: the tangent .* NativeLayerNorm"):
        pushed(torch.ops.gradtools_lost_terms.normed)(L)
    slope = differences(lambda x: gt.jvp(normed, (x,), (T,))[1].sum(), L, T)
    assert off((pushed(normed)(L) * T).sum(), slope) < 1e-6
