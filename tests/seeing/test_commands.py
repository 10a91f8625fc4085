"""Tests the commands `gradtools why-zero`, `gradtools graph` and `gradtools formula`.

Each row of `ANSWERS` and `REFUSALS` is a command line and parts of its output.
"""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest

import gradtools
from gradtools.cli import main

HEAD = {
    "torch": "import torch\nfrom torch import exp, round\nstop = torch.detach\n",
    "jax": "import jax\nfrom jax.numpy import exp, round\nstop = jax.lax.stop_gradient\n",
}
PROGRAM = """
    PI = 3.14

    def linear(W, x, b):
        return W @ x + b

    def cubes(x):
        return x**3

    def loss(w, x):
        return exp(w @ x).sum()

    def lost(x, y):
        return round(x).sum() + stop(y).sum()

    def whole(x):
        return (x**2).sum()

    def constant(scale=2.0):
        return scale

    class Layer:
        def forward(self, x):
            return x

        def __call__(self, *args):
            return self.forward(*args)

    layer = Layer()

    def broken(x):
        raise RuntimeError("on purpose")
"""


@pytest.fixture
def program(tmp_path, monkeypatch, backend_name):
    """Write a module `written`, which uses a framework, and a module `neutral`, which uses none."""
    text = HEAD[backend_name] + textwrap.dedent(PROGRAM)
    (tmp_path / "written.py").write_text(text)
    (tmp_path / "neutral.py").write_text("def double(x):\n    return x + x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "table.csv").write_text("1.0,2.0\n")
    (tmp_path / "empty.npy").write_text("")
    np.savez("objects.npz", first=np.array([None, "text"]))
    np.savez("inputs.npz", first=np.ones((4, 3), "f"), second=np.ones(3, "f"))
    yield tmp_path
    sys.modules.pop("written", None)
    sys.modules.pop("neutral", None)


def run(command: str, backend: str = "") -> int:
    """Run a command, in which `<backend>` is replaced by a name, and return its exit status."""
    return main(command.replace("<backend>", backend).split())


ANSWERS = [
    ("formula written:linear --shapes 3x4,4,3", 0, ["  y = W x + b\n", "W̄ = ȳ xᵀ", "agrees with"]),
    ("formula written:linear --shapes 3x4,4,3 --argnums 0,1,2", 0, ["x̄ = Wᵀ ȳ\n", "b̄ = ȳ\n"]),
    ("formula written:cubes --shapes 4 --order 2", 0, ["∂s/∂x = 6 ȳ ⊙ x ⊙ u", "∂s/∂ȳ = 3 u ⊙ x²"]),
    ("formula written:loss --args inputs.npz --argnums 1", 0, ["x̄ = ", "i = 4, j = 3"]),
    ("formula neutral:double --shapes 3 --backend <backend>", 0, ["x̄ = 2 ȳ"]),
    ("graph written:loss --shapes 4x3,3 --argnums 0,1", 0, ["gradient of w", "gradient of x"]),
    ("why-zero written:lost --shapes 3,3", 1, ["argument 0 gets no", "zero_derivative (round)"]),
    ("why-zero written:lost --args inputs.npz --argnums 1", 1, ["detached"]),
    ("why-zero written:whole --shapes 3", 0, ["Nothing is lost"]),
]


@pytest.mark.parametrize(
    ("command", "status", "parts"), ANSWERS, ids=[command.split()[0] for command, _, _ in ANSWERS]
)
def test_a_command_prints_its_answer(program, capsys, backend_name, command, status, parts):
    assert run(command, backend_name) == status
    out = capsys.readouterr().out
    assert [part for part in parts if part not in out] == []
    assert "\033[" not in out  # stdout is a pipe


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_graph_shows_a_pass_for_each_order(program, capsys, order):
    assert run(f"graph written:loss --shapes 4x3,3 --order {order}") == 0
    lines = capsys.readouterr().out.splitlines()
    passes = ["forward", "backward", "backward of the backward"][: order + 1]
    assert [line for line in lines if line and not line.startswith((" ", "gradtools"))] == passes


REFUSALS = [
    (
        "graph written:broken --shapes 3 -o f.pdf",
        ["no format for '.pdf'; expected "],
    ),
    ("formula written:broken --shapes 3", ["f raised RuntimeError: on purpose"]),
    ("formula written:cubes --shapes 3:int64", ["gradtools formula: formula: argument 0"]),
    ("graph written:broken --shapes 3", ["raised RuntimeError: on purpose (written.py:"]),
    ("graph written:absent --shapes 3", ["written has no attribute absent"]),
    ("graph written:loss --shapes 3", ["missing 1 required positional argument: 'x'"]),
    ("why-zero written:whole --shapes 3y", ["'3y' is not a shape"]),
    ("graph no_such_module:f", ["cannot be imported"]),
    ("why-zero written.py:lost --shapes 3", ["cannot be imported", "; write written:lost."]),
    ("graph written:loss", ["written:loss: missing a required argument: 'w'; pass --shapes."]),
    ("formula written:layer", ["written:layer: missing a required argument: 'x'; pass --sha"]),
    ("why-zero written:PI", ["is a float; expected a function."]),
    ("formula written:cubes --args table.csv", ["--args table.csv: it contains no arrays of numb"]),
    ("formula written:cubes --args empty.npy", ["numbers. Pass a .npy or .npz file."]),
    ("formula written:cubes --args objects.npz", ["--args objects.npz: it contains no arrays of"]),
    ("formula written:cubes --args absent.npy", ["--args absent.npy: No such file or directory"]),
]


@pytest.mark.parametrize(("command", "parts"), REFUSALS, ids=[command for command, _ in REFUSALS])
def test_what_cannot_be_told_ends_with_2(program, capsys, command, parts):
    assert run(command) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == []


def test_a_function_without_required_arguments_needs_no_arrays(program, capsys):
    run("why-zero written:constant")
    assert "missing a required argument" not in capsys.readouterr().err


def test_what_is_lost_is_told_as_json(program, capsys):
    assert run("why-zero written:lost --shapes 3,3 --argnums 0,1 --json") == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["argument"], f["kind"]) for f in found] == [
        ("argument 0", "zero_derivative"),
        ("argument 1", "detached"),
    ]


def test_a_module_that_imports_neither_asks_for_the_backend(program, capsys, monkeypatch):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ("torch", "jax"))
    assert run("graph neutral:double --shapes 3") == 2
    assert "pass --backend torch or --backend jax" in capsys.readouterr().err
