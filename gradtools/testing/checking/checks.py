"""Checks of a function's derivatives against its own values, and against each other.

With J the Jacobian of f at x, H the Hessian of Re<v, f>, D the slope along a line from f's values
at many step sizes, and random u, w, v:

    J u = D_u f      Re<J^H v, u> = Re<v, D_u f>      H u = D_u J^H v      against values
    Re<v, J u> = Re<J^H v, u>      H u = H u = H u = Re<w, H u>            modes against each other
    J (2 u) = 2 J u     J (u + w) = J u + J w     the same of J^H          linearity
    Re<w, H u> = Re<u, H w>                                                symmetry
    f(x + t u) - f(x) = integral of J(x + s u) u ds                        no jumps left out

The last one detects jumps, which small finite differences miss: rounding, an argmax used as an
index, a comparison. Kinks pass it. At a kink any slope between the two one-sided ones is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.checking.derivative_checks import DerivativeCheck
from gradtools.testing.checking.probe import MODES, Probe, backend_name, wants_64_bits
from gradtools.testing.cross_checking.precision import at_precision
from gradtools.testing.cross_checking.sides import in_double_precision
from gradtools.testing.report import Report

CALLER = "check_derivatives"


@user_facing
def check_derivatives(
    f: Callable[..., Any],
    args: Sequence[Any],
    backend: Any,
    order: int = 2,
    modes: Sequence[str] | None = None,
    *,
    numeric: bool = True,
    allow_jumps: bool = False,
    seed: int = 0,
    precision: str = "highest",
) -> Report:
    """Checks the derivatives that a framework computes of f, at args.

    Checked are, for random directions in each leaf of the arguments: forward and reverse mode
    against slopes from f's values at steps from a tenth to a millionth of the leaf's size (in
    float32 a three-hundredth); both modes against each other (dot-product test); linearity in the
    tangent and in the cotangent; for order 2 every mix of modes against slopes of the gradient
    and against each other, and the symmetry of the Hessian. A function that jumps where its
    derivative shows nothing is rejected. Complex arguments are moved in complex directions; all
    inner products are Re<u, v>. The tolerances are those of `gradtools.testing.tolerance_table`.

    Args:
        f: Takes and returns pytrees of the backend's arrays; the same at each call.
        args: A tuple with one pytree for each argument of f; its leaves are NumPy arrays or the
            backend's, of any shape. Floating and complex leaves are differentiated; integers,
            booleans, Python numbers and anything else are constants. If a leaf has 64 bits, JAX's
            are switched on for the check alone.
        backend: "torch", "jax", or the module gradtools.torch or gradtools.jax.
        order: 1 or 2.
        modes: Of "forward", "reverse", "forward_over_reverse", "reverse_over_reverse",
            "reverse_over_forward" and "forward_over_forward" those that f must have. None: all
            that f has; what it lacks is listed in the report's `left_out`.
        numeric: False skips finite differences, for an f whose derivative is intentionally
            another (an edited gradient). Then only the modes are compared with each other.
        allow_jumps: True for an f that is meant to jump, such as a branch cut or a sawtooth.
        seed: The seed of the random directions.
        precision: "highest" (default) computes float32 products in full precision during the
            check, without TF32 or bfloat16. "as set" keeps the program's setting. A note of the
            report says if that setting is lower.

    Returns:
        A `Report`: a record for each comparison. `quantity` names the two sides, for example
        "reverse | finite differences".

    Raises:
        AgreementError: A derivative is wrong. It carries the report, and names the argument and
            leaf, the mode, the place, and both values.
        GradtoolsError: There is nothing to check, f has none of the modes, f is random, or the
            arguments are not what is described above.

    Example:
        >>> import numpy as np
        >>> from gradtools.testing import check_derivatives
        >>> x = np.array([0.3, -1.2, 2.0])
        >>> report = check_derivatives(lambda x: (x**3).sum(), (x,), gt)
        >>> bool(report), report.worst.error < 1
        (True, True)
        >>> check_derivatives(lambda x: gt.xp.round(x).sum(), (x,), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...a staircase...

    Source: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3 (dot-product test);
    Ridders, Accurate computation of F'(x) and F'(x)F''(x), 1982 (extrapolated differences).
    """
    with check_context(CALLER, args, backend, order, modes, precision) as notes:
        probe = Probe(CALLER, f, args, backend)
        check = DerivativeCheck(probe, modes, numeric, allow_jumps, seed)
        check.report.notes += notes
        check.first_order()
        if order == 2:
            check.second_order()
    return check.report.require()


@contextmanager
def check_context(
    caller: str,
    args: Any,
    backend: Any,
    order: int,
    modes: Sequence[str] | None,
    precision: str,
) -> Iterator[list[str]]:
    """The context of a check, with JAX's 64 bits if args have them; yields notes on precision.

    Raises if order, modes, the backend or the precision are invalid.
    """
    if order not in (1, 2):
        raise GradtoolsError(f"check_derivatives: order is {order!r}; expected 1 or 2.")
    unknown = [m for m in modes or () if m not in MODES]
    if unknown or (modes is not None and isinstance(modes, str)):
        raise GradtoolsError(
            f"check_derivatives: modes is {modes!r}; expected a tuple of {', '.join(MODES)}."
        )
    name = backend_name(caller, backend)
    at = at_precision(caller, precision, [name])
    with in_double_precision(name == "jax" and wants_64_bits(name, args)), at as notes:
        yield notes
