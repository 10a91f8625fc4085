"""At least a hundred bad calls, each with the whole text of what it raises: our messages to read.

A text says what was asked, what was found (the argument, the leaf, the shape, the dtype) and what
to do instead. Where the frameworks differ both texts stand here; ADDRESS stands for what changes
from run to run. `tests/operators/test_bad_inputs.py` makes the calls. A new text is pasted from its
failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bad:
    """A bad call.

    Attributes:
        name: What is bad, in words.
        call: Makes it, from the namespace and what turns NumPy's arrays into the framework's.
        text: The whole text in PyTorch, and in JAX where `jax` gives no other.
        jax: The whole text in JAX.
        native: Where the error is the framework's own or Python's, not a `GradtoolsError`: why.
    """

    name: str
    call: Callable[[Any, Any], Any]
    text: str
    jax: str = ""
    native: str = ""

    def __str__(self) -> str:
        return self.name


V, S, F32 = np.array([1.0, 2.0]), np.array(3.0), np.array([1.0, 2.0], np.float32)
N, B, Z = np.array([1, 2]), np.array([True, False]), np.array([1.0 + 2.0j, 3.0])


def total(gt: Any) -> Any:
    return lambda x: gt.xp.sum(x * x)


def ruled(gt: Any, f: Any) -> Any:
    """A rule of the right form over some function."""
    rule = gt.custom_rule(f)
    rule.defvjp(lambda x: (f(x), x), lambda x, c: (c,))
    return rule


def pulled(gt: Any, a: Any, fwd: Any, bwd: Any) -> Any:
    rule = gt.custom_rule(lambda x: x)
    rule.defvjp(fwd, bwd)
    return gt.vjp(rule, a(V))[1](a(V))


def added(gt: Any, *grads: Any) -> None:
    total = gt.GradientAccumulator()
    for one in grads:
        total.add(one)


def target(gt: Any, a: Any) -> Any:
    """What gradients are written to."""
    x = a(V)
    return x.requires_grad_() if hasattr(x, "requires_grad_") else x


def other_gather(gt: Any) -> dict[str, Any]:
    """The argument of `gather` that means something in the other framework."""
    return {"axis_name": "i"} if gt.__name__.endswith("torch") else {"group": object()}


BAD = (
    # --- what is differentiated
    Bad(
        "grad of an integer array",
        lambda gt, a: gt.grad(total(gt))(a(N)),
        (
            "grad: argument 0 is an array of dtype int64 and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or keep it in an argument that argnums "
            "does not name."
        ),
    ),
    Bad(
        "grad of an integer leaf",
        lambda gt, a: gt.grad(lambda p: p["w"])({"w": a(S), "n": a(N)}),
        (
            "grad: argument 0['n'] is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that argnums does not name."
        ),
    ),
    Bad(
        "grad of a boolean array",
        lambda gt, a: gt.grad(total(gt))(a(B)),
        (
            "grad: argument 0 is an array of dtype bool and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or keep it in an argument that argnums "
            "does not name."
        ),
    ),
    Bad(
        "grad of a Python integer",
        lambda gt, a: gt.grad(lambda x: x)(3),
        (
            "grad: argument 0 is the Python int 3; what is differentiated must be a floating or "
            "complex array. Cast it, or keep it in an argument that argnums does not name."
        ),
    ),
    Bad(
        "grad of a string",
        lambda gt, a: gt.grad(lambda x: x)("weights"),
        (
            "grad: argument 0 is an object of type str; what is differentiated must be a floating "
            "or complex array. Cast it, or keep it in an argument that argnums does not name."
        ),
    ),
    Bad(
        "grad of a list of strings",
        lambda gt, a: gt.grad(lambda x: x)(["a", "b"]),
        (
            "grad: argument 0[0] is an object of type str; what is differentiated must be a "
            "floating or complex array. Cast it, or keep it in an argument that argnums does not "
            "name."
        ),
    ),
    Bad(
        "grad of an array of objects",
        lambda gt, a: gt.grad(lambda x: x)(np.array([None, 1.0])),
        (
            "grad: argument 0 cannot be differentiated: asarray: an ndarray (NumPy reads it as "
            "object of shape (2,)) holds no numbers that PyTorch could take. Give one array of "
            "numbers (for a tree of arrays, call asarray on each leaf)."
        ),
        jax=(
            "grad: argument 0 cannot be differentiated: asarray: an ndarray (NumPy reads it as "
            "object of shape (2,)) holds no numbers that JAX could take. Give one array of "
            "numbers (for a tree of arrays, call asarray on each leaf)."
        ),
    ),
    Bad(
        "grad of an array of dates",
        lambda gt, a: gt.grad(lambda x: x)(np.array(["2026-01-01"], "datetime64[D]")),
        (
            "grad: argument 0 cannot be differentiated: asarray: an ndarray (NumPy reads it as "
            "datetime64[D] of shape (1,)) holds no numbers that PyTorch could take. Give one array "
            "of numbers (for a tree of arrays, call asarray on each leaf)."
        ),
        jax=(
            "grad: argument 0 cannot be differentiated: asarray: an ndarray (NumPy reads it as "
            "datetime64[D] of shape (1,)) holds no numbers that JAX could take. Give one array "
            "of numbers (for a tree of arrays, call asarray on each leaf)."
        ),
    ),
    Bad(
        "value_and_grad of an integer leaf, nested",
        lambda gt, a: gt.value_and_grad(lambda y, p: y, argnums=(0, 1))(a(S), {"k": [a(S), a(N)]}),
        (
            "value_and_grad: argument 1['k'][1] is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that argnums does not name."
        ),
    ),
    Bad(
        "vjp of integers",
        lambda gt, a: gt.vjp(lambda x, y: x, a(S), a(N)),
        (
            "vjp: argument 1 is an array of dtype int64 and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or let f close over it."
        ),
    ),
    Bad(
        "jvp of integers",
        lambda gt, a: gt.jvp(lambda x: x, (a(N),), (a(N),)),
        (
            "jvp: argument 0 is an array of dtype int64 and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or let f close over it."
        ),
    ),
    Bad(
        "linearize of integers",
        lambda gt, a: gt.linearize(lambda x: x, a(N)),
        (
            "linearize: argument 0 is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or let f close over it."
        ),
    ),
    Bad(
        "jacobian of integers",
        lambda gt, a: gt.jacobian(lambda x: x)(a(N)),
        (
            "jacobian: argument 0 is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that argnums does not name."
        ),
    ),
    Bad(
        "jacobian of complex numbers",
        lambda gt, a: gt.jacobian(lambda z: z)({"z": a(Z)}),
        (
            "jacobian: argument 0['z'] is complex (complex128). The Jacobian of a function that is "
            "not holomorphic is no complex matrix. Pass the real and imaginary parts as two real "
            "arrays, or use hvp, jvp or vjp, which are real-linear."
        ),
    ),
    Bad(
        "hessian of integers",
        lambda gt, a: gt.hessian(total(gt))(a(N)),
        (
            "hessian: argument 0 is an array of dtype int64 and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or keep it in an argument that argnums "
            "does not name."
        ),
    ),
    Bad(
        "hessian of complex numbers",
        lambda gt, a: gt.hessian(lambda z: gt.xp.sum(gt.xp.abs(z)))(a(Z)),
        (
            "hessian: argument 0 is complex (complex128). The Jacobian of a function that is not "
            "holomorphic is no complex matrix. Pass the real and imaginary parts as two real "
            "arrays, or use hvp, jvp or vjp, which are real-linear."
        ),
    ),
    Bad(
        "hvp of integers",
        lambda gt, a: gt.hvp(total(gt), (a(N),), (a(N),)),
        (
            "hvp: argument 0 is an array of dtype int64 and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or let f close over it."
        ),
    ),
    Bad(
        "per_example_grad of integers",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(np.array(2)), a(V)),
        (
            "per_example_grad: argument 0 is an array of dtype int64 and shape (); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that argnums does not name."
        ),
    ),
    Bad(
        "minimax of integers",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: x * y, 0, 1)(a(S), a(np.array(2))),
        (
            "minimax_value_and_grad: argument 1 is an array of dtype int64 and shape (); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that neither minimize nor maximize names."
        ),
    ),
    Bad(
        "mixed_partial of integers",
        lambda gt, a: gt.mixed_partial(
            lambda y, g: gt.xp.sum(y * g), lambda z: z, a(N), a(V), a(V)
        ),
        (
            "mixed_partial: argument 0 is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or let f close over it."
        ),
    ),
    # --- what f returns
    Bad(
        "grad of a vector",
        lambda gt, a: gt.grad(lambda x: x * x)(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got an array of shape (2,) "
            "and dtype float64. Reduce it, for instance with .sum() or .mean()."
        ),
    ),
    Bad(
        "grad of one number in a vector",
        lambda gt, a: gt.grad(lambda x: x[:1])(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got an array of shape (1,) "
            "and dtype float64. Reduce it, for instance with .sum() or .mean()."
        ),
    ),
    Bad(
        "grad of a complex number",
        lambda gt, a: gt.grad(lambda z: gt.xp.sum(z))(a(Z)),
        (
            "grad: f must return one real number, an array of shape (); got an array of shape () "
            "and dtype complex128. Take its real part, or a norm."
        ),
    ),
    Bad(
        "grad of an index",
        lambda gt, a: gt.grad(lambda x: gt.xp.argmax(x))(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got an array of shape () "
            "and dtype int64. Keep it floating: a cast to integer or boolean has no derivative."
        ),
    ),
    Bad(
        "grad of a comparison",
        lambda gt, a: gt.grad(lambda x: x[0] > 1)(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got an array of shape () "
            "and dtype bool. Keep it floating: a cast to integer or boolean has no derivative."
        ),
    ),
    Bad(
        "grad of a function that returns nothing",
        lambda gt, a: gt.grad(lambda x: None)(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got None. Reduce it, for "
            "instance with .sum() or .mean(), or return (loss, aux) with has_aux=True."
        ),
    ),
    Bad(
        "grad of a Python number",
        lambda gt, a: gt.grad(lambda x: 2.0)(a(V)),
        (
            "grad: argument 0 does not reach the output of f by a differentiable path. It may be "
            "unused, stopped or detached, cast to an integer, compared, or it may leave the "
            "framework (.item(), .numpy(), no_grad). If zero is what you mean, pass "
            'disconnected_inputs="zeros".'
        ),
    ),
    Bad(
        "grad of a Python integer as result",
        lambda gt, a: gt.grad(lambda x: 2)(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got an array of shape () "
            "and dtype int64. Keep it floating: a cast to integer or boolean has no derivative."
        ),
    ),
    Bad(
        "grad of a pair",
        lambda gt, a: gt.grad(lambda x: (gt.xp.sum(x), x))(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got a tuple of 2. Reduce "
            "it, for instance with .sum() or .mean(), or return (loss, aux) with has_aux=True."
        ),
    ),
    Bad(
        "grad of a dict",
        lambda gt, a: gt.grad(lambda x: {"loss": gt.xp.sum(x)})(a(V)),
        (
            "grad: f must return one real number, an array of shape (); got a dict of 1. Reduce "
            "it, for instance with .sum() or .mean(), or return (loss, aux) with has_aux=True."
        ),
    ),
    Bad(
        "grad of a string as result",
        lambda gt, a: gt.grad(lambda x: "done")(a(V)),
        (
            "grad: f returned a str at output, expected an array. Return arrays, and anything else "
            "through has_aux=True."
        ),
    ),
    Bad(
        "grad, has_aux without aux",
        lambda gt, a: gt.grad(total(gt), has_aux=True)(a(V)),
        (
            "grad: with has_aux=True f must return a pair (output, aux), got an array of shape () "
            "and dtype float64. Return both, or leave has_aux out."
        ),
    ),
    Bad(
        "grad, has_aux with three results",
        lambda gt, a: gt.grad(lambda x: (x[0], x, x), has_aux=True)(a(V)),
        (
            "grad: with has_aux=True f must return a pair (output, aux), got a tuple of 3. Return "
            "both, or leave has_aux out."
        ),
    ),
    Bad(
        "value_and_grad of nothing",
        lambda gt, a: gt.value_and_grad(lambda x: None)(a(V)),
        (
            "value_and_grad: f must return one real number, an array of shape (); got None. Reduce "
            "it, for instance with .sum() or .mean(), or return (loss, aux) with has_aux=True."
        ),
    ),
    Bad(
        "minimax of a vector",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: x * y, 0, 1)(a(V), a(V)),
        (
            "minimax_value_and_grad: f must return one real number, an array of shape (); got an "
            "array of shape (2,) and dtype float64. Reduce it, for instance with .sum() or "
            ".mean()."
        ),
    ),
    Bad(
        "vjp of an object",
        lambda gt, a: gt.vjp(lambda x: {"m": object()}, a(V)),
        (
            "vjp: f returned an object at output['m'], expected an array. Return arrays, and "
            "anything else through has_aux=True."
        ),
    ),
    Bad(
        "jvp of a string",
        lambda gt, a: gt.jvp(lambda x: "done", (a(V),), (a(V),)),
        (
            "jvp: f returned a str at output, expected an array. Return arrays, and anything else "
            "through has_aux=True."
        ),
    ),
    Bad(
        "linearize of an object",
        lambda gt, a: gt.linearize(lambda x: [object()], a(V)),
        (
            "linearize: f returned an object at output[0], expected an array. Return arrays, and "
            "anything else through has_aux=True."
        ),
    ),
    Bad(
        "jacobian of a string",
        lambda gt, a: gt.jacobian(lambda x: "done")(a(V)),
        (
            "jacobian: f returned a str at output, expected an array. Return arrays, and anything "
            "else through has_aux=True."
        ),
    ),
    Bad(
        "hvp of a vector",
        lambda gt, a: gt.hvp(lambda x: x, (a(V),), (a(V),)),
        (
            "hvp: f must return one real number, an array of shape (); got an array of shape (2,) "
            "and dtype float64. Reduce it, for instance with .sum() or .mean()."
        ),
    ),
    Bad(
        "hessian of nothing",
        lambda gt, a: gt.hessian(lambda x: None)(a(V)),
        (
            "hessian: f must return one real number, an array of shape (); got None. Reduce it, "
            "for instance with .sum() or .mean(), or return (loss, aux) with has_aux=True."
        ),
    ),
    Bad(
        "per_example_grad of a vector",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(V), a(V)),
        (
            "per_example_grad: f must return one real number, an array of shape (); got an array "
            "of shape (2,) and dtype float64. Reduce it, for instance with .sum() or .mean()."
        ),
    ),
    Bad(
        "mixed_partial of a vector",
        lambda gt, a: gt.mixed_partial(lambda y, g: y * g, lambda z: z, a(V), a(V), a(V)),
        (
            "mixed_partial: f must return one real number, an array of shape (); got an array of "
            "shape (2,) and dtype float64. Reduce it, for instance with .sum() or .mean()."
        ),
    ),
    Bad(
        "mixed_partial through nothing",
        lambda gt, a: gt.mixed_partial(lambda y, g: gt.xp.sum(y), lambda z: None, a(V), a(V), a(V)),
        (
            "mixed_partial: G returned no floating or complex array, got None. Is a return "
            "statement missing?"
        ),
    ),
    # --- disconnected
    Bad(
        "grad of what does not reach the output",
        lambda gt, a: gt.grad(lambda x, y: gt.xp.sum(x), argnums=(0, 1))(a(V), a(V)),
        (
            "grad: argument 1 does not reach the output of f by a differentiable path. It may be "
            "unused, stopped or detached, cast to an integer, compared, or it may leave the "
            "framework (.item(), .numpy(), no_grad). If zero is what you mean, pass "
            'disconnected_inputs="zeros".'
        ),
    ),
    Bad(
        "grad through stop_gradient",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.stop_gradient(x)))(a(V)),
        (
            "grad: argument 0 does not reach the output of f by a differentiable path. It is cut "
            "by detach at PLACE. It may be unused, stopped or detached, cast to an integer, "
            "compared, or it may leave the framework (.item(), .numpy(), no_grad). If zero is what "
            'you mean, pass disconnected_inputs="zeros".'
        ),
        jax=(
            "grad: argument 0 does not reach the output of f by a differentiable path. It is "
            "cut by stop_gradient at PLACE. It may be unused, stopped or detached, cast to an "
            "integer, compared, or it may leave the framework (.item(), .numpy(), no_grad). If "
            'zero is what you mean, pass disconnected_inputs="zeros".'
        ),
    ),
    Bad(
        "grad through a comparison",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.xp.astype(x > 1, x.dtype)))(a(V)),
        (
            "grad: argument 0 does not reach the output of f by a differentiable path. It is cut "
            "by gt at PLACE. It may be unused, stopped or detached, cast to an integer, compared, "
            "or it may leave the framework (.item(), .numpy(), no_grad). If zero is what you mean, "
            'pass disconnected_inputs="zeros".'
        ),
    ),
    Bad(
        "grad, strict, of one unused leaf",
        lambda gt, a: gt.grad(lambda p: gt.xp.sum(p["w"]), disconnected_inputs="strict")(
            {"w": a(V), "b": a(V)}
        ),
        (
            "grad: argument 0['b'] does not reach the output of f by a differentiable path. It may "
            "be unused, stopped or detached, cast to an integer, compared, or it may leave the "
            "framework (.item(), .numpy(), no_grad). If zero is what you mean, pass "
            'disconnected_inputs="zeros".'
        ),
    ),
    Bad(
        "minimax of an idle player",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: gt.xp.sum(x), 0, 1)(a(V), a(V)),
        (
            "minimax_value_and_grad: argument 1 does not reach the output of f by a differentiable "
            "path. It may be unused, stopped or detached, cast to an integer, compared, or it may "
            "leave the framework (.item(), .numpy(), no_grad). Leave it out of what is "
            "differentiated, or let it reach the output."
        ),
    ),
    # --- argnums
    Bad(
        "argnums beyond the arguments",
        lambda gt, a: gt.grad(total(gt), argnums=1)(a(V)),
        (
            "grad: argnums holds 1, but f was called with 1 positional argument (0 to 0). Keyword "
            "arguments are not differentiated; pass what is to be differentiated by position."
        ),
    ),
    Bad(
        "argnums below the arguments",
        lambda gt, a: gt.grad(total(gt), argnums=-2)(a(V)),
        (
            "grad: argnums holds -2, but f was called with 1 positional argument (0 to 0). Keyword "
            "arguments are not differentiated; pass what is to be differentiated by position."
        ),
    ),
    Bad(
        "argnums twice",
        lambda gt, a: gt.grad(lambda x, y: x, argnums=(1, -1))(a(S), a(S)),
        "grad: argnums (1, -1) names an argument twice. Name each once.",
    ),
    Bad(
        "argnums empty",
        lambda gt, a: gt.grad(total(gt), argnums=())(a(V)),
        "grad: argnums is empty; name at least one argument.",
    ),
    Bad(
        "argnums a boolean",
        lambda gt, a: gt.grad(total(gt), argnums=True)(a(V)),
        (
            "grad: argnums must hold integers, got True. Give the position of an argument, counted "
            "from 0, or a tuple of positions."
        ),
    ),
    Bad(
        "argnums a name",
        lambda gt, a: gt.grad(total(gt), argnums="x")(a(V)),
        (
            "grad: argnums must hold integers, got 'x'. Give the position of an argument, counted "
            "from 0, or a tuple of positions."
        ),
    ),
    Bad(
        "argnums a float",
        lambda gt, a: gt.jacobian(total(gt), argnums=(0.0,))(a(V)),
        (
            "jacobian: argnums must hold integers, got 0.0. Give the position of an argument, "
            "counted from 0, or a tuple of positions."
        ),
    ),
    Bad(
        "argnums None",
        lambda gt, a: gt.hessian(total(gt), argnums=None)(a(V)),
        (
            "hessian: argnums must hold integers, got None. Give the position of an argument, "
            "counted from 0, or a tuple of positions."
        ),
    ),
    Bad(
        "grad of keywords alone",
        lambda gt, a: gt.grad(lambda *, x: x)(x=a(S)),
        (
            "grad: argnums holds 0, but f was called with no positional argument. Keyword "
            "arguments are not differentiated; pass what is to be differentiated by position."
        ),
    ),
    Bad(
        "a player on both sides",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: x, (0, 1), 1)(a(S), a(S)),
        "minimax_value_and_grad: minimize or maximize (0, 1, 1) names an argument twice. Name each "
        "once.",
    ),
    Bad(
        "minimize None",
        lambda gt, a: gt.minimax_value_and_grad(lambda x, y: x, None, 1)(a(S), a(S)),
        (
            "minimax_value_and_grad: minimize or maximize must hold integers, got None. Give the "
            "position of an argument, counted from 0, or a tuple of positions."
        ),
    ),
    # --- options
    Bad(
        "an unknown policy",
        lambda gt, a: gt.grad(total(gt), disconnected_inputs="ignore"),
        (
            "grad: disconnected_inputs is 'ignore'; expected one of ('raise', 'warn', 'zeros', "
            "'strict')."
        ),
    ),
    Bad(
        "an unhashable policy",
        lambda gt, a: gt.grad(total(gt), disconnected_inputs=["raise"]),
        (
            "grad: disconnected_inputs is ['raise']; expected one of ('raise', 'warn', 'zeros', "
            "'strict')."
        ),
    ),
    Bad(
        "an unknown mode of jacobian",
        lambda gt, a: gt.jacobian(total(gt), mode="backward"),
        "jacobian: mode is 'backward'; expected one of ('auto', 'forward', 'reverse').",
    ),
    Bad(
        "an unknown mode of hvp",
        lambda gt, a: gt.hvp(total(gt), (a(V),), (a(V),), "fwd"),
        (
            "hvp: mode is 'fwd'; expected one of ('auto', 'forward_over_reverse', "
            "'reverse_over_reverse')."
        ),
    ),
    Bad(
        "chunk_size zero",
        lambda gt, a: gt.jacobian(total(gt), chunk_size=0),
        "jacobian: chunk_size is 0; expected a whole number of unit vectors, 1 or more.",
    ),
    Bad(
        "chunk_size a float",
        lambda gt, a: gt.per_example_grad(total(gt), chunk_size=2.0),
        "per_example_grad: chunk_size is 2.0; expected a whole number of examples, 1 or more.",
    ),
    # --- functions
    Bad(
        "grad of a number",
        lambda gt, a: gt.grad(3.0),
        "grad: f must be a function, got 3.0.",
    ),
    Bad(
        "grad of an array in place of f",
        lambda gt, a: gt.grad(a(S)),
        "grad: f must be a function, got a Tensor.",
        jax="grad: f must be a function, got an ArrayImpl.",
    ),
    Bad(
        "vjp of a number",
        lambda gt, a: gt.vjp(3.0, a(S)),
        "vjp: f must be a function, got 3.0.",
    ),
    Bad(
        "jvp of None",
        lambda gt, a: gt.jvp(None, (a(S),), (a(S),)),
        "jvp: f must be a function, got None.",
    ),
    Bad(
        "vmap of a number",
        lambda gt, a: gt.vmap(3.0)(a(V)),
        "vmap: f is a float; expected a function.",
    ),
    Bad(
        "checkpoint of a number",
        lambda gt, a: gt.checkpoint(3.0)(a(V)),
        "checkpoint: f is a float; expected a function.",
    ),
    Bad(
        "compile of a number",
        lambda gt, a: gt.compile(3.0)(a(V)),
        "compile: f is a float; expected a function.",
    ),
    Bad(
        "chunked of a number",
        lambda gt, a: gt.chunked(3.0, 2),
        "chunked: f is a float; expected a function.",
    ),
    Bad(
        "microbatched of a number",
        lambda gt, a: gt.microbatched(3.0, 2),
        "microbatched: f is a float; expected a function.",
    ),
    Bad(
        "tiled of a number",
        lambda gt, a: gt.tiled(3.0),
        "tiled: f is a float; expected a function of a tile of rows and a tile of columns.",
    ),
    Bad(
        "tiled in tiles of nothing",
        lambda gt, a: gt.tiled(total(gt), tile_size=0),
        "tiled: tile_size is 0; expected a whole number of rows and columns, 1 or more.",
    ),
    Bad(
        "tiled over an unknown argument",
        lambda gt, a: gt.tiled(lambda x, y: x, columns="z")(a(V), a(V)),
        "tiled: columns names argument 'z', which this call has not; it has x, y.",
    ),
    Bad(
        "contrastive_loss of rows that differ",
        lambda gt, a: gt.contrastive_loss(a(V), a(np.ones(3))),
        (
            "contrastive_loss: x has the shape (2,) and y (3,); expected two matrices of one "
            "shape, a pair in each row."
        ),
    ),
    Bad(
        "linear_cross_entropy of shapes that do not fit",
        lambda gt, a: gt.linear_cross_entropy(a(V), a(V), a(N)),
        (
            "linear_cross_entropy: input has the shape (2,), weight (2,) and target (2,); expected "
            "[..., d], [classes, d] and [...]."
        ),
    ),
    Bad(
        "attention of an unknown layout",
        lambda gt, a: gt.attention(a(V), a(V), a(V), layout="bhnd"),
        "attention: layout is 'bhnd'; expected 'heads_first' or 'heads_last'.",
    ),
    Bad(
        "frozen of a number",
        lambda gt, a: gt.frozen(3.0),
        "frozen: G is a float; expected a function.",
    ),
    Bad(
        "straight_through of a number",
        lambda gt, a: gt.straight_through(3.0),
        "straight_through: f must be a function, got a float.",
    ),
    Bad(
        "custom_rule of a number",
        lambda gt, a: gt.custom_rule(3.0),
        "custom_rule: f must be a function, got 3.0.",
    ),
    Bad(
        "host_function of a number",
        lambda gt, a: gt.host_function(3.0),
        "host_function: the kernel must be callable, got 3.0.",
    ),
    Bad(
        "measure of a number",
        lambda gt, a: gt.measure(3.0),
        "measure: f is a float; expected a function.",
    ),
    Bad(
        "guard_gradients of a number",
        lambda gt, a: gt.guard_gradients(3.0),
        "guard_gradients: f is 3.0; expected a function.",
    ),
    Bad(
        "why_zero of a number",
        lambda gt, a: gt.why_zero(3.0, a(V)),
        "why_zero: f is 3.0; expected a function.",
    ),
    Bad(
        "dependence of a number",
        lambda gt, a: gt.dependence(3.0, a(V)),
        "dependence: f is 3.0; expected a function.",
    ),
    Bad(
        "gradient_graph of a number",
        lambda gt, a: gt.gradient_graph(3.0, a(V)),
        "gradient_graph: f is 3.0; expected a function.",
    ),
    Bad(
        "formula of a number",
        lambda gt, a: gt.formula(3.0, a(V)),
        "formula: f is 3.0; expected a function.",
    ),
    Bad(
        "transform_gradient by a number",
        lambda gt, a: gt.transform_gradient(a(V), 3.0),
        "transform_gradient: fn must be callable, got 3.0.",
    ),
    # --- tangents and cotangents
    Bad(
        "tangents without a tuple",
        lambda gt, a: gt.jvp(total(gt), (a(V),), a(V)),
        (
            "jvp: tangents must be a tuple with one entry for each argument of f, got a Tensor. "
            "For one argument write (x,)."
        ),
        jax=(
            "jvp: tangents must be a tuple with one entry for each argument of f, got an "
            "ArrayImpl. For one argument write (x,)."
        ),
    ),
    Bad(
        "primals without a tuple",
        lambda gt, a: gt.hvp(total(gt), a(V), (a(V),)),
        (
            "hvp: primals must be a tuple with one entry for each argument of f, got a Tensor. For "
            "one argument write (x,)."
        ),
        jax=(
            "hvp: primals must be a tuple with one entry for each argument of f, got an "
            "ArrayImpl. For one argument write (x,)."
        ),
    ),
    Bad(
        "a tangent too few",
        lambda gt, a: gt.jvp(lambda x, y: x, (a(V), a(V)), (a(V),)),
        (
            "jvp: got 2 primals and 1 tangents; expected one tangent for each primal, and at least "
            "one."
        ),
    ),
    Bad(
        "no primals to vjp",
        lambda gt, a: gt.vjp(lambda: 1.0),
        "vjp: no primals were given; pass f's arguments after f.",
    ),
    Bad(
        "no primals to linearize",
        lambda gt, a: gt.linearize(lambda: 1.0),
        "linearize: no primals were given; pass f's arguments after f.",
    ),
    Bad(
        "no primals to jvp",
        lambda gt, a: gt.jvp(lambda: 1.0, (), ()),
        (
            "jvp: got 0 primals and 0 tangents; expected one tangent for each primal, and at least "
            "one."
        ),
    ),
    Bad(
        "a tangent of another tree",
        lambda gt, a: gt.jvp(lambda p: p["w"], ({"w": a(V)},), ({"b": a(V)},)),
        (
            "jvp: tangent 0 has the structure {'b': *}, expected that of argument 0, {'w': *}. "
            "Give one leaf for each of its leaves."
        ),
        jax=(
            "jvp: tangent 0 has the structure PyTreeDef({'b': *}), expected that of argument "
            "0, PyTreeDef({'w': *}). Give one leaf for each of its leaves."
        ),
    ),
    Bad(
        "a tangent of another shape",
        lambda gt, a: gt.jvp(lambda p: p["w"], ({"w": a(V)},), ({"w": a(S)},)),
        (
            "jvp: tangent 0['w'] has shape () and dtype float64, expected (2,) and float64, those "
            "of argument 0['w']. Reshape or cast it."
        ),
    ),
    Bad(
        "a tangent of another dtype",
        lambda gt, a: gt.hvp(total(gt), (a(V),), (a(F32),)),
        (
            "hvp: tangent 0 has shape (2,) and dtype float32, expected (2,) and float64, those of "
            "argument 0. Reshape or cast it."
        ),
    ),
    Bad(
        "an integer tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), (a(N),)),
        (
            "jvp: tangent 0 has shape (2,) and dtype int64, expected (2,) and float64, those of "
            "argument 0. Reshape or cast it."
        ),
    ),
    Bad(
        "a complex tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), (a(Z),)),
        (
            "jvp: tangent 0 has shape (2,) and dtype complex128, expected (2,) and float64, those "
            "of argument 0. Reshape or cast it."
        ),
    ),
    Bad(
        "a complex number as tangent",
        lambda gt, a: gt.jvp(lambda x: x * x, (a(S),), (1j,)),
        (
            "jvp: tangent 0 is the complex number 1j, but argument 0 is real (float64). Pass a "
            "real number."
        ),
    ),
    Bad(
        "a string as tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), ("x",)),
        (
            "jvp: tangent 0 is a str, expected an array of shape (2,) and dtype float64, like "
            "argument 0."
        ),
    ),
    Bad(
        "None as tangent",
        lambda gt, a: gt.jvp(total(gt), (a(V),), (None,)),
        (
            "jvp: tangent 0 is None, expected an array of shape (2,) and dtype float64, like "
            "argument 0."
        ),
    ),
    Bad(
        "a pushforward of too many",
        lambda gt, a: gt.linearize(total(gt), a(V))[1](a(V), a(V)),
        (
            "linearize: got 1 primals and 2 tangents; expected one tangent for each primal, and at "
            "least one."
        ),
    ),
    Bad(
        "a pushforward of another shape",
        lambda gt, a: gt.linearize(total(gt), a(V))[1](a(S)),
        (
            "linearize: tangent 0 has shape () and dtype float64, expected (2,) and float64, those "
            "of argument 0. Reshape or cast it."
        ),
    ),
    Bad(
        "a cotangent of another tree",
        lambda gt, a: gt.vjp(lambda x: {"y": x}, a(V))[1]({"z": a(V)}),
        (
            "vjp: the cotangent has the structure {'z': *}, expected that of f's output, {'y': *}. "
            "Give one leaf for each of its leaves."
        ),
        jax=(
            "vjp: the cotangent has the structure PyTreeDef({'z': *}), expected that of f's "
            "output, PyTreeDef({'y': *}). Give one leaf for each of its leaves."
        ),
    ),
    Bad(
        "a cotangent of another shape",
        lambda gt, a: gt.vjp(lambda x: {"y": x}, a(V))[1]({"y": a(S)}),
        (
            "vjp: cotangent['y'] has shape () and dtype float64, expected (2,) and float64, those "
            "of output['y']. Reshape or cast it."
        ),
    ),
    Bad(
        "a cotangent of another dtype",
        lambda gt, a: gt.vjp(lambda x: x, a(V))[1](a(F32)),
        (
            "vjp: cotangent has shape (2,) and dtype float32, expected (2,) and float64, those of "
            "output. Reshape or cast it."
        ),
    ),
    Bad(
        "None as cotangent",
        lambda gt, a: gt.vjp(lambda x: x, a(V))[1](None),
        ("vjp: cotangent is None, expected an array of shape (2,) and dtype float64, like output."),
    ),
    Bad(
        "a complex number as cotangent",
        lambda gt, a: gt.vjp(lambda x: x * x, a(S))[1](1j),
        (
            "vjp: cotangent is the complex number 1j, but output is real (float64). Pass a real "
            "number."
        ),
    ),
    Bad(
        "a direction of another shape",
        lambda gt, a: gt.mixed_partial(
            lambda y, g: y * g, lambda z: gt.xp.sum(z), a(S), a(V), a(S)
        ),
        (
            "mixed_partial: tangent 0 has shape () and dtype float64, expected (2,) and float64, "
            "those of argument 0. Reshape or cast it."
        ),
    ),
    # --- batches
    Bad(
        "in_axes too short",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None,))(a(S), a(V)),
        (
            "per_example_grad: in_axes is (None,); expected one entry for each of the 2 positional "
            "arguments, an integer, or a dictionary from f's parameters to axes."
        ),
    ),
    Bad(
        "in_axes a string",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes="0")(a(S), a(V)),
        (
            "per_example_grad: in_axes is '0'; expected one entry for each of the 2 positional "
            "arguments, an integer, or a dictionary from f's parameters to axes."
        ),
    ),
    Bad(
        "an axis that is a string",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None, "x"))(a(S), a(V)),
        (
            "per_example_grad: the entry of in_axes for argument 1 is 'x'; expected an integer or "
            "None."
        ),
    ),
    Bad(
        "an axis beyond the array",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x, in_axes=(None, 1))(a(S), a(V)),
        (
            "per_example_grad: argument 1 of shape (2,) has no axis 1 to split on. Set its entry "
            "of in_axes to None to share it."
        ),
    ),
    Bad(
        "a number to split",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(S), a(S)),
        (
            "per_example_grad: argument 1 of shape () has no axis 0 to split on. Set its entry of "
            "in_axes to None to share it."
        ),
    ),
    Bad(
        "batches of different sizes",
        lambda gt, a: gt.per_example_grad(lambda w, x, y: w * x * y)(a(S), a(V), a(np.ones(3))),
        (
            "per_example_grad: the batch sizes differ: 2 in argument 1, 3 in argument 2. Set "
            "in_axes so that every split axis has one entry for each example; None shares an "
            "argument."
        ),
    ),
    Bad(
        "no batch",
        lambda gt, a: gt.per_example_grad(lambda w: w)(a(S)),
        (
            "per_example_grad: no argument is split, so there are no examples. Pass the batch as "
            "an array, and name its axis in in_axes."
        ),
    ),
    Bad(
        "an empty batch",
        lambda gt, a: gt.per_example_grad(lambda w, x: w * x)(a(S), a(np.ones(0))),
        "per_example_grad: the batch is empty (argument 1 has size 0).",
    ),
    Bad(
        "chunked by no size",
        lambda gt, a: gt.chunked(lambda x: x, 0),
        "chunked: chunk_size is 0; expected a whole number of examples, 1 or more.",
    ),
    Bad(
        "chunked by half a size",
        lambda gt, a: gt.chunked(lambda x: x, 1.5),
        "chunked: chunk_size is 1.5; expected a whole number of examples, 1 or more.",
    ),
    Bad(
        "chunked, retain negative",
        lambda gt, a: gt.chunked(lambda x: x, 1, retain=-1),
        "chunked: retain is -1; expected a whole number of chunks, 0 or more.",
    ),
    Bad(
        "chunked, budget negative",
        lambda gt, a: gt.chunked(lambda x: x, 1, memory_budget=-1),
        "chunked: memory_budget is -1; expected a whole number of bytes, 0 or more.",
    ),
    Bad(
        "chunked over a number",
        lambda gt, a: gt.chunked(lambda x: x, 1)(a(S)),
        (
            "chunked: argument 0 of shape () has no axis 0 to split on. Set its entry of in_axes "
            "to None to share it."
        ),
    ),
    Bad(
        "chunked over nothing",
        lambda gt, a: gt.chunked(lambda x: x, 1)(a(np.ones(0))),
        "chunked: the batch is empty (argument 0 has size 0).",
    ),
    Bad(
        "chunked over batches of different sizes",
        lambda gt, a: gt.chunked(lambda x, y: x, 1)(a(V), a(np.ones(3))),
        (
            "chunked: the batch sizes differ: 2 in argument 0, 3 in argument 1. Set in_axes so "
            "that every split axis has one entry for each example; None shares an argument."
        ),
    ),
    Bad(
        "chunked, a key that is a carry",
        lambda gt, a: gt.chunked(lambda x, k: x, 1, key_argnums=1, carry_argnums=1)(a(V), a(S)),
        ("chunked: key_argnums and carry_argnums name the same argument; it is a key or a carry."),
    ),
    Bad(
        "chunked, a key that is none",
        lambda gt, a: gt.chunked(lambda x, k: x, 1, key_argnums=1)(a(V), a(S)),
        (
            "chunked: a key is an int64 tensor of shape (2,), made by key(seed) or a row of "
            "split(key, n); got a torch.float64 tensor of shape ()."
        ),
        jax=(
            "chunked: a key is made by key(seed) or is an entry of split(key, n); got float64 "
            "of shape ()."
        ),
    ),
    Bad(
        "chunked, a carry that is not returned",
        lambda gt, a: gt.chunked(lambda x, c: x, 1, carry_argnums=1)(a(V), a(S)),
        (
            "chunked: with carry_argnums f returns a pair (output, new_carry); got an array of "
            "shape (1,) and dtype float64."
        ),
    ),
    Bad(
        "chunked, an output without the batch",
        lambda gt, a: gt.chunked(lambda x: gt.xp.sum(x), 1)(a(V)),
        (
            "chunked: f's output has shape (), which has no axis 0 to join chunks on. f returns "
            "one entry for each example; for a loss that is a mean or a sum over examples use "
            "microbatched."
        ),
    ),
    Bad(
        "chunked, out_axes beyond",
        lambda gt, a: gt.chunked(lambda x: x, 1, out_axes=1)(a(V)),
        (
            "chunked: f's output has shape (1,), which has no axis 1 to join chunks on. f returns "
            "one entry for each example; for a loss that is a mean or a sum over examples use "
            "microbatched."
        ),
    ),
    Bad(
        "chunked, a string returned",
        lambda gt, a: gt.chunked(lambda x: "done", 1)(a(V)),
        "chunked: f's output is a str; expected an array with an entry for each example.",
    ),
    Bad(
        "microbatched by no size",
        lambda gt, a: gt.microbatched(total(gt), 0),
        "microbatched: chunk_size is 0; expected a whole number of examples, 1 or more.",
    ),
    Bad(
        "microbatched, an unknown reduction",
        lambda gt, a: gt.microbatched(total(gt), 1, reduction="max"),
        "microbatched: reduction is 'max'; expected 'mean' or 'sum'.",
    ),
    Bad(
        "microbatched, weights of a sum",
        lambda gt, a: gt.microbatched(total(gt), 1, reduction="sum", weights=a(V)),
        (
            "microbatched: sums add up as they are; give weights with reduction='mean', or "
            "multiply by them inside f."
        ),
    ),
    Bad(
        "microbatched, weights of another length",
        lambda gt, a: gt.microbatched(lambda w, x: gt.xp.mean(w * x), 1, weights=a(np.ones(3)))(
            a(S), a(V)
        ),
        (
            "microbatched: the batch sizes differ: 2 in argument 1, 3 in argument 2. Set in_axes "
            "so that every split axis has one entry for each example; None shares an argument."
        ),
    ),
    Bad(
        "microbatched of a vector",
        lambda gt, a: gt.microbatched(lambda w, x: w * x, 1)(a(S), a(V)),
        (
            "microbatched: f must return one real number, an array of shape (); got an array of "
            "shape (1,) and dtype float64. Reduce it, for instance with .sum() or .mean()."
        ),
    ),
    Bad(
        "microbatched over nothing",
        lambda gt, a: gt.microbatched(lambda w, x: gt.xp.mean(w * x), 1)(a(S), a(np.ones(0))),
        "microbatched: the batch is empty (argument 1 has size 0).",
    ),
    Bad(
        "microbatched, a split parameter",
        lambda gt, a: gt.microbatched(lambda w, x: gt.xp.mean(w * x), 1, in_axes=(0, 0))(
            a(V), a(V)
        ),
        (
            "microbatched: argument 0 is differentiated, so all chunks share it; in_axes[0] is 0, "
            "expected None. For gradients to the batch itself use chunked."
        ),
    ),
    Bad(
        "frozen, budget negative",
        lambda gt, a: gt.frozen(lambda z: z, memory_budget=-1),
        "frozen: memory_budget is -1; expected a whole number of bytes, 0 or more.",
    ),
    # --- edits
    Bad(
        "a complex scale",
        lambda gt, a: gt.scale_gradient(a(V), 1j),
        ("scale_gradient: scale is complex; it must be real. For a complex factor write a rule."),
    ),
    Bad(
        "a scale of another shape",
        lambda gt, a: gt.reverse_gradient({"x": a(V)}, a(np.ones(3))),
        (
            "reverse_gradient: scale has shape (3,), which does not broadcast to leaf x['x'] of "
            "shape (2,). Give a scalar, or an array that broadcasts to every leaf."
        ),
    ),
    Bad(
        "a scale that is a string",
        lambda gt, a: gt.scale_gradient(a(V), "half"),
        (
            "scale_gradient: scale is a str; it must be a real number, or an array of real numbers "
            "that broadcasts to every leaf."
        ),
    ),
    Bad(
        "a scale that is None",
        lambda gt, a: gt.reverse_gradient(a(V), None),
        (
            "reverse_gradient: scale is None; it must be a real number, or an array of real "
            "numbers that broadcasts to every leaf."
        ),
    ),
    Bad(
        "clip_gradient by nothing",
        lambda gt, a: gt.clip_gradient(a(V)),
        "clip_gradient: give max_norm, max_value or both.",
    ),
    Bad(
        "clip_gradient by a negative norm",
        lambda gt, a: gt.clip_gradient(a(V), max_norm=-1.0),
        "clip_gradient: max_norm is -1.0; it must not be negative.",
    ),
    Bad(
        "clip_gradient by a string",
        lambda gt, a: gt.clip_gradient(a(V), max_norm="one"),
        (
            "clip_gradient: max_norm is a str; it must be a real number, or an array of shape () "
            "that holds one."
        ),
    ),
    Bad(
        "clip_gradient by a complex number",
        lambda gt, a: gt.clip_gradient(a(V), max_value=1j),
        (
            "clip_gradient: max_value is a complex; it must be a real number, or an array of shape "
            "() that holds one."
        ),
    ),
    Bad(
        "known_gradient of another tree",
        lambda gt, a: gt.known_gradient({"x": a(V)}, {"y": a(V)}),
        (
            "known_gradient: dx has the structure {'y': *}, expected that of x, {'x': *}. Give one "
            "array for each of x's."
        ),
        jax=(
            "known_gradient: dx has the structure PyTreeDef({'y': *}), expected that of x, "
            "PyTreeDef({'x': *}). Give one array for each of x's."
        ),
    ),
    Bad(
        "known_gradient of another shape",
        lambda gt, a: gt.known_gradient({"x": a(V)}, {"x": a(S)}),
        (
            "known_gradient: dx['x'] has shape () and dtype float64, expected (2,) and float64, "
            "those of x['x']. Reshape or cast it."
        ),
    ),
    Bad(
        "known_gradient of another dtype",
        lambda gt, a: gt.known_gradient(a(V), a(F32)),
        (
            "known_gradient: dx has shape (2,) and dtype float32, expected (2,) and float64, those "
            "of x. Reshape or cast it."
        ),
    ),
    Bad(
        "transform_gradient to another tree",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.transform_gradient(x, lambda c: (c, c))))(
            a(V)
        ),
        (
            "transform_gradient: fn returned the structure (*, *), expected *, that of the "
            "cotangent. Return one array for each that fn is given."
        ),
        jax=(
            "transform_gradient: fn returned the structure PyTreeDef((*, *)), expected "
            "PyTreeDef(*), that of the cotangent. Return one array for each that fn is given."
        ),
    ),
    Bad(
        "transform_gradient to another shape",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.transform_gradient(x, gt.xp.sum)))(a(V)),
        (
            "transform_gradient: fn returned leaf 0 with shape () and dtype float64, expected (2,) "
            "and float64, those of the cotangent."
        ),
    ),
    Bad(
        "transform_gradient to nothing",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.transform_gradient(x, lambda c: None)))(a(V)),
        (
            "transform_gradient: fn returned the structure None, expected *, that of the "
            "cotangent. Return one array for each that fn is given."
        ),
        jax=(
            "transform_gradient: fn returned the structure PyTreeDef(None), expected "
            "PyTreeDef(*), that of the cotangent. Return one array for each that fn is given."
        ),
    ),
    Bad(
        "straight_through to another shape",
        lambda gt, a: gt.straight_through(gt.xp.sum)(a(V)),
        (
            "straight_through: leaf 0 of sum has shape (), that of the surrogate (2,); they must "
            "be the same."
        ),
    ),
    Bad(
        "straight_through to another tree",
        lambda gt, a: gt.straight_through(lambda x: (x, x))(a(V)),
        (
            "straight_through: <lambda> returned the structure (*, *), its surrogate *; they must "
            "be the same."
        ),
        jax=(
            "straight_through: <lambda> returned the structure PyTreeDef((*, *)), its "
            "surrogate PyTreeDef(*); they must be the same."
        ),
    ),
    Bad(
        "straight_through of two arguments",
        lambda gt, a: gt.straight_through(lambda x, y: x)(a(V), a(V)),
        (
            "straight_through: <lambda> was called with 2 positional and 0 keyword arguments; "
            "without a surrogate the derivative is that of the identity, which has one argument. "
            "Give a surrogate."
        ),
    ),
    Bad(
        "straight_through, surrogate a number",
        lambda gt, a: gt.straight_through(gt.xp.round, surrogate=3.0),
        "straight_through: surrogate must be a function, got a float.",
    ),
    Bad(
        "dependence of a string",
        lambda gt, a: gt.dependence(lambda x: "done", a(V)),
        ("dependence: f returned a str; it must return arrays. Is a return statement missing?"),
    ),
    Bad(
        "why_zero of a string",
        lambda gt, a: gt.why_zero(lambda x: "done", a(V)),
        ("why_zero: f returned a str; it must return arrays. Is a return statement missing?"),
    ),
    Bad(
        "guard_gradients of a list of strings",
        lambda gt, a: gt.guard_gradients(lambda x: ["a", "b"])(a(V)),
        (
            "guard_gradients: f returned a list of 2; it must return arrays. Is a return "
            "statement missing?"
        ),
    ),
    Bad(
        "gradient_graph of a string beside an array",
        lambda gt, a: gt.gradient_graph(lambda x: (x, "done"), a(V)),
        ("gradient_graph: f returned a str at output[1], expected an array. Return arrays."),
    ),
    Bad(
        "formula of an object beside an array",
        lambda gt, a: gt.formula(lambda x: {"v": x, "w": object()}, a(V)),
        ("formula: f returned an object at output['w'], expected an array. Return arrays."),
    ),
    Bad(
        "frozen, a string returned",
        lambda gt, a: gt.frozen(lambda x: "done")(a(V)),
        ("frozen: the function returned a str at output, expected an array. Return arrays."),
    ),
    Bad(
        "frozen, an object returned beside an array",
        lambda gt, a: gt.frozen(lambda x: (x, object()))(a(V)),
        ("frozen: the function returned an object at output[1], expected an array. Return arrays."),
    ),
    Bad(
        "straight_through to a string",
        lambda gt, a: gt.straight_through(lambda x: "done")(a(V)),
        ("straight_through: <lambda> returned a str at leaf 0, expected an array. Return arrays."),
    ),
    Bad(
        "straight_through, a surrogate that returns a string",
        lambda gt, a: gt.straight_through(gt.xp.round, lambda x: "done")(a(V)),
        (
            "straight_through: the surrogate <lambda> returned a str at leaf 0, expected an "
            "array. Return arrays."
        ),
    ),
    Bad(
        "transform_gradient to a string",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.transform_gradient(x, lambda c: "done")))(
            a(V)
        ),
        ("transform_gradient: fn returned a str at leaf 0, expected an array. Return arrays."),
    ),
    Bad(
        "straight_through to nothing",
        lambda gt, a: gt.straight_through(lambda x: None)(a(V)),
        (
            "straight_through: <lambda> returned the structure None, its surrogate *; they must be "
            "the same."
        ),
        jax=(
            "straight_through: <lambda> returned the structure PyTreeDef(None), its surrogate "
            "PyTreeDef(*); they must be the same."
        ),
    ),
    Bad(
        "forward mode through clip_gradient",
        lambda gt, a: gt.jvp(lambda x: gt.clip_gradient(x, max_norm=1.0), (a(V),), (a(V),)),
        (
            "jvp: f holds a function with a reverse rule only (clip_gradient, transform_gradient, "
            "known_gradient, or a torch.autograd.Function without jvp), which forward mode cannot "
            "enter. Use vjp or grad, or for second derivatives mode='reverse_over_reverse'. "
            "PyTorch says (PLACE): You must implement the jvp function for custom "
            "autograd.Function to use it with forward mode AD."
        ),
        jax=(
            "jvp: f holds a function that has a reverse rule only (clip_gradient, "
            "transform_gradient, known_gradient, or a jax.custom_vjp), which forward mode "
            "cannot enter. Use vjp or grad, or for second derivatives "
            "mode='reverse_over_reverse'. JAX says (PLACE): can't apply forward-mode autodiff "
            "(jvp) to a custom_vjp function."
        ),
    ),
    # --- rules and host functions
    Bad(
        "a rule without fwd",
        lambda gt, a: gt.custom_rule(lambda x: x).defvjp(None, lambda r, c: (c,)),
        "<lambda>.defvjp: fwd must be a function, got None.",
    ),
    Bad(
        "a rule without bwd",
        lambda gt, a: gt.custom_rule(lambda x: x).defvjp(lambda x: (x, x), None),
        "<lambda>.defvjp: bwd must be a function, got None.",
    ),
    Bad(
        "a forward rule that is none",
        lambda gt, a: gt.custom_rule(lambda x: x).defjvp(3.0),
        "<lambda>.defjvp: the rule must be a function, got 3.0.",
    ),
    Bad(
        "static_argnames unknown",
        lambda gt, a: gt.custom_rule(lambda x: x, static_argnames="n"),
        "custom_rule: static_argnames names 'n', but <lambda> has the arguments x.",
    ),
    Bad(
        "a rule that was not given",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.custom_rule(lambda x: x * x)(x)))(a(V)),
        (
            "<lambda> has no rule yet. Give it one with defvjp(fwd, bwd) or defjvp(rule) before it "
            "is called."
        ),
    ),
    Bad(
        "bwd returns no tuple",
        lambda gt, a: pulled(gt, a, lambda x: (x, x), lambda r, c: c),
        (
            "custom_rule <lambda>: bwd returned an array of shape (2,) and dtype float64, expected "
            "a tuple of 1, one cotangent for each argument (x)."
        ),
    ),
    Bad(
        "bwd returns too many",
        lambda gt, a: pulled(gt, a, lambda x: (x, x), lambda r, c: (c, c)),
        (
            "custom_rule <lambda>: bwd returned a tuple of 2, expected a tuple of 1, one cotangent "
            "for each argument (x)."
        ),
    ),
    Bad(
        "bwd returns another shape",
        lambda gt, a: pulled(gt, a, lambda x: (x, x), lambda r, c: (gt.xp.sum(c),)),
        (
            "custom_rule <lambda>: bwd's cotangent of array 0 has shape () and dtype float64, "
            "expected (2,) and float64, those of what it belongs to."
        ),
    ),
    Bad(
        "bwd returns nothing",
        lambda gt, a: pulled(gt, a, lambda x: (x, x), lambda r, c: None),
        (
            "custom_rule <lambda>: bwd returned None, expected a tuple of 1, one cotangent for "
            "each argument (x)."
        ),
    ),
    Bad(
        "fwd returns no pair",
        lambda gt, a: pulled(gt, a, lambda x: x, lambda r, c: (c,)),
        (
            "custom_rule <lambda>: fwd returned an array of shape (2,) and dtype float64, expected "
            "a pair (out, residuals)."
        ),
    ),
    Bad(
        "fwd returns another shape",
        lambda gt, a: pulled(gt, a, lambda x: (gt.xp.sum(x), x), lambda r, c: (c,)),
        (
            "custom_rule <lambda>: fwd returned float64[] for output 0, but the function returns "
            "float64[2]. Its first result must be the function's own output at the same arguments: "
            "fwd(*args) returns (f(*args), residuals); is there a cast, or an axis too many."
        ),
    ),
    Bad(
        "a rule of wrong arguments",
        lambda gt, a: gt.custom_rule(lambda x: x)(a(V), a(V)),
        "custom_rule <lambda>(x): too many positional arguments.",
    ),
    Bad(
        "a rule that closes over an argument",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(ruled(gt, lambda y: y * x)(a(V))))(a(V)),
        (
            "rule '<lambda>' closes over a tensor that is differentiated, or mapped by vmap, "
            "outside of it; that would be lost. Pass the tensor to the function as an argument."
        ),
        jax=(
            "rule '<lambda>' closes over an array with respect to which you differentiate; its "
            "derivative would be lost. Pass that array to the function as an argument."
        ),
    ),
    Bad(
        "a host function without a rule",
        lambda gt, a: gt.grad(lambda x: gt.xp.sum(gt.host_function(np.sin)(x)))(a(V)),
        (
            "host function 'sin' has no rule, so its derivative is unknown. Give it one with "
            "defvjp(fwd, bwd) or defjvp(rule), or stop the gradient of its arguments."
        ),
    ),
    Bad(
        "a kernel that returns another shape",
        lambda gt, a: gt.host_function(np.sum)(a(V)),
        (
            "host function 'sum': result has shape () and dtype float64; expected shape (2,) and "
            "dtype float64. Say what it returns: out=Spec((), 'float64'), or a function of the "
            "arguments' Specs."
        ),
    ),
    Bad(
        "a kernel that returns another dtype",
        lambda gt, a: gt.host_function(lambda x: x.astype(np.float32))(a(V)),
        (
            "host function '<lambda>': result has shape (2,) and dtype float32; expected shape "
            "(2,) and dtype float64. Nothing is cast: return y.astype('float64'), or say "
            "out=Spec((2,), 'float32'). The kernel is at PLACE."
        ),
    ),
    Bad(
        "a kernel that returns nothing",
        lambda gt, a: gt.host_function(lambda x: None)(a(V)),
        (
            "host function '<lambda>': it returned None, expected *, the structure of out. A "
            "kernel returns its result; a routine that fills an array must return that array. "
            "The kernel is at PLACE."
        ),
        jax=(
            "host function '<lambda>': it returned None, expected PyTreeDef(*), the structure of "
            "out. A kernel returns its result; a routine that fills an array must return that "
            "array. The kernel is at PLACE."
        ),
    ),
    Bad(
        "a kernel that returns a string",
        lambda gt, a: gt.host_function(lambda x: "done")(a(V)),
        (
            "host function '<lambda>': result is a str; expected shape (2,) and dtype float64. "
            "Return NumPy arrays. The kernel is at PLACE."
        ),
    ),
    Bad(
        "a kernel that raises",
        lambda gt, a: gt.host_function(lambda x: np.linalg.inv(np.zeros((2, 2))))(a(V)),
        "Singular matrix",
        native="LinAlgError: a kernel's own error comes through",
    ),
    Bad(
        "a kernel that writes its argument",
        lambda gt, a: gt.host_function(lambda x: np.multiply(x, 2, out=x))(a(V)),
        "output array is read-only",
        native="ValueError: NumPy's own, and of its argument",
    ),
    Bad(
        "out that is no Spec",
        lambda gt, a: gt.host_function(np.sin, out=3.0)(a(V)),
        "host function 'sin': out is 3.0; it must be a Spec(shape, dtype).",
    ),
    Bad(
        "a Spec of an unknown dtype",
        lambda gt, a: gt.Spec((2,), "float7"),
        (
            "Spec: dtype is 'float7'; it must name one of bool, int8 to int64, uint8 to uint64, "
            "float16, bfloat16, float32, float64, complex64 and complex128."
        ),
    ),
    Bad(
        "a Spec of a negative shape",
        lambda gt, a: gt.Spec((-1,), "float32"),
        (
            "Spec: shape is (-1,); it must be a tuple of integers that are not negative, such as "
            "(2, 3), or () for a number."
        ),
    ),
    # --- arrays and keys
    Bad(
        "asarray of a string",
        lambda gt, a: gt.asarray("x"),
        (
            "asarray: a str (NumPy reads it as <U1 of shape ()) holds no numbers that PyTorch "
            "could take. Give one array of numbers (for a tree of arrays, call asarray on each "
            "leaf)."
        ),
        jax=(
            "asarray: a str (NumPy reads it as <U1 of shape ()) holds no numbers that JAX "
            "could take. Give one array of numbers (for a tree of arrays, call asarray on each "
            "leaf)."
        ),
    ),
    Bad(
        "asarray of None",
        lambda gt, a: gt.asarray(None),
        (
            "asarray: a NoneType (NumPy reads it as object of shape ()) holds no numbers that "
            "PyTorch could take. Give one array of numbers (for a tree of arrays, call asarray on "
            "each leaf)."
        ),
        jax=(
            "asarray: a NoneType (NumPy reads it as object of shape ()) holds no numbers that "
            "JAX could take. Give one array of numbers (for a tree of arrays, call asarray on "
            "each leaf)."
        ),
    ),
    Bad(
        "asarray of a dict",
        lambda gt, a: gt.asarray({"x": 1.0}),
        (
            "asarray: a dict (NumPy reads it as object of shape ()) holds no numbers that PyTorch "
            "could take. Give one array of numbers (for a tree of arrays, call asarray on each "
            "leaf)."
        ),
        jax=(
            "asarray: a dict (NumPy reads it as object of shape ()) holds no numbers that JAX "
            "could take. Give one array of numbers (for a tree of arrays, call asarray on each "
            "leaf)."
        ),
    ),
    Bad(
        "asarray of ragged lists",
        lambda gt, a: gt.asarray([[1.0], [1.0, 2.0]]),
        (
            "asarray: a list is no array: setting an array element with a sequence. The requested "
            "array has an inhomogeneous shape after 1 dimensions. The detected shape was (2,) + "
            "inhomogeneous part."
        ),
    ),
    Bad(
        "asarray of objects",
        lambda gt, a: gt.asarray(np.array([None])),
        (
            "asarray: an ndarray (NumPy reads it as object of shape (1,)) holds no numbers that "
            "PyTorch could take. Give one array of numbers (for a tree of arrays, call asarray on "
            "each leaf)."
        ),
        jax=(
            "asarray: an ndarray (NumPy reads it as object of shape (1,)) holds no numbers "
            "that JAX could take. Give one array of numbers (for a tree of arrays, call "
            "asarray on each leaf)."
        ),
    ),
    Bad(
        "to_numpy of a string",
        lambda gt, a: gt.to_numpy("x"),
        (
            "to_numpy: a str (NumPy reads it as <U1 of shape ()) holds no numbers that PyTorch "
            "could take. Give one array of numbers (for a tree of arrays, call to_numpy on each "
            "leaf)."
        ),
        jax=(
            "to_numpy: a str (NumPy reads it as <U1 of shape ()) holds no numbers that JAX "
            "could take. Give one array of numbers (for a tree of arrays, call to_numpy on "
            "each leaf)."
        ),
    ),
    Bad(
        "to_numpy under a transform",
        lambda gt, a: gt.vmap(lambda x: gt.to_numpy(x))(a(V)),
        (
            "to_numpy: a Tensor of shape () has no values that NumPy could read (inside torch.func "
            "transforms, torch.compile or on the meta device, or of a sparse layout). Return it "
            "from the transformed function, as an auxiliary output if need be, and convert it "
            "outside, or wrap the NumPy code in host_function; a sparse tensor needs .to_dense()."
        ),
        jax=(
            "to_numpy: an array of shape () has no values that NumPy could read inside jit, "
            "vmap, grad and other transforms. Return it from the transformed function, as an "
            "auxiliary output if need be, and convert it outside, or wrap the NumPy code in "
            "host_function."
        ),
    ),
    Bad(
        "a key from a float",
        lambda gt, a: gt.key(1.5),
        "key: a seed is an integer, got 1.5.",
    ),
    Bad(
        "a key from a string",
        lambda gt, a: gt.key("seed"),
        "key: a seed is an integer, got 'seed'.",
    ),
    Bad(
        "a key beyond 64 bits",
        lambda gt, a: gt.key(2**64),
        "key: a seed fits into 64 bits with its sign, got 18446744073709551616.",
    ),
    Bad(
        "split of no key",
        lambda gt, a: gt.split(a(V)),
        (
            "split: a key is an int64 tensor of shape (2,), made by key(seed) or a row of "
            "split(key, n); got a torch.float64 tensor of shape (2,)."
        ),
        jax=(
            "split: a key is made by key(seed) or is an entry of split(key, n); got float64 of "
            "shape (2,)."
        ),
    ),
    Bad(
        "split into none",
        lambda gt, a: gt.split(gt.key(0), 0),
        "split: n is 0; expected a whole number of keys, 1 or more.",
    ),
    Bad(
        "split into a float",
        lambda gt, a: gt.split(gt.key(0), 2.0),
        "split: n is 2.0; expected a whole number of keys, 1 or more.",
    ),
    # --- accumulating
    Bad(
        "accumulating in an unknown dtype",
        lambda gt, a: gt.GradientAccumulator(dtype="int32"),
        (
            "GradientAccumulator: dtype is 'int32'; expected one of float16, bfloat16, float32, "
            "float64 or None. Complex gradients are added in the complex dtype of that precision."
        ),
    ),
    Bad(
        "a sum of nothing",
        lambda gt, a: gt.GradientAccumulator().sum(),
        (
            "GradientAccumulator.sum: nothing has been added, so there is no sum. Call add(grads) "
            "first."
        ),
    ),
    Bad(
        "a mean of nothing",
        lambda gt, a: gt.GradientAccumulator().mean(),
        (
            "GradientAccumulator.mean: nothing has been added, so there is no mean. Call "
            "add(grads) first."
        ),
    ),
    Bad(
        "accumulating integers",
        lambda gt, a: gt.GradientAccumulator().add(a(N)),
        (
            "GradientAccumulator.add: grads is int64 of shape (2,) on cpu; expected a floating or "
            "complex array. Differentiate with respect to floating arguments only, or put None "
            "there."
        ),
        jax=(
            "GradientAccumulator.add: grads is int64 of shape (2,); expected a floating or "
            "complex array. Differentiate with respect to floating arguments only, or put None "
            "there."
        ),
    ),
    Bad(
        "accumulating a string",
        lambda gt, a: gt.GradientAccumulator().add({"w": "x"}),
        (
            "GradientAccumulator.add: grads['w'] is a str; expected a floating or complex array. "
            "Differentiate with respect to floating arguments only, or put None there."
        ),
    ),
    Bad(
        "accumulating another tree",
        lambda gt, a: added(gt, {"w": a(V)}, {"b": a(V)}),
        (
            "GradientAccumulator.add: grads['b'] is new; came {'b': *}, expected {'w': *}, as in "
            "the first add. Use one accumulator for each model, or call reset() first."
        ),
        jax=(
            "GradientAccumulator.add: grads['b'] is new; came PyTreeDef({'b': *}), expected "
            "PyTreeDef({'w': *}), as in the first add. Use one accumulator for each model, or "
            "call reset() first."
        ),
    ),
    Bad(
        "accumulating another shape",
        lambda gt, a: added(gt, {"w": a(V)}, {"w": a(S)}),
        (
            "GradientAccumulator.add: grads['w'] is float64 of shape () on cpu; expected float64 "
            "of shape (2,) on cpu, as in the first add. Use one accumulator for each model, or "
            "call reset() first."
        ),
        jax=(
            "GradientAccumulator.add: grads['w'] is float64 of shape (); expected float64 of "
            "shape (2,), as in the first add. Use one accumulator for each model, or call "
            "reset() first."
        ),
    ),
    Bad(
        "accumulating another dtype",
        lambda gt, a: added(gt, {"w": a(V)}, {"w": a(F32)}),
        (
            "GradientAccumulator.add: grads['w'] is float32 of shape (2,) on cpu; expected float64 "
            "of shape (2,) on cpu, as in the first add. Use one accumulator for each model, or "
            "call reset() first."
        ),
        jax=(
            "GradientAccumulator.add: grads['w'] is float32 of shape (2,); expected float64 of "
            "shape (2,), as in the first add. Use one accumulator for each model, or call "
            "reset() first."
        ),
    ),
    Bad(
        "a weight that is a string",
        lambda gt, a: gt.GradientAccumulator().add(a(V), weight="two"),
        (
            "GradientAccumulator.add: weight is 'two'; expected a real number or a real array of "
            "shape (). Weights that differ from example to example belong into the loss, before "
            "the gradient is taken."
        ),
    ),
    Bad(
        "a weight that is a vector",
        lambda gt, a: gt.GradientAccumulator().add(a(V), weight=a(V)),
        (
            "GradientAccumulator.add: weight is a Tensor of shape (2,) and dtype torch.float64; "
            "expected a real number or a real array of shape (). Weights that differ from example "
            "to example belong into the loss, before the gradient is taken."
        ),
        jax=(
            "GradientAccumulator.add: weight is a ArrayImpl of shape (2,) and dtype float64; "
            "expected a real number or a real array of shape (). Weights that differ from "
            "example to example belong into the loss, before the gradient is taken."
        ),
    ),
    Bad(
        "a weight that is complex",
        lambda gt, a: gt.GradientAccumulator().add(a(V), weight=1j),
        (
            "GradientAccumulator.add: weight is 1j; expected a real number or a real array of "
            "shape (). Weights that differ from example to example belong into the loss, before "
            "the gradient is taken."
        ),
    ),
    Bad(
        "accumulate_gradients under another name",
        lambda gt, a: gt.accumulate_gradients({"w": target(gt, a)}, {"b": a(V)}),
        (
            "accumulate_gradients: grads['b'] has no place in the target, whose keys there are "
            "'w'. Give gradients under the target's names; some of them may be left out."
        ),
    ),
    Bad(
        "accumulate_gradients of another shape",
        lambda gt, a: gt.accumulate_gradients({"w": target(gt, a)}, {"w": a(S)}),
        (
            "accumulate_gradients: grads['w'] is float64 of shape () on cpu; expected float64 of "
            "shape (2,) on cpu, as the parameter. Reduce it over the batch first, or give it under "
            "another name."
        ),
        jax=(
            "accumulate_gradients: grads['w'] is float64 of shape (); expected float64 of "
            "shape (2,), as the buffer. Reduce it over the batch first, or give it under "
            "another name."
        ),
    ),
    Bad(
        "accumulate_gradients of another dtype",
        lambda gt, a: gt.accumulate_gradients({"w": target(gt, a)}, {"w": a(F32)}),
        (
            "accumulate_gradients: grads['w'] is float32 of shape (2,) on cpu; expected float64 of "
            "shape (2,) on cpu, as the parameter. Convert it with .to(torch.float64), or set the "
            "parameter's grad_dtype."
        ),
        jax=(
            "accumulate_gradients: grads['w'] is float32 of shape (2,); expected float64 of "
            "shape (2,), as the buffer. Convert it to the buffer's dtype, or start the buffer "
            "with None."
        ),
    ),
    Bad(
        "accumulate_gradients of too many",
        lambda gt, a: gt.accumulate_gradients([target(gt, a)], [a(V), a(V)]),
        (
            "accumulate_gradients: grads is a list of 2; expected a sequence of 1 (None leaves an "
            "entry alone). Give the gradients the target's structure."
        ),
    ),
    Bad(
        "accumulate_gradients of a string",
        lambda gt, a: gt.accumulate_gradients([target(gt, a)], ["x"]),
        ("accumulate_gradients: grads[0] is a str; expected a tensor. Convert it: asarray."),
        jax=(
            "accumulate_gradients: grads[0] is a str; expected a floating or complex array. "
            "Leave what has no gradient out of grads, or put None there."
        ),
    ),
    Bad(
        "accumulate_gradients into a string",
        lambda gt, a: gt.accumulate_gradients(["x"], [a(V)]),
        ("accumulate_gradients: target[0] is a str; expected a leaf tensor. Give parameters."),
        jax=(
            "accumulate_gradients: target[0] is a str; expected a floating or complex array. "
            "Leave what has no gradient out of grads, or put None there."
        ),
    ),
    Bad(
        "assign_gradients of another tree",
        lambda gt, a: gt.assign_gradients({"w": target(gt, a)}, a(V)),
        (
            "assign_gradients: grads is a Tensor; expected a dict with keys among 'w'. Give the "
            "gradients the target's structure."
        ),
        jax=(
            "assign_gradients: grads is a ArrayImpl; expected a dict with keys among 'w'. Give "
            "the gradients the target's structure."
        ),
    ),
    Bad(
        "assign_gradients into integers",
        lambda gt, a: gt.assign_gradients([a(N)], [a(V)]),
        (
            "assign_gradients: target[0] has requires_grad=False; expected a tensor that requires "
            "grad. Call requires_grad_() on the real parameter (functionalize hands out detached "
            "aliases, which are not it), or leave its name out of grads."
        ),
        jax=(
            "assign_gradients: target[0] is int64 of shape (2,); expected a floating or "
            "complex array. Leave what has no gradient out of grads, or put None there."
        ),
    ),
    # --- models
    Bad(
        "functionalize of a number",
        lambda gt, a: gt.functionalize(3),
        ("functionalize: got a builtins.int; the PyTorch backend accepts a torch.nn.Module."),
        jax=(
            "functionalize: got a builtins.int; the JAX backend accepts a flax.linen, flax.nnx "
            "or equinox Module, what haiku's transform gives, and a Keras model."
        ),
    ),
    Bad(
        "functionalize of a function",
        lambda gt, a: gt.functionalize(lambda x: x),
        ("functionalize: got a builtins.function; the PyTorch backend accepts a torch.nn.Module."),
        jax=(
            "functionalize: got a builtins.function; the JAX backend accepts a flax.linen, "
            "flax.nnx or equinox Module, what haiku's transform gives, and a Keras model."
        ),
    ),
    Bad(
        "gather without anything",
        lambda gt, a: gt.gather(a(V)),
        (
            "gather: there is no process group. Call torch.distributed.init_process_group first; a "
            "single process has all rows already."
        ),
        jax=(
            "gather: axis_name is missing; expected the mapped axis, or a tuple of them, that "
            "shard_map, vmap or pmap gave its name to."
        ),
    ),
    Bad(
        "gather of the other framework",
        lambda gt, a: gt.gather(a(V), **other_gather(gt)),
        "gather: axis_name belongs to JAX; in PyTorch give a process group, or nothing.",
        jax="gather: group is PyTorch's; in JAX name a mapped axis, axis_name.",
    ),
    # --- seeing
    Bad(
        "why_zero along an argument that is not there",
        lambda gt, a: gt.why_zero(total(gt), a(V), wrt=1),
        (
            "why_zero: wrt holds 1, but f was called with 1 positional argument (0 to 0). Keyword "
            "arguments are not differentiated; pass what is to be differentiated by position."
        ),
    ),
    Bad(
        "why_zero along integers",
        lambda gt, a: gt.why_zero(total(gt), a(N)),
        (
            "why_zero: argument 0 is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that wrt does not name."
        ),
    ),
    Bad(
        "why_zero of nothing",
        lambda gt, a: gt.why_zero(lambda x: None, a(V)),
        ("why_zero: f returned None; it must return arrays. Is a return statement missing?"),
    ),
    Bad(
        "why_zero of a function that raises",
        lambda gt, a: gt.why_zero(lambda x: x["w"], a(V)),
        (
            "why_zero: f raised TypeError: new(): invalid data type 'str' (PLACE). It must run at "
            "the arguments at which it is looked at."
        ),
        jax=(
            "why_zero: f raised TypeError: JAX does not support string indexing; got idx='w' "
            "(PLACE). It must run at the arguments at which it is looked at."
        ),
    ),
    Bad(
        "dependence of nothing",
        lambda gt, a: gt.dependence(lambda x: None, a(V)),
        ("dependence: f returned None; it must return arrays. Is a return statement missing?"),
    ),
    Bad(
        "guard_gradients beyond",
        lambda gt, a: gt.guard_gradients(total(gt), argnums=1)(a(V)),
        (
            "guard_gradients: argnums holds 1, but f was called with 1 positional argument (0 to "
            "0). Keyword arguments are not differentiated; pass what is to be differentiated by "
            "position."
        ),
    ),
    Bad(
        "gradient_graph of order 3",
        lambda gt, a: gt.gradient_graph(total(gt), a(V), order=3),
        (
            "gradient_graph: order is 3; expected 0 (forward), 1 (with backward) or 2 (with "
            "backward of the backward)."
        ),
    ),
    Bad(
        "gradient_graph along integers",
        lambda gt, a: gt.gradient_graph(total(gt), a(N)),
        (
            "gradient_graph: argument 0 is an array of dtype int64 and shape (2,); what is "
            "differentiated must be a floating or complex array. Cast it, or keep it in an "
            "argument that wrt does not name."
        ),
    ),
    Bad(
        "gradient_graph of nothing",
        lambda gt, a: gt.gradient_graph(lambda x: None, a(V)),
        ("gradient_graph: f returned None; it must return arrays. Is a return statement missing?"),
    ),
    Bad(
        "graph_diff of no graphs",
        lambda gt, a: gt.graph_diff(1, 2),
        ("graph_diff: a must be a Graph, got int. Mend: pass gradient_graph(f, *args) of each."),
    ),
    Bad(
        "formula of order 3",
        lambda gt, a: gt.formula(total(gt), a(V), order=3),
        "formula: order is 3; expected 1, or 2 with the double backward.",
    ),
    Bad(
        "formula of nothing",
        lambda gt, a: gt.formula(lambda x: None, a(V)),
        ("formula: f returned None; it must return arrays. Is a return statement missing?"),
    ),
    Bad(
        "formula along integers",
        lambda gt, a: gt.formula(total(gt), a(N)),
        (
            "formula: argument 0 is an array of dtype int64 and shape (2,); what is differentiated "
            "must be a floating or complex array. Cast it, or keep it in an argument that wrt does "
            "not name."
        ),
    ),
    Bad(
        "microbatched with complex weights",
        lambda gt, a: gt.microbatched(lambda w, x: w @ x[0], 1, weights=[1j, 1.0])(a(V), a([V, V])),
        "microbatched: weights is complex; expected real numbers.",
    ),
    Bad(
        "microbatched with a function of weights that returns nothing",
        lambda gt, a: gt.microbatched(lambda w, x: w @ x[0], 1, weights=lambda w, x: None)(
            a(V), a([V, V])
        ),
        "microbatched: the function of weights returned None; expected one real number, the "
        "weight of its chunk.",
    ),
    Bad(
        "microbatched with a function of weights that returns a complex number",
        lambda gt, a: gt.microbatched(lambda w, x: w @ x[0], 1, weights=lambda w, x: 1j)(
            a(V), a([V, V])
        ),
        "microbatched: the function of weights returned a complex; expected one real number, the "
        "weight of its chunk.",
    ),
    Bad(
        "microbatched with a string for weights",
        lambda gt, a: gt.microbatched(lambda w, x: w @ x[0], 1, weights="x")(a(V), a([V, V])),
        "microbatched: weights is a str; expected an array of numbers.",
    ),
    Bad(
        "known_gradient of a string",
        lambda gt, a: gt.known_gradient(a(V), "x"),
        "known_gradient: dx is a str; expected an array of numbers.",
    ),
    Bad(
        "chunked with a key that is not there",
        lambda gt, a: gt.chunked(total(gt), 1, key_argnums=5)(a(V)),
        "chunked: key_argnums holds 5, but f was called with 1 positional argument (0 to 0). "
        "Keyword arguments are no such arguments; pass by position what it names.",
    ),
    Bad(
        "clip_gradient with a bound for each entry",
        lambda gt, a: gt.clip_gradient(a(V), max_norm=a(V)),
        "clip_gradient: max_norm is an array of shape (2,) and dtype float64; it must be a real "
        "number, or an array of shape () that holds one.",
    ),
    Bad(
        "custom_rule with a number for names",
        lambda gt, a: gt.custom_rule(total(gt), static_argnames=3),
        "custom_rule: static_argnames is 3; expected an argument's name, or a tuple of names.",
    ),
    Bad(
        "a key of floats",
        lambda gt, a: gt.key(a(V)),
        "key: a seed is an integer, got tensor([1., 2.], dtype=torch.float64).",
        jax="key: a seed is an integer, got an array of shape (2,) and dtype float64. Of several, "
        "vmap key.",
    ),
    Bad(
        "measure of a function that raises",
        lambda gt, a: gt.measure(lambda x: x["w"], a(V)),
        "new(): invalid data type 'str'",
        jax="JAX does not support string indexing; got idx='w'",
        native="TypeError: what f raises comes through",
    ),
)
