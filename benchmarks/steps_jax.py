"""Defines the JAX programs that steps.py measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from steps_rows import Row, Run, seconds

import gradtools.jax as gj

WIDTH, LAYERS, CHUNKS, SIZE = 256, 12, 8, 32


def encode(ws: Any, x: Any) -> Any:
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return x


def contrast(z: Any) -> Any:
    return (jax.nn.logsumexp(z @ z.T, axis=1) - (z * z).sum(1)).mean()


def by_chunks(ws: Any, x: Any) -> Any:
    return contrast(gj.chunked(lambda x: encode(ws, x), SIZE)(x))


def two_scans(ws: Any, x: Any) -> Any:
    chunks = x.reshape(CHUNKS, SIZE, WIDTH)
    z = jax.lax.map(partial(encode, ws), chunks)
    value, cts = jax.value_and_grad(lambda z: contrast(z.reshape(-1, WIDTH)))(z)

    def back(total: Any, inputs: Any) -> Any:
        chunk, ct = inputs
        (grads,) = jax.vjp(lambda ws: encode(ws, chunk), ws)[1](ct)
        return jax.tree.map(jnp.add, total, grads), None

    return value, jax.lax.scan(back, jax.tree.map(jnp.zeros_like, ws), (chunks, cts))[0]


def chunks() -> Iterator[Row]:
    ws = list(jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 16)
    x = jax.random.normal(jax.random.key(1), (CHUNKS * SIZE, WIDTH))
    funs = [jax.value_and_grad(by_chunks), two_scans]
    lowered: list[Run] = [partial(_compiled, f, ws, x) for f in funs]
    programs = [compile() for compile in lowered]
    peaks = [program.memory_analysis().temp_size_in_bytes for program in programs]
    runs = [partial(_finished, program, ws, x) for program in programs]
    name, peer = "JAX: `chunked` of 12 x 256", "two scans by hand"
    yield Row(f"{name}, compilation", peer, "2.0", 1.1, lowered[0], lowered[1], count=5)
    yield Row(f"{name}, memory relative to two scans", "", "2.0", 1.05,
              lambda: peaks[0] / peaks[1])  # fmt: skip
    yield Row(f"{name}, run", peer, "1.00", 1.05, runs[0], runs[1])


def _compiled(f: Any, *args: Any) -> Any:
    jax.clear_caches()
    return jax.jit(lambda *args: f(*args)).lower(*args).compile()


def _finished(f: Any, *args: Any) -> Any:
    return jax.block_until_ready(f(*args))


def by_rule(k: int, rule: Callable[..., Any]) -> Any:
    """Returns a new function, sin(x) times k; `rule` is `custom_rule` or `jax.custom_vjp`."""
    f = rule(lambda x: jnp.sin(x) * k)
    f.defvjp(lambda x: (jnp.sin(x) * k, x), lambda x, ct: (ct * k * jnp.cos(x),))
    return f


def rules() -> Iterator[Row]:
    x = jnp.ones((8, 8))
    ours, theirs = (
        [by_rule(k, rule) for k in range(50)] for rule in (gj.custom_rule, jax.custom_vjp)
    )

    def gradients(fs: list[Any]) -> None:
        jax.block_until_ready(jax.grad(lambda x: sum(f(x) for f in fs).sum())(x))  # type: ignore[attr-defined]

    def trace(f: Callable[..., Any]) -> Any:
        return jax.make_jaxpr(lambda x: f(x))(x)

    def milliseconds(f: Callable[..., Any]) -> float:
        return 1e3 * seconds(partial(trace, f), count=25)[0]

    def of_rule(rule: Any) -> Callable[..., Any]:
        f = by_rule(1, rule)
        return jax.grad(lambda x: f(x).sum())

    def of_clip(clip: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x: (clip(x) ** 2).sum())

    yield Row("eager JAX: the gradient of 50 distinct rules", "`jax.custom_vjp`", "3.0", 1.5,
              lambda: gradients(ours), lambda: gradients(theirs), count=5)  # fmt: skip
    clipped, by_hand = of_clip(partial(gj.clip_gradient, max_norm=1.0)), of_clip(clip_by_hand)
    rule, theirs_of_one = of_rule(gj.custom_rule), of_rule(jax.custom_vjp)
    yield Row("JAX: trace of a `clip_gradient` and its gradient: ms", "", "3.0", 1.0,
              lambda: milliseconds(clipped),
              counted=(partial(trace, clipped), partial(trace, by_hand)))  # fmt: skip
    yield Row("JAX: trace of a rule and its gradient: ms", "", "1.9 to 3.3", 1.0,
              lambda: milliseconds(rule),
              counted=(partial(trace, rule), partial(trace, theirs_of_one)))  # fmt: skip
    yield Row("JAX: trace of a `jax.custom_vjp` and its gradient: ms", "", "0.35", None,
              lambda: milliseconds(theirs_of_one))  # fmt: skip


@jax.custom_vjp
def clip_by_hand(x: Any) -> Any:
    """Returns x, and clips the cotangent; the norm may overflow."""
    return x


clip_by_hand.defvjp(
    lambda x: (x, None), lambda _, ct: (ct * jnp.minimum(1.0, 1.0 / jnp.sqrt((ct * ct).sum())),)
)


def _kernel(x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ x) ** 2)


@jax.custom_vjp
def reverse_by_hand(x: Any) -> Any:
    """Returns x, and negates the cotangent."""
    return x


reverse_by_hand.defvjp(lambda x: (x, None), lambda _, ct: (-ct,))


@jax.custom_vjp
def tanh_by_hand(x: Any) -> Any:
    """Returns x, and applies tanh to the cotangent."""
    return x


tanh_by_hand.defvjp(lambda x: (x, None), lambda _, ct: (jnp.tanh(ct),))


def eager() -> Iterator[Row]:
    x = jnp.ones((8, 8)) / 8
    ours, theirs = gj.grad(_kernel), jax.grad(_kernel)
    name = "eager JAX: the gradient"
    yield Row(f"{name} of a function", "`jax.grad`", "1.2", 1.1,
              lambda: ours(x), lambda: theirs(x), count=101)  # fmt: skip
    yield Row(f"{name} of a lambda that is new at each call", "`jax.grad`", "2.2", 1.1,
              lambda: gj.grad(lambda x: _kernel(x))(x),
              lambda: jax.grad(lambda x: _kernel(x))(x), count=101)  # fmt: skip
    for edit, by_hand, named in (
        (gj.reverse_gradient, reverse_by_hand, "reverse_gradient"),
        (partial(gj.clip_gradient, max_norm=1.0), clip_by_hand, "clip_gradient"),
        (lambda x: gj.transform_gradient(x, jnp.tanh), tanh_by_hand, "transform_gradient"),
    ):
        edited, manual = (jax.grad(lambda x, e=e: (e(x) ** 2).sum()) for e in (edit, by_hand))
        yield Row(f"{name} through `{named}`", "`jax.custom_vjp`", "1.65 to 2.3", 1.2,
                  partial(edited, x), partial(manual, x), count=101)  # fmt: skip
    rule, manual = (by_rule(1, make) for make in (gj.custom_rule, jax.custom_vjp))
    yield Row(f"{name} of a rule", "`jax.custom_vjp`", "1.4 to 1.8", 1.3,
              lambda: jax.grad(lambda x: rule(x).sum())(x),
              lambda: jax.grad(lambda x: manual(x).sum())(x), count=101)  # fmt: skip


def _lowered(f: Any, *args: Any) -> Any:
    return jax.jit(lambda *args: f(*args)).lower(*args)


def traces() -> Iterator[Row]:
    x, ws = jnp.ones(8), [jnp.ones((8, 8)) for _ in range(300)]
    net = lambda ws, x: jnp.sum(encode(ws, x))
    name = "JAX: trace and lowering of the gradient of"
    yield Row(f"{name} 300 layers", "`jax.grad`", "2.6", 1.3,
              lambda: _lowered(gj.grad(net), ws, x), lambda: _lowered(jax.grad(net), ws, x),
              count=5)  # fmt: skip

    def of_rules(make: Any) -> Any:
        fs = [by_rule(k, make) for k in range(300)]
        return _lowered(jax.grad(lambda x: sum(f(x) for f in fs).sum()), x)  # type: ignore[attr-defined]

    yield Row(f"{name} 300 distinct rules", "`jax.custom_vjp`", "4.8", 1.5,
              partial(of_rules, gj.custom_rule), partial(of_rules, jax.custom_vjp),
              count=5)  # fmt: skip
    for count in (8, 256):
        batch = jnp.ones((2 * count, 8))

        def chunked(ws: Any, x: Any) -> Any:
            return jnp.sum(gj.chunked(lambda x: encode(ws, x), 2)(x) ** 2)

        def scanned(ws: Any, x: Any, count: int = count) -> Any:
            f = jax.checkpoint(lambda x: encode(ws, x))
            return jnp.sum(jax.lax.map(f, x.reshape(count, 2, 8)) ** 2)

        args = ws[:12], batch
        yield Row(f"{name} `chunked`, {count} chunks", "a scan with remat", "2.0, 5.2", 1.3,
                  lambda args=args: _lowered(jax.grad(chunked), *args),
                  lambda args=args, f=scanned: _lowered(jax.grad(f), *args), count=5)  # fmt: skip

    def second(wrap: Any) -> Any:
        G = wrap(lambda z: encode(ws[:12], z))
        slope = lambda y, z: jnp.sum(jax.grad(lambda z: jnp.sum((y * G(z)) ** 2))(z) ** 2)
        return _lowered(jax.grad(lambda y: sum(slope(y, k * x) for k in range(4))), x)

    yield Row("JAX: trace and lowering of `frozen`, 12 layers, 4 uses", "double backward",
              "7 to 16", 2, partial(second, gj.frozen), partial(second, lambda G: G),
              count=5)  # fmt: skip


def hosts() -> Iterator[Row]:
    xs = jnp.ones((64, 32))
    like = gj.ArraySpec((32,), "float32")

    for name, vectorized, method, before in (
        ("default", False, "sequential", "2.95"), ("vectorized", True, "expand_dims", "0.87"),
    ):  # fmt: skip

        def callback(x: Any, method: str = method) -> Any:
            spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(np.sin, spec, x, vmap_method=method)

        theirs = jax.jit(jax.vmap(callback))
        host = jax.jit(jax.vmap(gj.host_function(np.sin, like, vectorized=vectorized)))
        yield Row(f"JAX: `vmap` of a host function, {name}", f"`jax.pure_callback`, {method}",
                  before, 1.5, partial(_finished, host, xs), partial(_finished, theirs, xs),
                  count=25)  # fmt: skip


def _weights(*sizes: int) -> list[Any]:
    shapes = enumerate(pairwise(sizes))
    return [jax.random.normal(jax.random.key(k), shape) / 8 for k, shape in shapes]


def _dense(ws: Any, x: Any) -> Any:
    for w in ws[:-1]:
        x = jnp.tanh(x @ w)
    return x @ ws[-1]


def _step(f: Any) -> Any:
    return jax.jit(jax.grad(lambda ws: (f(ws) ** 2).mean()))


def _flops(f: Any, ws: Any) -> float:
    """Returns XLA's count of flops."""
    return float(f.lower(ws).compile().cost_analysis()["flops"])


PARTS = (chunks, rules, hosts, eager, traces)
