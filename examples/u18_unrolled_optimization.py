"""Differentiates through the steps of an optimizer without storing the activations of each step.

A network is trained for several steps, and a fifth of its training targets have the wrong sign.
The outer loss is the loss on clean examples after the last step. The gradient of the outer loss
with respect to the example weights and the step size is propagated through all steps. With
``mode="forward_over_reverse"`` the inner gradient keeps only the parameters and the gradient of
each step; double backward also keeps the activations.
"""

import numpy as np
from checks import compiled_bytes, live_bytes
from common import claim, difference, flat, main

ROWS, WIDTH, WRONG = 40, 10, 8
RNG = np.random.default_rng(0)
X, TRUE = RNG.normal(size=(2 * ROWS, WIDTH)), RNG.normal(size=WIDTH)
Y = np.tanh(X @ TRUE)
Y[:WRONG] *= -1


def show(gt, backend):
    xp = gt.xp
    clean = gt.asarray(X[ROWS:]), gt.asarray(Y[ROWS:])

    def network(layers, x):
        for layer in layers[:-1]:
            x = xp.tanh(x @ layer)
        return xp.sum(x @ layers[-1], axis=1)

    def train_loss(layers, weights, x, y):
        return xp.mean(weights * (network(layers, x) - y) ** 2)

    def outer_loss(mode, steps, layers, x, y):
        inner = gt.grad(train_loss, mode=mode)

        def step(layers, weights, rate):
            grads = inner(layers, weights, x, y)
            return [w - rate * g for w, g in zip(layers, grads, strict=True)]

        def after(outer):
            weights = 1 / (1 + xp.exp(-outer["weights"]))
            trained = repeated(step, steps, backend)(layers, weights, xp.exp(outer["rate"]))
            return xp.mean((network(trained, clean[0]) - clean[1]) ** 2)

        return after

    def inputs(depth, copies=1):
        rng = np.random.default_rng(1)
        layers = [gt.asarray(rng.normal(size=(WIDTH, WIDTH)) / 6) for _ in range(depth)]
        x, y = (gt.asarray(np.concatenate([a[:ROWS]] * copies)) for a in (X, Y))
        outer = {"weights": 0 * y, "rate": gt.asarray(np.array(-2.0))}
        return outer, layers, x, y

    outer, *fixed = inputs(3)
    modes = "auto", "forward_over_reverse"
    plain, found = (gt.grad(outer_loss(mode, 5, *fixed))(outer) for mode in modes)
    apart = difference(flat(gt, found), flat(gt, plain))
    claim(f"after five steps the gradients of both modes differ by {apart:.1e}", apart < 1e-12)

    def per_step(mode):
        """Returns the memory of one additional step in kilobytes, with 400 examples.

        Only one evaluation of the loss is recomputed at a time, for any number of steps.
        """
        outer, *fixed = inputs(3, copies=10)
        kept = {"torch": live_bytes, "jax": compiled_bytes}[backend]
        peak = [kept(gt.grad(outer_loss(mode, steps, *fixed)), outer) for steps in (4, 8)]
        return (peak[1] - peak[0]) / 4e3

    double, ours = map(per_step, modes)
    claim(
        f"each step needs {double:.1f} kB with double backward, {ours:.1f} kB with {modes[1]}",
        ours < 2.2 * 8e-3 * 3 * WIDTH**2 < double / 8,
    )

    learning = gt.value_and_grad(outer_loss(modes[1], 10, *fixed))
    learning, values = (gt.compile(learning) if backend == "jax" else learning), []
    for _ in range(12):
        value, grads = learning(outer)
        values.append(float(value))
        largest = xp.max(xp.abs(grads["weights"]))
        outer = {
            "weights": outer["weights"] - grads["weights"] / largest,
            "rate": outer["rate"] - 0.1 * xp.sign(grads["rate"]),
        }
    loss = f"the outer loss goes from {values[0]:.2f} to {values[-1]:.2f}"
    claim(loss, values[-1] < values[0] / 4)
    order = np.argsort(gt.to_numpy(outer["weights"]))
    right = len({*order[:WRONG]} & {*range(WRONG)})
    claim(
        f"{right} of the {WRONG} examples with the smallest weights have the wrong sign",
        right > WRONG / 2,
    )
    return {"gradient": found}


def repeated(step, count, backend):
    """Returns a function that repeats the step `count` times.

    In JAX, the loop is a scan, because XLA eliminates recomputation in unrolled loops.
    """

    def run(layers, *args):
        if backend == "torch":
            for _ in range(count):
                layers = step(layers, *args)
            return layers
        import jax

        one = lambda layers, _: (step(layers, *args), None)
        return jax.lax.scan(one, layers, length=count)[0]

    return run


if __name__ == "__main__":
    main(show)
