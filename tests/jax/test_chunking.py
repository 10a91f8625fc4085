"""Compares `chunked` in JAX with a plain loop over chunks that saves all residuals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from tests.jax.test_cost_frozen import flops
from tests.support.devices import on_devices

RNG = np.random.default_rng(20261121)
W = jnp.asarray(RNG.normal(size=(3, 4)))
X = jnp.asarray(RNG.normal(size=(10, 3)))


def same(found, expected, rtol=1e-12, atol=1e-13):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (a, b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def rows_of(size, chunk_size, interleaved=False):
    count = -(-size // chunk_size)
    if interleaved:
        return [np.arange(size)[i::count] for i in range(count)]
    return np.split(np.arange(size), range(chunk_size, size, chunk_size))


def by_loop(f, x, chunk_size, interleaved=False):
    """Concatenate f(i, chunk) over all chunks, in the order of the batch."""
    rows = rows_of(len(x), chunk_size, interleaved)
    out = jnp.concatenate([f(i, x[r]) for i, r in enumerate(rows)])
    return out[np.argsort(np.concatenate(rows))]


def embed(w, x):
    return jnp.sin(x @ w)


def contrast(z):
    """Return a loss that couples all pairs of examples."""
    z = jnp.concatenate([z.real, z.imag], -1) if jnp.iscomplexobj(z) else z
    order = jnp.arange(z.size).reshape(z.shape)
    return jnp.sum(jnp.sin(z @ z.T)) + jnp.sum((order % 3 - 1) * z * z * z)


def chunked(chunk_size, **options):
    return gt.chunked(embed, chunk_size, in_axes=(None, 0), **options)


def derivatives(loss, *args):
    return jax.jit(functools.partial(second, loss))(*args)


def second(loss, *args):
    """Return the gradient, and the Hessian times the arguments in forward and in reverse mode."""
    both = tuple(range(len(args)))
    gradient = jax.grad(loss, both)
    inner = lambda *xs: sum(
        jnp.vdot(a, b).real for a, b in zip(gradient(*xs), jax.lax.stop_gradient(args), strict=True)
    )
    return gradient(*args), jax.jvp(gradient, args, args)[1], jax.grad(inner, both)(*args)


# --- results equal the results of the plain function ---------------------------------------


def test_chunks_that_are_kept_and_those_that_are_not_hold_their_own_examples():
    """The chunks contain 4, 4, 4 and 3 examples; the second and third run in one scan."""
    x = jnp.arange(15.0)
    run = gt.chunked(jnp.sin, 4, interleaved=True)
    same(run(x), jnp.sin(x))
    same(jax.grad(lambda x: (run(x) * x).sum())(x), jnp.cos(x) * x + jnp.sin(x))


def meeting(w, x):
    """Return rows that each depend on all examples of the chunk."""
    return jnp.sin(x @ w) * jnp.cos(x @ w).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_size", "interleaved"), [(3, False), (4, True)])
def test_where_examples_of_a_chunk_meet_it_is_the_loop(chunk_size, interleaved):
    run = gt.chunked(meeting, chunk_size, in_axes=(None, 0), interleaved=interleaved)
    loop = lambda w, x: by_loop(lambda i, c: meeting(w, c), x, chunk_size, interleaved)
    same(*jax.jit(lambda w, x: (run(w, x), loop(w, x)))(W, X))
    both = lambda f: derivatives(lambda w, x: contrast(f(w, x)), W, X)
    same(both(run), both(loop), 1e-11, 1e-11)


@pytest.mark.slow_at("bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_narrow_arrays_that_chunks_share_are_summed_wide(dtype):
    w, x = jnp.ones((), dtype), jnp.ones(4096, dtype)
    given = lambda w: gt.chunked(lambda w, x: w * x, 1, (None, 0))(w, x)
    held = lambda w: gt.chunked(lambda x: w * x, 1)(x)
    for f in (given, held):
        slope = jax.grad(lambda w, f=f: jnp.sum(f(w).astype("float32")))
        # a sum in bfloat16 or float16 would not increase beyond 256 or 2048
        assert slope(w) == jax.jit(slope)(w) == 4096


def test_a_narrow_array_that_chunks_share_reaches_the_output():
    w, x = jnp.ones((), "bfloat16"), jnp.ones(4, "bfloat16")
    loss = lambda w: jnp.sum(gt.chunked(lambda w, x: w * x, 2, (None, 0))(w, x))
    assert gt.grad(loss)(w) == jax.jit(gt.grad(loss))(w) == 4


# --- lists ---------------------------------------------------------------------------------


@pytest.mark.sweep_at("False")
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_list_of_equal_examples_is_scanned(interleaved):
    calls = []

    def f(w, xs):
        calls.append(len(xs))
        return jnp.stack([jnp.sin(x @ w) for x in xs])

    run = gt.chunked(f, 4, in_axes=(None, 0), interleaved=interleaved)
    loss = lambda run: lambda w, xs: contrast(run(w, xs))
    ours = jax.jit(jax.grad(loss(run), (0, 1)))(W, list(X))
    same(ours, jax.jit(jax.grad(loss(f), (0, 1)))(W, list(X)), 1e-11)
    assert len(calls) == 2 + 1  # f is called for two chunk sizes, and once by the plain function


def test_gradients_of_chunks_of_unlike_kinds_go_to_their_own_examples():
    """The chunks contain 2, 2, 2 and 1 examples; the second and third have equal lists of names."""
    names, x = ["a", "bb", "bb", "bb", "a", "bb", "bb"], jnp.arange(7.0)
    f = lambda names, x: jnp.sin(x) * jnp.asarray([float(len(name)) for name in names])
    run = gt.chunked(f, 2, interleaved=True)
    slope = lambda f: jax.grad(lambda x: (f(names, x) * x).sum())(x)
    same(slope(run), slope(f))


# --- carries -------------------------------------------------------------------------------


def normalised(w, x, state):
    """Apply a batch norm whose output also depends on a running mean and a count in the state."""
    y = x @ w
    mean = y.mean(0)
    out = jnp.sin(y - mean) * (1 + 0.1 * state["seen"]) + jnp.tanh(state["mean"])
    return out, {"mean": 0.9 * state["mean"] + 0.1 * mean, "seen": state["seen"] + len(x)}


STATE = {"mean": jnp.asarray([0.1, 0.2, 0.3, 0.4]), "seen": jnp.asarray(0)}


def threaded(w, x, chunk_size, interleaved, state=STATE):
    rows, outs = rows_of(len(x), chunk_size, interleaved), []
    for r in rows:
        out, state = normalised(w, x[r], jax.lax.stop_gradient(state))
        outs.append(out)
    return jnp.concatenate(outs)[np.argsort(np.concatenate(rows))], state


@pytest.mark.sweep_at("5-False", "3-False", "2-False", "4-True", "3-True")
@pytest.mark.parametrize(
    ("chunk_size", "interleaved"),
    [(5, False), (3, False), (2, False), (20, False), (4, True), (3, True)],
)
def test_a_carry_goes_through_the_chunks_once(chunk_size, interleaved):
    run = gt.chunked(
        normalised,
        chunk_size,
        in_axes=(None, 0, 0),
        carry_argnums=2,
        interleaved=interleaved,
    )
    plain = lambda w, x: threaded(w, x, chunk_size, interleaved)
    same(*jax.jit(lambda w, x: (run(w, x, STATE), plain(w, x)))(W, X))

    def loss(run, w, x):
        out, state = run(w, x)
        # the gradient does not propagate through the state
        return contrast(out) + jnp.sum(state["mean"] ** 2), state

    constant = lambda w, x: (lambda out, state: (out, jax.lax.stop_gradient(state)))(*plain(w, x))

    def all_of(run):
        gradient = jax.grad(lambda w, x: loss(run, w, x), (0, 1), has_aux=True)
        first = lambda w, x: gradient(w, x)[0]
        return jax.jit(lambda w, x: (gradient(w, x), jax.jvp(first, (w, x), (w, x))[1]))(W, X)

    same(all_of(lambda w, x: run(w, x, STATE)), all_of(constant), 1e-10, 1e-10)


def test_carries_are_not_differentiated():
    run = gt.chunked(normalised, 3, in_axes=(None, 0, 0), carry_argnums=2)
    loss = lambda mean: contrast(run(W, X, {**STATE, "mean": mean})[0])
    same(jax.grad(loss)(STATE["mean"]), jnp.zeros(4))
    same(jax.jvp(loss, (STATE["mean"],), (jnp.ones(4),))[1], jnp.zeros(()))


# --- nesting -------------------------------------------------------------------------------


def test_f_may_close_over_what_is_traced_and_differentiated():
    def loss(w, x):
        return contrast(gt.chunked(lambda x: embed(w, x), 4)(x * w.sum()))

    plain = lambda w, x: contrast(embed(w, x * w.sum()))
    ours = derivatives(loss, W, X)
    same(ours, derivatives(plain, W, X), 1e-10, 1e-10)


# --- tracing -------------------------------------------------------------------------------


def counted(f):
    def count(*args):
        count.calls += 1
        return f(*args)

    count.calls = 0
    return count


@pytest.mark.quick_at("10-options3-1")
@pytest.mark.parametrize(
    ("chunk_size", "options", "traces"),
    [
        (5, {}, 1),
        (4, {}, 2),  # the last chunk has another shape
        (4, {"interleaved": True}, 2),
        (10, {}, 1),
    ],
)
def test_f_is_traced_once_for_each_shape_and_never_again(chunk_size, options, traces):
    f = counted(embed)
    run = gt.chunked(f, chunk_size, in_axes=(None, 0), **options)
    step = jax.jit(jax.value_and_grad(lambda w, x: contrast(run(w, x))))
    step(W, X)
    assert f.calls == traces
    step(2 * W, X + 1)
    assert f.calls == traces  # the second call of step does not trace f


# --- progress bars and messages ------------------------------------------------------------


def test_a_progress_bar_moves_once_for_each_chunk(monkeypatch):
    moves = []

    class Bar:
        n = 0

        def __init__(self, count):
            moves.append(("open", count))

        def update(self):
            self.n += 1
            moves.append(self.n)

        def close(self):
            moves.append("close")

    monkeypatch.setattr("gradtools.jax.chunking.progress_bar", Bar)
    run = chunked(4, progress=True)
    step = jax.jit(jax.grad(lambda w: contrast(run(w, X))))
    for _ in range(2):
        moves.clear()
        same(step(W), jax.grad(lambda w: contrast(embed(w, X)))(W), 1e-11)
        jax.effects_barrier()
        assert moves == [("open", 3), 1, 2, 3, "close"]


# --- microbatched_value_and_grad -----------------------------------------------------------


def of_each(w, x):
    return jnp.sum(jnp.sin(x @ w) ** 2, -1)


@pytest.mark.sweep_at("4")
@pytest.mark.parametrize("chunk_size", [4, 5])
def test_microbatched_is_differentiable_again(chunk_size):
    loss = lambda w, x: jnp.mean(of_each(w, x))
    penalty = lambda g: lambda w, x: jnp.sum(g(w, x)[1] ** 2) + g(w, x)[0]
    ours, plain = gt.microbatched_value_and_grad(loss, chunk_size), jax.value_and_grad(loss)
    both = lambda g: jax.jit(jax.grad(penalty(g), (0, 1)))(W, X)
    same(both(ours), both(plain), 1e-11)
    push = lambda g: jax.jit(lambda w: jax.jvp(lambda w: g(w, X), (w,), (w,)))(W)
    same(push(ours), push(plain), 1e-11)


def test_microbatched_traces_once_for_each_shape_and_recomputes_nothing():
    f = counted(lambda w, x: jnp.mean(of_each(w, x)))
    step = jax.jit(gt.microbatched_value_and_grad(f, 5))
    step(W, X)
    step(2 * W, X)
    assert f.calls == 1
    ours = flops(gt.microbatched_value_and_grad(f, 5), W, X)
    assert ours == flops(jax.value_and_grad(lambda w, x: jnp.mean(of_each(w, x))), W, X)


# --- costs ---------------------------------------------------------------------------------


def deep(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


WS = [jnp.asarray(RNG.normal(size=(6, 6))) / 2 for _ in range(4)]
BIG = jnp.asarray(RNG.normal(size=(64, 6)))
FORWARD = 4 * 2 * 64 * 6 * 6


def total(f):
    return jax.grad(lambda ws, x: jnp.sum(f(ws, x) ** 2), (0, 1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_work_is_4F(interleaved):
    run = gt.chunked(deep, 8, in_axes=(None, 0), interleaved=interleaved)
    assert flops(deep, WS, BIG) == FORWARD
    assert flops(total(deep), WS, BIG) == 3 * FORWARD
    assert flops(total(run), WS, BIG) == 4 * FORWARD


# The following tests measure the bytes of temporary buffers.

SHAPES = [jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")]
LAYERS = [SHAPES] * 3


def wide(ws, x):
    for a, b in ws:
        x = x + jnp.tanh(x @ a) @ b
    return x


@functools.cache
def temporary(f, count, argnums=0, size=64):
    """Return the peak bytes of the compiled gradient without its arguments and results."""
    x = jax.ShapeDtypeStruct((count * size, 64), "float32")
    loss = lambda ws, x: jnp.sum(f(ws, x) ** 2 * 0.5)
    program = jax.jit(jax.grad(loss, argnums)).lower(LAYERS, x).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.quick_at
@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("argnums", [0, (0, 1)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_peak_is_flat_in_the_number_of_chunks(interleaved, argnums):
    run = gt.chunked(wide, 64, in_axes=(None, 0), interleaved=interleaved)
    few, many = (temporary(run, count, argnums) for count in (4, 32))
    outputs = 28 * 64 * 64 * 4
    assert many - few <= 3 * outputs  # outputs, cotangents and one concatenated array
    # The memory of the plain function increases with the number of chunks.
    assert temporary(wide, 32) - temporary(wide, 4) > 10 * outputs


def _arrays_for_a_further_chunk(chunked, depth, second):
    """Return the number of arrays that a second derivative saves for each additional chunk."""
    layers = jnp.ones((depth, 64, 64), "float32") / 64

    def f(x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return x

    run = chunked(f)
    slope = jax.grad(lambda x: jnp.sum(run(x) ** 2))
    sizes = [
        jax.jit(second(slope)).lower(jax.ShapeDtypeStruct((8 * count, 64), "float32")).compile()
        for count in (4, 12)
    ]
    few, many = (program.memory_analysis().temp_size_in_bytes for program in sizes)
    return (many - few) / (8 * 8 * 64 * 4)


@pytest.mark.slow
def test_second_derivatives_keep_no_graph_for_a_further_chunk():
    twice = lambda slope: jax.grad(lambda x: jnp.sum(slope(x) ** 2))
    forward_over_reverse = lambda slope: lambda x: jax.jvp(slope, (x,), (x,))[1]
    chunked = lambda f: gt.chunked(f, 8)
    inside = lambda f: gt.chunked(gt.checkpoint(f), 8)
    assert _arrays_for_a_further_chunk(chunked, 12, forward_over_reverse) < 4
    assert _arrays_for_a_further_chunk(inside, 12, twice) < 8
    # in reverse over reverse mode, a loop with jax.checkpoint of each chunk saves as many arrays
    assert _arrays_for_a_further_chunk(chunked, 12, twice) > 20


# --- devices -------------------------------------------------------------------------------

EIGHT = """
import re
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
import gradtools.jax as gt

