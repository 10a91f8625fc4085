"""Taint tracking: NumPy arrays and numbers that remember from which tensors they were taken.

Data that leaves for NumPy or Python and comes back has no graph to be followed. So what leaves
under observation is tagged: an array of a subclass that hands its tags to whatever NumPy makes of
it, a number of a subclass that hands them on in arithmetic. They are what they were in every
other way. Where a tag is lost (`math.sqrt`, C code), the run is repeated with other numbers in
that place, see `numpy_round_trips.py`.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

Tags = frozenset[int]
_NONE: Tags = frozenset()
_MOST = 1000  # so many entries of a list are looked at


def tagged(x: Any, tags: Tags) -> Any:
    """x with tags, if it can carry any; lists entry by entry."""
    if not tags:
        return x
    if isinstance(x, np.ndarray):
        result = x if isinstance(x, TaggedArray) else x.view(TaggedArray)
        result.gradtools_tags = tags_in(result) | tags
        return result
    if isinstance(x, list) and len(x) <= _MOST:
        return [tagged(item, tags) for item in x]
    kind = _NUMBERS.get(type(x))
    if kind is None:
        return x
    result = kind(x)
    result.gradtools_tags = tags
    return result


def tags_in(x: Any) -> Tags:
    """The tags of an object, and of what stands in a list, tuple, dict or slice."""
    return _NONE.union(*[getattr(host, "gradtools_tags", _NONE) for host in hosts_in(x)])


def hosts_in(x: Any) -> Iterator[Any]:
    """The tagged objects among arguments."""
    return (item for item in _items(x) if isinstance(item, _Tagged))


def plain_hosts(x: Any) -> Iterator[Any]:
    """The numbers and arrays among arguments that are no tensors."""
    kinds = float, int, complex, np.ndarray, np.generic
    return (item for item in _items(x) if isinstance(item, kinds))


def _items(x: Any, depth: int = 3) -> Iterator[Any]:
    """What stands in lists, tuples, dicts and slices, so deep; x itself if it is none."""
    if isinstance(x, slice):
        x = x.start, x.stop, x.step
        depth = max(depth, 1)
    elif isinstance(x, dict):
        x = list(x.values())
    if depth and isinstance(x, list | tuple):
        for item in x[:_MOST]:
            yield from _items(item, depth - 1)
    else:
        yield x


def fingerprint(x: Any) -> Any:
    """What is equal for equal numbers or arrays."""
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype, zlib.crc32(np.ascontiguousarray(x).tobytes())
    return repr(_plain(x))


# Tagged arrays that live: `from_numpy`, which no mode of PyTorch shows, shares their memory.
_LIVING: dict[int, weakref.ref[TaggedArray]] = {}


def _forget(key: int, _: Any) -> None:
    _LIVING.pop(key, None)


def tags_at(address: int) -> Tags:
    """The tags of the living arrays whose memory is at an address."""
    living = [ref() for ref in [*_LIVING.values()]]
    result = [x for x in living if x is not None and x.size and _holds(x, address)]
    return _NONE.union(*[x.gradtools_tags for x in result])


def _holds(x: np.ndarray, address: int) -> bool:
    low, high = np.lib.array_utils.byte_bounds(x)
    return low <= address < high


class _Tagged:
    """What carries tags."""

    gradtools_tags: Tags


class TaggedArray(np.ndarray, _Tagged):
    """An array with tags."""

    gradtools_tags: Tags

    def __array_finalize__(self, obj: Any) -> None:
        self.gradtools_tags = getattr(obj, "gradtools_tags", _NONE)
        _LIVING[id(self)] = weakref.ref(self, partial(_forget, id(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _called(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = func(*_all_plain(args), **_all_plain(kwargs))
        return result if func in _ABOUT else _with(result, tags_in((args, kwargs)))

    def __getitem__(self, key: Any) -> Any:
        return _with(super().__getitem__(key), self.gradtools_tags | tags_in(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.gradtools_tags = self.gradtools_tags | tags_in((key, value))


def _handing_on(name: str) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)
    return lambda self, *args, **kwargs: _with(
        method(self, *args, **kwargs), tags_in((self, args, kwargs))
    )


_HANDING_ON = "mean var std argmax argmin dot nonzero searchsorted trace item tolist"
for _name in _HANDING_ON.split():
    setattr(TaggedArray, _name, _handing_on(_name))

_ABOUT = (np.shape, np.ndim, np.size, np.result_type, np.may_share_memory, np.shares_memory)


def _called(function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ufunc on what the tagged ones stand for; its results are tagged."""
    tags = tags_in((inputs, kwargs))
    outs = kwargs.get("out", ())
    if outs:
        kwargs = {**kwargs, "out": tuple([_plain(x) for x in outs])}
    result = function(*[_plain(x) for x in inputs], **kwargs)
    for x in outs:
        if isinstance(x, TaggedArray):
            x.gradtools_tags = x.gradtools_tags | tags
    return outs[0] if len(outs) == 1 else _with(result, tags)


def _with(result: Any, tags: Tags) -> Any:
    if isinstance(result, tuple):
        parts = [_with(part, tags) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return tagged(result, tags)


def _plain(x: Any) -> Any:
    if isinstance(x, TaggedArray):
        return x.view(np.ndarray)
    return x.gradtools_base(x) if isinstance(x, _Number) else x


def _all_plain(x: Any, depth: int = 3) -> Any:
    if depth and type(x) in (list, tuple):
        return type(x)([_all_plain(item, depth - 1) for item in x])
    if depth and type(x) is dict:
        return {key: _all_plain(value, depth - 1) for key, value in x.items()}
    return _plain(x)


# --- numbers -----------------------------------------------------------------------------


class _Number(_Tagged):
    """Arithmetic on a number with tags."""

    gradtools_base: Any

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _called(getattr(ufunc, method), inputs, kwargs)


def _binary(function: Callable[[Any, Any], Any], flipped: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float | complex | np.generic | np.ndarray):
            return NotImplemented
        a, b = _plain(self), _plain(other)
        return _with(function(b, a) if flipped else function(a, b), tags_in((self, other)))

    return compute


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: _with(function(_plain(self)), self.gradtools_tags)


_METHODS: dict[str, Any] = {
    f"__{name}__": _unary(getattr(operator, name)) for name in ("neg", "pos", "abs")
}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _METHODS[f"__{_name}__"] = _binary(getattr(operator, _name), False)
    _METHODS[f"__r{_name}__"] = _binary(getattr(operator, _name), True)

_KINDS = (int, float, complex)  # of NumPy's scalars a subclass is no scalar to C code: it crashes
_NUMBERS: dict[type, Any] = {
    kind: type(kind.__name__, (_Number, kind), {**_METHODS, "gradtools_base": kind})
    for kind in _KINDS
}
