"""Canonical form of indexing: gather, scatter, embeddings, slices and take_along_axis are one.

An access picks, along some axes of an array x, the entries that integer arrays name; all these run
over the same axes b. Some axes of x are tied to one of b::

    read      out[b, rest] = x[i(b), j(b), .., b_k, rest]
    write     x[i(b), j(b), .., b_k, rest]  becomes, is added, ..  u[b, rest]

So a row, an embedding, NumPy's indexing on several axes, `take_along_axis` and JAX's gather and
scatter with all their dimension numbers are one expression where they take the same entries. A
negative index counts from the end in both frameworks: JAX writes this out (where i < 0, i + n, i),
PyTorch does it inside; where it is written out it is taken off. A pick at 0, 1, 2, .. ties an axis,
a pick at a number is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from gradtools.seeing.differences.canonical_forms import (
    CanonicalExpression,
    Form,
    Labels,
    NoForm,
    operand,
    widened,
)
from gradtools.seeing.graphs.nodes import Node, PlainGraph

if TYPE_CHECKING:
    from gradtools.seeing.differences.canonical import Canonical, Parts


@dataclass(frozen=True)
class Access:
    """Which entries of an array are read or written.

    Attributes:
        picks: For some axes of it the integer array, over the shape `over`.
        tied: For some axes of it the axis of `over` that it is.
        over: The shape over which the integer arrays run.
        lies: For each axis of what is read or written, where it comes from: ("b", axis of over),
            or ("a", axis of the array).
        wraps: Whether a negative index counts from the end.
        more: What else is to be compared.
    """

    picks: Mapping[int, Form]
    tied: Mapping[int, int]
    over: tuple[int, ...]
    lies: tuple[tuple[str, int], ...]
    wraps: bool = True
    more: tuple[tuple[str, Any], ...] = ()

    def said(self) -> dict[str, Any]:
        """What a person is told of it."""
        result: dict[str, Any] = {"axes": tuple(sorted(self.picks))}
        return (
            result | dict(self.more) | ({} if self.wraps else {"negative indices": "not wrapped"})
        )


# --- in PyTorch's words ------------------------------------------------------------------


def _listed(c: Canonical, node: Node, x: Form, given: Sequence[Form]) -> Access:
    """x[i, j]: arrays that broadcast against each other; NumPy's place for their axes."""
    axes = node.attributes["axes"]
    if any(c.dtype_of(node, 1 + k).startswith("bool") for k in range(len(axes))):
        raise NoForm
    rank = max(len(form.shape) for form in given)
    over = tuple(
        max(form.shape[p - rank] for form in given if len(form.shape) >= rank - p)
        for p in range(rank)
    )
    rest = [a for a in range(len(x.shape)) if a not in axes]
    at = axes[0] if axes == tuple(range(axes[0], axes[-1] + 1)) else 0
    lies = [*(("a", a) for a in rest[:at]), *(("b", k) for k in range(rank))]
    picks = {a: _lying(form, rank) for a, form in zip(axes, given, strict=True)}
    return Access(picks, {}, over, (*lies, *(("a", a) for a in rest[at:])))


def _lying(x: Form, rank: int) -> Form:
    """A value with so many axes, along the first of which it repeats."""
    return widened(x, (*(1,) * (rank - len(x.shape)), *x.shape))


def _along(axis: int, x: Form, index: Form) -> Access:
    """`gather`: the entry along one axis for each place of the others."""
    rank = len(x.shape)
    tied = {a: a for a in range(rank) if a != axis}
    return Access({axis: index}, tied, index.shape, tuple(("b", k) for k in range(rank)))


# --- in JAX's words ----------------------------------------------------------------------