P = jax.sharding.PartitionSpec
mesh = jax.make_mesh((8,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
w, X = jnp.asarray(rng.normal(size=(6, 7))), jnp.asarray(rng.normal(size=(64, 6)))
f = lambda w, x: jnp.tanh(x @ w)
whole = lambda z, a: jnp.sum(jnp.sin(z @ a.T)) / len(z)
full = jax.value_and_grad(lambda w, x: whole(f(w, x), f(w, x)), (0, 1))(w, X)
near = lambda a, b: jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), a, b)
"""

SHARDED = """
put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
w, X = put(w, P()), put(X, P("b"))
moves = r"(\\S+) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)[-a-z]*\\("
run = gt.chunked(f, 16, in_axes=(None, 0), interleaved=True)
outputs = jax.jit(run).lower(w, X).compile()
assert not re.findall(moves, outputs.as_text())
assert re.findall(r"f64\\[2,7\\]\\S* (?:dot|custom-call|fusion)\\(", outputs.as_text())
loss = lambda w, x: jnp.sum(run(w, x) ** 2) + jnp.sum(jnp.sin(jnp.sum(run(w, x), 0)))
gradient = jax.jit(jax.grad(loss)).lower(w, X).compile()
assert {kind for _, kind in re.findall(moves, gradient.as_text())} == {"all-reduce"}
both = jax.jit(jax.value_and_grad(lambda w, x: whole(run(w, x), run(w, x)), (0, 1)))
near(both(w, X), full)
run = gt.chunked(f, 16, in_axes=(None, 0))
near(jax.jit(jax.value_and_grad(lambda w, x: whole(run(w, x), run(w, x)), (0, 1)))(w, X), full)
"""

GATHERED = """
run = gt.chunked(f, 3, in_axes=(None, 0))

