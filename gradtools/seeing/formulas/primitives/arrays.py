"""Primitives: constants, sums, einsum, and what moves entries, such as reshape and concatenate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas.algebra import axis_groups, conj, identity, product, reshape
from gradtools.seeing.formulas.constructors import cut, flip, roll, triangle
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.primitives.record import Primitive, listed, tie_first, tie_same
from gradtools.seeing.formulas.typesetting import SUM, Written, function, join

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes, Axis
    from gradtools.seeing.formulas.writing import ExpressionWriter

# --- values, in NumPy


def _einsum(y: Any, *arrays: np.ndarray) -> np.ndarray:
    """Coefficient times factors, summed and broadcast."""
    coefficient = y["coefficient"]
    labels = y["labels"]
    if not arrays:
        return np.full(y.shape, coefficient)
    kept = tuple(l for l in range(len(y.shape)) if any(l in names for names in labels))
    operands: list[Any] = []
    for a, names in zip(arrays, labels, strict=True):
        operands += [a + 0.0 if a.dtype.kind in "bui" else a, list(names)]
    if len(arrays) > 1 and not any(l >= len(y.shape) for names in labels for l in names):
        value = _aligned_product(arrays, labels, kept)
    else:
        value = np.einsum(*operands, list(kept), optimize=len(arrays) > 2)
    place = tuple(slice(None) if l in kept else None for l in range(len(y.shape)))
    return np.broadcast_to(np.asarray(coefficient * value)[place], y.shape)


def _aligned_product(arrays, labels, kept):
    """Products without sums keep NumPy's own rules for infinities, and its speed."""
    result: Any = 1.0
    for a, names in zip(arrays, labels, strict=True):
        result = (
            result
            * np.einsum(a + 0.0, list(names), [l for l in kept if l in names])[
                tuple(slice(None) if l in names else None for l in kept)
            ]
        )
    return result


def _iota(y):
    """Counting along an axis."""
    shape = [1] * len(y.shape)
    shape[y["axis"]] = y.shape[y["axis"]]
    return np.broadcast_to(np.arange(y.shape[y["axis"]]).reshape(shape), y.shape)


# --- cotangents of the arguments


def _einsum_cotangent(y: Expr, g: Expr, k: int) -> Expr:
    labels, target = y["labels"], y.args[k]
    own = labels[k]
    if len(set(own)) < len(own):
        return _diagonal_cotangent(y, g, k)
    others = [j for j in range(len(y.args)) if j != k]
    return product(
        [g, *(conj(y.args[j]) for j in others)],
        [tuple(range(y.rank)), *(labels[j] for j in others)],
        own,
        target.shape,
        np.conj(y["coefficient"]),
    )


def _diagonal_cotangent(y, g, k):
    """A repeated label is written as a unit matrix between two labels."""
    own = list(y["labels"][k])
    names, extra, factors = list(own), [], []
    for place, name in enumerate(own):
        if name in own[:place]:
            names[place] = ("copy", place)
            extra.append((name, ("copy", place)))
            factors.append(identity(y.args[k].shape[place]))
    others = [j for j in range(len(y.args)) if j != k]
    return product(
        [g, *(conj(y.args[j]) for j in others), *factors],
        [tuple(range(y.rank)), *(y["labels"][j] for j in others), *extra],
        names,
        y.args[k].shape,
        np.conj(y["coefficient"]),
    )


def _concatenate_pullback(y, g, *xs):
    """Each part gets its own slice."""
    axis, place, result = y["axis"], 0, []
    for x in xs:
        start, limit = [0] * y.rank, list(y.shape)
        start[axis], limit[axis] = place, place + x.shape[axis]
        result.append(cut(g, start, limit))
        place += x.shape[axis]
    return result


# --- notation


def _iota_form(w: ExpressionWriter, x: Expr) -> Written:
    n = x.shape[x["axis"]]
    return Written(f"(0..{n - 1})", rf"(0, \dots, {n - 1})")


def _reshape_form(w: ExpressionWriter, x: Expr) -> Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.whole(x.args[0])
    shape = "x".join(map(str, x.shape))
    inner = w.whole(x.args[0])
    w.note("reshape: row-major")
    return function("reshape", [inner], f"{shape}", r"\operatorname{reshape}")


def _concatenate_form(w: ExpressionWriter, x: Expr) -> Written:
    pieces = [w.whole(a) for a in x.args]
    between = "; " if x["axis"] == 0 else ", "
    latex = r";\; " if x["axis"] == 0 else r",\; "
    inside = join(pieces, between, latex, SUM)
    return Written(f"[{inside.text}]", rf"\left[{inside.latex}\right]")


def _triangle_form(w: ExpressionWriter, x: Expr) -> Written:
    name = "triu" if x["upper"] else "tril"
    return function(name, [w.whole(x.args[0])], str(x["offset"]) if x["offset"] else "")


# --- axes that are the same


def _tie_einsum(axes: Axes, y: Expr) -> None:
    first: dict[int, Axis] = {l: (y, l) for l in range(y.rank)}
    for a, names in zip(y.args, y["labels"], strict=True):
        for k, l in enumerate(names):
            axes.tie(first.setdefault(l, (a, k)), (a, k))


def _tie_reshape(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    for old, new in axis_groups(x.shape, y.shape) or []:
        if len(old) == len(new) == 1:
            axes.tie((x, old[0]), (y, new[0]))


ARRAYS: dict[str, Primitive] = {
    "number": Primitive(lambda y: np.asarray(y["value"])),
    "array": Primitive(lambda y: y["value"].array, form=lambda w, x: Written("c", "c")),
    "identity": Primitive(lambda y: np.eye(y.shape[0]), form=lambda w, x: Written("I", "I")),
    "iota": Primitive(_iota, form=_iota_form),
    "einsum": Primitive(
        _einsum,
        lambda y, g, *args: [_einsum_cotangent(y, g, k) for k in range(len(args))],
        ties=_tie_einsum,
    ),
    "add": Primitive(
        lambda y, *xs: sum(xs[1:], xs[0] + 0.0), lambda y, g, *xs: [g] * len(xs), ties=tie_same
    ),
    "reshape": Primitive(
        lambda y, x: np.reshape(x, y.shape),
        lambda y, g, x: [reshape(g, x.shape)],
        form=_reshape_form,
        ties=_tie_reshape,
    ),
    "concatenate": Primitive(
        lambda y, *xs: np.concatenate(xs, y["axis"]),
        _concatenate_pullback,
        form=_concatenate_form,
        ties=tie_first,
    ),
    "flip": Primitive(
        lambda y, x: np.flip(x, y["axes"]),
        lambda y, g, x: [flip(g, y["axes"])],
        form=lambda w, x: function(
            "flip", [w.whole(x.args[0])], w.axis_names(x, x["axes"]) if x.rank > 1 else ""
        ),
        ties=tie_same,
    ),
    "roll": Primitive(
        lambda y, x: np.roll(x, y["shifts"], y["axes"]),
        lambda y, g, x: [roll(g, [-s for s in y["shifts"]], y["axes"])],
        form=lambda w, x: function("roll", [w.whole(x.args[0])], listed(x["shifts"])),
        ties=tie_same,
    ),
    "triangle": Primitive(
        lambda y, x: (np.triu if y["upper"] else np.tril)(x, y["offset"]),
        lambda y, g, x: [triangle(g, y["upper"], y["offset"])],
        form=_triangle_form,
        ties=tie_same,
    ),
}
