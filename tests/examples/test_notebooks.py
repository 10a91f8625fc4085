"""Every cell of the notebooks runs and reproduces its stored output except for numbers."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDS = {
    "contrastive_in_little_memory": ["jax", "flax", "optax", "sklearn"],
    "domain_adaptation": ["torch", "sklearn", "scipy", "matplotlib"],
    "porting_a_network": ["torch", "jax", "flax"],
}


@pytest.fixture
def runner(monkeypatch):
    # run.py adds this path only at its first import
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("run")


def words(outputs: list[dict]) -> list[str]:
    """Return the MIME types and the text of the outputs without numbers and spaces."""
    said = []
    for output in outputs:
        forms = output.get("data", {"text/plain": output.get("text")})
        said += [*sorted(forms), re.sub(r"[-+\d.e%\s]+", "#", "".join(forms["text/plain"]))]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_what_is_kept_is_what_it_gives(path, runner, default_precision):
    for package in NEEDS[path.stem]:
        pytest.importorskip(package)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    kept = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = runner.run(notebook, path.stem)
    for number, (now, before) in enumerate(zip(found, kept, strict=True)):
        told = f"code cell {number} of {path.stem}: python examples/notebooks/run.py {path.stem}"
        assert words(now) == words(before), told


def test_every_notebook_shows_something_of_each_kind_that_it_should():
    kept = {path.stem: path.read_text(encoding="utf-8") for path in NOTEBOOKS}
    assert kept.keys() == NEEDS.keys()
    together = "".join(kept.values())
    for form in ("image/png", "text/html", "text/latex", "stdout"):
        assert form in together


def test_a_cell_gives_what_it_prints_and_the_value_of_its_last_line(runner):
    assert runner.run_cell("print(1)\nx = 2", "a", {}) == [
        {"output_type": "stream", "name": "stdout", "text": ["1\n"]}
    ]
    (output,) = runner.run_cell("x = 2\nx + 1", "a", {})
    assert output["data"] == {"text/plain": ["3"]}
    assert runner.run_cell("None", "a", {}) == []


def test_a_cell_that_fails_is_seen(runner):
    with pytest.raises(ZeroDivisionError):
        runner.run({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}, "a")


def test_a_changed_word_is_seen_and_a_changed_digit_is_not():
    text = lambda said: [{"output_type": "stream", "name": "stdout", "text": [said]}]
    assert words(text("loss 1.25e-3 left")) == words(text("loss -7 left"))
    assert words(text("loss 1 left")) != words(text("loss 1 right"))
