"""Each backend accesses private names of its framework only in its `_upstream` modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support import private_names as names

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_file_but_the_room_of_its_wing_uses_a_private_name_of_a_framework():
    found = [use for use in names.private_names() if use.file not in names.ROOMS]
    assert not found, "\n".join(["move to the backend's _upstream.py:", *map(str, found)])


SEEN = [
    (names.private_in, "import torch\nx = torch._C._functorch.peek_interpreter_stack()"),
    (names.private_in, "from torch._ops import OpOverload"),
    (names.private_in, "from torch.utils import _pytree as pytree"),
    (names.private_in, "import jax\nx = jax._src.core.Trace"),
    (names.private_in, "from jax._src import core"),
    (names.private_in, "def f(x):\n    return x._version"),
    (names.private_in, "def f(m):\n    return m._forward_hooks.values()"),
    (names.private_in, "def f(node):\n    return getattr(node, '_saved_self')"),
    (names.private_in, "import sys\nx = 'torch._dynamo' in sys.modules"),
    (names.private_in, "KEYS = ('_buffers',)"),
    (
        names.private_in,
        "import torch\nclass M(torch.nn.Module):\n    def _apply(self, fn):\n        return self",
    ),
    (names.patches_in, "import torch\ntorch.nn.Module.__call__ = f"),
    (
        names.patches_in,
        "from torch.autograd import Function\ndef g():\n    setattr(Function, 'apply', f)",
    ),
    (
        names.patches_in,
        "from gradtools.torch import _upstream as upstream\n_F = upstream.Functions\ndel _F.apply",
    ),
    (names.patches_in, "import jax.numpy as jnp\njnp.sin = f"),
]


@pytest.mark.parametrize(("sweep", "text"), SEEN)
def test_the_sweeps_see_what_they_look_for(sweep, text):
    assert list(sweep(ast.parse(text)))


@pytest.mark.sweep_at(
    "class A:\\n    def f(self):\\n        self._backend = 1\\n        return self._backend"
)
@pytest.mark.parametrize(
    "text",
    [
        "import torch\naten = torch.ops.aten\nx = aten._softmax.default, torch.ops.aten._to_copy",
        "class A:\n    def f(self):\n        self._backend = 1\n        return self._backend",
        "x = point._replace(y=1)",
        "from gradtools.torch._upstream import pytree",
    ],
)
def test_the_sweep_passes_by_operators_ours_and_the_standard_library(text):
    assert not list(names.private_in(ast.parse(text)))


@pytest.mark.parametrize("room", names.ROOMS)
def test_each_entry_of_a_room_says_what_it_is_for(room):
    """Every name, group of names and function in an `_upstream` module needs a docstring."""
    tree = ast.parse((names.PACKAGE / room).read_text())
    untold: list[str] = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not ast.get_docstring(node):
            untold.append(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_private(node):
            grouped = isinstance(after, ast.Assign | ast.AnnAssign)
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not (grouped or told):
                untold.append(ast.unparse(node))
    assert not untold


def _is_private(node: ast.AST) -> bool:
    return any(list(names.private_in(ast.Module([node], []))))


# --- patches -------------------------------------------------------------------------------------


def test_classes_of_a_framework_are_patched_in_the_rooms_alone():
    found = [use for use in names.patches() if use.file not in names.ROOMS]
    assert not found, "\n".join(
        ["move these patches to seeing/torch/thread_patches.py:", *map(str, found)]
    )


# --- code that upstream maintainers would reject -------------------------------------------------

REFUSED = {
    "memory that is read by address": r"^import ctypes|from_address\(",
    "an import hook": r"\bmeta_path\b",
    "a global registration of an operator": r"\blibrary\.Library\(",
    "an inspection of bytecode": r"\bopmap\b",
}


@pytest.mark.slow_at(
    "an import hook", "a global registration of an operator", "an inspection of bytecode"
)
@pytest.mark.parametrize("pattern", REFUSED.values(), ids=REFUSED)
def test_what_a_maintainer_would_refuse_is_written_down_in_the_rooms(pattern):
    """An `_upstream` module must name each file whose source matches a pattern in `REFUSED`."""
    told = {room.partition("/")[0]: (names.PACKAGE / room).read_text() for room in names.ROOMS}
    found = []
    for path in sorted({*names.PACKAGE.rglob("*.py")} - {names.PACKAGE / r for r in names.ROOMS}):
        wing = path.relative_to(names.PACKAGE).parts[0]
        if re.search(pattern, path.read_text(), re.MULTILINE):
            found.append(path)
            room = told.get(wing) or "".join(told.values())
            assert re.search(rf"`{path.stem}(\.\w+)?`", room), path
    assert found
