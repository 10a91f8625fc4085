"""`first_divergence`: the first pair of operations at which a port parts from the original.

Both programs run once on the same arguments, with every intermediate value recorded, and once
backward from one random cotangent c. Equal values are matched, whatever their layout. If an output
differs, the first operations whose values have no counterpart are named; if a gradient of
Re<c, out> differs, the operations behind the last value with unequal cotangents.

The method is differential debugging of two data-flow graphs by their values (Zhang and Gupta,
"Matching execution histories of program versions", 2005), applied to cotangents as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.quantities import CrossCheck, crossed
from gradtools.testing.cross_checking.sides import library, tokens
from gradtools.testing.diverging.blame import Blame, Blaming
from gradtools.testing.diverging.runs import Place, Step
from gradtools.testing.diverging.value_matching import aligned
from gradtools.testing.matching_parameters.parameter_names import joined
from gradtools.testing.report import Comparison, Report, compare_arrays, largest

CALLER = "first_divergence"


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

    def explanation(self) -> str:
        """The divergence in a few lines; empty if there is none."""
        if self.kind == "agrees":
            return ""
        if self.kind == "not finite":
            return self.relation
        both = {"torch": (self.torch, self.last_torch), "jax": (self.jax, self.last_jax)}
        lines = [f"The programs part in a {self.kind}: {self.relation}"]
        lines += [f"  {name + ':':<7}{at}" for name, (at, _) in both.items() if at]
        lines += ["Before it they agree:"] if self.last_torch else []
        lines += [f"  {name + ':':<7}{last}" for name, (_, last) in both.items() if last]
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
        mapping: How the models' parameters correspond, as in `cross_check`; None pairs them by name
            and shape.
        dtype: "float64" or "float32": the precision of the models' parameters and of the arguments.
            By default float64 if `torch` is a module, and unchanged otherwise.
        seed: Chooses c.

    Returns:
        A `Divergence`, true if nothing differs; `str` of it explains the difference.

    Raises:
        GradtoolsError: An argument is an array of one framework, the parameters of the two models
            cannot be matched, or the programs return different numbers of arrays.

    Example:
        >>> import jax.numpy as jnp, numpy as np, torch
        >>> from gradtools.testing import first_divergence
        >>> report = first_divergence(
        ...     torch=lambda x: torch.tanh(2 * x).sum(),
        ...     jax=lambda x: jnp.tanh(3 * x).sum(),
        ...     args=(np.array([0.5, 0.2]),),
        ... )
        >>> report.kind, report.torch.operation, report.jax.operation, report.relation
        ('value', 'mul', 'mul', '2 x in torch, 3 x in jax')
    """
    if dtype not in (None, "float64", "float32"):
        raise GradtoolsError(f"{CALLER}: dtype is {dtype!r}; expected 'float64' or 'float32'.")
    if dtype is None and library(torch) == "torch.nn":
        dtype = "float64"
    with crossed(CALLER, torch, jax, args, mapping=mapping, dtype=dtype, seed=seed) as check:
        return _report(check, RecordedRuns(check))


def _report(check: CrossCheck, runs: RecordedRuns) -> Divergence:
    result = Divergence(CALLER, comparisons=runs.comparisons, notes=runs.notes)
    result.left_out = [x for x in check.pairing.notes if "no counterpart" in x]
    result.notes += [x for x in check.pairing.notes if x not in result.left_out]
    wrong = next((c for c in check.parameters() if not c.agrees), None)
    blame: Blame | None = None
    if wrong is not None:
        result.kind, name = "parameter", wrong.path.removeprefix("parameter ")
        result.comparisons.insert(0, wrong)
        if pair := next((p for p in runs.named if p[1].leaf == name), None):
            words = f"{name} in JAX does not hold PyTorch's numbers ({wrong.cause}). {wrong.detail}"
            blame = Blame(*pair, None, words)
    elif not result:
        result.kind, blame = runs.blame()
    if result.kind == "not finite" and result.first:
        result.relation = (
            f"{result.first.path} has no finite entry on either side, so nothing was compared: "
            "gradtools.torch.why_zero(f, *args) finds the operation."
        )
    if blame is not None:
        result.torch, result.jax = blame.torch.place, blame.jax.place
        if blame.last:
            result.last_torch, result.last_jax = (s.place for s in blame.last)
        result.relation = blame.relation
    for n, c in enumerate(result.comparisons):
        if not c.agrees and c.cause is None:
            result.comparisons[n] = c.because(result.relation)
    steps, theirs = runs.blaming.torch.steps, runs.blaming.jax.steps
    matched = [s for s in steps if s.group >= 0]
    result.notes.append(
        f"{len(matched)} of {len(steps)} values of PyTorch's run are found in JAX's run of "
        f"{len(theirs)} values"
    )
    values = [s.value for s in matched if s.value.dtype.kind in "fc"]
    if both := [n for n in (int((~np.isfinite(x)).sum()) for x in values) if n]:
        result.notes.append(
            f"{sum(both)} entries of {len(both)} values are NaN or infinite on both sides and "
            "were not compared"
        )
    return result


