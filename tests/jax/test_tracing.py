"""In JAX, data flow connects an input to an output unless an operation cuts the gradient."""

import inspect

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  (only where JAX is installed)
from jax import lax  # noqa: E402

from gradtools.jax.reachability import reached_matrix  # noqa: E402
from gradtools.seeing.graphs.derivative_flow import dependence_matrix  # noqa: E402
from gradtools.seeing.graphs.gradient_losses import losses_between  # noqa: E402
from gradtools.seeing.graphs.nodes import Dependence  # noqa: E402
from gradtools.seeing.jax.graphs import graph_of  # noqa: E402
from tests.jax.lost_gradients import CASES  # noqa: E402
from tests.support.lost_gradients import losses  # noqa: E402

X = np.array([0.3, -0.7, 1.1], np.float32)
A = np.eye(3, dtype=np.float32) + 0.1
ONE = np.float32(1.5)
Z = X + 1j * X[::-1]
SHAPE = jax.ShapeDtypeStruct((3,), np.float32)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec("i")
stop = lax.stop_gradient


def jaxpr_of(f, *args):
    return jax.make_jaxpr(f)(*args)


def losses_of(f, *args):
    """Return the operations at which the gradient of the first argument is lost."""
    graph = graph_of(jaxpr_of(f, *args))
    return losses_between(graph, graph.inputs[0], graph.outputs)


def reached(jaxpr):
    """Return for each input whether an output of the jaxpr depends on the input."""
    return [any(column) for column in zip(*reached_matrix(jaxpr), strict=True)]


def connected(f, *args):
    """Return for each input whether an output depends on the input through a path without a cut."""
    rows = dependence_matrix(graph_of(jaxpr_of(f, *args)))
    return [max(column) > Dependence.CUT for column in zip(*rows, strict=True)]


# --- connected ---------------------------------------------------------------------------


@jax.custom_jvp
def hard_step(x):
    return (x > 0).astype(x.dtype)


hard_step.defjvp(lambda primals, tangents: (hard_step(*primals), tangents[0]))


@jax.custom_vjp
def kernel(x, y):
    return jax.pure_callback(lambda a: np.sin(a), SHAPE, x, vmap_method="sequential") + y


kernel.defvjp(lambda x, y: (kernel(x, y), x), lambda x, ct: (ct * jnp.cos(x), ct))


def through_ref(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[0] = x[1]
    return ref[...]


def ref_in_loop(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(i, x[i]), None)
    return ref[...]


def newton(theta):
    def solve(f, y):
        return lax.while_loop(lambda s: s < theta, lambda s: s + 1e-2, y)

    return lax.custom_root(lambda y: y - theta, ONE, solve, lambda g, y: y / g(jnp.ones_like(y)))


def slow_carry(x):
    """Return the last carry, which depends on the first carry after three iterations."""
    return lax.fori_loop(0, 9, lambda _, c: (c[0], c[0], c[1], c[2]), (x, 0 * ONE, ONE, ONE))[3]


CONNECTED = {
    "an identity": (lambda x: x, X),
    "round, with derivative zero": (jnp.round, X),
    "the power zero": (lambda x: x**0, X),
    "a product with zero": (lambda x: 0 * x, X),
    "where with respect to its branches": (lambda x: jnp.where(x > 0, x, 0), X),
    "logsumexp with a stopped shift": (jax.nn.logsumexp, X),
    "the first derivative of relu": (jax.grad(jax.nn.relu), ONE),
    "the gradient of a sum of squares": (jax.grad(lambda x: (x**2).sum()), X),
    "a solve with respect to its matrix": (lambda a: jnp.linalg.solve(a, X), A),
    "an implicit root, found by comparisons": (newton, ONE),
    "the values of a sort with keys": (lambda x: lax.sort((X, x), num_keys=1)[1], X),
    "a gather at argmax with respect to its values": (lambda x: x[jnp.argmax(x)], X),
    "a scatter with respect to its operand": (lambda x: x.at[0].set(1.0), X),
    "at apply": (lambda x: x.at[0].apply(jnp.sin), X),
    "a custom reduction": (lambda x: lax.reduce(x, ONE, lambda a, b: a * b + a, (0,)), X),
    "max pooling": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME"), X),
    "an associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), X),
    "lax.map": (lambda x: lax.map(jnp.sin, x), X),
    "a scan with respect to its carry": (lambda x: lax.scan(lambda c, a: (c * a, a), x, X)[0], ONE),
    "a scan with respect to its xs": (lambda x: lax.scan(lambda c, a: (c, c * a), ONE, x)[1], X),
    "a scan with respect to its captured values": (
        lambda x: lax.scan(lambda c, a: (c + x[0] * a, None), ONE, X)[0],
        X,
    ),
    "a scan of length 0 with respect to its initial carry": (
        lambda x: lax.scan(lambda c, _: (stop(c), None), x, None, length=0)[0],
        X,
    ),
    "the gradient of a scan": (
        jax.grad(lambda x: lax.scan(lambda c, a: (c * a, a), ONE, x)[0]),
        X,
    ),
    "a loop through several carries": (slow_carry, ONE),
    "a while loop with respect to its carry": (
        lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0],
        X,
    ),
    "a while loop with respect to its captured values": (
        lambda x: lax.while_loop(lambda c: c < 9, lambda c: c + x[0], ONE),
        X,
    ),
    "a while loop with possibly no iterations": (
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: stop(c) + 1, x),
        X,
    ),
    "a cond with one branch cut": (lambda x: lax.cond(x[0] > 0, stop, lambda y: y, x), X),
    "a switch": (lambda x: lax.switch(1, [jnp.sin, jnp.zeros_like], x), X),
    "a batched cond with stopped branches": (
        jax.vmap(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)),
        X,
    ),
    "a choice by platform": (
        lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.zeros_like),
        X,
    ),
    "jit in jit": (jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2), X),
    "the gradient of checkpoint": (jax.grad(jax.checkpoint(lambda x: jnp.sin(x).sum())), X),
    "a composite": (lax.composite(lambda x: x * 2, name="my.op"), X),
    "an optimisation barrier": (lax.optimization_barrier, X),
    "a move to a device": (lambda x: jax.device_put(x), X),
    "shard_map": (
        jax.shard_map(lambda x: lax.psum(x, "i") + x, mesh=MESH, in_specs=SPEC, out_specs=SPEC),
        X,
    ),
    "a custom_jvp with a comparison inside": (hard_step, X),
    "a custom_vjp with a host callback inside": (lambda x: kernel(x, X), X),
    "a batched custom_vjp": (jax.vmap(lambda x: kernel(x, X)), A),
    "a mutable reference": (through_ref, X),
    "a mutable reference written in a loop": (ref_in_loop, X),
    "a random draw that is scaled": (lambda x: x * jax.random.normal(jax.random.key(0), (3,)), X),
    "a reparameterised gamma": (lambda x: jax.random.gamma(jax.random.key(0), x), X + 2),
    "a change of precision": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), X),
    "a stop_gradient with a second, differentiable path": (lambda x: stop(x) * x, X),
    "the real part": (jnp.real, Z),
    "a complex number from real parts": (lambda x: lax.complex(x, 2 * x), X),
}


