"""Tests the output and the exit status of `gradtools check`."""

from __future__ import annotations

import pytest

import gradtools
from gradtools import cli
from gradtools.testing import check_command
from gradtools.testing.check_command import PROGRAMS, TOLERANCE, error_of

ALONE = "reversed_gradient"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_agrees_and_a_small_error_of_it_is_seen(gt, backend_name, name, monkeypatch):
    with check_command.in_double_precision(backend_name == "jax"):
        assert error_of(gt, name) <= TOLERANCE / 1e3
        run = PROGRAMS[name]

        def off(self):
            found, expected = run(self)
            leaves, treedef = gt._api._backend.flatten(found)
            return gt._api._backend.unflatten(treedef, [x * (1 + 1e-6) for x in leaves]), expected

        monkeypatch.setitem(PROGRAMS, name, off)
        assert error_of(gt, name) > TOLERANCE


@pytest.fixture
def alone(monkeypatch, backend_name):
    """Remove all programs except ALONE; return the arguments of `gradtools check`."""
    for name in [name for name in PROGRAMS if name != ALONE]:
        monkeypatch.delitem(PROGRAMS, name)
    return ["check", "--backend", backend_name]


def test_programs_that_agree_are_listed_and_the_status_is_0(alone, capsys, default_precision):
    assert cli.main(alone) == 0
    out = capsys.readouterr().out
    assert "  ok      reversed gradient " in out and out.endswith("1 of 1 agree with NumPy\n")


def test_a_program_that_fails_is_named_and_the_status_is_1(alone, capsys, monkeypatch):
    monkeypatch.setitem(PROGRAMS, ALONE, lambda self: (3.1, 3.0))
    assert cli.main(alone) == 1
    out = capsys.readouterr().out
    assert "  FAILED  reversed gradient " in out and "0 of 1 agree" in out


def test_a_number_that_is_nan_fails(alone, monkeypatch):
    monkeypatch.setitem(PROGRAMS, ALONE, lambda self: (float("nan"), 3.0))
    assert cli.main(alone) == 1


def test_without_a_framework_the_status_is_2(capsys, monkeypatch):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ())
    assert cli.main(["check"]) == 2
    assert "torch and jax: not installed" in capsys.readouterr().err


def test_64_bits_are_on_in_jax_for_the_command_alone(alone, backend_name, default_precision):
    assert cli.main(alone) == 0
    if backend_name == "jax":
        import jax

        assert jax.numpy.ones(1).dtype == "float32"
