"""Tests that three composed operators return equal numbers or raise an error in both frameworks.

A composition is drawn once and run in both frameworks, and the two results are compared. Every
operator maps a function of a vector to another function of a vector.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from gradtools import GradtoolsError

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")

DRAWN = np.random.default_rng(7)
SEED, TANGENT, COTANGENT, SLOPE, START = (DRAWN.normal(size=3) for _ in range(5))
ROWS = DRAWN.normal(size=(4, 3))
COUNT, QUICK, SLOW = 500, 12, 60
# Error messages for functions without forward mode. It is not a failure if only one framework
# raises one of these errors.
REVERSE_ONLY = ("reverse rule only", "jax.custom_vjp")
# The relative tolerance, which is larger than the rounding errors of the compositions.
CLOSE = 1e-9


def start(gt):
    """Return the functions to which compositions of operators are applied."""
    xp, w = gt.xp, gt.asarray(np.outer(SEED, SLOPE) + np.eye(3))
    return {
        "waves": lambda x: xp.sin(x) * xp.exp(-x * x / 4) + xp.sum(x * x) * x / (1 + xp.sum(x * x)),
        "layer": lambda x: xp.tanh(x @ w) + x**3 / (2 + x * x),
    }


def operators(gt):
    """Return each operator as a map between functions of a vector."""
    xp, rows = gt.xp, gt.asarray(ROWS)
    seed, t, ct, slope = (gt.asarray(v) for v in (SEED, TANGENT, COTANGENT, SLOPE))
    weigh = lambda f: lambda x: xp.sum(seed * f(x))
    of_examples = lambda f: lambda p, row: xp.sum(f(p * row))

    def reverse_rule(f):
        rule = gt.custom_rule(lambda x: f(x))
        rule.defvjp(lambda x: (f(x), x), lambda x, ct: (gt.vjp(f, x)[1](ct)[0],))
        return rule

    def forward_rule(f):
        rule = gt.custom_rule(lambda x: f(x))
        rule.defjvp(lambda primals, tangents: gt.jvp(f, primals, tangents))
        return rule

    def game(f):
        loss = lambda a, b: xp.sum(f(a) * xp.cos(b))
        return lambda x: sum(gt.minimax_value_and_grad(loss, 0, 1)(x, x)[1])

    def example_grads(f, **options):
        return lambda x: xp.mean(gt.per_example_grad(of_examples(f), **options)(x, rows), axis=0)

    def microbatched(f):
        loss = lambda p, part: xp.mean(gt.vmap(lambda row: xp.sum(f(p * row)))(part))
        return lambda x: gt.microbatched_value_and_grad(loss, 3)(x, rows)[1]

    def scaled_grad(f):
        run = gt.value_and_grad(weigh(f))
        return lambda x: (lambda value, grads: value * grads)(*run(x))

    return {
        "grad": lambda f: gt.grad(weigh(f)),
        "grad, forward over reverse": lambda f: gt.grad(weigh(f), mode="forward_over_reverse"),
        "value_and_grad": scaled_grad,
        "vjp": lambda f: lambda x: gt.vjp(f, x)[1](ct)[0],
        "jvp": lambda f: lambda x: gt.jvp(f, (x,), (t,))[1],
        "jvp along x": lambda f: lambda x: gt.jvp(f, (x,), (x,))[1],
        "linearize": lambda f: lambda x: gt.linearize(f, x)[1](t),
        "hvp": lambda f: lambda x: gt.hvp(weigh(f), (x,), (t,))[1][0],
        "hvp, forward over reverse": lambda f: (
            lambda x: gt.hvp(weigh(f), (x,), (t,), mode="forward_over_reverse")[1][0]
        ),
        "jacobian": lambda f: lambda x: gt.jacobian(f)(x) @ t,
        "jacobian, forward": lambda f: lambda x: gt.jacobian(f, mode="forward")(x) @ t,
        "hessian": lambda f: lambda x: gt.hessian(weigh(f))(x) @ t,
        "per_example_grad": example_grads,
        "per_example_grad, one by one": lambda f: example_grads(f, chunk_size=1),
        "minimax": game,
        "mixed_partial": lambda f: (
            lambda x: gt.mixed_partial(lambda y, g: xp.sum(y * g**2), f, x, x, t)
        ),
        "vmap": lambda f: lambda x: xp.mean(gt.vmap(f)(x * rows), axis=0),
        "chunked": lambda f: lambda x: xp.sum(gt.chunked(gt.vmap(f), 2)(x * rows), axis=0),
        "microbatched": microbatched,
        "checkpoint": gt.checkpoint,
        "frozen": gt.frozen,
        "reverse": lambda f: lambda x: f(gt.reverse_gradient(x, 0.5)),
        "scale": lambda f: lambda x: f(gt.scale_gradient(x, 1.5)),
        "stop": lambda f: lambda x: f(x) * gt.stop_gradient(f(x)) + f(x),
        "clip": lambda f: lambda x: gt.clip_gradient(f(x), max_norm=0.7),
        "clip by value": lambda f: lambda x: f(gt.clip_gradient(x, max_value=0.3)),
        "transform": lambda f: lambda x: f(gt.transform_gradient(x, lambda g: 2 * g + g**2 / 9)),
        "replace": lambda f: lambda x: f(gt.replace_gradient(x, slope)),
        "straight_through": lambda f: gt.straight_through(lambda x: xp.round(f(x)), f),
        "reverse rule": reverse_rule,
        "forward rule": forward_rule,
    }


NAMES = [*operators(__import__("gradtools.torch").torch)]
OUTER = ("value", "grad", "torch.func.grad or jax.grad", "autograd.grad or jit(jax.grad)")


@dataclass(frozen=True)
class Composition:
    """A start function, operators from the innermost to the outermost, and the final quantity."""

    begins: str
    names: tuple[str, ...]
    outer: str

    def __str__(self):
        return f"{self.outer} of {' of '.join(reversed(self.names))} of {self.begins}"


def drawn():
    draw = random.Random(0)
    for number in range(COUNT):
        names = tuple(draw.choice(NAMES) for _ in range(3))
        of = Composition(draw.choice(["waves", "layer"]), names, draw.choice(OUTER))
        marks = [] if number < QUICK else [pytest.mark.slow if number < SLOW else pytest.mark.sweep]
        yield pytest.param(of, id=f"{number}", marks=marks)


def computed(gt, of):
    """Return the array that one framework computes, or the error that gradtools raises."""
    f, x, xp = start(gt)[of.begins], gt.asarray(START / 2), gt.xp
    for name in of.names:
        f = operators(gt)[name](f)
    loss = lambda x: xp.sum(f(x) * gt.asarray(SEED))
    native = {"torch": torch.func.grad, "jax": jax.grad}[gt.__name__.rpartition(".")[2]]
    try:
        if of.outer == "value":
            return gt.to_numpy(f(x))
        if of.outer == "grad":
            return gt.to_numpy(gt.grad(loss)(x))
        if of.outer == OUTER[2]:
            return gt.to_numpy(native(loss)(x))
        if native is jax.grad:
            return gt.to_numpy(jax.jit(jax.grad(loss))(x))
        x = x.requires_grad_()
        value = loss(x)
        # a gradient that `replace` edits is a constant, which has no autograd graph
        if not value.requires_grad:
            return np.zeros(3)
        return gt.to_numpy(torch.autograd.grad(value, x)[0])
    except GradtoolsError as error:
        return error
    except TypeError as error:  # the error that JAX raises inside of its own transform
        if "to a custom_vjp function" not in str(error):
            raise
        return GradtoolsError(f"{REVERSE_ONLY[0]}: {error}")


@pytest.mark.slow_at("3", "7")
@pytest.mark.parametrize("of", [*drawn()])
def test_both_frameworks_give_the_same_number_or_both_refuse(of):
    import gradtools.jax
    import gradtools.torch

    ours, theirs = computed(gradtools.torch, of), computed(gradtools.jax, of)
    refused = [isinstance(x, GradtoolsError) for x in (ours, theirs)]
    if any(refused):
        reverse_only = any(words in f"{ours} {theirs}" for words in REVERSE_ONLY)
        assert all(refused) or reverse_only, (str(of), ours, theirs)
        return
    scale = max(1e-6, float(np.max(np.abs(theirs))))
    assert np.max(np.abs(ours - theirs)) < CLOSE * scale, (str(of), ours, theirs)
