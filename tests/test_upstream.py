"""What is private to a framework stands in one room of each wing, and nowhere else."""

from __future__ import annotations

import ast

import private_names as names
import pytest


def test_no_file_but_the_room_of_its_wing_uses_a_private_name_of_a_framework():
    found = [use for use in names.private_names() if use.file not in names.ROOMS]
    assert not found, "\n".join(["put these into the wing's _upstream.py:", *map(str, found)])


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch._C._functorch.peek_interpreter_stack()",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "import jax\nx = jax._src.core.Trace",
        "from jax._src import core",
        "def f(x):\n    return x._version",
        "def f(m):\n    return m._forward_hooks.values()",
        "def f(node):\n    return getattr(node, '_saved_self')",
        "import sys\nx = 'torch._dynamo' in sys.modules",
        "KEYS = ('_buffers',)",
        "import torch\nclass M(torch.nn.Module):\n    def _apply(self, fn):\n        return self",
    ],
)
def test_the_sweep_sees_a_private_name(text):
    assert list(names.private_in(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\naten = torch.ops.aten\nx = aten._softmax.default, torch.ops.aten._to_copy",
        "import sys\nx = sys._getframe(1)",
        "class A:\n    def f(self):\n        self._backend = 1\n        return self._backend",
        "x = point._replace(y=1)",
        "from gradtools.torch._upstream import pytree",
    ],
)
def test_the_sweep_passes_by_operators_ours_and_the_standard_library(text):
    assert not list(names.private_in(ast.parse(text)))


@pytest.mark.parametrize("room", names.ROOMS)
def test_each_entry_of_a_room_says_what_it_is_for(room):
    """A text stands behind a name or a group of names, or is a function's docstring."""
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
