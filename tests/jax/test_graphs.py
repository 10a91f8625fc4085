"""Tests graphs of jaxprs: operations, source lines, modules, marks, loop bodies and branches."""

import inspect

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  (only where JAX is installed)
from jax import lax  # noqa: E402

import gradtools.jax as gt  # noqa: E402
from gradtools.seeing.graphs.derivative_flow import dependence_matrix  # noqa: E402
from gradtools.seeing.graphs.gradient_losses import losses  # noqa: E402
from gradtools.seeing.graphs.nodes import Dependence  # noqa: E402
from gradtools.seeing.jax.graphs import graph_of  # noqa: E402
from gradtools.seeing.jax.recorded_run import record  # noqa: E402
from gradtools.seeing.jax.tracing import jaxpr_with_answers  # noqa: E402

X = jnp.asarray([1.0, 2.0, 3.0], jnp.float32)
FULL, ZERO, CUT = Dependence.DIFFERENTIABLE, Dependence.ZERO_DERIVATIVE, Dependence.CUT


def graph(f, *args, **options):
    return graph_of(jax.make_jaxpr(f)(*(args or (X,))), **options)


def operations(g):
    return [node.operation for _, node in g.walk()]


def node_of(g, operation):
    return next(node for _, node in g.walk() if node.operation == operation)


def marked_line(f):
    lines, first = inspect.getsourcelines(f)
    return next(first + i for i, line in enumerate(lines) if "# <- here" in line)


# --- links -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "strength", "loss"),
    [
        (lax.stop_gradient, CUT, "detached"),
        (lambda x: x.astype(int), CUT, "integer_cast"),
        (lambda x: x > 0, CUT, "discrete"),
        (jnp.round, ZERO, "zero_derivative"),
        (lambda x: x**0, ZERO, "zero_derivative"),
        (lambda x: jax.pure_callback(np.sin, x, x), CUT, "left_framework"),
        (lambda x: gt.scale_gradient(X, x[0]), CUT, "edit"),
        (lambda x: lax.while_loop(lambda c: c < x[2], lambda c: c + 1, 0.0), CUT, "discrete"),
        (lambda x: x**2, FULL, None),
    ],
)
def test_an_operation_says_what_it_carries_and_why_not(f, strength, loss):
    g = graph(f)
    assert dependence_matrix(g) == [[strength]]
    assert [found.node.loss for found in losses(g, g.inputs[0])] == ([loss] if loss else [])


# --- source locations --------------------------------------------------------------------


def test_the_line_is_the_innermost_of_the_users_own():
    def inner(x):
        return jnp.sin(x)  # <- here

    node = node_of(graph(lambda x: inner(x) * 2), "sin")
    assert (node.source.line, node.source.function) == (marked_line(inner), "inner")
    assert node.source.file == __file__
    assert node.source.text.startswith("return jnp.sin(x)")


@pytest.mark.parametrize(
    ("f", "mark"),
    [
        (gt.reverse_gradient, "edited gradient"),
        (lambda x: gt.clip_gradient(x, max_norm=1.0), "edited gradient"),
        (gt.frozen(jnp.sin), "frozen"),
        (gt.chunked(jnp.sin, 1), "chunked"),
        (jax.checkpoint(jnp.sin), "checkpoint"),
        (jax.nn.relu, ""),
    ],
)
def test_marks_tell_what_is_special(f, mark):
    assert {node.mark for _, node in graph(f).walk()} - {""} >= ({mark} - {""})
    if not mark:
        assert {node.mark for _, node in graph(f).walk()} == {""}


# --- programs that branch on values ------------------------------------------------------


def decided(f, *leaves):
    return jaxpr_with_answers(f, leaves)


