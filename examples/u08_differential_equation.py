"""Trains a small network to solve u'(t) = -2 t u(t), u(0) = 1, on [0, 2].

The loss is the mean of r^2 over points t, with the residual r = u' + 2 t u. The loss contains the
derivative of the network with respect to its input, computed by ``gt.jvp``, and is differentiated
with respect to the parameters. The Levenberg-Marquardt method uses ``gt.jacobian`` of r and needs
far fewer steps than stochastic gradient descent. The solution is exp(-t^2). The ansatz
u = 1 + t N(t) satisfies the initial condition for every network N.
"""

import numpy as np
from common import claim, difference, flat, main
from tqdm import trange

STEPS, WIDTH, POINTS = 40, 12, 40


def show(gt, backend):
    xp = gt.xp

    def u(params, t):
        w1, b1, w2 = params[:WIDTH], params[WIDTH : 2 * WIDTH], params[2 * WIDTH :]
        return 1 + t * (xp.tanh(t[:, None] * w1 + b1) @ w2)

    def residuals(params, t):
        value, slope = gt.jvp(lambda t: u(params, t), (t,), (xp.ones_like(t),))
        return slope + 2 * t * value

    loss = lambda params, t: xp.mean(residuals(params, t) ** 2)
    jacobian, gradient = gt.jacobian(residuals), gt.value_and_grad(loss)
    t = gt.asarray(np.linspace(0, 2, POINTS))
    params = gt.asarray(np.random.default_rng(0).normal(size=3 * WIDTH))
    first, slope = gradient(params, t)
    r, J = residuals(params, t), jacobian(params, t)
    apart = difference(flat(gt, slope), flat(gt, 2 / POINTS * (J.T @ r)))
    claim(f"the loss's gradient differs from 2/n J^T r by {apart:.1e}", apart < 1e-12)

    if backend == "jax":
        loss, residuals, jacobian = map(gt.compile, (loss, residuals, jacobian))
    now, damping, eye = float(first), 1.0, gt.asarray(np.eye(3 * WIDTH))
    for _ in trange(STEPS, desc="  steps", leave=False, disable=None):
        r, J = residuals(params, t), jacobian(params, t)
        tried = params - xp.linalg.solve(J.T @ J + damping * eye, J.T @ r)
        trial = float(loss(tried, t))
        if trial < now:
            params, now, damping = tried, trial, damping / 5
        else:
            damping *= 5

    fine = np.linspace(0, 2, 1001)
    error = np.max(np.abs(flat(gt, u(params, gt.asarray(fine))) - np.exp(-(fine**2))))
    print(f"  the loss went from {float(first):.2f} to {now:.1e} in {STEPS} steps")
    claim(f"largest error against exp(-t^2) on [0, 2]: {error:.1e}", error < 1e-3)
    return {"loss and gradient at the start": (first, slope)}


if __name__ == "__main__":
    main(show)
