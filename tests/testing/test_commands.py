"""Tests the command `gradtools cross-check`."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest

from gradtools.cli import main

pytest.importorskip("torch")
pytest.importorskip("jax")

PROGRAMS = """
    import jax.numpy as jnp
    import torch

    def torch_loss(x, y):
        return (torch.sin(x) * y).sum()

    def jax_loss(x, y):
        return (jnp.sin(x) * y).sum()

    def wrong_loss(x, y):
        return -(jnp.sin(x) * y).sum()

    PI = 3.14

    class here:
        torch_sin, jax_sin = torch.sin, jnp.sin
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Write a module of programs into the working directory."""
    (tmp_path / "ported.py").write_text(textwrap.dedent(PROGRAMS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("ported", None)


def test_programs_that_agree_give_a_plain_table_and_status_0(programs, capsys):
    np.savez("inputs.npz", np.array([0.1, 0.2]), np.array([1.0, -1.0]))
    status = main(["cross-check", "ported:torch_loss", "ported:jax_loss", "--args", "inputs.npz"])
    out = capsys.readouterr().out
    assert status == 0
    assert "8 arrays compared, all agree" in out
    assert "\x1b[" not in out and "gradient" in out and "argument 1" in out


def test_programs_that_disagree_give_status_1_and_the_cause(programs, capsys):
    status = main(["cross-check", "ported:torch_loss", "ported:wrong_loss", "--shapes", "3,3"])
    out = capsys.readouterr().out
    assert status == 1
    assert "Likely cause: sign" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["ported:nothing", "ported:jax_loss", "--shapes", "3"], "ported has no attribute nothing"),
        (["ported:torch_loss", "ported:jax_loss", "--shapes", "3 by 4"], "is not a shape"),
        (
            ["ported:torch_loss", "ported:jax_loss", "--args", "objects.npz"],
            "contains no arrays",
        ),
        (["ported:torch_loss", "ported:jax_loss", "--shapes", "3"], "raised by the torch program"),
        (["ported:torch_loss", "ported:PI", "--shapes", "3,3"], "jax is a float; expected a"),
    ],
)
def test_what_cannot_be_compared_is_said_with_status_2(programs, capsys, options, says):
    np.savez("objects.npz", np.array([None], object))
    assert main(["cross-check", *options]) == 2
    assert says in capsys.readouterr().err
