"""`cross_check`: compares the values and derivatives of one program in both frameworks.

Both programs are evaluated at the same NumPy inputs and differentiated along the same random
directions by gradtools' operators, so that conventions (especially for complex numbers) are equal:

    f(x)    J^H c    J t    H t = d/ds grad <c, f>(x + s t)    in two nested modes

`causes.py` then evaluates the programs at other points to find the cause of each disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtools.arguments.checks import check_tolerance, order_among
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.causes import explain
from gradtools.testing.cross_checking.precision import highest_precision
from gradtools.testing.cross_checking.quantities import crossed
from gradtools.testing.report import Report

CALLER = "cross_check"


@user_facing
def cross_check(
    *,
    torch: Any,
    jax: Any,
    args: Sequence[Any] = (),
    order: int = 2,
    mapping: Any = None,
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    raises: bool = True,
) -> Report:
    """Compares one program in PyTorch with the same program in JAX.

    The outputs are compared in structure, shape, dtype and value. For orders 1 and 2, the gradients
    of Re<c, f> with respect to all differentiated leaves are also compared. For order 2,
    pushforwards and the Hessian-vector products of Re<c, f>, in forward-over-reverse and in
    reverse-over-reverse mode, are also compared. The cotangent c and the directions are drawn
    independently at random; for a real scalar f, c is 1. A leaf that has a gradient in only one
    framework counts as a disagreement. NaN and infinity agree only with the same value at the same
    index. Entries that are not finite are counted as not compared, and an array without a finite
    entry counts as a disagreement. Derivatives that differ only at a kink or tie, where each
    framework has its own subgradient, are reported with the status "convention".

    If the results do not show the cause, both programs are recorded as in `first_divergence`, and
    the report contains the lines at which the programs diverge.

    During the check, float64 is enabled in JAX if an input or parameter is float64 or complex128,
    and float32 products are computed in full precision, without TF32 or bfloat16.

    Args:
        torch: A function of torch tensors, a ``torch.nn.Module``, or the triple
            ``(apply, params, state)`` of ``gradtools.torch.make_functional``.
        jax: A function of jax arrays, a pair ``(flax.linen module, variables)``, a ``flax.nnx`` or
            ``equinox`` module, or the triple of ``gradtools.jax.make_functional``.
        args: The positional arguments of both programs: pytrees (tuples, lists, dicts) of NumPy
            arrays of any shape. Floating and complex leaves are differentiated, and a Python float
            counts as float64. Integers, booleans and all other leaves are not differentiated.
        order: 0 compares values. 1 also compares gradients, which requires one backward pass in
            each framework. 2 also compares pushforwards and second derivatives.
        mapping: Pairs the parameters if both programs are models: a `ParameterMapping`, or the
            `overrides` of `match_parameters` (a dictionary from PyTorch's names to JAX's names). If
            None, the parameters are paired by equal names and shapes or, if these differ, by
            `match_parameters`.
        dtype: "float64", "float32", "float16" or "bfloat16": the dtype to which all floating
            inputs, parameters and buffers are cast. None leaves all dtypes unchanged.
        seed: The seed of the random directions.
        tolerance: The relative tolerance of all quantities. By default, `tolerance(dtype, order)`
            is used.
        raises: Whether a disagreement raises an error. If False, the report is returned.

    Returns:
        A `Report`, which is truthy if everything agrees. ``print(report)`` prints a table.

    Raises:
        AgreementError: The programs disagree; the error's ``report`` contains values and likely
            causes.
        GradtoolsError: An argument of cross_check is invalid, or the parameters of the two models
            cannot be matched.

    Example:
        >>> import numpy as np, torch, jax.numpy as jnp
        >>> from gradtools.testing import cross_check
        >>> report = cross_check(torch=torch.sin, jax=jnp.sin, args=(np.linspace(0.0, 1.0, 5),))
        >>> bool(report), len(report)
        (True, 5)

    Source: the usual checks within one framework (dot product, Hessian products by Pearlmutter,
    1994), applied to two frameworks.
    """
    names = tolerances.TOLERANCES
    order = order_among(CALLER, order, (0, 1, 2), "0, 1 or 2")
    if dtype is not None and dtype not in names:
        known = ", ".join(names)
        raise GradtoolsError(f"{CALLER}: dtype is {dtype!r}; expected None or one of {known}.")
    check_tolerance(CALLER, tolerance)
    report = Report(f"{CALLER} of {_name(torch)} and {_name(jax)}")
    options = {"mapping": mapping, "dtype": dtype, "seed": seed}
    inside = crossed(CALLER, torch, jax, args, **options, tolerance=tolerance)
    with inside as check, highest_precision(("torch", "jax")):
        check.run(order, report)
        explain(check, report)
    return report.require() if raises else report


def _name(x: Any) -> str:
    if isinstance(x, tuple) and x:
        x = x[0]
    return getattr(x, "__name__", type(x).__name__)
