"""Reshapes, and axes of length 1, which come and go as labels of a product."""

from __future__ import annotations

from collections.abc import Sequence

from gradtools.seeing.formulas import algebra  # its rooms use each other
from gradtools.seeing.formulas.algebra.constants import array, constant_of, full
from gradtools.seeing.formulas.algebra.products import contracts, product
from gradtools.seeing.formulas.expressions import Expr, expr
from gradtools.seeing.formulas.operation_record import is_elementwise


def squeeze(x: Expr, axes: tuple[int, ...]) -> Expr:
    """X without these axes of length 1, or x itself where that cannot be pushed inside."""
    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    if x.op == "einsum":
        kept = tuple(a for a in range(x.rank) if a not in axes)
        return product(x.args, x["labels"], kept, shape, x["coefficient"])
    if is_elementwise(x) and all(a.shape == x.shape for a in x.args):
        inner = [squeeze(a, axes) for a in x.args]
        if all(a.shape == shape for a in inner):
            return expr(x.op, inner, shape, x.kind, **dict(x.attributes))
    if x.op == "add":
        inner = [squeeze(a, axes) for a in x.args]
        return algebra.add(inner) if all(a.shape == shape for a in inner) else _bare(x, shape)
    return _bare(x, shape)


def _bare(x: Expr, shape: tuple[int, ...]) -> Expr:
    if x.op == "reshape":
        return reshape(x.args[0], shape)
    return expr("reshape", (x,), shape, x.kind)


def reshape(x: Expr, shape: Sequence[int]) -> Expr:
    """Row-major reshape; axes of length 1 come and go as labels."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if x.op == "reshape":
        return reshape(x.args[0], shape)
    if x.op == "array":
        return array(x["value"].array.reshape(shape))
    ones = tuple(a for a, n in enumerate(x.shape) if n == 1)
    inner = squeeze(x, ones) if ones else x
    long = tuple(n for n in shape if n != 1)
    if inner.shape != long:
        inner = _reshape_long(inner, long)
    kept = tuple(a for a, n in enumerate(shape) if n != 1)
    return product([inner], [kept], range(len(shape)), shape)


def _reshape_long(x: Expr, shape: tuple[int, ...]) -> Expr:
    if x.op == "reshape":
        x = x.args[0]
        return x if x.shape == shape else expr("reshape", (x,), shape, x.kind)
    if constant_of(x) is not None:
        return full(constant_of(x), shape)
    if x.op == "einsum" and not contracts(x):
        moved = _reshape_product(x, shape)
        if moved is not None:
            return moved
    return expr("reshape", (x,), shape, x.kind)


def _reshape_product(x: Expr, shape: tuple[int, ...]) -> Expr | None:
    """A reshape that touches only axes along which x is broadcast."""
    groups = axis_groups(x.shape, shape)
    if groups is None:
        return None
    used = {l for names in x["labels"] for l in names}
    rename = {}
    for old, new in groups:
        if len(old) == len(new) == 1:
            rename[old[0]] = new[0]
        elif used & set(old):
            return None
    labels = [tuple(rename[l] for l in names) for names in x["labels"]]
    return product(x.args, labels, range(len(shape)), shape, x["coefficient"])


def axis_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list, list]] | None:
    """The smallest runs of axes that a reshape maps to each other; None with empty arrays."""
    if 0 in old or 0 in new:
        return None
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [i], [j]
        if i >= len(old) or j >= len(new):
            return None
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                left, a, i = [*left, i], a * old[i], i + 1
            else:
                right, b, j = [*right, j], b * new[j], j + 1
        groups.append((left, right))
    return groups


def is_reshape(x: Expr) -> bool:
    """Whether it is a reshape that does more than to take off axes of length 1."""
    if x.op != "reshape":
        return False
    return x.shape != tuple(n for n in x.args[0].shape if n != 1)
