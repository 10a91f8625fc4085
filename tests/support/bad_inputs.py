"""Defines bad calls of every operator; `bad_inputs.txt` contains each complete error text.

A text names the function, the wrong value (argument, leaf, shape, dtype) and the fix. `python -m
tests.support.bad_inputs` rewrites the file, and `git diff` shows the changes.
`tests/operators/test_bad_inputs.py` runs the calls.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import (
    Report,
    check_derivatives,
    check_rule,
    checked,
    cross_check,
    first_divergence,
    tolerance,
)
from tests.support.numpy_trees import lift

# A call takes the gradtools namespace and a function that converts NumPy arrays.
Call = Callable[[Any, Any], Any]

TEXTS = Path(__file__).with_suffix(".txt")
BACKENDS = ("torch", "jax")

V, S, F32 = np.array([1.0, 2.0]), np.array(3.0), np.array([1.0, 2.0], np.float32)
N, B, Z = np.array([1, 2]), np.array([True, False]), np.array([1.0 + 2.0j, 3.0])
ROWS = np.arange(6.0).reshape(3, 2)


class Class:
    """A class that is passed where a module instance is expected."""


def total(gt: Any) -> Any:
    return lambda x: gt.xp.sum(x * x)


def mean(w: Any, x: Any) -> Any:
    return (x @ w).mean()


def raising(x: Any) -> Any:
    raise ValueError("my own")


def clipped(gt: Any) -> Any:
    return lambda x: gt.clip_gradient(x, max_norm=1.0) ** 2


def doubled(gt: Any) -> Any:
    return lambda x: gt.transform_gradient(x, lambda c: 2 * c) ** 2


def known(gt: Any) -> Any:
    return lambda x: gt.replace_gradient(x, gt.asarray(V)) ** 2


def pushed(gt: Any, f: Any) -> Any:
    """Return a function of x that computes the tangent of f at x along x."""
    return lambda x: gt.jvp(f, (x,), (x,))[1]


def ruled(gt: Any, f: Any, bwd: Any = lambda x, c: (c,)) -> Any:
    """Return f as a custom rule whose bwd by default returns the cotangent unchanged."""
    rule = gt.custom_rule(f)
    rule.defvjp(lambda x: (f(x), x), bwd)
    return rule


def in_numpy(x: Any, c: Any) -> Any:
    return (np.cos(x) * c,)


def numpy_rule(gt: Any) -> Any:
    rule = gt.custom_rule(gt.xp.sin)
    rule.defjvp(lambda xs, dxs: (gt.xp.sin(xs[0]), np.cos(xs[0]) * dxs[0]))
    return rule


def swapped_rule(gt: Any, a: Any) -> Any:
    """Differentiate a custom rule whose forward rule takes the tangents first."""
    rule = gt.custom_rule(lambda x: x * x)
    rule.defjvp(lambda tangents, primals: (rule(primals[0]), 2 * primals[0] * tangents[0]))
    return gt.grad(lambda x: gt.xp.sum(rule(x)))(a(V))


def badly_ruled(gt: Any) -> Any:
    """Return a custom rule whose bwd raises an error."""
    rule = gt.custom_rule(lambda x: x)
    rule.defvjp(lambda x: (x, x), lambda x, c: raising(x))
    return rule


def noted(call: Callable[[], Any]) -> None:
    """Raise an error whose message consists of the notes of the call's exception."""
    try:
        call()
    except Exception as error:
        notes = [n for n in getattr(error, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in n]
        if not notes:
            raise
        raise GradtoolsError(" ".join(notes)) from None


def branching(w: Any, x: Any) -> Any:
    y = (w * x).sum()
    return y if y > 0 else -y


def rule_of_tuples(gt: Any, a: Any) -> Any:
    """Differentiate a rule that uses the tuples of primals and tangents as arrays."""
    rule = gt.custom_rule(gt.xp.sin)
    rule.defjvp(lambda x, dx: gt.xp.cos(x) * dx)
    return gt.jvp(rule, (a(V),), (a(V),))


def rule_of_swapped_arguments(gt: Any, a: Any) -> Any:
    """Differentiate a rule whose bwd takes the cotangent first."""
    rule = gt.custom_rule(lambda x, y: x * y)
    rule.defvjp(lambda x, y: (x * y, (x, y)), lambda c, saved: (c * saved[1], c * saved[0]))
    return gt.grad(lambda x: gt.xp.sum(rule(x, x)))(a(V))


class Function:
    """A class like a `torch.autograd.Function`."""

    forward = backward = staticmethod(lambda ctx, x: x)


def rule_of_primals(gt: Any, a: Any) -> Any:
    """Differentiate a rule with symbolic zeros whose fwd computes with its arguments."""
    rule = gt.custom_rule(gt.xp.square)
    rule.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,), symbolic_zeros=True)
    return gt.grad(lambda x: gt.xp.sum(rule(x)))(a(V))


def rule_of_one_argument(gt: Any, a: Any) -> Any:
    """Define a rule of a function of two arguments by a fwd that takes one."""
    rule = gt.custom_rule(lambda x, y: x * y)
    rule.defvjp(lambda x: (x, x), lambda x, c: (c, c))


def rule_of_a_method(gt: Any, a: Any) -> Any:
    """Differentiate a module whose method is a custom rule."""
    from torch import nn

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(a(V))

        @gt.custom_rule
        def scale(self, x: Any) -> Any:
            return self.w * x

        def forward(self, x: Any) -> Any:
            return self.scale(x)

    Scale.scale.defvjp(lambda self, x: (self.w * x, (self.w, x)), lambda s, c: (None, c * s[0]))
    return gt.grad(lambda module: module(a(V)).sum())(Scale())


def adjoint(gt: Any, a: Any, of: Callable[[Any], Any]) -> Any:
    """Differentiate a linear kernel with the given adjoint."""
    rows = gt.host_function(lambda x: ROWS @ x, gt.ArraySpec((3,), "float64"), adjoint=of)
    return gt.grad(lambda x: (rows(x) ** 2).sum())(a(V))


def linearly_solved(gt: Any, a: Any, solve: Any) -> Any:
    """Differentiate the solution of an equation with the given linear solver."""
    root = gt.implicit_solution(lambda z, t: z - t, lambda t: 1 * t, solve)
    return gt.grad(lambda t: gt.xp.sum(root(t)))(a(V))


