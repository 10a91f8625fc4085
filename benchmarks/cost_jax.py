"""Defines the JAX functions that cost.py measures: gradtools operators and equivalent code.

The functions of a case compute the same results from the same arrays. The first function uses
gradtools, and the second is hand-written. All functions are timed under `jit`, and XLA's analysis
of the compiled program counts the operations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradtools.jax as gt

Ways = dict[str, Callable[..., Any]]
OURS, HAND = "gradtools", "by hand"
CHUNKS = 4


def arrays(rows: int, width: int) -> tuple[Any, ...]:
    """Returns square matrices w and v, batches x and t of `rows` examples, and one example."""
    draw = np.random.default_rng(0).standard_normal
    w, v = draw((2, width, width)) / width**0.5
    x, t = draw((2, rows, width))
    return tuple(jnp.asarray(a, jnp.float32) for a in (w, v, x, t, draw(width)))


def cases() -> dict[str, Ways]:
    """Returns the functions of `arrays` for each operator; missing packages are left out."""
    made = {}
    for part in (_first_order, _second_order, _edits, _rules, _memory, _accumulation):
        made |= part()
    return made


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def loss(w: Any, x: Any) -> Any:
    return (layer(w, x) ** 2).sum()


def edited(edit: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a function for d loss / dw, with a gradient edit after the layer."""
    f = lambda w, x: (edit(layer(w, x)) ** 2).sum()
    return lambda w, v, x, t, small: jax.grad(f)(w, x)


