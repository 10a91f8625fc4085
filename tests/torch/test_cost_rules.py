"""In PyTorch an own rule does and keeps what a hand-written Function does and keeps, counted."""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import saved_tensors_hooks

import gradtools.torch as gt
from tests.support.torch_counts import flops, operations


def saved(run, but=()):
    """The bytes of the storages that are kept for backward, those of `but` aside."""
    held = {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    for x in but:
        held.pop(x.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in held.values())


def saved_in_graph(y, but=()):
    """The same of one output, without hooks: under hooks no tangent is recorded in the graph."""
    held, nodes = {}, [y.grad_fn]
    while nodes:
        node = nodes.pop()
        fields = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for x in (*fields, *getattr(node, "saved_tensors", ())):
            if isinstance(x, torch.Tensor):
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    for x in but:
        held.pop(x.untyped_storage().data_ptr(), None)
    return sum(held.values())


# --- rules, and Functions of the same formulas -------------------------------------------


class Given(NamedTuple):
    value: object
    fwd: object
    bwd: object
    jvp: object
    by_hand: object


class SquareFunction(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return 2 * x * ct

    @staticmethod
    def jvp(ctx, dx):
        (x,) = ctx.saved_tensors
        return 2 * x * dx


class ExpFunction(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.exp(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, ct):
        (y,) = ctx.saved_tensors
        return ct * y


class SinhFunction(torch.autograd.Function):
    """Right at second order: what it saves is an output too, and has a derivative by hand."""

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


def exp_fwd(x):
    y = torch.exp(x)
    return y, y


def exp_jvp(primals, tangents):
    y = torch.exp(primals[0])
    return y, tangents[0] * y


def sinh_fwd(x):
    e, i = torch.exp(x), torch.exp(-x)
    return (e - i) / 2, (e, i)


def sinh_jvp(primals, tangents):
    y, (e, i) = sinh_fwd(primals[0])
    return y, tangents[0] * (e + i) / 2


RULES = {
    "square": Given(
        lambda x: x * x,
        lambda x: (x * x, x),
        lambda x, ct: (2 * x * ct,),
        lambda p, t: (p[0] * p[0], 2 * p[0] * t[0]),
        SquareFunction.apply,
    ),
    "exp": Given(torch.exp, exp_fwd, lambda y, ct: (ct * y,), exp_jvp, ExpFunction.apply),
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
    """The value's, the gradient's and the second derivative's operations, or flops."""
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
@pytest.mark.parametrize("name", ["square", "exp", "layer"])
def test_a_rule_does_the_operations_of_a_hand_written_function(name, given):
    xs = arguments(name)
    ours = own(name, given)
    assert counted(operations, ours, xs) == counted(operations, RULES[name].by_hand, xs)


@GIVEN
def test_a_rule_takes_the_flops_of_a_hand_written_function(given):
    xs = arguments("layer")
    by_hand = counted(flops, LayerFunction.apply, xs)
    assert by_hand["second"] > by_hand["backward"] > 0
    assert counted(flops, own("layer", given), xs) == by_hand


@GIVEN
def test_saved_intermediates_are_shared_at_first_order_and_made_once_more_at_second(given):
    xs = arguments("sinh")
    ours = counted(operations, own("sinh", given), xs)
    by_hand = counted(operations, RULES["sinh"].by_hand, xs)
    # One look at whether fwd drew random numbers, which a second run would have to repeat.
    ours["forward"] = [name for name in ours["forward"] if name != "aten.equal.default"]
    assert ours["forward"] == by_hand["forward"] and ours["backward"] == by_hand["backward"]
    assert by_hand["second"].count("aten.exp.default") == 0
    assert ours["second"].count("aten.exp.default") == 2  # one run of fwd
    with torch.no_grad():
        again = operations(lambda: sinh_fwd(xs[0]))
    assert len(ours["second"]) <= len(by_hand["second"]) + len(again)


def test_forward_mode_does_the_operations_of_a_hand_written_function():
    x, dx = torch.randn(2, 1000)

    def push(f):
        with forward_ad.dual_level():
            f(forward_ad.make_dual(x, dx))

    by_hand = operations(lambda: push(SquareFunction.apply))
    push(own("square", "vjp and jvp"))
    assert operations(lambda: push(own("square", "vjp and jvp"))) == by_hand


# --- memory ------------------------------------------------------------------------------


@GIVEN
@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_what_a_hand_written_function_keeps_beside_its_arguments(name, given):
    xs = arguments(name)
    ours, by_hand = own(name, given), RULES[name].by_hand
    assert saved(lambda: ours(*xs), xs) == saved(lambda: by_hand(*xs), xs)


@pytest.mark.parametrize("name", ["square", "exp", "layer"])
def test_a_reverse_rule_keeps_what_a_hand_written_function_keeps(name):
    xs = arguments(name)
    ours, by_hand = own(name, "vjp"), RULES[name].by_hand
    assert saved(lambda: ours(*xs)) == saved(lambda: by_hand(*xs)) > 0


def test_saved_intermediates_keep_the_arguments_for_the_second_run_of_fwd():
    (x,) = arguments("sinh")
    by_hand = saved(lambda: RULES["sinh"].by_hand(x))
    assert saved(lambda: own("sinh", "vjp")(x)) == by_hand + x.nbytes


def test_two_rules_keep_for_backward_what_bwd_reads():
    xs = arguments("exp")
    assert saved(lambda: own("exp", "vjp and jvp")(*xs)) == saved(lambda: ExpFunction.apply(*xs))


def test_reverse_mode_from_jvp_alone_shares_what_the_value_computed():
    (x,) = arguments("exp")
    f, ct = own("exp", "jvp"), torch.ones_like(x)

    def step():
        return torch.autograd.grad(f(x), x, ct)

    step()  # is held to what a rule must be
    found = operations(step)
    assert found.count("aten.exp.default") == 1
    torch.testing.assert_close(step()[0], torch.exp(x), rtol=0, atol=0)


def test_reverse_mode_from_jvp_alone_keeps_what_autograd_keeps_for_the_same_tangent():
    """And no more after a backward pass, though the loss lives on."""
    (x,) = arguments("exp")
    f, ct = own("exp", "jvp"), torch.ones_like(x)
    torch.autograd.grad(f(x), x, ct)
    assert saved_in_graph(f(x), [x]) == saved_in_graph(torch.exp(x), [x]) > 0
    kept = []

    def rule(primals, tangents):
        factor = torch.exp(*primals).clone()
        kept.append(weakref.ref(factor))
        return torch.exp(*primals), factor * tangents[0]

    f.defjvp(rule)
    for _ in range(3):
        y = f(x)
        torch.autograd.grad(y, x, ct)
    assert [ref() for ref in kept] == [None] * len(kept) and y.grad_fn is not None


@pytest.mark.parametrize("given", ["vjp", "jvp", "vjp and jvp"])
@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_keeps_dies_with_its_output(name, given):
    """No reference cycle: nothing waits for the garbage collector."""
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

    dead(2)  # what PyTorch sets up at the first call of all is no part of this
    gc.collect()
    gc.disable()
    try:
        for order in (0, 1, 2):
            assert [ref() for ref in dead(order)] == [None] * (
                len(arguments(name)) * (order + 1) + 1
            )
        assert all(ref() is None for ref in kept)  # though nothing was collected
    finally:
        gc.enable()