def _of_window(
    c: Canonical, node: Node, x: Form, indices: Form, sizes: Sequence[int], windows: Sequence[int]
) -> tuple[Access, dict[int, tuple[int, int, int]]]:
    """A gather or scatter, and the axes of which a slice at known numbers is meant."""
    a = node.attributes
    batch = indices.shape[:-1]
    tied = dict(
        zip(a.get("batch_axes", ()), a.get("index_batch_axes", range(len(batch))), strict=False)
    )
    picks: dict[int, Form] = {}
    slices: dict[int, tuple[int, int, int]] = {}
    wraps = True
    for k, axis in enumerate(a["axes"]):
        start, wrapped = _unwrapped(c, _component(c, indices, k), x.shape[axis])
        known = c.expressions.value(start.key)
        if isinstance(known, float) and 0 <= known <= x.shape[axis] - sizes[axis]:
            slices[axis] = int(known), int(known) + sizes[axis], 1
        elif sizes[axis] != 1:
            raise NoForm
        else:
            picks[axis] = start
            wraps = wraps and (wrapped or not c.wrapping or _is_natural(c, start))
    gone = {*tied, *(axis for axis in a["axes"] if axis not in a.get("kept", ()))}
    window = iter([axis for axis in range(len(x.shape)) if axis not in gone])
    over = iter(range(len(batch)))
    rank = len(batch) + len(x.shape) - len(gone)
    lies = [("a", next(window)) if k in windows else ("b", next(over)) for k in range(rank)]
    bounds = a.get("bounds") or (a.get("mode") if node.operation == "gather" else None)
    more = (("out of bounds", bounds),) if bounds and picks else ()
    access = Access(picks, tied, batch, tuple(lies), wraps, more)
    if any(x.shape[b] != sizes[b] for b in range(len(x.shape)) if not _is_met(access, slices, b)):
        raise NoForm
    return access, slices


def _is_met(access: Access, slices: Mapping[int, Any], axis: int) -> bool:
    return axis in access.picks or axis in access.tied or axis in slices


def _component(c: Canonical, indices: Form, k: int) -> Form:
    """The integer array of one axis: entry k of the last axis of them all."""
    *batch, count = indices.shape
    parts = c.parts.get(indices.key)
    last = len(batch)
    if parts and parts[0] == last and indices.dims == c.fresh_axes(0, indices.shape).dims:
        columns = [part for part in parts[1] if part.shape[-1] == 1]
        if len(columns) == count == len(parts[1]):
            return c.reshaped(columns[k], tuple(batch))
    if count != 1:
        indices = c.sliced(indices, last, k, k + 1, 1)
    return replace(indices, dims=indices.dims[:-1], shape=tuple(batch))


def _unwrapped(c: Canonical, index: Form, length: int) -> tuple[Form, bool]:
    """An index without what makes a negative one count from the end, and whether it had it."""
    made, axes = c.expressions.known[index.key], tuple(range(len(index.sizes)))
    if getattr(made, "operation", "") == "cast" and made.operands[0][1] == axes:
        inside, wraps = _unwrapped(c, replace(index, key=made.operands[0][0]), length)
        return (inside, True) if wraps else (index, False)
    if getattr(made, "operation", "") != "where":
        return index, False
    (condition, _), (moved, _), (plain, labels) = made.operands
    of = replace(index, key=plain) if labels == axes else None
    zero, back = c.number(0.0), c.number(float(length))
    if of is None:
        return index, False
    negative = c.elementwise("compare", [of, zero], (("relation", "<"),))
    if condition != negative.key or moved != c.combined("add", of, back).key:
        return index, False
    return of, True


def _is_natural(c: Canonical, index: Form) -> bool:
    """Whether an index is never negative."""
    made = c.expressions.known[index.key]
    if getattr(made, "operation", "") in ("iota", "argmax", "argmin", "argsort"):
        return True
    if isinstance(made, tuple) and made[0] == "leaf":
        return str(made[2]).startswith("uint") or (made[1][:1] == "[" and "-" not in made[1])
    value = c.expressions.value(index.key)
    return isinstance(value, float) and value >= 0


# --- the rules ---------------------------------------------------------------------------


