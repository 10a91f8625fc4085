"""Numbers, constant arrays, and products of arrays as einsum, which is all that moves axes.

Coefficients are collected, nested products flattened where that reads better, equal factors become
powers, one-hot factors under a sum are eliminated, broadcasts are moved outwards, where they may
cancel.

A contraction (a product with a sum) is never flattened into another one, so that a matrix product
of the program stays one value.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formulas.expressions import (
    COMPLEX,
    INTEGER,
    REAL,
    ArrayValue,
    Expr,
    expr,
    widest,
)


def number(value: Any) -> Expr:
    """A scalar constant."""
    value = value.item() if hasattr(value, "item") else value
    return expr("number", (), (), _kind(value), value=tidy(value))


def _kind(value: Any) -> str:
    return COMPLEX if isinstance(value, complex) else REAL


def lifted(x: Any) -> Expr:
    """Converts a number to an expression."""
    return x if isinstance(x, Expr) else number(x)


def tidy(value: Any) -> Any:
    """A Python number: complex only if the imaginary part is nonzero, without negative zero."""
    value = complex(value)
    return value if value.imag else float(value.real) + 0.0


def full(value: Any, shape: Sequence[int]) -> Expr:
    """A constant array of this shape."""
    if not shape:
        return number(value)
    coefficient = number(value)["value"]
    return expr("einsum", (), shape, _kind(coefficient), labels=(), coefficient=coefficient)


def zeros(shape: Sequence[int]) -> Expr:
    """Zeros."""
    return full(0.0, shape)


def array(value: Any) -> Expr:
    """A captured array as an expression; equal numbers become one."""
    value = np.asarray(value)
    if value.size and np.all(value == value.flat[0]) and value.dtype.kind in "fc":
        return full(value.flat[0].item(), value.shape)
    kind = {"f": REAL, "c": COMPLEX, "b": "boolean"}.get(value.dtype.kind, INTEGER)
    return expr("array", (), value.shape, kind, value=ArrayValue(value))


def constant_of(x: Expr) -> Any:
    """The number of which x consists, if it is a constant array; else None."""
    if x.op == "number":
        return x["value"]
    if x.op == "einsum" and not x.args:
        return x["coefficient"]
    return None


def is_zero(x: Expr) -> bool:
    """Whether x is known to be zero."""
    return constant_of(x) == 0


# --- products


Labels = tuple[Any, ...]
Entry = tuple[Expr, Labels]  # a factor, with the labels of its axes


def parts(x: Expr) -> tuple[Any, list[Entry], Labels]:
    """x as a product: its coefficient, its factors, and its own labels.

    A product that is only transposed or scaled by x is merged with it.
    """
    out = tuple(range(x.rank))
    if x.op == "number":
        return x["value"], [], out
    if x.op != "einsum":
        return 1.0, [(x, out)], out
    coefficient, entries = x["coefficient"], list(zip(x.args, x["labels"], strict=True))
    if len(entries) == 1 and x.args[0].op == "einsum" and not contracts(x.args[0]):
        coefficient *= x.args[0]["coefficient"]
        entries = opened(*entries[0])
    return coefficient, entries, out


def varying(x: Expr) -> set[int]:
    """The axes along which x is not broadcast."""
    _, entries, out = parts(x)
    return {l for _, names in entries for l in names}.intersection(out)


def contracts(x: Expr) -> bool:
    """Whether x is a product with summed labels."""
    return x.op == "einsum" and any(l >= x.rank for labels in x["labels"] for l in labels)


def is_wrapper(x: Expr) -> bool:
    """Whether x is another array transposed, broadcast or scaled."""
    return x.op == "einsum" and len(x.args) == 1 and not contracts(x)


def opened(x: Expr, names: Labels, fresh: Callable[[int], Any] | None = None) -> list[Entry]:
    """The factors of a product x whose axes have these names.

    fresh: Makes the name of a summed axis from its length.
    """
    known: dict[Any, Any] = dict(enumerate(names))
    result = []
    for factor, labels in zip(x.args, x.get("labels", ()), strict=True):
        for l, n in zip(labels, factor.shape, strict=True):
            if l not in known:
                assert fresh is not None
                known[l] = fresh(n)
        result.append((factor, tuple(known[l] for l in labels)))
    return result


def product(
    entries: Iterable[tuple[Expr, Iterable[Any]]],
    out: Iterable[Any],
    shape: Iterable[int],
    coefficient: Any = 1.0,
) -> Expr:
    """The canonical einsum of the factors.

    Args:
        entries: The factors, each with the labels of its axes, all different in one factor.
        out: The labels of the result, all different.
        shape: The lengths of the result's axes.
        coefficient: A number.
    """
    out, shape = tuple(out), tuple(shape)
    size = dict(zip(out, shape, strict=True))
    factors: list[Entry] = []
    for factor, labels in entries:
        names = tuple(labels)
        for name, n in zip(names, factor.shape, strict=True):
            if size.setdefault(name, n) == 1:
                size[name] = n
        ones = tuple(a for a, n in enumerate(factor.shape) if n == 1)
        if ones:
            factor = factor.squeeze(ones)
            names = tuple(name for a, name in enumerate(names) if a not in ones)
        factors.append((factor, names))
    coefficient, factors = _flattened(coefficient, factors, out, size)
    factors = _with_powers(factors)
    _drop_one_hots(factors, out, size)
    used = {name for _, names in factors for name in names}
    for name in size.keys() - used - set(out):
        coefficient *= size[name]  # a sum over nothing
    coefficient = tidy(coefficient)
    if not factors or coefficient == 0:
        return full(coefficient, shape)
    if len(factors) == 1 and coefficient == 1 and factors[0][1] == out:
        return factors[0][0]
    factors.sort(key=lambda f: (f[0].turn, [str(n) for n in f[1]]))
    if not used <= set(out):
        core = _contraction(factors, out, size)
        if coefficient == 1 and core[1] == out:
            return core[0]
        return _einsum([core], out, size, coefficient)
    by_rank = sorted(factors, key=lambda f: -len(f[1]))  # the order of the axes follows these
    kept = tuple(dict.fromkeys(n for _, names in by_rank for n in names))
    if len(factors) > 1 and set(kept) == set(out) and kept != out:
        factors = [(_einsum(factors, kept, size), kept)]
    return _einsum(factors, out, size, coefficient)


def _flattened(
    coefficient: Any, entries: list[Entry], out: Labels, size: dict[Any, int]
) -> tuple[Any, list[Entry]]:
    """Coefficient and factors, with products among these flattened where that reads better."""
    flat: list[Entry] = []
    sums = any(name not in out for _, names in entries for name in names)
    number = itertools.count(1)

    def fresh(n: int) -> Any:
        name = ("new", next(number))
        size[name] = n
        return name

    queue = list(entries)
    while queue:
        factor, names = queue.pop(0)
        alone = not flat and not queue and len(factor.args) == 1
        opens = factor.op == "number" or (
            factor.op == "einsum" and (alone or not contracts(factor))
        )
        if not opens or (sums and _stays_whole(factor)):
            flat.append((factor, names))
            continue
        sums = sums or contracts(factor)
        coefficient *= factor["value"] if factor.op == "number" else factor["coefficient"]
        queue = opened(factor, names, fresh) + queue
    return coefficient, flat


def _stays_whole(x: Expr) -> bool:
    """Whether x is an elementwise product that stays one matrix inside of a contraction.

    It does not if it is broadcast, or if factors of it can be eliminated by the sum.
    """
    if x.op != "einsum" or len(x.args) < 2 or contracts(x):
        return False
    labels = [l for names in x["labels"] for l in names]
    if len(set(labels)) < x.rank or any(f.op == "one_hot" for f in x.args):
        return False
    arrays = [f for f in x.args if f.rank]
    if len(arrays) == 1 and arrays[0].op == "placeholder":
        return False
    return len(labels) > len(set(labels)) or any(not f.rank for f in x.args)


def _with_powers(entries: list[Entry]) -> list[Entry]:
    """Equal factors with equal labels as powers, and |x| sgn(x) as x."""
    powers: dict[Entry, Any] = {}
    for factor, names in entries:
        is_power = factor.op == "power"
        base, exponent = (factor.args[0], factor["exponent"]) if is_power else (factor, 1)
        powers[base, names] = powers.get((base, names), 0) + exponent
    for sign, names in [e for e, n in powers.items() if e[0].op == "sign" and n == 1]:
        matches = (b for b, own in powers if b.op == "abs" and (b.args, own) == (sign.args, names))
        size = next(matches, None)
        if size is not None and powers[size, names] >= 1:
            powers[size, names] -= 1
            del powers[sign, names]
            (x,) = sign.args
            powers[x, names] = powers.get((x, names), 0) + 1
    return [(base**n, names) for (base, names), n in powers.items() if n != 0]


def _drop_one_hots(factors: list[Entry], out: Labels, size: dict[Any, int]) -> None:
    """Eliminates one-hot factors whose axis is summed alone, which gives 1."""
    for entry in list(factors):
        factor, names = entry
        if factor.op != "one_hot" or names[-1] in out or names.count(names[-1]) > 1:
            continue
        if sum(names[-1] in others for _, others in factors) == 1:
            factors.remove(entry)
            del size[names[-1]]


# For each contraction the order of axes of its first use. Keys have the axes in the order of the
# factors; `_keys` keeps a key alive as long as its contraction.
_first_order: weakref.WeakKeyDictionary[Expr, tuple[int, ...]] = weakref.WeakKeyDictionary()
_keys: weakref.WeakKeyDictionary[Expr, Expr] = weakref.WeakKeyDictionary()


def _contraction(factors: list[Entry], out: Labels, size: dict[Any, int]) -> Entry:
    """The contraction without coefficient and broadcasts, and its labels.

    Its axes are in the order of its first use, which reads best.
    """
    kept = tuple(dict.fromkeys(n for _, names in factors for n in names if n in out))
    key = _einsum(factors, kept, size)
    wanted = tuple(kept.index(n) for n in out if n in kept)
    kept = tuple(kept[a] for a in _first_order.setdefault(key, wanted))
    core = _einsum(factors, kept, size)
    if core is not key:
        _keys[core] = key
    return core, kept


def _einsum(
    entries: list[Entry], out: Labels, size: dict[Any, int], coefficient: Any = 1.0
) -> Expr:
    number = {name: i for i, name in enumerate(out)}
    for _, names in entries:
        for name in names:
            number.setdefault(name, len(number))
    labels = tuple(tuple(number[n] for n in names) for _, names in entries)
    kind = widest(*(f.kind for f, _ in entries), _kind(coefficient))
    if len(entries) == 1 and coefficient == 1 and set(entries[0][1]) <= set(out):
        kind = entries[0][0].kind  # a transposed index stays integer
    args, shape = (f for f, _ in entries), (size[n] for n in out)
    return expr("einsum", args, shape, kind, labels=labels, coefficient=coefficient)


# --- broadcasts, transposes, sums and reshapes; all are products


def scale(coefficient: Any, x: Expr) -> Expr:
    """A number times x."""
    return product([(x, range(x.rank))], range(x.rank), x.shape, coefficient)


def negate(x: Expr) -> Expr:
    """Minus x."""
    return scale(-1.0, x)


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which NumPy broadcasts these shapes."""
    return tuple(np.broadcast_shapes(*map(tuple, shapes)))


