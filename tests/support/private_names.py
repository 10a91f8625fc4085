"""Finds the private names of PyTorch and JAX that the package uses, by reading its source.

A private name begins with one underscore. It is the name of a module (`torch._C`), an import from
such a module, an attribute (`x._version`), or a string that names an attribute. Operators
(`torch.ops.aten._softmax`) do not count, because the dispatcher's public tables list them. Names of
the standard library and of gradtools also do not count as private names.

The module also finds patches of the frameworks' classes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "gradtools"
FRAMEWORKS = ("torch", "jax", "jaxlib", "functorch", "flax", "equinox", "optax", "keras")
ROOMS = (
    *("torch/_upstream.py", "jax/_upstream.py"),
    *(
        "seeing/torch/_upstream.py",
        "bridge/_upstream.py",
    ),
)
_STANDARD = {"_fields", "_replace", "_asdict", "_make", "_getframe", "_value2member_map_"}
_ASKING = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")
_TEXT = re.compile(rf"\b({'|'.join(FRAMEWORKS)})([./]\w+)*[./]_[a-zA-Z]\S*$")


@dataclass(frozen=True, order=True)
class Use:
    """A private name and its position in the package."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"gradtools/{self.file}:{self.line}: {self.name}"


def private_names() -> list[Use]:
    """Return every use of a private name of a framework in the package."""
    return sorted({Use(f, *found) for f, tree in _trees().items() for found in private_in(tree)})


def patches() -> list[Use]:
    """Return every line that assigns an attribute of a framework's class or module."""
    return sorted({Use(f, *found) for f, tree in _trees().items() for found in patches_in(tree)})


@cache
def _trees() -> dict[str, ast.Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.relative_to(PACKAGE).as_posix(): ast.parse(f.read_text()) for f in files}


# --- private names -----------------------------------------------------------------------


def private_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line number and name of each use of a private name in one file."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    operators = _names_of_operators(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if _root(module) != "gradtools":
                names = [f"{module}.{a.name}" for a in node.names]
                yield from ((node.lineno, n) for n in names if any(map(_is_private, n.split("."))))
            case ast.Import():
                names = [a.name for a in node.names if _root(a.name) != "gradtools"]
                yield from ((node.lineno, n) for n in names if any(map(_is_private, n.split("."))))
            case ast.Attribute() if id(node) not in inner:
                yield from _of_chain(node, operators)
            case ast.Constant(value=str(text)) if _TEXT.match(text):
                yield node.lineno, text
            case ast.Constant(value=str(text)) if text in _TOLD:
                yield node.lineno, text
            case ast.Call(func=ast.Name(id=asks) | ast.Attribute(attr=asks)) if asks in _ASKING:
                texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
                texts = [t for t in texts if isinstance(t, str) and not _TEXT.match(t)]
                found = [t for t in texts if any(map(_is_theirs, t.split(".")))]
                yield from ((node.lineno, t) for t in found)
            case ast.ClassDef():
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                if node.bases:
                    yield from ((m.lineno, m.name) for m in methods if m.name in _OF_MODULES)


def _of_chain(node: ast.Attribute, operators: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the private names in a chain `a.b.c` of framework modules and attributes."""
    parts, at = [node.attr], node.value
    while isinstance(at, ast.Attribute):
        parts, at = [at.attr, *parts], at.value
    if not isinstance(at, ast.Name):  # the base is not a name but, for example, a call
        yield from ((node.lineno, p) for p in parts if _is_theirs(p))
        return
    dotted = ".".join((at.id, *parts))
    if dotted.startswith(tuple(operators)):
        return
    if at.id in FRAMEWORKS and any(map(_is_private, parts)):
        yield node.lineno, dotted
        return
    for k, part in enumerate(parts):
        own = at.id in ("self", "cls") and k == 0 and part in _ours()
        if _is_theirs(part) and not own:
            yield node.lineno, part


def _names_of_operators(tree: ast.Module) -> set[str]:
    """Return the prefixes of operator names: `torch.ops.` and the aliases that a file assigns."""
    found = {"torch.ops."}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops"):
            found |= {f"{t.id}." for t in node.targets if isinstance(t, ast.Name)}
    return found


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _is_theirs(name: str) -> bool:
    """Return whether a private name belongs to a framework and not only to gradtools."""
    if not _is_private(name) or name in _STANDARD:
        return False
    return name not in _ours() or name in _TOLD


@cache
def _ours() -> set[str]:
    """Return the names that the package defines."""
    found = set()
    for tree in _trees().values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


# Private names of PyTorch's tensors, graphs and modules, listed because PyTorch may be missing.
_OF_TENSORS = frozenset(
    ("_version", "_base", "_grad", "_backward_hooks", "_values", "_indices", "_cdata", "_schema")
    + ("_is_view", "_sequence_nr", "_forward_cls", "_backward_cls")
)
_OF_MODULES = frozenset(
    ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks")
    + ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook")
    + ("_apply", "_load_from_state_dict", "_save_to_state_dict", "_call_impl")
    + ("_compiled_call_impl", "_origin_msg")
)
_TOLD = _OF_TENSORS | _OF_MODULES  # counted even if gradtools also defines the name


# --- patches -----------------------------------------------------------------------------


def patches_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the lines of one file that set an attribute of a framework's class or module."""
    theirs = {"upstream", *FRAMEWORKS}
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                theirs |= {a.asname for a in names if a.asname and _root(a.name) in FRAMEWORKS}
            case ast.ImportFrom(module=str(module)) if _root(module) in FRAMEWORKS:
                theirs |= {a.asname or a.name for a in node.names}
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if isinstance(value, ast.Attribute) and _first_name(value) in theirs:
                theirs.add(name)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) if _first_name(node) in theirs:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[holder, *_]):
                if _first_name(holder) in theirs:
                    yield node.lineno, ast.unparse(node)


def _first_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
