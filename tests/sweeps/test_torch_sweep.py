"""The sweep over all that PyTorch can differentiate, and that the sweep finds what is wrong.

The quick tier takes one sample of each operator, module and custom operator in PyTorch's own
tables, each operator through a third of the principal ways, in turn; the whole, behind the mark
`sweep`, all ways, more samples and the in-place variants. Who fails is in the verdict, with the
oracle.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError
from tests.support.sweeps import (
    AGREES,
    DIFFERS,
    LEFT_OUT,
    RAISED,
    REFUSED,
    LedgerLine,
    in_torch,
    judged,
    ledger_lines,
    torch_programs,
)
from tests.support.sweeps.torch_ledger import LEDGER, REVERSE_MODE

pytest.importorskip("expecttest", reason="PyTorch's tables of operators need expecttest")
pytestmark = pytest.mark.torch

SMALL = {"sin", "mul", "split", "linalg.inv"}


@cache
def small_programs():
    found = [e for e in torch_programs.entries(("op_db",)) if e.name in SMALL]
    return [p for e in found for dtype in in_torch.FINE for p in torch_programs.programs(e, dtype)]


def small(ways):
    chosen = [way for way in in_torch.WAYS if way.name in ways]
    outcomes = [o for program in small_programs() for o in in_torch.swept(program, chosen)]
    return [o for o in outcomes if o.way in ways]


@pytest.mark.slow
@pytest.mark.parametrize("table", torch_programs.TABLES)
def test_everything_in_the_table_agrees_or_is_explained(table):
    every = 3 if table == "op_db" else 1
    verdict = judged(in_torch.sweep(tables=(table,), every=every), LEDGER, whole=False)
    assert not verdict.unexplained and (every > 1 or not verdict.outdated), str(verdict)
    assert verdict.counts[AGREES] > 40


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
def test_the_whole_of_it_agrees_or_is_explained(part, outcomes_of_the_whole):
    outcomes_of_the_whole[part] = list(in_torch.sweep(whole=True, part=(part, 8)))
    verdict = judged(outcomes_of_the_whole[part], LEDGER, whole=False)
    assert not verdict.unexplained, str(verdict)


@pytest.mark.sweep
def test_no_line_of_the_ledger_is_outdated(outcomes_of_the_whole):
    if len(outcomes_of_the_whole) < 8:
        pytest.skip("the parts of the sweep ran elsewhere")
    verdict = judged([o for part in outcomes_of_the_whole.values() for o in part], LEDGER)
    assert not verdict.outdated, str(verdict)


@pytest.fixture(scope="module")
def outcomes_of_the_whole():
    return {}


# --- the sweep finds what is wrong ---------------------------------------------------------------


@pytest.mark.slow
def test_what_is_right_agrees_in_every_way():
    ways = {way.name for way in in_torch.WAYS} - {"make_functional, vjp"}  # which is for modules
    outcomes = small(ways)
    assert {o.way for o in outcomes} == ways
    assert {o.program for o in outcomes} == SMALL
    verdict = judged(outcomes, ())
    assert not verdict.unexplained, str(verdict)


def wrong(found, factor):
    return tuple(factor * x for x in found) if isinstance(found, tuple) else factor * found


@pytest.mark.quick_at(("vjp-vjp", "0"))
@pytest.mark.sweep_at(
    ("hvp-hvp, reverse over reverse", "-1"), ("hvp-hvp, reverse over reverse", "1.00001")
)
@pytest.mark.parametrize("factor", [-1, 0, 1 + 1e-5])
@pytest.mark.parametrize(
    ("operator", "way"),
    [
        ("jvp", "jvp"),
        ("linearize", "linearize"),
        ("vjp", "vjp"),
        ("hvp", "hvp, forward over reverse"),
        ("hvp", "hvp, reverse over reverse"),
        ("jvp", "grad of jvp"),
    ],
)
def test_a_wrong_derivative_is_found(monkeypatch, operator, way, factor):
    own = getattr(gt, operator)

    def mutant(*args, **kwargs):
        out, found = own(*args, **kwargs)
        if callable(found):
            return out, lambda *more: wrong(found(*more), factor)
        return out, wrong(found, factor)

    monkeypatch.setattr(gt, operator, mutant)
    outcomes = small((way,))
    assert {o.program for o in outcomes} == SMALL
    assert {o.result for o in outcomes} == {DIFFERS}


def test_a_missing_conjugate_is_found(monkeypatch):
    own = gt.vjp

    def mutant(*args):
        out, pullback = own(*args)
        return out, lambda ct: tuple(x.conj() for x in pullback(ct))

    monkeypatch.setattr(gt, "vjp", mutant)
    found = {o.dtype: o.result for o in small(("vjp",))}
    assert found == {"float64": AGREES, "complex128": DIFFERS}


def test_a_frozen_function_that_loses_its_second_derivative_is_found(monkeypatch):
    # J at the point of the first call: the curvature of G itself is lost
    def mutant(G):
        def frozen(*xs):
            ys = G(*(x.detach() for x in xs))
            pushed = gt.linearize(G, *(x.detach() for x in xs))[1]
            moved = pushed(*(x - x.detach() for x in xs))
            return tuple(y + dy for y, dy in zip(ys, moved, strict=True))

        return frozen

    monkeypatch.setattr(gt, "frozen", mutant)
    assert {o.result for o in small(("frozen, second order",))} <= {DIFFERS, RAISED, REFUSED}


def test_a_refusal_and_a_raw_error_are_told_apart(monkeypatch):
    for error, result in ((GradtoolsError("no"), REFUSED), (RuntimeError("no"), RAISED)):

        def mutant(*args, error=error):
            raise error

        monkeypatch.setattr(gt, "jvp", mutant)
        outcomes = small(("jvp",))
        assert {o.result for o in outcomes} == {result}
        assert len(judged(outcomes, ()).unexplained) == len(outcomes)


def test_a_line_of_the_ledger_that_no_longer_occurs_fails():
    line = LedgerLine("sin", "jvp", DIFFERS, "it was wrong once")
    verdict = judged(small(("jvp",)), (line,), whole=False)
    assert not verdict and verdict.outdated == (line,)
    assert "outdated: sin | jvp" in str(verdict)


def test_a_table_of_a_ledger_reads_each_pair_of_programs_and_ways():
    table = "# head\na, in place; b* |\nx | differs, whole, complex64, torch#1\n  two\n  words\n"
    last = ("x", "differs", "two words", "torch#1", "complex64", True)
    assert ledger_lines(table) == tuple(LedgerLine(p, *last) for p in ("a, in place", "b*"))
    with pytest.raises(ValueError, match=r"not an entry of a ledger: a \| b \| c"):
        ledger_lines(table + "a | b | c\n")


def test_a_kink_is_told_from_an_error():
    program = torch_programs.TableProgram(
        "relu at 0", "float64", 0, lambda x: (torch.relu(x),), (torch.zeros(3).double(),)
    )
    found = {o.way: o.result for o in in_torch.swept(program, in_torch.WAYS[:1])}
    assert found == {REVERSE_MODE: LEFT_OUT, "vjp": AGREES}


def test_pytorch_without_a_term_of_its_reverse_mode_is_found():
    f = lambda x: (x * x.detach(),)
    program = torch_programs.TableProgram("half", "float64", 0, f, (torch.ones(3).double(),))
    found = {o.way: o.result for o in in_torch.swept(program, in_torch.WAYS[:1])}
    assert found[REVERSE_MODE] == DIFFERS


# --- what it asks of a machine -------------------------------------------------------------------


def test_without_expecttest_the_sweep_says_what_to_install(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="expecttest")

    monkeypatch.setattr(torch_programs, "operator_tables", absent)
    with pytest.raises(GradtoolsError, match="pip install expecttest"):
        list(in_torch.sweep())


@pytest.mark.slow
def test_the_sweep_leaves_flags_and_random_stream_as_they_were():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert list(in_torch.sweep(only=SMALL.__contains__, tables=("op_db",)))
    assert torch.equal(before, torch.get_rng_state())
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark  # may still be set
