"""Flattens pytrees in PyTorch, with JAX's convention that None is an empty tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gradtools.errors import GradtoolsError
from gradtools.integrations.containers import Containers, OpenedTree
from gradtools.torch._upstream import pytree
from gradtools.torch.compiling import uncompiled
from gradtools.torch.functorch_wrappers import PLAIN


@dataclass(frozen=True)
class TreeDef:
    """The structure of a pytree.

    Attributes:
        spec: PyTorch's TreeSpec, in which None is a leaf.
        present: For each leaf of `spec`, whether it is not None.
        keys: The keys if the tree is a flat dictionary of tensors, which has a fast path; otherwise
            None.
    """

    spec: Any
    present: tuple[bool, ...]
    keys: tuple[Any, ...] | None = field(default=None, compare=False)

    @property
    def num_leaves(self) -> int:
        return sum(self.present)

    def __hash__(self) -> int:
        return hash(self.present)  # hashing the spec is slow, and collisions are rare

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Returns the subtrees of `tree` at the leaves of this structure."""
        if self is _LEAF:
            return [tree]
        if self.keys is not None and type(tree) is dict and tuple(tree) == self.keys:
            return [*tree.values()]
        leaves = self.spec.flatten_up_to(tree)
        return [leaf for leaf, there in zip(leaves, self.present, strict=True) if there]

    def __str__(self) -> str:
        marks = ["*" if there else None for there in self.present]
        return str(pytree.tree_unflatten(marks, self.spec)).replace("'*'", "*")


_LEAF = TreeDef(pytree.tree_structure(0), (True,))
_NONE = TreeDef(pytree.tree_structure(None), (False,))
_NO_KEYWORDS = TreeDef(pytree.tree_structure({}), ())
_TUPLES = [TreeDef(pytree.tree_structure((0,) * n), (True,) * n) for n in range(8)]


_ARRAYS = (torch.Tensor, np.ndarray)
_LEAVES = (*_ARRAYS, torch.nn.Module)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves that are not None, and the structure (a `TreeDef` or `OpenedTree`)."""
    # Fast paths for common trees, since PyTorch's pytrees are slow.
    if isinstance(tree, _LEAVES):
        return [tree], _LEAF
    if type(tree) is tuple and len(tree) < 8 and all(map(_is_tensor, tree)):
        return list(tree), _TUPLES[len(tree)]
    if tree is None:
        return [], _NONE
    if type(tree) is dict and not tree:
        return [], _NO_KEYWORDS
    if is_flat(tree):
        return [*tree.values()], _dict_of((*tree,))
    compiling = torch.compiler.is_dynamo_compiling()
    if type(tree) is list and not compiling and all(map(_is_tensor, tree)):
        return [*tree], _list_of(len(tree))
    result = _flattened(tree)
    if compiling and not any(map(_may_hold_tensors, result[0])):
        return result
    return _in_python(_CONTAINERS.opened, *result)


def is_flat(tree: Any) -> bool:
    """Returns whether a tree is a flat dictionary of tensors, such as a module's parameters."""
    if type(tree) is not dict or torch.compiler.is_dynamo_compiling():
        return False
    return {*map(type, tree.values())} <= PLAIN or all(map(_is_tensor, tree.values()))


@lru_cache(maxsize=64)
def _dict_of(keys: tuple[Any, ...]) -> TreeDef:
    spec = pytree.tree_structure(dict.fromkeys(keys, 0))
    return TreeDef(spec, (True,) * len(keys), keys)


@lru_cache(maxsize=64)
def _list_of(count: int) -> TreeDef:
    return TreeDef(pytree.tree_structure([0] * count), (True,) * count)


def _may_hold_tensors(x: Any) -> bool:
    """Returns whether a leaf is a container that may contain tensors.

    Dynamo can trace this function.
    """
    if isinstance(x, Mapping):
        parts = list(x.values())
    else:
        parts = [getattr(x, name, None) for name in getattr(x, "__dataclass_fields__", ())]
    return not all(part is None or isinstance(part, _CONSTANTS) for part in parts)


_CONSTANTS = (str, bool, int, float, complex, torch.dtype, torch.device)


def _in_python(fun: Callable[..., Any], *args: Any) -> Any:
    """Calls `fun(*args)`, with a graph break in compiled code."""
    if not torch.compiler.is_dynamo_compiling():
        return fun(*args)
    return uncompiled(fun, *args)


def flatten_arrays(tree: Any) -> tuple[list[Any], Any, list[str | None]]:
    """Returns the leaves, the structure, and the kinds: "real", "complex", "exact" or None."""
    if isinstance(tree, torch.Tensor):
        return [tree], _LEAF, ["real" if tree.is_floating_point() else _kind_of(tree)]
    leaves, treedef = flatten(tree)
    if getattr(treedef, "keys", None) is None:
        return leaves, treedef, [_kind_of(x) for x in leaves]
    kinds = {dtype: _kind_of(x) for dtype, x in {x.dtype: x for x in leaves}.items()}
    return leaves, treedef, [kinds[x.dtype] for x in leaves]


