"""Treats user-defined dicts and dataclasses as pytrees, without registering them.

A tokenizer's BatchEncoding is a `UserDict`, and a model's output is often a dataclass. These
classes are not registered as pytrees, so a framework treats their instances as single leaves. A
backend's `flatten` also flattens such containers: the arrays in a container become leaves of the
tree, and the structure records how to rebuild the container. A container without arrays (such as a
configuration) and a callable container remain leaves.

All operators flatten their arguments with this module, which rejects arrays of the other framework,
because PyTorch and JAX treat foreign arrays as constants without derivatives.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from gradtools.foreign_arrays import foreign_class, is_foreign, refuse_foreign

T = TypeVar("T")


@dataclass(frozen=True)
class OpenedContainer:
    """The structure of a container that was flattened into its parts.

    Attributes:
        kind: The class of the container.
        keys: The container's keys, or the names of its fields.
        treedef: The tree structure of the list of the container's parts.
        pattern: A copy of the container with None in place of each part, so that the structure
            references no array.
    """

    kind: type
    keys: tuple[Any, ...]
    treedef: Any
    pattern: Any = field(compare=False, repr=False)

    def made(self, parts: Sequence[Any]) -> Any:
        """Builds a container from the given parts."""
        return _with_parts(self.pattern, dict(zip(self.keys, parts, strict=True)))


@dataclass(frozen=True)
class OpenedTree:
    """The structure of a tree with flattened containers.

    Attributes:
        treedef: The structure that the framework's flatten function returned.
        nodes: The containers, with their positions among the leaves of `treedef`.
    """

    treedef: Any
    nodes: tuple[tuple[int, OpenedContainer], ...]

    @property
    def num_leaves(self) -> int:
        """Returns the number of leaves, including leaves inside of containers."""
        inner = sum(node.treedef.num_leaves for _, node in self.nodes)
        return self.treedef.num_leaves - len(self.nodes) + inner

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Returns the subtrees of `tree` at the positions of this structure's leaves."""
        nodes, result = dict(self.nodes), list[Any]()
        for place, x in enumerate(self.treedef.flatten_up_to(tree)):
            if (node := nodes.get(place)) is None:
                result.append(x)
                continue
            parts = x if isinstance(x, dict) else _parts(x)
            if parts is None or parts.keys() != set(node.keys):
                raise ValueError(f"expected a {node.kind.__name__} of {list(node.keys)}, got {x!r}")
            result += node.treedef.flatten_up_to([parts[key] for key in node.keys])
        return result

    def __str__(self) -> str:
        named = ", ".join(f"{node.kind.__name__} of {list(node.keys)}" for _, node in self.nodes)
        return f"{self.treedef} with {named}"


def is_same(a: Any, b: Any) -> bool:
    """Returns whether a equals b; `a != b` is wrong for a JAX PyTreeDef and an `OpenedTree`."""
    # JAX 0.7 raises an error if a PyTreeDef is compared with another type.
    return isinstance(a, OpenedTree) == isinstance(b, OpenedTree) and bool(a == b)


