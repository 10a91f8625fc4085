"""Making expressions, simplified as they are made.

`product` is at the heart: coefficients are gathered, nested products are flattened where that
reads better, equal factors become powers, identities and one-hot factors that are summed over
vanish, broadcasts and reshapes move outwards to where they cancel. `add` gathers like terms and
takes common factors out. Conjugates move to the leaves; real parts move to the complex leaves.

What is never done: a contraction (a product with a sum inside) is not opened inside of another,
so that a matrix product of the program stays one value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formula.expressions import COMPLEX, INTEGER, REAL, Expr, Held, expr, widest

Labels = tuple[Any, ...]
_MOST_FACTORS = 12  # beyond, nested products stay nested: nobody reads them, and they only grow


# Numbers.


def number(value: Any) -> Expr:
    """A constant without axes."""
    value = value.item() if hasattr(value, "item") else value
    kind = COMPLEX if isinstance(value, complex) else REAL
    return expr("number", (), (), kind, value=_tidy(value))


def _tidy(value: Any) -> Any:
    """A plain number: complex only if it must be, no negative zero."""
    value = complex(value)
    return value if value.imag else float(value.real) + 0.0


def full(value: Any, shape: Sequence[int]) -> Expr:
    """A constant in each place."""
    return product([number(value)], [()], range(len(shape)), shape)


def zeros(shape: Sequence[int]) -> Expr:
    """Zeros."""
    return full(0.0, shape)


def array(value: Any) -> Expr:
    """An array that the program holds."""
    value = np.asarray(value)
    if value.size and np.all(value == value.flat[0]) and value.dtype.kind in "fc":
        return full(value.flat[0].item(), value.shape)
    n = value.shape[0] if value.ndim == 2 else 0
    if n > 1 and value.shape == (n, n) and np.array_equal(value, np.eye(n)):
        return identity(n)
    kind = {"f": REAL, "c": COMPLEX, "b": "boolean"}.get(value.dtype.kind, INTEGER)
    return expr("array", (), value.shape, kind, value=Held(value))


def identity(n: int) -> Expr:
    """The unit matrix."""
    return expr("identity", (), (n, n), REAL)


def constant_of(x: Expr) -> Any:
    """The number that x is in each place, or None."""
    if x.op == "number":
        return x["value"]
    if x.op == "einsum" and not x.args:
        return x["coefficient"]
    return None


def is_zero(x: Expr) -> bool:
    """Whether x is known to be zero."""
    return constant_of(x) == 0


# Products.


def parts(x: Expr) -> tuple[Any, list[Expr], list[Labels], Labels]:
    """X as a product: coefficient, factors, their labels, its own labels."""
    if x.op == "einsum":
        return _unwrapped(x)
    if x.op == "number":
        return x["value"], [], [], ()
    return 1.0, [x], [tuple(range(x.rank))], tuple(range(x.rank))


def _unwrapped(x: Expr) -> tuple[Any, list[Expr], list[Labels], Labels]:
    """The parts of a product, those of a transposed or scaled product among them."""
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
    """Whether x is a product with a sum inside."""
    return x.op == "einsum" and any(l >= x.rank for labels in x["labels"] for l in labels)


class _Product:
    """A product while it is being simplified."""

    def __init__(self, factors, labels, out, shape, coefficient):
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

    def rename(self, old: Any, new: Any) -> None:
        swap = lambda names: tuple(new if n == old else n for n in names)
        self.factors = [(f, swap(names)) for f, names in self.factors]

    def drop_sums_over_nothing(self, before: set) -> None:
        """A label that was summed over and that no factor has any more counts its length."""
        for name in before - self.labels() - set(self.out):
            self.coefficient *= self.size[name]


def product(
    factors: Sequence[Expr],
    labels: Sequence[Iterable[Any]],
    out: Iterable[Any],
    shape: Sequence[int],
    coefficient: Any = 1.0,
) -> Expr:
    """The einsum of the factors, simplified.

    Args:
        factors: What is multiplied.
        labels: The labels of each factor's axes; a label twice in one factor takes the diagonal.
        out: The labels of the result, all different.
        shape: The lengths of the result's axes.
        coefficient: A number.
    """
    p = _Product(factors, labels, out, shape, coefficient)
    _squeeze_axes(p)
    _flatten(p)
    _squeeze_axes(p)
    split = _split_reshapes(p, shape)
    if split is not None:
        return split
    _contract_identities(p)
    _gather_powers(p)
    _drop_one_hots(p)
    if p.coefficient == 0:
        p.factors = []
    return _build(p, tuple(shape))


def _squeeze_axes(p: _Product) -> None:
    """Axes of length 1 carry no label: they are taken off, or summed over."""
    before = p.labels()
    squeezed = []
    for factor, names in p.factors:
        ones = tuple(a for a, n in enumerate(factor.shape) if n == 1)
        inner = squeeze(factor, ones) if ones else factor
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
    """Open the products among the factors, where that reads better."""
    before = p.labels()
    sums = bool(before - set(p.out))
    flat: list[tuple[Expr, Labels]] = []
    queue = list(p.factors)
    while queue:
        factor, names = queue.pop(0)
        closed = not _opens(factor, len(flat) + len(queue))
        if closed or (sums and _stays_whole(factor)):
            flat.append((factor, names))
        elif sums and _is_scaled_whole(factor):
            flat.append(_scale_inside(factor, names))
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
    """Whether x is an elementwise product, which inside of a sum stays one matrix.

    Not if it is broadcast, or if factors of it vanish when they are summed over.
    """
    if x.op != "einsum" or len(x.args) < 2 or contracts(x):
        return False
    labels = [l for names in x["labels"] for l in names]
    if len(set(labels)) < x.rank or any(f.op in ("one_hot", "identity") for f in x.args):
        return False
    arrays = [f for f in x.args if f.rank]
    if len(arrays) == 1 and arrays[0].op == "placeholder":
        return False
    return len(labels) > len(set(labels)) or any(not f.rank for f in x.args)


def _is_scaled_whole(x: Expr) -> bool:
    """Whether x is a multiple of an elementwise product that stays one matrix, maybe turned."""
    turned = x.op == "einsum" and len(x.args) == 1 and x["coefficient"] != 1
    return turned and _stays_whole(x.args[0])


def _scale_inside(x: Expr, names: Labels) -> tuple[Expr, Labels]:
    """The same with the number inside, and the axes as the inner product has them."""
    core = x.args[0]
    coefficient = x["coefficient"] * core["coefficient"]
    scaled = product(core.args, core["labels"], range(core.rank), core.shape, coefficient)
    return scaled, tuple(names[l] for l in x["labels"][0])


def _opens(factor: Expr, others: int) -> bool:
    if factor.op == "number":
        return True
    if factor.op != "einsum" or len(factor.args) + others > _MOST_FACTORS:
        return False
    if not contracts(factor):
        return True
    return not others and len(factor.args) == 1


def _contract_identities(p: _Product) -> None:
    """A unit matrix with a summed label renames it; one that is summed alone counts."""
    before = p.labels()
    for place in [f for f in p.factors if f[0].op == "identity"]:
        current = [f for f in p.factors if f[0] is place[0]]
        for entry in current:
            a, b = entry[1]
            if a == b or a not in p.out or b not in p.out:
                p.factors.remove(entry)
                if a != b:
                    p.rename(*((a, b) if a not in p.out else (b, a)))
                    before.discard(a if a not in p.out else b)
                break
    p.drop_sums_over_nothing(before)


def _gather_powers(p: _Product) -> None:
    """Equal factors with equal labels become one power."""
    before = p.labels()
    powers: dict[tuple[Expr, Labels], Any] = {}
    for factor, names in p.factors:
        base, exponent = (
            (factor.args[0], factor["exponent"]) if factor.op == "power" else (factor, 1)
        )
        powers[base, names] = powers.get((base, names), 0) + exponent
    _modulus_times_sign(powers)
    p.factors = []
    for (base, names), exponent in powers.items():
        if exponent == 0:
            continue
        raised = power(base, exponent)
        if raised.op in ("einsum", "number") and exponent != 1:
            coefficient, inner, labels, out = parts(raised)
            p.coefficient *= coefficient
            known = dict(zip(out, names, strict=True))
            p.factors += [
                (f, tuple(known[l] for l in ls)) for f, ls in zip(inner, labels, strict=True)
            ]
        else:
            p.factors.append((raised, names))
    p.drop_sums_over_nothing(before)


def _modulus_times_sign(powers: dict[tuple[Expr, Labels], Any]) -> None:
    """|x| sgn(x) is x."""
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
    """The sum over a one-hot axis that nothing else has is 1."""
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
    factors, coefficient = p.factors, _tidy(p.coefficient)
    if not factors:
        if not shape:
            return number(coefficient)
        kind = COMPLEX if isinstance(coefficient, complex) else REAL
        return expr("einsum", (), shape, kind, labels=(), coefficient=coefficient)
    if len(factors) == 1 and coefficient == 1 and factors[0][1] == p.out:
        return factors[0][0]
    factors = sorted(factors, key=lambda f: (f[0].turn, [str(n) for n in f[1]]))
    if _has_sum(p):
        core, kept = _core(factors, p)
        if coefficient == 1 and kept == p.out:
            return core
        return _einsum([(core, kept)], p.out, shape, coefficient)
    kept = _own_order(factors)
    if len(factors) > 1 and set(kept) == set(p.out) and kept != p.out:
        core = _einsum(factors, kept, tuple(p.size[n] for n in kept), 1.0)
        return _einsum([(core, kept)], p.out, shape, coefficient)
    return _einsum(factors, p.out, shape, coefficient)


# The order of axes of each contraction, by the contraction in the order of its factors, which
# lives as long as the contraction does.
_first_order: weakref.WeakKeyDictionary[Expr, tuple[int, ...]] = weakref.WeakKeyDictionary()
_keys: weakref.WeakKeyDictionary[Expr, Expr] = weakref.WeakKeyDictionary()


def _own_order(factors: list) -> Labels:
    """The axes of a product, as its factor with most axes has them: one order for all uses."""
    by_rank = sorted(factors, key=lambda f: -len(f[1]))
    return tuple(dict.fromkeys(n for _, names in by_rank for n in names))


def _has_sum(p: _Product) -> bool:
    return bool(p.labels() - set(p.out))


def _core(factors: list, p: _Product) -> tuple[Expr, Labels]:
    """The contraction itself: no coefficient, no broadcast.

    Its axes are in the order in which it was first asked for, which is how it reads best.
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
    return expr("einsum", args, shape, widest(*kinds), labels=labels, coefficient=coefficient)


