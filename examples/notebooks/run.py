"""Runs the notebooks in this folder and stores their cells' outputs.

    python examples/notebooks/run.py [NAME ...]

The program executes cells without Jupyter and stores their printed output and the value of the last
line in its richest representation. The site shows this output, and a test
(`tests/examples/test_notebooks.py`) compares the stored output with the current output.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import linecache
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent))  # lets cells import the programs in examples/
FORMS = {"_repr_html_": "text/html", "_repr_latex_": "text/latex"}


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """Runs the code cells in order in a new namespace; returns the outputs of each cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            outputs.append(run_cell("".join(cell["source"]), f"{name} [{number}]", names))
    return outputs


def run_cell(source: str, file: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one cell; returns its printed output and the value of a final expression."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), file, "exec"), names)
        expression = ast.Expression(last.value) if last else ast.parse("None", mode="eval")
        value = eval(compile(expression, file, "eval"), names)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": None, "metadata": {}}
        outputs.append({**shown, "data": display(value)})
    return outputs


def display(value: Any) -> dict[str, Any]:
    """Returns a value as text and, if available, in its first rich representation."""
    data: dict[str, Any] = {"text/plain": str(value).splitlines(keepends=True)}
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png", dpi=80)
        return {"image/png": base64.b64encode(file.getvalue()).decode(), **data}
    for method, kind in FORMS.items():
        if hasattr(type(value), method):
            return {kind: getattr(value, method)().splitlines(keepends=True), **data}
    return data


def keep(path: Path) -> None:
    """Runs one notebook and writes the outputs to the notebook file."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, outputs in zip(codes, run(notebook, path.stem), strict=True):
        cell["outputs"] = outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        print(name, flush=True)
        keep(FOLDER / f"{name}.ipynb")
