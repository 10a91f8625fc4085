"""Formulas of JAX functions are correct for every function in the table.

Each row of the table is a function and its arguments (`tests/support/formula_rows.py`). The formula
of the function is compared with JAX's own derivatives at order 1, and for every third row at order
2. `BY_NAME` lists the functions that formulas show by name.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import gradtools.jax as gt
from tests.support.formula_rows import rows

RNG = np.random.default_rng(3)


def real(*shape):
    """Return distinct random numbers with absolute values of at least 0.2, away from kinks at 0."""
    x = RNG.normal(size=shape)
    return np.asarray(x + 0.2 * np.sign(x))


def positive(*shape):
    return RNG.uniform(0.5, 2.0, size=shape)


# --- the comparison ----------------------------------------------------------------------


def checked(f, *args, order=1, tolerance=1e-8):
    """Return the formula of f, and assert that it agrees with JAX's own derivatives."""
    moving = [
        any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(arg)) for arg in args
    ]
    given = [jax.tree.map(jnp.asarray, arg) for arg in args]
    argnums = tuple(k for k, m in enumerate(moving) if m)
    found = gt.formula(f, *given, order=order, argnums=argnums)
    assert found.check.error <= tolerance
    return found


# --- the table ---------------------------------------------------------------------------

lax, nn, linalg = jax.lax, jax.nn, jnp.linalg
KEY = jax.random.key(0)
LABELS = jnp.asarray([0, 2, 1])


def dropping_scan(x):
    def step(c, k):
        return c * (1 + jax.random.uniform(k, ())), c

    return lax.scan(step, x, jax.random.split(KEY, 3))


# An expression in a, b, c and d, and the shapes of these arguments; see `formula_rows`.
TABLE = """
# elementwise
jnp.expm1(a) + jnp.exp2(a)                                   ; (3,2)
jnp.log1p(a) + jnp.sqrt(a) + jnp.reciprocal(a)               ; p(3,2)
jnp.exp(a) + jnp.log(a) + jnp.tanh(a) + jnp.square(a)        ; z(3,2)
jnp.abs(a) + jnp.real(a) * jnp.imag(a)                       ; z(3,2)
nn.relu(a) + nn.relu6(a)                                     ; (3,2)
nn.silu(a) + nn.softplus(a) + nn.log_sigmoid(a)              ; (3,2)
nn.gelu(a) + nn.gelu(a, approximate=False)                   ; (3,2)
a ** b + a ** 3 + a ** (-2) + 2 ** a                         ; p(3) (3)
jnp.logaddexp(a, b)                                          ; (4) (4)
jnp.clip(a, -0.5, 0.5)                                       ; (6)
jnp.where(a > 0, a * b, jnp.exp(a))                          ; (6) (6)
a * lax.stop_gradient(jnp.sin(a))                            ; (4)
lax.complex(a, b) ** 2                                       ; (3) (3)
# shapes and indexing
jnp.transpose(a, (2, 0, 1)) * 2                              ; (2,3,4)
a.reshape(6, 2)[:, ::-1]                                     ; (3,4)
jnp.stack([a, b], 1) * jnp.concatenate([a, b]).reshape(3, 2) ; (3) (3)
jnp.split(a, 3)[1] * jnp.split(a, 3)[2]                      ; (6)
jnp.triu(a, 1) + jnp.diag(jnp.diag(a))                       ; (3,3)
a[-1, 1:3]                                                   ; (3,4)
jnp.take_along_axis(a, b, 1)                                 ; (3,4) i[[0,3],[1,1],[2,0]]
a.at[1].set(b)                                               ; (3,4) (4)
a[jnp.asarray([1, 0, 1]), b]                                 ; (3,4) i[0,3,1]
jax.vmap(lambda x, i: x[i])(a, b)                            ; (3,5) i[0,2,3]
nn.one_hot(LABELS, 3) * a                                    ; (3,3)
# reductions and products
a - jnp.mean(a, 1, keepdims=True)                            ; (2,3)
jnp.var(a, ddof=1) * jnp.std(a, 0)                           ; (4,3)
linalg.norm(a)                                               ; z(4)
jnp.einsum('bij,bkj->kib', a, b)                             ; (2,3,4) (2,5,4)
jnp.einsum('ij,jk,kl->il', a, b, c)                          ; (2,3) (3,4) (4,2)
a @ b + c                                                    ; z(3,4) z(4) z(3)
# layers
nn.softmax(a, 0) + nn.log_softmax(a)                         ; (3,2)
nn.softmax(a, where=jnp.asarray([True, True, False]))        ; (2,3)
optax.softmax_cross_entropy(a, b).mean()                     ; (3,4) p(3,4)
optax.softmax_cross_entropy_with_integer_labels(a, LABELS).mean() ; (3,4)
nn.standardize(a, axis=1)                                    ; (2,3)
a / jnp.sqrt(jnp.mean(a ** 2, -1, keepdims=True) + 1e-05) * b ; (2,3) (3)
nn.dot_product_attention(a, b, c)                            ; (1,3,2,2) (1,3,2,2) (1,3,2,2)
lax.conv(a, b, (2, 2), 'VALID')                              ; (1,2,5,5) (2,2,3,3)
jnp.where(jax.random.bernoulli(KEY, 0.5, (4,)), a / 0.5, 0)  ; (4)
a * jax.random.normal(KEY, (4,))                             ; (4)
# linear algebra and control flow
linalg.solve(a, b)                                           ; s(3,3) (3)
lax.scan(lambda h, x: (jnp.tanh(a * h + x),) * 2, b, c)      ; (2) (2) (3,2)
lax.cond(a > 0, jnp.sin, lambda x: x ** 2, b)                ; () (3)
dropping_scan(a)                                             ; ()
jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(a)             ; (3)
jax.grad(lambda y: jnp.sum(y ** 3))(a)                       ; (3)
jax.jvp(jnp.sin, (a,), (a,))[1]                              ; (3)
"""
ROWS = rows(TABLE)


