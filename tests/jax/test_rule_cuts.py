"""What a rule's own backward stops of a second derivative is drawn in JAX, too."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  (only where JAX is installed)

import gradtools.jax as gt  # noqa: E402

X = jnp.asarray([0.5, -1.0])
SECOND = "second gradient of argument 0"


@jax.custom_vjp
def stopped(x):
    return jnp.sum(x**2)


stopped.defvjp(
    lambda x: (jnp.sum(x**2), x),
    lambda saved, ct: (jax.lax.stop_gradient(2 * saved) * ct,),
)


@jax.custom_vjp
def sinh(x):
    """Its exponentials are kept; JAX traces them, so nothing is lost."""
    return (jnp.exp(x) - jnp.exp(-x)) / 2


sinh.defvjp(
    lambda x: (sinh(x), (jnp.exp(x), jnp.exp(-x))),
    lambda saved, ct: (ct * (saved[0] + saved[1]) / 2,),
)


@jax.custom_vjp
def masked(x):
    return jnp.sum(jnp.abs(x))


masked.defvjp(
    lambda x: (jnp.sum(jnp.abs(x)), x),
    lambda saved, ct: (jax.lax.stop_gradient(jnp.sign(saved)) * ct,),
)


def outputs(graph):
    return [graph.values[v].name for v in graph.outputs]


def test_a_second_gradient_that_a_rule_stops_is_drawn_as_missing():
    graph = gt.gradient_graph(stopped, X, order=2)
    assert SECOND in outputs(graph)
    (node,) = [node for node in graph.nodes if node.operation == "missing"]
    assert node.attributes["rule"] == "stopped"
    assert "stopped inside the rule's backward" in str(graph)
    assert "stopped inside the rule" in graph.to_svg()
    assert any(edge.cut for edge in graph.edges)


@pytest.mark.parametrize(
    "f", [sinh, masked, jnp.sin, jax.nn.softmax, lambda x: gt.stop_gradient(x) * x]
)
def test_nothing_is_missing_where_nothing_is_lost(f):
    graph = gt.gradient_graph(f, X, order=2)
    assert all(node.operation != "missing" for node in graph.nodes)


def stop_in_backward(saved, ct):
    factor = jax.lax.stop_gradient(2 * saved)
    return (factor * ct,)


@jax.custom_vjp
def elsewhere(x):
    return jnp.sum(x**2)


elsewhere.defvjp(lambda x: (jnp.sum(x**2), x), stop_in_backward)


@gt.custom_rule
def flat_slope(x):
    return jnp.sum(x**2)


def backward_of_flat_slope(x, ct):
    return (gt.stop_gradient(2 * x) * ct,)


flat_slope.defvjp(lambda x: (flat_slope(x), x), backward_of_flat_slope)


@pytest.mark.parametrize("grad", [jax.grad, gt.grad])
@pytest.mark.parametrize(
    ("rule", "kind", "backward"),
    [
        (elsewhere, "stopped_in_rule", stop_in_backward),
        (flat_slope, "rule", backward_of_flat_slope),
    ],
)
def test_what_a_rule_loses_of_an_inner_derivative_is_told_with_its_name_and_its_line(
    grad, rule, kind, backward
):
    other = lambda x: sinh(x).sum()  # in reach, and not read
    f = lambda x: grad(rule)(x).sum() if x.ndim else other(x)
    (finding,) = gt.why_zero(f, X).findings
    assert (finding.kind, finding.operation) == (kind, rule.__name__)
    if kind == "stopped_in_rule":
        line = backward.__code__.co_firstlineno
        assert (finding.source.line, finding.source.function) == (line, backward.__name__)


def test_a_stop_in_the_users_own_code_beside_a_rule_is_not_the_rules():
    f = lambda x: jax.grad(lambda x: elsewhere(x) + jax.lax.stop_gradient(x).sum())(x).sum()
    assert all(found.kind == "stopped_in_rule" for found in gt.why_zero(f, X))
    g = lambda x: jax.lax.stop_gradient(x).sum() + 0 * elsewhere(jax.lax.stop_gradient(x))
    assert {found.kind for found in gt.why_zero(g, X)} == {"detached"}


def test_of_rules_that_stop_alike_the_one_on_the_line_of_the_call_is_named():
    def first(x):
        if not x.ndim:
            return stopped(x)
        return jax.grad(elsewhere)(x).sum()

    def second(x):
        if not x.ndim:
            return elsewhere(x)
        return jax.grad(stopped)(x).sum()

    for f, rule in ((first, "elsewhere"), (second, "stopped")):
        assert [found.operation for found in gt.why_zero(f, X).findings] == [rule]
