"""Every operator raises an error for an array of the other framework, in both directions.

A framework treats an array of the other framework as a constant, so a gradient edit of the array
would have no effect.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import torch

import gradtools.jax
import gradtools.torch
from gradtools import GradtoolsError

WINGS = {
    "torch": (gradtools.torch, lambda: torch.ones(4), lambda: jnp.ones(4)),
    "jax": (gradtools.jax, lambda: jnp.ones(4), lambda: torch.ones(4)),
}
total = lambda x: x.sum()
same = lambda x: x
product = lambda a, b: (a * b).sum()


def rule(gt, **maps):
    f = gt.custom_rule(lambda x: 2 * x)
    if maps.get("forward"):
        f.defjvp(lambda p, t: (2 * p[0], 2 * t[0]))
    else:
        f.defvjp(lambda x: (2 * x, None), lambda _, c: (2 * c,))
    return f


def host(gt):
    return gt.host_function(lambda x: 2 * x)


def accumulated(gt, x, weight=1):
    gt.GradientAccumulator().add({"w": x}, weight)


def target(own):
    return {"w": own.clone().requires_grad_() if isinstance(own, torch.Tensor) else own}


def layer(own):
    """Return `apply`, params and state of a small module in the framework of the array `own`."""
    if isinstance(own, torch.Tensor):
        return gradtools.torch.make_functional(torch.nn.Sequential(torch.nn.Flatten(0)))
    model = nn.LayerNorm()
    return gradtools.jax.make_functional(model, variables=model.init(jax.random.key(0), own))


def applied(own, x):
    apply, params, state = layer(own)
    return apply(params, state, x)


CALLS = {
    "reverse_gradient": lambda gt, own, x: gt.reverse_gradient({"a": [own, x]}),
    "reverse_gradient, scale": lambda gt, own, x: gt.reverse_gradient(own, x),
    "scale_gradient": lambda gt, own, x: gt.scale_gradient(x, 2.0),
    "scale_gradient, scale": lambda gt, own, x: gt.scale_gradient(own, x[0]),
    "stop_gradient": lambda gt, own, x: gt.stop_gradient([x]),
    "clip_gradient": lambda gt, own, x: gt.clip_gradient((own, x), max_norm=1.0),
    "clip_gradient, bound": lambda gt, own, x: gt.clip_gradient(own, max_value=x[0]),
    "transform_gradient": lambda gt, own, x: gt.transform_gradient(x, same),
    "transform_gradient, result": lambda gt, own, x: gt.grad(
        lambda y: gt.transform_gradient(y, lambda c: x).sum()
    )(own),
    "replace_gradient": lambda gt, own, x: gt.replace_gradient(x, x),
    "replace_gradient, dx": lambda gt, own, x: gt.replace_gradient(own, x),
    "straight_through": lambda gt, own, x: gt.straight_through(same)(x),
    "straight_through, f": lambda gt, own, x: gt.straight_through(lambda _: x)(own),
    "straight_through, surrogate": lambda gt, own, x: gt.straight_through(same, lambda _: x)(own),
    "grad": lambda gt, own, x: gt.grad(total)(x),
    "grad, other argument": lambda gt, own, x: gt.grad(lambda a, b: a.sum())(own, x),
    "grad, keyword": lambda gt, own, x: gt.grad(lambda a, b: a.sum())(own, b=[x]),
    "grad, aux": lambda gt, own, x: gt.grad(lambda a: (a.sum(), x), has_aux=True)(own),
    "grad, output": lambda gt, own, x: gt.grad(lambda a: x.sum())(own),
    "value_and_grad": lambda gt, own, x: gt.value_and_grad(lambda p: p["w"].sum())({"w": x}),
    "vjp": lambda gt, own, x: gt.vjp(total, x),
    "vjp, cotangent": lambda gt, own, x: gt.vjp(lambda a: 2 * a, own)[1](x),
    "jvp": lambda gt, own, x: gt.jvp(total, (x,), (x,)),
    "jvp, tangent": lambda gt, own, x: gt.jvp(total, (own,), (x,)),
    "linearize": lambda gt, own, x: gt.linearize(total, x),
    "linearize, tangent": lambda gt, own, x: gt.linearize(total, own)[1](x),
    "jacobian": lambda gt, own, x: gt.jacobian(total)(x),
    "hvp": lambda gt, own, x: gt.hvp(total, (x,), (own,)),
    "hvp, tangent": lambda gt, own, x: gt.hvp(total, (own,), (x,)),
    "hessian": lambda gt, own, x: gt.hessian(total)(x),
    "per_example_grad": lambda gt, own, x: gt.per_example_grad(product)(own, x),
    "per_example_grad, shared": lambda gt, own, x: gt.per_example_grad(product)(x, own),
    "mixed_partial": lambda gt, own, x: gt.mixed_partial(product, same, own, x, own),
    "mixed_partial, direction": lambda gt, own, x: gt.mixed_partial(product, same, own, own, x),
    "minimax_value_and_grad": lambda gt, own, x: gt.minimax_value_and_grad(product, 0, 1)(own, x),
    "custom_rule, vjp": lambda gt, own, x: rule(gt)(x),
    "custom_rule, jvp": lambda gt, own, x: rule(gt, forward=True)([x][0]),
    "host_function": lambda gt, own, x: host(gt)(x),
    "frozen": lambda gt, own, x: gt.frozen(lambda a, b: a)(own, x),
    "chunked": lambda gt, own, x: gt.chunked(same, 2)(x),
    "chunked, shared": lambda gt, own, x: gt.chunked(lambda a, b: a, 2, in_axes=(0, None))(own, x),
    "microbatched_value_and_grad": lambda gt, own, x: gt.microbatched_value_and_grad(product, 4)(
        own, x
    ),
    "checkpoint": lambda gt, own, x: gt.checkpoint(same)(x),
    "GradientAccumulator": lambda gt, own, x: accumulated(gt, x),
    "GradientAccumulator, weight": lambda gt, own, x: accumulated(gt, own, x[0]),
    "accumulate_gradients": lambda gt, own, x: gt.accumulate_gradients(target(own), {"w": x}),
    "accumulate_gradients, target": lambda gt, own, x: gt.accumulate_gradients({"w": x}, target(x)),
    "assign_gradients": lambda gt, own, x: gt.assign_gradients(target(own), {"w": x}),
    "make_functional": lambda gt, own, x: applied(own, x),
    "implicit_solution": lambda gt, own, x: gt.implicit_solution(lambda z, t: z - t, same)(x),
    "retain_gradient, unused": lambda gt, own, x: gt.retain_gradient({"a": x}, "x"),
    "retain_gradient": lambda gt, own, x: gt.retained_gradients(
        lambda y: (gt.retain_gradient(x, "x") is x) * y.sum()
    )(own),
    "retained_gradients": lambda gt, own, x: gt.retained_gradients(total)(x),
    "why_zero": lambda gt, own, x: gt.why_zero(total, x),
    "gradient_graph": lambda gt, own, x: gt.gradient_graph(total, x),
    "formula": lambda gt, own, x: gt.formula(total, x),
}
# Functions excluded from the test: the framework's own functions, errors, conversions, functions
# without array arguments, and functions that need a process group.
OTHERS = {"vmap", "compile", "random_key", "split_key", "asarray", "to_numpy", "xp", "ArraySpec"}
OTHERS |= {"is_recomputing", "all_gather"}


@pytest.mark.parametrize("wing", WINGS)
@pytest.mark.parametrize("name", CALLS)
def test_an_array_of_the_other_framework_is_refused_by_name(wing, name):
    gt, own, other = WINGS[wing]
    kind = {"torch": "jax.Array", "jax": "torch.Tensor"}[wing]
    with pytest.raises(GradtoolsError, match=rf"gradtools\.{wing} was given a {kind} of shape"):
        CALLS[name](gt, own(), other())


def test_every_public_name_has_such_a_call():
    named = {name.partition(",")[0] for name in CALLS}
    assert set(gradtools.torch.__all__) <= named | OTHERS


@dataclass
class Batch:
    x: object
    note: str = "a note"


@pytest.mark.parametrize("wing", WINGS)
@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (lambda a, x: {"a": [a, x]}, r"\['a'\]\[1\]"),
        (lambda a, x: (a, Batch(x)), r"\[1\]\.x"),
        (lambda a, x: [UserDict({"k": {"l": x}})], r"\[0\]\['k'\]\['l'\]"),
    ],
)
def test_the_error_names_the_leaf(wing, tree, path):
    gt, own, other = WINGS[wing]
    with pytest.raises(GradtoolsError, match=path):
        gt.reverse_gradient(tree(own(), other()))


def test_an_array_of_jax_inside_jit_is_refused_too():
    with pytest.raises(GradtoolsError, match=r"given a jax.Array of shape \(3,\)"):
        jax.jit(jax.grad(lambda x: gradtools.torch.reverse_gradient(x).sum()))(jnp.ones(3))


@pytest.mark.parametrize("operator", ["accumulate_gradients", "assign_gradients"])
def test_a_target_or_gradient_of_the_other_framework_is_named(operator):
    net = torch.nn.Linear(3, 1)
    writes = getattr(gradtools.torch, operator)
    with pytest.raises(GradtoolsError, match=rf"a jax.Array .*, grads\['bias'\] of {operator}\."):
        writes(net, {"bias": jnp.ones(1)})
    with pytest.raises(
        GradtoolsError, match=rf"^{operator}: target is a generator; .*list\(module"
    ):
        writes(net.parameters(), [None, torch.ones(1)])
    writes = getattr(gradtools.jax, operator)
    with pytest.raises(
        GradtoolsError, match=rf"^{operator}: target is .*Linear; .*gradtools.torch"
    ):
        writes(net, {"bias": jnp.ones(1)})
