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
        return cls(_verified(f), (*key, part_of(f)))

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


def part_of(x: Any, depth: int = 0) -> Any:
    """The key of a function, or of an object that one closes over.

    A function that is created in each step (a lambda, a method) has the key of its code and of its
    closure: tensors by shape and dtype, numbers by type, lists and tuples by their entries, other
    objects by identity.
    """
    kind = type(x)
    if kind in (bool, str, type(None)):
        return x
    if isinstance(x, Tensor):
        return kind, x.shape, x.dtype, x.requires_grad
    parts = _parts(x) if depth <= _DEPTH else ()
    if parts:
        space = id(x.__globals__) if kind is FunctionType else None
        return kind, space, *[part_of(y, depth + 1) for y in parts]
    if kind in (int, float, complex, list, dict, tuple, set):
        return kind
    try:
        return _WeakIdentity(x)
    except TypeError:  # x does not support weak references
        return kind


def _parts(x: Any) -> tuple[Any, ...]:
    """The objects that a function, a list or a tuple is made of."""
    if type(x) is FunctionType:
        cells = [contents_of(cell) for cell in x.__closure__ or ()]
        defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        return (x.__code__, *cells, *defaults)
    if type(x) is MethodType:
        return x.__func__, x.__self__
    if isinstance(x, partial):
        return (x.func, *x.args, *x.keywords, *x.keywords.values())
    return tuple(x) if type(x) in (list, tuple) and len(x) <= _PARTS else ()


def _verified(f: Any) -> dict[Any, Callable[[], Any]]:
    """The verified and pending configurations of f, or of its code."""
    while isinstance(f, MethodType | partial):
        f = f.__func__ if isinstance(f, MethodType) else f.func
    try:
        return _VERIFIED.setdefault(f.__code__ if type(f) is FunctionType else f, {})
    except TypeError:  # f does not support weak references, or has no hash
        return {}
