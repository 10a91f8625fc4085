"""Calls a C++ kernel, which is built as a PyTorch extension, from PyTorch and from JAX.

Soft dynamic time warping is a distance between two signals that ignores changes in speed. The
extension computes the value, its gradient, and the product of its Hessian with a direction. These
three kernels (value, vjp and double backward) suffice for every second derivative except forward
over forward. A trust-region method then fits the position, width and height of a bump to three
records of the bump at different speeds.

The first run builds the extension in about 20 seconds. The program wraps the kernels as functions
of NumPy arrays, so a JAX program can also call the kernels.
"""

import numpy as np
from building import NoCompiler, torch_extension
from checks import every_derivative
from common import claim, flat, main
from scipy.optimize import minimize

GAMMA, POINTS = 0.1, 24


def soft_dtw(gt):
    """Returns the soft minimum of the costs of all paths as a twice differentiable function."""
    torch_extension("soft_dtw")
    import torch

    tensor = lambda x: torch.from_numpy(np.array(x))
    run = lambda of, *xs: of(*[tensor(x) for x in xs], GAMMA).numpy()
    kernels = torch.ops.soft_dtw
    dtype = "float64"
    cost = gt.host_function(
        lambda D: run(kernels.cost, D), out=gt.ArraySpec((), dtype), vectorized=True
    )
    gradient = gt.host_function(lambda D: run(kernels.gradient, D), vectorized=True)
    product = gt.host_function(lambda D, T: run(kernels.hessian_product, D, T), vectorized=True)
    cost.defvjp(lambda D: (cost(D), D), lambda D, ct: (ct * gradient(D),))
    gradient.defvjp(lambda D: (gradient(D), D), lambda D, v: (product(D, v),))
    return cost


def show(gt, backend):
    try:
        cost = soft_dtw(gt)
    except NoCompiler as error:
        print(f"  left out: {error}")
        return {}
    by_python(gt, cost)
    rng = np.random.default_rng(0)
    D, t = rng.uniform(size=(2, 12))
    small = lambda D: cost(D.reshape((3, 4)) ** 2)
    results = every_derivative(gt, backend, small, D, t, forward_twice=False)

    time = np.linspace(0, 1, POINTS)
    bump = lambda xp, p, time: p[2] * xp.exp(-(((time - p[0]) / p[1]) ** 2))
    truth = np.array([0.5, 0.15, 1.0])
    records = [gt.asarray(bump(np, truth, time**speed)) for speed in (0.8, 1.0, 1.25)]

    def loss(p):
        signal = bump(gt.xp, p, gt.asarray(time))
        tables = gt.xp.stack([(signal[:, None] - record[None, :]) ** 2 for record in records])
        return gt.vmap(cost)(tables).mean()

    gradient = gt.value_and_grad(loss)
    product = lambda x, t: gt.hvp(loss, (x,), (t,))[1][0]
    start = gt.asarray(np.array([0.4, 0.3, 0.6]))
    found = minimize(
        lambda x: [flat(gt, part) for part in gradient(gt.asarray(x))],
        gt.to_numpy(start),
        jac=True,
        hessp=lambda x, t: flat(gt, product(gt.asarray(x), gt.asarray(t))),
        method="trust-ncg",
        options={"gtol": 1e-8},
    )
    print(f"  {found.nit} trust-region steps")
    p = found.x
    claim(
        f"the fitted bump: position {p[0]:.2f}, width {p[1]:.2f}, height {p[2]:.2f}",
        np.max(np.abs(p - truth)) < 0.1,
    )
    return {"derivatives": results, "fit": gradient(start)}


def by_python(gt, cost):
    """Compares the kernel with the same recursion in Python."""
    D = np.random.default_rng(1).uniform(size=(4, 6))
    R = np.full((5, 7), np.inf)
    R[0, 0] = 0
    for i, j in np.ndindex(D.shape):
        ways = np.array([R[i, j], R[i, j + 1], R[i + 1, j]])
        R[i + 1, j + 1] = D[i, j] - GAMMA * np.log(np.exp(-ways / GAMMA).sum())
    apart = abs(float(cost(gt.asarray(D))) - R[-1, -1])
    claim(f"the C++ kernel differs from a loop in Python by {apart:.0e}", apart < 1e-13)


if __name__ == "__main__":
    main(show)