def cross_checked(**options: Any) -> None:
    """Raise an error with the first entry of `left_out` of a `cross_check` report."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    raise GradtoolsError(cross_check(**options).left_out[0])


def other_shapes() -> Any:
    """Compare a layer of PyTorch with a port that has fewer outputs."""
    nn = pytest.importorskip("torch").nn
    jax = pytest.importorskip("jax")
    port = linen()
    variables = port.init(jax.random.key(0), jax.numpy.ones((1, 3)))
    layer = nn.utils.skip_init(nn.Linear, 3, 5)  # skip_init draws no random numbers
    return cross_check(torch=layer, jax=(port, variables), args=(np.ones((4, 3)),))


def to_torch(model: Any) -> Any:
    return importlib.import_module("gradtools.bridge").to_torch(model)


def linen() -> Any:
    return pytest.importorskip("flax.linen").Dense(2)


def params_alone(gt: Any, a: Any) -> Any:
    """Apply a linen module with parameters that are not in the collection "params"."""
    apply, params, state = gt.make_functional(linen(), variables={"kernel": a(V)})
    return apply(params, state, a(ROWS))


def pulled(gt: Any, a: Any, fwd: Any, bwd: Any) -> Any:
    rule = gt.custom_rule(lambda x: x)
    rule.defvjp(fwd, bwd)
    return gt.vjp(rule, a(V))[1](a(V))


def tangent_alone(gt: Any, a: Any) -> Any:
    rule = gt.custom_rule(lambda x: x * x)
    rule.defjvp(lambda primals, tangents: 2 * primals[0] * tangents[0])
    return gt.jvp(rule, (a(V),), (a(V),))


def added(gt: Any, *grads: Any) -> None:
    total = gt.GradientAccumulator()
    for one in grads:
        total.add(one)


def averaged(gt: Any, a: Any) -> Any:
    total = gt.GradientAccumulator()
    total.add(a(V))
    return total.mean(axis_name="rows")


def target(gt: Any, a: Any) -> Any:
    """Return an array into which gradients can be accumulated."""
    x = a(V)
    return x.requires_grad_() if hasattr(x, "requires_grad_") else x


class Transformation(NamedTuple):
    """A pair of functions, as in optax."""

    init: Any
    update: Any


def layer(gt: Any) -> Any:
    """Return a LayerNorm module of the framework."""
    if gt.__name__.endswith("torch"):
        return pytest.importorskip("torch").nn.LayerNorm(2)
    return pytest.importorskip("equinox").nn.LayerNorm(2)


def other_layer(gt: Any) -> Any:
    """Return a LayerNorm module of the other framework."""
    other = "jax" if gt.__name__.endswith("torch") else "torch"
    pytest.importorskip(other)
    return layer(importlib.import_module(f"gradtools.{other}"))


def other_gather(gt: Any) -> dict[str, Any]:
    """Return the keyword argument of `all_gather` that only the other framework supports."""
    return {"axis_name": "i"} if gt.__name__.endswith("torch") else {"group": object()}


BAD: dict[str, Call] = {
    # --- dtypes of differentiated arguments
    "grad with respect to an integer array": lambda gt, a: gt.grad(total(gt))(a(N)),
    "grad with respect to an array of objects": lambda gt, a: gt.grad(lambda x: x)(
        np.array([None, 1.0])
    ),
    "value_and_grad with respect to a nested integer leaf": lambda gt, a: gt.value_and_grad(
        lambda y, p: y, argnums=(0, 1)
    )(a(S), {"k": [a(S), a(N)]}),
    "jvp, an integer primal and tangent": lambda gt, a: gt.jvp(lambda x: x, (a(N),), (a(N),)),
    "jacobian with respect to a complex array": lambda gt, a: gt.jacobian(lambda z: z)({"z": a(Z)}),
    # --- return values of f
    "grad of a function that returns a vector": lambda gt, a: gt.grad(lambda x: x * x)(a(V)),
    "jacobian of a function that returns nothing": lambda gt, a: gt.jacobian(lambda x: None)(a(V)),
    "jacobian of a function that returns an index": lambda gt, a: gt.jacobian(
        lambda x: gt.xp.argmax(x)
    )(a(V)),
    "hessian of a function that returns nothing": lambda gt, a: gt.hessian(lambda x: None)(a(V)),
    "hvp of a function that returns an index": lambda gt, a: gt.hvp(
        lambda x: gt.xp.argmax(x), (a(V),), (a(V),)
    ),
    "grad of a Jacobian": lambda gt, a: gt.grad(gt.jacobian(lambda x: x * x))(a(V)),
    "hessian of a gradient": lambda gt, a: gt.hessian(gt.grad(total(gt)))(a(V)),
    "grad of a function that returns a complex number": lambda gt, a: gt.grad(
        lambda z: gt.xp.sum(z)
    )(a(Z)),
    "grad of a function that returns an index": lambda gt, a: gt.grad(lambda x: gt.xp.argmax(x))(
        a(V)
    ),
    "grad of a function that returns nothing": lambda gt, a: gt.grad(lambda x: None)(a(V)),
    "grad of a function that returns a Python number": lambda gt, a: gt.grad(lambda x: 2.0)(a(V)),
    "grad of a function that returns a pair": lambda gt, a: gt.grad(lambda x: (gt.xp.sum(x), x))(
        a(V)
    ),
    "grad, has_aux with aux first": lambda gt, a: gt.grad(
        lambda x: (x, gt.xp.sum(x)), has_aux=True
    )(a(V)),
    "grad, has_aux without aux": lambda gt, a: gt.grad(total(gt), has_aux=True)(a(V)),
    "vjp, has_aux with three results": lambda gt, a: gt.vjp(
        lambda x: (x, x, x), a(V), has_aux=True
    ),
    "vjp of a function that returns a loss and a string": lambda gt, a: gt.vjp(
        lambda x: (x.sum(), "log"), a(V)
    ),
    "grad of a function that writes into its argument": lambda gt, a: gt.grad(
        lambda w: (w.mul_(2) ** 2).sum()
    )(a(V)),
    "grad of a function that writes into a view of its argument": lambda gt, a: gt.grad(
        lambda w: w.unbind()[0].mul_(2)
    )(a(V)),
    "linearize of a function that returns an object": lambda gt, a: gt.linearize(
        lambda x: [object()], a(V)
    ),
    "implicit_solution, a number in place of F": lambda gt, a: gt.implicit_solution(
        3.0, lambda a: a
    ),
    "implicit_solution with an unknown solver": lambda gt, a: gt.implicit_solution(
        lambda z, a: z - a, lambda a: a, "lu"
    ),
    "a solution of another shape": lambda gt, a: gt.implicit_solution(
        lambda z, a: z[0], lambda a: a
    )(a(V)),
    "a solution, solve first": lambda gt, a: gt.implicit_solution(
        lambda a: a**0.5, lambda z, a: z * z - a
    ),
    "a solution that is not a zero of F": lambda gt, a: gt.implicit_solution(
        lambda z, a: z * z - a, lambda a: a
    )(a(V) + 3),
    "an equation with swapped arguments": lambda gt, a: gt.implicit_solution(
        lambda t, z: z**3 + z - t, lambda t: 0.6 + 0 * t
    )(a(S)),
    "an equation that ignores theta": lambda gt, a: gt.grad(
        gt.implicit_solution(lambda z, t: z**2 - a(S), lambda t: a(S) ** 0.5)
    )(a(S)),
    "a solver that also returns its steps": lambda gt, a: gt.implicit_solution(
        lambda z, t: z - t, lambda t: (t, 7)
    )(a(S)),
    "a solver without aux": lambda gt, a: gt.implicit_solution(
        lambda z, t: z - t, lambda t: 1 * t, has_aux=True
    )(a(V)),
    "an objective in place of an equation": lambda gt, a: gt.implicit_solution(
        lambda z, t: gt.xp.sum((z - t) ** 2), lambda t: 1 * t
    )(a(V)),
    "implicit_solution, solver= for linear_solve=": lambda gt, a: gt.implicit_solution(
        lambda z, t: z - t, lambda t: 1 * t, solver="cg"
    ),
    "a linear solver that returns a pair": lambda gt, a: linearly_solved(
        gt, a, lambda matvec, b: (b, 0)
    ),
    "a linear solver that returns a column": lambda gt, a: linearly_solved(
        gt, a, lambda matvec, b: b[:, None]
    ),
    "a linear solver without a return": lambda gt, a: linearly_solved(
        gt, a, lambda matvec, b: None
    ),
    "a linear solver that takes a matrix": lambda gt, a: noted(
        lambda: linearly_solved(gt, a, lambda A, b: A @ b)
    ),
    "an equation with a derivative of NaN": lambda gt, a: gt.grad(
        gt.implicit_solution(lambda z, t: gt.xp.sqrt(0 * z) + z - t, lambda t: 1 * t, "dense")
    )(a(S)),
    "conjugate gradients, a matrix that is not symmetric": lambda gt, a: gt.grad(
        lambda t: gt.implicit_solution(
            lambda z, t: a(np.array([[1.0, 3.0], [-3.0, 1.0]])) @ (z - t), lambda t: 1 * t, "cg"
        )(t)[0]
    )(a(V)),
    "retain_gradient, an integer as name": lambda gt, a: gt.retain_gradient(a(V), 3),
    "retained_gradients of a function that returns a vector": lambda gt, a: gt.retained_gradients(
        lambda x: x
    )(a(V)),
    "retain_gradient, swapped arguments": lambda gt, a: gt.retain_gradient("h", a(V)),
    "retain_gradient of a number": lambda gt, a: gt.retained_gradients(
        lambda x: gt.retain_gradient(3, "n") * x
    )(a(S)),
    "grad with respect to an object": lambda gt, a: gt.grad(lambda p: 1.0)(Class()),
    "two cotangents for one output": lambda gt, a: gt.vjp(lambda x: (x, x), a(V))[1](a(V), a(V)),
    # --- disconnected
    "grad through stop_gradient": lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.stop_gradient(x)))(
        a(V)
    ),
    "grad with respect to a list of parameters": lambda gt, a: gt.grad(
        lambda p: 1.0 * layer(gt)(a(F32)).sum()
    )([*layer(gt).parameters()]),
    "vjp, primals in a tuple": lambda gt, a: gt.vjp(mean, (a(V), a(ROWS))),
    "hvp of a pair": lambda gt, a: gt.hvp(lambda x: (x.sum(), x), (a(V),), (a(V),)),
    "mixed_partial, an edit in G": lambda gt, a: gt.mixed_partial(
        lambda y, g: (y * g).sum(), clipped(gt), a(V), a(V), a(V)
    ),
    "a sparsity pattern that is traced": lambda gt, a: gt.vmap(
        lambda s: gt.jacobian(lambda x: x, sparsity=s)(a(V))
    )(a(np.ones((1, 2, 2)))),
    "a microbatch's key that is a seed": lambda gt, a: gt.microbatched_value_and_grad(
        lambda w, x, key: (x @ w).sum(), 2, key_argnums=2
    )(a(V), a(ROWS), 0),
    "microbatched, weights of y only": lambda gt, a: gt.microbatched_value_and_grad(
        mean, 2, weights=lambda x: 1.0
    )(a(V), a(ROWS)),
    "retained_gradients of a branch on a value": lambda gt, a: noted(
        lambda: gt.retained_gradients(lambda x: x.sum() if x[0] > 0 else x)(a(V))
    ),
    "checkpoint of a branch on a value": lambda gt, a: noted(
        lambda: gt.grad(gt.checkpoint(lambda x: x.sum() if x[0] > 0 else x))(a(V))
    ),
    "forward over reverse, a captured array": lambda gt, a: gt.grad(
        lambda y: gt.grad(lambda x: (x * y).sum() ** 2, mode="forward_over_reverse")(a(V)).sum()
    )(a(V)),
    # --- argnums
    "argnums beyond the arguments": lambda gt, a: gt.grad(total(gt), argnums=1)(a(V)),
    "argnums repeats an argument": lambda gt, a: gt.grad(lambda x, y: x, argnums=(1, -1))(
        a(S), a(S)
    ),
    "argnums is empty": lambda gt, a: gt.grad(total(gt), argnums=())(a(V)),
    "argnums is a name": lambda gt, a: gt.grad(total(gt), argnums="x")(a(V)),
    "argnums is None": lambda gt, a: gt.hessian(total(gt), argnums=None)(a(V)),
    "grad of a function without positional arguments": lambda gt, a: gt.grad(lambda *, x: x)(
        x=a(S)
    ),
    "minimax, an argument of both players": lambda gt, a: gt.minimax_value_and_grad(
        lambda x, y: x, (0, 1), 1
    )(a(S), a(S)),
    # --- options
    "an unknown policy": lambda gt, a: gt.grad(total(gt), disconnected_inputs="ignore"),
    "an unknown mode of jacobian": lambda gt, a: gt.jacobian(total(gt), mode="backward"),
    "chunk_size zero": lambda gt, a: gt.jacobian(total(gt), chunk_size=0),
    # --- arguments that must be functions
    "grad, a number in place of f": lambda gt, a: gt.grad(3.0),
    "grad, an array in place of f": lambda gt, a: gt.grad(a(S)),
    "why_zero, an array in place of f": lambda gt, a: gt.why_zero(a(S), a(S)),
    "checkpoint, an unknown value of verify": lambda gt, a: gt.checkpoint(
        total(gt), verify="always"
    ),
    "frozen, an argument of G as an option": lambda gt, a: gt.frozen(total(gt), a(V)),
    "chunked, chunk_size first": lambda gt, a: gt.chunked(2, total(gt)),
    "microbatched, chunk_size first": lambda gt, a: gt.microbatched_value_and_grad(2, total(gt)),
    "chunked, a random key that is split": lambda gt, a: gt.chunked(lambda x, key: x, 2)(
        a(ROWS), a(np.array([0, 1], np.uint32))
    ),
    "checkpoint, an argument of f as an option": lambda gt, a: gt.checkpoint(total(gt), a(V)),
    "an array in place of argnums": lambda gt, a: gt.value_and_grad(total(gt), a(V)),
    "compile, a number in place of f": lambda gt, a: gt.compile(3.0)(a(V)),
    "chunked, an array as chunk_size": lambda gt, a: gt.chunked(total(gt), a(V)),
    "chunked, a number in place of f": lambda gt, a: gt.chunked(3.0, 2),
    "reverse_gradient of a function": lambda gt, a: gt.reverse_gradient(total(gt)),
    "transform_gradient, fn first": lambda gt, a: gt.transform_gradient(lambda c: c, a(V)),
    "transform_gradient, a number in place of a function": lambda gt, a: gt.transform_gradient(
        a(V), 3.0
    ),
    # --- tangents and cotangents
    "tangents without a tuple": lambda gt, a: gt.jvp(total(gt), (a(V),), a(V)),
    "primals without a tuple": lambda gt, a: gt.hvp(total(gt), a(V), (a(V),)),
    "a missing tangent": lambda gt, a: gt.jvp(lambda x, y: x, (a(V), a(V)), (a(V),)),
    "vjp without primals": lambda gt, a: gt.vjp(lambda: 1.0),
    "a tangent of another structure": lambda gt, a: gt.jvp(
        lambda p: p["w"], ({"w": a(V)},), ({"b": a(V)},)
    ),
    "a tangent of another shape": lambda gt, a: gt.jvp(
        lambda p: p["w"], ({"w": a(V)},), ({"w": a(S)},)
    ),
    "an integer tangent of a floating-point primal": lambda gt, a: gt.jvp(
        total(gt), (a(V),), (a(N),)
    ),
    "a complex tangent of a real primal": lambda gt, a: gt.jvp(total(gt), (a(V),), (a(Z),)),
    "a string as the tangent": lambda gt, a: gt.jvp(total(gt), (a(V),), ("x",)),
    "a cotangent of another structure": lambda gt, a: gt.vjp(lambda x: {"y": x}, a(V))[1](
        {"z": a(V)}
    ),
    "a cotangent of another shape": lambda gt, a: gt.vjp(lambda x: {"y": x}, a(V))[1]({"y": a(S)}),
    "None as the cotangent": lambda gt, a: gt.vjp(lambda x: x, a(V))[1](None),
    "a direction of another shape": lambda gt, a: gt.mixed_partial(
        lambda y, g: y * g, lambda z: gt.xp.sum(z), a(S), a(V), a(S)
    ),
    # --- batches
    "in_axes is too short": lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None,))(
        a(S), a(V)
    ),
    "an axis that is a string": lambda gt, a: gt.per_example_grad(
        lambda w, x: w * x, in_axes=(None, "x")
    )(a(S), a(V)),
    "an axis that the array lacks": lambda gt, a: gt.per_example_grad(
        lambda w, x: w * x, in_axes=(None, 1)
    )(a(S), a(V)),
    "a Python number as the batch": lambda gt, a: gt.per_example_grad(
        lambda w, p: w * p["x"], in_axes=(None, {"x": 0})
    )(a(S), {"x": 2.0}),
    "in_axes with another structure": lambda gt, a: gt.per_example_grad(
        lambda w, p: w * p["x"], in_axes=(None, {"y": 0})
    )(a(S), {"x": a(V)}),
    "batches of different sizes": lambda gt, a: gt.per_example_grad(lambda w, x, y: w * x * y)(
        a(S), a(V), a(np.ones(3))
    ),
    "no batch": lambda gt, a: gt.per_example_grad(lambda w: w)(a(S)),
    "an empty batch": lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(S), a(np.ones(0))),
    "chunked, in_axes None": lambda gt, a: gt.chunked(lambda x: x, 1, in_axes=None)(a(V)),
    "chunked, axis 1 of a list": lambda gt, a: gt.chunked(lambda x: x, 1, in_axes=1)([a(V), a(V)]),
    "chunked over a list of another length": lambda gt, a: gt.chunked(lambda x, y: y, 1)(
        [1, 2], a(ROWS)
    ),
    "chunked, an argument that is both key and carry": lambda gt, a: gt.chunked(
        lambda x, k: x, 1, key_argnums=1, carry_argnums=1
    )(a(V), a(S)),
    "chunked, a key that is a float": lambda gt, a: gt.chunked(lambda x, k: x, 1, key_argnums=1)(
        a(V), a(S)
    ),
    "chunked, a carry that is not returned": lambda gt, a: gt.chunked(
        lambda x, c: x, 1, carry_argnums=1
    )(a(V), a(S)),
    "chunked, a carry of another structure": lambda gt, a: gt.chunked(
        lambda x, c: (x, (c, c)), 1, carry_argnums=1
    )(a(V), a(S)),
    "chunked, a carry of another dtype": lambda gt, a: gt.chunked(
        lambda x, c: (x, {"mean": c["mean"] + x.mean()}), 1, carry_argnums=1
    )(a(V), {"mean": a(np.array(0, np.float32))}),
    "chunked, a carry of another shape": lambda gt, a: gt.chunked(
        lambda x, c: (x, c + x), 1, carry_argnums=1
    )(a(V), a(S)),
    "chunked, an output without a batch axis": lambda gt, a: gt.chunked(lambda x: gt.xp.sum(x), 1)(
        a(V)
    ),
    "chunked, out_axes beyond the output": lambda gt, a: gt.chunked(
        lambda x: x.sum(1), 2, out_axes=1
    )(a(ROWS)),
    "chunked of a function that returns nothing": lambda gt, a: gt.chunked(lambda x: None, 1)(a(V)),
    "chunked, out_axes None": lambda gt, a: gt.chunked(lambda x: x, 1, out_axes=None)(a(V)),
    "chunked, a Python number returned": lambda gt, a: gt.chunked(lambda x: 1.0, 1)(a(V)),
    "chunked, an array and an object returned": lambda gt, a: gt.chunked(
        lambda x: {"y": x, "n": object()}, 1
    )(a(V)),
    "chunked, another structure of the last chunk": lambda gt, a: gt.chunked(
        lambda x: (x,) * len(x), 2
    )(a(ROWS)),
    "chunked, another shape of the last chunk": lambda gt, a: gt.chunked(lambda x: x @ x.T, 2)(
        a(ROWS)
    ),
    "chunked, interleaved, another number of rows": lambda gt, a: gt.chunked(
        lambda x: x[:1], 2, interleaved=True
    )(a(ROWS)),
    "chunked, a string returned": lambda gt, a: gt.chunked(lambda x: "done", 1)(a(V)),
    "microbatched_value_and_grad, an unknown reduction": lambda gt, a: (
        gt.microbatched_value_and_grad(total(gt), 1, reduction="max")
    ),
    "microbatched_value_and_grad, weights with reduction sum": lambda gt, a: (
        gt.microbatched_value_and_grad(total(gt), 1, reduction="sum", weights=a(V))
    ),
    "microbatched_value_and_grad, weights of another length": lambda gt, a: (
        gt.microbatched_value_and_grad(lambda w, x: gt.xp.mean(w * x), 1, weights=a(np.ones(3)))(
            a(S), a(V)
        )
    ),
    "microbatched_value_and_grad of a function of only the batch": lambda gt, a: (
        gt.microbatched_value_and_grad(gt.xp.sum, 1)(a(V))
    ),
    "microbatched_value_and_grad, a function of weights that returns a vector": lambda gt, a: (
        gt.microbatched_value_and_grad(mean, 1, weights=lambda w, x: x)(a(V), a(ROWS))
    ),
    "microbatched_value_and_grad, the batch differentiated": lambda gt, a: (
        gt.microbatched_value_and_grad(mean, 1, argnums=(0, 1))(a(V), a(ROWS))
    ),
    # --- edits
    "a complex scale": lambda gt, a: gt.scale_gradient(a(V), 1j),
    "a scale of another shape": lambda gt, a: gt.reverse_gradient({"x": a(V)}, a(np.ones(3))),
    "a scale that is a string": lambda gt, a: gt.scale_gradient(a(V), "half"),
    "scale_gradient, the scale first": lambda gt, a: gt.scale_gradient(0.1, a(V)),
    "reverse_gradient, the scale first": lambda gt, a: gt.reverse_gradient(0.5, a(V)),
    "clip_gradient, the bound first": lambda gt, a: gt.clip_gradient(1.0, a(V)),
    "clip_gradient without a bound": lambda gt, a: gt.clip_gradient(a(V)),
    "clip_gradient with a negative norm": lambda gt, a: gt.clip_gradient(a(V), max_norm=-1.0),
    "clip_gradient with a negative NumPy number": lambda gt, a: gt.clip_gradient(
        a(V), max_norm=np.float32(-1)
    ),
    "clip_gradient with a negative NumPy array": lambda gt, a: gt.clip_gradient(
        a(V), max_value=np.array(-1.0)
    ),
    "clip_gradient with a negative array as max_norm": lambda gt, a: gt.clip_gradient(
        a(V), max_norm=a(np.array(-1.0))
    ),
    "clip_gradient with a negative array as max_value": lambda gt, a: gt.clip_gradient(
        a(V), max_value=a(np.array(-1.0))
    ),
    "clip_gradient with a string as max_norm": lambda gt, a: gt.clip_gradient(a(V), max_norm="one"),
    "replace_gradient, a gradient of another structure": lambda gt, a: gt.replace_gradient(
        {"x": a(V)}, {"y": a(V)}
    ),
    "replace_gradient, a gradient of another shape": lambda gt, a: gt.replace_gradient(
        {"x": a(V)}, {"x": a(S)}
    ),
    "transform_gradient, a result of another shape": lambda gt, a: gt.grad(
        lambda x: gt.xp.sum(gt.transform_gradient(x, gt.xp.sum))
    )(a(V)),
    "straight_through, an output of another shape": lambda gt, a: gt.straight_through(gt.xp.sum)(
        a(V)
    ),
    "straight_through of a function that returns nothing": lambda gt, a: gt.straight_through(
        lambda x: None
    )(a(V)),
    "straight_through, an integer output": lambda gt, a: gt.straight_through(gt.xp.argmax)(a(V)),
    "frozen, a number in place of G": lambda gt, a: gt.frozen(3.0),
    "straight_through of a function of two arguments": lambda gt, a: gt.straight_through(
        lambda x, y: x
    )(a(V), a(V)),
    "transform_gradient, a string as the result": lambda gt, a: gt.grad(
        lambda x: gt.xp.sum(gt.transform_gradient(x, lambda c: "done"))
    )(a(V)),
    "jvp through clip_gradient": lambda gt, a: pushed(gt, clipped(gt))(a(V)),
    "linearize through transform_gradient": lambda gt, a: gt.linearize(doubled(gt), a(V))[1](a(V)),
    "linearize through replace_gradient": lambda gt, a: gt.linearize(known(gt), a(V))[1](a(V)),
    # --- rules and host functions
    "a rule without fwd": lambda gt, a: gt.custom_rule(lambda x: x).defvjp(None, lambda r, c: (c,)),
    "a forward rule that is a number": lambda gt, a: gt.custom_rule(lambda x: x).defjvp(3.0),
    "an unknown name in static_argnames": lambda gt, a: gt.custom_rule(
        lambda x: x, static_argnames="n"
    ),
    "a custom_rule without a rule": lambda gt, a: gt.grad(
        lambda x: gt.xp.sum(gt.custom_rule(lambda x: x * x)(x))
    )(a(V)),
    "bwd does not return a tuple": lambda gt, a: pulled(gt, a, lambda x: (x, x), lambda r, c: c),
    "bwd returns another shape": lambda gt, a: pulled(
        gt, a, lambda x: (x, x), lambda r, c: (gt.xp.sum(c),)
    ),
    "fwd does not return a pair": lambda gt, a: pulled(gt, a, lambda x: x, lambda r, c: (c,)),
    "fwd returns another shape": lambda gt, a: pulled(
        gt, a, lambda x: (gt.xp.sum(x), x), lambda r, c: (c,)
    ),
    "a rule with too many arguments": lambda gt, a: gt.custom_rule(lambda x: x)(a(V), a(V)),
    "a frozen function that closes over an argument": lambda gt, a: gt.grad(
        lambda w: (gt.grad(gt.frozen(lambda z: (z * w).sum()))(a(V)) ** 2).sum()
    )(a(V)),
    "a rule that closes over an argument": lambda gt, a: gt.grad(
        lambda x: gt.xp.sum(ruled(gt, lambda y: y * x)(a(V)))
    )(a(V)),
    "a forward rule with its arguments swapped": swapped_rule,
    "a rule that is a method of a module": rule_of_a_method,
    "a forward rule that computes with its tuples": lambda gt, a: noted(
        lambda: rule_of_tuples(gt, a)
    ),
    "a fwd with symbolic zeros that computes with its arguments": lambda gt, a: noted(
        lambda: rule_of_primals(gt, a)
    ),
    "a fwd with too few arguments": rule_of_one_argument,
    "custom_rule of a class with a backward method": lambda gt, a: gt.custom_rule(Function),
    "formula without arguments": lambda gt, a: gt.formula(mean),
    "minimax with two losses": lambda gt, a: gt.minimax_value_and_grad(
        lambda x, y: (x.sum(), y.sum()), 0, 1
    )(a(V), a(V)),
    "a bwd of the cotangent and the residuals": lambda gt, a: noted(
        lambda: rule_of_swapped_arguments(gt, a)
    ),
    "an adjoint that raises a shape error": lambda gt, a: noted(
        lambda: adjoint(gt, a, lambda y: ROWS @ y)
    ),
    "an adjoint that returns a wrong shape": lambda gt, a: adjoint(gt, a, lambda y: y),
    "a traced kernel that reduces, without out": lambda gt, a: gt.compile(
        gt.grad(gt.host_function(np.sum, adjoint=lambda y: np.full(2, y)))
    )(a(V)),
    "a host function without a rule": lambda gt, a: gt.grad(
        lambda x: gt.xp.sum(gt.host_function(np.sin)(x))
    )(a(V)),
    "a kernel that returns another shape": lambda gt, a: gt.host_function(np.sum)(a(V)),
    "a kernel that returns another dtype": lambda gt, a: gt.host_function(
        lambda x: x.astype(np.float32)
    )(a(V)),
    "a kernel that returns a string": lambda gt, a: gt.host_function(lambda x: "done")(a(V)),
    "a kernel that raises an error": lambda gt, a: gt.host_function(
        lambda x: np.linalg.inv(np.zeros((2, 2)))
    )(a(V)),
    "a kernel that writes to its argument": lambda gt, a: gt.host_function(
        lambda x: np.multiply(x, 2, out=x)
    )(a(V)),
    "out that is not an ArraySpec": lambda gt, a: gt.host_function(np.sin, out=3.0)(a(V)),
    "an ArraySpec with an unknown dtype": lambda gt, a: gt.ArraySpec((2,), "float7"),
    "an ArraySpec with a negative length": lambda gt, a: gt.ArraySpec((-1,), "float32"),
    # --- arrays and keys
    "asarray of a string": lambda gt, a: gt.asarray("x"),
    "asarray of ragged lists": lambda gt, a: gt.asarray([[1.0], [1.0, 2.0]]),
    "asarray of objects": lambda gt, a: gt.asarray(np.array([None])),
    "to_numpy of a string": lambda gt, a: gt.to_numpy("x"),
    "to_numpy under a transform": lambda gt, a: gt.vmap(lambda x: gt.to_numpy(x))(a(V)),
    "a key from a float": lambda gt, a: gt.random_key(1.5),
    "a key beyond 64 bits": lambda gt, a: gt.random_key(2**64),
    "split_key of an array that is not a key": lambda gt, a: gt.split_key(a(V)),
    "split_key into 0 keys": lambda gt, a: gt.split_key(gt.random_key(0), 0),
    # --- accumulation
    "accumulating in an unknown dtype": lambda gt, a: gt.GradientAccumulator(dtype="int32"),
    "a sum without gradients": lambda gt, a: gt.GradientAccumulator().sum(),
    "accumulating integers": lambda gt, a: gt.GradientAccumulator().add(a(N)),
    "accumulating an object": lambda gt, a: gt.GradientAccumulator().add(object()),
    "accumulating a string": lambda gt, a: gt.GradientAccumulator().add({"w": "x"}),
    "accumulating parameters": lambda gt, a: gt.GradientAccumulator().add(
        dict(layer(gt).named_parameters())
    ),
    "accumulating another structure": lambda gt, a: added(gt, {"w": a(V)}, {"b": a(V)}),
    "accumulating another shape": lambda gt, a: added(gt, {"w": a(V)}, {"w": a(S)}),
    "a weight that is a string": lambda gt, a: gt.GradientAccumulator().add(a(V), weight="two"),
    "accumulate_gradients with a gradient of another name": lambda gt, a: gt.accumulate_gradients(
        {"w": target(gt, a)}, {"b": a(V)}
    ),
    "accumulate_gradients with a gradient of another shape": lambda gt, a: gt.accumulate_gradients(
        {"w": target(gt, a)}, {"w": a(S)}
    ),
    "accumulate_gradients with a gradient of another dtype": lambda gt, a: gt.accumulate_gradients(
        {"w": target(gt, a)}, {"w": a(F32)}
    ),
    "assign_gradients of another structure": lambda gt, a: gt.assign_gradients(
        {"w": target(gt, a)}, a(V)
    ),
    "assign_gradients with a list of another length": lambda gt, a: gt.assign_gradients(
        [target(gt, a), target(gt, a)], [a(V)]
    ),
    "assign_gradients, the parameters as gradients": lambda gt, a: gt.assign_gradients(
        *2 * [dict(layer(gt).named_parameters())]
    ),
    "accumulate_gradients, the params of make_functional": lambda gt, a: gt.accumulate_gradients(
        net := layer(gt), gt.make_functional(net)[1]
    ),
    "assign_gradients into integers": lambda gt, a: gt.assign_gradients([a(N)], [a(V)]),
    # --- models
    "make_functional, a string as rng_names": lambda gt, a: gt.make_functional(
        layer(gt), rng_names="dropout"
    ),
    "make_functional, a string as mode": lambda gt, a: gt.make_functional(layer(gt), train="eval"),
    "make_functional of a number": lambda gt, a: gt.make_functional(3),
    "make_functional of a class": lambda gt, a: gt.make_functional(Class),
    "make_functional of a function": lambda gt, a: gt.make_functional(lambda x: x),
    "make_functional of a linen module's params": lambda gt, a: noted(lambda: params_alone(gt, a)),
    "all_gather without axis_name or group": lambda gt, a: gt.all_gather(a(V)),
    "all_gather with the other framework's argument": lambda gt, a: gt.all_gather(
        a(V), **other_gather(gt)
    ),
    # --- checks
    "check_derivatives of a function that raises": lambda gt, a: noted(
        lambda: check_derivatives(raising, (V,), gt)
    ),
    "check_rule of a bwd that raises": lambda gt, a: noted(
        lambda: check_rule(badly_ruled(gt), (V,), gt)
    ),
    "cross_check of a linen module without its variables": lambda gt, a: cross_checked(
        torch=lambda x: x, jax=linen(), args=(V,)
    ),
    "cross_check of integers, one program detaches the output": lambda gt, a: cross_checked(
        torch=lambda n: n.float().detach(), jax=lambda n: n.astype("float32"), args=(N,)
    ),
    "check_rule of a rule of the other framework": lambda gt, a: check_rule(
        ruled(gt, lambda x: x), (V,), {"torch": "jax", "jax": "torch"}[gt.__name__[10:]]
    ),
    "checked, a name in place of the seed": lambda gt, a: checked("torch"),
    "checked, a function in place of the seed": lambda gt, a: checked(total(gt)),
    # --- why_zero, graphs and formulas
    "why_zero of a function that raises an error": lambda gt, a: gt.why_zero(raising, a(V)),
    "why_zero of a function that returns None": lambda gt, a: gt.why_zero(lambda x: None, a(V)),
    "gradient_graph, f second": lambda gt, a: gt.gradient_graph(total(gt), mean, a(V)),
    "gradient_graph of order 3": lambda gt, a: gt.gradient_graph(total(gt), a(V), order=3),
    "formula of order 3": lambda gt, a: gt.formula(total(gt), a(V), order=3),
    "formula of a function that returns a number": lambda gt, a: gt.formula(lambda x: 3.0, a(V)),
    "gradient_graph of a function that returns a number": lambda gt, a: gt.gradient_graph(
        lambda x: {"loss": 3.0}, a(V)
    ),
    "formula of a function that returns a NumPy array": lambda gt, a: gt.formula(
        lambda x: np.ones(2), a(V)
    ),
    "saving a graph with a misspelt option": lambda gt, a: gt.gradient_graph(total(gt), a(V)).save(
        "graph.html", them="dark"
    ),
    # --- options of a wrong type
    "cross_check with a word as tolerance": lambda gt, a: cross_check(
        torch=total(gt), jax=total(gt), tolerance="loose"
    ),
    "cross_check with a word as order": lambda gt, a: cross_check(
        torch=total(gt), jax=total(gt), order="2"
    ),
    "cross_check with a negative seed": lambda gt, a: cross_check(
        torch=total(gt), jax=total(gt), seed=-1
    ),
    "first_divergence with a word as seed": lambda gt, a: first_divergence(
        total(gt), total(gt), (), seed="zero"
    ),
    "check_derivatives with an array as order": lambda gt, a: check_derivatives(
        total(gt), (V,), gt, order=V
    ),
    "check_derivatives with a number as modes": lambda gt, a: check_derivatives(
        total(gt), (V,), gt, modes=1
    ),
    "check_derivatives with a word as seed": lambda gt, a: check_derivatives(
        total(gt), (V,), gt, seed="zero"
    ),
    "checked with a negative seed": lambda gt, a: checked(-1),
    "a table with a word as limit": lambda gt, a: Report("a report").table(limit="all"),
    "tolerance of an array": lambda gt, a: tolerance([1.0]),
    "tolerance of a word as order": lambda gt, a: tolerance("float32", "2"),
    "a graph with a word as depth": lambda gt, a: gt.gradient_graph(total(gt), a(V)).to_text(
        depth="2"
    ),
    "a graph with a negative depth": lambda gt, a: gt.gradient_graph(total(gt), a(V)).to_html(
        depth=-1
    ),
    "formula.lines of a section that order 1 lacks": lambda gt, a: gt.formula(
        total(gt), a(V)
    ).lines(2),
    "formula.agrees_with a word as tolerance": lambda gt, a: gt.formula(
        total(gt), a(V)
    ).agrees_with(lambda x, c: 2 * x * c, tolerance="tight"),
    "microbatched_value_and_grad with complex weights": lambda gt, a: (
        gt.microbatched_value_and_grad(lambda w, x: w @ x[0], 1, weights=[1j, 1.0])(a(V), a([V, V]))
    ),
    "chunked, key_argnums beyond the arguments": lambda gt, a: gt.chunked(
        total(gt), 1, key_argnums=5
    )(a(V)),
    # --- habits from other libraries
    "grad of a Python integer": lambda gt, a: gt.grad(lambda x: x**2)(3),
    "grad of an iterator of parameters": lambda gt, a: gt.grad(lambda p: 0.0)(iter([a(V)])),
    "grad of a set": lambda gt, a: gt.grad(lambda p: 0.0)({1.0}),
    "grad, a module in place of a loss": lambda gt, a: gt.grad(layer(gt))(a(F32)),
    "grad with respect to a module class": lambda gt, a: gt.grad(lambda m: 0.0)(type(layer(gt))),
    "grad with respect to a module of the other framework": lambda gt, a: gt.grad(lambda m: 0.0)(
        other_layer(gt)
    ),
    "vjp with respect to a module of the other framework": lambda gt, a: gt.vjp(
        lambda m: 0.0, other_layer(gt)
    ),
    "grad of a function that returns a dictionary of losses": lambda gt, a: gt.grad(
        lambda x: {"loss": (x * x).sum()}
    )(a(V)),
    "grad of a loss of shape (1,)": lambda gt, a: gt.grad(lambda x: x[:1])(a(V)),
    "value_and_grad, aux before the loss": lambda gt, a: gt.value_and_grad(
        lambda x: ({"n": 1}, (x * x).sum()), has_aux=True
    )(a(V)),
    "argnums is a boolean": lambda gt, a: gt.grad(total(gt), argnums=True)(a(V)),
    "disconnected_inputs as in Theano": lambda gt, a: gt.grad(
        total(gt), disconnected_inputs="ignore"
    )(a(V)),
    "allow_unused as in PyTorch": lambda gt, a: gt.grad(total(gt), allow_unused=True)(a(V)),
    "create_graph as in PyTorch": lambda gt, a: gt.grad(total(gt), create_graph=True)(a(V)),
    "grad with a mode of jacobian": lambda gt, a: gt.grad(total(gt), mode="reverse")(a(V)),
    "jacobian with jacfwd as the mode": lambda gt, a: gt.jacobian(lambda x: x, mode="jacfwd")(a(V)),
    "hvp without tuples": lambda gt, a: gt.hvp(total(gt), a(V), a(V)),
    "a pullback without a cotangent": lambda gt, a: gt.vjp(total(gt), a(V))[1](),
    "a cotangent of another dtype": lambda gt, a: gt.vjp(lambda x: 2 * x, a(V))[1](a(F32)),
    "a number as the tangent of a vector": lambda gt, a: gt.jvp(total(gt), (a(V),), (1.0,)),
    "a pushforward called with a tuple": lambda gt, a: gt.linearize(total(gt), a(V))[1]((a(V),)),
    "sparsity of another shape": lambda gt, a: gt.jacobian(
        lambda x: x, sparsity=np.ones((3, 2), bool)
    )(a(V)),
    "sparsity with two differentiated arguments": lambda gt, a: gt.jacobian(
        lambda x, y: x * y, argnums=(0, 1), sparsity=np.eye(2, dtype=bool)
    )(a(V), a(V)),
    "sparsity is True": lambda gt, a: gt.jacobian(lambda x: x, sparsity=True)(a(V)),
    "a loss for each example, not one": lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(
        a(V), a(ROWS)
    ),
    "a branch on a value of one example": lambda gt, a: noted(
        lambda: gt.per_example_grad(branching)(a(V), a(ROWS))
    ),
    "a branch on a value of one chunk": lambda gt, a: noted(
        lambda: gt.microbatched_value_and_grad(branching, 1)(a(V), a(ROWS))
    ),
    "an example that f changes in place": lambda gt, a: gt.per_example_grad(
        lambda w, row: row.mul_(w).sum()
    )(a(V), a(ROWS.copy())),
    "in_axes with a name that f lacks": lambda gt, a: gt.per_example_grad(
        mean, in_axes={"data": 0}
    )(a(V), a(ROWS)),
    "microbatched_value_and_grad of a function that returns a vector": lambda gt, a: (
        gt.microbatched_value_and_grad(lambda w, x: x @ w, 2)(a(V), a(ROWS))
    ),
    "microbatched_value_and_grad, a string as aux": lambda gt, a: gt.microbatched_value_and_grad(
        lambda w, x: (mean(w, x), "text"), 2, has_aux=True
    )(a(V), a(ROWS)),
    "minimax, the players given by name": lambda gt, a: gt.minimax_value_and_grad(
        lambda x, y: (x - y).sum(), "x", "y"
    )(a(V), a(V)),
    "mixed_partial, an f that returns a vector": lambda gt, a: gt.mixed_partial(
        lambda y, g: y * g, lambda z: z * z, a(V), a(V), a(V)
    ),
    "a solver that returns None": lambda gt, a: gt.implicit_solution(
        lambda z, t: z - t, lambda t: None
    )(a(V)),
    "a fixed-point map in place of an equation": lambda gt, a: gt.implicit_solution(
        lambda z, t: t * gt.xp.cos(z), lambda t: 0 * t + 0.739
    )(a(S)),
    "clip_gradient, a tuple as the bound": lambda gt, a: gt.clip_gradient(a(V), max_value=(-1, 1)),
    "reverse_gradient with a negative NumPy number": lambda gt, a: gt.reverse_gradient(
        a(V), np.float32(-1)
    ),
    "reverse_gradient with a negative scale": lambda gt, a: gt.reverse_gradient(a(V), -1.0),
    "replace_gradient with a number": lambda gt, a: gt.grad(
        lambda x: (gt.replace_gradient(x, 0.0) ** 2).sum()
    )(a(V)),
    "transform_gradient without a return": lambda gt, a: gt.grad(
        lambda x: (gt.transform_gradient(x, lambda c: None) ** 2).sum()
    )(a(V)),
    "straight_through with an array": lambda gt, a: gt.straight_through(gt.xp.round, a(V)),
    "a bwd with a context argument": lambda gt, a: gt.custom_rule(total(gt)).defvjp(
        lambda x: (x, x), lambda ctx, saved, c: (c,)
    ),
    "a forward rule with one argument": lambda gt, a: gt.custom_rule(total(gt)).defjvp(
        lambda primals: primals
    ),
    "a bwd without a return": lambda gt, a: pulled(gt, a, lambda x: (x, x), lambda saved, c: None),
    "a bwd that returns too many cotangents": lambda gt, a: pulled(
        gt, a, lambda x: (x, x), lambda saved, c: (c, None)
    ),
    "a forward rule that returns only the tangent": lambda gt, a: tangent_alone(gt, a),
    "static_argnames by position": lambda gt, a: gt.custom_rule(mean, static_argnames=(1,)),
    "a kernel's out that is a dtype": lambda gt, a: gt.host_function(np.sin, out=np.float64)(a(V)),
    "a kernel that returns a list": lambda gt, a: gt.host_function(lambda x: [1.0, 2.0])(a(V)),
    "a kernel of a list of numbers": lambda gt, a: gt.host_function(np.sin)([1.0, 2.0]),
    "a compiled bwd that calls NumPy": lambda gt, a: noted(
        lambda: gt.compile(gt.grad(lambda x: gt.xp.sum(ruled(gt, gt.xp.sin, in_numpy)(x))))(a(V))
    ),
    "a compiled forward rule that calls NumPy": lambda gt, a: noted(
        lambda: gt.compile(lambda x: gt.jvp(numpy_rule(gt), (x,), (x,)))(a(V))
    ),
    "an adjoint that is a matrix": lambda gt, a: gt.host_function(
        lambda x: ROWS @ x, gt.ArraySpec((3,), "float64"), adjoint=ROWS.T
    ),
    "a linear kernel with a constant": lambda gt, a: pushed(
        gt, gt.host_function(lambda x: 2 * x + 1, adjoint=lambda y: 2 * y)
    )(a(V)),
    "an ArraySpec of an array": lambda gt, a: gt.ArraySpec(a(V), "float32"),
    "an ArraySpec without a dtype": lambda gt, a: gt.ArraySpec((2,)),
    "assign_gradients, swapped arguments": lambda gt, a: gt.assign_gradients(
        {"w": target(gt, a)}, layer(gt)
    ),
    "formula.agrees_with a derivation without the cotangent": lambda gt, a: gt.formula(
        total(gt), a(V)
    ).agrees_with(lambda x: 2 * x),
    "formula.agrees_with two derivations": lambda gt, a: gt.formula(total(gt), a(V)).agrees_with(
        total(gt), total(gt)
    ),
    "cross_check of models with different output shapes": lambda gt, a: other_shapes(),
    "to_torch of a linen module without variables": lambda gt, a: to_torch(linen()),
    "assign_gradients to an optimizer": lambda gt, a: gt.assign_gradients(object(), {"w": a(V)}),
    "GradientAccumulator.add, the weight first": lambda gt, a: gt.GradientAccumulator().add(
        2, {"w": a(V)}
    ),
    "GradientAccumulator.add, an array as the weight": lambda gt, a: gt.GradientAccumulator().add(
        a(V), weight=a(V)
    ),
    "GradientAccumulator.mean over an axis that is not mapped": lambda gt, a: averaged(gt, a),
    "all_gather over an axis that is not mapped": lambda gt, a: gt.all_gather(a(V), "rows"),
    "all_gather of numbers": lambda gt, a: pytest.importorskip("jax").vmap(
        lambda x: gt.all_gather(x, "rows"), axis_name="rows"
    )(a(V)),
    "to_numpy of a dictionary": lambda gt, a: gt.to_numpy({"w": a(V)}),
    "split_key of several keys": lambda gt, a: gt.split_key(gt.split_key(gt.random_key(0))),
    "formula, a value in place of f": lambda gt, a: gt.formula((a(V) ** 2).sum(), a(V)),
    "gradient_graph without arguments": lambda gt, a: gt.gradient_graph(total(gt)),
    "why_zero, a gradient in place of f": lambda gt, a: gt.why_zero(gt.grad(total(gt))(a(V))),
    "why_zero, a misspelt option": lambda gt, a: gt.why_zero(total(gt), a(V), optimiser=3),
    "why_zero, the optimizer as an argument": lambda gt, a: gt.why_zero(
        layer(gt), SimpleNamespace(param_groups=[])
    ),
    "why_zero, a pair of functions as optimizer": lambda gt, a: gt.why_zero(
        total(gt), a(V), optimizer=Transformation(len, len)
    ),
    "why_zero, a list of arrays as optimizer": lambda gt, a: gt.why_zero(
        total(gt), a(V), optimizer=[a(V)]
    ),
}

# calls that raise an error of Python, NumPy or the framework instead of a `GradtoolsError`
NATIVE = {
    "a kernel that raises an error": "LinAlgError: the error of a kernel is not wrapped",
    "a kernel that writes to its argument": "ValueError: raised by NumPy for a read-only argument",
}


# calls that raise an error in only one backend
ONLY = {
    "a traced kernel that reduces, without out": "jax",
    "retained_gradients of a branch on a value": "jax",
    "checkpoint of a branch on a value": "jax",
    "forward over reverse, a captured array": "jax",
    "grad with respect to a list of parameters": "torch",
    "accumulating parameters": "torch",
    "assign_gradients, the parameters as gradients": "torch",
    "accumulate_gradients, the params of make_functional": "torch",
    "grad of a function that writes into its argument": "torch",
    "grad of a function that writes into a view of its argument": "torch",
    "a forward rule with its arguments swapped": "torch",
    "a rule that is a method of a module": "torch",
    "an example that f changes in place": "torch",
    "make_functional of a linen module's params": "jax",
    "why_zero, the optimizer as an argument": "torch",
    "why_zero, a pair of functions as optimizer": "torch",
    "GradientAccumulator.mean over an axis that is not mapped": "jax",
    "all_gather over an axis that is not mapped": "jax",
    "all_gather of numbers": "jax",
    "a compiled bwd that calls NumPy": "jax",
    "a compiled forward rule that calls NumPy": "jax",
    "a branch on a value of one example": "jax",
    "a branch on a value of one chunk": "jax",
    "chunked, a carry of another dtype": "jax",
    "chunked, a carry of another shape": "jax",
}


def told(name: str, backend_name: str) -> str:
    """Return the error text of a call with placeholders for addresses and line numbers."""
    gt = importlib.import_module(f"gradtools.{backend_name}")
    try:
        BAD[name](gt, lambda x: lift(backend_name, x))
    except Exception as error:
        return without_what_changes(str(error))
    raise AssertionError(f"{name} raises no error")


def without_what_changes(text: str) -> str:
    text = re.sub(r" at \S+\.py:\d+", " at PLACE", text)
    text = re.sub(r"\(\S+\.py:\d+\)", "(PLACE)", text)
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


# --- the file of texts: headings with a backend if the texts differ, and indented paragraphs


def read() -> dict[str, str]:
    """Return the text under each heading of the file."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in TEXTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[heading].append(line.strip())
        else:
            heading = line
            found[heading] = []
    return {heading: " ".join(lines) for heading, lines in found.items()}


def expected(texts: dict[str, str], name: str, backend_name: str) -> str:
    return texts[name] if name in texts else texts[f"{name} ({backend_name})"]


def written() -> str:
    """Return the new contents of `bad_inputs.txt`, with the errors that the calls raise now."""
    blocks = []
    for name in BAD:
        texts = {b: told(name, b) for b in BACKENDS if ONLY.get(name, b) == b}
        if len(texts) == 2 and len({*texts.values()}) == 1:
            blocks.append(_block(name, texts["torch"]))
        else:
            blocks += [_block(f"{name} ({b})", text) for b, text in texts.items()]
    return "".join(blocks)


def _block(heading: str, text: str) -> str:
    lines = textwrap.wrap(text, 96, break_long_words=False, break_on_hyphens=False)
    assert " ".join(lines) == text, f"{heading}: the text must be one paragraph"
    return "\n    ".join([heading, *lines]) + "\n"


if __name__ == "__main__":
    import jax

    jax.config.update("jax_enable_x64", True)
    TEXTS.write_text(written(), encoding="utf-8")