def model(module, x, **options):
    """Return a flax.linen module as a function, and its arguments: the parameters and x."""
    shapes = jax.eval_shape(partial(module.init, **options), KEY, x)
    variables = jax.tree.map(lambda s: positive(*s.shape), shapes)
    params = variables.pop("params")

    def run(params, x):
        return module.apply({**variables, "params": params}, x, mutable=list(variables))[0]

    return run, (params, x)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(2)(y, y)
        return x + linen.Dense(4)(linen.gelu(linen.Dense(6)(linen.LayerNorm()(x))))


def of_nnx():
    """Return a flax.nnx module as a function, and its arguments: the state and an input."""
    layers = nnx.Sequential(
        nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    )
    definition, state = nnx.split(layers)
    return (lambda state, x: nnx.merge(definition, state)(x)), (state, real(2, 3))


MODULES = {
    "Dense": lambda: model(linen.Dense(3), real(2, 4)),
    "LayerNorm": lambda: model(linen.LayerNorm(), real(2, 4)),
    "RMSNorm": lambda: model(linen.RMSNorm(), real(2, 4)),
    "BatchNorm": lambda: model(linen.BatchNorm(use_running_average=False), real(5, 3)),
    "BatchNorm eval": lambda: model(linen.BatchNorm(use_running_average=True), real(5, 3)),
    "RNN": lambda: model(linen.RNN(linen.LSTMCell(2, param_dtype=float)), real(1, 3, 2)),
    "a transformer block": lambda: model(Block(), real(1, 3, 4)),
    "nnx": of_nnx,
}


@pytest.mark.quick_at("Dense")
@pytest.mark.sweep_at("RNN", "a transformer block")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_its_formula(name):
    f, args = MODULES[name]()
    assert set(checked(f, *args, tolerance=1e-5 if "nnx" in name else 1e-8).marked) <= BY_NAME


# Functions that a formula shows by name because they have no symbolic form.
BY_NAME = set(
    """
    all angle any arccos arcsin arcsinh arctan arctan2 arctanh argmax argsort cbrt cho_solve
    cholesky clip concatenate cond conv convolution cummax cumprod cumsum det diag diagonal digamma
    dynamic_slice eigh erfc erfinv exp2 fft flip floor fmod gather hypot ifft interp inv
    is_finite lgamma logaddexp logcumsumexp bitwise_and bitwise_or max_pool maximum min_pool
    minimum pad pinv polygamma power prod qr quantile relu6 remainder round scan scatter
    scatter_add select slogdet solve sort stack sum_pool svd take take_along_axis tan tile topk
    triangular_solve unbind update where xlogy
    """.split()
)