# Axes of length 1, and reshapes.


def squeeze(x: Expr, axes: tuple[int, ...]) -> Expr:
    """X without these axes of length 1, or x itself where that cannot be pushed inside."""
    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    if x.op == "einsum":
        kept = tuple(a for a in range(x.rank) if a not in axes)
        return product(x.args, x["labels"], kept, shape, x["coefficient"])
    if x.op in _ELEMENTWISE_LIKE and all(a.shape == x.shape for a in x.args):
        inner = [squeeze(a, axes) for a in x.args]
        if all(a.shape == shape for a in inner):
            return expr(x.op, inner, shape, x.kind, **dict(x.attributes))
    if x.op == "add":
        inner = [squeeze(a, axes) for a in x.args]
        return add(inner) if all(a.shape == shape for a in inner) else _bare(x, shape)
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


def _merged_axes(factor: Expr, axis: int) -> tuple[int, ...] | None:
    """The lengths that a reshape merged into this axis."""
    if factor.op != "reshape":
        return None
    for old, new in axis_groups(factor.args[0].shape, factor.shape) or []:
        if new == [axis]:
            return tuple(n for n in (factor.args[0].shape[a] for a in old) if n != 1)
    return None


def _split_reshapes(p: _Product, shape: Sequence[int]) -> Expr | None:
    """Give each part of a merged axis its own label, if every factor with that axis can."""
    if _only_turns(p):
        return None
    for name in sorted(p.labels(), key=str):
        lengths = _common_merge(p, name)
        if lengths is not None and len(lengths) > 1:
            return _split_label(p, name, lengths, tuple(shape))
    return None