def times(*factors: Expr) -> Expr:
    """The elementwise product, broadcast as in NumPy."""
    shape = broadcast_shape(*(f.shape for f in factors))
    rank = len(shape)
    return product([(f, range(rank - f.rank, rank)) for f in factors], range(rank), shape)


def broadcast(x: Expr, shape: Sequence[int], axes: Iterable[int] | None = None) -> Expr:
    """Broadcasts x; its axis i becomes axis ``axes[i]`` of the result, by default the last ones."""
    rank = len(shape)
    return product([(x, axes or range(rank - x.rank, rank))], range(rank), shape)


def drop_axes(x: Expr, kept: Sequence[int]) -> Expr:
    """x restricted to the axes `kept`; it must be broadcast along the others."""
    coefficient, entries, _ = parts(x)
    return product(entries, kept, [x.shape[a] for a in kept], coefficient)


def transpose(x: Expr, permutation: Sequence[int] | None = None) -> Expr:
    """numpy.transpose."""
    permutation = tuple(permutation or reversed(range(x.rank)))
    return product([(x, range(x.rank))], permutation, [x.shape[a] for a in permutation])


def swap(x: Expr) -> Expr:
    """The last two axes exchanged."""
    return transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def total(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """The sum over axes."""
    axes = set(range(x.rank) if axes is None else axes)
    left = [a for a in range(x.rank) if a not in axes]
    result = product([(x, range(x.rank))], left, [x.shape[a] for a in left])
    return unsqueeze(result, axes) if keep else result


def mean(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """The mean over axes."""
    axes = tuple(range(x.rank) if axes is None else axes)
    return scale(1.0 / prod(x.shape[a] for a in axes), total(x, axes, keep))


def unsqueeze(x: Expr, axes: Iterable[int]) -> Expr:
    """Inserts axes of length 1 at these positions of the result."""
    axes, lengths = set(axes), iter(x.shape)
    shape = [1 if a in axes else next(lengths) for a in range(x.rank + len(axes))]
    return spread(x, axes, shape)


def spread(x: Expr, axes: Iterable[int], shape: Sequence[int]) -> Expr:
    """The adjoint of a sum over axes (without keep): broadcasts over them."""
    axes = set(axes)
    return broadcast(x, shape, [a for a in range(len(shape)) if a not in axes])


def einsum(subscripts: str, *xs: Expr) -> Expr:
    """numpy.einsum with an explicit output."""
    left, out = subscripts.replace(" ", "").split("->")
    entries = list(zip(xs, left.split(","), strict=True))
    size: dict[str, int] = {}
    for x, names in entries:
        for name, n in zip(names, x.shape, strict=True):
            size[name] = n if size.get(name, 1) == 1 else size[name]
    return product(entries, out, [size[n] for n in out])


def matmul(a: Expr, b: Expr) -> Expr:
    """numpy.matmul."""
    left = ["k"] if a.rank == 1 else ["i", "k"]
    right = ["k"] if b.rank == 1 else ["k", "j"]
    batch = broadcast_shape(a.shape[: max(a.rank - 2, 0)], b.shape[: max(b.rank - 2, 0)])
    names = list(range(len(batch)))
    skip = lambda x: names[len(names) - max(x.rank - 2, 0) :]
    out = names + (["i"] if a.rank > 1 else []) + (["j"] if b.rank > 1 else [])
    shape = batch + (a.shape[-2:-1] if a.rank > 1 else ()) + (b.shape[-1:] if b.rank > 1 else ())
    return product([(a, [*skip(a), *left]), (b, [*skip(b), *right])], out, shape)


def reshape(x: Expr, shape: Iterable[int]) -> Expr:
    """A row-major reshape; axes of length 1 are removed and inserted by products."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if x.op == "reshape":
        return reshape(x.args[0], shape)
    if x.op == "array":
        return array(x["value"].array.reshape(shape))
    ones = tuple(a for a, n in enumerate(x.shape) if n == 1)
    inner = x.squeeze(ones) if ones else x
    long = tuple(n for n in shape if n != 1)
    if inner.shape != long and inner.op == "reshape":
        (inner,) = inner.args
    if inner.shape != long and constant_of(inner) is not None:
        inner = full(constant_of(inner), long)
    elif inner.shape != long:
        inner = expr("reshape", (inner,), long, inner.kind)
    return broadcast(inner, shape, [a for a, n in enumerate(shape) if n != 1])
