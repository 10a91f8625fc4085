"""`gradtools check`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradtools import cli
from gradtools.conformance import checking, trial
from gradtools.conformance.matrix import OPERATORS, cells

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.fixture
def few(backend_name):
    """A filter that leaves few cells, in one backend."""
    cell = next(c for c in cells(backend_name) if c.operator.name == "reverse_gradient")
    name = f"reverse_gradient | {cell.program.name} | {cell.dtype} | eager"
    return ["check", "--backend", backend_name, "--filter", name]


def test_cells_that_hold_are_tabled_and_the_status_is_0(few, capsys):
    assert cli.main(few) == 0
    out = capsys.readouterr().out
    assert "reverse_gradient" in out and "1/1" in out
    assert "0 failed" in out


def test_a_cell_that_fails_is_named_and_the_status_is_1(few, capsys, monkeypatch):
    wrong = lambda p, name: trial._gradient_of(p, p.loss, lambda found: p.slopes(found, -0.6))
    monkeypatch.setitem(trial.ASKS, "reverse_gradient", lambda p: wrong(p, ""))
    assert cli.main(few) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "reverse_gradient | " in out and "finite differences" in out


def test_a_cell_that_raises_is_named_and_the_status_is_1(few, capsys, monkeypatch):
    def broken(p):
        raise ValueError("planted")

    monkeypatch.setitem(trial.ASKS, "reverse_gradient", broken)
    assert cli.main(few) == 1
    assert "ValueError: planted" in capsys.readouterr().out


def test_a_filter_that_leaves_nothing_is_status_2(capsys):
    assert cli.main(["check", "--filter", "no such cell"]) == 2
    assert "no such cell" in capsys.readouterr().err


def test_json_holds_every_cell_with_its_error_in_units_of_the_tolerance(few, capsys, backend_name):
    assert cli.main([*few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held"] and len(found["cells"]) == 1
    (cell,) = found["cells"]
    assert cell["backend"] == backend_name and 0 <= cell["worst"] <= 1
    assert cell["oracle"] and not cell["failure"]


def test_a_quick_run_meets_every_family_of_operators(backend_name):
    run = [c for c in checking.chosen(backend_name, quick=True) if not c.reason]
    assert {c.operator.family for c in run} == {o.family for o in OPERATORS}
    assert len(run) >= 50


def test_64_bits_are_on_in_jax_for_the_command_alone(few, backend_name, default_precision):
    if backend_name == "torch":
        assert cli.main(few) == 0
        return
    import jax

    assert cli.main(few) == 0
    assert jax.numpy.ones(1).dtype == "float32"


def test_the_table_of_support_is_the_generated_one():
    begin, end = "<!-- support table: generated -->\n", "\n<!-- end of support table -->"
    _, _, rest = PAGE.read_text().partition(begin)
    table, found, _ = rest.partition(end)
    assert found, "docs/support.md has no support table between its two marks"
    assert table.strip() == checking.support_table(), "python -m gradtools.conformance.checking"
