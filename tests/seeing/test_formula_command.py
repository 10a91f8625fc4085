"""`gradtools formula`: the function by name, its inputs by shape, text or a file by its suffix."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest

from gradtools.cli import main

PROGRAMS = {
    "torch": """
        import torch

        def linear(W, x, b):
            return W @ x + b

        def cubes(x):
            return x**3

        def broken(x):
            raise RuntimeError("on purpose")
    """,
    "jax": """
        import jax.numpy as jnp

        def linear(W, x, b):
            return W @ x + b

        def cubes(x):
            return x**3

        def broken(x):
            raise RuntimeError("on purpose")
    """,
}


@pytest.fixture
def program(tmp_path, monkeypatch, backend_name):
    """A module `written` in the working directory, in one framework."""
    (tmp_path / "written.py").write_text(textwrap.dedent(PROGRAMS[backend_name]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("written", None)


def formula(*options, function="linear", shapes="3x4,4,3"):
    return main(["formula", f"written:{function}", "--shapes", shapes, *options])


def test_the_formula_is_printed_with_its_comparison(program, capsys):
    assert formula("--argnums", "0,1,2") == 0
    out = capsys.readouterr().out
    for line in ("  y = W x + b", "  W̄ = ȳ xᵀ", "  x̄ = Wᵀ ȳ", "  b̄ = ȳ"):
        assert line in out.splitlines()
    assert "agrees with automatic differentiation at the arguments and 3 random points" in out


def test_the_first_argument_at_order_one_is_the_default(program, capsys):
    assert formula() == 0
    out = capsys.readouterr().out
    assert "W̄ = ȳ xᵀ" in out and "x̄ =" not in out and "∂s" not in out


@pytest.mark.slow_at("jax")
def test_order_two_has_the_double_backward(program, capsys):
    assert formula("--order", "2", function="cubes", shapes="4") == 0
    out = capsys.readouterr().out
    assert "∂s/∂x = 6 ȳ ⊙ x ⊙ u" in out and "∂s/∂ȳ = 3 u ⊙ x²" in out


def test_inputs_come_from_a_file_in_their_order(program, capsys):
    np.savez("inputs.npz", first=np.ones((2, 3)), second=np.ones(3), third=np.ones(2))
    assert main(["formula", "written:linear", "--args", "inputs.npz", "--argnums", "1"]) == 0
    out = capsys.readouterr().out
    assert "x̄ = Wᵀ ȳ" in out and "i = 2, j = 3" in out


def test_the_framework_may_be_said(program, capsys, backend_name):
    (program / "neutral.py").write_text("def double(x):\n    return 2.0 * x\n")
    try:
        said = ["--shapes", "3", "--backend", backend_name]
        assert main(["formula", "neutral:double", *said]) == 0
    finally:
        sys.modules.pop("neutral", None)
    assert "x̄ = 2 ȳ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("suffix", "holds"),
    [
        ("txt", ["its adjoint, from ȳ\n", "W̄ = ȳ xᵀ", "agrees with automatic"]),
        (
            "tex",
            ["% needs the packages amsmath", "\\[\n\\begin{gathered}", "\\bar{W} = \\bar{y} x"],
        ),
        ("md", ["$$\n\\begin{gathered}", "\\end{gathered}\n$$\n"]),
    ],
)
def test_the_suffix_of_a_file_chooses_the_form(program, capsys, suffix, holds):
    assert formula("-o", f"formula.{suffix}") == 0
    assert capsys.readouterr().out == f"wrote formula.{suffix}\n"
    text = (program / f"formula.{suffix}").read_text(encoding="utf-8")
    assert [part for part in holds if part not in text] == []


def test_a_suffix_without_a_form_is_told_before_anything_runs(program, capsys):
    assert formula("-o", "formula.pdf", function="broken", shapes="3") == 2
    error = capsys.readouterr().err
    expected = "-o formula.pdf: no form for '.pdf'; expected .txt, .tex, .md."
    assert error == f"gradtools formula: {expected}\n"


def test_a_function_that_raises_ends_with_2(program, capsys):
    assert formula(function="broken", shapes="3") == 2
    assert "f raised RuntimeError: on purpose" in capsys.readouterr().err


def test_an_integer_argument_cannot_be_asked_about(program, capsys):
    assert formula("--argnums", "0", function="cubes", shapes="3:int64") == 2
    assert "gradtools formula: formula: argument 0" in capsys.readouterr().err


def test_save_refuses_an_unknown_suffix_as_the_command_does(gt, tmp_path):
    from gradtools import GradtoolsError

    found = gt.formula(lambda x: 2.0 * x, gt.asarray(np.ones(3)))
    with pytest.raises(GradtoolsError, match=r"no form is known for the suffix '.png'"):
        found.save(tmp_path / "formula.png")
    found.save(tmp_path / "formula.TEX")
    assert (tmp_path / "formula.TEX").read_text(encoding="utf-8").endswith("\\]\n")
