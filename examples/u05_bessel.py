"""Defines the derivative of a SciPy function, and estimates an aperture from its diffraction rings.

Light that passes through a circular hole forms rings. The brightness at the angle s is
(2 J1(as) / as)^2, where a is 2 pi times the hole's radius in wavelengths. Neither framework
differentiates J1 to all orders, but SciPy computes J_v. Since J_v' = (J_{v-1} - J_{v+1}) / 2, the
rule of J_v calls J_v again, so J_v is differentiable to any order in both modes. Newton's method
with the full Hessian estimates radius, brightness and background from noisy rings.
"""

import numpy as np
from checks import every_derivative
from common import claim, difference, flat, main
from scipy import special

TRUE = np.array([3.0, 2.0, 0.1])  # radius, brightness, background
STEPS = 8


def bessel(gt):
    """Returns the function J_v(x) of an integer v and x, differentiable to any order in x."""
    jv = gt.host_function(lambda v, x: special.jv(v, x), out=lambda v, x: x, vectorized=True)

    def bwd(res, ct):
        v, x = res
        return None, ct * (jv(v - 1, x) - jv(v + 1, x)) / 2

    jv.defvjp(lambda v, x: (jv(v, x), (v, x)), bwd)
    return jv


def show(gt, backend):
    jv = bessel(gt)
    x, t = np.linspace(0.5, 9.0, 12), np.linspace(-1.0, 2.0, 12)
    first, second, third = (special.jvp(1, x, n) for n in (1, 2, 3))
    by_hand = special.jv(1, x).sum(), first, second * t
    results = every_derivative(gt, backend, lambda x: jv(1, x).sum(), x, t, by_hand)
    total = lambda f: lambda x: gt.grad(f)(x).sum()
    cube = gt.grad(total(total(lambda x: jv(1, x).sum())))(gt.asarray(x))
    apart = difference(flat(gt, cube), third)
    claim(f"the error of the third derivative of J1 is {apart:.0e}", apart < 1e-12)

    angles = np.linspace(0.05, 3.0, 80)
    noise = 0.01 * np.random.default_rng(0).normal(size=angles.size)
    measured = gt.asarray(TRUE[1] * (2 * special.j1(TRUE[0] * angles) / (TRUE[0] * angles)) ** 2)
    measured = measured + TRUE[2] + gt.asarray(noise)
    s = gt.asarray(angles)

    def loss(p):
        u = p[0] * s
        return ((p[1] * (2 * jv(1, u) / u) ** 2 + p[2] - measured) ** 2).mean()

    slope, curvature = gt.grad(loss), gt.hessian(loss)
    if backend == "jax":
        slope, curvature = gt.compile(slope), gt.compile(curvature)
    p = gt.asarray(np.array([2.7, 1.8, 0.0]))
    for _ in range(STEPS):
        p = p - gt.xp.linalg.solve(curvature(p), slope(p))
    found = gt.to_numpy(p)
    left = np.max(np.abs(flat(gt, slope(p))))
    claim(f"after {STEPS} Newton steps the gradient is below 1e-13", left < 1e-13)
    text = f"radius {found[0]:.3f}, brightness {found[1]:.3f}, background {found[2]:.3f}"
    claim(text, np.max(np.abs(found - TRUE)) < 0.02)
    return {"J1": results, "third": cube, "aperture": p}


if __name__ == "__main__":
    main(show)
