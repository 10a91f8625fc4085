"""Chunks in JAX, against the plain loop over chunks with every graph kept."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

RNG = np.random.default_rng(20261121)
W = jnp.asarray(RNG.normal(size=(3, 4)))
X = jnp.asarray(RNG.normal(size=(10, 3)))
Z = jnp.asarray(RNG.normal(size=(3, 4)) + 1j * RNG.normal(size=(3, 4)))


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
    """concat(f(i, chunk) for each chunk), in the order of the batch."""
    rows = rows_of(len(x), chunk_size, interleaved)
    out = jnp.concatenate([f(i, x[r]) for i, r in enumerate(rows)])
    return out[np.argsort(np.concatenate(rows))]


def embed(w, x):
    return jnp.sin(x @ w)


def contrast(z):
    """A loss in which every example meets every other."""
    z = jnp.concatenate([z.real, z.imag], -1) if jnp.iscomplexobj(z) else z
    order = jnp.arange(z.size).reshape(z.shape)
    return jnp.sum(jax.nn.logsumexp(z @ z.T, 1)) + jnp.sum(jnp.cos(order) * z**3)


def chunked(chunk_size, **options):
    return gt.chunked(embed, chunk_size, in_axes=(None, 0), **options)


def second(loss, *args):
    """The gradient, and Hessian products in both mixes, along the arguments themselves."""
    both = tuple(range(len(args)))
    gradient = jax.grad(loss, both)
    inner = lambda *xs: sum(
        jnp.vdot(a, b).real for a, b in zip(gradient(*xs), jax.lax.stop_gradient(args), strict=True)
    )
    return gradient(*args), jax.jvp(gradient, args, args)[1], jax.grad(inner, both)(*args)


# --- the same function ---------------------------------------------------------------------

CUTS = [
    (5, False, 0),
    (5, False, 1),
    (3, False, 0),
    (3, False, 1),
    (3, False, 2),
    (3, False, 3),
    (2, False, 3),
    (10, False, 0),
    (10, False, 1),
    (12, False, 1),
    (1, False, 1),
    (2, False, 99),
    (5, True, 0),
    (3, True, 0),
    (4, True, 1),
    (4, True, 2),
    (3, True, 3),
    (7, True, 1),
]


@pytest.mark.parametrize(("chunk_size", "interleaved", "retain"), CUTS)
def test_value_and_all_derivatives_are_those_of_the_loop(chunk_size, interleaved, retain):
    run = chunked(chunk_size, interleaved=interleaved, retain=retain)
    loop = lambda w, x: by_loop(lambda i, c: embed(w, c), x, chunk_size, interleaved)
    same(jax.jit(run)(W, X), loop(W, X))
    ours = jax.jit(functools.partial(second, lambda w, x: contrast(run(w, x))))(W, X)
    same(ours, second(lambda w, x: contrast(loop(w, x)), W, X), 1e-11, 1e-11)


@pytest.mark.parametrize("interleaved", [False, True])
def test_without_jit_too(interleaved):
    run = chunked(4, interleaved=interleaved)
    same(run(W, X), embed(W, X))
    loss = lambda f: lambda w, x: contrast(f(w, x))
    same(jax.grad(loss(run), (0, 1))(W, X), jax.grad(loss(embed), (0, 1))(W, X), 1e-11)


@pytest.mark.parametrize("retain", [0, 1, 3])
def test_complex_derivatives_of_both_orders(retain):
    run = gt.chunked(embed, 4, in_axes=(None, 0), retain=retain)
    x = X + 1j * X[::-1]
    ours = jax.jit(functools.partial(second, lambda w, x: contrast(run(w, x))))(Z, x)
    same(ours, second(lambda w, x: contrast(embed(w, x)), Z, x), 1e-10, 1e-10)
    gradient = gt.grad(lambda w: contrast(run(w, x)))(Z)
    same(gradient, jnp.conj(jax.grad(lambda w: contrast(embed(w, x)))(Z)), 1e-11)


def test_a_closed_form():
    square = gt.chunked(lambda x: x**2, 2)
    x = jnp.asarray([1.0, 2.0, 3.0])
    loss = lambda x: square(x).sum() ** 2
    same(jax.grad(loss)(x), 4 * x * (x**2).sum())
    hessian = 8 * jnp.outer(x, x) + 4 * (x**2).sum() * jnp.eye(3)
    same(jax.hessian(loss)(x), hessian)
    same(jax.jacrev(jax.grad(loss))(x), hessian)


def test_finite_differences():
    run = chunked(3, retain=2)
    loss = jax.jit(lambda w: contrast(run(w, X)))
    direction = jnp.cos(W)
    step = 1e-5
    slope = (loss(W + step * direction) - loss(W - step * direction)) / (2 * step)
    assert abs(jnp.vdot(jax.grad(loss)(W), direction) - slope) < 1e-7 * abs(slope)


def test_axes_of_inputs_and_outputs_in_trees():
    def f(p, batch, scale=1.0):
        a, b = batch["a"], batch["b"]  # (3, c) and (c,)
        return {"left": p["w"].T @ a * scale, "right": (b, jnp.outer(jnp.ones(2), b**2)[None])}

    p = {"w": W}
    batch = {"a": X.T, "b": X[:, 0]}
    for interleaved in (False, True):
        run = gt.chunked(
            f,
            4,
            in_axes=(None, {"a": -1, "b": 0}),
            out_axes={"left": -1, "right": (0, 2)},
            interleaved=interleaved,
        )
        same(run(p, batch, scale=2.0), f(p, batch, scale=2.0))
        loss = lambda g: (
            lambda p, b: sum(jnp.sum(jnp.sin(y) ** 2) for y in jax.tree.leaves(g(p, b)))
        )
        same(jax.grad(loss(run), (0, 1))(p, batch), jax.grad(loss(f), (0, 1))(p, batch))


def test_integer_and_unused_outputs_numpy_batches_and_static_arguments():
    def f(w, x, tokens, name):
        assert name == "static"
        return embed(w, x), tokens * 2, (x > 0), x[:, :0]

    run = gt.chunked(f, 4, in_axes=(None, 0, 0, None))
    tokens = np.arange(10)
    same(run(W, np.asarray(X), tokens, "static"), f(W, X, jnp.asarray(tokens), "static"))
    loss = lambda g: lambda w: contrast(g(w, X, tokens, "static")[0])
    same(jax.grad(loss(run))(W), jax.grad(loss(f))(W), 1e-11)


def test_an_empty_tree_is_an_output_and_an_argument():
    run = gt.chunked(lambda x, none: ({}, x * 2, None), 4)
    same(run(X, None), ({}, X * 2, None))
    assert gt.chunked(lambda x: (), 4)(X) == ()


def test_outputs_need_not_have_one_entry_for_each_example():
    run = gt.chunked(lambda x: x.sum(0, keepdims=True), 4)
    same(run(X), jnp.stack([X[:4].sum(0), X[4:8].sum(0), X[8:].sum(0)]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_are_kept(dtype):
    w, x = W.astype(dtype), X.astype(dtype)
    run = chunked(4)
    assert run(w, x).dtype == dtype
    gradient = jax.grad(lambda w: contrast(run(w, x)).astype("float32"))(w)
    assert gradient.dtype == dtype
    exact = jax.grad(lambda w: contrast(embed(w, x.astype("float64"))))(w.astype("float64"))
    tolerance = 1e-5 if dtype == "float32" else 0.1
    assert jnp.linalg.norm(gradient - exact) < tolerance * jnp.linalg.norm(exact)


# --- lists ---------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("retain", [0, 1, 2])
def test_a_list_of_equal_examples_is_scanned(interleaved, retain):
    calls = []

    def f(w, xs):
        calls.append(len(xs))
        return jnp.stack([jnp.sin(x @ w) for x in xs])

    run = gt.chunked(f, 4, in_axes=(None, 0), interleaved=interleaved, retain=retain)
    loss = lambda run: lambda w, xs: contrast(run(w, xs))
    same(jax.grad(loss(run), (0, 1))(W, list(X)), jax.grad(loss(f), (0, 1))(W, list(X)), 1e-11)
    assert len(calls) == 2 + 1  # two sizes of chunks; the plain function


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_list_of_unequal_examples_may_give_a_list(interleaved):
    def f(w, xs):
        return [{"y": jnp.sin(x @ w), "n": jnp.asarray(len(x))} for x in xs]

    xs = [X[:3], X[3:6], X[6:7], X[7:8], X[8:9]]
    run = gt.chunked(f, 2, in_axes=(None, 0), interleaved=interleaved)
    same(run(W, xs), f(W, xs))
    loss = lambda f: lambda w: contrast(jnp.concatenate([out["y"] for out in f(w, xs)]))
    same(jax.jit(jax.grad(loss(run)))(W), jax.grad(loss(f))(W), 1e-11)


def test_a_list_of_equal_examples_may_give_a_list_of_what_was_scanned():
    run = gt.chunked(lambda xs: [x * 2 for x in xs], 3)
    same(run(list(X)), [x * 2 for x in X])


def test_what_is_no_array_in_a_list_reaches_f_as_it_is():
    def f(xs):
        assert all(isinstance(name, str) for name, _ in xs)
        return jnp.stack([x * len(name) for name, x in xs])

    names = ["a", "bb", "a", "bb", "a", "cc"]
    xs = list(zip(names, np.asarray(X), strict=False))
    same(gt.chunked(f, 2)(xs), jnp.stack([X[i] * len(n) for i, n in enumerate(names)]))


# --- keys ----------------------------------------------------------------------------------


def dropped(key, w, x):
    return embed(w, x) * jax.random.bernoulli(key, 0.5, (len(x), 4))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("retain", [0, 1, 2])
def test_each_chunk_draws_its_own_mask_and_both_passes_the_same(interleaved, raw, retain):
    key = jax.random.PRNGKey(3) if raw else gt.key(3)
    run = gt.chunked(
        dropped, 2, in_axes=(None, None, 0), key_argnums=0, interleaved=interleaved, retain=retain
    )
    fold = jax.random.fold_in
    loop = lambda w, x: by_loop(lambda i, c: dropped(fold(key, i), w, c), x, 2, interleaved)
    same(run(key, W, X), loop(W, X))
    ours = jax.jit(jax.grad(lambda w, x: contrast(run(key, w, x)), (0, 1)))(W, X)
    same(ours, jax.grad(lambda w, x: contrast(loop(w, x)), (0, 1))(W, X), 1e-11)


def test_keys_of_examples_are_split_like_a_batch():
    keys = gt.split(gt.key(0), 10)
    f = jax.vmap(lambda key, x: x * jax.random.normal(key))
    for interleaved in (False, True):
        same(gt.chunked(f, 4, interleaved=interleaved)(keys, X), f(keys, X))


def test_a_key_that_is_none_is_one():
    run = gt.chunked(lambda x, key: x if key is None else x * 0, 4, key_argnums=1)
    same(run(X, None), X)


def test_what_is_no_key_is_refused():
    with pytest.raises(GradtoolsError, match="a key is made by key"):
        gt.chunked(lambda key, x: x, 4, key_argnums=0)(jnp.ones(3), X)


# --- carries -------------------------------------------------------------------------------


def normalised(w, x, state):
    """A batch norm, which needs its statistics only to hand them on, and a state that it uses."""
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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("chunk_size", "retain"), [(5, 0), (3, 0), (3, 1), (3, 2), (2, 9), (20, 1)]
)
def test_a_carry_goes_through_the_chunks_once(chunk_size, interleaved, retain):
    run = gt.chunked(
        normalised,
        chunk_size,
        in_axes=(None, 0, 0),
        carry_argnums=2,
        interleaved=interleaved,
        retain=retain,
    )
    same(run(W, X, STATE), threaded(W, X, chunk_size, interleaved))

    def loss(run, w, x):
        out, state = run(w, x)
        return contrast(out) + jnp.sum(state["mean"] ** 2), state  # the state is no path to w

    plain = lambda w, x: (lambda out, state: (out, jax.lax.stop_gradient(state)))(
        *threaded(w, x, chunk_size, interleaved)
    )
    both = {"argnums": (0, 1), "has_aux": True}
    ours = jax.jit(jax.grad(lambda w, x: loss(lambda *a: run(*a, STATE), w, x), **both))(W, X)
    same(ours, jax.grad(lambda w, x: loss(plain, w, x), **both)(W, X), 1e-11)
    value = lambda f: lambda w: contrast(f(w, X)[0])
    ours = jax.jit(jax.hessian(value(lambda w, x: run(w, x, STATE))))(W)
    same(ours, jax.hessian(value(plain))(W), 1e-10, 1e-10)


def test_carries_are_not_differentiated():
    run = gt.chunked(normalised, 3, in_axes=(None, 0, 0), carry_argnums=2)
    loss = lambda mean: contrast(run(W, X, {**STATE, "mean": mean})[0])
    same(jax.grad(loss)(STATE["mean"]), jnp.zeros(4))
    same(jax.jvp(loss, (STATE["mean"],), (jnp.ones(4),))[1], jnp.zeros(()))


def test_several_carries_come_as_a_tuple():
    f = lambda a, x, b: (x + a, (a + 1, {"b": b["b"] * x.sum()}))
    out, carry = gt.chunked(f, 4, carry_argnums=(0, 2))(0, X, {"b": 1.0})
    same(out, X + jnp.repeat(jnp.arange(3.0), 4)[:10, None])
    assert carry[0] == 3
    np.testing.assert_allclose(carry[1]["b"], X[:4].sum() * X[4:8].sum() * X[8:].sum())


def test_a_key_may_be_a_carry():
    def f(key, x):
        now, key = jax.random.split(key)
        return x * jax.random.normal(now), key

    out, last = gt.chunked(f, 4, carry_argnums=0)(gt.key(0), X)
    key, expected = gt.key(0), []
    for r in rows_of(10, 4):
        part, key = f(key, X[r])
        expected.append(part)
    same(out, jnp.concatenate(expected))
    assert last == key


@pytest.mark.parametrize(
    "change", [lambda c: c.astype(jnp.float32), lambda c: c[:2], lambda c: c > 0]
)
@pytest.mark.parametrize("chunk_size", [2, 10])
def test_a_carry_that_changes_its_type_is_refused(change, chunk_size):
    f = lambda c, x: (x, {"c": change(c["c"])})
    with pytest.raises(GradtoolsError, match=r"new carry for argument 0\['c'\].*float64 of shape"):
        gt.chunked(f, chunk_size, carry_argnums=0)({"c": jnp.ones(3)}, X)


def test_a_carry_that_is_no_array_is_refused():
    with pytest.raises(GradtoolsError, match=r"carry at argument 0\[0\] is a str"):
        gt.chunked(lambda c, x: (x, c), 2, carry_argnums=0)(["a"], X)


def test_a_python_number_is_a_carry():
    _out, carry = gt.chunked(lambda c, x: (x, c + 1), 2, carry_argnums=0)(0.0, X)
    assert carry == 5 and carry.dtype == "float64"


# --- nesting -------------------------------------------------------------------------------


def test_under_vmap_and_with_a_mapped_weight():
    run = chunked(4)
    ws, xs = jnp.stack([W, -W, 2 * W]), jnp.stack([X, X + 1, X - 1])
    g = lambda f: jax.grad(lambda w, x: contrast(f(w, x)), (0, 1))
    for axes in ((0, 0), (None, 0), (0, None)):
        args = (ws if axes[0] == 0 else W, xs if axes[1] == 0 else X)
        same(jax.jit(jax.vmap(g(run), axes))(*args), jax.vmap(g(embed), axes)(*args), 1e-10, 1e-11)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_inside_the_frameworks_transforms(wrap):
    loss = lambda f: wrap(lambda w, x: contrast(f(w, x)))
    same(second(loss(chunked(4)), W, X), second(loss(embed), W, X), 1e-10, 1e-10)


def test_inside_a_scan():
    def train(f):
        def step(w, x):
            return w - 0.01 * jax.grad(lambda w: contrast(f(w, x)))(w), contrast(f(w, x))

        return lambda w: jax.lax.scan(step, w, jnp.stack([X, 2 * X]))[1].sum()

    same(jax.jit(jax.grad(train(chunked(4))))(W), jax.grad(train(embed))(W), 1e-10, 1e-11)


def test_chunked_inside_chunked():
    inner = gt.chunked(lambda w, x: embed(w, x), 2, in_axes=(None, 0))
    outer = gt.chunked(lambda w, x: inner(w, x), 5, in_axes=(None, 0))
    ours = jax.jit(functools.partial(second, lambda w, x: contrast(outer(w, x))))(W, X)
    same(ours, second(lambda w, x: contrast(embed(w, x)), W, X), 1e-10, 1e-10)


def test_f_may_close_over_what_is_traced_and_differentiated():
    def loss(w, x):
        return contrast(gt.chunked(lambda x: embed(w, x), 4)(x * w.sum()))

    plain = lambda w, x: contrast(embed(w, x * w.sum()))
    ours = jax.jit(functools.partial(second, loss))(W, X)
    same(ours, second(plain, W, X), 1e-10, 1e-10)


def test_under_gradtools_own_derivatives():
    run = chunked(4)
    same(
        gt.grad(lambda w: contrast(run(w, X)))(W),
        jax.grad(lambda w: contrast(embed(w, X)))(W),
        1e-11,
    )
    per_example = lambda f: gt.per_example_grad(lambda w, x: contrast(f(w, x)))
    xs = jnp.stack([X, X + 1, 2 * X])
    same(per_example(run)(W, xs), per_example(embed)(W, xs), 1e-10, 1e-11)
    ours = gt.hvp(lambda w: contrast(run(w, X)), (W,), (W,))
    same(ours, gt.hvp(lambda w: contrast(embed(w, X)), (W,), (W,)), 1e-10, 1e-10)


def test_f_may_take_a_derivative_inside():
    f = lambda w, x: jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(x @ w))))(x)
    run = gt.chunked(f, 4, in_axes=(None, 0))
    ours = second(lambda w, x: contrast(run(w, x)), W, X)
    same(ours, second(lambda w, x: contrast(f(w, x)), W, X), 1e-10, 1e-10)


def test_a_reverse_rule_inside_f_is_obeyed():
    f = lambda w, x: gt.reverse_gradient(gt.clip_gradient(embed(w, x), max_value=0.1))
    run = gt.chunked(f, 4, in_axes=(None, 0))
    loss = lambda f: lambda w: contrast(f(w, X))
    same(jax.jit(jax.grad(loss(run)))(W), jax.grad(loss(f))(W), 1e-11)


def test_two_towers_and_a_tied_weight():
    left, right = chunked(3), chunked(4, retain=0)
    loss = lambda f, g: lambda w, x: jnp.sum(jax.nn.logsumexp(f(w, x) @ g(w, x[::-1]).T, 0))
    ours = jax.jit(functools.partial(second, loss(left, right)))(W, X)
    same(ours, second(loss(embed, embed), W, X), 1e-10, 1e-10)


def test_an_output_that_the_loss_ignores_costs_nothing_and_harms_nothing():
    run = gt.chunked(lambda w, x: (embed(w, x), x @ w), 4, in_axes=(None, 0))
    loss = lambda w: contrast(run(w, X)[0])
    same(jax.grad(loss)(W), jax.grad(lambda w: contrast(embed(w, X)))(W), 1e-11)
    with pytest.raises(GradtoolsError):
        gt.grad(lambda w, u: contrast(run(w, X)[0]) + 0 * jnp.sum(W), argnums=1)(W, W)


# --- tracing -------------------------------------------------------------------------------


def counted(f):
    def count(*args):
        count.calls += 1
        return f(*args)

    count.calls = 0
    return count


@pytest.mark.parametrize(
    ("chunk_size", "options", "traces"),
    [
        (5, {"retain": 0}, 1),
        (5, {"retain": 1}, 1),
        (2, {"retain": 2}, 1),
        (2, {"memory_budget": 500}, 1),
        (4, {}, 2),  # the last chunk has a shape of its own
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
    assert f.calls == traces and step._cache_size() == 1


def test_a_batch_may_be_donated():
    run = chunked(5)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w, x):
        _value, (dw, dx) = jax.value_and_grad(lambda w, x: contrast(run(w, x)), (0, 1))(w, x)
        return w - 0.1 * dw, x - 0.1 * dx

    w, x = W + 0, X + 0
    expected = jax.grad(lambda w, x: contrast(embed(w, x)), (0, 1))(W, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(w, x)
    same(found, (W - 0.1 * expected[0], X - 0.1 * expected[1]), 1e-11)
    assert w.is_deleted() and x.is_deleted()


# --- what is said --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gt.chunked(embed, 0), "chunk_size is 0; expected a whole number of examples"),
        (lambda: gt.chunked(embed, 2.0), "chunk_size is 2.0"),
        (lambda: gt.chunked(embed, 2, retain=-1), "retain is -1"),
        (lambda: gt.chunked(embed, 2, memory_budget=-1), "memory_budget is -1"),
        (lambda: gt.chunked("no", 2), "f is a str; expected a function"),
        (lambda: gt.chunked(embed, 2)(W, X), "batch sizes differ: 3 in argument 0, 10 in"),
        (lambda: gt.chunked(embed, 2, in_axes=(None, 0))(W, X[:0]), "the batch is empty"),
        (lambda: gt.chunked(embed, 2, in_axes=(None, 2))(W, X), "no axis 2 to split on"),
        (lambda: gt.chunked(embed, 2, in_axes=0)(1.0, 2.0), "no argument is split"),
        (lambda: gt.chunked(embed, 2, in_axes=(None,))(W, X), "expected one entry for each of"),
        (lambda: gt.chunked(jnp.sum, 2)(X), "no axis 0 to join chunks on"),
        (lambda: gt.chunked(lambda x: 1.0, 2)(X), "expected an array"),
        (lambda: gt.chunked(lambda x: x, 2, out_axes=(0, 0))(X), "out_axes holds"),
        (lambda: gt.chunked(lambda x: x @ x.T, 3)(X), "cannot be joined on axis 0"),
        (
            lambda: gt.chunked(lambda x: jnp.sum(x, 0), 2, interleaved=True)(X),
            "with interleaved=True the order is restored",
        ),
        (lambda: gt.chunked(lambda c, x: x, 2, carry_argnums=0)(1.0, X), "returns a pair"),
        (
            lambda: gt.chunked(lambda c, x: (x, (c, c)), 2, carry_argnums=0)(1.0, X),
            "f's carry at chunk 0 has the structure",
        ),
        (
            lambda: gt.chunked(lambda c, x: (x, c), 2, carry_argnums=0, key_argnums=0)(1.0, X),
            "name the same argument",
        ),
        (
            lambda: gt.chunked(lambda x: (x,) * (1 + (len(x) < 4)), 4)(X),
            "f's output at chunk 2 has the structure",
        ),
    ],
)
def test_bad_input_is_refused_in_words(call, message):
    with pytest.raises(GradtoolsError, match=message):
        call()


def test_nothing_is_replayed_in_jax():
    assert gt.is_replaying() is False
    seen = []
    run = gt.chunked(lambda x: seen.append(gt.is_replaying()) or x**2, 4)
    jax.grad(lambda x: run(x).sum())(X)
    assert seen == [False, False]


@pytest.mark.parametrize("retain", [0, 2])
def test_a_progress_bar_moves_once_for_each_chunk(monkeypatch, retain):
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
    run = chunked(4, progress=True, retain=retain)
    step = jax.jit(jax.grad(lambda w: contrast(run(w, X))))
    for _ in range(2):
        moves.clear()
        same(step(W), jax.grad(lambda w: contrast(embed(w, X)))(W), 1e-11)
        jax.effects_barrier()
        assert moves == [("open", 3), 1, 2, 3, "close"]


def test_a_progress_bar_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr("gradtools.jax.chunking.find_spec", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    with pytest.raises(GradtoolsError, match="needs the package tqdm"):
        chunked(4, progress=True)(W, X)


def test_no_callback_is_in_the_program_unless_asked_for():
    text = str(jax.make_jaxpr(jax.grad(lambda w: contrast(chunked(4)(w, X))))(W))
    assert "callback" not in text
