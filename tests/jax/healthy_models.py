"""Defines losses of JAX modules without lost gradients, and losses with planted bugs.

A healthy program calls why_zero with its own model, parameters or optimizer. An entry for a planted
bug contains a loss of `PARAMS`, the expected kind of finding, and a flag that is True if the whole
gradient is lost.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gradtools.jax as gt
from tests.support.scenarios import Table

HEALTHY, PLANTED = Table(), Table()
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 4))
Y = jnp.arange(6) % 3
stop = jax.lax.stop_gradient


def cross_entropy(out, y=Y):
    return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.LayerNorm()(nn.tanh(nn.Dense(8)(x))))


LINEN = Linen()
PARAMS = LINEN.init(KEY, X)
logits = lambda p, x=X: LINEN.apply(p, x)


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(jax.nn.gelu(self.norm(self.a(x)))))


def of_equinox(name, make, run, trained=lambda model: model):
    @HEALTHY.add(name=name)
    def program():
        model = make()
        return gt.why_zero(lambda: run(model), model=trained(model))


MLP = lambda: eqx.nn.MLP(4, 3, 8, 1, activation=jnp.tanh, key=KEY)
over_rows = lambda m: cross_entropy(jax.vmap(m)(X))
of_equinox("a network of equinox", MLP, over_rows)
of_equinox("a network under filter_jit", MLP, lambda m: eqx.filter_jit(over_rows)(m))
of_equinox("weight_norm", lambda: eqx.nn.WeightNorm(eqx.nn.Linear(4, 3, key=KEY)), over_rows)
of_equinox(
    "spectral_norm",
    lambda: eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
        eqx.nn.Linear(4, 3, key=KEY), "weight", key=KEY
    ),
    lambda pair: cross_entropy(jax.vmap(lambda x: pair[0](x, pair[1])[0])(X)),
    lambda pair: pair[0],
)


def recurrent(pair):
    cell, head = pair
    zero = jnp.zeros(5)
    (h, _), _ = jax.lax.scan(lambda c, x: (cell(x, c), None), (zero, zero), X)
    return cross_entropy(head(h)[None], Y[:1])


of_equinox(
    "a recurrent cell in a scan",
    lambda: (eqx.nn.LSTMCell(4, 5, key=KEY), eqx.nn.Linear(5, 3, key=KEY)),
    recurrent,
)


@HEALTHY.add()
def nnx_with_batch_norm_and_dropout():
    net = Nnx()
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    return gt.why_zero(lambda: cross_entropy(net(X)), model=net, optimizer=optimizer)


@HEALTHY.add()
def linen_parameters_and_an_optimizer():
    loss = lambda p: cross_entropy(logits(p))
    return gt.why_zero(loss, PARAMS, optimizer=optax.adam(1e-3))


def of_params(name, loss, *more):
    HEALTHY.add(name=name)(lambda: gt.why_zero(loss, PARAMS, *more))


of_params("checkpointed", lambda p: cross_entropy(jax.checkpoint(logits)(p)))
of_params("an average as auxiliary output", lambda p: (cross_entropy(logits(p)), stop(p)))

ARRAYS = {
    "a sampled action": lambda x: -jax.nn.log_softmax(x)[jax.random.categorical(KEY, x)] * 1.3,
    "a scan that is checkpointed": lambda x: jax.lax.scan(
        jax.checkpoint(lambda c, a: (jnp.tanh(c * x + a), None)), x, X
    )[0].sum(),
}
for _name, _f in ARRAYS.items():
    HEALTHY.add(name=_name)(lambda f=_f: gt.why_zero(f, X[0]))


# --- losses with planted bugs ------------------------------------------------------------

_mean = jax.ShapeDtypeStruct((), np.float32)
_ON_HOST = lambda a: np.float32(a.mean())
for _name, _kind, _whole, _f in (
    ("accuracy", "discrete", False, lambda p: (logits(p).argmax(1) == Y).mean()),
    ("rounded", "zero_derivative", False, lambda p: jnp.round(logits(p)).mean()),
    ("callback", "left_framework", False, lambda p: jax.pure_callback(_ON_HOST, _mean, logits(p))),
    ("branch", "discrete", False, lambda p: jnp.where(logits(p).sum() > 0, 1.0, 2.0)),
    ("reversed", "detached", False, lambda p: gt.reverse_gradient(stop(logits(p))).mean()),
    ("a number", "left_framework", True, lambda p: float(logits(p).sum())),
    ("nan", "nan", True, lambda p: jnp.log(logits(p) - 100).mean()),
):
    PLANTED.add(name=_name, expected=(_kind, _whole))(
        lambda p, f=_f: cross_entropy(logits(p)) + 0.1 * f(p)
    )
