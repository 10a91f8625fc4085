"""Trains A and B to minimize and C to maximize one cost, in one forward and backward pass.

The cost is the sum of d(B(A(x)), x) - d(C(A(x)), x) with d(y, x) = |y|^(x + 1).
``minimax_value_and_grad`` negates the gradient of C, so ordinary optimizers can update A, B and C:
one Adam optimizer for A and B, and another for C. For comparison, the signs of C's gradients are
flipped by hand.
"""

import numpy as np
from common import claim, counter, difference, flat, main

STEPS, RATE = 50, 1e-2
RNG = np.random.default_rng(0)
X = RNG.uniform(size=(10, 1))
SHAPES = {"A": (1, 2), "B": (2, 3), "C": (2, 3)}
WEIGHTS = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
BIASES = {name: RNG.normal(size=out) for name, (_, out) in SHAPES.items()}


def show(gt, backend):
    count, evaluations = counter(backend)
    train = {"torch": train_torch, "jax": train_jax}[backend]

    def cost(A, B, C, x, layers):
        count()
        d = lambda y, x: abs(y) ** (x + 1)
        h = layers["A"](A, x)
        return (d(layers["B"](B, h), x) - d(layers["C"](C, h), x)).sum()

    minimax = gt.minimax_value_and_grad(cost, minimize=(0, 1), maximize=2)

    def by_hand(*args):
        value, (a, b, c) = gt.value_and_grad(cost, argnums=(0, 1, 2))(*args)
        return value, (a, b, {name: -grad for name, grad in c.items()})

    values, numbers = train(gt, minimax)
    _, plain_numbers = train(gt, by_hand)
    apart = difference(flat(gt, numbers), flat(gt, plain_numbers))

    print(f"  the cost went from {values[0]:.4f} to {values[-1]:.4f}")
    claim(
        f"{evaluations() // 2} evaluations of the cost in {STEPS} steps", evaluations() == 2 * STEPS
    )
    claim(
        f"the parameters differ from the result with manually flipped signs by {apart:.1e}",
        apart < 1e-12,
    )
    return {"values": values, "parameters": numbers}


def train_torch(gt, gradient):
    import torch

    nets = {n: torch.nn.Linear(*w.shape, dtype=torch.float64) for n, w in WEIGHTS.items()}
    for name, net in nets.items():
        net.load_state_dict(
            {"weight": gt.asarray(WEIGHTS[name].T), "bias": gt.asarray(BIASES[name])}
        )
    pure = {name: gt.make_functional(net) for name, net in nets.items()}
    layers = {n: (lambda p, x, a=a, s=s: a(p, s, x)[0]) for n, (a, _, s) in pure.items()}
    params = [pure[name][1] for name in "ABC"]  # aliases of the trained parameters
    down = torch.optim.Adam([*nets["A"].parameters(), *nets["B"].parameters()], lr=RATE)
    up = torch.optim.Adam(nets["C"].parameters(), lr=RATE)

    values = []
    for _ in range(STEPS):
        value, grads = gradient(*params, gt.asarray(X), layers)
        for net, grad in zip(nets.values(), grads, strict=True):
            gt.assign_gradients(net, grad)
        down.step()
        up.step()
        values.append(float(value))
    return values, {n: [net.weight.T, net.bias] for n, net in nets.items()}


def train_jax(gt, gradient):
    import flax.linen as nn
    import jax
    import optax

    layers, params = {}, []
    for name, weight in WEIGHTS.items():
        variables = {"kernel": gt.asarray(weight), "bias": gt.asarray(BIASES[name])}
        dense = nn.Dense(weight.shape[1], param_dtype=weight.dtype)
        apply, p, state = gt.make_functional(dense, variables={"params": variables})
        layers[name] = lambda p, x, a=apply, s=state: a(p, s, x)[0]
        params.append(p)
    adam = optax.adam(RATE)
    down, up = adam.init(params[:2]), adam.init(params[2])

    @jax.jit
    def step(params, down, up):
        value, (a, b, c) = gradient(*params, gt.asarray(X), layers)
        moves_ab, down = adam.update([a, b], down)
        moves_c, up = adam.update(c, up)
        return optax.apply_updates(params, [*moves_ab, moves_c]), down, up, value

    values = []
    for _ in range(STEPS):
        params, down, up, value = step(params, down, up)
        values.append(float(value))
    return values, {n: [p["kernel"], p["bias"]] for n, p in zip("ABC", params, strict=True)}


if __name__ == "__main__":
    main(show)
