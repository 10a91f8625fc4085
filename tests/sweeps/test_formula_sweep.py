"""For each function of JAX and PyTorch, `formula` is correct or raises an error with a reason.

`formula` compares a formula with automatic differentiation before returning the formula. If
`formula` raises an error, the error must state a cause in f.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from gradtools import GradtoolsError

pytestmark = pytest.mark.slow

OWN_DOING = (
    "automatic differentiation of f fails",  # the framework does not support the derivative
    "formula: f contains a primitive without a derivative in JAX",
    "formula: f contains an operation with a forward rule only",
    "no value of f is finite at the arguments or near them",
    "f contains a loop with an unknown number of iterations, which does not support reverse mode",
    "which is too coarse for a comparison",
    "formulas support only dense tensors",
    "writes to a tensor and then reads it through another view",
    "draws random numbers while it computes",
)
GROUPS = 12


def _outcome(gt, f, xs):
    """Return "agrees" or the error message of `formula` for f."""
    try:
        found = gt.formula(f, *xs, argnums=tuple(range(len(xs))))
    except GradtoolsError as error:
        return str(error)
    assert str(found) and found.latex()
    return "agrees"


def _of_jax(group):
    jax = pytest.importorskip("jax")

    import gradtools.jax as gt
    from tests.sweeps.jax_programs import cases

    for case in sorted(cases(), key=lambda c: (c.program, c.sample))[group::GROUPS]:
        xs = case.arguments("complex128" if case.complex_only else "float64")

        def f(*xs, f=case.f):
            leaves = jax.tree.leaves(f(*xs))
            return [y for y in leaves if jax.numpy.issubdtype(y.dtype, np.inexact)]

        with jax.enable_x64(True):
            xs = [jax.numpy.asarray(x) for x in xs]
            if jax.eval_shape(f, *xs):
                yield f"jax {case.program} {case.sample}", _outcome(gt, f, xs)
    jax.clear_caches()


def _of_torch(group):
    pytest.importorskip("expecttest", reason="PyTorch's tables of operators need expecttest")

    import gradtools.torch as gt
    from tests.sweeps import torch_programs

    entries = torch_programs.entries(("op_db", "module_db"))
    for entry in [e for e in entries if e.variant == torch_programs.FUNCTION][group::GROUPS]:
        for program in torch_programs.programs(entry)[0]:
            if all(x.numel() <= 400 for x in program.primals):
                yield f"torch {program.name}", _outcome(gt, program.f, program.primals)


def _faults(found):
    """Return the errors that f does not cause, as a dict with the functions' names as keys."""
    own = lambda said: said == "agrees" or any(re.search(text, said) for text in OWN_DOING)
    return {name: said for name, said in found.items() if not own(said)}


def _collected(outcomes):
    """Return one outcome for each name: an error if any outcome of the name is an error."""
    found = {}
    for name, said in outcomes:
        if said != "agrees" or name not in found:
            found[name] = said
    return found


@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("programs", [_of_jax, _of_torch], ids=["jax", "torch"])
def test_every_formula_agrees_or_says_why_there_is_none(programs, group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _collected(programs(group))
    assert not _faults(found)
    assert list(found.values()).count("agrees") > 25


def test_a_fault_is_seen():
    assert _faults({"torch sin": "formula: y is 1 by the formula and 2 by"})
    assert not _faults({"torch sin": "agrees"})
