"""Defines the derivative of a Pallas kernel in JAX and of a custom op in PyTorch.

The program defines log(sum(exp(row))) and its derivative, softmax, as fused kernels. In JAX, both
functions are Pallas kernels, which run in interpret mode on every platform. In PyTorch, each
function is a ``torch.library.custom_op``, which may call a Triton or CUDA kernel. Neither framework
differentiates these kernels in reverse mode. A ``gt.custom_rule`` around the kernel supports every
order and mode.
"""

import numpy as np
from checks import every_derivative, refused
from common import claim, difference, flat, main

ROWS, COLUMNS = 3, 4


def log_sum_exp(gt, backend):
    """Returns a rule for log(sum(exp(row))), differentiable to any order, and its kernel."""
    kernels = {"torch": custom_ops, "jax": pallas_kernels}[backend]()
    value = gt.custom_rule(kernels[0])
    softmax = gt.custom_rule(kernels[1])
    value.defvjp(lambda x: (value(x), x), lambda x, ct: (ct[..., None] * softmax(x),))

    def fwd(x):
        p = softmax(x)
        return p, p

    def bwd(p, ct):
        return (p * (ct - (p * ct).sum(-1)[..., None]),)

    softmax.defvjp(fwd, bwd)
    return value, kernels[0]


def pallas_kernels():
    """Returns both functions as Pallas kernels."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas

    def value(x_ref, y_ref):
        x = x_ref[...]
        most = jnp.max(x, axis=-1, keepdims=True)
        y_ref[...] = (most + jnp.log(jnp.sum(jnp.exp(x - most), axis=-1, keepdims=True)))[:, 0]

    def softmax(x_ref, y_ref):
        x = x_ref[...]
        weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        y_ref[...] = weights / jnp.sum(weights, axis=-1, keepdims=True)

    def called(kernel, shape):
        def call(x):
            out = jax.ShapeDtypeStruct(shape(x), x.dtype)
            return pallas.pallas_call(kernel, out_shape=out, interpret=True)(x)

        return call

    return called(value, lambda x: x.shape[:-1]), called(softmax, lambda x: x.shape)


def custom_ops():
    """Returns both kernels as PyTorch operators with tracing and vmap rules, but no derivatives."""
    import torch

    def operator(name, of, shape):
        op = torch.library.custom_op(f"gradtools_examples::{name}", of, mutates_args=())
        op.register_fake(lambda x: x.new_empty(shape(x)))
        op.register_vmap(lambda info, in_dims, x: (op(x.movedim(in_dims[0], 0)), 0))
        return lambda x: op(x)  # the signature of op has no parameter names

    def value(x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x, -1)

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    return (
        operator("log_sum_exp", value, lambda x: x.shape[:-1]),
        operator("softmax", softmax, lambda x: x.shape),
    )


def show(gt, backend):
    f, kernel = log_sum_exp(gt, backend)
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(2, ROWS * COLUMNS))
    rows = lambda x: x.reshape((ROWS, COLUMNS))
    weights = np.exp(rows(x)) / np.exp(rows(x)).sum(-1, keepdims=True)
    along = weights * (rows(t) - (weights * rows(t)).sum(-1, keepdims=True))
    by_hand = np.log(np.exp(rows(x)).sum(-1)).sum(), weights.ravel(), along.ravel()
    results = every_derivative(gt, backend, lambda x: f(rows(x)).sum(), x, t, by_hand)
    at = gt.asarray(t)

    def third(f):
        second = lambda x: gt.hvp(lambda x: f(rows(x)).sum(), (x,), (at,))[1][0]
        return gt.grad(lambda x: second(x).sum())

    found = third(lambda x: f(x) ** 2)(gt.asarray(x))
    plain = third(lambda x: gt.xp.log(gt.xp.exp(x).sum(-1)) ** 2)(gt.asarray(x))
    apart = difference(flat(gt, found), flat(gt, plain))
    claim(
        f"the third derivative differs from the framework's derivative by {apart:.0e}",
        apart < 1e-12,
    )
    without_a_rule(gt, backend, kernel, x.reshape((ROWS, COLUMNS)))
    return {"log_sum_exp": results, "third": found}


def without_a_rule(gt, backend, kernel, x):
    """Shows how derivatives of the kernel fail without a rule."""
    x = gt.asarray(x)
    said = {"torch": "no autograd formula", "jax": "does not support reverse-mode"}[backend]
    text = refused(lambda: gt.grad(lambda x: kernel(x).sum())(x), Exception, said)
    claim("without a rule, reverse mode through the kernel raises an error", text)
    if backend == "torch":
        import torch

        _, tangent = torch.func.jvp(kernel, (x,), (torch.ones_like(x),))
        claim("without a rule, forward mode silently returns zero", not tangent.any())


if __name__ == "__main__":
    main(show)
