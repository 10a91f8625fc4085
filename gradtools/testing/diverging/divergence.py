"""`first_divergence`: the first pair of operations at which a port parts from the original.

Both programs run once on the same arguments, with every intermediate value recorded, and once
backward from one random cotangent c. Equal values are matched, whatever their layout. If an output
differs, the first operations whose values have no counterpart are named; if a gradient of
Re<c, out> differs, the operations behind the last value with unequal cotangents.

The method is differential debugging of two data-flow graphs by their values (Zhang and Gupta,
"Matching execution histories of program versions", 2005), applied to cotangents as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.sides import (
    as_setting,
    cast,
    in_double_precision,
    library,
    nested,
)
from gradtools.testing.diverging.blame import Blame, Blaming
from gradtools.testing.diverging.layouts import ParameterMapping
from gradtools.testing.diverging.parameter_matching import match_parameters
from gradtools.testing.diverging.parameters import joined, without_collection
from gradtools.testing.diverging.recorded_steps import CALLER, Arguments, Place, Run, Step
from gradtools.testing.diverging.value_matching import aligned
from gradtools.testing.relations import relation
from gradtools.testing.report import Comparison, Report, compare_arrays, mismatch

_WIDE = ("float64", "complex128", "int64", "uint64")


@dataclass
class Divergence(Report):
    """The report of `first_divergence`; true if nothing differs.

    `comparisons` holds the outputs, the gradients at the arguments and those at the parameters.

    Attributes:
        kind: "agrees"; "value" if outputs differ, "gradient" if only gradients do, "parameter" if a
            parameter of the port does not hold PyTorch's numbers, "not finite" if an output has no
            finite entry on either side.
        torch: The operation in PyTorch at which the programs part; None if there is none.
        jax: The operation in JAX.
        last_torch: The last common value that both operations are made from, in PyTorch.
        last_jax: The same value in JAX.
        relation: How the two values or cotangents are related, in a few words.
    """

    kind: str = "agrees"
    torch: Place | None = None
    jax: Place | None = None
    last_torch: Place | None = None
    last_jax: Place | None = None
    relation: str = ""
    blamed: Blame | None = field(default=None, repr=False, compare=False)

    def explanation(self) -> str:
        """The divergence in a few lines; empty if there is none."""
        if self.kind == "agrees":
            return ""
        lines = [f"The programs part in a {self.kind}: {self.relation}"]
        if self.kind == "not finite":
            lines = [self.relation]
        named = [("torch", self.torch), ("jax", self.jax)]
        lines += [f"  {side + ':':<7}{place}" for side, place in named if place]
        last = [("torch", self.last_torch), ("jax", self.last_jax)]
        if self.last_torch:
            lines.append("Before it they agree:")
            lines += [f"  {side + ':':<7}{place}" for side, place in last if place]
        return "\n".join(lines)

    def table(self, colour: bool = False, limit: int | None = None) -> str:
        """The explanation, then the table of the comparisons."""
        return "\n".join(filter(None, [self.explanation(), super().table(colour, limit)]))


@user_facing
def first_divergence(
    torch: Any,
    jax: Any,
    args: Sequence[Any],
    mapping: Any = None,
    *,
    dtype: str | None = None,
    seed: int = 0,
) -> Divergence:
    """Names the first operations at which a PyTorch program and its port to JAX part.

    Each program runs once forward and once backward. Operations inside of layers, loops and
    transformed functions are compared too; the report has the user's lines on both sides.
    Intermediate values may lie in other layouts, and be computed in another order. At a value that
    is NaN or infinite on both sides nothing is compared, which the report counts.

    Args:
        torch: A `torch.nn.Module`, in the mode (train or eval) in which it is to run; it is copied.
            Or a function of tensors, or the triple `(apply, params, state)` of `make_functional`.
        jax: The pair (module, variables) of flax.linen, an `nnx.Module`, an `equinox.Module`,
            `jax.vmap` of an equinox module, a triple, or a function of JAX arrays.
        args: A tuple of both programs' positional arguments: pytrees of NumPy arrays of any shape
            and dtype. Other leaves are passed on.
        mapping: How the models' parameters correspond: what `match_parameters` returns, or its
            overrides; None pairs them by name and shape, and the rest by their numbers.
        dtype: "float64" or "float32": the precision of the models' parameters and of the arguments.
            By default float64 if `torch` is a module, and unchanged otherwise.
        seed: Chooses c.

    Returns:
        A `Divergence`, true if nothing differs; `str` of it explains the difference.

    Raises:
        GradtoolsError: An argument is an array of one framework, or the programs return different
            numbers of arrays.

    Example:
        >>> import jax.numpy as jnp, numpy as np, torch
        >>> from gradtools.testing import first_divergence
        >>> report = first_divergence(
        ...     torch=lambda x: torch.tanh(2 * x).sum(),
        ...     jax=lambda x: jnp.tanh(3 * x).sum(),
        ...     args=(np.array([0.5, 0.2]),),
        ... )
        >>> report.kind, report.torch.operation, report.jax.operation, report.relation
        ('value', 'mul', 'mul', 'factor 0.666667')
    """
    _check(args, mapping, dtype)
    if dtype is None and library(torch) == "torch.nn":
        dtype = "float64"
    given = _arguments(args, dtype)
    wide = any(given.leaves[k].dtype.name in _WIDE[:2] for k in given.names)
    rng, drawn = np.random.default_rng(seed), list[Any]()

    def draw(ends: list[Step]) -> list[Any]:
        for x in (s.value for s in ends):
            c = rng.normal(size=x.shape) if x.ndim else np.ones(())
            c = c + 1j * rng.normal(size=x.shape) if x.dtype.kind == "c" else c
            drawn.append(c if x.dtype.kind in "fc" else None)
        return drawn

    with in_double_precision(wide or dtype == "float64"):
        in_torch = import_module(f"{__package__}.torch_steps").torch_run(torch, given, dtype, draw)
        layouts: list[Any] = []

        def same(ends: list[Step]) -> list[Any]:
            """The cotangents of PyTorch's outputs, in the layouts of JAX's."""
            if len(ends) != len(in_torch.outputs):
                raise GradtoolsError(
                    f"{CALLER}: the program returns {len(in_torch.outputs)} arrays in PyTorch and "
                    f"{len(ends)} in JAX. Return the same arrays."
                )
            for x, y in zip(in_torch.outputs, ends, strict=True):
                y.accuracy = y.accuracy or x.accuracy
                layouts.append(aligned(x.value, y.value, max(x.accuracy, y.accuracy, 1e-9)))
            both = zip(drawn, layouts, strict=True)
            return [None if c is None or m is None else m[1](np.asarray(c)) for c, m in both]

        try:
            in_jax = import_module(f"{__package__}.jax_steps").jax_run(jax, given, dtype, same)
        except TypeError as error:  # flax's recurrent cells have a carry of 32 bits
            if dtype == "float64":
                error.add_note(
                    f"{CALLER}: it ran in float64; dtype='float32' runs both in float32."
                )
            raise
        if not isinstance(mapping, ParameterMapping):
            mapping = _mapping(in_torch, in_jax, mapping or {})
    return _Diagnosis(in_torch, in_jax, mapping, layouts).report()


class _Diagnosis:
    """The comparison of two recorded runs."""

    def __init__(self, torch: Run, jax: Run, mapping: ParameterMapping, layouts: Any) -> None:
        self.torch, self.jax, self.mapping, self.layouts = torch, jax, mapping, layouts
        self.result = Divergence(CALLER, left_out=[f"parameter {x}" for x in mapping.left_out])
        theirs = {s.leaf: s for s in jax.leaves}
        same = lambda x: x
        self.wanted: list[tuple[Step, Step, np.ndarray]] = []  # the numbers of JAX's parameters
        self.named = [
            (x, theirs[x.leaf], same)
            for x in torch.leaves
            if x.leaf.startswith("argument ") and x.leaf in theirs
        ]
        arrays = {name: s.value for name, s in torch.parameters.items()}
        for entry in mapping.entries:
            path = joined(without_collection(entry.jax_path))
            if entry.torch_name in torch.parameters and path in jax.parameters:
                pair = torch.parameters[entry.torch_name], jax.parameters[path]
                self.named.append((*pair, entry.layout.to_jax))
                if not entry.added or entry.added in arrays:
                    self.wanted.append((*pair, entry.to_jax(arrays)))

    def report(self) -> Divergence:
        result = self.result
        for k, (x, y) in enumerate(zip(self.torch.outputs, self.jax.outputs, strict=True)):
            result.comparisons.append(self._output(f"output {k}", x, y, self.layouts[k]))
        wrong = [k for k, c in enumerate(result.comparisons) if not c.agrees]
        empty = [k for k in wrong if result.comparisons[k].cause == "no finite entry"]
        blaming = Blaming(self.torch, self.jax, [(x, y) for x, y, _ in self.named])
        if not wrong:
            self._gradients(blaming)
        self._count(blaming)
        differs = [k for k in wrong if k not in empty]
        if result and not wrong:
            return result
        if parameter := self._wrong_parameter():
            return self._blame("parameter", parameter)
        if differs:
            return self._blame("value", blaming.of_values(differs))
        if empty:
            result.kind = "not finite"
            result.relation = (
                f"{result.comparisons[empty[0]].path} has no finite entry on either side, so "
                "nothing was compared: gradtools.torch.why_zero(f, *args) finds the operation."
            )
            return result
        return self._blame("gradient", blaming.of_gradients(self.noise))

    def _output(self, path: str, x: Step, y: Step, layout: Any) -> Comparison:
        a, b = x.value, y.value
        if layout is None and a.shape != b.shape:
            return mismatch("value", path, 0, (f"shape {a.shape}", f"shape {b.shape}"))
        limit = max(min(x.accuracy, y.accuracy), 1e-9)
        moved = a if layout is None else layout[1](a)
        if layout is not None and layout[0] != "equal":
            note = f"{path} is {layout[0]}: {a.shape} in PyTorch and {b.shape} in JAX"
            self.result.notes.append(note)
        c = compare_arrays("value", path, moved, b, tolerance=limit)
        if a.dtype.kind in "fc" and a.size and not (np.isfinite(a).any() or np.isfinite(b).any()):
            return c.because("no finite entry")
        return c

    def _gradients(self, blaming: Blaming) -> None:
        """Compares the gradients at arguments, parameters and captured arrays."""
        finite = lambda g: np.abs(g[np.isfinite(g)]).max(initial=0.0)
        leaves = [s for s in self.torch.leaves if s.cotangent is not None]
        largest = max((finite(s.cotangent) for s in leaves), default=0.0)
        self.noise = 1e-3 * max((s.accuracy for s in leaves), default=0.0) * float(largest)
        limit = max(1e-6, 10 * blaming.accuracy)

        def compare(name: str, g: Any, h: Any) -> None:
            kind = "gradient" if name.startswith("argument ") else "parameter's gradient"
            c = compare_arrays(kind, name, g, h, 1, tolerance=limit, noise=self.noise)
            self.result.comparisons.append(c)

        zero = lambda s: np.zeros(s.value.shape, s.value.dtype)
        for x, y, move in self.named:
            if x.value.dtype.kind in "fc":
                g, h = (zero(s) if s.cotangent is None else s.cotangent for s in (x, y))
                compare(x.leaf, move(g), h)
        paired = {id(s) for x, y, _ in self.named for s in (x, y)}
        rest: dict[int, list[Step]] = {}  # captured arrays, by their numbers
        for s in (*self.torch.leaves, *self.jax.leaves):
            if id(s) not in paired and s.value.dtype.kind in "fc" and s.leaf != "literal":
                rest.setdefault(s.group, []).append(s)
        unknown = len(rest.pop(-1, []))
        ours = {id(s) for s in self.torch.leaves}
        for captured in rest.values():  # a side may read one array twice: compare sums
            sums: list[Any] = [None, None]
            for s in captured:
                layout = aligned(s.value, captured[0].value, max(s.accuracy, 1e-9))
                if s.cotangent is not None and layout is not None:
                    side, g = int(id(s) not in ours), layout[1](s.cotangent)
                    sums[side] = g if sums[side] is None else sums[side] + g
            if sums[0] is None or not any(id(s) not in ours for s in captured):
                unknown += 1  # PyTorch does not differentiate it, or JAX does not read it
            else:
                compare(
                    captured[0].leaf, sums[0], zero(captured[0]) if sums[1] is None else sums[1]
                )
        if unknown:
            note = "gradients at captured arrays were not compared: no counterpart, or no gradient"
            self.result.left_out.append(f"{unknown} {note}")

    def _wrong_parameter(self) -> Blame | None:
        """The first parameter whose numbers in JAX are not PyTorch's."""
        for x, y, wanted in self.wanted:
            if (
                wanted.shape == y.value.shape
                and compare_arrays("", "", wanted, y.value, tolerance=1e-6).agrees
            ):
                continue
            how = relation(y.value, wanted, ("JAX", "PyTorch"), 0) or "other numbers"
            words = f"{y.leaf} in JAX does not hold the numbers of {x.leaf} ({how})"
            return Blame(x, y, None, f"{words}; mapping.to_jax(torch_model) gives them")
        return None

    def _blame(self, kind: str, blame: Blame | None) -> Divergence:
        result = self.result
        result.kind, result.blamed = kind, blame
        if blame is None:  # a leaf is used otherwise, but all common cotangents agree
            wrong = {c.path for c in result.disagreements}
            pair = next(((x, y) for x, y, _ in self.named if x.leaf in wrong), None)
            if pair is None:
                result.relation = "at captured arrays alone"
                return result
            uses = [next((c for c in s.children if not c.inside), s) for s in pair]
            words = f"the gradient of {pair[0].leaf} differs where it is first used"
            blame = result.blamed = Blame(uses[0], uses[1], pair, words)
        result.torch, result.jax = blame.torch.place, blame.jax.place
        if blame.last:
            result.last_torch, result.last_jax = (s.place for s in blame.last)
        result.relation = blame.relation
        return result

    def _count(self, blaming: Blaming) -> None:
        """Notes how much was compared, and how much could not be."""
        result, steps = self.result, self.torch.steps
        matched = sum(s.group >= 0 for s in steps)
        result.notes.append(
            f"{matched} of {len(steps)} values of PyTorch's run are found in JAX's run of "
            f"{len(self.jax.steps)} values"
        )
        both = [
            int((~np.isfinite(s.value)).sum())
            for s in steps
            if s.group >= 0 and s.value.dtype.kind in "fc"
        ]
        if sum(both):
            result.notes.append(
                f"{sum(both)} entries of {sum(map(bool, both))} values are NaN or infinite on both "
                "sides and were not compared"
            )


