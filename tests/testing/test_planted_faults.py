"""`cross_check` reports the quantity and the cause of each planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import torch
from torch.autograd.function import once_differentiable

import gradtools.torch as gt
from gradtools.testing import AgreementError, cross_check

X = np.array([0.3, -0.7, 1.2])
Y = np.array([-1.1, 0.4, 0.9])
M = np.array([[0.3, -0.7, 1.2], [0.5, 0.1, -0.4], [-1.3, 0.8, 0.2]])
Z = np.array([0.3 + 1.0j, -0.7 + 0.2j, 1.2 - 0.5j])
TABLE = np.array([0.1, 0.2, 0.3], np.float32)
ROOTS = np.array([0.5, -1.0, 2.0])
SQUARE, SUM = (lambda x: x**2), (lambda x: (x**2).sum())
CASES = []


def fault(quantity: str, cause: str, torch: Any, jax: Any, *args: Any, says: str = "") -> None:
    """Register two programs that disagree at some arrays, by default at `X`.

    quantity: The first quantity that differs. cause: The expected cause. says: A part of the
    expected report.
    """
    programs = {"torch": torch, "jax": jax, "args": args or (X,)}
    CASES.append(pytest.param(quantity, cause, programs, says, id=f"{quantity}: {cause[:40]}"))


def torch_rule(forward: Callable, backward: Callable, jvp: Callable | None = None) -> Callable:
    """Return a PyTorch function whose value, backward and jvp are the given functions."""

    class Ruled(torch.autograd.Function):
        @staticmethod
        def forward(*xs):
            return forward(*xs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, c):
            return backward(c, *ctx.saved_tensors)

    if jvp is not None:
        rule = staticmethod(lambda ctx, *ts: jvp(*ctx.saved_tensors, *ts))
        Ruled.jvp = rule  # type: ignore[method-assign, assignment]
    return Ruled.apply


def sine_by(backward: Callable, jvp: Callable | None = None) -> Callable:
    return torch_rule(torch.sin, lambda c, x: c * backward(x), jvp)


def square_with_a_constant_residual(x):
    square = jax.custom_vjp(SQUARE)
    square.defvjp(lambda x: (x**2, x), lambda x, c: (2 * c * jax.lax.stop_gradient(x),))
    return square(x).sum()


def cube_wrong_in_forward_over_reverse() -> Callable:
    slope, cube = gt.custom_rule(lambda c, x: 3 * x**2 * c), gt.custom_rule(lambda x: x**3)
    slope.defvjp(
        lambda c, x: (slope(c, x), (c, x)), lambda s, g: (3 * s[1] ** 2 * g, 6 * s[1] * s[0] * g)
    )
    slope.defjvp(lambda p, t: (slope(*p), 3 * p[1] ** 2 * t[0] - 6 * p[1] * p[0] * t[1]))
    cube.defvjp(lambda x: (cube(x), x), lambda x, c: (slope(c, x),))
    cube.defjvp(lambda p, t: (cube(*p), 3 * p[0] ** 2 * t[0]))
    return cube


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, c):
        return 2 * ctx.saved_tensors[0] * c


COARSER = "from here on; the outputs agree to the coarser precision"
fault(
    "value",
    "constant factor 3, the batch size, axis 0 of argument 0",
    SUM,
    lambda x: (x**2).mean(),
)
fault("value", "transposed layout", torch.sin, lambda m: jnp.sin(m).T, M)
fault("value", "x in torch, real(x) in jax", SQUARE, lambda z: jnp.real(z**2) + 0j, Z)
fault(
    "value",
    f"float64 in torch and float32 in jax {COARSER}",
    lambda x: x * torch.tensor([0.1, 0.2, 0.3], dtype=x.dtype),
    lambda x: x * jnp.asarray(TABLE),
)
fault(
    "value",
    f"float64 in torch and 16 bits in jax {COARSER}",
    torch.sin,
    lambda x: jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype),
)
fault(
    "value",
    "NaN in torch",
    torch.sqrt,
    lambda x: jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), 0.0),
    ROOTS,
    says="nan_to_num",
)
fault(
    "value",
    "randomness in torch",
    lambda x: x + 1e-3 * torch.randn(3, dtype=x.dtype),
    lambda x: x,
)
fault("value", "another shape", SQUARE, SUM)
fault("dtype", "another dtype", torch.sin, lambda x: jnp.sin(x).astype(jnp.float32))
fault("structure", "another structure", lambda x: (x, 2 * x), lambda x: {"a": x, "b": 2 * x})
fault(
    "gradient",
    "stopped gradient in torch",
    lambda x, y: ((x * y - torch.tanh(y).detach()) ** 2).mean(),
    lambda x, y: ((x * y - jnp.tanh(y)) ** 2).mean(),
    X,
    Y,
    says="In jax the gradient is not stopped",
)
fault(
    "gradient",
    "stopped gradient in jax",
    lambda x, y: ((x * y - torch.tanh(y)) ** 2).mean(),
    lambda x, y: ((x * y - jax.lax.stop_gradient(jnp.tanh(y))) ** 2).mean(),
    X,
    Y,
    says="In torch the gradient is not stopped",
)
fault(  # a factor 2, since both factors of the product are x
    "gradient",
    "stopped gradient in torch",
    lambda x: x * x.detach(),
    SQUARE,
    says="In jax the gradient is not stopped",
)
fault(
    "gradient",
    "no known pattern",
    sine_by(torch.sin, lambda x, t: t * torch.cos(x)),
    jnp.sin,
    says="torch is wrong",
)
fault("gradient", "sign", sine_by(lambda x: -torch.cos(x)), jnp.sin, says="torch is wrong")
fault(
    "gradient",
    "conjugate",
    torch_rule(lambda z: (z * z.conj()).real.sum(), lambda c, z: 2 * c * z.conj()),
    lambda z: (jnp.abs(z) ** 2).sum(),
    Z,
)
fault(
    "gradient",
    "NaN in jax",
    lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0),
    lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
    ROOTS,
    says="branch that `where` discards",
)
fault(
    "jvp",
    "constant factor 2, a missing factor 1/2, or a term counted twice",
    sine_by(torch.cos, lambda x, t: 2 * t * torch.cos(x)),
    jnp.sin,
    says="torch is wrong",
)
fault(
    "hvp, forward over reverse",
    "stopped gradient in jax",
    SUM,
    square_with_a_constant_residual,
    says="jax is wrong",
)
fault(
    "hvp, forward over reverse",
    "sign",
    cube_wrong_in_forward_over_reverse(),
    lambda x: x**3,
    says="torch is wrong",
)
fault("hvp, reverse over reverse", "stopped gradient in torch", OnceOnly.apply, SQUARE)


@pytest.mark.sampled(25, 40)
@pytest.mark.parametrize(("quantity", "cause", "programs", "says"), CASES)
def test_a_planted_fault_is_found_and_named(quantity, cause, programs, says):
    order = 2 if quantity.startswith("hvp") else {"gradient": 1, "jvp": 2}.get(quantity, 0)
    with pytest.raises(AgreementError) as caught:
        cross_check(order=order, **programs)
    first = caught.value.report.first
    assert (first.quantity, first.cause) == (quantity, cause)
    assert says in str(caught.value)


def test_finite_differences_of_wrong_gradients_blame_no_side_for_the_second_derivative():
    """PyTorch's gradients are wrong, so differences of them say nothing about hvp."""
    slope = torch_rule(torch.cos, lambda c, x: -c * torch.sin(x))
    wrong = torch_rule(torch.sin, lambda c, x: 1.5 * c * slope(x))
    with pytest.raises(AgreementError) as caught:
        cross_check(torch=wrong, jax=jnp.sin, args=(X,), order=2)
    details = {c.quantity: c.detail for c in caught.value.report.disagreements}
    assert "torch is wrong" in details["gradient"]
    assert "is wrong" not in details["hvp, reverse over reverse"]


