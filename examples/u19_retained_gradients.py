"""Shows where gradients vanish in a recurrent network, with gradients at intermediate values.

A network of 30 steps marks its state in each step with ``gt.retain_gradient``. The norms of the
retained gradients show how far the gradient of the loss propagates. The products of gradients and
values attribute the output to the steps (Shrikumar et al., Not just a black box, 2016). Retained
gradients are differentiable, so the norms may be part of a loss.
"""

import numpy as np
from common import claim, difference, flat, main

STEPS, WIDTH, BATCH = 30, 16, 8


def show(gt, backend):
    xp, rng = gt.xp, np.random.default_rng(0)
    number = lambda *shape: gt.asarray(rng.normal(size=shape))
    xs, target, readout = number(STEPS, BATCH, WIDTH), number(BATCH), number(WIDTH) / WIDTH
    weights = number(WIDTH, WIDTH) / WIDTH**0.5

    def states_of(w, xs, mark):
        h, states = 0 * xs[0], []
        for i in range(STEPS):
            h = mark(i, xp.tanh(h @ w * 0.7 + xs[i]))
            states.append(h)
        return h, xp.stack(states)

    def loss(w, xs):
        h, states = states_of(w, xs, lambda i, h: gt.retain_gradient(h, "state"))
        return xp.mean((h @ readout - target) ** 2), states

    (value, states), grads, retained = gt.retained_gradients(loss, has_aux=True)(weights, xs)
    state = retained["state"]  # shape (STEPS, BATCH, WIDTH)
    norms = xp.sum(state**2, axis=(1, 2)) ** 0.5
    print(f"  |dL/dh| at steps 1, 15, 30: {[f'{float(norms[i]):.1e}' for i in (0, 14, 29)]}")
    claim(
        "the gradient vanishes with the distance from the loss",
        float(norms[0]) < 1e-2 * float(norms[-1]),
    )

    def with_inputs(added):  # by hand: gradients with respect to arrays added to the states
        h = states_of(weights, xs, lambda i, h: h + added[i])[0]
        return xp.mean((h @ readout - target) ** 2)

    by_hand = gt.grad(with_inputs)(0 * states)
    apart = difference(flat(gt, state), flat(gt, by_hand))
    claim(
        f"the retained gradients differ from gradients with respect to added arrays by {apart:.1e}",
        apart < 1e-12,
    )
    plain = gt.grad(loss, has_aux=True)(weights, xs)[0]
    claim(
        "the gradient of the weights equals the plain gradient",
        xp.max(xp.abs(grads - plain)) < 1e-15,
    )

    # Penalizes steps that do not preserve the norm of the gradient (Pascanu et al., 2013).
    def penalty(w):
        state = gt.retained_gradients(loss, (), has_aux=True)(w, xs)[2]["state"]
        norms = xp.sum(state**2, axis=(1, 2))
        return xp.mean((norms[:-1] / norms[1:] - 1) ** 2)

    w, before = weights, float(penalty(weights))
    for _ in range(20):
        w = w - 0.2 * gt.grad(penalty)(w)
    after = float(penalty(w))
    claim(f"20 steps reduce the penalty from {before:.2f} to {after:.2f}", after < 0.8 * before)

    return {"value": value, "grads": grads, "state": state, "after": w}


if __name__ == "__main__":
    main(show, tolerance=1e-9)
