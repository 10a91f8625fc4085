"""Compiles a C kernel, calls it through ctypes, and differentiates it with its adjoint kernel.

The recurrence y_t = a_t y_{t-1} + x_t is the core of a reservoir, a filter or a recurrent layer.
The C kernel computes the recurrence in a loop. The backward pass applies the transposed recurrence,
which is the same loop in reverse order. The rule of each kernel calls the other kernel, so the
function is differentiable to any order. Newton's method estimates how the leakage of a reservoir
depends on the temperature, from measurements of the water level.
"""

import ctypes

import numpy as np
from building import NoCompiler, c_library
from checks import every_derivative
from common import claim, main

DAYS, STEPS = 200, 8
TRUE = np.array([1.5, -0.8])
"""The fraction of water that remains after a day is sigmoid(1.5 - 0.8 temperature)."""


def kernels():
    """Returns the two C functions as functions of NumPy arrays that accept leading batch axes."""
    library = ctypes.CDLL(str(c_library("recurrence")))
    array = np.ctypeslib.ndpointer(np.float64, flags="C_CONTIGUOUS")

    def wrapped(c_function):
        c_function.argtypes = [ctypes.c_size_t, ctypes.c_size_t, array, array, array]
        c_function.restype = None

        def kernel(a, x):
            y = np.empty_like(x)
            c_function(x.size // x.shape[-1], x.shape[-1], a, x, y)
            return y

        return kernel

    return wrapped(library.recurrence), wrapped(library.adjoint)


def recurrence(gt):
    """Returns the function (a, x) -> y, differentiable to any order in both arguments."""
    run, back = (gt.host_function(kernel, vectorized=True) for kernel in kernels())
    before = lambda y: gt.xp.concat((gt.xp.zeros_like(y[:1]), y[:-1]))  # y_{t-1}

    def run_fwd(a, x):
        y = run(a, x)
        return y, (a, y)

    def run_bwd(res, ct):
        a, y = res
        by_x = back(a, ct)
        return before(y) * by_x, by_x

    def back_fwd(a, c):
        by_x = back(a, c)
        return by_x, (a, by_x)

    def back_bwd(res, v):
        a, by_x = res
        y = run(a, v)
        return before(y) * by_x, y

    run.defvjp(run_fwd, run_bwd)
    back.defvjp(back_fwd, back_bwd)
    return run


def show(gt, backend):
    try:
        run = recurrence(gt)
    except NoCompiler as error:
        print(f"  left out: {error}")
        return {}
    rng = np.random.default_rng(0)
    by_python(gt, run, rng)
    x, t = rng.normal(size=10), rng.normal(size=10)
    total = lambda both: (run(gt.xp.tanh(both[:5]), both[5:]) ** 3).sum()
    results = every_derivative(gt, backend, total, x, t)

    rain, temperature = (gt.asarray(rng.normal(size=DAYS)) for _ in range(2))
    rain = rain * rain
    staying = lambda p: 1 / (1 + gt.xp.exp(-(p[0] + p[1] * temperature)))
    noise = gt.asarray(0.01 * rng.normal(size=DAYS))
    measured = run(staying(gt.asarray(TRUE)), rain) + noise
    loss = lambda p: ((run(staying(p), rain) - measured) ** 2).mean()
    slope, curvature = gt.grad(loss), gt.hessian(loss)
    if backend == "jax":
        slope, curvature = gt.compile(slope), gt.compile(curvature)
    p = gt.asarray(np.array([1.0, -0.5]))
    for _ in range(STEPS):
        p = p - gt.xp.linalg.solve(curvature(p), slope(p))
    found, left = gt.to_numpy(p), np.max(np.abs(gt.to_numpy(slope(p))))
    claim(f"after {STEPS} Newton steps the gradient is below 1e-12", left < 1e-12)
    text = f"the estimated fraction is sigmoid({found[0]:.3f} {found[1]:+.3f} temperature)"
    claim(text, np.max(np.abs(found - TRUE)) < 0.02)
    return {"derivatives": results, "reservoir": p}


def by_python(gt, run, rng):
    """Compares the kernel with the same loop in Python."""
    a, x = rng.uniform(size=30), rng.normal(size=30)
    last, y = 0.0, []
    for one_a, one_x in zip(a, x, strict=True):
        last = one_a * last + one_x
        y.append(last)
    apart = np.max(np.abs(gt.to_numpy(run(gt.asarray(a), gt.asarray(x))) - y))
    claim(f"the C kernel differs from a loop in Python by {apart:.0e}", apart < 1e-14)


if __name__ == "__main__":
    main(show)
