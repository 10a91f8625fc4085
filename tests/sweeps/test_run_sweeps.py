"""The script that runs the sweeps: what it prints, and its exit status."""

from __future__ import annotations

import pytest

from tests.support import run_sweeps


@pytest.mark.sweep_at("torch")
def test_the_sweep_is_held_against_its_ledger(capsys, backend_name):
    assert run_sweeps.main(["--backend", backend_name, "--filter", "sinh"]) == 0
    assert " agrees" in capsys.readouterr().out


@pytest.mark.sweep_at("torch")
def test_what_the_ledger_does_not_tell_is_named_and_the_status_is_1(
    capsys, monkeypatch, backend_name, gt
):
    right = gt.jvp

    def wrong(f, primals, tangents):
        out, pushed = right(f, primals, tangents)
        return out, type(pushed)(-x for x in pushed) if isinstance(
            pushed, tuple | list
        ) else -pushed

    monkeypatch.setattr(gt, "jvp", wrong)
    assert run_sweeps.main(["--backend", backend_name, "--filter", "sinh"]) == 1
    assert "unexplained: " in capsys.readouterr().out


@pytest.mark.slow_at("torch")
def test_a_filter_that_no_program_of_the_sweep_holds_is_told(capsys, backend_name):
    assert run_sweeps.main(["--backend", backend_name, "--filter", "nosuch"]) == 2
    said = capsys.readouterr()
    assert not said.out and "no program's name holds 'nosuch'" in said.err
