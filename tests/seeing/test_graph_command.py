"""`gradtools graph`: the function by name, its inputs by shape, text or a file by its suffix."""

from __future__ import annotations

import sys
import textwrap

import pytest

from gradtools.cli import main

PROGRAMS = {
    "torch": """
        import torch

        def loss(w, x):
            return torch.exp(w @ x).sum()

        def broken(x):
            raise RuntimeError("on purpose")

        layer = torch.nn.Linear(3, 4)
    """,
    "jax": """
        import jax.numpy as jnp

        def loss(w, x):
            return jnp.exp(w @ x).sum()

        def broken(x):
            raise RuntimeError("on purpose")
    """,
}


@pytest.fixture
def program(tmp_path, monkeypatch, backend_name):
    """A module `drawn` in the working directory, written in one framework."""
    (tmp_path / "drawn.py").write_text(textwrap.dedent(PROGRAMS[backend_name]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("drawn", None)


def graph(*options):
    return main(["graph", "drawn:loss", "--shapes", "4x3,3", *options])


@pytest.mark.parametrize(
    ("order", "passes"),
    [
        ("0", ["forward"]),
        ("1", ["forward", "backward"]),
        ("2", ["forward", "backward", "backward of the backward"]),
    ],
)
def test_the_text_shows_a_pass_for_each_order(program, capsys, order, passes):
    assert graph("--order", order) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith((" ", "gradtools"))] == passes


def test_one_order_is_the_default_along_the_first_argument(program, capsys):
    assert graph() == 0
    out = capsys.readouterr().out
    assert "gradient of w" in out and "gradient of x" not in out


def test_wrt_chooses_the_arguments(program, capsys):
    assert graph("--argnums", "0,1") == 0
    assert "gradient of x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suffix", "begin"),
    [("svg", "<svg"), ("html", "<!doctype html"), ("dot", "digraph"), ("mmd", "flowchart")],
)
def test_the_suffix_of_a_file_chooses_the_form(program, capsys, suffix, begin):
    assert graph("-o", f"graph.{suffix}") == 0
    assert capsys.readouterr().out == f"wrote graph.{suffix}\n"
    text = (program / f"graph.{suffix}").read_text()
    assert begin in text[:200].lower() and "exp" in text


def test_a_suffix_without_a_form_is_told_before_anything_runs(program, capsys):
    assert main(["graph", "drawn:broken", "--shapes", "3", "-o", "graph.png"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gradtools graph: -o graph.png: no form for '.png'; expected .svg")


def test_a_function_that_raises_ends_with_2(program, capsys):
    assert main(["graph", "drawn:broken", "--shapes", "3"]) == 2
    assert "RuntimeError: on purpose" in capsys.readouterr().err


def test_a_name_that_there_is_not_ends_with_2(program, capsys):
    assert main(["graph", "drawn:absent", "--shapes", "3"]) == 2
    assert "drawn has no absent" in capsys.readouterr().err


def test_a_folder_that_there_is_not_is_told_before_anything_runs(program, capsys):
    assert main(["graph", "no_such_module:f", "-o", "absent/f.svg"]) == 2
    assert "-o absent/f.svg: there is no folder absent. Make it first." in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(program, capsys):
    (program / "taken.svg").mkdir()
    assert graph("-o", "taken.svg") == 2
    assert "-o taken.svg: it cannot be written: Is a directory." in capsys.readouterr().err


def test_an_error_of_the_functions_own_is_told_with_its_line(program, capsys):
    assert main(["graph", "drawn:broken", "--shapes", "3"]) == 2
    assert "raised RuntimeError: on purpose (drawn.py:8)." in capsys.readouterr().err


@pytest.mark.parametrize(("shapes", "count"), [("3", "1 array"), ("4x3,3,3", "3 arrays")])
def test_another_number_of_arrays_than_the_function_takes_is_told(program, capsys, shapes, count):
    assert main(["graph", "drawn:loss", "--shapes", shapes]) == 2
    assert f"drawn:loss(w, x) was given {count}: " in capsys.readouterr().err
