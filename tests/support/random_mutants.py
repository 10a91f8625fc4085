"""Runs random mutation tests of the files that the core operators import.

    python -m tests.support.random_mutants --count 300 --seed 1           # survivors are listed
    python -m tests.support.random_mutants --count 20 --own edits chunks  # files by parts of names

The changes are the same as in mutation tools (cosmic-ray, mutmut): a comparison is inverted, +
becomes -, a number changes, a `not` is dropped, `and` becomes `or`, a statement is deleted, or a
function returns None. The tests that `mutants.toml` lists for the file and the tests that name its
module run first; if they all pass, the whole quick tier runs. A surviving mutant shows a line that
no quick test covers, or a change without an effect.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue

from tests.support import mutants
from tests.support.mutants import ROOT, Mutant, copied, trial

PACKAGE = ROOT / "gradtools"
_FILES = 5  # maximum number of test files that run before the quick tier
_CLOSURE = """
import sys
import numpy as np
import gradtools.{backend} as gt
if "{backend}" == "jax":
    import jax
    jax.config.update("jax_enable_x64", True)
x = gt.asarray(np.array([0.3, 0.5]))
f = lambda x: gt.xp.sum(gt.reverse_gradient(x) ** 3)
gt.value_and_grad(f)(x), gt.hvp(f, (x,), (x,)), gt.jvp(lambda x: x * x, (x,), (x,))
rule = gt.custom_rule(lambda x: x * x)
rule.defvjp(lambda x: (rule(x), x), lambda x, ct: (2 * x * ct,))
for wrap in (gt.checkpoint, gt.frozen, lambda g: gt.chunked(g, 1), gt.straight_through):
    gt.grad(lambda x: gt.xp.sum(wrap(rule)(x)))(x)
gt.per_example_grad(lambda w, x: gt.xp.sum(w * x))(x, x)
gt.grad(lambda x: gt.xp.sum(gt.clip_gradient(x, max_norm=1.0)))(x)
print("\\n".join(m.__file__ for n, m in sys.modules.items() if n.startswith("gradtools.")))
"""
_TURNED = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


@dataclass(frozen=True)
class RandomMutant(Mutant):
    """A change at one position in a file."""

    start: int
    end: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_short(self.was)}  ->  {_short(self.now)}"

    def of(self, package: Path) -> str:
        """Return the text of the file with the change."""
        text = (package / self.file).read_bytes()
        if text[self.start : self.end].decode() != self.was:
            raise ValueError(f"{self}: the file has changed")
        return (text[: self.start] + self.now.encode() + text[self.end :]).decode()


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 70 else f"{text[:66]} ..."


def closure() -> list[Path]:
    """Return the files that the core operators import in at least one of the backends."""
    found: set[Path] = set()
    for backend in ("torch", "jax"):
        command = [sys.executable, "-c", _CLOSURE.format(backend=backend)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found |= {Path(line) for line in done.stdout.split() if line.endswith(".py")}
    return sorted(found)


def changes(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield every syntax node that can be changed, with its new text."""
    tree = ast.parse(source)
    fixed = {id(n) for node in ast.walk(tree) for n in _not_run(node)}
    for node in ast.walk(tree):
        if id(node) not in fixed:
            new = _changed(node)
            if new is not None:
                yield node, new


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield syntax nodes that must not be changed, such as annotations, docstrings and imports.

    `strict=True` of zip is also skipped, because a correct program behaves the same without it.
    """
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield from ast.walk(node.returns)
    if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list):
        yield from ast.walk(node)
    if isinstance(node, ast.keyword) and node.arg == "strict":
        yield from ast.walk(node)
    if isinstance(node, ast.Raise | ast.JoinedStr):
        yield from ast.walk(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield from ast.walk(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        yield from ast.walk(node)


def _changed(node: ast.AST) -> str | None:
    """Return the changed text of a syntax node, or None if the node cannot be changed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        ops = [_TURNED[type(node.ops[0])](), *node.ops[1:]]
        return f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        return f"({ast.unparse(ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"bool({ast.unparse(node.operand)})"
    if isinstance(node, ast.BoolOp):
        op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"({ast.unparse(ast.BoolOp(op, node.values))})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return str(not node.value) if isinstance(node.value, bool) else repr(node.value + 1)
    if isinstance(node, ast.Return) and ast.unparse(node) not in ("return", "return None"):
        return "return None"
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return "pass" if called or isinstance(node, ast.AugAssign) else None


def drawn(files: list[Path], count: int, seed: int) -> list[RandomMutant]:
    """Sample `count` mutants uniformly from all changes of all files."""
    every: list[RandomMutant] = []
    for path in files:
        source = path.read_text(encoding="utf-8")
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node, new in changes(source):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            was, name = source.encode()[start:end].decode(), str(path.relative_to(PACKAGE))
            every.append(RandomMutant(name, was, new, tests_of(name), start, end, node.lineno))
    return random.Random(seed).sample(every, min(count, len(every)))


@lru_cache
def tests_of(name: str) -> tuple[str, ...]:
    """Return test files for a module: from mutants.toml, by the module's name and by its folder."""
    listed = [test for mutant in mutants.read() if mutant.file == name for test in mutant.tests]
    module = "gradtools." + name.removesuffix(".py").replace("/", ".")
    words = re.compile(rf"\b{re.escape(module)}\b|\b{re.escape(Path(name).stem)}\b")
    wing = next((w for w in ("torch", "jax") if name.startswith(f"{w}/")), "")
    named = [
        test
        for test, text in _texts().items()
        if words.search(text) or test.endswith(f"/test_{Path(name).stem}.py")
    ]
    named.sort(key=lambda test: (Path(name).stem not in test, wing not in test))
    folder = Path(name).parent
    near = [test for m in mutants.read() if Path(m.file).parent == folder for test in m.tests]
    near.sort(key=near.count, reverse=True)  # These files test other modules in the same folder.
    return tuple(dict.fromkeys([*listed, *named, *near]))[:_FILES]


@lru_cache
def _texts() -> dict[str, str]:
    """Return the contents of all test files by path."""
    folder = ROOT / "tests"
    paths = sorted(folder.rglob("test_*.py"))
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8") for p in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of file names; default: all files")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--own", action="store_true", help="run only the tests of the mutant's file"
    )
    options = parser.parse_args()
    files = [f for f in closure() if not options.words or any(w in str(f) for w in options.words)]
    chosen = drawn(files, options.count, options.seed)
    survived, copies = [], SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder:
        for k in range(options.workers):
            copies.put(copied(Path(folder) / str(k)))
        with ThreadPoolExecutor(options.workers) as pool:
            tried = pool.map(lambda m: trial(copies, options.own, m), chosen)
            for k, (mutant, found) in enumerate(tried, start=1):
                print(f"[{k}/{len(chosen)}] {found}: {mutant}", flush=True)
                survived += [mutant] if found == "survived" else []
    print(f"{len(chosen) - len(survived)} of {len(chosen)} random mutants are detected; survivors:")
    print("\n".join(map(str, survived)) or "none")


if __name__ == "__main__":
    main()
