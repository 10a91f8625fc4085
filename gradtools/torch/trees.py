"""Pytrees in PyTorch, as the waist speaks of them: None is an empty tree, as in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree  # the registry that torch.func itself uses


@dataclass(frozen=True)
class TreeDef:
    """A tree's structure, and which of PyTorch's leaves are there (are not None)."""

    spec: Any
    present: tuple[bool, ...]

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """What stands in `tree` at this tree's leaves."""
        leaves = self.spec.flatten_up_to(tree)
        return [leaf for leaf, there in zip(leaves, self.present, strict=True) if there]

    def __str__(self) -> str:
        marks = ["*" if there else None for there in self.present]
        return str(pytree.tree_unflatten(marks, self.spec)).replace("'*'", "*")


_LEAF = TreeDef(pytree.tree_structure(0), (True,))


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves that are not None, and the structure."""
    if isinstance(tree, torch.Tensor):  # the commonest tree
        return [tree], _LEAF
    leaves, spec = pytree.tree_flatten(tree)
    present = tuple([leaf is not None for leaf in leaves])
    return [leaf for leaf in leaves if leaf is not None], TreeDef(spec, present)


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """The tree with these leaves."""
    if treedef is _LEAF:
        return leaves[0]
    left = iter(leaves)
    full = [next(left) if there else None for there in treedef.present]
    return pytree.tree_unflatten(full, treedef.spec)


def leaf_paths(tree: Any) -> list[str]:
    """Where each leaf that is not None stands, such as `['w'][0]`."""
    found = pytree.tree_flatten_with_path(tree)[0]
    return [pytree.keystr(path) for path, leaf in found if leaf is not None]
