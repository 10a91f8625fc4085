"""What is lost inside a bridged function is told at the other framework's line."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools import bridge
from gradtools.testing import first_divergence


def cut_in_torch(t):
    h = torch.tanh(t)
    h = h.detach()  # lost in torch
    return (h**2).sum()


def cut_in_jax(x):
    h = jnp.tanh(x)
    h = jax.lax.stop_gradient(h)  # lost in jax
    return (h**2).sum()


def dead_in_torch(t):
    return torch.relu(t - 5.0).sum()  # dead in torch


TO_JAX = gj, lambda f: lambda x: bridge.to_jax(f)(2 * x)
TO_TORCH = gt, lambda f: lambda x: bridge.to_torch(f)(2 * x)
AROUND = gt, lambda f: lambda x: bridge.to_torch(lambda a: bridge.to_jax(f)(a))(x)


@pytest.mark.slow_at(
    "host0-cut_in_torch-detached-lost in torch",
    "host1-cut_in_jax-detached-lost in jax",
    "host3-cut_in_torch-detached-lost in torch",
)
@pytest.mark.parametrize(
    ("host", "f", "kind", "line"),
    [
        (TO_JAX, cut_in_torch, "detached", "lost in torch"),
        (TO_TORCH, cut_in_jax, "detached", "lost in jax"),
        (TO_JAX, dead_in_torch, "dead", "dead in torch"),
        (AROUND, cut_in_torch, "detached", "lost in torch"),
    ],
)
def test_why_zero_names_the_line_in_the_other_framework(host, f, kind, line):
    own, across = host
    report = own.why_zero(across(f), own.asarray(np.ones(3, np.float32)))
    (finding,) = report.findings
    assert finding.kind == kind and finding.source.function == f.__name__
    with open(__file__) as file:
        assert line in file.readlines()[finding.source.line - 1]


_IN_JAX = {
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
    "jit of vmap": lambda f: jax.jit(lambda x: jax.vmap(f)(x[None])),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0.0, None, length=2)[1],
    "checkpoint": jax.checkpoint,
}


@pytest.mark.slow_at("vmap", "jit of vmap", "scan", ("dead_in_torch-dead-dead in torch", "jit"))
@pytest.mark.parametrize("around", _IN_JAX)
@pytest.mark.parametrize(
    ("f", "kind", "line"),
    [(cut_in_torch, "detached", "lost in torch"), (dead_in_torch, "dead", "dead in torch")],
)
def test_why_zero_names_the_line_inside_of_compiled_and_mapped_programs(around, f, kind, line):
    bridged = bridge.to_jax(f)
    (finding,) = gj.why_zero(_IN_JAX[around](lambda x: bridged(2 * x)), jnp.ones(3)).findings
    assert (finding.kind, finding.source.function) == (kind, f.__name__)
    with open(__file__) as file:
        assert line in file.readlines()[finding.source.line - 1]


def test_why_zero_names_the_line_inside_of_a_compiled_program_of_pytorchs():
    bridged = bridge.to_torch(cut_in_jax)
    f = torch.compile(lambda x: bridged(2 * x), backend="eager")
    (finding,) = gt.why_zero(f, torch.ones(3)).findings
    assert (finding.kind, finding.source.function) == ("detached", "cut_in_jax")


def test_why_zero_looks_at_no_other_argument_of_a_bridged_function():
    f = bridge.to_torch(lambda a, b: jax.lax.stop_gradient(a).sum() + jnp.floor(b).sum())
    x = torch.ones(3)
    report = gt.why_zero(lambda a, b: f(a, b), x, x, argnums=(0, 1))
    assert [(one.argument, one.kind) for one in report.findings] == [
        ("argument 0", "detached"),
        ("argument 1", "zero_derivative"),
    ]
    assert (
        not gt.why_zero(lambda a: bridge.to_torch(cut_in_jax)(a) + a.sum() ** 2, x)
        .findings[0]
        .whole
    )


# --- one picture across the border -------------------------------------------------------


def quadratic_in_torch(t):
    return (torch.tanh(t @ t) ** 2).sum()


def quadratic_in_jax(x):
    return (jnp.tanh(x @ x) ** 2).sum()


ACROSS = [
    (TO_JAX, quadratic_in_torch, "quadratic_in_torch in PyTorch"),
    (TO_TORCH, quadratic_in_jax, "quadratic_in_jax in JAX"),
]
MATRIX = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)


@pytest.mark.slow_at("host0-quadratic_in_torch-quadratic_in_torch in PyTorch", "1", "2")
@pytest.mark.sweep_at(("2", "host0-quadratic_in_torch-quadratic_in_torch in PyTorch"))
@pytest.mark.parametrize(("host", "f", "name"), ACROSS)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_graph_shows_the_other_frameworks_operations_in_each_pass(host, f, name, order):
    own, across = host
    graph = own.gradient_graph(across(f), own.asarray(MATRIX), order=order)
    calls = [node for node in graph.nodes if node.operation == "bridged"]
    assert [call.phase for call in calls] == list(range(order + 1))
    assert calls[0].attributes["name"] == name
    (body,) = calls[0].bodies
    assert [n.operation for n in body.graph.nodes] == ["matmul", "tanh", "power", "sum"]
    assert {n.source.function for n in body.graph.nodes} == {f.__name__}
    for call in calls[1:]:  # f again, and its derivative
        inside = call.bodies[0].graph
        assert len(inside.nodes) > 4 and {n.phase for n in inside.nodes} == {call.phase}
        told = [n for n in inside.nodes[4:] if n.source]  # sums of gradients are of no line
        assert len(told) > 2 and {n.source.function for n in told} == {f.__name__}
        assert [inside.values[v].shape for v in inside.inputs] == [
            graph.values[v].shape for v in call.inputs
        ]
    assert f"▾ {name}" in graph.to_text() and name in graph.to_svg()


def test_a_graph_goes_through_both_borders():
    graph = gt.gradient_graph(
        lambda x: bridge.to_torch(lambda a: bridge.to_jax(quadratic_in_torch)(a) * 3)(x),
        torch.ones(3, 3),
    )
    assert [node.operation for node in graph.nodes] == ["bridged", "bridged"]
    for node, last in zip(graph.nodes, ("sum", "add"), strict=True):
        inner = [n for n in node.bodies[0].graph.nodes if n.operation == "bridged"]
        assert inner[-1].bodies[0].graph.nodes[-1].operation == last


def test_what_takes_no_fake_tensors_is_drawn_without_its_operations():
    f = bridge.to_jax(lambda t: t * 2 if t.sum() > 0 else t, out=lambda t: t)
    call = gj.gradient_graph(lambda x: f(x), jnp.ones(2), order=0).nodes[0]
    assert call.operation == "bridged" and not call.bodies


# --- measured ----------------------------------------------------------------------------


@pytest.mark.sweep_at("host1-quadratic_in_jax-quadratic_in_jax in JAX")
@pytest.mark.parametrize(("host", "f", "name"), ACROSS)
def test_measure_counts_a_bridged_function_as_if_it_were_the_frameworks_own(host, f, name):
    own, across = host
    native = quadratic_in_jax if own is gj else quadratic_in_torch
    x = own.asarray(MATRIX)
    found = own.measure(across(f), x)
    assert found.flops == own.measure(lambda x: native(2 * x), x).flops == 89
    assert found.saved_bytes == 36  # the argument alone: a derivative evaluates f again
    assert found.peak_bytes >= 72  # what is doubled, and what f makes of it
    assert not any("flops" in note for note in found.notes)
    assert own.measure(own.grad(across(f)), x).flops > 2 * 89


def test_measure_counts_a_batch_of_calls():
    f, xs = bridge.to_jax(quadratic_in_torch), jnp.ones((4, 3, 3))
    assert gj.measure(jax.vmap(f), xs).flops == 4 * 80
    g = bridge.to_torch(quadratic_in_jax)
    assert gt.measure(torch.func.vmap(g), torch.ones(4, 3, 3)).flops == 4 * 80


def test_measure_names_a_bridged_function_that_it_cannot_count():
    f = bridge.to_jax(lambda t: t * 2 if t.sum() > 0 else t, out=lambda t: t)
    (note,) = gj.measure(lambda x: f(x), jnp.ones(2)).notes
    assert note == "not in flops: <lambda> in PyTorch, which no rule counts"


def test_measure_says_that_a_loop_of_unknown_length_in_the_other_framework_is_counted_once():
    def doubled(x):
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: 2 * y, x)

    f = bridge.to_torch(doubled)
    notes = gt.measure(lambda x: f(x), torch.ones(2)).notes
    assert "a while inside of another kind of program is counted once" in notes


def test_a_round_trip_that_was_first_met_beneath_an_operation_of_pytorchs_has_its_gradient():
    # Beneath an operation PyTorch's autograd is off, and what JAX asked there was kept for good.
    f = bridge.to_torch(lambda a: bridge.to_jax(quadratic_in_torch)(a) * 3)
    x = torch.from_numpy(MATRIX).requires_grad_()
    assert gt.measure(gt.grad(f), x).flops > 160
    (found,) = torch.autograd.grad(f(x), x)
    (native,) = torch.autograd.grad(3 * quadratic_in_torch(x), x)
    torch.testing.assert_close(found, native)


# --- as mathematics ----------------------------------------------------------------------

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
    np.testing.assert_allclose(found.evaluate([2 * np.ones(3)]).gradients[0], np.full(3, 10.0))


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize(
    "around",
    [
        torch.func.vmap,
        lambda f: lambda x: torch.func.vmap(torch.func.vmap(f))(x[None]),
        lambda f: lambda x: torch.func.vmap(f, in_dims=1)(x[:, None]),
    ],
)
def test_why_zero_names_the_line_inside_of_mapped_programs_of_pytorchs(around):
    bridged = bridge.to_torch(cut_in_jax)
    (finding,) = gt.why_zero(
        lambda x: around(lambda x: bridged(2 * x))(x).sum(), torch.ones(3)
    ).findings
    assert (finding.kind, finding.source.function) == ("detached", "cut_in_jax")


# --- a port, layer by layer ----------------------------------------------------------------


linear = partial(eqx.nn.Linear, dtype=jnp.float32)


@pytest.fixture
def narrow():
    """JAX as it is by default."""
    with jax.enable_x64(False):
        yield


class Port(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


class HalfPorted(torch.nn.Module):
    """The original, whose last layer is the port's already."""

    def __init__(self, port):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), bridge.to_torch(port.last)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor(np.asarray(port.first.weight)))
            self.first.bias.copy_(torch.tensor(np.asarray(port.first.bias)))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.sweep_at("float32")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_first_divergence_compares_a_model_that_is_bridged_in_part(dtype, narrow):
    keys = jax.random.split(jax.random.key(0))
    port = Port(linear(3, 4, key=keys[0]), linear(4, 2, key=keys[1]))
    half, x = HalfPorted(port), np.ones(3, np.float32)
    assert first_divergence(half, port, None, (x,), dtype=dtype)
    with torch.no_grad():
        half.last.weight.mul_(2)
    first = first_divergence(half, port, None, (x,), dtype=dtype).first
    assert (first.path, first.quantity) == ("last", "value") and "weight" in first.cause


class Bridged(eqx.Module):
    """The port, whose last layer is still the original's."""

    first: eqx.nn.Linear
    last: dict
    apply: object = eqx.field(static=True)

    def __call__(self, x):
        return self.apply(self.last, {}, jnp.tanh(self.first(x)))[0]


def test_first_divergence_compares_a_port_that_calls_the_original(narrow):
    first = linear(3, 4, key=jax.random.key(0))
    half = HalfPorted(Port(first, linear(4, 2, key=jax.random.key(1))))
    half.last = torch.nn.Linear(4, 2)
    apply, params, _ = bridge.to_jax(half.last)
    x = np.ones(3, np.float32)
    assert first_divergence(half, Bridged(first, params, apply), None, (x,))
    wrong = Bridged(first, {**params, "bias": params["bias"] + 1}, apply)
    assert not first_divergence(half, wrong, None, (x,))
