"""Formulas, graphs and why_zero show each bridged function as one operation with its own name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools import bridge
from tests.support.costs import cost

MATRIX = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)


def cut_in_torch(t):
    return (torch.tanh(t).detach() ** 2).sum()


def cut_in_jax(x):
    return (jax.lax.stop_gradient(jnp.tanh(x)) ** 2).sum()


def through_jax(f):
    return gj, lambda x: bridge.to_jax(f)(2 * x)


def through_torch(f):
    return gt, lambda x: bridge.to_torch(f)(2 * x)


@pytest.mark.parametrize("own_and_f", [through_jax(cut_in_torch), through_torch(cut_in_jax)])
def test_what_is_lost_inside_is_told_at_the_call_by_the_functions_name(own_and_f):
    own, f = own_and_f
    (finding,) = own.why_zero(f, own.asarray(MATRIX)).findings
    assert finding.kind == "bridged" and finding.operation.startswith("cut_in_")
    assert finding.source.file == __file__
    assert finding.fix.startswith("call why_zero of this framework on the original function")


@pytest.mark.parametrize(("other", "f"), [(gt, cut_in_torch), (gj, cut_in_jax)])
def test_why_zero_of_the_original_function_names_the_line(other, f):
    (finding,) = other.why_zero(f, other.asarray(MATRIX)).findings
    assert (finding.kind, finding.source.function) == ("detached", f.__name__)


def argmax_in_torch(t):
    return torch.argmax(t).int()


@pytest.mark.parametrize("own_and_f", [through_jax(argmax_in_torch), through_torch(jnp.argmax)])
def test_an_integer_of_a_bridged_function_is_lost_inside_the_function(own_and_f):
    own, f = own_and_f
    loss = lambda x: (x * x).sum() + f(x) * own.asarray(np.float32(2))
    (finding,) = own.why_zero(loss, own.asarray(MATRIX)).findings
    assert (finding.kind, finding.whole) == ("bridged", False)
    assert "argmax" in finding.operation


def square_in_torch(t):
    return (t * t).sum()


def square_in_jax(x):
    return (x * x).sum()


HEALTHY = [through_jax(square_in_torch), through_torch(square_in_jax)]


@pytest.mark.parametrize("own_and_f", HEALTHY)
def test_a_bridged_function_is_one_operation_and_no_loss(own_and_f):
    own, f = own_and_f
    x = own.asarray(MATRIX)
    assert not own.why_zero(f, x)
    nodes = own.gradient_graph(f, x).nodes
    assert [node.mark == "custom rule" for node in nodes] == [False, True, True, False]


def test_a_round_trip_that_was_first_met_beneath_an_operation_of_pytorchs_has_its_gradient():
    # PyTorch's autograd is disabled inside of an operation, and JAX reuses the trace of the first
    # call in all later calls.
    f = bridge.to_torch(lambda a: bridge.to_jax(square_in_torch)(a) * 3)
    x = torch.from_numpy(MATRIX).requires_grad_()
    cost(gt, gt.grad(f), x)
    (found,) = torch.autograd.grad(f(x), x)
    torch.testing.assert_close(found, 6 * x)


# --- bridged functions in formulas -------------------------------------------------------

WEIGHTS = torch.linspace(-1, 1, 6).reshape(3, 2)
KERNEL = jnp.asarray(WEIGHTS.numpy())


def layer_in_torch(x):
    return torch.tanh(x @ WEIGHTS)


def layer_in_jax(x):
    return jnp.tanh(x @ KERNEL)


LAYERS = [(gj, bridge.to_jax(layer_in_torch)), (gt, bridge.to_torch(layer_in_jax))]


@pytest.mark.sweep_at("gradtools.torch-layer_in_jax", "2")
@pytest.mark.parametrize(("own", "layer"), LAYERS)
@pytest.mark.parametrize("order", [1, 2])
def test_a_bridged_function_is_written_by_its_name_in_a_formula(own, layer, order):
    x = own.asarray(MATRIX)
    found = own.formula(lambda x: (layer(2 * x) ** 2).sum() * x.sum(), x, order=order)
    (name,) = found.marked
    assert name.startswith("layer_in_") and f"{name}(2 x)" in str(found)
    assert found.check.error < 1e-3


def test_a_rule_around_a_bridged_function_is_differentiated_by_the_rule_in_a_formula():
    bridged = bridge.to_torch(lambda a: a * a)
    rule = gt.custom_rule(lambda x: bridged(x))
    rule.defvjp(lambda x: (rule(x), (x,)), lambda saved, c: (5 * c * saved[0],))
    found = gt.formula(lambda x: rule(x), torch.ones(3))
    assert found.agrees_with(lambda x, c: 5 * c * x)
    assert not found.agrees_with(lambda x, c: 2 * c * x)
