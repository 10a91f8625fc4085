"""Resolves the names in backticks in docstrings and comments of the package.

A name is known if it is a module or identifier of the package or the tests. A dotted name is known
if it can be imported. A dotted name is also known if all of its parts are known, unless the name
begins with a module of the package. A file name is known if the file exists.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gradtools"
_QUOTED = re.compile(r"(?<!`)``?(?!`)([^`\n]+?)``?(?!`)")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
_FILE = re.compile(r"(?<![\w./-])([\w./-]+\.(?:py|toml|txt|md))\b")
_SHORT = {"np": "numpy", "jnp": "jax.numpy", "lax": "jax.lax", "F": "torch.nn.functional"}


@dataclass(frozen=True, order=True)
class Reference:
    """A name in a docstring or comment, and its position."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}"


def references(path: Path) -> Iterator[Reference]:
    """Yield the names and file names in a file's docstrings and comments."""
    for line, text in _prose(path.read_text(encoding="utf-8")):
        for quoted in _QUOTED.findall(text):
            if _NAME.fullmatch(quoted) and not _FILE.fullmatch(quoted):
                yield Reference(str(path.relative_to(ROOT)), line, quoted.removesuffix("()"))
        for name in _FILE.findall(text):
            yield Reference(str(path.relative_to(ROOT)), line, name)


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and comments, except for doctest examples."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            for k, line in enumerate(node.value.value.splitlines()):
                if not line.lstrip().startswith((">>>", "...")):
                    yield node.lineno + k, line


def is_known(reference: Reference) -> bool:
    """Return whether the name of a reference exists."""
    name = reference.name
    if _FILE.fullmatch(name):
        here = (ROOT / reference.file).parent
        return (here / name).exists() or any(f"/{p}".endswith(f"/{name}") for p in _stems()[1])
    first, *rest = name.split(".")
    if not rest:
        return name in _identifiers() or name in _stems()[0] or _resolves(name)
    if first in _stems()[0] and first not in _identifiers():
        return any(_resolves(f"{module}.{'.'.join(rest)}") for module in _stems()[0][first])
    return _resolves(name) or {first, *rest} <= _identifiers()


@cache
def _stems() -> tuple[dict[str, list[str]], set[str]]:
    """Return the modules of the package by the last part of their names, and all file names."""
    stems: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        stems.setdefault(parts[-1], []).append(".".join(parts))
    folders = (PACKAGE, *(ROOT / name for name in ("tests", "examples", "benchmarks", "docs")))
    files = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.*")}
    return stems, {*files, *(path.name for path in ROOT.glob("*.*"))}


@cache
def _identifiers() -> frozenset[str]:
    """Return the identifiers and the words of strings in the package, and the names of tests."""
    found = {*dir(builtins), *keyword.kwlist}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            for field in ("id", "attr", "arg", "name", "asname"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    found |= {value, *value.split(".")}
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in texts:
                found |= set(re.findall(r"\w+", node.value))
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset(found)


@cache
def _resolves(name: str) -> bool:
    """Return whether the dotted name can be imported."""
    first, *rest = name.split(".")
    whole = [*_SHORT.get(first, first).split("."), *rest]
    if whole[0] == "gt":
        return any(_resolves(".".join(["gradtools", w, *whole[1:]])) for w in ("torch", "jax"))
    for k in range(len(whole), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(whole[:k]))
        except ImportError:  # the module does not exist or needs a missing package
            continue
        for part in whole[k:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
