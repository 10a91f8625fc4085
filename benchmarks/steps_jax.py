"""The rows of steps.py in JAX."""

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
    yield Row(f"{name}, memory over that of two scans", "", "2.0", 1.05,
              lambda: peaks[0] / peaks[1])  # fmt: skip
    yield Row(f"{name}, run", peer, "1.00", 1.05, runs[0], runs[1])


def _compiled(f: Any, *args: Any) -> Any:
    jax.clear_caches()
    return jax.jit(lambda *args: f(*args)).lower(*args).compile()


def _finished(f: Any, *args: Any) -> Any:
    return jax.block_until_ready(f(*args))


def by_rule(k: int, rule: Callable[..., Any]) -> Any:
    """One of many rules, of a function of its own."""
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
    yield Row("the same of `jax.custom_vjp`: ms", "", "0.35", None,
              lambda: milliseconds(theirs_of_one))  # fmt: skip


@jax.custom_vjp
def clip_by_hand(x: Any) -> Any:
    """The identity, whose cotangent is clipped by a norm that may overflow."""
    return x


clip_by_hand.defvjp(
    lambda x: (x, None), lambda _, ct: (ct * jnp.minimum(1.0, 1.0 / jnp.sqrt((ct * ct).sum())),)
)


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
    """As XLA counts them."""
    return float(f.lower(ws).compile().cost_analysis()["flops"])


PARTS = (chunks, rules, hosts)
