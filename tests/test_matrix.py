"""The scenario matrix: each cell is computed and held against oracles, or left out and named."""

from __future__ import annotations

from collections import Counter

import pytest

from gradtools.testing.checking import forget_compiled, judged
from gradtools.testing.matrix import (
    ARGUMENTS,
    DTYPES,
    OPERATORS,
    TRANSFORMS,
    cells,
    families,
    programs,
)

# PyTorch's compiler takes seconds for a cell. All cells of a program come together, since JAX
# compiles each operation for its shapes once, which is slow too: every third is not marked so.
BATCHES = [
    *(
        pytest.param(p.name, False, id=p.name, marks=[pytest.mark.slow] if k % 3 else [])
        for k, p in enumerate(programs())
    ),
    *(
        pytest.param(p.name, True, id=f"{p.name}, compiled", marks=pytest.mark.slow)
        for p in programs()
    ),
]
EVERYWHERE = {
    "the operator has no has_aux": 35,
    "a Jacobian of a complex function is no complex matrix; refused by name": 17,
    "the framework has no linear algebra in bfloat16": 10,
    "gather needs several processes or devices; its tests start them": 1,
}
LEFT_OUT = {
    "torch": {
        **EVERYWHERE,
        "torch.func does not support the saved-tensor hooks of checkpoint": 4,
        "torch.func.vmap cannot map a checkpoint (its saved-tensor hooks)": 5,
        "PyTorch has no compiled double backward, torch#91469": 2,
        "PyTorch's checkpoint computes again without the tangents, and says so": 1,
        "refused: PyTorch's forward rule loses a term when differentiated, torch#192540": 1,
    },
    "jax": EVERYWHERE,
}


@pytest.mark.parametrize(("name", "compiled"), BATCHES)
def test_every_cell_of_a_program_holds(backend_name, name, compiled):
    mine = [c for c in cells(backend_name) if c.program.name == name and not c.reason]
    mine = [c for c in mine if (c.transform == "compile") == compiled]
    if backend_name == "jax":  # which compiles each operation: `gradtools check` runs them all
        mine = mine[[p.name for p in programs()].index(name) % 4 :: 4]
    verdicts = [judged(cell, backend_name) for cell in mine]
    if [p.name for p in programs()].index(name) % 12 == 11:  # others of these shapes are done
        forget_compiled(backend_name)
    failed = [f"{v.cell}: {v.failure}" for v in verdicts if v.failure]
    assert not failed, "\n".join(failed)


def test_what_is_left_out_is_known_by_reason_and_number(backend_name):
    found = Counter(cell.reason for cell in cells(backend_name) if cell.reason)
    for reason, number in found.items():
        print(f"{number:>5} left out in {backend_name}: {reason}")
    assert dict(found) == LEFT_OUT[backend_name]


def test_there_are_a_thousand_cells_over_sixty_programs(backend_name):
    run = [cell for cell in cells(backend_name) if not cell.reason]
    assert len(run) >= 1000
    assert len({cell.program.name for cell in run}) >= 60
    assert len({str(cell) for cell in run}) == len(run)


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
    wanted += [([p.name for p in programs()], families())]
    missing = [(a, b) for left, right in wanted for a in left for b in right if (a, b) not in pairs]
    assert not missing


def test_numbers_without_axes_and_empty_arrays_meet_every_family():
    run = [cell for cell in cells("jax") if not cell.reason]
    for shape in ("number", "empty"):
        met = {cell.operator.family for cell in run if cell.program.shape == shape}
        assert met == set(families())


def test_every_oracle_is_used(backend_name):
    from gradtools.testing import problem
    from gradtools.testing.trial import trial

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
    assert {outcome.oracle for cell in some for outcome in trial(cell, backend_name)} == wanted
