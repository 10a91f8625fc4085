"""Taylor mode: derivatives of high order along a curve, and the Laplacian, in one pass.

Each array is propagated with further terms. For `jet` these are the derivatives of x(t) at t = 0,

    x, dx/dt, d2x/dt2, ..., dKx/dtK

and for `laplacian` the Jacobian J with respect to the inputs, with one row for each input entry,
and the Laplacian L. Both are an algebra with three rules:

    f linear         y_k = f(x_k)
                     J_y = f(J_x), L_y = f(L_x)
    f bilinear       f(x, y)_k = sum_j C(k, j) f(x_j, y_k-j)
                     L = f(L_x, y) + f(x, L_y) + 2 sum f(J_x, J_y)
    f elementwise    the formula of Faa di Bruno
                     J_y = f'(x) J_x, L_y = f'(x) L_x + f''(x) sum J_x^2

An operation without a rule is differentiated K times along the polynomial by nested forward mode,
which takes 2^K passes. The backends classify the operations (`torch/taylor.py`, `jax/taylor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import comb, factorial, log, pi, prod, sqrt
from operator import add
from typing import Any

from gradtools.arguments.calls import Call
from gradtools.arguments.checks import check_function, normalized_argnums
from gradtools.backend import Array, Backend, Fun, Operators, P
from gradtools.boundary import like_function
from gradtools.errors import GradtoolsError

Term = Array | None  # None: zero
Linear = Callable[..., list[Array]]


@dataclass(frozen=True, eq=False)
class Series:
    """An array with its derivative terms."""

    primal: Array
    # For `jet` the derivatives, each of the value's shape. For `laplacian` (J, L), where J has an
    # axis for the inputs in front.
    terms: tuple[Term, ...]


class Jets:
    """The algebra of derivatives along a curve, up to an order, for an operator."""

    returned = slice(None)  # those of the terms that the operator returns

    def __init__(self, backend: Backend, order: int, caller: str = "jet") -> None:
        self.backend, self.order, self.caller = backend, order, caller

    def linear(self, f: Linear, xs: Sequence[Series], leading: bool) -> list[list[Term]]:
        """The terms of each output of an f that is jointly linear in all of xs.

        leading: Whether f also accepts arrays with an additional leading axis.
        """
        primals, along = [x.primal for x in xs], list[Any]()
        for k in range(self.order):
            terms = [x.terms[k] for x in xs]
            still = all(t is None for t in terms)
            along.append(None if still else f(*self.backend.filled(terms, primals)))
        return _by_output(along)

    def product(
        self, f: Callable[[Array, Array], Array], x: Series, y: Series, leading: bool
    ) -> list[Term]:
        """The terms of a bilinear f."""
        xs, ys = (x.primal, *x.terms), (y.primal, *y.terms)
        return [
            _sum(
                _scaled(comb(k, j), f(xs[j], ys[k - j]))
                for j in range(k + 1)
                if xs[j] is not None and ys[k - j] is not None
            )
            for k in range(1, self.order + 1)
        ]

    def elementwise(self, slopes: Sequence[Array], x: Series) -> list[Term]:
        """The terms of f(x) by the formula of Faa di Bruno, with slopes = [f', f'', ...] at x.

        With B(n, k) the partial Bell polynomials of x's terms, y_n = sum_k f^(k)(x) B(n, k).
        """
        bell: dict[tuple[int, int], Term] = {}
        for n in range(1, self.order + 1):
            bell[n, 1] = x.terms[n - 1]
            for k in range(2, n + 1):
                pairs = [(i, x.terms[i - 1], bell[n - i, k - 1]) for i in range(1, n - k + 2)]
                bell[n, k] = _sum(
                    _scaled(comb(n - 1, i - 1), a * b)
                    for i, a, b in pairs
                    if a is not None and b is not None
                )
        return [
            _sum(slopes[k - 1] * bell[n, k] for k in range(1, n + 1) if bell[n, k] is not None)
            for n in range(1, self.order + 1)
        ]

    def general(
        self, f: Fun, xs: Sequence[Series], in_loop: bool = False
    ) -> tuple[list[Series], list[Any]]:
        """`(outs, extras)` of any f, by nested forward mode along the polynomial."""
        first = self.backend.zeros_like(self.backend.xp.real(xs[0].primal)).sum()
        one = self.backend.ones_like(first)
        extras: list[Any] = []

        def curve(t: Array) -> tuple[list[Array], list[Any]]:
            values = []
            for x in xs:  # the sum of x_k t^k / k!, in x's dtype
                value, power = x.primal, t
                for k, term in enumerate(x.terms, 1):
                    if term is not None:
                        value = value + term * (power / factorial(k))
                    power = power * t
                values.append(value)
            return f(*values)

        def one_more(g: Any, known: int, t: Array) -> tuple[list[Array], list[Any]]:
            """g's outputs (`known` derivatives of each), and the next derivative of each."""
            outs, extras, pushed = self.backend.jvp(g, [t], [one])
            return [*outs, *pushed[len(outs) - len(outs) // known :]], extras

        g: Any = curve
        for k in range(self.order):
            g.caller = self.caller
            g = partial(one_more, g, k + 1)
        outs, extras = g(first)
        count = len(outs) // (self.order + 1)
        return [
            Series(outs[i], tuple(outs[i + k * count] for k in range(1, self.order + 1)))
            for i in range(count)
        ], extras


class Laplacians:
    """The algebra of Jacobians and Laplacians: the terms are (J, L)."""

    order, returned = 2, slice(1, 2)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._jets = Jets(backend, 2, "laplacian")

    def linear(self, f: Linear, xs: Sequence[Series], leading: bool) -> list[list[Term]]:
        """As `Jets.linear`."""
        primals = [x.primal for x in xs]
        jacobians, laplacians = ([x.terms[k] for x in xs] for k in (0, 1))
        rows = total = None
        if any(j is not None for j in jacobians):
            rows = self._each(f, leading, *self._rows(jacobians, primals))
        if any(t is not None for t in laplacians):
            total = f(*self.backend.filled(laplacians, primals))
        return _by_output([rows, total])

    def product(
        self, f: Callable[[Array, Array], Array], x: Series, y: Series, leading: bool
    ) -> list[Term]:
        """As `Jets.product`."""
        (jx, lx), (jy, ly) = x.terms, y.terms
        left = self._each(lambda j: f(j, y.primal), leading, jx)
        right = self._each(lambda j: f(x.primal, j), leading, jy)
        both = None
        if jx is not None and jy is not None:
            both = 2 * self._each(f, leading, jx, jy).sum(0)
        flat = [None if lx is None else f(lx, y.primal), None if ly is None else f(x.primal, ly)]
        return [_sum(t for t in terms if t is not None) for terms in ([left, right], [*flat, both])]

    def elementwise(self, slopes: Sequence[Array], x: Series) -> list[Term]:
        """As `Jets.elementwise`."""
        j, laplacian = x.terms
        terms = [] if laplacian is None else [slopes[0] * laplacian]
        if j is None:
            return [None, _sum(terms)]
        # an axis for the rows of J, since a project may forbid that ranks are promoted
        first = slopes[0][None] if hasattr(slopes[0], "shape") else slopes[0]
        return [first * j, _sum([*terms, slopes[1] * (j * j).sum(0)])]

    def general(
        self, f: Fun, xs: Sequence[Series], in_loop: bool = False
    ) -> tuple[list[Series], list[Any]]:
        """`(outs, extras)` of any f: second derivatives along each row of J, and a jvp along L.

        in_loop: Whether the rows are looped over, for an f that vmap does not support.
        """
        backend, primals = self.backend, [x.primal for x in xs]
        outs, extras = f(*primals)
        jacobians, laplacians = ([x.terms[k] for x in xs] for k in (0, 1))

        def along(*rows: Array) -> tuple[list[Any], list[Any]]:
            moved = [Series(p, (row, None)) for p, row in zip(primals, rows, strict=True)]
            ys, _ = self._jets.general(f, moved)
            return [y.terms[0] for y in ys], [y.terms[1] for y in ys]

        if all(j is None for j in jacobians):
            first: Sequence[Term] = [None] * len(outs)
            second: Sequence[Term] = first
        else:
            rows = self._rows(jacobians, primals)
            if in_loop:
                parts = zip(*[along(*row) for row in zip(*rows, strict=True)], strict=True)
                first, second = (
                    [backend.xp.stack(ys) for ys in zip(*part, strict=True)] for part in parts
                )
            else:
                first, second = backend.vmap(along)(*rows)
            second = [y.sum(0) for y in second if y is not None]
        if any(t is not None for t in laplacians):
            _, _, pushed = backend.jvp(f, primals, backend.filled(laplacians, primals))
            second = [p if s is None else s + p for s, p in zip(second, pushed, strict=True)]
        return [Series(y, (j, t)) for y, j, t in zip(outs, first, second, strict=True)], extras

    def _each(self, f: Callable[..., Any], leading: bool, *rows: Term) -> Any:
        """f at each row of Jacobians. leading: Whether f itself accepts the leading axis."""
        if rows[0] is None:
            return None
        return f(*rows) if leading else self.backend.vmap(f)(*rows)

    def _rows(self, jacobians: Sequence[Term], primals: Sequence[Array]) -> list[Array]:
        count = next(j.shape[0] for j in jacobians if j is not None)
        return [
            self.backend.xp.broadcast_to(self.backend.zeros_like(p), (count, *p.shape))
            if j is None
            else j
            for j, p in zip(jacobians, primals, strict=True)
        ]


Algebra = Jets | Laplacians


def _by_output(along: Sequence[list[Array] | None]) -> list[list[Term]]:
    """Transposes the outputs for each term to the terms of each output."""
    count = max((len(ys) for ys in along if ys is not None), default=0)
    return [[None if ys is None else ys[i] for ys in along] for i in range(count)]


def _sum(terms: Any) -> Term:
    terms = list(terms)
    return reduce(add, terms) if terms else None


def _scaled(count: int, x: Array) -> Array:
    return x if count == 1 else count * x


def powers(x: Array, p: float, order: int) -> list[Any]:
    """The derivatives of x^p; those above a natural p are zero, also at x = 0."""
    slopes: list[Any] = []
    factor, p = 1.0, int(p) if float(p).is_integer() else p
    for k in range(order):
        factor *= p - k
        slopes.append(factor * x ** (p - k - 1) if factor else 0.0)
    return slopes


def polynomials(y: Array, slope: tuple[float, ...], order: int) -> list[Any]:
    """The derivatives of a function y with y' = slope(y), which are all polynomials in y.

    The derivative of p(y) is p'(y) slope(y).
    """
    if order == 0:
        return []
    first = _by_horner(y, slope)
    slopes, p = [first], list(slope)
    for _ in range(order - 1):
        derived = [k * c for k, c in enumerate(p)][1:]
        slopes.append(_by_horner(y, derived) * first)
        p = [0.0] * (len(derived) + len(slope) - 1)
        for i, a in enumerate(derived):
            for j, b in enumerate(slope):
                p[i + j] += a * b
    return slopes


def _by_horner(y: Array, p: Sequence[float]) -> Any:
    """The polynomial with the coefficients p, without additions of zero."""
    *lower, value = p
    for c in reversed(lower):
        value = value * y + c if c else value * y
    return value


LOGISTIC = (0.0, 1.0, -1.0)  # y' = y - y^2


def _turning(other: str, *signs: int) -> Any:
    """The derivatives of the sine or cosine; `other` names the other one."""

    def slopes(xp: Any, x: Array, y: Array, order: int) -> list[Any]:
        z = getattr(xp, other)(x)
        return [signs[k % 4] * (z if k % 2 == 0 else y) for k in range(order)]

    return slopes


def _error_function(xp: Any, x: Array, y: Array, order: int) -> list[Any]:
    """Derivatives by Hermite polynomials times the normal density."""
    p, before = xp.ones_like(x), xp.zeros_like(x)
    slopes, density = [], 2 / sqrt(pi) * xp.exp(-x * x)
    for k in range(order):
        slopes.append(p * density)
        p, before = -2 * (x * p + k * before), p
    return slopes


SLOPES: dict[str, Callable[[Any, Array, Array, int], list[Any]]] = {
    "exp": lambda xp, x, y, n: [y] * n,
    "exp2": lambda xp, x, y, n: [y * log(2) ** (k + 1) for k in range(n)],
    "expm1": lambda xp, x, y, n: [y + 1] * n,
    "log": lambda xp, x, y, n: [1 / x, *powers(x, -1.0, n - 1)],
    "log1p": lambda xp, x, y, n: [1 / (1 + x), *powers(1 + x, -1.0, n)[: n - 1]],
    "sqrt": lambda xp, x, y, n: powers(x, 0.5, n),
    "rsqrt": lambda xp, x, y, n: powers(x, -0.5, n),
    "reciprocal": lambda xp, x, y, n: powers(x, -1.0, n),
    "square": lambda xp, x, y, n: powers(x, 2.0, n),
    "tanh": lambda xp, x, y, n: polynomials(y, (1.0, 0.0, -1.0), n),  # y' = 1 - y^2
    "logistic": lambda xp, x, y, n: polynomials(y, LOGISTIC, n),
    "erf": _error_function,
    "sin": _turning("cos", 1, -1, -1, 1),
    "cos": _turning("sin", -1, -1, 1, 1),
}
"""`slopes(xp, x, y, n)`: the first n derivatives of elementwise functions y = f(x)."""


class Taylor(Operators):
    """The operators of Taylor mode."""

    def jet(
        self, f: Callable[..., Any], primals: Sequence[Any], series: Sequence[Sequence[Any]]
    ) -> tuple[Any, Any]:
        """The derivatives of f along a curve up to order K, in one pass.

        For x(t) with the derivatives `series` at t = 0 it returns those of f(x(t)), like
        `jax.experimental.jet`. Order K costs about K^2 / 2 products instead of the 2^K passes of
        nested derivatives. Operations without a rule use nested forward mode.

        Args:
            f: Takes and returns pytrees of arrays.
            primals: One pytree of floating or complex arrays for each argument.
            series: For each argument a list of its derivatives d^k x / dt^k, k = 1 to K, each of
                the argument's structure, shapes and dtypes. All lists have the length K.

        Returns:
            `(out, series_out)`: f's output, and its tree with a list of K derivatives in place of
            each leaf; None where the output is not floating or complex.

        Raises:
            GradtoolsError: The lists differ in length or are empty, or a term does not fit.

        Example:
            >>> x, one, zero = (gt.asarray(np.float32(v)) for v in (2.0, 1.0, 0.0))
            >>> y, derivatives = gt.jet(lambda x: x ** 3, (x,), ([one, zero, zero],))
            >>> float(y), [float(d) for d in derivatives]
            (8.0, [12.0, 12.0, 6.0])

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 13; Bettencourt,
        Johnson and Duvenaud, Taylor-mode automatic differentiation for higher-order derivatives
        in JAX, 2019.
        """
        check_function("jet", f, curried=False)
        if len(primals) != len(series):
            raise GradtoolsError(
                f"jet: {len(primals)} primals and {len(series)} lists of derivatives; give one "
                "list for each primal."
            )
        lengths = {len(terms) for terms in series}
        if len(lengths) != 1 or 0 in lengths:
            raise GradtoolsError(
                f"jet: the lists in series have the lengths {sorted(lengths)}; expected the "
                "same number of derivatives for each argument, at least one."
            )
        (order,) = lengths
        call = Call(self._backend, "jet", f, primals, {}, tuple(range(len(primals))))
        along = [
            call.from_trees([terms[k] for terms in series], "an entry of series")
            for k in range(order)
        ]
        moved = [Series(x, tuple(terms)) for x, *terms in zip(call.leaves, *along, strict=True)]
        carry = self._backend.carry_series
        jets = Jets(self._backend, order)
        outs, extras = self._backend.compiler.uncompiled(carry, call, moved, jets)
        out, _ = call.output([y.primal for y in outs], extras)
        lists = [self._backend.filled(y.terms, [y.primal] * order) for y in outs]
        return out, call.tangent_output(lists)

    def laplacian(self, f: Callable[P, Any], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
        """The Laplacian of f: the sum of its second derivatives along each input entry.

        One pass computes the value, the Jacobian and the Laplacian together: with D input entries
        about D + 2 passes forward, where a Hessian takes 2 D or more. Take one point and
        `gt.vmap` for many. The result may be differentiated again.

        Args:
            f: Takes and returns pytrees of arrays.
            argnums: Which positional arguments, real arrays or pytrees of them, the sum is over.

        Returns:
            A function of f's arguments that returns f's structure: at each entry of the output
            the sum over all input entries x_i of its d^2 / dx_i^2.

        Raises:
            GradtoolsError: An argument is not a real floating array.

        Example:
            >>> u = lambda x: x[0] ** 2 * x[1] + x[1] ** 3
            >>> float(gt.laplacian(u)(gt.asarray(np.float32([1.0, 2.0]))))
            16.0

        Source: Li et al., A computational framework for neural network-based variational Monte
        Carlo with forward Laplacian, 2024.
        """
        check_function("laplacian", f)
        return like_function("laplacian_of_", f, partial(self._laplacian_at, f, argnums))

    def _laplacian_at(
        self, f: Any, argnums: int | Sequence[int], /, *args: Any, **kwargs: Any
    ) -> Any:
        backend = self._backend
        chosen = normalized_argnums("laplacian", argnums, len(args))
        call = Call(backend, "laplacian", f, args, kwargs, chosen)
        for path, x in zip(call.paths, call.leaves, strict=True):
            if backend.is_complex(x):
                raise GradtoolsError(
                    f"laplacian: {path} is complex; pass its real and imaginary parts as two real "
                    "arguments."
                )
        sizes = [prod(x.shape) for x in call.leaves]
        moved = [
            Series(x, (backend.unit_basis(x, sum(sizes[:i]), sum(sizes[i + 1 :])), None))
            for i, x in enumerate(call.leaves)
        ]
        carry = backend.carry_series
        outs, _ = backend.compiler.uncompiled(carry, call, moved, Laplacians(backend))
        return call.tangent_output([backend.filled([y.terms[1]], [y.primal])[0] for y in outs])
