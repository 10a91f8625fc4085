"""A program's numbers: NumPy in float64 and complex128, one value after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.expressions import DTYPES, Expr, order
from gradtools.seeing.formulas.operation_record import OPERATIONS


def evaluate(roots: Sequence[Expr], known: Mapping[Expr, Any]) -> list[np.ndarray]:
    """The roots' values.

    Args:
        roots: What is wanted.
        known: The value of each placeholder that is needed.

    Raises:
        GradtoolsError: A placeholder has no value, or an operation cannot be computed.
    """
    values = {x: _as(x, v) for x, v in known.items()}
    shared: dict[tuple, Any] = {}
    with np.errstate(all="ignore"):
        for y in order(roots):
            if y not in values:
                values[y] = _value(y, [values[a] for a in y.args], shared)
    return [values[root] for root in roots]


def _as(x: Expr, value: Any) -> np.ndarray:
    value = np.asarray(value)
    if value.shape != x.shape:
        raise GradtoolsError(
            f"formula: {x.get('name') or x.op} has shape {x.shape}; "
            f"it was given a value of shape {value.shape}"
        )
    return value.astype(DTYPES[x.kind], copy=False)


def _value(y: Expr, args: list[np.ndarray], shared: dict) -> np.ndarray:
    if y.op == "placeholder":
        raise GradtoolsError(f"formula: no value is given for {y['name'] or 'an input'}")
    compute: Any = OPERATIONS[y.op].evaluate
    which = y.get("output")
    if which is None:
        return compute(y, *args)
    if y.family not in shared:
        shared[y.family] = compute(y, *args)
    return shared[y.family][which]
