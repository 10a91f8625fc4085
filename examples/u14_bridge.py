"""Differentiates a simulator that is written in the other framework, through the bridge.

The simulator, a damped pendulum, is written in JAX if this program runs in PyTorch, and in PyTorch
if it runs in JAX. The bridge converts the simulator to a differentiable function of the program's
framework. Newton's method fits length and damping to an observed swing, with the Hessian of the
loss through the simulator. Then gradient descent fits length and damping to the derivative of the
swing with respect to its starting point, so that each step computes a second derivative. The
results of both frameworks agree.
"""

import importlib.util

import numpy as np
from common import claim, difference, double_precision, flat, main
from tqdm import trange

STEPS, DT = 40, 0.1
TRUTH = np.array([0.8, 0.3])  # length, damping


def jax_pendulum(start, body):
    """Simulates the swing of a pendulum in JAX."""
    import jax
    import jax.numpy as jnp

    def step(state, _):
        angle, speed = state
        speed = speed - DT * (jnp.sin(angle) / body[0] + body[1] * speed)
        return (angle + DT * speed, speed), angle

    return jax.lax.scan(step, (start, jnp.zeros_like(start)), None, length=STEPS)[1]


def torch_pendulum(start, body):
    """Simulates the swing of a pendulum in PyTorch."""
    import torch

    angle, speed, angles = start, torch.zeros_like(start), []
    for _ in range(STEPS):
        angles.append(angle)
        speed = speed - DT * (torch.sin(angle) / body[0] + body[1] * speed)
        angle = angle + DT * speed
    return torch.stack(angles)


def crossed(backend):
    """Returns the other framework's simulator, through the bridge, and the native simulator."""
    from gradtools import bridge

    if backend == "torch":
        return bridge.to_torch(jax_pendulum), torch_pendulum
    return bridge.to_jax(torch_pendulum), jax_pendulum


def show(gt, backend):
    other = {"torch": "jax", "jax": "torch"}[backend]
    if importlib.util.find_spec(other) is None:
        print(f"  left out: {other} is not installed, and the bridge needs both frameworks")
        return {}
    with double_precision(other):
        return fitted(gt, backend)


def fitted(gt, backend):
    xp = gt.xp
    simulate, native = crossed(backend)
    start, truth = gt.asarray(np.array(1.2)), gt.asarray(TRUTH)
    observed = native(start, truth)

    def loss(body):
        return xp.sum((simulate(start, body) - observed) ** 2)

    def at_home(body):
        return xp.sum((native(start, body) - observed) ** 2)

    hessian, own = gt.hessian(loss), gt.hessian(at_home)
    if backend == "jax":
        hessian, own = gt.compile(hessian), gt.compile(own)
    body = gt.asarray(np.array([1.0, 0.2]))
    apart = difference(flat(gt, hessian(body)), flat(gt, own(body)))
    claim(
        f"the Hessian through the bridge differs from the native Hessian by {apart:.1e}",
        apart < 1e-12,
    )

    slope = gt.grad(loss)
    for _ in trange(8, desc="  Newton", leave=False, disable=None):
        body = body - xp.linalg.solve(hessian(body), slope(body))
    found = gt.to_numpy(body)
    off = difference(found, TRUTH)
    claim(f"Newton's method finds length {found[0]:.3f}, damping {found[1]:.3f}", off < 1e-8)

    def swing(body):  # the derivative with respect to the starting point, inside the loss
        return gt.jvp(lambda start: simulate(start, body), (start,), (xp.ones_like(start),))[1]

    target = swing(truth)
    by_slope = gt.value_and_grad(lambda body: xp.mean((swing(body) - target) ** 2))
    guess = gt.asarray(np.array([0.9, 0.25]))
    first = float(by_slope(guess)[0])
    for _ in trange(60, desc="  descent", leave=False, disable=None):
        value, step = by_slope(guess)
        guess = guess - 0.05 * step
    claim(
        f"fit to the derivative: the loss goes from {first:.1e} to {float(value):.1e}",
        float(value) < first / 5,
    )
    return {"found": body, "by slopes": guess}


if __name__ == "__main__":
    main(show)
