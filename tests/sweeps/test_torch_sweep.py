"""Tests all differentiable operations of PyTorch, and tests that the sweep detects errors.

`make test-all` runs one sample of each operator, module and custom operator in PyTorch's own
tables. Each entry of `op_db` is tested with one third of gradtools' quick operators; successive
entries use different thirds. The mark `sweep` selects the whole sweep, with all operators, more
samples and in-place variants.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

import gradtools.torch as gt
from tests.sweeps import AGREES, DIFFERS, LEFT_OUT, RAISED, faults, in_torch, torch_programs

pytest.importorskip("expecttest", reason="PyTorch's tables of operators need expecttest")
pytestmark = pytest.mark.torch

SMALL = {"sin", "mul", "split", "linalg.inv"}


@pytest.mark.slow
@pytest.mark.parametrize("table", torch_programs.TABLES)
def test_everything_in_the_table_is_as_by_pytorch(table):
    outcomes = [*in_torch.sweep(tables=(table,))]
    assert faults(outcomes, in_torch.KNOWN, whole=False) == []
    assert Counter(o.result for o in outcomes)[AGREES] > 40


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
def test_the_whole_of_it_is_as_by_pytorch(part):
    assert faults(in_torch.sweep(whole=True, part=(part, 8)), in_torch.KNOWN, whole=False) == []


@cache
def small_programs():
    found = [e for e in torch_programs.entries(("op_db",)) if e.name in SMALL]
    dtypes = ("float64", "complex128")
    return [p for e in found for dtype in dtypes for p in torch_programs.programs(e, dtype)[0]]


def small(*ways):
    chosen = [way for way in in_torch.WAYS if way.name in ways]
    return [o for program in small_programs() for o in in_torch.swept(program, chosen)]


def wrong(found, factor):
    return tuple(factor * x for x in found) if isinstance(found, tuple) else factor * found


@pytest.mark.parametrize("factor", [-1, 1 + 1e-5])
@pytest.mark.parametrize(
    ("operator", "way"),
    [
        ("jvp", "jvp"),
        ("linearize", "linearize"),
        ("vjp", "vjp"),
        ("hvp", "hvp, reverse over reverse"),
    ],
)
def test_a_wrong_derivative_is_found(monkeypatch, operator, way, factor):
    own = getattr(gt, operator)

    def mutant(*args, **kwargs):
        out, found = own(*args, **kwargs)
        if callable(found):
            return out, lambda *more: wrong(found(*more), factor)
        return out, wrong(found, factor)

    assert {o.result for o in small(way)} == {AGREES}
    monkeypatch.setattr(gt, operator, mutant)
    outcomes = small(way)
    assert {o.program for o in outcomes} == SMALL
    assert {o.result for o in outcomes} == {DIFFERS}


def test_a_missing_conjugate_is_found(monkeypatch):
    own = gt.vjp

    def mutant(*args):
        out, pullback = own(*args)
        return out, lambda ct: tuple(x.conj() for x in pullback(ct))

    monkeypatch.setattr(gt, "vjp", mutant)
    assert {o.dtype: o.result for o in small("vjp")} == {"float64": AGREES, "complex128": DIFFERS}


def test_a_frozen_function_that_loses_its_second_derivative_is_found(monkeypatch):
    def mutant(G):  # The linearization of G has no second derivative.
        def frozen(*xs):
            ys = G(*(x.detach() for x in xs))
            pushed = gt.linearize(G, *(x.detach() for x in xs))[1]
            moved = pushed(*(x - x.detach() for x in xs))
            return tuple(y + dy for y, dy in zip(ys, moved, strict=True))

        return frozen

    monkeypatch.setattr(gt, "frozen", mutant)
    assert {o.result for o in small("frozen, second order")} <= {DIFFERS, RAISED}


def test_an_error_counts_only_where_pytorch_has_a_number(monkeypatch):
    assert {o.result for o in swept_one(torch.special.zeta, ("jvp",))} == {LEFT_OUT}

    def mutant(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(gt, "jvp", mutant)
    outcomes = small("jvp")
    assert {o.result for o in outcomes} == {RAISED}
    assert len(faults(outcomes, {})) == len(outcomes)
    assert faults(outcomes, {("sin; mul; split; linalg*", "j?p"): "no"}) == []
    assert len(faults((), {("sin", "jvp"): "the cell used to be wrong"})) == 1


def swept_one(f, ways):
    x = torch.tensor([1.5, 2.5], dtype=torch.float64)
    program = torch_programs.TableProgram("f", "float64", 0, lambda x: (f(x, x + 1),), (x,))
    return [*in_torch.swept(program, [way for way in in_torch.WAYS if way.name in ways])]


def test_the_sweep_leaves_flags_and_random_stream_as_they_were():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert small("vjp")
    assert torch.equal(before, torch.get_rng_state())
    # This assignment raises an error if the flags are frozen.
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