def program(expression, count):
    """Return the expression as a function of its arguments."""
    return eval(f"lambda {', '.join('abcd'[:count])}: {expression}", globals())


@pytest.mark.sampled(36, 76)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_function_has_its_formula(row):
    args = row.arrays(np.random.default_rng(3))
    order = 2 if ROWS.index(row) % 3 == 0 else 1
    single = "attention" in row.expression  # JAX computes the softmax of attention in float32
    tolerance = 1e-5 if single else 1e-9
    formula = checked(program(row.expression, len(args)), *args, order=order, tolerance=tolerance)
    assert set(formula.marked) <= BY_NAME
    assert str(formula)


# --- the text of formulas ----------------------------------------------------------------


def lines(f, *args, section=1, **options):
    """Return the lines of one section of the formula."""
    return gt.formula(f, *map(jnp.asarray, args), **options).lines(section)


@pytest.mark.parametrize(
    "pick",
    [
        lambda z, y: z[jnp.arange(3), y],
        lambda z, y: jnp.take_along_axis(z, y[:, None], axis=1)[:, 0],
    ],
)
def test_labels_are_read_as_one_hot_factors(pick):
    loss = lambda z, y: -pick(nn.log_softmax(z), y).mean()
    assert lines(loss, real(3, 4), np.array([0, 3, 1])) == ["z̄ = L̄ (softmaxⱼ(z) - onehot(y)) / 3"]


def test_the_loss_of_optax_is_read_as_softmax_cross_entropy():
    loss = lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).mean()
    assert lines(loss, real(3, 4), np.array([0, 3, 1])) == ["z̄ = L̄ (softmaxⱼ(z) - onehot(y)) / 3"]


@pytest.mark.parametrize(
    ("key", "of"),
    [
        (KEY, lambda key: key),
        (jax.random.PRNGKey(0), jax.random.wrap_key_data),
        (3, jax.random.key),
    ],
    ids=["a key", "its words", "a seed"],
)
def test_what_a_draw_depends_on_may_be_an_argument(key, of):
    f = lambda x, key: x * jax.random.normal(jax.random.split(of(key))[1], (3,))
    found = gt.formula(f, jnp.asarray(real(3)), jnp.asarray(key))
    assert found.marked == ()
    assert found.check.error < 1e-12


# --- rules and edits ---------------------------------------------------------------------


@gt.custom_rule
def sinh(x):
    return jnp.sinh(x)


def _sinh_forward(x):
    up, down = jnp.exp(x), jnp.exp(-x)
    return (up - down) / 2, (up, down)


sinh.defvjp(_sinh_forward, lambda kept, ct: ((kept[0] + kept[1]) / 2 * ct,))


@jax.custom_vjp
def tripled(x):
    return x**2


tripled.defvjp(lambda x: (tripled(x), x), lambda x, ct: (3 * x * ct,))


@jax.custom_jvp
def halved(x):
    return x**2


halved.defjvp(lambda xs, dxs: (halved(*xs), xs[0] * dxs[0] / 2))
RULES = {
    "a custom_rule": lambda x: sinh(x) * x,
    "jax.custom_vjp": lambda x: tripled(x) * x,
    "jax.custom_jvp": lambda x: halved(x) * x,
    "a rule in a loop": lambda x: lax.scan(lambda c, _: (halved(c), c), x, length=2),
    "a complex rule": lambda x: jnp.abs(tripled(x * (1 + 2j))) ** 2,
    "reverse_gradient": lambda x: gt.reverse_gradient(x, 0.5) ** 2,
    "straight_through": lambda x: gt.straight_through(jnp.round, jnp.tanh)(x) ** 2,
    "replace_gradient": lambda x: gt.replace_gradient(x**2, jnp.arange(3.0)) * x,
    "frozen": lambda x: gt.frozen(jnp.tanh)(x) ** 2,
    "chunked": lambda x: gt.chunked(jnp.tanh, 2)(x) ** 2,
}


@pytest.mark.quick_at("jax.custom_vjp", "reverse_gradient", "replace_gradient")
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_what_its_author_says(name):
    # JAX itself drops the rule of a custom_jvp in a loop that has been differentiated.
    once = ("chunked", "a rule in a loop")
    order = 1 if name in once else 2
    assert str(checked(RULES[name], np.array([0.7, -1.3, 2.1]), order=order))