def _only_turns(p: _Product) -> bool:
    """Whether nothing is done but to put in axes of length 1."""
    if len(p.factors) != 1 or p.coefficient != 1 or _has_sum(p):
        return False
    names = p.factors[0][1]
    long = tuple(n for n in p.out if p.size[n] != 1 or n in names)
    return names == long


def _common_merge(p: _Product, name: Any) -> tuple[int, ...] | None:
    found: set = set()
    for factor, names in p.factors:
        for axis, n in enumerate(names):
            if n == name:
                found.add(_merged_axes(factor, axis))
    return found.pop() if len(found) == 1 else None


def _split_label(p: _Product, name: Any, lengths, shape) -> Expr:
    new = [p.new_label() for _ in lengths]
    spread = lambda names: tuple(m for n in names for m in (new if n == name else [n]))
    factors = []
    for factor, names in p.factors:
        if name in names:
            sizes = [
                n
                for label, length in zip(names, factor.shape, strict=True)
                for n in (lengths if label == name else [length])
            ]
            factor = reshape(factor, sizes)
        factors.append((factor, spread(names)))
    size = {**p.size, **dict(zip(new, lengths, strict=True))}
    out = spread(p.out)
    inner = product(
        [f for f, _ in factors],
        [n for _, n in factors],
        out,
        [size[n] for n in out],
        p.coefficient,
    )
    return reshape(inner, shape)