def _first_order() -> dict[str, Ways]:
    row = lambda w, x: jnp.tanh(x @ w)

    def by_hand_game(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        value, (a, b) = jax.value_and_grad(loss, (0, 1))(w, x)
        return value, (a, -b)

    def at(f: Callable[..., Any]) -> Callable[..., Any]:
        """Converts a function of w, x and t to a function of all arrays."""
        return lambda w, v, x, t, small: f(w, x, t)

    made = {
        "grad": {
            OURS: at(lambda w, x, t: gt.grad(loss)(w, x)),
            HAND: at(lambda w, x, t: jax.grad(loss)(w, x)),
        },
        "value_and_grad": {
            OURS: at(lambda w, x, t: gt.value_and_grad(loss, (0, 1))(w, x)),
            HAND: at(lambda w, x, t: jax.value_and_grad(loss, (0, 1))(w, x)),
        },
        "vjp": {
            OURS: at(lambda w, x, t: gt.vjp(lambda x: layer(w, x), x)[1](t)),
            HAND: at(lambda w, x, t: jax.vjp(lambda x: layer(w, x), x)[1](t)),
        },
        "jvp": {
            OURS: at(lambda w, x, t: gt.jvp(lambda x: layer(w, x), (x,), (t,))),
            HAND: at(lambda w, x, t: jax.jvp(lambda x: layer(w, x), (x,), (t,))),
        },
        "linearize": {
            OURS: at(lambda w, x, t: gt.linearize(lambda x: layer(w, x), x)[1](t)),
            HAND: at(lambda w, x, t: jax.linearize(lambda x: layer(w, x), x)[1](t)),
        },
        "jacobian, reverse": {
            OURS: lambda w, v, x, t, s: gt.jacobian(row, 1, mode="reverse")(w, s),
            HAND: lambda w, v, x, t, s: jax.jacrev(row, 1)(w, s),
        },
        "jacobian, forward": {
            OURS: lambda w, v, x, t, s: gt.jacobian(row, 1, mode="forward")(w, s),
            HAND: lambda w, v, x, t, s: jax.jacfwd(row, 1)(w, s),
        },
        "per_example_grad": {
            OURS: at(lambda w, x, t: gt.per_example_grad(loss)(w, x)),
            HAND: at(lambda w, x, t: jax.vmap(jax.grad(loss), (None, 0))(w, x)),
        },
        "minimax_value_and_grad": {
            OURS: at(lambda w, x, t: gt.minimax_value_and_grad(loss, 0, 1)(w, x)),
            HAND: by_hand_game,
        },
        "mixed_partial": _mixed(),
    }
    if importlib.util.find_spec("equinox"):
        import equinox

        filtered = equinox.filter_grad(loss)
        made["grad"]["equinox.filter_grad"] = at(lambda w, x, t: filtered(w, x))
    return made


def _mixed() -> Ways:
    f = lambda y, g: ((y * g) ** 2).sum()

    def pieces(w: Any, v: Any) -> Callable[[Any], Any]:
        return lambda z: layer(v, layer(w, z))

    def by_hand(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        g, u = jax.jvp(pieces(w, v), (x,), (x,))
        return jax.jvp(lambda g: jax.grad(f)(t, g), (g,), (u,))[1]

    def double_backward(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        first = lambda y: jax.grad(lambda z: f(y, pieces(w, v)(z)))(x)
        return jax.grad(lambda y: (first(y) * x).sum())(t)

    ours = lambda w, v, x, t, small: gt.mixed_partial(f, pieces(w, v), t, x, x)
    return {OURS: ours, HAND: by_hand, "double backward": double_backward}


def _second_order() -> dict[str, Ways]:
    few = lambda w: lambda x: (jnp.tanh(x @ w) ** 2).sum()

    def of_w(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, v, x, t, small: f(lambda w: loss(w, x), w, v)

    def twice(f: Callable[..., Any], w: Any, v: Any) -> Any:
        g, pull = jax.vjp(jax.grad(f), w)
        return g, pull(v)[0]

    modes = {"reverse over reverse": twice}
    modes["forward over reverse"] = lambda f, w, v: jax.jvp(jax.grad(f), (w,), (v,))
    return {
        f"hvp, {mode}": {
            OURS: of_w(
                lambda f, w, v, mode=mode: gt.hvp(f, (w,), (v,), mode=mode.replace(" ", "_"))
            ),
            HAND: of_w(hand),
        }
        for mode, hand in modes.items()
    } | {
        "hessian": {
            OURS: lambda w, v, x, t, small: gt.hessian(few(w))(small),
            HAND: lambda w, v, x, t, small: jax.hessian(few(w))(small),
        }
    }


# --- edits and rules -----------------------------------------------------------------------


def edit_by_hand(edit: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an identity with a custom_vjp that changes the cotangent."""

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, ct: (edit(ct),))
    return identity


def _edits() -> dict[str, Ways]:
    clip = lambda ct: ct * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(ct))
    through = lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)
    known = lambda w, v, x, t, s: edited(lambda y: gt.replace_gradient(y, t))(w, v, x, t, s)
    known_by_hand = lambda w, v, x, t, s: edited(edit_by_hand(lambda ct: t))(w, v, x, t, s)
    made = {
        "reverse_gradient": {
            OURS: edited(gt.reverse_gradient),
            HAND: edited(edit_by_hand(lambda ct: -1.0 * ct)),
        },
        "scale_gradient": {
            OURS: edited(lambda x: gt.scale_gradient(x, 0.5)),
            HAND: edited(edit_by_hand(lambda ct: 0.5 * ct)),
        },
        "stop_gradient": {
            OURS: edited(lambda x: x * gt.stop_gradient(x)),
            HAND: edited(lambda x: x * jax.lax.stop_gradient(x)),
        },
        "clip_gradient": {
            OURS: edited(lambda x: gt.clip_gradient(x, max_norm=1.0)),
            HAND: edited(edit_by_hand(clip)),
        },
        "transform_gradient": {
            OURS: edited(lambda x: gt.transform_gradient(x, lambda ct: 2.0 * ct)),
            HAND: edited(edit_by_hand(lambda ct: 2.0 * ct)),
        },
        "replace_gradient": {OURS: known, HAND: known_by_hand},
        "straight_through": {
            OURS: edited(gt.straight_through(jnp.round)),
            HAND: edited(through),
        },
    }
    if importlib.util.find_spec("optax"):
        import optax

        made["scale_gradient"]["optax"] = edited(lambda x: optax.scale_gradient(x, 0.5))
    return made


def _with_rule(rule: Any, value: Callable[..., Any]) -> Any:
    def fwd(x: Any) -> Any:
        y = value(x)
        return y, y

    rule.defvjp(fwd, lambda y, ct: (ct * y,))
    return rule


def _rules() -> dict[str, Ways]:
    host = gt.host_function(np.exp)
    called = lambda x: jax.pure_callback(np.exp, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    made = {
        "custom_rule": {
            OURS: edited(_with_rule(gt.custom_rule(jnp.exp), jnp.exp)),
            HAND: edited(_with_rule(jax.custom_vjp(jnp.exp), jnp.exp)),
            "jnp.exp": edited(jnp.exp),
        },
        "host_function": {
            OURS: edited(_with_rule(host, host)),
            HAND: edited(_with_rule(jax.custom_vjp(called), called)),
        },
    }
    if importlib.util.find_spec("equinox"):
        import equinox

        rule = equinox.filter_custom_vjp(jnp.exp)
        rule.def_fwd(lambda perturbed, x: (lambda y: (y, y))(jnp.exp(x)))
        rule.def_bwd(lambda y, ct, perturbed, x: ct * y)
        made["custom_rule"]["equinox.filter_custom_vjp"] = edited(rule)
    return made


# --- memory and accumulation ---------------------------------------------------------------


def split(x: Any) -> Any:
    return x.reshape(CHUNKS, -1, *x.shape[1:])


def encode(w: Any, x: Any) -> Any:
    return layer(w, layer(w, x))


def contrast(z: Any) -> Any:
    return jax.nn.logsumexp(z @ z.T, 1).sum()


def _memory() -> dict[str, Ways]:
    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        whole = lambda w, x: contrast(f(w, x))
        return lambda w, v, x, t, small: jax.grad(whole)(w, x)

    def again(w: Any, x: Any) -> Any:
        one = jax.checkpoint(lambda c: encode(w, c))
        return jax.lax.map(one, split(x)).reshape(x.shape)

    def two_scans(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        z = jax.lax.map(lambda c: encode(w, c), split(x))
        cts = jax.grad(lambda z: contrast(z.reshape(x.shape)))(z)

        def back(total: Any, both: Any) -> Any:
            c, ct = both
            return total + jax.vjp(lambda w: encode(w, c), w)[1](ct)[0], None

        return jax.lax.scan(back, jnp.zeros_like(w), (split(x), cts))[0]

    def chunked(w: Any, x: Any) -> Any:
        return gt.chunked(encode, len(x) // CHUNKS, in_axes=(None, 0))(w, x)

    def slopes(frozen: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
            G = frozen(lambda z: layer(v, layer(v, z)))
            first = lambda w: jax.grad(lambda z: loss(w, G(z)))(x)
            return jax.grad(lambda w: (first(w) ** 2).sum())(w)

        return run

    return {
        "chunked": {
            OURS: of(chunked),
            HAND: two_scans,
            "lax.map of jax.checkpoint": of(again),
            "the whole batch": of(encode),
        },
        "checkpoint": {OURS: of(gt.checkpoint(encode)), HAND: of(jax.checkpoint(encode))},
        "frozen": {OURS: slopes(gt.frozen), HAND: slopes(lambda G: G)},
    }


def _accumulation() -> dict[str, Ways]:
    mean = lambda w, x: loss(w, x) / len(x)

    def summed(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        def add(total: Any, c: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(mean)(w, c)), None

        zero = jnp.zeros(()), jnp.zeros_like(w)
        total, _ = jax.lax.scan(add, zero, split(x))
        return jax.tree.map(lambda s: s / CHUNKS, total)

    def added(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        wide = jnp.promote_types(w.dtype, jnp.float32)
        terms = (jax.grad(mean)(w, c).astype(wide) * len(c) for c in split(x))
        return (sum(terms) / len(x)).astype(w.dtype)

    def accumulated(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        found = gt.GradientAccumulator()
        for c in split(x):
            found.add({"w": jax.grad(mean)(w, c)}, len(c))
        return found.mean()

    made = {
        "microbatched_value_and_grad": {
            OURS: lambda w, v, x, t, s: gt.microbatched_value_and_grad(mean, len(x) // CHUNKS)(
                w, x
            ),
            HAND: summed,
        },
        "GradientAccumulator": {OURS: accumulated, HAND: added},
        "accumulate_gradients": {
            OURS: lambda w, v, x, t, s: gt.accumulate_gradients(v, jax.grad(loss)(w, x)),
            HAND: lambda w, v, x, t, s: v + jax.grad(loss)(w, x),
        },
        "assign_gradients": {
            OURS: lambda w, v, x, t, s: gt.assign_gradients(v, jax.grad(loss)(w, x)),
            HAND: lambda w, v, x, t, s: jax.grad(loss)(w, x),
        },
    }
    if importlib.util.find_spec("optax"):
        import optax

        kind = optax.microbatching.AccumulationType.MEAN
        both = jax.value_and_grad(mean)
        made["microbatched_value_and_grad"]["optax.microbatch"] = lambda w, v, x, t, s: (
            optax.microbatch(both, 1, len(x) // CHUNKS, kind)(w, x)
        )
    return made | _modules()


def _modules() -> dict[str, Ways]:
    """Returns functions for the gradient of an equinox layer, or {} if equinox is not installed."""
    if not importlib.util.find_spec("equinox"):
        return {}
    import equinox

    net = equinox.nn.Linear(1, 1, key=jax.random.key(0))

    def of(w: Any) -> Any:
        return equinox.tree_at(lambda n: (n.weight, n.bias), net, (w, w[0]))

    def ours(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        apply, params, state = gt.make_functional(of(w))
        return gt.grad(lambda p: (apply(p, state, x[0])[0] ** 2).sum())(params)

    def by_hand(w: Any, v: Any, x: Any, t: Any, small: Any) -> Any:
        params, static = equinox.partition(of(w), equinox.is_array)
        return jax.grad(lambda p: (equinox.combine(p, static)(x[0]) ** 2).sum())(params)

    return {"make_functional": {OURS: ours, HAND: by_hand}}
