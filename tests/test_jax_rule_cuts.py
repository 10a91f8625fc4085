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