@dataclass(frozen=True, eq=False, repr=False)
class Containers:
    """A framework's pytree functions, extended to containers.

    Attributes:
        framework: "torch" or "jax".
        flatten: The framework's function that returns the leaves and the structure of a tree.
        unflatten: The framework's function that builds a tree from a structure and leaves.
        leaf_paths: The framework's function that returns the path of each leaf as text.
        is_array: Returns whether a leaf is an array.
        is_whole: Returns whether a container remains a single leaf even if it contains arrays.
    """

    framework: str
    flatten: Callable[[Any], tuple[list[Any], Any]]
    unflatten: Callable[[Any, Sequence[Any]], Any]
    leaf_paths: Callable[[Any], list[str]]
    is_array: Callable[[Any], bool]
    is_whole: Callable[[Any], bool] = lambda x: False

    def opened(self, leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
        """Flattens the containers among the leaves of a tree that the framework flattened.

        Raises:
            GradtoolsError: A leaf is an array of the other framework.
        """
        leaves, treedef = self._opened(leaves, treedef)
        foreign = foreign_class(self.framework)
        for i, x in enumerate(leaves) if foreign else ():
            if isinstance(x, foreign) and is_foreign(self.framework, x):
                path = self.paths(self._unflattened(treedef, leaves))[i]
                refuse_foreign(self.framework, x, path and f"the leaf {path} of an argument")
        return leaves, treedef

    def closed(self, tree: OpenedTree, leaves: Sequence[Any]) -> Any:
        """Inverts `opened`: builds the tree from the given leaves."""
        left, nodes, outer = iter(leaves), dict(tree.nodes), list[Any]()
        for place in range(tree.treedef.num_leaves):
            if (node := nodes.get(place)) is None:
                outer.append(next(left))
            else:
                inner = [next(left) for _ in range(node.treedef.num_leaves)]
                outer.append(node.made(self._unflattened(node.treedef, inner)))
        return self.unflatten(tree.treedef, outer)

    def paths(self, tree: Any) -> list[str]:
        """Returns the path of each leaf, as text."""
        result = []
        for path, x in zip(self.leaf_paths(tree), self.flatten(tree)[0], strict=True):
            if (parts := self._parts(x)) is None:
                result.append(path)
                continue
            for key, part in parts.items():
                step = f".{key}" if is_dataclass(x) else f"[{key!r}]"
                result += [f"{path}{step}{rest}" for rest in self.paths(part)]
        return result

    def _unflattened(self, treedef: Any, leaves: Sequence[Any]) -> Any:
        make = self.closed if type(treedef) is OpenedTree else self.unflatten
        return make(treedef, leaves)

    def _opened(self, leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
        if not any(map(_KINDS.__getitem__, map(type, leaves))):
            return leaves, treedef
        result, nodes = list[Any](), list[tuple[int, OpenedContainer]]()
        for place, x in enumerate(leaves):
            if (parts := self._parts(x)) is None:
                result.append(x)
                continue
            inner, inside = self._opened(*self.flatten(list(parts.values())))
            pattern = _with_parts(x, dict.fromkeys(parts))
            nodes.append((place, OpenedContainer(type(x), tuple(parts), inside, pattern)))
            result += inner
        return result, OpenedTree(treedef, tuple(nodes)) if nodes else treedef

    def _parts(self, x: Any) -> dict[Any, Any] | None:
        """Returns the parts of a container with arrays at any depth, or None for any other x.

        Objects that represent an array, such as an ArraySpec, are marked by a class attribute.
        """
        parts = None if self.is_whole(x) else _parts(x)
        inner = self.flatten(list(parts.values()))[0] if parts else ()
        is_array = lambda y: self.is_array(y) or hasattr(type(y), "__gradtools_array__")
        holds = any(is_array(y) or is_foreign(self.framework, y) or self._parts(y) for y in inner)
        return parts if holds else None


class _Kinds(dict[type, bool]):
    """Maps each class to a bool: whether its instances are treated as containers."""

    def __missing__(self, cls: type) -> bool:
        called = any("__call__" in base.__dict__ for base in cls.__mro__)
        self[cls] = not called and (issubclass(cls, dict | UserDict) or is_dataclass(cls))
        return self[cls]


_KINDS = _Kinds()


def whole(cls: type[T]) -> type[T]:
    """Class decorator: instances of the class are leaves, even if they contain arrays."""
    _KINDS[cls] = False
    return cls


def _parts(x: Any) -> dict[Any, Any] | None:
    """Returns a container's parts, by key or field; None if x is not a container."""
    if not _KINDS[type(x)]:
        return None
    if isinstance(x, dict | UserDict):
        return {key: x[key] for key in x}
    return {f.name: getattr(x, f.name) for f in fields(x) if hasattr(x, f.name)}


def _with_parts(x: Any, parts: dict[Any, Any]) -> Any:
    """Returns a copy of the container x with the given parts."""
    new = copy(x)
    if isinstance(new, UserDict):
        new.data = parts
    elif isinstance(new, dict):
        for key, part in parts.items():
            new[key] = part  # a subclass may forbid `update`, or also set an attribute
    else:
        for name, part in parts.items():
            object.__setattr__(new, name, part)
    return new