def test_a_factor_of_the_gradient_explains_the_loss():
    weights = np.array([1.0, 0.0, 1.0])
    mean = lambda x: (torch.from_numpy(weights) * torch.sin(x)).mean() * 1.37
    with pytest.raises(AgreementError) as caught:
        cross_check(torch=mean, jax=lambda x: (weights * jnp.sin(x)).mean(), args=(X,), order=1)
    assert {c.cause for c in caught.value.report.disagreements} == {"constant factor 1.37"}


def lstm_in_jax(gates):
    """Return a recurrent layer with PyTorch's parameters and the gates in the given order."""

    def apply(p, state, x):
        h = c = jnp.zeros((x.shape[0], 3))
        for row in jnp.swapaxes(x, 0, 1):
            z = row @ p["weight_ih_l0"].T + h @ p["weight_hh_l0"].T
            parts = jnp.split(z + p["bias_ih_l0"] + p["bias_hh_l0"], 4, -1)
            gate = {name: jax.nn.sigmoid(y) for name, y in zip(gates, parts, strict=True)}
            c = gate["f"] * c + gate["i"] * jnp.tanh(parts[gates.index("g")])
            h = gate["o"] * jnp.tanh(c)
        return h, state

    return apply


def test_swapped_gates_of_a_recurrent_layer_are_named_as_permuted_blocks():
    torch.manual_seed(0)
    module = torch.nn.LSTM(4, 3, batch_first=True).double()
    last = lambda p, state, x: (torch.func.functional_call(module, p, (x,))[1][0][0], state)
    params = dict(module.named_parameters())
    copied = {name: jnp.asarray(p.detach().numpy()) for name, p in params.items()}
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    check = lambda gates: cross_check(
        torch=(last, params, {}), jax=(lstm_in_jax(gates), copied, {}), args=(x,), order=1,
        raises=False,
    )  # fmt: skip
    assert check("ifgo")
    assert check("igfo").cause.startswith("permuted blocks of axes of length 12")


@pytest.mark.parametrize("by", [lambda x: x * np.nan, lambda x: x * 0 + np.inf])
def test_programs_without_a_finite_value_do_not_agree(by):
    with pytest.raises(AgreementError, match=r"NaN or infinite on both sides.*why_zero"):
        cross_check(torch=by, jax=lambda x: 3 * by(x), args=(X,))


def test_derivatives_without_a_finite_entry_do_not_agree():
    f = lambda xp, s: lambda x: xp.where(x > 10, s * xp.sqrt(x - 10), 0 * x).sum()
    with pytest.raises(AgreementError) as caught:
        cross_check(torch=f(torch, 1), jax=f(jnp, 7), args=(np.zeros(3),), order=1)
    assert caught.value.report.first.quantity == "gradient"
    assert caught.value.report.cause == "NaN or infinite on both sides"
