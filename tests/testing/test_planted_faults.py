"""Planted faults: `cross_check` finds each, and names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


def jax_tangent(forward: Callable, slope: Callable) -> Callable:
    """A jax function of one array, elementwise, with its own slope."""
    ruled = jax.custom_jvp(forward)
    ruled.defjvp(lambda xs, ts: (forward(*xs), slope(*xs) * ts[0]))
    return ruled


@dataclass(frozen=True)
class Fault:
    """A pair of programs that disagree, and what is to be said of it."""

    name: str
    torch: Any
    jax: Any
    args: tuple[Any, ...]
    quantity: str
    cause: str
    options: dict[str, Any] = field(default_factory=dict)
    says: str = ""

    @property
    def order(self) -> int:
        """As far as the check must go to see it; going on costs time and changes nothing."""
        if self.quantity.startswith("hvp"):
            return 2
        return 1 if self.quantity in ("gradient", "jvp") else 0


def cube_with_a_slope_that_is_wrong_at_second_order() -> Callable:
    slope = jax_tangent(lambda x: 3 * x**2, lambda x: 12 * x)
    return jax_tangent(lambda x: x**3, slope)


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


def refuse(*args: Any) -> Any:
    raise NotImplementedError("not implemented twice")


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
FAULTS = [
    # in the value
    Fault(
        "sum against mean",
        SUM,
        lambda x: (x**2).mean(),
        (X,),
        "value",
        "constant factor 3",
        says="sum on one side",
    ),
    Fault(
        "half a square",
        SUM,
        lambda x: 0.5 * (x**2).sum(),
        (X,),
        "value",
        "constant factor 2",
    ),
    Fault(
        "unbiased variance",
        lambda x: x.var(0),
        lambda x: x.var(0),
        (np.vstack([M, M[:1] * 2]),),
        "value",
        "constant factor 1.33333",
    ),
    Fault(
        "root of the size",
        lambda x: x @ x.T,
        lambda x: x @ x.T / jnp.sqrt(5.0),
        (np.linspace(-1, 1, 15).reshape(3, 5),),
        "value",
        "constant factor 2.23607",
    ),
    Fault(
        "mean of a product of matrices",
        lambda a, b: (a @ b).sum(),
        lambda a, b: (a @ b).mean(),
        (M[:2], np.linspace(-1, 2, 15).reshape(3, 5)),
        "value",
        "constant factor 10",
    ),
    Fault(
        "degrees",
        torch.sin,
        lambda x: jnp.rad2deg(jnp.sin(x)),
        (X,),
        "value",
        "constant factor 0.0174533",
    ),
    Fault(
        "logarithm to base 2",
        lambda x: torch.log2(x),
        jnp.log,
        (X**2,),
        "value",
        "constant factor 1.4427",
    ),
    Fault("the other sign", SUM, lambda x: -(x**2).sum(), (X,), "value", "sign"),
    Fault("a modulus", torch.sin, lambda x: jnp.abs(jnp.sin(x)), (X,), "value", "no known pattern"),
    Fault(
        "a bias",
        SQUARE,
        lambda x: x**2 + 0.25,
        (X,),
        "value",
        "no known pattern",
    ),
    Fault("conjugated output", torch.conj, lambda z: z, (Z,), "value", "conjugate"),
    Fault(
        "times i",
        SQUARE,
        lambda z: 1j * z**2,
        (Z,),
        "value",
        "constant factor -1i",
    ),
    Fault(
        "real part only",
        SQUARE,
        lambda z: jnp.real(z**2) + 0j,
        (Z,),
        "value",
        "no known pattern",
    ),
    Fault(
        "transposed output",
        lambda m: torch.sin(m),
        lambda m: jnp.sin(m).T,
        (M,),
        "value",
        "transposed layout",
    ),
    Fault(
        "flattened the other way",
        lambda m: torch.sin(m).reshape(3, 2),
        lambda m: jnp.sin(m).T.reshape(3, 2),
        (M[:2],),
        "value",
        "transposed layout",
    ),
    Fault(
        "reversed in time",
        torch.sin,
        lambda x: jnp.sin(x)[::-1],
        (np.linspace(0, 1, 5),),
        "value",
        "no known pattern",
    ),
    Fault(
        "off by one place",
        torch.sin,
        lambda x: jnp.roll(jnp.sin(x), 1),
        (np.linspace(0, 1, 5),),
        "value",
        "no known pattern",
    ),
    Fault(
        "gates in another order",
        torch.sin,
        lambda x: jnp.sin(x)[np.array([0, 1, 4, 5, 2, 3])],
        (np.linspace(0, 1, 6),),
        "value",
        "no known pattern",
    ),
    Fault(
        "a mask",
        torch.sin,
        lambda x: jnp.where(x > 0, jnp.sin(x), 0),
        (np.linspace(-1, 1, 6),),
        "value",
        "zero in places in jax",
    ),
    Fault("a term left out", torch.sin, lambda x: 0 * jnp.sin(x), (X,), "value", "zero in jax"),
    Fault(
        "a clipped value",
        lambda x: x.clamp(-1, 1),
        lambda x: x,
        (np.linspace(-2, 2, 9),),
        "value",
        "no known pattern",
    ),
    Fault(
        "weights for each row",
        lambda m: m**2,
        lambda m: m**2 * jnp.array([[1.0], [2.0], [5.0]]),
        (M,),
        "value",
        "no known pattern",
    ),
    Fault(
        "GELU by tanh",
        torch.nn.functional.gelu,
        lambda x: jax.nn.gelu(x),
        (X,),
        "value",
        "close, but another formula",
    ),
    Fault(
        "unstable logsumexp",
        lambda x: torch.logsumexp(x, 0),
        lambda x: jnp.log(jnp.exp(x).sum()),
        (X + 1000,),
        "value",
        "infinity in jax",
    ),
    Fault(
        "NaN made a number",
        torch.sqrt,
        lambda x: jnp.nan_to_num(jnp.sqrt(x)),
        (SQRT,),
        "value",
        "NaN in torch",
        says="nan_to_num",
    ),
    Fault(
        "noise",
        lambda x: x + 1e-3 * torch.randn(3, dtype=x.dtype),
        lambda x: x,
        (X,),
        "value",
        "randomness in torch",
    ),
    Fault(
        "roundings that are blown up",
        lambda x: torch.sin(x * 1e9 * 3),
        lambda x: jnp.sin(x * 3e9),
        (np.linspace(0.1, 1, 9),),
        "value",
        "an ill-conditioned point",
    ),
    # in dtype and structure
    Fault(
        "through float32",
        lambda x: torch.sin(x).float().double(),
        jnp.sin,
        (X,),
        "value",
        "float32 on one side, or another constant",
    ),
    Fault(
        "through bfloat16",
        torch.sin,
        lambda x: jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype),
        (X,),
        "value",
        "close, but another formula",
    ),
    Fault(
        "a table in float32",
        lambda x: x * torch.tensor([0.1, 0.2, 0.3], dtype=x.dtype),
        lambda x: x * jnp.asarray(TABLE),
        (X,),
        "value",
        "float32 on one side, or another constant",
    ),
    Fault(
        "output in float32",
        torch.sin,
        lambda x: jnp.sin(x).astype(jnp.float32),
        (X,),
        "dtype",
        "another dtype",
    ),
    Fault(
        "a tuple against a dictionary",
        lambda x: (x, 2 * x),
        lambda x: {"a": x, "b": 2 * x},
        (X,),
        "structure",
        "another structure",
    ),
    Fault(
        "keepdims",
        lambda m: m.sum(0, keepdim=True),
        lambda m: m.sum(0),
        (M,),
        "value",
        "another shape",
    ),
    Fault("no reduction", SQUARE, SUM, (X,), "value", "another shape"),
    Fault(
        "a column against a row",
        lambda x, y: x[:, None] - y,
        lambda x, y: x - y,
        (X, Y),
        "value",
        "another shape",
    ),
    Fault(
        "channels last",
        lambda m: m**2,
        lambda m: jnp.swapaxes(m**2, 0, 1),
        (M[:2],),
        "value",
        "another shape",
    ),
    # in one argument's gradient
    Fault(
        "a detached argument",
        lambda x, y: (x * y.detach()).sum(),
        lambda x, y: (x * y).sum(),
        (X, Y),
        "gradient",
        "stopped gradient in torch",
        says="argument 1 reaches",
    ),
    Fault(
        "a factor on a path",
        SUM,
        lambda x: (x * jax.lax.stop_gradient(x)).sum(),
        (X,),
        "gradient",
        "constant factor 2",
        says="jax is wrong",
    ),
    Fault(
        "zeros for one argument",
        lambda x, y: x * y,
        jax_rule(lambda x, y: x * y, lambda c, x, y: (c * y, 0 * x)),
        (X, Y),
        "gradient",
        "stopped gradient in jax",
        says="jax is wrong",
    ),
    Fault(
        "some entries stopped",
        torch.sin,
        lambda x: jnp.where(x > 0.5, jnp.sin(x), jnp.sin(jax.lax.stop_gradient(x))),
        (np.linspace(0, 1, 6),),
        "gradient",
        "stopped gradient in places in jax",
    ),
    Fault(
        "exchanged gradients",
        torch_rule(lambda x, y: x * y**2, lambda c, x, y: (2 * c * x * y, c * y**2)),
        lambda x, y: x * y**2,
        (X, Y),
        "gradient",
        "no known pattern",
    ),
    Fault(
        "a reversed gradient",
        torch_rule(torch.sin, lambda c, x: -c * torch.cos(x)),
        jnp.sin,
        (X,),
        "gradient",
        "sign",
        says="torch is wrong",
    ),
    Fault(
        "a transposed gradient",
        torch_rule(torch.sin, lambda c, m: (c * torch.cos(m)).T),
        jnp.sin,
        (M,),
        "gradient",
        "transposed layout",
    ),
    Fault(
        "weight decay",
        torch_rule(torch.sin, lambda c, x: c * torch.cos(x) + 0.1 * x),
        jnp.sin,
        (X,),
        "gradient",
        "no known pattern",
        says="torch is wrong",
    ),
    Fault(
        "a clipped gradient",
        torch_rule(torch.sin, lambda c, x: (c * torch.cos(x)).clamp(-0.3, 0.3)),
        jnp.sin,
        (np.linspace(0, 3, 12),),
        "gradient",
        "no known pattern",
    ),
    Fault(
        "the cotangent forgotten",
        torch_rule(torch.sin, lambda c, x: torch.cos(x)),
        jnp.sin,
        (X,),
        "gradient",
        "no known pattern",
    ),
    Fault(
        "the other complex convention",
        torch_rule(lambda z: (z * z.conj()).real.sum(), lambda c, z: 2 * c * z.conj()),
        lambda z: (jnp.abs(z) ** 2).sum(),
        (Z,),
        "gradient",
        "conjugate",
    ),
    Fault(
        "NaN behind where",
        lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
        (SQRT,),
        "gradient",
        "NaN in jax",
        says="branch that where discards",
    ),
    Fault(
        "another subgradient",
        torch.relu,
        lambda x: jnp.where(x >= 0, x, 0.0),
        (np.array([0.0, 1.0, -1.0]),),
        "gradient",
        "kink: a kink or tie",
    ),
    Fault(
        "a convention, where none is allowed",
        torch.abs,
        jnp.abs,
        (np.array([0.0, 1.0]),),
        "gradient",
        "convention: |x| at 0 or |x| at -0",
        options={"conventions": "raise"},
    ),
    # in one mode, at second order
    Fault(
        "wrong in forward mode",
        torch_rule(torch.sin, lambda c, x: c * torch.cos(x), lambda x, t: 2 * t * torch.cos(x)),
        jnp.sin,
        (X,),
        "jvp",
        "constant factor 2",
        says="torch is wrong",
    ),
    Fault(
        "the tangent forgotten",
        torch_rule(torch.sin, lambda c, x: c * torch.cos(x), lambda x, t: torch.cos(x)),
        jnp.sin,
        (X,),
        "jvp",
        "no known pattern",
    ),
    Fault(
        "wrong in reverse mode",
        torch_rule(torch.sin, lambda c, x: c * torch.sin(x), lambda x, t: t * torch.cos(x)),
        jnp.sin,
        (X,),
        "gradient",
        "no known pattern",
        says="torch is wrong",
    ),
    Fault(
        "a residual taken as constant",
        SUM,
        lambda x: jax_rule(SQUARE, lambda c, x: (2 * c * jax.lax.stop_gradient(x),))(x).sum(),
        (X,),
        "hvp, forward over reverse",
        "stopped gradient in jax",
        says="jax is wrong",
    ),
    Fault(
        "a second derivative twice as large",
        lambda x: x**3,
        cube_with_a_slope_that_is_wrong_at_second_order(),
        (X,),
        "hvp, forward over reverse",
        "constant factor 0.5",
        says="jax is wrong",
    ),
    Fault(
        "one mix of modes",
        cube_wrong_in_forward_over_reverse(),
        lambda x: x**3,
        (X,),
        "hvp, forward over reverse",
        "sign",
        says="torch is wrong",
    ),
    Fault(
        "differentiable once, in silence",
        OnceOnly.apply,
        SQUARE,
        (X,),
        "hvp, reverse over reverse",
        "no second derivative in torch",
    ),
    Fault(
        "differentiable once, said so",
        torch_rule(SQUARE, lambda c, x: torch_rule(lambda c, x: 2 * c * x, refuse)(c, x)),
        SQUARE,
        (X,),
        "hvp, reverse over reverse",
        "no second derivative in torch",
        says="not implemented twice",
    ),
]


@pytest.mark.sampled(24, 55)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_named(fault):
    options = {"order": fault.order, **fault.options}
    with pytest.raises(AgreementError) as caught:
        cross_check(torch=fault.torch, jax=fault.jax, args=fault.args, **options)
    first = caught.value.report.first
    assert (first.quantity, first.cause) == (fault.quantity, fault.cause)
    assert fault.says in str(caught.value)


def test_the_faults_have_many_causes():
    assert len({fault.cause for fault in FAULTS}) >= 25
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
