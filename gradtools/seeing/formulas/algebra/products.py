"""Numbers, constant arrays, and products of arrays as einsum, which is all that moves axes.

Coefficients are collected, nested products flattened where that reads better, equal factors become
powers, one-hot factors under a sum are eliminated, broadcasts are moved outwards, where they may
cancel.

A contraction (a product with a sum) is never flattened into another one, so that a matrix product
of the program stays one value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
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
    kind = COMPLEX if isinstance(value, complex) else REAL
    return expr("number", (), (), kind, value=tidy(value))


def lifted(x: Any) -> Expr:
    """Converts a number to an expression."""
    return x if isinstance(x, Expr) else number(x)


def tidy(value: Any) -> Any:
    """A Python number: complex only if the imaginary part is nonzero, without negative zero."""
    value = complex(value)
    return value if value.imag else float(value.real) + 0.0


def full(value: Any, shape: Sequence[int]) -> Expr:
    """A constant array of this shape."""
    one = number(value)
    if not shape:
        return one
    coefficient = one["value"]
    kind = COMPLEX if isinstance(coefficient, complex) else REAL
    return expr("einsum", (), tuple(shape), kind, labels=(), coefficient=coefficient)


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


def parts(x: Expr) -> tuple[Any, list[Expr], list[Labels], Labels]:
    """x as a product: coefficient, factors, their labels, its own labels."""
    if x.op == "einsum":
        return _unwrapped(x)
    if x.op == "number":
        return x["value"], [], [], ()
    return 1.0, [x], [tuple(range(x.rank))], tuple(range(x.rank))


def _unwrapped(x: Expr) -> tuple[Any, list[Expr], list[Labels], Labels]:
    """The parts of a product, merged with those of a transposed or scaled inner product."""
    coefficient, factors, labels = x["coefficient"], x.args, x["labels"]
    if len(factors) == 1 and factors[0].op == "einsum" and not contracts(factors[0]):
        inner, names = factors[0], labels[0]
        return (
            coefficient * inner["coefficient"],
            list(inner.args),
            [tuple(names[l] for l in ls) for ls in inner["labels"]],
            tuple(range(x.rank)),
        )
    return coefficient, list(factors), list(labels), tuple(range(x.rank))


def contracts(x: Expr) -> bool:
    """Whether x is a product with summed labels."""
    return x.op == "einsum" and any(l >= x.rank for labels in x["labels"] for l in labels)


class _Product:
    """A product under construction."""

    def __init__(
        self,
        factors: Sequence[Expr],
        labels: Sequence[Iterable[Any]],
        out: Iterable[Any],
        shape: Sequence[int],
        coefficient: Any,
    ) -> None:
        self.coefficient = coefficient
        self.factors: list[tuple[Expr, Labels]] = list(
            zip(factors, map(tuple, labels), strict=True)
        )
        self.out = tuple(out)
        self.size = dict(zip(self.out, shape, strict=True))
        for factor, names in self.factors:
            for name, n in zip(names, factor.shape, strict=True):
                if self.size.setdefault(name, n) == 1:
                    self.size[name] = n
        self.fresh = 0

    def new_label(self) -> tuple:
        self.fresh += 1
        return ("new", self.fresh, id(self))

    def labels(self) -> set:
        return {name for _, names in self.factors for name in names}

    def drop_sums_over_nothing(self, before: set) -> None:
        """Multiplies by the length of each summed label that no factor has any more."""
        for name in before - self.labels() - set(self.out):
            self.coefficient *= self.size[name]


def product(
    factors: Sequence[Expr],
    labels: Sequence[Iterable[Any]],
    out: Iterable[Any],
    shape: Sequence[int],
    coefficient: Any = 1.0,
) -> Expr:
    """The canonical einsum of the factors.

    Args:
        factors: The factors.
        labels: The labels of each factor's axes, all different in one factor.
        out: The labels of the result, all different.
        shape: The lengths of the result's axes.
        coefficient: A number.
    """
    p = _Product(factors, labels, out, shape, coefficient)
    _squeeze_axes(p)
    _flatten(p)
    _squeeze_axes(p)
    _gather_powers(p)
    _drop_one_hots(p)
    if p.coefficient == 0:
        p.factors = []
    return _build(p, tuple(shape))


def _squeeze_axes(p: _Product) -> None:
    """Removes axes of length 1, or gives them private labels that are summed over."""
    before = p.labels()
    squeezed = []
    for factor, names in p.factors:
        ones = tuple(a for a, n in enumerate(factor.shape) if n == 1)
        inner = factor.squeeze(ones) if ones else factor
        if inner is not factor:
            names = tuple(name for a, name in enumerate(names) if a not in ones)
        squeezed.append((inner, names))
    p.factors = squeezed
    p.drop_sums_over_nothing(before)
    p.factors = [(f, _private_ones(p, f, names)) for f, names in p.factors]


def _private_ones(p: _Product, factor: Expr, names: Labels) -> Labels:
    """A length-1 axis that cannot be taken off gets a label of its own, which is summed over."""
    return tuple(
        p.new_label() if n == 1 and p.size.get(name) != 1 else name
        for name, n in zip(names, factor.shape, strict=True)
    )


def _flatten(p: _Product) -> None:
    """Flattens products among the factors where that reads better."""
    before = p.labels()
    sums = bool(before - set(p.out))
    flat: list[tuple[Expr, Labels]] = []
    queue = list(p.factors)
    while queue:
        factor, names = queue.pop(0)
        closed = not _opens(factor, len(flat) + len(queue))
        if closed or (sums and _stays_whole(factor)):
            flat.append((factor, names))
        else:
            sums = sums or contracts(factor)
            queue = _opened(p, factor, names) + queue
    p.factors = flat
    p.drop_sums_over_nothing(before)


def _opened(p: _Product, factor: Expr, names: Labels) -> list[tuple[Expr, Labels]]:
    p.coefficient *= factor["value"] if factor.op == "number" else factor["coefficient"]
    known: dict[Any, Any] = dict(enumerate(names))
    opened = []
    for f, ls in zip(factor.args, factor.get("labels", ()), strict=True):
        for l, n in zip(ls, f.shape, strict=True):
            if l not in known:
                known[l] = p.new_label()
                p.size[known[l]] = n
        opened.append((f, tuple(known[l] for l in ls)))
    return opened


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


def _opens(factor: Expr, others: int) -> bool:
    if factor.op == "number":
        return True
    if factor.op != "einsum":
        return False
    return not contracts(factor) or (not others and len(factor.args) == 1)


def _gather_powers(p: _Product) -> None:
    """Combines equal factors with equal labels to powers."""
    before = p.labels()
    powers: dict[tuple[Expr, Labels], Any] = {}
    for factor, names in p.factors:
        base, exponent = (
            (factor.args[0], factor["exponent"]) if factor.op == "power" else (factor, 1)
        )
        powers[base, names] = powers.get((base, names), 0) + exponent
    _modulus_times_sign(powers)
    p.factors = [(base**n, names) for (base, names), n in powers.items() if n != 0]
    p.drop_sums_over_nothing(before)


def _modulus_times_sign(powers: dict[tuple[Expr, Labels], Any]) -> None:
    """Replaces |x| sgn(x) by x."""
    for base, names in list(powers):
        if base.op != "sign" or powers[base, names] != 1:
            continue
        size = next(
            (b for b, n in powers if b.op == "abs" and b.args == base.args and n == names), None
        )
        if size is not None and powers[size, names] >= 1:
            powers[size, names] -= 1
            del powers[base, names]
            x = base.args[0]
            powers[x, names] = powers.get((x, names), 0) + 1


def _drop_one_hots(p: _Product) -> None:
    """Eliminates one-hot factors whose axis is summed alone, which gives 1."""
    for entry in list(p.factors):
        factor, names = entry
        if factor.op != "one_hot" or names[-1] in p.out or names.count(names[-1]) > 1:
            continue
        if sum(names[-1] in others for _, others in p.factors) > 1:
            continue
        before = p.labels()
        p.factors.remove(entry)
        before.discard(names[-1])
        p.drop_sums_over_nothing(before)


def _build(p: _Product, shape: tuple[int, ...]) -> Expr:
    factors, coefficient = p.factors, tidy(p.coefficient)
    if not factors:
        return full(coefficient, shape)
    if len(factors) == 1 and coefficient == 1 and factors[0][1] == p.out:
        return factors[0][0]
    factors = sorted(factors, key=lambda f: (f[0].turn, [str(n) for n in f[1]]))
    if _has_sum(p):
        core, kept = _core(factors, p)
        if coefficient == 1 and kept == p.out:
            return core
        return _einsum([(core, kept)], p.out, shape, coefficient)
    by_rank = sorted(factors, key=lambda f: -len(f[1]))  # the order of the axes follows these
    kept = tuple(dict.fromkeys(n for _, names in by_rank for n in names))
    if len(factors) > 1 and set(kept) == set(p.out) and kept != p.out:
        core = _einsum(factors, kept, tuple(p.size[n] for n in kept), 1.0)
        return _einsum([(core, kept)], p.out, shape, coefficient)
    return _einsum(factors, p.out, shape, coefficient)


# For each contraction the order of axes of its first use. Keys have the axes in the order of the
# factors; `_keys` keeps a key alive as long as its contraction.
_first_order: weakref.WeakKeyDictionary[Expr, tuple[int, ...]] = weakref.WeakKeyDictionary()


_keys: weakref.WeakKeyDictionary[Expr, Expr] = weakref.WeakKeyDictionary()


def _has_sum(p: _Product) -> bool:
    return bool(p.labels() - set(p.out))


def _core(factors: list, p: _Product) -> tuple[Expr, Labels]:
    """The contraction without coefficient and broadcasts, and its labels.

    Its axes are in the order of its first use, which reads best.
    """
    kept = tuple(dict.fromkeys(n for _, names in factors for n in names if n in p.out))
    key = _einsum(factors, kept, tuple(p.size[n] for n in kept), 1.0)
    wanted = tuple(kept.index(n) for n in p.out if n in kept)
    kept = tuple(kept[a] for a in _first_order.setdefault(key, wanted))
    core = _einsum(factors, kept, tuple(p.size[n] for n in kept), 1.0)
    if core is not key:
        _keys[core] = key
    return core, kept


def _einsum(factors: list, out: Labels, shape: tuple[int, ...], coefficient: Any) -> Expr:
    rename = {name: i for i, name in enumerate(out)}
    for _, names in factors:
        for name in names:
            rename.setdefault(name, len(rename))
    labels = tuple(tuple(rename[n] for n in names) for _, names in factors)
    kinds = [f.kind for f, _ in factors] + [COMPLEX if isinstance(coefficient, complex) else REAL]
    args = tuple(f for f, _ in factors)
    rearranges = len(args) == 1 and coefficient == 1 and set(factors[0][1]) <= set(out)
    kind = args[0].kind if rearranges else widest(*kinds)  # a transposed index stays integer
    return expr("einsum", args, shape, kind, labels=labels, coefficient=coefficient)


# --- broadcasts, transposes, sums and reshapes


def scale(coefficient: Any, x: Expr) -> Expr:
    """A number times x."""
    return product([x], [range(x.rank)], range(x.rank), x.shape, coefficient)


def negate(x: Expr) -> Expr:
    """Minus x."""
    return scale(-1.0, x)


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which NumPy broadcasts these shapes."""
    return tuple(np.broadcast_shapes(*map(tuple, shapes)))


