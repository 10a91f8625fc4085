"""Defines the tolerances of comparisons, by dtype and by order of derivative.

The error of an array is relative to its own largest entry,

    error = max |a - b| / max(|a|, |b|)

and an array agrees if its error is at most `tolerance(dtype, order)`. No tolerance grows with the
number of entries, the depth of a network or the size of a batch, and NaN is never replaced. Order 0
is used for values, order 1 for gradients, vjps and jvps, and order 2 for Hessian products. Finite
differences have separate tolerances, because extrapolation preserves only about half of the digits.

The table does not depend on the device: `precision.py` turns TF32 and bfloat16 matrix products off
during a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtools.arguments.checks import order_among
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError

TOLERANCES: dict[str, tuple[float, float, float]] = {
    # dtype:   (order 0, order 1, order 2)
    "float64": (1e-12, 1e-12, 1e-11),
    "float32": (1e-5, 1e-5, 1e-4),
    "float16": (4e-3, 8e-3, 3e-2),
    "bfloat16": (3e-2, 6e-2, 2e-1),
}
FINITE_DIFFERENCES = {"float64": 1e-7, "float32": 2e-3, "float16": 1e-1, "bfloat16": 3e-1}
EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_REAL_PART = {"complex128": "float64", "complex64": "float32"}


@user_facing
def tolerance(dtype: Any, order: int = 0) -> float:
    """Returns the largest relative error at which two results of one dtype agree.

    Args:
        dtype: A dtype or its name, real or complex; for two results, the coarser dtype.
        order: The order of the derivative: 0, 1 or 2.

    Returns:
        The relative error as a Python float. Integers and booleans must be equal, so their
        tolerance is 0.0.

    Raises:
        GradtoolsError: The tolerance table has no row for the dtype or no column for the order.

    Example:
        >>> from gradtools.testing import tolerance
        >>> tolerance("float64", order=1), tolerance("complex64"), tolerance("int32")
        (1e-12, 1e-05, 0.0)
    """
    order = order_among("tolerance", order, (0, 1, 2), "0, 1 or 2")
    try:
        name = real_name(dtype)
    except (TypeError, ValueError):  # NumPy raises them for a value that is no dtype
        name = ""
    if name in TOLERANCES:
        return TOLERANCES[name][order]
    if name.rstrip("0123456789") in ("int", "uint", "bool"):
        return 0.0
    raise GradtoolsError(
        f"tolerance: the table has no row for the dtype {dtype}; it has {', '.join(TOLERANCES)}, "
        "and the corresponding complex dtypes. Pass a tolerance explicitly."
    )


def epsilon(dtype: Any) -> float:
    """Returns the machine epsilon of a dtype, which is 0.0 for integers and booleans."""
    return EPSILONS.get(real_name(dtype), 0.0)


def real_name(dtype: Any) -> str:
    """Returns the name of a dtype; for a complex dtype, the name of its real part's dtype."""
    is_name = isinstance(dtype, str) or str(dtype).startswith("torch.")
    name = str(dtype).removeprefix("torch.") if is_name else np.dtype(dtype).name
    return _REAL_PART.get(name, name)


def coarser(first: Any, second: Any) -> str:
    """Returns the name of the dtype with the larger epsilon."""
    names = real_name(first), real_name(second)
    return max(names, key=lambda name: EPSILONS.get(name, 0.0))