def _index(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, *indices = given
    if node.native.endswith("take"):  # of all entries, in order
        x = c.reshaped(x, (prod(x.shape),))
        access = Access({0: indices[0]}, {}, indices[0].shape, _all_of(indices[0]))
    elif "axes" in node.attributes:
        access = _listed(c, node, x, indices)
    else:
        raise NoForm
    return _read(c, node, x, access, shape)


def _all_of(index: Form) -> tuple[tuple[str, int], ...]:
    return tuple(("b", k) for k in range(len(index.shape)))


def _embedding(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, index = given
    if node.attributes.get("padding_idx", -1) != -1:
        raise NoForm
    access = Access({0: index}, {}, index.shape, (*_all_of(index), ("a", 1)))
    return _read(c, node, x, access, shape)


def _taken_along(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, index = given
    if not x.shape:
        raise NoForm
    return _read(c, node, x, _along(node.attributes["axis"], x, index), shape)


def taken(c: Canonical, node: Node, x: Form, index: Form) -> Form:
    """One entry of each row of a matrix."""
    access = Access({1: index}, {0: 0}, index.shape, (("b", 0),))
    return _read(c, node, x, access, index.shape)


def _gather(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, indices = given
    a = node.attributes
    picked = {*a["axes"], *a.get("batch_axes", ())}
    sizes = a.get("sizes") or tuple(1 if b in picked else n for b, n in enumerate(x.shape))
    kept = sum(b not in picked or b in a.get("kept", ()) for b in range(len(x.shape)))
    windows = a.get("offset_axes", tuple(range(len(shape) - kept, len(shape))))
    access, slices = _of_window(c, node, x, indices, sizes, windows)
    for axis, part in slices.items():
        x = c.sliced(x, axis, *part)
    return _read(c, node, x, access, shape)


def _index_put(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, *indices, update = given
    mode = node.attributes.get("mode", "set")
    access = _listed(c, node, x, indices)
    return _written(c, node, x, update, access, mode)


def _at_rows(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """`index_add`, `index_copy`, `index_fill`: at one integer vector along one axis."""
    x, index, update = given
    axis = _axis_of(node)
    lies = tuple(("b", 0) if a == axis else ("a", a) for a in range(len(x.shape)))
    mode = _mode_of(node)
    index = c.reshaped(index, (prod(index.shape),))
    return _written(c, node, x, update, Access({axis: index}, {}, index.shape, lies), mode)


def _axis_of(node: Node) -> int:
    """The axis that is written along, where nothing else is said but how."""
    axis = node.attributes.get("axis", (*node.attributes.get("axes", ()), None)[0])
    if axis is None or node.attributes.keys() - {"axis", "axes", "reduce"}:
        raise NoForm
    return int(axis)


def _mode_of(node: Node) -> str:
    reduced = node.attributes.get("reduce", "add" if "add" in node.native else "set")
    return _MODES.get(str(reduced), str(reduced))


_MODES = {"sum": "add", "amax": "max", "amin": "min", "prod": "mul", "multiply": "mul"}


def _scatter_along(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    x, index, update = given
    axis = _axis_of(node)
    if not x.shape:
        raise NoForm
    rank = len(update.shape)
    if rank == len(index.shape):  # of a longer update the beginning is written
        for p, n in enumerate(index.shape):
            update = c.sliced(update, p, 0, n, 1) if update.shape[p] != n else update
    mode = _mode_of(node)
    value = c.expressions.value(x.key)
    if mode == "set" and value is not None and index.shape[axis] == 1 and not update.sizes:
        counting = c.counting(shape, axis)
        given = [index, counting]
        hit = c.elementwise("compare", given, (("relation", "=="),), True)
        return c.elementwise("where", [hit, replace(update, dims=(), shape=()), c.number(value)])
    return _written(c, node, x, update, _along(axis, x, index), mode)


def _scatter(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """Of either framework."""
    if node.native.strip("_").endswith(("index_add", "index_copy", "index_fill")):
        return _at_rows(c, node, given, shape)
    if node.native.startswith("aten."):
        listed = "index_put" in node.native
        return (_index_put if listed else _scatter_along)(c, node, given, shape)
    x, indices, update = given
    a = node.attributes
    gone = {*a.get("batch_axes", ()), *(b for b in a["axes"] if b not in a.get("kept", ()))}
    kept = [b for b in range(len(x.shape)) if b not in gone]
    rank = len(update.shape)
    windows = a.get("window", tuple(range(rank - len(kept), rank)))
    lengths = dict(zip(kept, (update.shape[k] for k in windows), strict=True))
    sizes = [lengths.get(b, 1) for b in range(len(x.shape))]
    access, slices = _of_window(c, node, x, indices, sizes, windows)
    mode = {None: "set", "sub": "sub"}.get(a.get("mode"), a.get("mode"))
    if not slices:
        access, slices = _stepping(c, x, access)
    if slices:
        if access.picks or access.tied or access.over not in ((), (1,)):
            raise NoForm
        parts = tuple(slices.get(p, (0, n, 1)) for p, n in enumerate(x.shape))
        return _placed(c, x, update, access, parts, mode)
    if mode == "add" and (result := _as_set(c, x, update)) is not None:
        (x, update), mode = result, "set"
    return _written(c, node, x, update, access, mode)


def _stepping(
    c: Canonical, x: Form, access: Access
) -> tuple[Access, dict[int, tuple[int, int, int]]]:
    """What picks start, start + step, .. along one axis, as a slice."""
    if len(access.picks) != 1 or access.tied or len(access.over) != 1:
        return access, {}
    ((axis, index),) = access.picks.items()
    (n,) = access.over
    start, step = 0.0, 1.0
    key = index.key
    for operation in ("add", "multiply"):
        made = c.expressions.known[key]
        if getattr(made, "operation", "") == operation and len(made.operands) == 2:
            numbers = [c.expressions.value(k) for k, _ in made.operands]
            known = [v for v in numbers if isinstance(v, float)]
            if len(known) == 1:
                start, step = (known[0], step) if operation == "add" else (start, known[0])
                key = made.operands[numbers.index(None)][0]
    part = int(start), int(start + step * (n - 1)) + 1, int(step)
    counts = key == c.counting((n,), 0).key
    if not counts or step < 1 or start < 0 or part[1] > x.shape[axis]:
        return access, {}
    lies = tuple(("a", axis) if kind == "b" else (kind, p) for kind, p in access.lies)
    return Access({}, {}, (), lies), {axis: part}


def _update(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """A slice that is overwritten; PyTorch's copy into a whole array is what is copied."""
    if node.native.endswith(("copy_", "copy")) and len(given) == 1:
        (x,) = given
        dims = (*((),) * (len(shape) - len(x.shape)), *x.dims)
        dtypes = c.dtype_of(node, 0), c.dtype_made(node)
        result = replace(x, dims=dims, shape=tuple(shape))
        same = dtypes[0] == dtypes[1]
        return result if same else c.elementwise("cast", [result], (("dtype", dtypes[1]),))
    x, update, *starts = given
    a = node.attributes
    if starts:  # JAX's, which moves a start inside
        parts = tuple(
            _part(c, _unwrapped(c, start, n)[0], m, n)
            for start, m, n in zip(starts, update.shape, x.shape, strict=True)
        )
    else:
        strides = a.get("stride", (1,) * len(x.shape))
        parts = tuple(zip(a["start"], a["limit"], strides, strict=True))
    drop = a.get("drop", ())
    lies = tuple(("a", p) for p in range(len(x.shape)) if p not in drop)
    access = Access({}, {}, (), lies)
    return _placed(c, x, update, access, parts, "set")


def _part(c: Canonical, start: Form, length: int, of: int) -> tuple[int, int, int]:
    """A slice of so many entries that starts at a known number within bounds."""
    known = c.expressions.value(start.key)
    if not isinstance(known, float) or not 0 <= known <= of - length:
        raise NoForm
    return int(known), int(known) + length, 1


def _iota(c: Canonical, node: Node, given: list[Form], shape: Any) -> Form:
    """0, 1, 2, .. along an axis; PyTorch's has a start and a step."""
    axis, step = node.attributes.get("axis", 0), node.attributes.get("step", 1)
    numbers = [c.expressions.value(form.key) for form in given]
    if step != 1 or None in numbers or len(numbers) > 2:
        raise NoForm
    result = c.counting(shape, axis, c.dtype_made(node))
    start = c.number(numbers[0]) if len(numbers) > 1 and numbers[0] else None
    return result if start is None else c.elementwise("add", [result, start], (), True)


# --- what both come to -------------------------------------------------------------------


def _tied(c: Canonical, x: Form, access: Access) -> tuple[Form, Access]:
    """Picks at 0, 1, 2, .. tie their axis; what is not reached of it is sliced off by a reader."""
    picks, tied = dict(access.picks), dict(access.tied)
    for axis, index in access.picks.items():
        made = c.expressions.known[index.key]
        b = next((p for p, axes in enumerate(index.dims) if axes), None)
        if b is None or getattr(made, "operation", "") != "iota" or b in tied.values():
            continue
        if access.over[b] <= x.shape[axis]:
            tied[axis] = b
            del picks[axis]
    for axis, b in tied.items():
        if x.shape[axis] != access.over[b]:
            x = c.sliced(x, axis, 0, access.over[b], 1)
    return x, replace(access, picks=picks, tied=tied)


def _read(c: Canonical, node: Node, x: Form, access: Access, shape: tuple[int, ...]) -> Form:
    x, access = _tied(c, x, access)
    access = replace(access, picks={a: i for a, i in access.picks.items() if x.dims[a]})
    order = sorted(access.picks)
    c.tell(node, [x, *(access.picks[a] for a in order)], access.said())
    name = lambda a: (
        ("b", access.tied[a]) if a in access.tied else ("p" if a in access.picks else "a", a)
    )
    over = [("b", k) for k in range(len(access.over))]
    names = [[name(a) for a in range(len(x.shape))], *([over] * len(order))]
    forms = c.aligned([x, *(access.picks[a] for a in order)], names)
    labels = Labels(zip(forms, names, strict=True))
    kept = {*range(len(labels.sizes))}
    if not order and len(set(labels.operands[0][1])) == len(forms[0].sizes):
        key = forms[0].key
    else:
        pairs = sorted(zip([labels.of(("p", a)) for a in order], labels.operands[1:], strict=True))
        picked = tuple(p for p, _ in pairs)
        told = (("picked", picked), *access.more, *_unlike(access))
        operands = (labels.operands[0], *(read for _, read in pairs))
        key = c.expressions.number(CanonicalExpression("index", told, operands))
        kept.difference_update(*picked)
    return labels.form(key, kept, access.lies, shape)


def counts_from_the_end(graph: PlainGraph) -> bool:
    """Whether a graph of PyTorch reads or writes at indices that may be negative.

    Where all of its operations refuse a negative index (`gather`, `index_select`, an embedding), it
    does not matter what JAX makes of one.
    """
    names = "aten.index.", "aten.index_put", "aten._unsafe_index", "aten.take", "aten.put"
    return any((n.native + ".").startswith(names) for _, n in graph.walk())


def _unlike(access: Access) -> tuple[tuple[str, Any], ...]:
    return () if access.wraps or not access.picks else (("wraps", False),)


def _written(
    c: Canonical, node: Node, x: Form, update: Form, access: Access, mode: str | None
) -> Form:
    """The array after something was written to, or added at, the places of an access."""
    whole = x
    cut, tying = _tied(c, x, access)
    if cut == x and len(set(tying.tied.values())) == len(tying.tied):
        access = tying
    elif access.tied and any(x.shape[a] != access.over[b] for a, b in access.tied.items()):
        access = _untied(c, access)
    order, told = sorted(access.picks), {} if mode == "set" else {"mode": mode}
    c.tell(node, [x, update, *(access.picks[a] for a in order)], access.said() | told)
    name = lambda a: ("b", access.tied[a]) if a in access.tied else ("a", a)
    picked = lambda a: ("p", a) if a in access.picks else name(a)
    over = [("b", k) for k in range(len(access.over))]
    update = _lying(update, len(access.lies))
    lies = [name(p) if kind == "a" else (kind, p) for kind, p in access.lies]
    names = [[picked(a) for a in range(len(whole.shape))], lies, *([over] * len(order))]
    forms = c.aligned([whole, update, *(access.picks[a] for a in order)], names)
    labels = Labels(zip(forms, names, strict=True))
    extra = []
    for a, n in enumerate(whole.shape):  # axes along which what is written to only repeats
        if n != 1 and not labels.of(picked(a)):
            labels.number((picked(a), 0), n)
        if n != 1 and not forms[0].dims[a]:
            extra.append((labels.of(picked(a)), n))
    pairs = sorted(zip([labels.of(("p", a)) for a in order], labels.operands[2:], strict=True))
    more = (
        ("mode", mode),
        ("picked", tuple(p for p, _ in pairs)),
        ("repeats", tuple(sorted(extra))),
        *access.more,
        *_unlike(access),
    )
    operands = (*labels.operands[:2], *(read for _, read in pairs))
    key = c.expressions.number(CanonicalExpression("scatter", more, operands))
    axes = [picked(a) for a in range(len(whole.shape))]
    return labels.form(key, {k for axis in axes for k in labels.of(axis)}, axes, whole.shape)


def _untied(c: Canonical, access: Access) -> Access:
    """The same with 0, 1, 2, .. picked along the tied axes."""
    picks = dict(access.picks)
    for axis, b in access.tied.items():
        over = tuple(n if k == b else 1 for k, n in enumerate(access.over))
        picks[axis] = c.counting(over, b)
    return replace(access, picks=picks, tied={})


def _placed(
    c: Canonical, x: Form, update: Form, access: Access, parts: Parts, mode: str | None
) -> Form:
    """A slice of an array overwritten, or combined with something."""
    lies = [p for kind, p in access.lies if kind == "a"]
    if len(update.shape) > len(lies):  # a batch of one
        own = [k for k, (kind, _) in enumerate(access.lies) if kind == "a"]
        shape = tuple(update.shape[k] for k in own)
        update = replace(update, dims=tuple(update.dims[k] for k in own), shape=shape)
    update = _lying(update, len(lies))
    dims = tuple(update.dims[lies.index(p)] if p in lies else () for p in range(len(x.shape)))
    update = replace(update, dims=dims, shape=tuple(len(range(*part)) for part in parts))
    if mode != "set":
        now = x
        for p, part in enumerate(parts):
            now = c.sliced(now, p, *part) if part != (0, x.shape[p], 1) else now
        update = c.combined(_COMBINED[str(mode)], c.written_at(x, parts) or now, update)
    if all(part == (0, n, 1) for part, n in zip(parts, x.shape, strict=True)):
        return update
    if c.written_at(x, parts) is not None:
        x = c.slices[x.key][0]
    told = ("at", parts), ("lies", (x.dims, update.dims)), ("of", x.shape)
    operands = ((x.key, ()), (update.key, ()))
    result = c.fresh_axes(
        c.expressions.number(CanonicalExpression("update", told, operands)), x.shape
    )
    c.slices[result.key] = x, update, parts
    return result


_COMBINED = {"add": "add", "mul": "multiply", "sub": "subtract", "min": "minimum", "max": "maximum"}


def _as_set(c: Canonical, x: Form, update: Form) -> tuple[Form, Form] | None:
    """x and u, where JAX writes "set u" so that it can be differentiated.

    Each update has a number n(b) = 1, 2, ..; m = scatter(0, i, n) holds the number of the last
    that is written to a place. Then x stays where m = 0, and u counts where m[i] = n::

        scatter_add(where(m == 0, x, 0), i, where(n == m[i], u, 0))
    """
    kept, taken = c.expressions.known[x.key], c.expressions.known[update.key]
    if not all(getattr(e, "operation", "") == "where" for e in (kept, taken)):
        return None
    free, wins = (c.expressions.known[e.operands[0][0]] for e in (kept, taken))
    if not all(getattr(e, "operation", "") == "compare" for e in (free, wins)):
        return None
    zeros = [c.expressions.value(e.operands[2][0]) for e in (kept, taken)]
    keys = {key for key, _ in free.operands}
    winners = [k for k in keys if getattr(c.expressions.known[k], "operation", "") == "scatter"]
    if zeros != [0.0, 0.0] or len(winners) != 1 or c.number(0.0).key not in keys:
        return None
    (winner,) = winners
    read = [k for k, _ in wins.operands if _reads(c, k, winner)]
    numbered = [k for k, _ in wins.operands if k not in read]
    made = c.expressions.known[winner]
    if len(read) != 1 or len(numbered) != 1 or made.operands[1][0] != numbered[0]:
        return None
    return operand(x, 1, kept), operand(update, 1, taken)


def _reads(c: Canonical, key: int, of: int) -> bool:
    made = c.expressions.known[key]
    return getattr(made, "operation", "") == "index" and made.operands[0][0] == of


RULES: Mapping[str, Callable[..., Form]] = {
    "index": _index,
    "embedding": _embedding,
    "take_along": _taken_along,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_along": _scatter_along,
    "scatter_reduce": _scatter_along,
    "update": _update,
    "iota": _iota,
}

__all__ = ["RULES", "counts_from_the_end"]
