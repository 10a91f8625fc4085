"""`gradtools check`: what it prints, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradtools import cli
from gradtools.testing import check_command
from gradtools.testing.check_command import TRANSFORMS, cells
from gradtools.testing.operators import OPERATORS


def cell_of(backend, operator, dtype="float64", transform="eager"):
    return next(
        c
        for c in cells(backend)
        if (c.operator, c.dtype, c.transform) == (operator, dtype, transform) and not c.left_out
    )


@pytest.fixture
def few(backend_name):
    """A filter that leaves one cell, in one backend."""
    cell = str(cell_of(backend_name, "reverse_gradient"))
    return ["check", "--backend", backend_name, "--filter", cell]


def test_cells_that_hold_are_tabled_and_the_status_is_0(few, capsys):
    assert cli.main(few) == 0
    out = capsys.readouterr().out
    assert "reverse_gradient" in out and "1/1" in out
    assert "0 failed" in out


def planted(monkeypatch, compute):
    wrong = replace(OPERATORS["reverse_gradient"], compute=compute)
    monkeypatch.setitem(OPERATORS, "reverse_gradient", wrong)


def test_a_cell_that_fails_is_named_and_the_status_is_1(few, capsys, monkeypatch):
    planted(monkeypatch, lambda p, xs: p.grad(p.loss)(*xs))
    assert cli.main(few) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "reverse_gradient | " in out and "finite differences" in out


def test_a_cell_that_raises_is_named_and_the_status_is_1(few, capsys, monkeypatch):
    def broken(p, xs):
        raise ValueError("planted")

    planted(monkeypatch, broken)
    assert cli.main(few) == 1
    assert "ValueError: planted" in capsys.readouterr().out


@pytest.mark.sampled(torch=(40, 40), jax=(20, 40))
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_holds_and_a_small_error_of_it_is_seen(backend_name, operator, monkeypatch):
    whole, cell = OPERATORS[operator], cell_of(backend_name, operator)
    with check_command.in_double_precision(backend_name == "jax"):
        assert check_command.error_of(cell) <= 1
        off = 1 + (1e-4 if whole.order == 2 else 1e-5)

        def scaled(p, xs):
            return [x * off for x in p.backend.flatten(whole.compute(p, xs))[0]]

        monkeypatch.setitem(OPERATORS, operator, replace(whole, compute=scaled))
        assert check_command.error_of(cell) > 1


def test_a_filter_that_leaves_nothing_is_status_2(capsys):
    assert cli.main(["check", "--filter", "no such cell"]) == 2
    assert "no such cell" in capsys.readouterr().err


def test_json_holds_every_cell_with_its_error_in_units_of_the_tolerance(few, capsys, backend_name):
    assert cli.main([*few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held"] and len(found["cells"]) == 1
    (cell,) = found["cells"]
    assert cell["backend"] == backend_name and 0 <= cell["worst"] <= 1
    assert cell["order"] == 1 and not cell["failure"]


def test_a_quick_run_meets_every_operator(backend_name):
    run = [c for c in check_command.chosen(backend_name, quick=True) if not c.left_out]
    assert {c.operator for c in run} == set(OPERATORS)
    assert {c.transform for c in run} == {"eager", "vmap"}


def test_a_whole_run_meets_every_operator_in_every_transform_and_every_program(backend_name):
    run = [c for c in check_command.chosen(backend_name) if not c.left_out]
    missing = {"checkpoint", "checkpoint, twice", "frozen, twice", "chunked, twice"}
    met = {(c.operator, c.transform) for c in run}
    lacking = {(o, t) for o in OPERATORS for t in TRANSFORMS} - met
    assert lacking == ({(o, "compile") for o in missing} if backend_name == "torch" else set())
    assert len({c.scenario.name for c in run}) >= 60


def test_64_bits_are_on_in_jax_for_the_command_alone(few, backend_name, default_precision):
    if backend_name == "torch":
        assert cli.main(few) == 0
        return
    import jax

    assert cli.main(few) == 0
    assert jax.numpy.ones(1).dtype == "float32"
