"""Which gradient belongs to which buffer: a target and gradients walked in parallel.

The target is a pytree of parameters (PyTorch) or of the arrays of a buffer (JAX). The gradients may
name a part of it: a dict may have fewer keys, and None leaves everything below it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from gradtools.arguments.wording import in_words, with_article
from gradtools.errors import GradtoolsError


class TargetLeaf(NamedTuple):
    """A leaf of the target and the gradient meant for it.

    Attributes:
        path: The leaf's path in the target.
        target: The parameter (PyTorch) or the buffer's array (JAX).
        grad: The gradient, or None to leave this leaf alone.
    """

    path: str
    target: Any
    grad: Any


def paired(trees: Any, caller: str, target: Any, grads: Any) -> list[TargetLeaf]:
    """One entry for each leaf of target, in flattening order.

    trees: A backend's module of pytree functions.
    """
    leaves, treedef = trees.flatten(target)
    numbered = trees.unflatten(treedef, list(range(len(leaves))))
    grad_of = dict(_TargetWalk(trees, caller).pairs(numbered, grads, ""))
    paths = trees.leaf_paths(target)
    return [
        TargetLeaf(path, leaf, grad_of.get(i))
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
    ]


@dataclass(frozen=True)
class _TargetWalk:
    """Walks the target, whose leaves are replaced by their indices, in parallel to the gradients.

    A dict of gradients may have fewer keys than the target, and None skips a subtree.
    """

    trees: Any
    caller: str

    def pairs(self, numbered: Any, grads: Any, path: str) -> Iterator[tuple[int, Any]]:
        """`(index of the target's leaf, gradient)` for every leaf that grads names."""
        if grads is None:
            return iter(())
        if isinstance(numbered, int):
            return self._leaf(numbered, grads, path)
        if isinstance(numbered, Mapping):
            return self._mapping(numbered, grads, path)
        if isinstance(numbered, (list, tuple)):
            return self._sequence(numbered, grads, path)
        return self._node(numbered, grads, path)

    def _leaf(self, number: int, grads: Any, path: str) -> Iterator[tuple[int, Any]]:
        leaves = self.trees.flatten(grads)[0]
        if len(leaves) != 1 or leaves[0] is not grads:
            self._refuse(path, grads, "one array, as in the target")
        yield number, grads

    def _mapping(
        self, numbered: Mapping[Any, Any], grads: Any, path: str
    ) -> Iterator[tuple[int, Any]]:
        if not isinstance(grads, Mapping):
            self._refuse(path, grads, f"a dict with keys among {_listed(numbered)}")
        for key in grads:
            below = f"{path}[{key!r}]"
            if key not in numbered:
                raise GradtoolsError(
                    f"{self.caller}: grads{below} has no place in the target, whose keys there are "
                    f"{_listed(numbered)}. Give gradients under the target's names; some of them "
                    "may be left out."
                )
            yield from self.pairs(numbered[key], grads[key], below)

    def _sequence(self, numbered: Any, grads: Any, path: str) -> Iterator[tuple[int, Any]]:
        if not isinstance(grads, (list, tuple)) or len(grads) != len(numbered):
            self._refuse(path, grads, f"a sequence of {len(numbered)} (None leaves an entry alone)")
        fields = getattr(numbered, "_fields", None)
        for i, (below, grad) in enumerate(zip(numbered, grads, strict=True)):
            name = f".{fields[i]}" if fields else f"[{i}]"
            yield from self.pairs(below, grad, path + name)

    def _node(self, numbered: Any, grads: Any, path: str) -> Iterator[tuple[int, Any]]:
        leaves, treedef = self.trees.flatten(numbered)
        if len(leaves) == 1 and leaves[0] is numbered:  # a dataclass, which `unflatten` rebuilt
            if type(grads) is not type(numbered):
                self._refuse(path, grads, f"a {type(numbered).__name__}, as in the target")
            for name, below in vars(numbered).items():
                yield from self.pairs(below, getattr(grads, name, None), f"{path}.{name}")
            return
        try:
            given = treedef.flatten_up_to(grads)
        except (ValueError, TypeError):
            self._refuse(path, grads, f"the target's structure {in_words(treedef)}")
        for i, grad in zip(leaves, given, strict=True):
            if grad is not None:
                yield from self._leaf(i, grad, path)

    def _refuse(self, path: str, grads: Any, expected: str) -> None:
        came = with_article(type(grads).__name__)
        size = f" of {len(grads)}" if isinstance(grads, (list, tuple)) else ""
        raise GradtoolsError(
            f"{self.caller}: grads{path} is {came}{size}; expected {expected}. "
            "Give the gradients the target's structure."
        )


def _listed(keys: Any, most: int = 8) -> str:
    names = [repr(key) for key in keys]
    return ", ".join(names[:most] + ["..."] * (len(names) > most)) or "none"


def refuse(caller: str, came: str, expected: str, fix: str) -> NoReturn:
    """Raises for a parameter, a buffer or a gradient that does not fit."""
    raise GradtoolsError(f"{caller}: {came}; expected {expected}. {fix}")
