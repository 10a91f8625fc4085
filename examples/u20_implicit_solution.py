"""Differentiates solutions of equations: a deep equilibrium layer and a ridge regression.

The derivative of a solution z of F(z, theta) = 0 requires one linear solve with products of dF/dz
and does not depend on the solver, so the iterations are not stored. The derivative is compared with
the derivative of the unrolled iterations, with the closed form, and with jax.lax.custom_root.
"""

import numpy as np
from common import claim, difference, flat, main

WIDTH, BATCH = 12, 6


def show(gt, backend):
    xp, rng = gt.xp, np.random.default_rng(0)
    number = lambda *shape: gt.asarray(rng.normal(size=shape))

    # A deep equilibrium layer: z = tanh(W z + U x), solved by fixed-point iteration.
    weights = {"W": number(WIDTH, WIDTH) / (3 * WIDTH**0.5), "U": number(WIDTH, WIDTH) / WIDTH**0.5}
    x, target = number(BATCH, WIDTH), number(BATCH, WIDTH)
    step = lambda z, p, x: xp.tanh(z @ p["W"] + x @ p["U"])

    def iterate(p, x):
        z = 0 * x
        for _ in range(60):
            z = step(z, p, x)
        return z

    layer = gt.implicit_solution(lambda z, p, x: step(z, p, x) - z, iterate)
    of = lambda f: lambda p: xp.mean((f(p, x) - target) ** 2)
    losses = {"implicit": of(layer), "unrolled": of(iterate)}
    fast = gt.compile if backend == "jax" else lambda f: f
    gradients = {name: fast(gt.grad(loss))(weights) for name, loss in losses.items()}
    apart = difference(flat(gt, gradients["implicit"]), flat(gt, gradients["unrolled"]))
    claim(
        f"equilibrium: the gradients differ from the unrolled gradients by {apart:.1e}",
        apart < 1e-9,
    )
    products = [fast(lambda p, f=f: gt.hvp(f, (p,), (p,))[1][0])(weights) for f in losses.values()]
    apart = difference(*[flat(gt, p) for p in products])
    claim(f"equilibrium: the Hessian products differ by {apart:.1e}", apart < 1e-8)

    p = weights
    train = fast(gt.value_and_grad(losses["implicit"]))
    before = float(train(p)[0])
    for _ in range(100):
        g = train(p)[1]
        p = {name: p[name] - 0.3 * g[name] for name in p}
    after = float(train(p)[0])
    claim(
        f"equilibrium: in 100 training steps the loss goes from {before:.2f} to {after:.2f}",
        after < before,
    )

    # Bilevel optimization: a validation loss trains the penalties of a ridge regression.
    X, V = number(20, 8), number(40, 8)
    true = gt.asarray(np.array([1.0, -2.0, 1.5] + [0.0] * 5))
    y, v = X @ true + number(20), V @ true + number(40) * 0.1
    cost = lambda b, s: xp.mean((X @ b - y) ** 2) + xp.sum(xp.exp(s) * b**2)

    def fitted(s):  # the closed form; any optimizer could be used instead
        A = X.T @ X / 20 + xp.exp(s) * gt.asarray(np.eye(8))
        return xp.linalg.solve(A, (X.T @ y / 20)[:, None])[:, 0]

    ridge = gt.implicit_solution(gt.grad(cost), fitted, "cg")
    validation = lambda f: lambda s: xp.mean((V @ f(s) - v) ** 2)
    start = gt.asarray(np.full(8, -2.0))
    by_rule, plain = (fast(gt.grad(validation(f)))(start) for f in (ridge, fitted))
    apart = difference(flat(gt, by_rule), flat(gt, plain))
    claim(f"ridge: the hypergradient differs from the closed form by {apart:.1e}", apart < 1e-9)
    s, descend = start, fast(gt.value_and_grad(validation(ridge)))
    for _ in range(150):
        s = s - 5.0 * descend(s)[1]
    first, last = float(descend(start)[0]), float(descend(s)[0])
    claim(f"ridge: the validation loss goes from {first:.3f} to {last:.3f}", last < 0.7 * first)
    penalties = gt.to_numpy(s)
    claim(
        "ridge: the irrelevant features get the larger penalties",
        penalties[3:].mean() > penalties[:3].mean(),
    )

    if backend == "jax":
        compare_with_custom_root(gt, iterate, step, weights, x, gradients["implicit"], of)
    return {"gradient": gradients["implicit"], "hypergradient": by_rule}


def compare_with_custom_root(gt, iterate, step, weights, x, ours, of):
    import jax

    def theirs(p, x):
        def linear(g, b):
            A = jax.jacobian(g)(b).reshape(b.size, b.size)
            return jax.numpy.linalg.solve(A, b.ravel()).reshape(b.shape)

        return jax.lax.custom_root(
            lambda z: step(z, p, x) - z, 0 * x, lambda f, z: iterate(p, x), linear
        )

    apart = difference(flat(gt, jax.jit(jax.grad(of(theirs)))(weights)), flat(gt, ours))
    claim(f"the gradient differs from jax.lax.custom_root by {apart:.1e}", apart < 1e-9)


if __name__ == "__main__":
    main(show, tolerance=1e-9)
