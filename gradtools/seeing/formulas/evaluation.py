"""A program's numbers: NumPy in float64 and complex128, one value after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.constructors import MULTIPLE
from gradtools.seeing.formulas.expressions import BOOLEAN, COMPLEX, INTEGER, Expr, Program, order
from gradtools.seeing.formulas.primitives import PRIMITIVES
from gradtools.seeing.formulas.primitives.elementwise import FUNCTIONS

DTYPES = {"real": np.float64, COMPLEX: np.complex128, INTEGER: np.int64, BOOLEAN: np.bool_}


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
    if y.op in FUNCTIONS:
        return FUNCTIONS[y.op].evaluate(*args, **dict(y.attributes))
    if y.op in PRIMITIVES and y.op not in MULTIPLE:
        return PRIMITIVES[y.op].evaluate(y, *args)
    if y.op == "placeholder":
        raise GradtoolsError(f"formula: no value is given for {y['name'] or 'an input'}")
    if y.family not in shared:
        shared[y.family] = _several(y, args)
    return shared[y.family][y.get("output", 0)]


def _several(y: Expr, args: list[np.ndarray]) -> Sequence[np.ndarray]:
    if y.op in MULTIPLE:
        return PRIMITIVES[y.op].evaluate(y, *args)
    return _CONTROL[y.op](y, args)


def _run(program: Program, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    return evaluate(program.outputs, dict(zip(program.inputs, args, strict=True)))


def _scan(y: Expr, args: list[np.ndarray]) -> list[np.ndarray]:
    consts, carries, length = y["consts"], y["carries"], y["length"]
    carry, xs = args[consts : consts + carries], args[consts + carries :]
    rounds: list[Any] = [None] * length
    for t in range(length)[:: -1 if y["reverse"] else 1]:
        results = _run(y["body"], [*args[:consts], *carry, *(x[t] for x in xs)])
        carry, rounds[t] = results[:carries], results[carries:]
    bodies = y["body"].outputs[carries:]
    stacked = [
        np.stack([r[k] for r in rounds]) if length else np.zeros((0, *o.shape))
        for k, o in enumerate(bodies)
    ]
    return [*carry, *stacked]


_MOST_ROUNDS = 1_000_000


def _while(y: Expr, args: list[np.ndarray]) -> list[np.ndarray]:
    first, second = y["condition_consts"], y["body_consts"]
    for_condition, for_body = args[:first], args[first : first + second]
    carry = args[first + second :]
    for _ in range(_MOST_ROUNDS):
        if not _run(y["condition"], [*for_condition, *carry])[0]:
            return carry
        carry = _run(y["body"], [*for_body, *carry])
    raise GradtoolsError(f"formula: a while loop did not end within {_MOST_ROUNDS} rounds")


def _cond(y: Expr, args: list[np.ndarray]) -> list[np.ndarray]:
    branches = y["branches"]
    k = min(max(int(args[0]), 0), len(branches) - 1)
    return _run(branches[k], args[1:])


def _opaque(y: Expr, args: list[np.ndarray]) -> list[np.ndarray]:
    if y["function"] is None:
        raise GradtoolsError(
            f"formula: {y['name']} has no translation, so its value cannot be computed; "
            "the formula is shown with a mark and is not checked"
        )
    result = y["function"](*args)
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    return [np.asarray(r) for r in found]


_CONTROL = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "opaque": _opaque,
    "ruled": lambda y, args: args[: len(y["signature"])],
}