def everything(w, x):  # every device computes the whole loss
    rows = gt.all_gather({"z": run(w, x)}, "b")["z"]
    return whole(rows, rows)

def own(w, x):  # each device computes its part; the loss is the mean
    z = run(w, x)
    return whole(z, gt.all_gather(z, "b"))

mean = lambda tree: jax.lax.pmean(tree, "b")
for loss in (everything, own):
    for check in (False, True):
        on_mesh = lambda g: jax.shard_map(
            g, mesh=mesh, in_specs=(P(), P("b")), out_specs=P(), check_vma=check
        )
        # With check_vma, w must be cast to a varying array: otherwise jax.grad sums the gradients
        # over devices, and pmean does not change the sum.
        vary = lambda w: jax.lax.pcast(w, "b", to="varying") if check else w
        step = on_mesh(lambda w, x: mean(jax.value_and_grad(loss)(vary(w), x)))
        near(jax.jit(step)(w, X), (full[0], full[1][0]))
        if check:
            near(jax.jit(on_mesh(jax.grad(loss)))(w, X), 8 * full[1][0])
        # A mean inside of the differentiated function is correct without a cast.
        inside = on_mesh(lambda w, x: mean(jax.grad(lambda w: mean(loss(w, x)))(w)))
        near(jax.jit(inside)(w, X), full[1][0])
        outside = jax.value_and_grad(on_mesh(lambda w, x: mean(loss(w, x))), (0, 1))
        near(jax.jit(outside)(w, X), full)
    lanes = jax.vmap(jax.value_and_grad(loss), (None, 0), axis_name="b")
    found = lanes(w, X.reshape(8, 8, 6))
    near(jax.tree.map(lambda x: x.mean(0), found), (full[0], full[1][0]))