@pytest.mark.parametrize("name", CONNECTED)
def test_data_reaches_the_output_through(name):
    f, x = CONNECTED[name]
    assert reached(jaxpr_of(f, x)) == [True]
    # the first derivative of relu reads the argument only in a comparison
    assert connected(f, x) == [not name.startswith("the first derivative")]


# --- cut ---------------------------------------------------------------------------------


_function = lambda f: getattr(f, "func", f)
CUTS = ("detached", "integer_cast", "discrete", "left_framework")
CUT = [
    case
    for case in CASES.causes.cases()
    if {loss.kind for loss in losses(case.values[0])} <= {*CUTS}
    and all(loss.whole for loss in losses(case.values[0]))
    and "if" not in inspect.getsource(_function(case.values[0].program)).split()
]


@pytest.mark.parametrize("cause", CUT)
def test_data_is_cut_where_why_zero_says_so(cause):
    try:
        jaxpr = jaxpr_of(cause.program, *cause.known["args"])
    except jax.errors.JAXTypeError:
        # the cause converts a tracer to NumPy, which requires eager execution
        return
    assert not any(reached(jaxpr)[: len(jax.tree.leaves(cause.known["args"][0]))])


# --- reachability of each output from each input -----------------------------------------


def test_carries_of_a_loop_keep_their_inputs_apart():
    f = lambda x, y: lax.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1] + c[0]), (x, y))
    assert reached_matrix(jaxpr_of(f, X, X)) == [[True, False], [True, True]]


def test_a_custom_rule_keeps_what_its_function_does_not_use_apart():
    f = jax.custom_jvp(lambda x, y: hard_step(x))
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    assert reached(jaxpr_of(f, X, X)) == [True, False]


def test_the_line_is_that_of_each_use_of_a_jitted_library_function():
    def f(x):
        a = jax.nn.one_hot(x, 4)  # here
        b = jax.nn.one_hot(x, 4)  # here
        return a + b

    lines = [loss.node.source for loss in losses_of(f, X)]
    assert len({*lines}) == 2 and all(line.text.endswith("# here") for line in lines)


# --- large jaxprs ------------------------------------------------------------------------


def test_a_jaxpr_that_shares_its_bodies_is_read_in_linear_time():
    """Without sharing, twelve nested functions that are each called twice have 2**12 equations."""
    f = jnp.sin
    for _ in range(12):
        f = jax.jit(lambda x, g=f: g(x) + g(x))
    assert reached(jaxpr_of(f, X)) == [True]
    assert losses_of(lambda x: stop(f(x)), X)
