"""Negative controls: what the scenario matrix must catch.

Of every operator, an answer that is off in one leaf. And defects of the library that show only in
cells with the right data, such as several leaves, complex numbers or a shorter last chunk: each is
planted in process, and at least one cell must then give a wrong number (raising does not count),
by the oracle that is named. `mutants.py` asks the same of the quick tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradtools.accumulate
import gradtools.backend
import gradtools.chunking
import gradtools.clipping
import gradtools.custom_structure
import gradtools.edits
from gradtools.testing.cross_checking import tolerances
from tests.conformance.rig import trial
from tests.conformance.rig.checking import CellVerdict, forget_compiled, judged
from tests.conformance.rig.matrix import Cell, cells
from tests.conformance.rig.problem import CALL, CLOSED, DIFFERENCES, EAGER
from tests.conformance.rig.reference import each_leaf
from tests.conformance.rig.trial import ASKS

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

ALL = ("torch", "jax")


@dataclass(frozen=True)
class Mutant:
    """A defect of the library.

    Attributes:
        plant: Called with monkeypatch and a namespace.
        operators: The cells that are to catch it.
        oracle: By which it is caught.
        where: What else those cells must be.
        backends: Where the defect can be.
    """

    plant: Callable[[Any, Any], None]
    operators: tuple[str, ...]
    oracle: str = DIFFERENCES
    where: Callable[[Cell], bool] = lambda cell: cell.transform == "eager"
    backends: tuple[str, ...] = ALL


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, *operators: str, **more: Any) -> Any:
    def register(plant: Any) -> Any:
        MUTANTS[name] = Mutant(plant, operators, **more)
        return plant

    return register


# --- derivatives -------------------------------------------------------------------------


@mutant("all gradients are zero", "grad", "vjp", "minimax_value_and_grad", "chunked")
def zero_backend(patch, gt):
    backend = gt._api._backend
    whole = backend.vjp

    def vjp(*args, **options):
        found = whole(*args, **options)
        pull = found.pullback
        zero = lambda g: None if g is None else 0 * g
        object.__setattr__(found, "pullback", lambda cts: [zero(g) for g in pull(cts)])
        return found

    patch.setattr(type(backend), "vjp", staticmethod(vjp))


def is_complex(cell):
    return cell.dtype == "complex128" and cell.transform == "eager"


@mutant(
    "the conjugate is missing at the wing's edge",
    "vjp",
    "grad",
    where=is_complex,
    backends=("jax",),
)
def no_conjugate(patch, gt):
    import gradtools.jax.engines as engines

    patch.setattr(engines, "_conjugated", list)


def square(cell):
    return cell.transform == "eager" and cell.program.name in (
        "cumulative sum",
        "rolled and flipped",
        "recurrence",
        "differences",
        "sorted",
        "convolved by hand",
    )


@mutant("a Jacobian is transposed", "jacobian, forward", "jacobian, reverse", where=square)
def transposed(patch, gt):
    whole = gt.jacobian
    flip = lambda j: j.T if j.ndim == 2 and j.shape[0] == j.shape[1] else j
    patch.setattr(
        gt,
        "jacobian",
        lambda f, *args, **more: lambda *xs: each_leaf(flip, whole(f, *args, **more)(*xs)),
    )


@mutant(
    "the zeros of a disconnected leaf are ones",
    "grad",
    "clip_gradient",
    where=lambda cell: cell.arguments == "disconnected",
    backends=("torch",),
)
def ones_for_zeros(patch, gt):
    def filled(self, values, likes):
        pairs = zip(values, likes, strict=True)
        return [self.ones_like(x) if g is None else g for g, x in pairs]

    patch.setattr(gradtools.backend.Differentiation, "filled", filled)


@mutant(
    "vmap puts its rows out in reverse",
    "grad",
    "jvp",
    "scale_gradient",
    oracle=EAGER,
    where=lambda cell: cell.transform == "vmap",
)
def swapped_rows(patch, gt):
    whole = gt.vmap
    flip = lambda tree: each_leaf(lambda y: gt.xp.flip(y, axis=0), tree)
    patch.setattr(gt, "vmap", lambda f, **more: lambda *xs: flip(whole(f, **more)(*xs)))


# --- edits -------------------------------------------------------------------------------


@mutant("reverse_gradient does not reverse", "reverse_gradient")
def reverse_sign(patch, gt):
    whole = gradtools.edits.Edits._scaled
    patch.setattr(
        gradtools.edits.Edits,
        "_scaled",
        lambda self, name, x, scale, sign: whole(self, name, x, scale, 1),
    )


@mutant(
    "clip_gradient's norm is of each leaf alone",
    "clip_gradient",
    oracle=CLOSED,
    where=lambda cell: "several" in cell.program.tags and cell.transform == "eager",
)
def norm_of_a_leaf(patch, gt):
    whole = gradtools.clipping._clip_norm
    patch.setattr(
        gradtools.clipping,
        "_clip_norm",
        lambda backend, cts, bound: [whole(backend, [ct], bound)[0] for ct in cts],
    )


# --- rules and memory --------------------------------------------------------------------


@mutant("a residual is of an earlier point", "custom_rule", "host_function")
def stale_residual(patch, gt):
    whole = gradtools.custom_structure.Residuals.restored

    def stale(self, backend, saved):
        return each_leaf(lambda x: 0.9 * x, whole(self, backend, saved))

    patch.setattr(gradtools.custom_structure.Residuals, "restored", stale)
    if gt._api._backend.name == "torch":  # plain eager calls go another way
        import gradtools.torch.rules.signatures as signatures

        pull = signatures.Signature.pull

        def directly(self, ctx, cts):
            saved = tuple([0.9 * x for x in ctx.saved_tensors])
            return pull(self, SimpleNamespace(point=ctx.point, saved_tensors=saved), cts)

        patch.setattr(signatures.Signature, "pull", directly)


@mutant(
    "microbatched_value_and_grad counts the last chunk as a whole one",
    "microbatched_value_and_grad",
    oracle=CALL,
)
def unweighted(patch, gt):
    whole = gradtools.chunking._Microbatches.weight
    patch.setattr(
        gradtools.chunking._Microbatches,
        "weight",
        lambda self, args, kwargs, given, size: whole(self, args, kwargs, given, 2),
    )


@mutant("a chunk is dropped and another taken twice", "chunked", "chunked, twice")
def dropped_chunk(patch, gt):
    whole = gt.chunked

    def dropped(f, size, **more):
        inner = whole(f, size, **more)
        first = lambda x: gt.xp.concat([x[:-1], x[:1]])

        def run(batch, *rest):
            return inner(each_leaf(first, batch), *rest)

        return run

    patch.setattr(gt, "chunked", dropped)


@mutant("the accumulator forgets its weights", "GradientAccumulator")
def no_weights(patch, gt):
    whole = gradtools.accumulate.GradientAccumulator.add
    patch.setattr(
        gradtools.accumulate.GradientAccumulator,
        "add",
        lambda self, grads, weight=1: whole(self, grads, 1),
    )


# --- every operator's judge sees ---------------------------------------------------------

FLAT = {"mean of squares", "sum of an empty array", "empty output"}


@pytest.mark.slow_at("jax")
@pytest.mark.parametrize("name", ASKS)
def test_an_answer_that_is_off_in_one_leaf_is_caught(name, backend_name, monkeypatch):
    """Whatever an operator gets wrong shows in its answer; a thousandth in any leaf is seen."""
    cell = next(
        cell
        for cell in cells(backend_name)
        if cell.operator.name == name
        and not cell.reason
        and (cell.dtype, cell.transform) == ("float64", "eager")
        and cell.program.name not in FLAT
    )
    right = trial.answers(cell, backend_name)
    assert not judged(cell, backend_name).failure
    for k, leaf in enumerate(right):
        off = leaf + 1e-3 * (1 + np.abs(leaf))
        answer = [*right[:k], off, *right[k + 1 :]], []
        monkeypatch.setattr(trial, "_transformed", lambda *_, answer=answer: answer)
        verdict = judged(cell, backend_name)
        assert verdict.failure and verdict.oracle, f"leaf {k} of {cell}"


def test_a_small_error_is_caught_by_the_table_of_tolerances_alone(gt, backend_name, monkeypatch):
    """A relative error of 1e-6 in a gradient fails in 64 bits, unless the table is widened."""
    cell = next(
        c for c in cells(backend_name) if c.operator.name == "grad" and c.dtype == "float64"
    )
    whole = gt.grad
    off = lambda f, *a, **k: (
        lambda *x, **m: each_leaf(lambda g: g * (1 + 1e-6), whole(f, *a, **k)(*x, **m))
    )
    monkeypatch.setattr(gt, "grad", off)
    assert judged(cell, backend_name).failure
    monkeypatch.setitem(tolerances.FINITE_DIFFERENCES, "float64", 1e-3)
    assert not judged(cell, backend_name).failure


# --- each is caught ----------------------------------------------------------------------


def concerned(one: Mutant, backend: str) -> list[Cell]:
    """Three cells of each operator in 64 bits, of programs that bend."""
    found = []
    for name in one.operators:
        mine = [
            cell
            for cell in cells(backend)
            if cell.operator.name == name
            and not cell.reason
            and cell.dtype in ("float64", "complex128")
            and cell.program.name not in FLAT
            and one.where(cell)
        ]
        found += mine[:3]
    return found


WHOLE: dict[tuple[str, str], CellVerdict] = {}


def judged_whole(cell: Cell, backend: str) -> CellVerdict:
    """The verdict on the library as it is: several mutants ask for the same cells."""
    key = (backend, str(cell))
    if key not in WHOLE:
        WHOLE[key] = judged(cell, backend)
    return WHOLE[key]


@pytest.mark.sampled(torch=(12, 12), jax=(0, 1))
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, gt, backend_name, monkeypatch):
    one = MUTANTS[name]
    if backend_name not in one.backends:
        pytest.skip(f"this defect cannot be in {backend_name}")
    asked = concerned(one, backend_name)
    assert asked
    assert not [cell for cell in asked if judged_whole(cell, backend_name).failure]
    with monkeypatch.context() as patch:
        one.plant(patch, gt)
        forget_compiled(backend_name)
        verdicts = [judged(cell, backend_name) for cell in asked]
    forget_compiled(backend_name)
    caught = {v.oracle for v in verdicts if v.failure and v.oracle}
    print(f"{name}: caught by {', '.join(sorted(caught)) or 'nothing'}")
    assert one.oracle in caught, [str(v) for v in verdicts]
