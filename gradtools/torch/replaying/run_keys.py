"""The configurations in which functions run, and which of them were verified.

A recomputation is verified once for each `RunKey`: the function, the shapes and dtypes of its
arguments, the training mode of its modules, autocast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.state import contents_of

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

Tensor = torch.Tensor
left_to_python(__name__)

_VERIFIED: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_MOST_KEYS = 256  # remembered for one function, if each batch has another shape
_PARTS = 64  # the most entries of a list or tuple in a key
_DEPTH = 3  # of nested closures in a key


class RunKey:
    """The configuration in which a function runs, and whether its recomputation was verified.

    known: The verified and pending configurations of the function.
    """

    def __init__(self, known: dict[Any, Callable[[], Any]], key: tuple[Any, ...]) -> None:
        self._known, self._key = known, key

    @classmethod
    def of(cls, f: Callable[..., Any], *key: Any) -> RunKey:
        """The key of f, with further parts `key`."""
        f, parts = _identity(f)
        return cls(_verified(f), (*key, parts))

    def for_aspect(self, what: str) -> RunKey:
        """A key of the same configuration for another property than equal numbers."""
        return RunKey(self._known, (what, self._key))

    def is_verified(self) -> bool:
        known = self._known.get(self._key)
        return known is not None and known() is not None

    def mark_pending(self, verifier: Any) -> None:
        """Records that `verifier` will verify it: while that is alive, nothing else needs to."""
        known = self._known
        for old, value in list(known.items()):
            if value() is None or _is_dead(old):
                known.pop(old, None)
        if len(known) >= _MOST_KEYS:
            known.clear()
        known[self._key] = weakref.ref(verifier)

    def mark_verified(self) -> None:
        self._known[self._key] = lambda: True

    def discard(self) -> None:
        self._known.pop(self._key, None)


def is_compiled(forward: Forward) -> bool:
    modules = (m for m, _ in forward.start.reached.modules.values())
    functions = forward.start.reached.functions
    return any(map(upstream.is_compiled, (forward.chunks.call.f, *functions, *modules)))


def run_key(forward: Forward) -> RunKey:
    shapes = tuple([(x.shape, x.dtype, x.requires_grad) for x in forward.tensors])
    modes, modules = forward.modes, forward.start.reached.modules.values()
    training = tuple([module.training for module, _ in modules])
    key = forward.caller, shapes, training, tuple(modes.autocast), forward.beneath, forward.count
    return RunKey.of(forward.chunks.call.f, *key)


class _WeakIdentity:
    """A weak reference that is equal only to one to the same living object."""

    def __init__(self, x: Any) -> None:
        self.of, self.number = weakref.ref(x), id(x)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _WeakIdentity) and self.of() is other.of() is not None


def _is_dead(part: Any) -> bool:
    """Whether a key refers to an object that was garbage collected."""
    if isinstance(part, tuple):
        return any(map(_is_dead, part))
    return isinstance(part, _WeakIdentity) and part.of() is None


def _identity(f: Any) -> tuple[Any, Any]:
    """The object under which f's keys are cached, and a key of what f closes over.

    A function that is created in each step (a lambda, a method) is identified by its code and its
    closure: tensors by shape and dtype, numbers by type, lists and tuples by their entries, other
    objects by identity.
    """
    if isinstance(f, MethodType):
        of, parts = _identity(f.__func__)
        return of, (parts, part_of(f.__self__))
    if isinstance(f, partial):
        of, parts = _identity(f.func)
        given = (*f.args, *f.keywords.values())
        return of, (parts, tuple(f.keywords), *[part_of(x, 0) for x in given])
    if type(f) is not FunctionType:
        return f, None
    return f.__code__, _parts(f, 0)


def _parts(f: FunctionType, depth: int) -> tuple[Any, ...]:
    cells = [contents_of(cell) for cell in f.__closure__ or ()]
    captured = (*cells, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
    return (id(f.__globals__), *[part_of(x, depth + 1) for x in captured])


def part_of(x: Any, depth: int = 0) -> Any:
    """The key of an object that a function closes over."""
    kind = type(x)
    if kind in (bool, str, type(None)):
        return x
    if isinstance(x, Tensor):
        return kind, x.shape, x.dtype, x.requires_grad
    if depth < _DEPTH and kind is FunctionType:
        return x.__code__, _parts(x, depth)
    if depth < _DEPTH and kind is MethodType:
        return part_of(x.__func__, depth + 1), part_of(x.__self__, depth + 1)
    if kind in (list, tuple) and depth < _DEPTH and len(x) <= _PARTS:
        return kind, tuple([part_of(y, depth + 1) for y in x])
    if kind in (int, float, complex, list, dict, tuple, set):
        return kind
    try:
        return _WeakIdentity(x)
    except TypeError:  # x does not support weak references
        return kind


def _verified(f: Callable[..., Any]) -> dict[Any, Callable[[], Any]]:
    """The verified and pending configurations of f."""
    try:
        return _VERIFIED.setdefault(f, {})
    except TypeError:  # f does not support weak references, or has no hash
        return {}