class RecordedRuns:
    """The recorded runs of a cross-check's two programs, at the point of the check.

    Attributes:
        blaming: The runs, with their values matched.
        named: The pairs of leaves that correspond.
        outputs: The outputs of both runs, in pairs.
        comparisons: Those of the outputs; if they agree, those of the gradients.
    """

    def __init__(self, check: CrossCheck) -> None:
        self.check, self.notes, first, second = check, list[str](), *check.sides
        rng, cotangents = np.random.default_rng(check.seed), dict[str, Any]()

        def draw(ends: dict[str, Step]) -> dict[str, Any]:
            for path, s in ends.items():
                kind, shape = s.value.dtype.kind, s.value.shape
                c = rng.normal(size=shape) if shape else np.ones(())
                c = c + 1j * rng.normal(size=shape) if kind == "c" else c
                cotangents[path] = c if kind in "fc" else None
            return cotangents

        in_torch = self._recorded("torch", first, draw)
        ours = list(in_torch.outputs.items())
        layouts: list[Any] = []

        def same(ends: dict[str, Step]) -> dict[str, Any]:
            """The cotangents of PyTorch's outputs, in the layouts of JAX's."""
            if len(ends) != len(ours):
                raise GradtoolsError(
                    f"{check.caller}: the program returns {len(ours)} arrays in PyTorch and "
                    f"{len(ends)} in JAX. Return the same arrays."
                )
            if ends.keys() == in_torch.outputs.keys():
                ours.sort(key=lambda pair: [*ends].index(pair[0]))
            moved = {}
            for (path, x), (key, y) in zip(ours, ends.items(), strict=True):
                y.accuracy = y.accuracy or x.accuracy
                layouts.append(aligned(x.value, y.value, max(x.accuracy, y.accuracy, 1e-9)))
                c = cotangents[path]
                lost = c is None or layouts[-1] is None
                moved[key] = None if lost else layouts[-1][1](np.asarray(c))
            return moved

        in_jax = self._recorded("jax", second, same)
        pairs = zip((s for _, s in ours), in_jax.outputs.values(), strict=True)
        self.outputs = [(x, y) for x, y in pairs]
        mine, theirs = ({s.leaf: s for s in run.leaves} for run in (in_torch, in_jax))
        self.named = [(mine[x], theirs[x]) for x in check.inputs.moving]
        names = [joined(tokens(path)) for path in second.free_params]
        for name, pair in zip(names, check.pairing.pairs, strict=False):
            self.named.append((mine[pair.torch_name], theirs[name]))
        self.blaming = Blaming(in_torch, in_jax, self.named)
        self.comparisons = [
            self._output(f"output {k}", x, y, layout)
            for k, ((x, y), layout) in enumerate(zip(self.outputs, layouts, strict=True))
        ]
        self.wrong = [k for k, c in enumerate(self.comparisons) if not c.agrees]
        if not self.wrong:
            self._gradients(mine, theirs)

    def _recorded(self, name: str, side: Any, draw: Any) -> Any:
        """A side's run, in which all of its parameters are differentiated."""
        check, numbers = self.check, side.numbers
        program = side.bound(check.inputs, numbers)
        leaves = {joined(tokens(path)): x for path, x in numbers.items()} | check.inputs.moving
        record = getattr(import_module(f"{__package__}.{name}_run"), f"run_in_{name}")
        with check.naming(side):
            return record(side, program, [*leaves.values()], [*leaves], draw)

    def _output(self, path: str, x: Step, y: Step, layout: Any) -> Comparison:
        a, b = x.value, y.value
        if layout is not None and layout[0]:
            words = f"{path} is in a {layout[0]}: {a.shape} in PyTorch and {b.shape} in JAX"
            self.notes.append(words)
        moved = a if layout is None else layout[1](a)
        limit = max(min(x.accuracy, y.accuracy), 1e-9)
        c = compare_arrays("value", path, moved, b, tolerance=limit)
        if a.dtype.kind in "fc" and a.size and not (np.isfinite(a).any() or np.isfinite(b).any()):
            return c.because("no finite entry")
        return c

    def _gradients(self, mine: dict[str, Step], theirs: dict[str, Step]) -> None:
        """Compares the gradients at arguments and parameters."""
        check, accuracy = self.check, self.blaming.accuracy
        filled = lambda s: np.zeros_like(s.value) if s.cotangent is None else s.cotangent
        leaves = [s for s in self.blaming.torch.steps if s.leaf and s.cotangent is not None]
        size = max((largest(s.cotangent) for s in leaves), default=0.0)
        self.noise = 1e-3 * max((s.accuracy for s in leaves), default=0.0) * size
        moving = [*check.inputs.moving]
        ours, others = (
            [filled(known[n]) for n in (*(joined(tokens(p)) for p in side.free_params), *moving)]
            for side, known in zip(check.sides, (mine, theirs), strict=True)
        )
        firsts = check.in_jax_layout(ours, gradients=True)
        for path, g, h in zip(check.paths, firsts, others, strict=True):
            limit = max(1e-6, 10 * accuracy)
            c = compare_arrays("gradient", path, g, h, 1, tolerance=limit, noise=self.noise)
            self.comparisons.append(c)

    def blame(self) -> tuple[str, Blame | None]:
        """The kind of divergence, and the operations at which the programs part."""
        if differs := [k for k in self.wrong if self.comparisons[k].cause != "no finite entry"]:
            return "value", self.blaming.of_values([self.outputs[k] for k in differs])
        if self.wrong:
            return "not finite", None
        if all(c.agrees for c in self.comparisons):
            return "agrees", None
        if (blame := self.blaming.of_gradients(self.noise)) is not None:
            return "gradient", blame
        # a leaf is used otherwise, but all common cotangents agree
        wrong = {c.path.removeprefix("parameter ") for c in self.comparisons if not c.agrees}
        pair = next((p for p in self.named if wrong & {s.leaf for s in p}), None)
        if pair is None:
            return "gradient", None
        uses = [next((c for c in s.children if not c.inside), s) for s in pair]
        words = f"the gradient of {pair[0].leaf} differs where it is first used"
        return "gradient", Blame(uses[0], uses[1], pair, words)
