"""Planted faults: `cross_check` finds each, and names it."""

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
SQRT = np.array([0.5, -1.0, 2.0])


def torch_rule(forward: Callable, backward: Callable, jvp: Callable | None = None) -> Callable:
    """A torch function of several arrays with its own derivative."""

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


def jax_rule(forward: Callable, backward: Callable) -> Callable:
    """A jax function with its own pullback."""
    ruled = jax.custom_vjp(forward)
    ruled.defvjp(lambda *xs: (forward(*xs), xs), lambda xs, c: backward(c, *xs))
    return ruled


class Fault:
    """A pair of programs that disagree at some arrays, `X` unless others are given.

    says: What the error's text holds besides the cause. options: Those of `cross_check`.
    """

    def __init__(
        self, name: str, torch: Any, jax: Any, *args: Any, says: str = "", **options: Any
    ) -> None:
        self.name, self.says = name, says
        self.asked = {"torch": torch, "jax": jax, "args": args or (X,), **options}


def no_grad(f: Callable) -> Callable:
    return torch.no_grad()(f)


def cube_wrong_in_forward_over_reverse() -> Callable:
    """By own rules, which nobody tries."""
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


SQUARE = lambda x: x**2
SUM = lambda x: (x**2).sum()
FAULTS = {  # by the quantity in which they show, and by what is said of it
    "value": {
        "constant factor 3, the batch size, axis 0 of argument 0": [
            Fault("sum against mean", SUM, lambda x: (x**2).mean())
        ],
        "transposed layout": [Fault("a transposed output", torch.sin, lambda m: jnp.sin(m).T, M)],
        "x in torch, real(x) in jax": [
            Fault("real part only", SQUARE, lambda z: jnp.real(z**2) + 0j, Z),
        ],
        "float64 in torch and float32 in jax from here on; the outputs agree to the coarser "
        "precision": [
            Fault(
                "a table in float32",
                lambda x: x * torch.tensor([0.1, 0.2, 0.3], dtype=x.dtype),
                lambda x: x * jnp.asarray(TABLE),
            )
        ],
        "float64 in torch and 16 bits in jax from here on; the outputs agree to the coarser "
        "precision": [
            Fault(
                "through bfloat16",
                torch.sin,
                lambda x: jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype),
            )
        ],
        "NaN in torch": [
            Fault(
                "NaN made a number",
                torch.sqrt,
                lambda x: jnp.nan_to_num(jnp.sqrt(x)),
                SQRT,
                says="nan_to_num",
            )
        ],
        "randomness in torch": [
            Fault("noise", lambda x: x + 1e-3 * torch.randn(3, dtype=x.dtype), lambda x: x)
        ],
        "an ill-conditioned point": [
            Fault(
                "roundings that are blown up",
                lambda x: torch.sin(x * 1e9 * 3),
                lambda x: jnp.sin(x * 3e9),
                np.linspace(0.1, 1, 9),
            )
        ],
        "another shape": [
            Fault("no reduction", SQUARE, SUM),
        ],
    },
    "dtype": {
        "another dtype": [
            Fault("output in float32", torch.sin, lambda x: jnp.sin(x).astype(jnp.float32))
        ],
    },
    "structure": {
        "another structure": [
            Fault(
                "a tuple against a dictionary", lambda x: (x, 2 * x), lambda x: {"a": x, "b": 2 * x}
            )
        ],
    },
    "gradient": {
        "stopped gradient in torch": [
            Fault(
                "a target that is not stopped in jax",
                lambda x, y: ((x * y - torch.tanh(y).detach()) ** 2).mean(),
                lambda x, y: ((x * y - jnp.tanh(y)) ** 2).mean(),
                X,
                Y,
                says="In jax it is not stopped",
            ),
        ],
        "stopped gradient in jax": [
            Fault(
                "a target that is not stopped in torch",
                lambda x, y: ((x * y - torch.tanh(y)) ** 2).mean(),
                lambda x, y: ((x * y - jax.lax.stop_gradient(jnp.tanh(y))) ** 2).mean(),
                X,
                Y,
                says="In torch it is not stopped",
            ),
        ],
        "no known pattern": [
            Fault(
                "wrong in reverse mode",
                torch_rule(torch.sin, lambda c, x: c * torch.sin(x), lambda x, t: t * torch.cos(x)),
                jnp.sin,
                says="torch is wrong",
            ),
        ],
        "sign": [
            Fault(
                "a reversed gradient",
                torch_rule(torch.sin, lambda c, x: -c * torch.cos(x)),
                jnp.sin,
                says="torch is wrong",
            )
        ],
        "conjugate": [
            Fault(
                "the other complex convention",
                torch_rule(lambda z: (z * z.conj()).real.sum(), lambda c, z: 2 * c * z.conj()),
                lambda z: (jnp.abs(z) ** 2).sum(),
                Z,
            )
        ],
        "NaN in jax": [
            Fault(
                "NaN behind where",
                lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0),
                lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
                SQRT,
                says="branch that where discards",
            )
        ],
    },
    "jvp": {
        "constant factor 2, a half square, or counted twice": [
            Fault(
                "wrong in forward mode",
                torch_rule(
                    torch.sin, lambda c, x: c * torch.cos(x), lambda x, t: 2 * t * torch.cos(x)
                ),
                jnp.sin,
                says="torch is wrong",
            )
        ],
    },
    "hvp, forward over reverse": {
        "stopped gradient in jax": [
            Fault(
                "a residual taken as constant",
                SUM,
                lambda x: jax_rule(SQUARE, lambda c, x: (2 * c * jax.lax.stop_gradient(x),))(
                    x
                ).sum(),
                says="jax is wrong",
            )
        ],
        "sign": [
            Fault(
                "one mix of modes",
                cube_wrong_in_forward_over_reverse(),
                lambda x: x**3,
                says="torch is wrong",
            )
        ],
    },
    "hvp, reverse over reverse": {
        "stopped gradient in torch": [
            Fault("differentiable once, in silence", OnceOnly.apply, SQUARE),
        ],
    },
}


CASES = [
    pytest.param(fault, quantity, cause, id=fault.name)
    for quantity, causes in FAULTS.items()
    for cause, faults in causes.items()
    for fault in faults
]


def order_of(quantity: str) -> int:
    """As far as the check must go to see it; going on costs time and changes nothing."""
    if quantity.startswith("hvp"):
        return 2
    return {"gradient": 1, "jvp": 2}.get(quantity, 0)


@pytest.mark.sampled(25, 40)
@pytest.mark.parametrize(("fault", "quantity", "cause"), CASES)
def test_a_planted_fault_is_found_and_named(fault, quantity, cause):
    with pytest.raises(AgreementError) as caught:
        cross_check(order=order_of(quantity), **fault.asked)
    first = caught.value.report.first
    assert (first.quantity, first.cause) == (quantity, cause)
    assert fault.says in str(caught.value)


def test_a_factor_of_the_gradient_explains_the_loss():
    weights = np.array([1.0, 0.0, 1.0])
    mean = lambda x: (torch.from_numpy(weights) * torch.sin(x)).mean() * 1.37
    with pytest.raises(AgreementError) as caught:
        cross_check(torch=mean, jax=lambda x: (weights * jnp.sin(x)).mean(), args=(X,), order=1)
    assert {c.cause for c in caught.value.report.disagreements} == {"constant factor 1.37"}


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
