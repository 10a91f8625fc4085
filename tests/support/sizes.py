"""Reports the size of the code base: lines, imported files and long functions.

    python -m tests.support.sizes            # this tree
    python -m tests.support.sizes REVISION   # compares the tree with a revision

The closure of `MISSION` contains the package's files that a fresh process imports when it uses
every operator in `MISSION` in either framework.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LONG_FUNCTION, _LONG_FILE = 90, 600

MISSION = """
import sys
import numpy as np
import gradtools.{backend} as gt

x = gt.asarray(np.linspace(0.1, 1.0, 6, dtype=np.float32).reshape(3, 2))
y = gt.asarray(np.float32([0.5, 2.0]))
total = lambda a: gt.xp.sum(a**2)
loss = lambda x, y: gt.xp.sum((x * y) ** 3)
gt.value_and_grad(loss)(x, y), gt.jacobian(lambda y: y**2)(y), gt.hessian(total)(y)
gt.vjp(total, y), gt.jvp(total, (y,), (y,)), gt.linearize(total, y), gt.hvp(total, (y,), (y,))
gt.per_example_grad(lambda y, x: gt.xp.sum(x * y))(y, x)
gt.mixed_partial(lambda y, g: gt.xp.sum(y * g**3), lambda z: z**2, y, y, y)
gt.minimax_value_and_grad(loss, minimize=0, maximize=1)(x, y)
edits = (gt.reverse_gradient, gt.stop_gradient, lambda x: gt.scale_gradient(x, 2.0))
edits += (lambda x: gt.clip_gradient(x, 1.0), lambda x: gt.transform_gradient(x, lambda c: 2 * c))
edits += (lambda x: gt.replace_gradient(x, x), gt.straight_through(gt.xp.round))
for edit in edits:
    gt.grad(lambda x: total(edit(x)) + total(x))(x)
rule = gt.custom_rule(lambda x: x**2)
rule.defvjp(lambda x: (x**2, x), lambda x, c: (2 * x * c,))
kernel = gt.host_function(lambda x: np.sin(x))
kernel.defvjp(lambda x: (kernel(x), x), lambda x, c: (gt.xp.cos(x) * c,))
for f in (rule, kernel, gt.checkpoint(total)):
    gt.grad(lambda x: gt.xp.sum(f(x)))(x)
gt.grad(lambda x: total(gt.chunked(lambda x: x**2, 2)(x)))(x)
G = gt.frozen(lambda z: gt.xp.tanh(z))
gt.grad(lambda y: total(gt.grad(lambda z: gt.xp.sum(y * G(z)))(y)))(y)
gt.microbatched_value_and_grad(lambda y, x: gt.xp.mean(x * y), 2)(y, x)
gt.vmap(total)(x)
"""
_FILES = """
files = sorted(
    m.__file__ for n, m in list(sys.modules.items())
    if n.split(".")[0] == "gradtools" and getattr(m, "__file__", None)
)
print("\\n".join(files))
"""


@dataclass(frozen=True)
class Sizes:
    """Line counts of one source tree, and its long functions and files."""

    figures: dict[str, int]
    functions: list[str]  # functions that exceed the limit of lines
    files: list[str]


def sizes_of(root: Path) -> Sizes:
    """Return the `Sizes` of the checkout at `root`."""
    package, tests = sorted(root.glob("gradtools/**/*.py")), sorted(root.glob("tests/**/*.py"))
    closure = _closure(root)
    functions = [f for path in package for f in _long_functions(root, path)]
    files = [str(p.relative_to(root)) for p in package if _lines(p) > _LONG_FILE]
    wing = [p for p in (root / "gradtools/torch").rglob("*.py") if "seeing" not in p.parts]
    formula = [p for p in package if "formulas" in p.parts or p.stem == "translating"]
    figures = {
        "package, lines": sum(map(_lines, package)),
        "package, files": len(package),
        "lines imported by MISSION": sum(map(_lines, closure)),
        "files imported by MISSION": len(closure),
        "lines in PyTorch's backend without seeing": sum(map(_lines, wing)),
        "lines in formula with both translators": sum(map(_lines, formula)),
        "tests, lines": sum(map(_lines, tests)),
        f"functions over {_LONG_FUNCTION} lines": len(functions),
        f"files over {_LONG_FILE} lines": len(files),
    }
    return Sizes(figures, functions, files)


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _closure(root: Path) -> list[Path]:
    """Return the files that a process imports when it uses every operator in `MISSION`."""
    found: set[Path] = set()
    for backend in ("torch", "jax"):
        env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
        program = (MISSION + _FILES).replace("{backend}", backend)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True, text=True, check=True, env=env, cwd=root,
        )  # fmt: skip
        found |= {Path(line) for line in done.stdout.splitlines()}
    return sorted(p for p in found if p.is_relative_to(root))


def _long_functions(root: Path, path: Path) -> Iterator[str]:
    """Yield the functions that exceed `_LONG_FUNCTION` lines, not counting the docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            if (node.end_lineno or 0) - first.lineno >= _LONG_FUNCTION:
                yield f"{path.relative_to(root)}:{node.lineno} {node.name}"


def main(revision: str | None = None) -> None:
    """Print the table of sizes, optionally with the sizes of a Git revision."""
    now, before = sizes_of(ROOT), None
    if revision:
        with tempfile.TemporaryDirectory() as place:
            archive = subprocess.run(
                ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
            before = sizes_of(Path(place))
    print(f"{'':42}{'before' if before else '':>9}{'now':>9}")
    for name, figure in now.figures.items():
        print(f"{name:42}{before.figures[name] if before else '':>9}{figure:>9}")
    for line in (*now.functions, *now.files):
        print(" ", line)


if __name__ == "__main__":
    main(*sys.argv[1:])
