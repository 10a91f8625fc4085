"""`gradtools why-zero`: text, colour and JSON; the exit status tells what was found."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest

from gradtools.cli import main

PROGRAM = {
    "torch": """
        import torch

        def lost(x, y):
            return torch.round(x).sum() + y.detach().sum()

        def whole(x):
            return (x ** 2).sum()

        def broken(x):
            raise RuntimeError("on purpose")
    """,
    "jax": """
        import jax
        import jax.numpy as jnp

        def lost(x, y):
            return jnp.round(x).sum() + jax.lax.stop_gradient(y).sum()

        def whole(x):
            return (x ** 2).sum()

        def broken(x):
            raise RuntimeError("on purpose")
    """,
}


@pytest.fixture
def program(tmp_path, monkeypatch, backend_name):
    """A module in the working directory, in one framework."""
    (tmp_path / "looked_at.py").write_text(textwrap.dedent(PROGRAM[backend_name]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("looked_at", None)


def run(*options):
    return main(["why-zero", *options])


def test_what_is_lost_is_named_with_status_1(program, capsys):
    assert run("looked_at:lost", "--shapes", "3,3") == 1
    out = capsys.readouterr().out
    assert "argument 0 gets no gradient" in out
    assert "looked_at.py:" in out and "zero_derivative (round)" in out
    assert "\033[" not in out  # a pipe


def test_several_arguments(program, capsys):
    assert run("looked_at:lost", "--shapes", "3,3", "--argnums", "0,1", "--json") == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["argument"], f["kind"]) for f in found] == [
        ("argument 0", "zero_derivative"),
        ("argument 1", "detached"),
    ]


def test_nothing_lost_is_status_0(program, capsys):
    assert run("looked_at:whole", "--shapes", "3") == 0
    assert capsys.readouterr().out.startswith("Nothing is lost")


def test_inputs_from_a_file(program, capsys):
    np.savez("inputs.npz", x=np.ones(3, np.float32), y=np.ones(3, np.float32))
    assert run("looked_at:lost", "--args", "inputs.npz", "--argnums", "1") == 1
    assert "detached" in capsys.readouterr().out


def test_on_a_terminal_it_is_in_colour(program, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("gradtools.seeing.commands.in_colour", lambda: True)
    assert run("looked_at:lost", "--shapes", "3,3") == 1
    assert "\033[31m" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("looked_at:broken", "--shapes", "3"), "f raised RuntimeError: on purpose"),
        (("looked_at:whole", "--shapes", "3:int32"), "argument 0 is an array of dtype int32"),
        (("looked_at:whole", "--shapes", "3", "--argnums", "4"), "argnums holds 4"),
        (("looked_at:absent", "--shapes", "3"), "looked_at has no absent"),
        (("looked_at:whole", "--shapes", "3y"), "'3y' is no shape"),
    ],
)
def test_what_cannot_be_told_is_status_2(program, capsys, options, text):
    assert run(*options) == 2
    assert text in capsys.readouterr().err


def test_positions_are_numbers(program, capsys):
    with pytest.raises(SystemExit) as left:
        run("looked_at:whole", "--shapes", "3", "--argnums", "x")
    assert left.value.code == 2
    assert "such as 0 or 0,2; got 'x'" in capsys.readouterr().err