def _aligned(x: Expr, rank: int) -> Labels:
    return tuple(range(rank - x.rank, rank))


def times(*factors: Expr) -> Expr:
    """The elementwise product, broadcast as in NumPy."""
    shape = broadcast_shape(*(f.shape for f in factors))
    labels = [_aligned(f, len(shape)) for f in factors]
    return product(factors, labels, range(len(shape)), shape)


def broadcast(x: Expr, shape: Sequence[int], axes: Sequence[int] | None = None) -> Expr:
    """Broadcasts x; its axis i becomes axis ``axes[i]`` of the result."""
    axes = _aligned(x, len(shape)) if axes is None else tuple(axes)
    return product([x], [axes], range(len(shape)), shape)


def transpose(x: Expr, permutation: Sequence[int] | None = None) -> Expr:
    """numpy.transpose."""
    permutation = tuple(permutation or reversed(range(x.rank)))
    shape = [x.shape[a] for a in permutation]
    return product([x], [range(x.rank)], permutation, shape)


def swap(x: Expr) -> Expr:
    """The last two axes exchanged."""
    return transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def total(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """The sum over axes."""
    axes = tuple(range(x.rank)) if axes is None else tuple(axes)
    left = [a for a in range(x.rank) if a not in axes]
    result = product([x], [range(x.rank)], left, [x.shape[a] for a in left])
    return unsqueeze(result, axes) if keep else result


def unsqueeze(x: Expr, axes: Iterable[int]) -> Expr:
    """Inserts axes of length 1 at these positions of the result."""
    axes = set(axes)
    rank = x.rank + len(axes)
    kept = [a for a in range(rank) if a not in axes]
    shape = [1] * rank
    for a, n in zip(kept, x.shape, strict=True):
        shape[a] = n
    return product([x], [kept], range(rank), shape)


def spread(x: Expr, axes: Iterable[int], shape: Sequence[int]) -> Expr:
    """The adjoint of a sum over axes (without keep): broadcasts over them."""
    axes = set(axes)
    kept = [a for a in range(len(shape)) if a not in axes]
    return product([x], [kept], range(len(shape)), shape)


def mean(x: Expr, axes: Iterable[int], keep: bool = False) -> Expr:
    """The mean over axes."""
    axes = tuple(axes)
    return scale(1.0 / prod(x.shape[a] for a in axes), total(x, axes, keep))


def einsum(subscripts: str, *xs: Expr) -> Expr:
    """numpy.einsum with an explicit output."""
    left, out = subscripts.replace(" ", "").split("->")
    size: dict[str, int] = {}
    for names, x in zip(left.split(","), xs, strict=True):
        for name, n in zip(names, x.shape, strict=True):
            size[name] = n if size.get(name, 1) == 1 else size[name]
    return product(xs, left.split(","), out, [size[n] for n in out])


def matmul(a: Expr, b: Expr) -> Expr:
    """numpy.matmul."""
    left = ["k"] if a.rank == 1 else ["i", "k"]
    right = ["k"] if b.rank == 1 else ["k", "j"]
    batch = broadcast_shape(a.shape[: max(a.rank - 2, 0)], b.shape[: max(b.rank - 2, 0)])
    names = list(range(len(batch)))
    skip = lambda x: names[len(names) - max(x.rank - 2, 0) :]
    out = names + (["i"] if a.rank > 1 else []) + (["j"] if b.rank > 1 else [])
    shape = batch + (a.shape[-2:-1] if a.rank > 1 else ()) + (b.shape[-1:] if b.rank > 1 else ())
    return product([a, b], [[*skip(a), *left], [*skip(b), *right]], out, shape)


# --- reshapes; axes of length 1 are represented by the labels of a product


def reshape(x: Expr, shape: Sequence[int]) -> Expr:
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
    return expr("reshape", (x,), shape, x.kind)