for check in (False, True):
    on_mesh = lambda g: jax.shard_map(
        g, mesh=mesh, in_specs=(P(), P("b")), out_specs=P(), check_vma=check
    )
    vary = lambda w: jax.lax.pcast(w, "b", to="varying") if check else w
    small = gt.microbatched_value_and_grad(lambda w, x: jnp.mean(f(w, x) ** 2), 3)
    found = jax.jit(on_mesh(lambda w, x: mean(small(vary(w), x))))(w, X)
    near(found, jax.value_and_grad(lambda w: jnp.mean(f(w, X) ** 2))(w))
    stateful = lambda w, x, s: (f(w, x) * s, s + x.mean())
    carried = gt.chunked(stateful, 3, in_axes=(None, 0, None), carry_argnums=2)
    def loop(w, x):
        s, outs = 1.0, []
        for c in (x[:3], x[3:6], x[6:]):
            y, s = stateful(w, c, jax.lax.stop_gradient(s))
            outs.append(y)
        return jnp.sum(jnp.concatenate(outs) ** 2), s
    threaded = lambda w, x: (lambda y, s: (jnp.sum(y**2), s))(*carried(w, x, 1.0))
    gradient = lambda g: on_mesh(lambda w, x: mean(jax.grad(g, has_aux=True)(vary(w), x)))
    near(jax.jit(gradient(threaded))(w, X), jax.jit(gradient(loop))(w, X))
