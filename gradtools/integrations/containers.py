"""Mappings and dataclasses as pytrees, without registering their classes with a framework.

A tokeniser's BatchEncoding is a `UserDict`, a model's output often a dataclass. These classes are
not registered as pytrees, so a framework treats their instances as single leaves. A backend's
`flatten` opens such leaves: the arrays in them become leaves of the tree, and the structure records
how to rebuild the container. A container without arrays, such as a configuration, stays a leaf, and
so does a callable one.

All operators flatten their arguments here, so here an array of the other framework is refused. A
framework passes it through as a constant, which would silently undo an edit or a derivative.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from gradtools.errors import GradtoolsError
from gradtools.foreign_arrays import foreign_class, is_foreign, refuse_foreign

T = TypeVar("T")


@dataclass(frozen=True)
class OpenedContainer:
    """The structure of an opened container.

    Attributes:
        kind: Its class.
        keys: Its keys, or the names of its fields.
        treedef: The structure of the list of its parts.
        pattern: A copy without the parts; None if the class is constructed from a dict.
    """

    kind: type
    keys: tuple[Any, ...]
    treedef: Any
    pattern: Any = field(compare=False, repr=False)

    def made(self, parts: Sequence[Any]) -> Any:
        """A container with these parts."""
        pairs = list(zip(self.keys, parts, strict=True))
        if self.pattern is None:
            try:
                return self.kind(dict(pairs))  # type: ignore[call-arg]
            except TypeError as error:
                raise GradtoolsError(
                    f"a {self.kind.__name__} is a mapping that is not made of a dict, as "
                    f"{self.kind.__name__}(dict): {error}. Pass a dict instead."
                ) from error
        new = copy(self.pattern)
        if isinstance(new, UserDict):
            new.data = dict(pairs)
        for key, part in pairs:
            if isinstance(new, dict):
                new[key] = part
            elif not isinstance(new, UserDict):
                object.__setattr__(new, key, part)
        return new


@dataclass(frozen=True)
class OpenedTree:
    """The structure of a tree, some of whose leaves are opened containers.

    Attributes:
        treedef: The framework's own structure.
        nodes: The containers, with their positions among its leaves.
    """

    treedef: Any
    nodes: tuple[tuple[int, OpenedContainer], ...]

    @property
    def num_leaves(self) -> int:
        """The number of leaves, with those inside of containers."""
        inner = sum(node.treedef.num_leaves for _, node in self.nodes)
        return self.treedef.num_leaves - len(self.nodes) + inner

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """The subtrees of `tree` at this tree's leaves."""
        nodes = dict(self.nodes)
        result: list[Any] = []
        for place, x in enumerate(self.treedef.flatten_up_to(tree)):
            node = nodes.get(place)
            if node is None:
                result.append(x)
                continue
            parts = _parts(x) if not isinstance(x, dict) else x
            if parts is None or parts.keys() != set(node.keys):
                raise ValueError(f"expected a {node.kind.__name__} of {list(node.keys)}, got {x!r}")
            result += node.treedef.flatten_up_to([parts[key] for key in node.keys])
        return result

    def __str__(self) -> str:
        named = ", ".join(f"{node.kind.__name__} of {list(node.keys)}" for _, node in self.nodes)
        return f"{self.treedef} with {named}"


