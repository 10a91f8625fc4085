"""`first_divergence` finds the first operations at which a port diverges from the original.

Both programs run forward once on the same arguments, and every intermediate value is recorded.
Equal values of both runs are paired, even if their layouts differ. If an output differs, the first
operations whose values have no counterpart are reported. Otherwise, one backward pass from a random
cotangent c follows. If a gradient of Re<c, out> differs, the operations that use the last common
value with unequal cotangents are reported.

The method compares the data-flow graphs of two programs by their values (Zhang and Gupta, "Matching
execution histories of program versions", 2005), and also by their cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.quantities import crossed
from gradtools.testing.cross_checking.sides import library
from gradtools.testing.diverging.recorded_runs import RecordedRuns
from gradtools.testing.diverging.runs import Place
from gradtools.testing.report import Report

CALLER = "first_divergence"


@dataclass
class Divergence(Report):
    """The report of `first_divergence`; `bool(report)` is True if nothing differs.

    `comparisons` lists the compared outputs and the compared gradients of arguments and parameters.

    Attributes:
        kind: "agrees"; "value" if outputs differ, "gradient" if only gradients differ, "parameter"
            if a parameter of the port differs from PyTorch's parameter, "not finite" if an output
            has no finite entry on either side.
        torch: The operation in PyTorch at which the programs diverge, or None if they agree.
        jax: The operation in JAX at which the programs diverge.
        last_torch: The last common value on which both operations depend, in PyTorch.
        last_jax: The last common value in JAX.
        relation: The relation between the two values or cotangents, in a few words.
    """

    kind: str = "agrees"
    torch: Place | None = None
    jax: Place | None = None
    last_torch: Place | None = None
    last_jax: Place | None = None
    relation: str = ""

    def explanation(self) -> str:
        """Returns a few lines that explain the divergence, or "" if the programs agree."""
        if not self.relation:
            return ""
        lines = [f"The programs diverge in a {self.kind}: {self.relation}"]
        lines += [f"  torch: {self.torch}", f"  jax:   {self.jax}"]
        if self.last_torch:
            lines.append("The last values that agree:")
            lines += [f"  torch: {self.last_torch}", f"  jax:   {self.last_jax}"]
        return "\n".join(lines)

    def table(self, colour: bool = False, limit: int | None = None) -> str:
        """Formats the explanation, then the table of the comparisons."""
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
    """Names the first operations at which a PyTorch program and its port to JAX diverge.

    Each program runs forward once and, if the outputs agree, backward once. Operations inside of
    layers, loops and transformed functions are also compared; the report contains the user's source
    lines on both sides. Intermediate values may differ in layout and in the order of computation.
    Entries that are NaN or infinite on both sides are not compared; the report contains the number
    of these entries in outputs and gradients.

    Args:
        torch: A `torch.nn.Module`, which is copied and runs in its current mode (train or eval).
            A function or the triple `(apply, params, state)` of `make_functional` is also accepted.
        jax: The pair (module, variables) of flax.linen, an `nnx.Module`, an `equinox.Module`,
            `jax.vmap` of an equinox module, the triple of `make_functional`, or a function of JAX
            arrays.
        args: A tuple of both programs' positional arguments: pytrees of NumPy arrays of any shape
            and dtype. Other leaves are passed unchanged.
        mapping: The pairs of the models' parameters, as in `cross_check`. If None, the parameters
            are paired by name and shape.
        dtype: "float64" or "float32": the precision of the models' parameters and of the arguments.
            By default, the precision is float64 if `torch` is a module, and is unchanged otherwise.
        seed: The seed of the random cotangent.

    Returns:
        A `Divergence`, truthy if nothing differs. Printing the report shows an explanation.

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
        result = Divergence(CALLER, notes=check.pairing.notes)
        pairs = zip(check.parameters(), check.pairing.pairs, strict=True)
        if wrong := [(c, pair) for c, pair in pairs if not c.agrees]:
            c, pair = wrong[0]
            name = c.path.removeprefix("parameter ")
            result.kind, result.comparisons = "parameter", [c for c, _ in wrong]
            result.torch, result.jax = Place(pair.torch_name), Place(name)
            words = f"{name} in JAX differs from the parameter in PyTorch ({c.cause})."
            result.relation = f"{words} {c.detail}"
            return result
        runs = RecordedRuns(check)
        result.comparisons, result.notes = runs.comparisons, [*result.notes, *runs.notes]
        result.kind, blame = runs.blame()
        if blame is not None:
            result.relation = blame.relation
            result.torch, result.jax = blame.torch.place, blame.jax.place
            if blame.last:
                result.last_torch, result.last_jax = (s.place for s in blame.last)
            result.comparisons = [
                c if c.agrees or c.cause else c.because(blame.relation) for c in runs.comparisons
            ]
        return result