"""


@pytest.mark.slow
def test_a_sharded_batch_is_not_moved_and_every_device_works_on_every_chunk():
    assert on_devices(EIGHT + SHARDED + "print('same')", 8, optimized=True) == "same"


@pytest.mark.slow
def test_the_gradient_of_a_loss_over_all_devices_is_that_of_one():
    assert on_devices(EIGHT + GATHERED + "print('same')", 8) == "same"


def test_a_gather_holds_all_rows_in_order_and_its_derivative_sums():
    x = jnp.arange(12.0).reshape(3, 2, 2)
    rows = jax.vmap(lambda x: gt.all_gather((x, x.astype(int)), "b"), axis_name="b")(x)
    same(rows[0], jnp.stack([x.reshape(6, 2)] * 3))
    assert rows[1].dtype == int and rows[1].shape == (3, 6, 2)
    cotangent = jnp.asarray(RNG.normal(size=(3, 6, 2)))
    pullback = jax.vjp(jax.vmap(lambda x: gt.all_gather(x, "b"), axis_name="b"), x)[1]
    same(pullback(cotangent)[0], cotangent.sum(0).reshape(3, 2, 2))


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_per_example_gradients_of_a_batch_of_symbolic_size(chunk_size):
    f = lambda w, x: (w * x).sum() ** 2
    w, x = jnp.ones(3), jnp.arange(12.0).reshape(4, 3)
    (rows,) = jax.export.symbolic_shape("2*n")
    chunked = jax.jit(gt.per_example_grad(f, chunk_size=chunk_size))
    exported = jax.export.export(chunked)(w, jax.ShapeDtypeStruct((rows, 3), x.dtype))
    np.testing.assert_allclose(exported.call(w, x), gt.per_example_grad(f)(w, x))