# What is written with products.


def scale(coefficient: Any, x: Expr) -> Expr:
    """A number times x."""
    return product([x], [range(x.rank)], range(x.rank), x.shape, coefficient)


def negate(x: Expr) -> Expr:
    """Minus x."""
    return scale(-1.0, x)


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """NumPy's."""
    return tuple(np.broadcast_shapes(*map(tuple, shapes)))


def _aligned(x: Expr, rank: int) -> Labels:
    return tuple(range(rank - x.rank, rank))


def times(*factors: Expr) -> Expr:
    """The elementwise product, broadcast as in NumPy."""
    shape = broadcast_shape(*(f.shape for f in factors))
    labels = [_aligned(f, len(shape)) for f in factors]
    return product(factors, labels, range(len(shape)), shape)


def divide(a: Expr, b: Expr) -> Expr:
    """A over b, elementwise."""
    return times(a, power(b, -1))


def broadcast(x: Expr, shape: Sequence[int], axes: Sequence[int] | None = None) -> Expr:
    """Axis i of x becomes axes[i] of the result."""
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


def adjoint_matrix(x: Expr) -> Expr:
    """The conjugate transpose of the last two axes."""
    return conj(swap(x))


def total(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """The sum over axes."""
    axes = tuple(range(x.rank)) if axes is None else tuple(axes)
    left = [a for a in range(x.rank) if a not in axes]
    result = product([x], [range(x.rank)], left, [x.shape[a] for a in left])
    return unsqueeze(result, axes) if keep else result


def unsqueeze(x: Expr, axes: Iterable[int]) -> Expr:
    """X with axes of length 1 at these places of the result."""
    axes = set(axes)
    rank = x.rank + len(axes)
    kept = [a for a in range(rank) if a not in axes]
    shape = [1] * rank
    for a, n in zip(kept, x.shape, strict=True):
        shape[a] = n
    return product([x], [kept], range(rank), shape)


def spread(x: Expr, axes: Iterable[int], shape: Sequence[int]) -> Expr:
    """What was reduced over axes (without keep), broadcast over them again."""
    axes = set(axes)
    kept = [a for a in range(len(shape)) if a not in axes]
    return product([x], [kept], range(len(shape)), shape)


def mean(x: Expr, axes: Iterable[int], keep: bool = False) -> Expr:
    """The mean over axes."""
    axes = tuple(axes)
    return scale(1.0 / prod(x.shape[a] for a in axes), total(x, axes, keep))


def einsum(subscripts: str, *xs: Expr) -> Expr:
    """numpy.einsum with an arrow."""
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


# Sums.


def add(terms: Sequence[Expr]) -> Expr:
    """The sum of terms of one shape: like terms gathered, common factors taken out."""
    if len(terms) == 1:
        return terms[0]
    shape = terms[0].shape
    gathered = _gather(terms)
    opened = _gather([t for term in terms for t in _terms(term)])
    if len(opened) < len(gathered) or len(opened) < sum(len(_terms(t)) for t in terms):
        gathered = opened
    if not gathered:
        return zeros(shape)
    cores = [scale(c, core) for core, c in gathered.items()]
    if len(cores) == 1:
        return cores[0]
    return _without_common(cores, shape)


def _terms(x: Expr) -> tuple[Expr, ...]:
    if x.op == "add":
        return x.args
    if x.op == "einsum" and len(x.args) == 1 and x.args[0].op == "add" and not contracts(x):
        c, (inner,), (names,) = x["coefficient"], x.args, x["labels"]
        return tuple(product([t], [names], range(x.rank), x.shape, c) for t in inner.args)
    return (x,)


def _gather(terms: Sequence[Expr]) -> dict[Expr, Any]:
    found: dict[Expr, Any] = {}
    for term in terms:
        coefficient, core = _coefficient(term)
        found[core] = found.get(core, 0) + coefficient
    return {core: c for core, c in found.items() if c != 0 and not is_zero(core)}


def _coefficient(x: Expr) -> tuple[Any, Expr]:
    constant = constant_of(x)
    if constant is not None:
        return constant, full(1.0, x.shape)
    if x.op == "einsum" and x["coefficient"] != 1:
        c = x["coefficient"]
        return c, product(x.args, x["labels"], range(x.rank), x.shape)
    return 1.0, x


def _without_common(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    """The sum, with what all terms share in front: axes that all lack, factors, a number."""
    split = [parts(t) for t in terms]
    used = {l for _, _, labels, _ in split for names in labels for l in names}
    kept = [a for a in range(len(shape)) if a in used]
    if len(kept) < len(shape):
        inner = [
            product(
                [t],
                [range(len(shape))],
                kept,
                [shape[a] for a in kept],
                1.0 / prod(n for a, n in enumerate(shape) if a not in kept),
            )
            for t in terms
        ]
        return product([add(inner)], [kept], range(len(shape)), shape)
    common = _common_factors(split)
    coefficient = _common_coefficient([s[0] for s in split])
    if not common and coefficient == 1:
        return _plain_sum(terms, shape)
    left = [_remove(s, common, coefficient, shape) for s in split]
    factors, labels = [f for f, _ in common], [n for _, n in common]
    rest = add(left)
    out = range(len(shape))
    return product([*factors, rest], [*labels, out], out, shape, coefficient)


def _common_factors(split: list) -> list:
    """The factors with the same labels in each term; none with labels that are summed over."""
    terms = [list(zip(factors, labels, strict=True)) for _, factors, labels, _ in split]
    out = split[0][3]
    shared = set(terms[0]).intersection(*terms[1:])
    chosen: list = []
    for entry in sorted(shared, key=lambda f: f[0].turn):
        inside = all(l in out for l in entry[1]) and _is_worth_it(entry, terms, len(out))
        if inside and all(_can_leave([*chosen, entry], term) for term in terms):
            chosen.append(entry)
    return chosen


def _can_leave(entries: list, term: list) -> bool:
    """Whether what is left of a product has all axes of what is taken out, or is a number."""
    rest = [e for e in term if e not in entries]
    axes = {l for _, names in rest for l in names}
    return not rest or {l for _, names in entries for l in names} <= axes


def _is_worth_it(entry: tuple[Expr, Labels], terms: list, rank: int) -> bool:
    """Whether it is a number, has all axes, or divides something that has more axes."""
    own = set(entry[1])
    if not own or len(own) == rank:
        return True
    return any(own < set(names) for term in terms for _, names in term)


def _common_coefficient(coefficients: list) -> Any:
    """The modulus that all share, negative if most terms are."""
    sizes = [abs(c) for c in coefficients]
    if any(isinstance(c, complex) for c in coefficients):
        return 1.0
    if any(abs(s - sizes[0]) > 1e-15 * sizes[0] for s in sizes):
        return 1.0
    negative = sum(c < 0 for c in coefficients) * 2 > len(coefficients)
    return -sizes[0] if negative else sizes[0]


def _remove(s: tuple, common: list, coefficient: Any, shape: tuple[int, ...]) -> Expr:
    c, factors, labels, out = s
    left = list(zip(factors, labels, strict=True))
    for entry in common:
        left.remove(entry)
    rest = c / coefficient
    if abs(abs(rest) - 1) < 1e-14 and not isinstance(rest, complex):
        rest = 1.0 if rest > 0 else -1.0
    return product([f for f, _ in left], [n for _, n in left], out, shape, rest)


def _plain_sum(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    moved = _sum_of_reshapes(terms, shape)
    if moved is not None:
        return moved
    terms = sorted(terms, key=lambda t: t.turn)
    return expr("add", terms, shape, widest(*(t.kind for t in terms)))


def _sum_of_reshapes(terms: list[Expr], shape: tuple[int, ...]) -> Expr | None:
    """Terms that are all reshaped from one shape are added before."""
    shapes = {s for s in map(_inner_shape, terms) if s is not None}
    if len(shapes) != 1:
        return None
    (inner,) = shapes
    before = [_reshape_if_plain(t, inner) for t in terms]
    plain = [b for b in before if b is not None]
    return reshape(add(plain), shape) if len(plain) == len(terms) else None


def _inner_shape(x: Expr) -> tuple[int, ...] | None:
    _, factors, labels, out = parts(x)
    if len(factors) == 1 and _reshapes(factors[0]) and labels[0] == out:
        return factors[0].args[0].shape
    return None


def _reshapes(x: Expr) -> bool:
    """Whether it is a reshape that does more than to take off axes of length 1."""
    if x.op != "reshape":
        return False
    return x.shape != tuple(n for n in x.args[0].shape if n != 1)


def _reshape_if_plain(x: Expr, shape: tuple[int, ...]) -> Expr | None:
    result = reshape(x, shape)
    _, factors, _, _ = parts(result)
    stuck = any(f.op == "reshape" and f.args[0].shape == x.shape for f in factors)
    return None if stuck else result


def subtract(a: Expr, b: Expr) -> Expr:
    """A minus b, broadcast as in NumPy."""
    return plus(a, negate(b))


def plus(*terms: Expr) -> Expr:
    """The sum, broadcast as in NumPy."""
    shape = broadcast_shape(*(t.shape for t in terms))
    return add([broadcast(t, shape) for t in terms])


# Elementwise functions.

_ELEMENTWISE_LIKE: set[str] = {"power", "conj", "real", "imag"}


def register_elementwise(names: Iterable[str]) -> None:
    """Say which operations act in each place by itself."""
    _ELEMENTWISE_LIKE.update(names)


def elementwise(op: str, args: Sequence[Expr], kind: str = REAL, **attributes: Any) -> Expr:
    """A function applied in each place, broadcast as in NumPy; broadcasts move outwards."""
    shape = broadcast_shape(*(a.shape for a in args))
    args = [broadcast(a, shape) for a in args]
    rank = len(shape)
    used = {l for a in args for names in parts(a)[2] for l in names}
    kept = [a for a in range(rank) if a in used]
    if len(kept) < rank:
        inner = [drop_axes(a, kept) for a in args]
        return product([elementwise(op, inner, kind, **attributes)], [kept], range(rank), shape)
    moved = _outside(op, args, kind, attributes)
    return expr(op, args, shape, kind, **attributes) if moved is None else moved


def drop_axes(x: Expr, kept: Sequence[int]) -> Expr:
    """X without the axes along which it is broadcast."""
    c, factors, labels, _ = parts(x)
    return product(factors, labels, kept, [x.shape[a] for a in kept], c)


def _outside(op, args, kind, attributes) -> Expr | None:
    """Transposes of one argument and reshapes of all move out of a function."""
    if len(args) == 1:
        c, factors, labels, out = parts(args[0])
        leaf = len(factors) == 1 and factors[0].op == "placeholder"
        if leaf and c == 1 and labels[0] != out and sorted(labels[0]) == list(out):
            inner = expr(op, factors, factors[0].shape, kind, **attributes)
            return product([inner], [labels[0]], out, args[0].shape)
    plain = [a for a in args if constant_of(a) is None]
    if plain and all(map(_reshapes, plain)):
        shapes = {a.args[0].shape for a in plain}
        if len(shapes) == 1:
            (shape,) = shapes
            inner = [reshape(a, shape) for a in args]
            return reshape(elementwise(op, inner, kind, **attributes), args[0].shape)
    return None


def power(x: Expr, exponent: Any) -> Expr:
    """X to a constant power, in each place."""
    exponent = _tidy(exponent)
    if exponent == 1:
        return x
    if exponent == 0:
        return full(1.0, x.shape)
    constant = constant_of(x)
    if constant is not None and (constant != 0 or not _is_negative(exponent)):
        value = (
            complex(constant) ** exponent
            if _leaves_reals(constant, exponent)
            else constant**exponent
        )
        return full(value, x.shape)
    whole = not isinstance(exponent, complex) and float(exponent).is_integer()
    if x.op == "power" and whole:
        return power(x.args[0], x["exponent"] * exponent)
    if x.op == "einsum" and not contracts(x):
        return _power_of_product(x, exponent, whole)
    kind = COMPLEX if isinstance(exponent, complex) else widest(x.kind, REAL)
    return elementwise("power", [x], kind, exponent=exponent)


def _is_negative(exponent: Any) -> bool:
    return isinstance(exponent, complex) or exponent < 0


def _leaves_reals(constant: Any, exponent: Any) -> bool:
    return isinstance(constant, complex) or isinstance(exponent, complex)


def _power_of_product(x: Expr, exponent: Any, whole: bool) -> Expr:
    c, factors, labels, out = parts(x)
    positive = not isinstance(c, complex) and c > 0
    # Off a diagonal that is read the power need not exist, and its derivative would be NaN.
    everywhere = (whole and exponent > 0) or all(len(set(n)) == len(n) for n in labels)
    if everywhere and (whole or (positive and len(factors) == 1)):
        raised = [power(f, exponent) for f in factors]
        return product(raised, labels, out, x.shape, c**exponent)
    if positive and c != 1:
        return scale(c**exponent, power(product(factors, labels, out, x.shape), exponent))
    kept = [a for a in out if any(a in names for names in labels)]
    if len(kept) < x.rank:
        return product([power(drop_axes(x, kept), exponent)], [kept], out, x.shape)
    return expr("power", (x,), x.shape, widest(x.kind, REAL), exponent=exponent)


# Complex numbers.


def conj(x: Expr) -> Expr:
    """The complex conjugate, moved to the leaves."""
    if not x.is_complex:
        return x
    if x.op == "conj":
        return x.args[0]
    if x.op == "number":
        return number(np.conj(x["value"]))
    if x.op == "einsum":
        c = _tidy(np.conj(x["coefficient"]))
        return product([conj(f) for f in x.args], x["labels"], range(x.rank), x.shape, c)
    if x.op == "add":
        return add([conj(t) for t in x.args])
    if x.op == "reshape":
        return reshape(conj(x.args[0]), x.shape)
    if x.op == "power" and float(np.real(x["exponent"])) == x["exponent"] and _whole(x["exponent"]):
        return power(conj(x.args[0]), x["exponent"])
    return expr("conj", (x,), x.shape, COMPLEX)


def _whole(value: Any) -> bool:
    return float(np.real(value)).is_integer()


def real(x: Expr) -> Expr:
    """The real part."""
    return _part(x, 0)


def imag(x: Expr) -> Expr:
    """The imaginary part."""
    return _part(x, 1)


def _part(x: Expr, which: int) -> Expr:
    """The real (0) or imaginary (1) part."""
    name = ("real", "imag")[which]
    if not x.is_complex:
        return (x, zeros(x.shape))[which]
    if x.op == "conj":
        return scale((1.0, -1.0)[which], _part(x.args[0], which))
    if x.op == "number":
        return number((x["value"].real, x["value"].imag)[which])
    if x.op == "add":
        found = [_part(t, which) for t in x.args]
        if any(f.op not in ("real", "imag") for f in found):
            return add(found)
    if x.op == "einsum":
        return _part_of_product(x, which)
    if x.op == "reshape":
        return reshape(_part(x.args[0], which), x.shape)
    return expr(name, (x,), x.shape, REAL)


def _part_of_product(x: Expr, which: int) -> Expr:
    c, factors, labels, out = parts(x)
    complex_ones = [k for k, f in enumerate(factors) if f.is_complex]
    if not complex_ones:
        c = complex(c)
        return product(factors, labels, out, x.shape, (c.real, c.imag)[which])
    if complex(c).real == 0:  # Re(i c z) = -c Im z, Im(i c z) = c Re z
        turned = product(factors, labels, out, x.shape)
        return scale((-complex(c).imag, complex(c).imag)[which], _part(turned, 1 - which))
    if len(complex_ones) == 1 and not isinstance(c, complex):
        k = complex_ones[0]
        factors[k] = _part(factors[k], which)
        return product(factors, labels, out, x.shape, c)
    if not isinstance(c, complex) and c != 1:
        return scale(c, _part(product(factors, labels, out, x.shape), which))
    return expr(("real", "imag")[which], (x,), x.shape, REAL)
