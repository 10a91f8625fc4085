"""The scenario matrix: each cell is computed and held against oracles, or left out and named."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from tests.conformance.rig.checking import forget_compiled, judged
from tests.conformance.rig.matrix import (
    ARGUMENTS,
    DTYPES,
    OPERATORS,
    TRANSFORMS,
    cells,
    families,
)
from tests.conformance.rig.programs import smooth_programs
from tests.support.tiers import in_turn

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

# PyTorch's compiler takes seconds for a cell. All cells of a program come together, since JAX
# compiles each operation for its shapes once, which is slow too: every third program is quick, one
# more is slow, every sixth is compiled, and the rest of them is a sweep.
BATCHES = [
    pytest.param(p.name, compiled, id=f"{p.name}{', compiled' * compiled}", marks=marks)
    for compiled in (False, True)
    for k, p in enumerate(smooth_programs())
    for marks in [
        [pytest.mark.slow, *in_turn(k - 1, 6 if compiled else 3)] if compiled or k % 3 else [],
    ]
]
# How many cells run here, and how many more in `gradtools check` alone. JAX compiles operations,
# so of its ordinary cells three of five run, of each program others.
RUN = {"torch": (1548, 0), "jax": (1102, 451)}
EVERYWHERE = {
    "the operator has no has_aux": 35,
    "a Jacobian of a complex function is not a complex matrix; refused by name": 17,
    "the framework has no linear algebra in bfloat16": 10,
    "all_gather needs several processes or devices; its tests start them": 1,
}
LEFT_OUT = {
    "torch": {
        **EVERYWHERE,
        "PyTorch's tangent of it has a wrong derivative, torch#192540": 2,
        "torch.func does not support the saved-tensor hooks of a compiled checkpoint": 2,
        "PyTorch has no compiled double backward, torch#91469": 1,
    },
    "jax": EVERYWHERE,
}


def is_ordinary(cell):
    """Whether only the program and the operator are special: most cells are so."""
    return (cell.dtype, cell.transform, cell.arguments) == (cell.program.dtype, "eager", "plain")


def taken(backend, name, compiled):
    """The cells of a program that run here."""
    mine = [c for c in cells(backend) if c.program.name == name and not c.reason]
    mine = [c for c in mine if (c.transform == "compile") == compiled]
    if backend == "torch":
        return mine
    turn = [p.name for p in smooth_programs()].index(name)
    return [c for k, c in enumerate(mine) if not is_ordinary(c) or (k + turn) % 5 not in (0, 2)]


def all_taken(backend):
    """The cells of every program that run here, in the sweep too."""
    batches = [(p.name, compiled) for p in smooth_programs() for compiled in (False, True)]
    return [cell for batch in batches for cell in taken(backend, *batch)]


@pytest.mark.sampled(torch=(2, 24), jax=(0, 1))
@pytest.mark.parametrize(("name", "compiled"), BATCHES)
def test_every_cell_of_a_program_holds(backend_name, name, compiled):
    mine = taken(backend_name, name, compiled)
    verdicts = [judged(cell, backend_name) for cell in mine]
    if [p.name for p in smooth_programs()].index(
        name
    ) % 12 == 11:  # others of these shapes are done
        forget_compiled(backend_name)
    failed = [f"{v.cell}: {v.failure}" for v in verdicts if v.failure]
    assert not failed, "\n".join(failed)


def test_what_is_left_out_is_known_by_reason_and_number(backend_name):
    found = Counter(cell.reason for cell in cells(backend_name) if cell.reason)
    for reason, number in found.items():
        print(f"{number:>5} left out in {backend_name}: {reason}")
    assert dict(found) == LEFT_OUT[backend_name]


def test_a_thousand_cells_over_sixty_programs_run_here(backend_name):
    run = all_taken(backend_name)
    able = [cell for cell in cells(backend_name) if not cell.reason]
    print(f"{len(run)} cells run in {backend_name}, {len(able) - len(run)} more in gradtools check")
    assert (len(run), len(able) - len(run)) == RUN[backend_name]
    assert len(run) >= 1000
    assert len({cell.program.name for cell in run}) >= 60
    assert len({str(cell) for cell in run}) == len(run)


def test_what_is_not_run_here_is_ordinary(backend_name):
    """Each operator meets each dtype, transform and way of passing arguments that it can."""
    run = all_taken(backend_name)
    able = [cell for cell in cells(backend_name) if not cell.reason]
    names = {str(cell) for cell in run}
    assert all(is_ordinary(cell) for cell in able if str(cell) not in names)
    met = lambda some: {(c.operator, k) for c in some for k in (c.dtype, c.transform, c.arguments)}
    assert met(run) == met(able)


def test_each_two_choices_meet_in_a_cell():
    every = list(cells("jax"))
    pairs = {(c.dtype, c.transform) for c in every} | {(c.dtype, c.arguments) for c in every}
    pairs |= {(c.transform, c.arguments) for c in every}
    pairs |= {(c.operator.name, c.transform) for c in every}
    pairs |= {(c.operator.name, c.dtype) for c in every}
    pairs |= {(c.operator.name, c.arguments) for c in every}
    pairs |= {(c.program.name, c.operator.family) for c in every}
    names = [o.name for o in OPERATORS]
    wanted = [(DTYPES, TRANSFORMS), (DTYPES, ARGUMENTS), (TRANSFORMS, ARGUMENTS)]
    wanted += [(names, kinds) for kinds in (DTYPES, TRANSFORMS, ARGUMENTS)]
    wanted += [([p.name for p in smooth_programs()], families())]
    missing = [(a, b) for left, right in wanted for a in left for b in right if (a, b) not in pairs]
    assert not missing


def test_numbers_without_axes_and_empty_arrays_meet_every_family():
    run = [cell for cell in cells("jax") if not cell.reason]
    for shape in ("number", "empty"):
        met = {cell.operator.family for cell in run if cell.program.shape == shape}
        assert met == set(families())


@pytest.mark.sweep_at("jax")
def test_every_oracle_is_used(backend_name):
    from tests.conformance.rig import problem
    from tests.conformance.rig.trial import compared

    wanted = {problem.DIFFERENCES, problem.CALL, problem.CLOSED, problem.DOT, problem.EAGER}
    names = ("vjp", "value_and_grad", "clip_gradient", "grad")
    some = [
        next(
            c
            for c in cells(backend_name)
            if c.operator.name == name
            and c.transform == ("vmap" if name == "grad" else "eager")
            and not c.reason
        )
        for name in names
    ]
    assert {outcome.oracle for cell in some for outcome in compared(cell, backend_name)} == wanted


def test_second_differences_are_allowed_ten_times_what_first_ones_are():
    from tests.conformance.rig import problem

    cell = next(c for c in cells("jax") if c.dtype == "float64")
    allowed = lambda order: problem.Problem._allowed(
        SimpleNamespace(cell=cell), problem.DIFFERENCES, order
    )
    assert allowed(2) == 10 * allowed(1) < 1e-3