@dataclass(frozen=True, eq=False, repr=False)
class Containers:
    """A framework's pytree functions, extended to containers.

    Attributes:
        framework: "torch" or "jax".
        flatten: The framework's own function.
        unflatten: The framework's own function.
        leaf_paths: The framework's own function.
        is_array: Whether a leaf is an array.
        is_whole: Whether a leaf is never opened, whatever it contains.
    """

    framework: str
    flatten: Callable[[Any], tuple[list[Any], Any]]
    unflatten: Callable[[Any, Sequence[Any]], Any]
    leaf_paths: Callable[[Any], list[str]]
    is_array: Callable[[Any], bool]
    is_whole: Callable[[Any], bool] = lambda x: False

    def opened(self, leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
        """Opens the containers among the leaves of a tree that the framework flattened.

        Raises:
            GradtoolsError: A leaf is an array of the other framework.
        """
        leaves, treedef = self._opened(leaves, treedef)
        foreign = foreign_class(self.framework)
        for i, x in enumerate(leaves) if foreign else ():
            if isinstance(x, foreign) and is_foreign(self.framework, x):
                unflatten = self.closed if type(treedef) is OpenedTree else self.unflatten
                path = self.paths(unflatten(treedef, leaves))[i]
                refuse_foreign(self.framework, x, path and f"the leaf {path} of an argument")
        return leaves, treedef

    def _opened(self, leaves: list[Any], treedef: Any) -> tuple[list[Any], Any]:
        if not any(map(_KINDS.__getitem__, map(type, leaves))):
            return leaves, treedef
        result: list[Any] = []
        nodes: list[tuple[int, OpenedContainer]] = []
        for place, x in enumerate(leaves):
            parts = None if self.is_whole(x) else _parts(x)
            inner, inside = ([x], None) if parts is None else self._of_parts(parts)
            if parts is not None and any(map(self._is_any_array, inner)):
                nodes.append((place, OpenedContainer(type(x), tuple(parts), inside, _pattern(x))))
                result += inner
            else:
                result.append(x)
        return result, OpenedTree(treedef, tuple(nodes)) if nodes else treedef

    def closed(self, tree: OpenedTree, leaves: Sequence[Any]) -> Any:
        """The inverse of `opened`: the tree with these leaves."""
        left, nodes = iter(leaves), dict(tree.nodes)
        outer = []
        for place in range(tree.treedef.num_leaves):
            node = nodes.get(place)
            if node is None:
                outer.append(next(left))
            else:
                inner = [next(left) for _ in range(node.treedef.num_leaves)]
                close = self.closed if type(node.treedef) is OpenedTree else self.unflatten
                outer.append(node.made(close(node.treedef, inner)))
        return self.unflatten(tree.treedef, outer)

    def paths(self, tree: Any) -> list[str]:
        """The path of each leaf, as text."""
        leaves, _ = self.flatten(tree)
        result = []
        for path, x in zip(self.leaf_paths(tree), leaves, strict=True):
            parts = None if self.is_whole(x) else _parts(x)
            if parts is None or not any(map(self._is_any_array, self._of_parts(parts)[0])):
                result.append(path)
                continue
            for key, part in parts.items():
                step = f"[{key!r}]" if isinstance(x, Mapping) else f".{key}"
                result += [f"{path}{step}{rest}" for rest in self.paths(part)]
        return result

    def _of_parts(self, parts: dict[Any, Any]) -> tuple[list[Any], Any]:
        return self._opened(*self.flatten(list(parts.values())))

    def _is_any_array(self, x: Any) -> bool:
        return self.is_array(x) or is_foreign(self.framework, x)


class _Kinds(dict[type, bool]):
    """Whether the instances of a class may be opened."""

    def __missing__(self, cls: type) -> bool:
        called = any("__call__" in base.__dict__ for base in cls.__mro__)
        self[cls] = not called and (issubclass(cls, Mapping) or is_dataclass(cls))
        return self[cls]


_KINDS = _Kinds()


def whole(cls: type[T]) -> type[T]:
    """A class decorator: instances are leaves, even if they contain arrays."""
    _KINDS[cls] = False
    return cls


def _parts(x: Any) -> dict[Any, Any] | None:
    """The parts of a container, by key or field; None if x is no container."""
    if not _KINDS[type(x)]:
        return None
    if isinstance(x, Mapping):
        return {key: x[key] for key in x}
    missing = object()
    result = {f.name: getattr(x, f.name, missing) for f in fields(x)}
    return {name: part for name, part in result.items() if part is not missing}


def _pattern(x: Any) -> Any:
    """A copy of x without its parts, so that the structure does not keep them alive."""
    if isinstance(x, Mapping) and not isinstance(x, dict | UserDict):
        return None
    new = copy(x)
    if isinstance(new, UserDict):
        new.data = {}
    elif isinstance(new, dict):
        kind = OrderedDict if isinstance(new, OrderedDict) else dict
        kind.clear(new)  # bypasses an override of the class
    for name in (f.name for f in fields(new)) if is_dataclass(new) else ():
        if hasattr(new, name):
            object.__setattr__(new, name, None)
    return new
