"""Compares operations and saved bytes of custom rules and of handwritten autograd.Functions."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import gradtools.torch as gt
from tests.support.torch_counts import operations


def saved(run, but=()):
    """Return the bytes of all storages saved for backward, except the storages of `but`."""
    held = {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    for x in but:
        held.pop(x.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in held.values())


# --- rules and autograd.Functions of the same formulas -----------------------------------


class Given(NamedTuple):
    value: object
    fwd: object
    bwd: object
    jvp: object
    by_hand: object


class SinhFunction(torch.autograd.Function):
    """A Function with correct second derivatives, because saved intermediates are also outputs."""

    @staticmethod
    def forward(x):
        e, i = torch.exp(x), torch.exp(-x)
        return (e - i) / 2, e, i

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, ct, of_e, of_i):
        e, i = ctx.saved_tensors
        terms = [] if ct is None else [ct * (e + i) / 2]
        if of_e is not None:
            terms += [of_e * e, -of_i * i]
        return sum(terms[1:], terms[0])


class LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(w, x):
        return torch.tanh(w @ x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, ct):
        return layer_bwd(ctx.saved_tensors, ct)


def layer_fwd(w, x):
    y = torch.tanh(w @ x)
    return y, (w, x, y)


def layer_bwd(res, ct):
    w, x, y = res
    slope = ct * (1 - y * y)
    return slope @ x.T, w.T @ slope


def layer_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = torch.tanh(w @ x)
    return y, (1 - y * y) * (dw @ x + w @ dx)


def sinh_fwd(x):
    e, i = torch.exp(x), torch.exp(-x)
    return (e - i) / 2, (e, i)


def sinh_jvp(primals, tangents):
    y, (e, i) = sinh_fwd(primals[0])
    return y, tangents[0] * (e + i) / 2


RULES = {
    "sinh": Given(
        lambda x: sinh_fwd(x)[0],
        sinh_fwd,
        lambda r, ct: (ct * (r[0] + r[1]) / 2,),
        sinh_jvp,
        lambda x: SinhFunction.apply(x)[0],
    ),
    "layer": Given(
        lambda w, x: layer_fwd(w, x)[0], layer_fwd, layer_bwd, layer_jvp, LayerFunction.apply
    ),
}
GIVEN = pytest.mark.parametrize("given", ["vjp", "vjp and jvp"])


def own(name, given):
    rule = RULES[name]
    f = gt.custom_rule(rule.value)
    if "vjp" in given:
        f.defvjp(rule.fwd, rule.bwd)
    if "jvp" in given:
        f.defjvp(rule.jvp)
    return f


def arguments(name):
    sizes = [(32, 32), (32, 8)] if name == "layer" else [(1000,)]
    return [torch.randn(size, requires_grad=True) for size in sizes]


def counted(count, f, xs):
    """Apply `count` to runs of the value, the gradient and the second derivative."""
    y = f(*xs)
    ct = torch.ones_like(y)
    first = torch.autograd.grad(y, xs, ct, create_graph=True)
    cts = [torch.ones_like(g) for g in first]
    with torch.no_grad():
        value = count(lambda: f(*xs))
    return {
        "value": value,
        "forward": count(lambda: f(*xs)),
        "backward": count(lambda: torch.autograd.grad(y, xs, ct, retain_graph=True)),
        "with a graph": count(lambda: torch.autograd.grad(y, xs, ct, create_graph=True)),
        "second": count(lambda: torch.autograd.grad(first, xs, cts, retain_graph=True)),
    }


@GIVEN
def test_a_rule_does_the_operations_of_a_hand_written_function(given):
    xs, by_hand = arguments("layer"), RULES["layer"].by_hand
    assert counted(operations, own("layer", given), xs) == counted(operations, by_hand, xs)


@GIVEN
def test_saved_intermediates_are_shared_at_first_order_and_made_once_more_at_second(given):
    xs = arguments("sinh")
    ours = counted(operations, own("sinh", given), xs)
    by_hand = counted(operations, RULES["sinh"].by_hand, xs)
    # `equal` checks whether fwd drew random numbers, because a second run must draw the same
    # numbers.
    ours["forward"] = [name for name in ours["forward"] if name != "aten.equal.default"]
    assert ours["forward"] == by_hand["forward"] and ours["backward"] == by_hand["backward"]
    assert by_hand["second"].count("aten.exp.default") == 0
    assert ours["second"].count("aten.exp.default") == 2  # the second derivative runs fwd once more
    with torch.no_grad():
        again = operations(lambda: sinh_fwd(xs[0]))
    assert len(ours["second"]) <= len(by_hand["second"]) + len(again)


# --- memory ------------------------------------------------------------------------------


@GIVEN
@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_what_a_hand_written_function_keeps_beside_its_arguments(name, given):
    xs = arguments(name)
    ours, by_hand = own(name, given), RULES[name].by_hand
    assert saved(lambda: ours(*xs), xs) == saved(lambda: by_hand(*xs), xs)


def test_reverse_mode_from_jvp_alone_shares_what_the_value_computed():
    (x,) = arguments("sinh")
    f, ct = own("sinh", "jvp"), torch.ones_like(x)

    def step():
        return torch.autograd.grad(f(x), x, ct)

    step()  # the first call also checks the rule
    found = operations(step)
    assert found.count("aten.exp.default") == 2
    torch.testing.assert_close(step()[0], torch.cosh(x))


@pytest.mark.parametrize("given", ["vjp", "jvp", "vjp and jvp"])
@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_keeps_dies_with_its_output(name, given):
    """Residuals are freed without the garbage collector, so there are no reference cycles."""
    f = own(name, given)
    kept = []

    def fwd(*xs):
        out, res = RULES[name].fwd(*xs)
        for r in res if isinstance(res, tuple) else (res,):
            kept.append(weakref.ref(r))
        return out, res

    if "vjp" in given:
        f.defvjp(fwd, RULES[name].bwd)

    def dead(order):
        xs = arguments(name)
        y = f(*xs)
        everything = [*xs, y]
        grads = list(xs)
        for _ in range(order):
            grads = torch.autograd.grad(sum(g.sum() for g in [y, *grads]), xs, create_graph=True)
            everything += grads
        return [weakref.ref(t) for t in everything]

    dead(2)  # exclude objects that PyTorch creates at its first call
    gc.collect()
    gc.disable()
    try:
        for order in (0, 1, 2):
            assert [ref() for ref in dead(order)] == [None] * (
                len(arguments(name)) * (order + 1) + 1
            )
        assert all(ref() is None for ref in kept)  # the garbage collector has not run
    finally:
        gc.enable()
