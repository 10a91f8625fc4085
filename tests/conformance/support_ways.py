"""Defines custom rules in all supported ways, each with exact derivatives.

A `Way` makes a function from a vector to a vector. The framework cannot differentiate the function,
so the derivative is zero if the rule is dropped. `way.at(x)` returns the value and the first,
second and third derivative from closed forms in NumPy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Derivatives = Callable[[np.ndarray], list[np.ndarray]]


@dataclass(frozen=True, eq=False)
class Way:
    """A function with a custom rule, defined in one of the supported ways.

    Attributes:
        name: The name in the table.
        make: Returns the function of a vector for the namespace of a backend.
        at: Returns the value and the first three derivatives of the function at a point.
        size: The length of the vector.
        order: The highest order of derivative that the rule supports.
        host: Whether a kernel of NumPy arrays computes the value.
        halves: Returns a function of the two halves of the vector, or is None if there is no such
            function.
    """

    name: str
    make: Callable[[Any], Any]
    at: Derivatives
    size: int = 3
    order: int = 3
    host: bool = False
    halves: Callable[[Any], Any] | None = None


# --- exact derivatives -------------------------------------------------------------------


def elementwise(*derivatives: Callable[[Any], Any]) -> Derivatives:
    """Return a function that computes the derivatives of y_i = f(x_i) from f, f', f'' and f'''."""

    def at(x: np.ndarray) -> list[np.ndarray]:
        n = len(x)
        found = [np.zeros((n,) * (k + 1)) for k in range(4)]
        for i in range(n):
            for k, d in enumerate(derivatives):
                found[k][(i,) * (k + 1)] = d(x[i])
        return found

    return at


Terms = Sequence[tuple[float, tuple[int, ...]]]  # a sum of products of a coefficient and variables


def polynomial(*outputs: Terms) -> Derivatives:
    """Return a function that computes derivatives of polynomials and caches them for each point."""

    @cache
    def at(point: tuple[float, ...]) -> list[np.ndarray]:
        x, n = np.array(point), len(point)
        found = [np.zeros((len(outputs), *(n,) * k)) for k in range(4)]
        for i, terms in enumerate(outputs):
            for k in range(4):
                for by in np.ndindex(*(n,) * k):
                    found[k][(i, *by)] = sum(c * _product(x, vs, by) for c, vs in terms)
        for derivative in found:
            derivative.flags.writeable = False
        return found

    return lambda x: at(tuple(x.tolist()))


def _product(x: np.ndarray, variables: tuple[int, ...], by: tuple[int, ...]) -> float:
    powers, factor = Counter(variables), 1.0
    for i in by:
        factor *= powers[i]
        powers[i] -= 1
    return factor * np.prod([x[i] ** p for i, p in powers.items() if p > 0]) if factor else 0.0


def of_complex(factors: Sequence[tuple[complex, complex]], slope: float) -> Derivatives:
    """Return derivatives of Re f + slope Im f for real x, where f is the product of all a x + b."""
    p = np.polynomial.Polynomial([1.0])
    for a, b in factors:
        p = p * np.polynomial.Polynomial([b, a])

    def part(k: int) -> Callable[[Any], Any]:
        d = p.deriv(k) if k else p
        return lambda x: d(x).real + slope * d(x).imag

    return elementwise(*[part(k) for k in range(4)])


CUBE = elementwise(lambda x: x**3, lambda x: 3 * x**2, lambda x: 6 * x, lambda x: 6.0)
EXP = elementwise(np.exp, np.exp, np.exp, np.exp)
SINH = elementwise(np.sinh, np.cosh, np.sinh, np.cosh)
SIN = elementwise(np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x))
# x_i sum_j p_j x_j^2, where the vector is (x, p); the Jacobian is not symmetric.
WEIGHED = polynomial(*[[(1.0, (i, 3 + j, j, j)) for j in range(3)] for i in range(3)])
# The outputs a_i b_i and b_i sum_j a_j.
TREES = polynomial(
    *[[(1.0, (i, 3 + i))] for i in range(3)],
    *[[(1.0, (3 + i, j)) for j in range(3)] for i in range(3)],
)


# --- rules written in framework code -----------------------------------------------------


def cube_vjp(gt: Any) -> Any:
    f = gt.custom_rule(lambda x: gt.stop_gradient(x) ** 3)
    f.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x**2 * c,))
    return f


def cube_jvp(gt: Any) -> Any:
    f = gt.custom_rule(lambda x: gt.stop_gradient(x) ** 3)
    f.defjvp(lambda xs, dxs: (xs[0] ** 3, 3 * xs[0] ** 2 * dxs[0]))
    return f


def cube_both(gt: Any) -> Any:
    f = cube_vjp(gt)
    f.defjvp(lambda xs, dxs: (xs[0] ** 3, 3 * xs[0] ** 2 * dxs[0]))
    return f


def exp_saving_the_output(gt: Any) -> Any:
    f = gt.custom_rule(lambda x: gt.xp.exp(gt.stop_gradient(x)))

    def fwd(x: Any) -> Any:
        y = gt.xp.exp(x)
        return y, y

    f.defvjp(fwd, lambda y, c: (y * c,))
    return f


def sinh_saving_an_intermediate(gt: Any) -> Any:
    f = gt.custom_rule(lambda x: gt.xp.sinh(gt.stop_gradient(x)))

    def fwd(x: Any) -> Any:
        e = gt.xp.exp(x)
        return (e - 1 / e) / 2, e

    f.defvjp(fwd, lambda e, c: (c * (e + 1 / e) / 2,))
    return f


def sinh_saving_a_tuple(gt: Any) -> Any:
    f = gt.custom_rule(lambda x: gt.xp.sinh(gt.stop_gradient(x)))

    def fwd(x: Any) -> Any:
        e, i = gt.xp.exp(x), gt.xp.exp(-x)
        return (e - i) / 2, (e, {"i": i, "half": 0.5, "what": "sinh"}, None)

    def bwd(res: Any, c: Any) -> Any:
        assert res[1]["what"] == "sinh"
        return (c * (res[0] + res[1]["i"]) * res[1]["half"],)

    f.defvjp(fwd, bwd)
    return f


def linear_saving_nothing(gt: Any) -> Any:
    f = gt.custom_rule(lambda x: 3 * gt.stop_gradient(x))
    f.defvjp(lambda x: (3 * x, None), lambda _, c: (3 * c,))
    return f


def power_with_static_and_keyword(gt: Any) -> Any:
    def power(x: Any, *, n: int = 5, scale: Any) -> Any:
        return gt.stop_gradient(scale * x**n)

    f = gt.custom_rule(power, static_argnames="n")
    f.defvjp(
        lambda n, x, scale: (scale * x**n, (x, scale)),
        lambda n, res, c: (n * res[0] ** (n - 1) * res[1] * c, res[0] ** n * c),
    )
    return lambda x: f(x, scale=x, n=2)


_TIMES = np.array([3, 2, -1])
INTEGER_TIMES = polynomial(*[[(float(k), (i, i, i))] for i, k in enumerate(_TIMES)])


def integer_beside_vjp(gt: Any) -> Any:
    f, k = gt.custom_rule(lambda x, k: k * gt.stop_gradient(x) ** 3), gt.asarray(_TIMES)
    f.defvjp(lambda x, k: (k * x**3, (x, k)), lambda res, c: (3 * res[1] * res[0] ** 2 * c, None))
    return lambda x: f(x, k)


def integer_beside_jvp(gt: Any) -> Any:
    f, k = gt.custom_rule(lambda x, k: k * gt.stop_gradient(x) ** 3), gt.asarray(_TIMES)

    def rule(primals: Any, tangents: Any) -> Any:
        (x, k), (dx, dk) = primals, tangents
        assert dk is None
        return k * x**3, 3 * k * x**2 * dx

    f.defjvp(rule)
    return lambda x: f(x, k)


def _trees(gt: Any, give: Any) -> Any:
    def fun(tree: Any) -> Any:
        a, b = gt.stop_gradient(tree["a"]), gt.stop_gradient(tree["b"][0])
        return a * b, {"s": a.sum() * b}

    f = gt.custom_rule(fun)
    give(f)

    def run(z: Any) -> Any:
        y, rest = f({"a": z[:3], "b": (z[3:],)})
        return gt.xp.concat([y, rest["s"]])

    return run


def trees_vjp(gt: Any) -> Any:
    def fwd(tree: Any) -> Any:
        a, b = tree["a"], tree["b"][0]
        return (a * b, {"s": a.sum() * b}), tree

    def bwd(tree: Any, ct: Any) -> Any:
        a, b = tree["a"], tree["b"][0]
        c, d = ct[0], ct[1]["s"]
        return ({"a": b * c + (b * d).sum(), "b": (a * c + a.sum() * d,)},)

    return _trees(gt, lambda f: f.defvjp(fwd, bwd))


def trees_jvp(gt: Any) -> Any:
    def rule(primals: Any, tangents: Any) -> Any:
        a, b = primals[0]["a"], primals[0]["b"][0]
        da, db = tangents[0]["a"], tangents[0]["b"][0]
        out = a * b, {"s": a.sum() * b}
        return out, (a * db + b * da, {"s": a.sum() * db + da.sum() * b})

    return _trees(gt, lambda f: f.defjvp(rule))


_A, _B = 1 + 0.5j, 0.3 - 0.2j


def _of_real(f: Any) -> Any:
    def run(x: Any) -> Any:
        y = f(x * _A + _B)
        return y.real + 2 * y.imag

    return run


HOLOMORPHIC = of_complex([(_A, _B)] * 3, 2)
NON_HOLOMORPHIC = of_complex([(_A, _B)] * 2 + [(np.conj(_A), np.conj(_B))], 2)


def holomorphic_vjp(gt: Any) -> Any:
    """Return z^3 with the rule of a holomorphic function: J multiplies by 3 z^2."""
    f = gt.custom_rule(lambda z: gt.stop_gradient(z) ** 3)
    f.defvjp(lambda z: (z**3, z), lambda z, c: (gt.xp.conj(3 * z**2) * c,))
    return f


def holomorphic_jvp(gt: Any) -> Any:
    f = gt.custom_rule(lambda z: gt.stop_gradient(z) ** 3)
    f.defjvp(lambda zs, dzs: (zs[0] ** 3, 3 * zs[0] ** 2 * dzs[0]))
    return f


def non_holomorphic_vjp(gt: Any) -> Any:
    """Return z^2 conj(z): dy = 2 |z|^2 dz + z^2 conj(dz), and J^H c = 2 |z|^2 c + z^2 conj(c)."""
    conj = gt.xp.conj
    f = gt.custom_rule(lambda z: gt.stop_gradient(z * z * conj(z)))
    f.defvjp(
        lambda z: (z * z * conj(z), z),
        lambda z, c: (2 * z * conj(z) * c + z * z * conj(c),),
    )
    return f


def non_holomorphic_jvp(gt: Any) -> Any:
    conj = gt.xp.conj
    f = gt.custom_rule(lambda z: gt.stop_gradient(z * z * conj(z)))

    def rule(zs: Any, dzs: Any) -> Any:
        (z,), (dz,) = zs, dzs
        return z * z * conj(z), 2 * z * conj(z) * dz + z * z * conj(dz)

    f.defjvp(rule)
    return f


_K = np.array([2.0, -1.0, 0.5])
SCALED_CUBE = polynomial(*[[(k, (i, i, i))] for i, k in enumerate(_K)])


def constant_closed_over(gt: Any) -> Any:
    k = gt.asarray(_K)
    f = gt.custom_rule(lambda x: k * gt.stop_gradient(x) ** 3)
    f.defvjp(lambda x: (k * x**3, x), lambda x, c: (3 * k * x**2 * c,))
    return f


def _weighed(x: Any, p: Any) -> Any:
    return x * (p * x**2).sum()


def weighed_vjp(gt: Any) -> Any:
    f = gt.custom_rule(lambda x, p: gt.stop_gradient(_weighed(x, p)))

    def bwd(res: Any, c: Any) -> Any:
        x, p = res
        q = (x * c).sum()
        return (p * x**2).sum() * c + 2 * p * x * q, x**2 * q

    f.defvjp(lambda x, p: (_weighed(x, p), (x, p)), bwd)
    return f


def weighed_jvp(gt: Any) -> Any:
    f = gt.custom_rule(lambda x, p: gt.stop_gradient(_weighed(x, p)))

    def rule(primals: Any, tangents: Any) -> Any:
        (x, p), (dx, dp) = primals, tangents
        s = (p * x**2).sum()
        return x * s, s * dx + x * (2 * (p * x * dx).sum() + (x**2 * dp).sum())

    f.defjvp(rule)
    return f


def no_cotangent_for_one(gt: Any) -> Any:
    f = gt.custom_rule(lambda x, p: gt.stop_gradient(x**3 + 0 * p))
    f.defvjp(lambda x, p: (x**3, x), lambda x, c: (3 * x**2 * c, None))
    return f


def marked(gt: Any) -> Any:
    """Return a function whose argument and result are marked with `retain_gradient`."""
    return lambda x: gt.retain_gradient(gt.retain_gradient(x, "x") ** 3, "y")


def retained(gt: Any) -> Any:
    """Return a function of x that returns the gradient of sum y^4 / 4 at the marked value y = x."""
    f = gt.retained_gradients(lambda x: (gt.retain_gradient(x, "y") ** 4).sum() / 4, argnums=())
    return lambda x: f(x)[2]["y"]


def implicit(gt: Any) -> Any:
    """Return the function z = x^3, defined as the implicit solution of z - x^3 = 0."""
    return gt.implicit_solution(lambda z, x: z - x**3, lambda x: gt.stop_gradient(x) ** 3, "dense")


FIRST_CUBED = polynomial(*[[(1.0, (i, i, i))] for i in range(3)])


def of_halves(make: Any) -> Any:
    """Return a function of one vector that calls a function with the two halves of the vector."""

    def made(gt: Any) -> Any:
        f = make(gt)
        return lambda z: f(z[:3], z[3:])

    return made


# --- kernels -----------------------------------------------------------------------------


def _cube_twice(x: Any, c: Any, v: Any) -> Any:
    return 6 * x * c * v, 3 * x**2 * v


def _cubed(x: Any) -> Any:
    return x**3


def host_cube(gt: Any) -> Any:
    """Return x^3 with host kernels for the forward, backward and double-backward passes."""
    cube = gt.host_function(_cubed)
    back = gt.host_function(lambda x, c: 3 * x**2 * c)
    twice = gt.host_function(_cube_twice, out=lambda x, c, v: (x, c))
    cube.defvjp(lambda x: (cube(x), x), lambda x, c: (back(x, c),))
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda res, v: twice(*res, v))
    return cube


def _cos(x: Any) -> Any:
    return np.cos(x)


def host_sin(gt: Any) -> Any:
    """Return sin with a cos kernel; each kernel is the derivative of the other up to sign."""
    sin = gt.host_function(lambda x: np.sin(x))
    cos = gt.host_function(_cos, vectorized=True)
    sin.defvjp(lambda x: (sin(x), x), lambda x, c: (cos(x) * c,))
    cos.defvjp(lambda x: (cos(x), x), lambda x, c: (-sin(x) * c,))
    return sin


def host_exp_jvp(gt: Any) -> Any:
    """Return exp as a host function whose forward rule calls the host function itself."""
    exp = gt.host_function(lambda x: np.exp(x))

    @exp.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        y = exp(primals[0])
        return y, y * tangents[0]

    return exp


def host_exp_saving_the_output(gt: Any) -> Any:
    exp = gt.host_function(lambda x: np.exp(x), vectorized=True)

    def fwd(x: Any) -> Any:
        y = exp(x)
        return y, y

    exp.defvjp(fwd, lambda y, c: (y * c,))
    return exp


def host_cube_framework_rule(gt: Any) -> Any:
    cube = gt.host_function(_cubed)
    cube.defvjp(lambda x: (cube(x), x), lambda x, c: (3 * x**2 * c,))
    return cube


def kernel_inside_a_custom_rule(gt: Any) -> Any:
    """Return a custom_rule around a host kernel without a rule."""
    kernel = gt.host_function(_cubed)
    f = gt.custom_rule(lambda x: kernel(x))
    f.defvjp(lambda x: (kernel(x), x), lambda x, c: (3 * x**2 * c,))
    return f


def _weighed_back(x: Any, p: Any, c: Any) -> Any:
    q = (x * c).sum()
    return (p * x**2).sum() * c + 2 * p * x * q, x**2 * q


def _weighed_twice(x: Any, p: Any, c: Any, v: Any, u: Any) -> Any:
    q, r, t, m = (x * c).sum(), (v * p * x).sum(), (u * x**2).sum(), (v * c).sum()
    s = (p * x**2).sum()
    dx = 2 * p * x * m + 2 * v * p * q + (2 * r + t) * c + 2 * q * u * x
    return dx, x**2 * m + 2 * v * x * q, s * v + (2 * r + t) * x


def host_weighed(gt: Any) -> Any:
    f = gt.host_function(_weighed)
    back = gt.host_function(_weighed_back, out=lambda x, p, c: (x, p))
    twice = gt.host_function(_weighed_twice, out=lambda x, p, c, v, u: (x, p, c))
    f.defvjp(lambda x, p: (f(x, p), (x, p)), lambda res, c: back(*res, c))
    back.defvjp(lambda x, p, c: (back(x, p, c), (x, p, c)), lambda res, v: twice(*res, *v))
    return f


def host_without_a_rule(gt: Any) -> Any:
    return gt.host_function(_cubed)


WAYS = {
    way.name: way
    for way in (
        Way("defvjp", cube_vjp, CUBE),
        Way("defjvp", cube_jvp, CUBE),
        Way("defvjp and defjvp", cube_both, CUBE),
        Way("saves the output", exp_saving_the_output, EXP),
        Way("saves an intermediate", sinh_saving_an_intermediate, SINH),
        Way("saves a tree", sinh_saving_a_tuple, SINH),
        Way(
            "saves None",
            linear_saving_nothing,
            polynomial(*[[(3.0, (i,))] for i in range(3)]),
        ),
        Way("static and keyword arguments", power_with_static_and_keyword, CUBE),
        Way("an integer argument, defvjp", integer_beside_vjp, INTEGER_TIMES),
        Way("an integer argument, defjvp", integer_beside_jvp, INTEGER_TIMES),
        Way("pytrees, defvjp", trees_vjp, TREES, size=6),
        Way("pytrees, defjvp", trees_jvp, TREES, size=6),
        Way("holomorphic, defvjp", lambda gt: _of_real(holomorphic_vjp(gt)), HOLOMORPHIC),
        Way("holomorphic, defjvp", lambda gt: _of_real(holomorphic_jvp(gt)), HOLOMORPHIC),
        Way(
            "non-holomorphic, defvjp", lambda gt: _of_real(non_holomorphic_vjp(gt)), NON_HOLOMORPHIC
        ),
        Way(
            "non-holomorphic, defjvp", lambda gt: _of_real(non_holomorphic_jvp(gt)), NON_HOLOMORPHIC
        ),
        Way("closes over a constant", constant_closed_over, SCALED_CUBE),
        Way("matrix, defvjp", of_halves(weighed_vjp), WEIGHED, 6, halves=weighed_vjp),
        Way("matrix, defjvp", of_halves(weighed_jvp), WEIGHED, 6, halves=weighed_jvp),
        Way("None for one cotangent", of_halves(no_cotangent_for_one), FIRST_CUBED, 6),
        Way("retain_gradient", marked, CUBE),
        Way("retained_gradients", retained, CUBE),
        Way("implicit_solution", implicit, CUBE),
        Way("host: double backward", host_cube, CUBE, order=2, host=True),
        Way(
            "host: double backward, matrix",
            of_halves(host_weighed),
            WEIGHED,
            6,
            order=2,
            host=True,
            halves=host_weighed,
        ),
        Way("host: calls itself", host_sin, SIN, host=True),
        Way("host: defjvp", host_exp_jvp, EXP, host=True),
        Way("host: saves the output", host_exp_saving_the_output, EXP, host=True),
        Way("host: framework rule", host_cube_framework_rule, CUBE, host=True),
        Way("host: inside a custom_rule", kernel_inside_a_custom_rule, CUBE, host=True),
        Way("host: no rule", host_without_a_rule, CUBE, order=0, host=True),
    )
}
