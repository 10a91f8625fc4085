"""`gradtools measure`: the function by name, its inputs by file or shape, text and JSON."""

from __future__ import annotations

import io
import json
import sys
import textwrap

import numpy as np
import pytest

import gradtools
from gradtools.cli import main

PROGRAMS = {
    "torch": """
        import torch

        def loss(w, x):
            return torch.exp(w @ x).sum()

        layer = torch.nn.Linear(3, 4)

        def broken(x):
            raise RuntimeError("on purpose")

        PI = 3.14
    """,
    "jax": """
        import jax.numpy as jnp

        def loss(w, x):
            return jnp.exp(w @ x).sum()

        def broken(x):
            raise RuntimeError("on purpose")

        PI = 3.14
    """,
}


@pytest.fixture
def programs(tmp_path, monkeypatch, backend_name):
    """A module in the working directory, in one framework."""
    (tmp_path / "measured.py").write_text(textwrap.dedent(PROGRAMS[backend_name]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("measured", None)


FORWARD = 2 * 4 * 3 + 4 + 3
BACKWARD = 4 + 2 * 4 * 3 + 4 * 3  # times exp; transposed product; outer product


@pytest.mark.slow_at("torch")
def test_a_plain_table_with_status_0(programs, capsys, backend_name):
    assert main(["measure", "measured:loss", "--shapes", "4x3,3"]) == 0
    backend, *lines = capsys.readouterr().out.splitlines()
    assert backend == f"backend      {backend_name} (imported by measured; or pass --backend)"
    assert lines[0] == f"flops        {FORWARD} FLOP"
    assert lines[2] == "saved bytes  16 B"
    assert lines[1].startswith("peak bytes   ") and lines[3].startswith("seconds      ")
    assert "\x1b[" not in "".join(lines)


@pytest.mark.slow_at("torch")
def test_json_holds_the_numbers(programs, capsys, backend_name):
    np.savez("inputs.npz", np.ones((4, 3), np.float32), np.ones(3, np.float32))
    assert main(["measure", "measured:loss", "--args", "inputs.npz", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["flops"], found["saved_bytes"]) == (FORWARD, 16)
    assert found["backend"] == backend_name and isinstance(found["notes"], list)


@pytest.mark.slow_at("torch")
def test_grad_measures_value_and_gradient(programs, capsys):
    command = ["measure", "measured:loss", "--shapes", "4x3,3", "--grad", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)["flops"]
    # An outer product is elementwise in PyTorch, and a product over one term in JAX.
    assert FORWARD + BACKWARD <= found <= FORWARD + BACKWARD + 4 * 3


@pytest.mark.slow_at("torch")
def test_a_terminal_gets_bold_names(programs, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["measure", "measured:loss", "--shapes", "4x3,3"])
    assert "\x1b[1mflops" in stream.getvalue()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["measured"], "package.module:name"),
        (["measured:nothing"], "measured has no nothing"),
        (["no_such_module:f"], "cannot be imported"),
        (["measured:PI"], "is a float; expected a function"),
        (["measured:loss", "--shapes", "3 by 4"], "is no shape"),
        (["measured:loss", "--args", "absent.npz"], "absent.npz"),
        (["measured:loss"], "(w, x) was given no arrays: missing a required argument: 'w'"),
        (["measured:broken", "--shapes", "3"], "measured:broken raised RuntimeError on 3"),
        (["measured:loss", "--shapes", "3:int32,3:int32", "--grad"], "no floating array"),
    ],
)
def test_what_cannot_be_measured_is_said_with_status_2(programs, capsys, options, says):
    assert main(["measure", *options]) == 2
    assert says in capsys.readouterr().err


def test_inputs_are_given_one_way(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["measure", "a:b", "--shapes", "3", "--args", "x.npz"])
    assert caught.value.code == 2


def test_a_backend_that_is_not_installed_is_said(programs, monkeypatch, capsys):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ())
    assert main(["measure", "measured:loss", "--shapes", "4x3,3"]) == 2
    assert "is not installed. Fix: pip install" in capsys.readouterr().err


def test_a_module_that_imports_neither_or_both_asks_for_the_backend(programs, capsys, monkeypatch):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ("torch", "jax"))
    (programs / "neutral.py").write_text("def f(x):\n    return x + x\n")
    assert main(["measure", "neutral:f", "--shapes", "3"]) == 2
    assert "say --backend torch or --backend jax" in capsys.readouterr().err
    sys.modules.pop("neutral")


@pytest.mark.slow_at("torch")
def test_a_neutral_function_is_measured_in_the_backend_that_is_named(
    programs, capsys, backend_name
):
    (programs / "neutral.py").write_text("def f(x):\n    return x + x\n")
    command = ["measure", "neutral:f", "--shapes", "3", "--backend", backend_name, "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["flops"] == 3
    sys.modules.pop("neutral")