def test_a_program_with_answers_gives_the_programs_values():
    @jax.custom_jvp
    def ruled(x):
        return jnp.tanh(x)

    ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0]))

    def f(x):
        y = jax.jit(lambda a: a * x.sum())(x)
        while y.sum() < 200:
            y = jax.vmap(lambda a: ruled(a) + a * 2)(y)
        z = lax.scan(lambda c, a: (c + a * x[0], a), 0.0, y)[0]
        return z if (y > 1).all() else -z

    closed = decided(f, X)
    (found,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
    np.testing.assert_array_equal(found, f(X))


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[x > 1],
        lambda x: x[jnp.nonzero(x > 1)[0]],
        lambda x: x * jnp.arange(x[1]).sum(),
        lambda x: jnp.where(x > 1)[0].sum() * x,
    ],
)
def test_shapes_may_depend_on_values(f):
    closed = decided(f, X)
    (found,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
    np.testing.assert_array_equal(found, f(X))


# --- recordings --------------------------------------------------------------------------


def run_of(f):
    return lambda leaves: [f(*leaves)]


@pytest.mark.parametrize(
    ("f", "operation"),
    [
        (lambda x: np.asarray(x), "numpy"),
        (lambda x: float(x[0]), "float"),
        (lambda x: int(x[0]), "int"),
        (lambda x: x[0].item(), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: [1, 2, 3][x[0].astype(int)], "int"),
        (lambda x: x.sum() if x[0] > 0 and float(x[0]) else x, "float"),
        (lambda x: x[x > 0] * x[0].item(), "item"),
    ],
)
def test_what_leaves_the_framework_is_refused_by_name(f, operation):
    recording = record(run_of(f), [X], ["argument 0"])
    assert recording.refusal.kind == "left_framework"
    assert recording.refusal.operation == operation
    assert recording.refusal.source.line == f.__code__.co_firstlineno
    assert recording.graph.outputs == ()


# --- gradients at values -----------------------------------------------------------------


def zeros(f, *args, argnums=0):
    """Return the operations at which the gradient is zero according to why_zero."""
    report = gt.why_zero(f, *(args or (X,)), argnums=argnums)
    assert all(finding.kind == "zero" for finding in report)
    return [finding.operation for finding in report]


def read_and_written(ref, x):
    ref[...] = jnp.sin(ref[...])


def times_zero(ref, x):
    ref[...] = ref[...] * 0.0


def an_entry_and_the_rest(ref, x):
    ref[0] = ref[0] * 0.0
    ref[1:] = 0 * x[1:]


def in_a_loop(ref, x):
    def body(c, i):
        ref[i] = jax.nn.relu(x[i] - 9)
        return c, None

    lax.scan(body, 0.0, jnp.arange(3))


def in_a_jitted_function(ref, x):
    jax.jit(lambda r: r.__setitem__(..., r[...] * 0.0))(ref)


@pytest.mark.parametrize(
    "write", [read_and_written, times_zero, an_entry_and_the_rest, in_a_loop, in_a_jitted_function]
)
def test_a_gradient_is_followed_through_mutable_references(write):
    def f(x):
        ref = jax.new_ref(x)
        write(ref, x)
        return ref[...].sum()

    assert bool(zeros(f)) == (write is not read_and_written)


def test_a_stopped_write_to_a_reference_is_located():
    def f(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = lax.stop_gradient(x * 2)  # JAX 0.10 cannot differentiate this write
        return ref[...].sum()

    (finding,) = gt.why_zero(f, X).findings
    assert finding.kind == "detached"


def columns_of_a_loop(x):
    def body(c, a):
        return c + jax.nn.relu(a - 9), a * 0.0

    last, rows = lax.scan(body, 0.0, x, reverse=True)
    return last + (rows * jnp.arange(3.0)).sum()


def rows_of_a_loop(x):
    return lax.scan(lambda c, a: (jax.nn.relu(a - 9), None), 0.0, 20 - 10 * x)[0]


@jax.custom_vjp
def ruled(x):
    return jax.pure_callback(np.sin, x, x)


ruled.defvjp(lambda x: (ruled(x), x), lambda x, ct: (ct * jnp.cos(x),))
DEAD = {
    "the only one": lambda x: jnp.exp(jax.nn.relu(jnp.sin(x) - 5)).sum(),
    "two dead paths": lambda x: jax.nn.relu(x - 9).sum() + jnp.cos(x * 0.0).sum(),
    "what cancels": lambda x: (x - x).sum(),
    "columns of a loop": columns_of_a_loop,
    "rows of a loop": rows_of_a_loop,
    "an output that is not a scalar": lambda x: jnp.stack([x, x]) * 0.0,
    "before a callback with a rule": lambda x: ruled(jax.nn.relu(x - 9)).sum(),
}


@pytest.mark.parametrize("name", DEAD)
def test_a_zero_gradient_is_found(name):
    assert zeros(DEAD[name])
    assert not gt.why_zero(lambda x: DEAD[name](x) + jax.nn.relu(x - 2).sum(), X)


# --- the cost ----------------------------------------------------------------------------


def test_a_program_is_traced_once_for_its_recording_and_its_gradient():
    calls = []

    def f(params):
        calls.append(1)
        return sum((w**2).sum() for w in params.values())

    assert not gt.why_zero(f, {str(k): X for k in range(5)})
    assert calls == [1]