def _arguments(args: Sequence[Any], dtype: str | None) -> Arguments:
    """The arguments' leaves in JAX's order."""
    import jax

    paths, treedef = jax.tree_util.tree_flatten_with_path(tuple(args))
    leaves: list[Any] = []
    names: dict[int, str] = {}
    for k, (path, x) in enumerate(paths):
        name = f"argument {path[0].idx}" + jax.tree_util.keystr(path[1:])
        if isinstance(x, np.ndarray | np.generic):
            x, names[k] = cast(np.array(x), dtype), name
        leaves.append(as_setting(CALLER, x, name))
    return Arguments(leaves, names, lambda xs: jax.tree_util.tree_unflatten(treedef, xs))


def _mapping(torch: Run, jax: Run, overrides: Mapping[str, Any]) -> ParameterMapping:
    if not (torch.parameters and jax.parameters):
        return ParameterMapping(())
    mine = {name: s.value for name, s in torch.parameters.items()}
    theirs = nested({tuple(name.split(".")): s.value for name, s in jax.parameters.items()})
    return match_parameters(mine, theirs, overrides, partial=True)


def _check(args: Any, mapping: Any, dtype: Any) -> None:
    if not isinstance(args, tuple | list):
        raise GradtoolsError(
            f"{CALLER}: args must be a tuple of the programs' positional arguments, got a "
            f"{type(args).__name__}. For one argument write args=(x,)."
        )
    if not isinstance(mapping, ParameterMapping | Mapping | None):
        raise GradtoolsError(
            f"{CALLER}: mapping is a {type(mapping).__name__}; expected None, what "
            "match_parameters returns, or a dictionary from PyTorch's names to JAX's."
        )
    if dtype not in (None, "float64", "float32"):
        raise GradtoolsError(f"{CALLER}: dtype is {dtype!r}; expected 'float64' or 'float32'.")