def _kind_of(x: Any) -> str | None:
    if not isinstance(x, torch.Tensor):
        return None
    return "real" if x.is_floating_point() else "complex" if x.is_complex() else "exact"


def _flattened(tree: Any) -> tuple[list[Any], TreeDef]:
    leaves, spec = pytree.tree_flatten(tree)
    present = tuple([leaf is not None for leaf in leaves])
    return [leaf for leaf in leaves if leaf is not None], TreeDef(spec, present)


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    if type(treedef) is OpenedTree:
        return _in_python(_CONTAINERS.closed, treedef, leaves)
    if treedef is _LEAF:
        return leaves[0]
    if treedef is _NONE:
        return None
    if treedef is _NO_KEYWORDS:
        return {}
    if len(treedef.present) < 8 and treedef is _TUPLES[len(treedef.present)]:
        return tuple(leaves)
    if treedef.keys is not None:
        return dict(zip(treedef.keys, leaves, strict=True))
    left = iter(leaves)
    full = [next(left) if there else None for there in treedef.present]
    return pytree.tree_unflatten(full, treedef.spec)


def leaf_paths(tree: Any) -> list[str]:
    """Returns the path of each leaf that is not None, such as `['w'][0]`."""
    if is_flat(tree):
        return [f"[{key!r}]" for key in tree]
    if torch.compiler.is_dynamo_compiling() and not any(
        map(_may_hold_tensors, _flattened(tree)[0])
    ):
        return _leaf_paths(tree)
    return _in_python(_CONTAINERS.paths, tree)


def _leaf_paths(tree: Any) -> list[str]:
    result = pytree.tree_flatten_with_path(tree, is_leaf=_is_nameless)[0]
    return [
        pytree.keystr(path) + below
        for path, leaf in result
        if leaf is not None
        for below in (_paths_in(leaf) if _is_nameless(leaf) else [""])
    ]


def _is_nameless(x: Any) -> bool:
    """Returns whether x is a container that was registered without key paths."""
    node = pytree.SUPPORTED_NODES.get(type(x))
    return node is not None and node.flatten_with_keys_fn is None


def _paths_in(container: Any) -> list[str]:
    """Returns the leaf paths in a container that was registered without key paths."""
    parts, context = pytree.SUPPORTED_NODES[type(container)].flatten_fn(container)
    named = isinstance(context, (list, tuple)) and len(context) == len(parts)
    keys = context if named else range(len(parts))
    return [f"[{k!r}]{below}" for k, x in zip(keys, parts, strict=True) for below in _leaf_paths(x)]


_CONTAINERS = Containers(
    "torch", _flattened, unflatten, _leaf_paths, lambda x: isinstance(x, _ARRAYS)
)
# Pytrees in which a module is a leaf, like an array.
WITH_MODULES = Containers(
    "torch", _flattened, unflatten, _leaf_paths, lambda x: isinstance(x, _LEAVES)
)


def flatten_static(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves, and the structure in a form that dynamo can embed as a constant."""
    if not torch.compiler.is_dynamo_compiling():
        return flatten(tree)
    leaves: list[Any] = []
    return leaves, _flattened_static(tree, leaves)


def _flattened_static(tree: Any, leaves: list[Any]) -> Any:
    if tree is None:
        return "none"
    if type(tree) is dict:
        return ("dict", *[(key, _flattened_static(tree[key], leaves)) for key in sorted(tree)])
    if type(tree) in (tuple, list):
        return (type(tree).__name__, *[_flattened_static(x, leaves) for x in tree])
    leaves.append(tree)
    return "leaf"


def static_treedef(treedef: TreeDef) -> Any:
    """Converts a TreeDef to the structure that `flatten_static` returns in compiled code."""
    leaves: list[Any] = []
    tree = unflatten(treedef, [0] * treedef.num_leaves)
    structure = _flattened_static(tree, leaves)
    if any(type(x) is not int for x in leaves):
        kind = next(type(x).__name__ for x in leaves if type(x) is not int)
        raise GradtoolsError(
            f"in compiled code a custom rule must return tuples, lists and dicts of tensors, not "
            f"a {kind}."
        )
    return structure


def unflatten_static(structure: Any, leaves: Sequence[Any]) -> Any:
    """Builds the tree of a TreeDef or a static structure from the given leaves."""
    if isinstance(structure, (TreeDef, OpenedTree)):
        return unflatten(structure, leaves)
    return _unflattened_static(structure, list(leaves))


def treedef_of_static(structure: Any) -> Any:
    """Returns the TreeDef of a structure that `flatten_static` returned."""
    if isinstance(structure, (TreeDef, OpenedTree)):
        return structure
    return flatten(_unflattened_static(structure, [0] * str(structure).count("'leaf'") or [0]))[1]


def _unflattened_static(structure: Any, leaves: list[Any]) -> Any:
    """Builds the tree, and removes the leaves from the front of the list."""
    if structure == "none":
        return None
    if structure == "leaf":
        return leaves.pop(0)
    kind, *children = structure
    if kind == "dict":
        return {key: _unflattened_static(child, leaves) for key, child in children}
    if kind == "tuple":
        return tuple([_unflattened_static(child, leaves) for child in children])
    return [_unflattened_static(child, leaves) for child in children]
