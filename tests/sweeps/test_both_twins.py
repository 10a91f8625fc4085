"""What both frameworks have by one name has the same numbers in both, by gradtools."""

from __future__ import annotations

from fnmatch import fnmatchcase

import jax
import pytest
import torch

import gradtools.torch as gt
from tests.support import run_sweeps
from tests.support.sweeps import AGREES, DIFFERS, judged, twins

GROUPS = twins.groups(25)


@pytest.fixture(autouse=True)
def compiled_programs_are_let_go():
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.sweep_at("0", "2")
@pytest.mark.parametrize("every", range(3))
def test_some_twins_have_the_same_numbers_or_are_explained(every):
    found = twins.verdict(twins.sweep(twins.pairs()[every::45]))
    assert found, f"\n{found}"


@pytest.mark.sweep
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_every_twin_has_the_same_numbers_or_is_explained(group):
    found = twins.verdict(twins.sweep(GROUPS[group], whole=True), whole=True)
    assert found, f"\n{found}"


def test_most_of_what_both_frameworks_have_is_found():
    programs = {case.program for case in twins.pairs()}
    assert len(programs) > 300
    assert {"numpy.sin", "nn.softplus", "numpy.linalg.inv", "numpy.fft.rfft"} <= programs
    assert {"scipy.special.i1e", "lax.conv_general_dilated", "lax.cumlogsumexp"} <= programs


def test_each_twin_that_is_spelled_out_is_one_of_a_case():
    known = {f"{c.program} {c.sample}" if c.sample else c.program for c in twins.pairs()}
    assert set(twins.SPELLED) <= known


def test_each_line_of_the_ledger_names_a_pair():
    programs = {case.program for case in twins.pairs()}
    for line in twins.LEDGER:
        assert any(fnmatchcase(p, line.program) for p in programs), line


def pair(program):
    return [case for case in twins.pairs() if case.program == program][:1]


def test_a_wrong_derivative_of_one_framework_is_found_by_the_other(monkeypatch):
    plain = gt.jvp
    monkeypatch.setattr(gt, "jvp", lambda f, xs, ts: plain(f, xs, [1.00001 * t for t in ts]))
    found = {o.way: o.result for o in twins.sweep(pair("numpy.sin"))}
    assert found.pop("jvp") == DIFFERS
    assert set(found.values()) == {AGREES}


def test_one_name_for_two_functions_is_found_by_the_values(monkeypatch):
    monkeypatch.setitem(twins.SPELLED, "numpy.sin", torch.cos)
    assert [(o.way, o.result) for o in twins.sweep(pair("numpy.sin"))] == [("value", DIFFERS)]


def test_complex_twins_have_one_convention():
    found = twins.sweep(pair("numpy.sin"), whole=True)
    assert {o.dtype for o in found} == {"float64", "complex128"}
    assert {o.result for o in found} == {AGREES}


def test_the_script_holds_twins_against_each_other_where_both_frameworks_are(capsys, monkeypatch):
    for name in ("torch", "jax"):
        monkeypatch.setitem(run_sweeps._SWEEPS, name, lambda whole, containing: judged([], []))
    assert run_sweeps.main(["--backend", "both", "--filter", "numpy.sinh"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("twins ")
