"""Defines programs that test recomputation in JAX with callbacks, random keys and modules.

Each program is called with an operator, such as `chunked`, and with its reference in `PLAIN`, and
returns a pytree: values, gradients and the final state, such as the calls of a callback. The two
results must agree, or the operator must raise an error.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support.scenarios import Table

PROGRAMS = Table()


def program(refused: str | None = None, operator: str = "chunked", name: str = "") -> Any:
    """Register a program of an operator; `refused` matches the error that gradtools may raise."""
    return PROGRAMS.add(name, refused, operator=operator)


# --- the plain loops --------------------------------------------------------------------------


def loop(f: Any, size: int, in_axes: Any = 0, out_axes: int = 0, **options: Any) -> Any:
    """Return the reference for `chunked`, which calls f for each chunk in a Python loop."""
    keys, carried = options.get("key_argnums", ()), options.get("carry_argnums", ())
    keys = (keys,) if isinstance(keys, int) else keys
    carried = (carried,) if isinstance(carried, int) else carried

    def run(*args: Any) -> Any:
        axes = (in_axes,) * len(args) if isinstance(in_axes, int) else in_axes
        axes = [None if i in (*keys, *carried) else a for i, a in enumerate(axes)]
        args, outs = list(args), []
        whole = next(i for i, a in enumerate(axes) if a is not None)
        count = _length(args[whole], axes[whole])
        starts = range(0, max(count, 1), size)  # an empty batch has one empty chunk
        for number, start in enumerate(starts):
            rows = slice(start, min(start + size, count))
            if options.get("interleaved"):
                rows = slice(number, None, len(starts))
            one = [_cut(x, a, rows) for x, a in zip(args, axes, strict=True)]
            for i in keys:
                one[i] = jax.random.fold_in(one[i], number)
            out = f(*one)
            if carried:
                out, new = out
                for i, x in zip(carried, new if len(carried) > 1 else (new,), strict=True):
                    args[i] = jax.tree.map(jax.lax.stop_gradient, x)
            outs.append((out, rows))
        joined = _joined([o for o, _ in outs], out_axes)
        if options.get("interleaved"):
            order = np.argsort(np.concatenate([np.arange(count)[r] for _, r in outs]))
            joined = jax.tree.map(lambda x: x[order], joined)
        if not carried:
            return joined
        states = tuple(args[i] for i in carried)
        return joined, states if len(states) > 1 else states[0]

    return run


def once(f: Any, **options: Any) -> Any:
    """Return f itself, which is the reference for `checkpoint` and `frozen`."""
    return f


PLAIN = {"chunked": loop, "checkpoint": once, "frozen": once}


def _length(x: Any, axis: Any) -> int:
    return len(x) if isinstance(x, list) else jnp.shape(jax.tree.leaves(x)[0])[axis]


def _cut(x: Any, axis: Any, rows: slice) -> Any:
    if axis is None:
        return x
    if isinstance(x, list):
        return x[rows]
    return jax.tree.map(lambda y: y[(slice(None),) * axis + (rows,)], x)


def _joined(outs: list[Any], axis: int) -> Any:
    if isinstance(outs[0], list):
        return [x for out in outs for x in out]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *outs)


# --- helpers of the programs --------------------------------------------------------------


def batch(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(3).normal(size=shape))


X, W = batch(7, 3), batch(3, 3)
encode = lambda w, x: jnp.tanh(x @ w)


def both(f: Any, *args: Any) -> Any:
    """Return the value and the gradients of a loss that is not a sum over the outputs of f."""
    loss = lambda *a: (lambda z: jnp.sum(z) ** 2 + jnp.sum(z**3))(f(*a))
    return jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


class Counter:
    """A callback that returns how often it has been called with the same input.

    The results do not depend on the order of calls, which XLA does not guarantee.
    """

    def __init__(self) -> None:
        self.seen: dict[bytes, int] = {}

    @property
    def calls(self) -> int:
        return sum(self.seen.values())

    def __call__(self, x: Any) -> Any:
        key = np.asarray(x).tobytes()
        self.seen[key] = self.seen.get(key, 0) + 1
        return np.asarray(x) * 0 + self.seen[key]


def stateful_callback(counter: Counter, x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(counter, shape, jax.lax.stop_gradient(x))


# --- callbacks to the host --------------------------------------------------------------------


@program()
def a_callback_that_counts(chunked: Any) -> Any:
    counter = Counter()
    f = lambda w, x: encode(w, x) * stateful_callback(counter, x)
    found = both(lambda w: chunked(f, 3, (None, 0))(w, X), W)
    jax.block_until_ready(found)
    return found, counter.calls


def _io(chunked: Any, ordered: bool, **options: Any) -> Any:
    from jax.experimental import io_callback

    note = Counter()

    def f(w: Any, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return encode(w, x) * io_callback(note, shape, jax.lax.stop_gradient(x), ordered=ordered)

    found = jax.jit(lambda w: both(lambda w: chunked(f, 3, (None, 0), **options)(w, X), w))(W)
    jax.block_until_ready(found)
    jax.effects_barrier()
    return found, note.calls


@program(refused="Effects not supported")
def an_io_callback(chunked: Any) -> Any:
    return _io(chunked, ordered=False)


# --- randomness and carries -------------------------------------------------------------------


def _noisy(w: Any, x: Any, key: Any) -> Any:
    return encode(w, x) * jax.random.bernoulli(key, 0.5, (*x.shape[:1], w.shape[1]))


@program(refused="with a key that chunks share")
def a_key_that_is_captured(chunked: Any) -> Any:
    key = jax.random.key(1)
    return both(lambda w: chunked(lambda w, x: _noisy(w, x, key), 3, (None, 0))(w, X), W)


@program()
def a_key_that_is_carried(chunked: Any) -> Any:
    def f(w: Any, x: Any, key: Any) -> Any:
        key, now = jax.random.split(key)
        return _noisy(w, x, now), key

    g = chunked(f, 3, (None, 0, None), carry_argnums=2)
    return both(lambda w: g(w, X, jax.random.key(4))[0], W)


# --- models -----------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rate: float = 0.5) -> None:
        rngs = nnx.Rngs(0)
        double = {"param_dtype": jnp.float64, "rngs": rngs}
        self.linear = nnx.Linear(3, 3, **double)
        self.norm = nnx.BatchNorm(3, **double)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


def _trained(run: Any, net: Any = None) -> Any:
    """Return the gradients of a module's parameters and of X, and the module's state afterwards."""
    net = Net() if net is None else net
    loss = lambda net, x: (lambda z: jnp.sum(z) ** 2 + jnp.sum(z**3))(run(net, x))
    value, grads = nnx.value_and_grad(loss, argnums=(0, 1))(net, X)
    return value, jax.tree.leaves(grads), _numbers(net)


def _numbers(net: Any) -> Any:
    state = nnx.state(net, nnx.Not(nnx.RngKey))
    return jax.tree.leaves(state)


@program()
def a_module_of_nnx(chunked: Any) -> Any:
    return _trained(lambda net, x: chunked(net, 3)(x))


@program()
def a_module_of_nnx_in_a_closure(chunked: Any) -> Any:
    return _trained(lambda net, x: chunked(lambda x: net(x) * 2, 2)(x))


@program()
def a_module_of_nnx_as_an_argument(chunked: Any) -> Any:
    return _trained(lambda net, x: chunked(lambda net, x: net(x), 4, (None, 0))(net, x))


@program(refused="from a different trace level")
def a_stream_of_nnx_that_is_captured(chunked: Any) -> Any:
    rngs = nnx.Rngs(noise=3)
    f = lambda w, x: encode(w, x) * jax.random.normal(rngs.noise(), x.shape)
    found = both(lambda w: chunked(f, 3, (None, 0))(w, X), W)
    return found, _numbers(rngs)


@program()
def a_stream_of_nnx_that_f_draws_from(chunked: Any) -> Any:
    rngs = nnx.Rngs(noise=3)
    f = lambda x: x * jax.random.normal(rngs.noise(), x.shape)
    return chunked(f, 3)(X), chunked(f, 3)(X), _numbers(rngs)


@program(operator="checkpoint")
def a_module_of_nnx_in_checkpoint(checkpoint: Any) -> Any:
    return _trained(lambda net, x: checkpoint(net)(x))


@program(operator="frozen")
def a_module_of_nnx_that_is_frozen(frozen: Any) -> Any:
    net = Net()
    outer = lambda net, x, y: jnp.sum((y * frozen(net)(x)) ** 2)
    inner = lambda net, y: jnp.sum(nnx.grad(outer, argnums=1)(net, X, y) ** 2)
    return nnx.grad(inner, argnums=1)(net, jnp.ones(3)), _numbers(net)


# --- functions of every kind ------------------------------------------------------------------


def _plainly(name: str, f: Any, refused: str | None = None, **options: Any) -> None:
    """Register a program of f(w, x) in chunks of 3, 3 and 1 examples, eager and under jit."""
    for way in ("", " under jit"):

        def run(chunked: Any, jit: bool = bool(way)) -> Any:
            g = lambda w, x: both(chunked(f, 3, (None, 0), **options), w, x)
            return (jax.jit(g) if jit else g)(W, X)

        program(refused, name=name + way)(run)


def _scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]


def _while(w: Any, x: Any) -> Any:
    # the carry of the loop is an integer and has no tangent
    trips = jax.lax.while_loop(lambda n: n < 4, lambda n: n + 1, 0)
    return encode(w, x) * trips


def _with_ref(w: Any, x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros_like(x @ w))
    ref[...] = encode(w, x)
    ref[...] += 1.0
    return ref[...] * 2


_plainly("a scan in f", _scan)
_plainly("a while loop that carries no derivative", _while)
_plainly("a mutable array created by f", _with_ref, "f creates a mutable array")
_plainly("a derivative in f", lambda w, x: jax.grad(lambda x: jnp.sum(encode(w, x) ** 2))(x))
_plainly("an f that couples the examples", lambda w, x: encode(w, x - x.mean(0)))


# --- arguments --------------------------------------------------------------------------------


@program()
def an_empty_batch(chunked: Any) -> Any:
    return chunked(encode, 3, (None, 0))(W, X[:0])


@program(operator="frozen")
def an_array_of_numpy_written_before_the_backward_pass_of_frozen(frozen: Any) -> Any:
    scale = np.ones(3)
    f = lambda x: jnp.tanh(x @ W) * jnp.array(scale)
    out, pull = jax.vjp(lambda x: frozen(f)(x), X)
    scale[:] = 5.0
    return out, pull(out)


@program(refused="from a different trace level")
def a_module_of_nnx_behind_a_jit(chunked: Any) -> Any:
    net = Net()
    return chunked(jax.jit(lambda x: net(x)), 3)(X)


@program(operator="checkpoint")
def a_callback_that_counts_in_checkpoint(checkpoint: Any) -> Any:
    counter = Counter()
    f = lambda w, x: encode(w, x) * stateful_callback(counter, x)
    return both(lambda w: checkpoint(f)(w, X), W), counter.calls


# --- transforms around the operator -----------------------------------------------------------


@program()
def a_tracer_of_a_scan_around(chunked: Any) -> Any:
    def step(w: Any, s: Any) -> Any:
        f = lambda w, x: encode(w * s, x)
        return w - 0.01 * both(lambda w: chunked(f, 3, (None, 0))(w, X), w)[1][0], None

    return jax.lax.scan(step, W, jnp.arange(1.0, 4.0))[0]


# --- control flow around f --------------------------------------------------------------------


@program()
def chunks_inside_of_a_shard_map(chunked: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = lambda w, x: chunked(lambda w, x: encode(w, x), 3, (None, 0))(w, x)
    f = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    return both(f, W, X)


@program(operator="checkpoint")
def a_checkpoint_of_a_function_that_closes_over_another_s_value(checkpoint: Any) -> Any:
    def loss(w: Any) -> Any:
        inner = w * 2
        return jnp.sum(checkpoint(lambda x: encode(inner, x))(X) ** 2)

    return jax.value_and_grad(loss)(W), jax.hessian(lambda s: loss(s * W))(jnp.float64(1.0))
