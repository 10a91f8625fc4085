"""One call of a user's function, seen as a function of flat arrays.

The derivative operators speak of arguments and pytrees, the waist of lists of arrays. A `Call`
is the bridge: it sets the differentiated leaves apart, names each by its argument and path, and
puts results back into their trees. All checks of what the user passed stand here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError


class Call:
    """`f(*args, **kwargs)`, differentiated with respect to the arguments in `argnums`.

    Attributes:
        hands_out: Whether the caller gets f's output, which else may stay in its graph.
    """

    hands_out = True

    def __init__(
        self,
        backend: Backend,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: tuple[int, ...],
        has_aux: bool = False,
    ) -> None:
        self.backend, self.caller, self.f, self.has_aux = backend, caller, f, has_aux
        self.args, self.kwargs, self.argnums = tuple(args), kwargs, argnums
        self.opened: Any = None
        kinds = self._flatten()
        alone = self._is_leaf and kinds[0] is not None and len(self.args) == 1 and not kwargs
        if not alone:  # as an array is, which is no module
            self.opened = backend.opened(caller, f, args, kwargs, argnums)
        if self.opened is not None:
            self.f, self.args = self.opened, tuple(self.opened.args)
            kinds = self._flatten()
        for k, kind in enumerate(kinds):
            if kind not in _INEXACT:
                self.leaves[k] = differentiable_leaf(backend, caller, self.leaves[k], self.paths[k])

    def _flatten(self) -> list[str | None]:
        """Flattens the differentiated arguments into `leaves`; returns the kind of each leaf."""
        self.leaves: list[Array] = []
        self.treedefs: list[Any] = []
        self.counts: list[int] = []
        kinds: list[str | None] = []
        for i in self.argnums:
            leaves, treedef, of_leaves = self.backend.flatten_arrays(self.args[i])
            self.leaves += leaves
            self.treedefs.append(treedef)
            self.counts.append(len(leaves))
            kinds += of_leaves
        # The argument itself, mostly: then there is no tree to be built again.
        self._is_leaf = self.counts == [1] and leaves[0] is self.args[i]
        return kinds

    @property
    def paths(self) -> list[str]:
        """The name of each differentiated leaf. Made when a message needs it."""
        return [
            f"argument {i}{path}"
            for i in self.argnums
            for path in self.backend.leaf_paths(self.args[i])
        ]

    def without_values(self, aval: Callable[[Array], Any]) -> Call:
        """A copy for pullbacks, without arrays: names, structures, shapes and dtypes."""
        bare = copy(self)
        bare.leaves = [aval(x) for x in self.leaves]
        bare.args = tuple([self._numbered(tree) for tree in self.args])
        bare.f, bare.kwargs, bare.opened = _over, {}, None
        return bare

    def _numbered(self, tree: Any) -> Any:
        leaves, treedef = self.backend.flatten(tree)
        return self.backend.unflatten(treedef, range(len(leaves)))

    # --- the function of flat arrays

    def __call__(self, *leaves: Array) -> tuple[list[Array], list[Array]]:
        """f at other leaves: `(outs, extras)`. Remembers the tree of what f returned."""
        args, backend = list(self.args), self.backend
        for i, tree in zip(self.argnums, self.to_trees(leaves), strict=True):
            args[i] = tree
        result = self.f(*args, **self.kwargs)
        out, aux = self._parted(result) if self.has_aux else (result, None)
        # What is kept of the output is its tree, no array: tracers would leak, memory stay.
        self._out_is_leaf = not isinstance(out, _TREES)
        out_leaves, self._out_def, self._kinds = backend.flatten_arrays(out)
        outs: list[Array] = []
        extras: list[Array] = []
        for k, y in enumerate(out_leaves):
            if self._kinds[k] is None:
                y = self._as_output(k, y)
                self._kinds[k] = backend.flatten_arrays(y)[2][0]
            (outs if self._kinds[k] in _INEXACT else extras).append(y)
        self._aux_static: list[tuple[Any] | None] = []
        if self.has_aux:
            aux_leaves, self._aux_def = backend.flatten(aux)
            self._aux_static = [None if backend.is_array(x) else (x,) for x in aux_leaves]
            extras += [x for x in aux_leaves if backend.is_array(x)]
        return outs, extras if self.opened is None else extras + self.opened.effects()

    def _parted(self, result: Any) -> tuple[Any, Any]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradtoolsError(
                f"{self.caller}: with has_aux=True f must return a pair (output, aux), got "
                f"{describe(self.backend, result)}. Return both, or leave has_aux out."
            )
        return result

    def _as_output(self, k: int, x: Any) -> Array:
        try:
            return self.backend.asarray(x)
        except (TypeError, ValueError, GradtoolsError) as error:
            raise GradtoolsError(
                f"{self.caller}: f returned {describe(self.backend, x)} at "
                f"{self._out_paths[k]}, expected an array. Return arrays, and anything else "
                "through has_aux=True."
            ) from error

    @property
    def _out_paths(self) -> list[str]:
        like = [self.backend.asarray(0.0)] * len(self._kinds)
        out = self.backend.unflatten(self._out_def, like)
        return [f"output{path}" for path in self.backend.leaf_paths(out)]

    # --- back into trees

    def to_trees(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One tree for each differentiated argument, with `leaves` in place of its own."""
        if self._is_leaf:
            return tuple(leaves)
        trees, start = [], 0
        for treedef, count in zip(self.treedefs, self.counts, strict=True):
            trees.append(self.backend.unflatten(treedef, leaves[start : start + count]))
            start += count
        return tuple(trees)

    def from_trees(self, trees: Sequence[Any], what: str) -> list[Array]:
        """The leaves of one tree for each differentiated argument, checked against them."""
        result: list[Array] = []
        for i, tree, treedef in zip(self.argnums, trees, self.treedefs, strict=True):
            leaves = _leaves_like(treedef, tree)
            if leaves is None:
                leaves = _leaves_like(treedef, self.backend.part_of(tree))
            if leaves is None:
                came = in_words(self.backend.flatten(tree)[1])
                raise GradtoolsError(
                    f"{self.caller}: {what} {i} has the structure {came}, expected that of "
                    f"argument {i}, {in_words(treedef)}. Give one leaf for each of its leaves."
                )
            result += leaves
        return [
            matching(self.backend, self.caller, x, like, partial(self._names, what, k))
            for k, (x, like) in enumerate(zip(result, self.leaves, strict=True))
        ]

    def _names(self, what: str, k: int) -> tuple[str, str]:
        return self.paths[k].replace("argument", what, 1), self.paths[k]

    def output(self, outs: Sequence[Array], extras: Sequence[Array]) -> tuple[Any, Any]:
        """`(out, aux)` of f from the flat lists. What f did to its modules is written."""
        self.settle(extras)
        diff, rest = iter(outs), iter(extras)
        leaves = [next(diff if kind in _INEXACT else rest) for kind in self._kinds]
        aux = [static[0] if static else next(rest) for static in self._aux_static]
        out = self.backend.unflatten(self._out_def, leaves)
        return out, self.backend.unflatten(self._aux_def, aux) if self.has_aux else None

    def settle(self, extras: Sequence[Array]) -> None:
        """Writes what f did to the modules that it is given."""
        if self.opened is not None:
            self.opened.settle(extras)

    def refuse_changes(self) -> None:
        """Raises if f changed a module among its arguments: here the change would be lost."""
        if self.opened is not None:
            self.opened.refuse_changes()

    def tangent_output(self, tangents: Sequence[Array]) -> Any:
        """The tree of f's output with tangents; None where the output is no float."""
        left = iter(tangents)
        leaves = [next(left) if kind in _INEXACT else None for kind in self._kinds]
        return self.backend.unflatten(self._out_def, leaves)

    def cotangents(self, tree: Any, outs: Sequence[Array]) -> list[Array]:
        """The leaves of a cotangent tree that belong to `outs`, checked against them."""
        leaves = _leaves_like(self._out_def, tree)
        if leaves is None:
            came = in_words(self.backend.flatten(tree)[1])
            raise GradtoolsError(
                f"{self.caller}: the cotangent has the structure {came}, expected that of f's "
                f"output, {in_words(self._out_def)}. Give one leaf for each of its leaves."
            )
        places = [k for k, kind in enumerate(self._kinds) if kind in _INEXACT]
        return [
            matching(self.backend, self.caller, leaves[k], y, partial(self._ct_names, k))
            for k, y in zip(places, outs, strict=True)
        ]

    def _ct_names(self, k: int) -> tuple[str, str]:
        name = self._out_paths[k]
        return name.replace("output", "cotangent", 1), name

    def scalar(self, outs: Sequence[Array], extras: Sequence[Array]) -> Array:
        """The one real number that f returned, or an error that says what it was."""
        single = len(self._kinds) == 1 and self._out_is_leaf
        out = outs[0] if single and outs else None
        if out is not None and tuple(out.shape) == () and self._kinds[0] == "real":
            return out
        output = self.output(outs, extras)[0]
        came = describe(self.backend, output)
        mend = "Reduce it, for instance with .sum() or .mean()"
        if out is not None and self._kinds[0] == "complex":
            mend = "Take its real part, or a norm"
        elif single and not outs:
            mend = "Keep it floating: a cast to integer or boolean has no derivative"
        if not self.has_aux and not single:
            mend += ", or return (loss, aux) with has_aux=True"
        mend = "Is a return statement missing?" if output is None else f"{mend}."
        raise GradtoolsError(
            f"{self.caller}: f must return one real number, an array of shape (); got {came}. "
            f"{mend}"
        )


def whole_number(caller: str, name: str, value: Any, least: int, unit: str) -> int:
    """An argument that is a count (anything with `__index__`) as an integer, or an error."""
    try:
        result = least - 1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        result = least - 1
    if result < least:
        raise GradtoolsError(
            f"{caller}: {name} is {value!r}; expected a whole number of {unit}, {least} or more."
        )
    return result


def whole_or_none(caller: str, name: str, value: Any, least: int, unit: str) -> int | None:
    """The same; None stays None."""
    return None if value is None else whole_number(caller, name, value, least, unit)


def order_among(caller: str, order: Any, known: Sequence[int], expected: str) -> int:
    """The argument `order` as an integer, or an error."""
    whole = hasattr(order, "__index__") and not isinstance(order, bool | np.bool_)
    if not whole or operator.index(order) not in known:
        raise GradtoolsError(f"{caller}: order is {order!r}; expected {expected}.")
    return operator.index(order)


def normalized_argnums(
    caller: str, argnums: Any, count: int, name: str = "argnums"
) -> tuple[int, ...]:
    """argnums as a tuple of positions from 0, each checked against the number of arguments."""
    if type(argnums) is int and argnums == 0 and count:
        return (0,)
    given = tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)
    positions = []
    for i in given:
        i = _as_position(caller, i, name)
        if not -count <= i < count:
            many = f"{count} positional argument{'s' * (count > 1)}"
            called = f"{many} (0 to {count - 1})" if count else "no positional argument"
            raise GradtoolsError(
                f"{caller}: {name} holds {i}, but f was called with {called}. {_by_position(name)}"
            )
        positions.append(i % count)
    if len(set(positions)) < len(positions):
        raise GradtoolsError(f"{caller}: {name} {given} names an argument twice. Name each once.")
    if not positions:
        raise GradtoolsError(f"{caller}: {name} is empty; name at least one argument.")
    return tuple(positions)


def _as_position(caller: str, i: Any, name: str) -> int:
    # Dynamo makes integers symbolic, and asks none of these for its methods.
    if not isinstance(i, bool | type) and (isinstance(i, int) or hasattr(i, "__index__")):
        try:
            return operator.index(i)
        except TypeError:  # of an array that is no integer
            pass
    is_array = hasattr(i, "dtype") and not isinstance(i, type)
    came = f"an array of dtype {i.dtype}" if is_array else repr(i)
    raise GradtoolsError(
        f"{caller}: {name} must hold integers, got {came}. Give the position of an argument, "
        "counted from 0, or a tuple of positions."
    )


def refuse_arguments(caller: str, argnums: Any) -> None:
    """Raises for f's arguments in the place of argnums, before anybody uses what comes back."""
    for i in argnums if isinstance(argnums, tuple | list) else (argnums,):
        if not isinstance(i, type) and getattr(i, "shape", ()) != ():
            raise GradtoolsError(
                f"{caller}: argnums holds an array of shape {tuple(i.shape)}; expected positions. "
                f"{caller} returns a function, which takes f's arguments: {caller}(f)(x)."
            )


def _by_position(name: str) -> str:
    if name in ("key_argnums", "carry_argnums"):
        return "Keyword arguments are no such arguments; pass by position what it names."
    return (
        "Keyword arguments are not differentiated; pass what is to be differentiated by position."
    )


def as_array(
    backend: Backend, caller: str, x: Any, name: str, beside: Array | None = None
) -> Array:
    """x as an array of the framework, on the device of `beside`, or an error that names it."""
    if backend.is_array(x):
        return x
    try:
        return backend.asarray(x, beside)
    except GradtoolsError as error:
        if is_numeric(backend, x):  # of a dtype that the framework does not hold
            raise GradtoolsError(f"{caller}: {name}: {error}") from error
        came = describe(backend, x)
        raise GradtoolsError(
            f"{caller}: {name} is {came}; expected an array of numbers."
        ) from error


def differentiable_leaf(backend: Backend, caller: str, leaf: Any, name: str) -> Array:
    """The leaf as an array that can be differentiated, or an error that names it."""
    if isinstance(leaf, bool | int):
        raise _not_differentiable(caller, name, f"the Python {type(leaf).__name__} {leaf!r}")
    if not backend.is_array(leaf):
        leaf = _converted(backend, caller, leaf, name)
    if not backend.is_inexact(leaf):
        came = f"an array of dtype {backend.dtype_name(leaf)} and shape {tuple(leaf.shape)}"
        raise _not_differentiable(caller, name, came)
    return leaf


def _converted(backend: Backend, caller: str, leaf: Any, name: str) -> Array:
    if not isinstance(leaf, float | complex) and not hasattr(leaf, "__array__"):
        from gradtools import keras_models

        if keras_models.is_keras(leaf):
            raise keras_models.refusal(caller, name, leaf)
        raise _not_differentiable(caller, name, f"an object of type {type(leaf).__name__}")
    try:
        return backend.asarray(leaf)
    except GradtoolsError as error:
        raise GradtoolsError(f"{caller}: {name} cannot be differentiated: {error}") from error


_TREES = (tuple, list, dict)
_INEXACT = ("real", "complex")  # the kinds of leaves that can be differentiated
_ALL = ("vjp", "jvp", "linearize", "hvp", "mixed_partial")  # these differentiate every argument
_ALONG = ("why_zero", "gradient_graph", "formula")


def _not_differentiable(caller: str, name: str, came: str) -> GradtoolsError:
    elsewhere = "keep it in an argument that argnums does not name"
    if caller in _ALL:
        elsewhere = "let f close over it"
    elif caller in _ALONG:
        elsewhere = "keep it in an argument that wrt does not name"
    elif caller == "minimax_value_and_grad":
        elsewhere = "keep it in an argument that neither minimize nor maximize names"
    return GradtoolsError(
        f"{caller}: {name} is {came}; what is differentiated must be a floating or complex array. "
        f"Cast it, or {elsewhere}."
    )


def matching(
    backend: Backend, caller: str, x: Any, like: Array, names: Callable[[], tuple[str, str]]
) -> Array:
    """x as an array of like's shape and dtype, or an error that names both."""
    if isinstance(x, complex) and not backend.is_complex(like):
        name, like_name = names()
        raise GradtoolsError(
            f"{caller}: {name} is the complex number {x}, but {like_name} is real "
            f"({backend.dtype_name(like)}). Pass a real number."
        )
    if isinstance(x, bool | int | float | complex):
        x = backend.cast(x, like)
    elif not backend.is_array(x):
        x = _as_like(backend, caller, x, like, names)
    if x.shape != like.shape or x.dtype != like.dtype:
        came = (tuple(x.shape), backend.dtype_name(x))
        wanted = (tuple(like.shape), backend.dtype_name(like))
        name, like_name = names()
        raise GradtoolsError(
            f"{caller}: {name} has shape {came[0]} and dtype {came[1]}, expected {wanted[0]} and "
            f"{wanted[1]}, those of {like_name}. Reshape or cast it."
        )
    return x


def _as_like(
    backend: Backend, caller: str, x: Any, like: Array, names: Callable[[], tuple[str, str]]
) -> Array:
    if hasattr(x, "__array__"):
        return _converted(backend, caller, x, names()[0])
    name, like_name = names()
    raise GradtoolsError(
        f"{caller}: {name} is {describe(backend, x)}, expected {describe(backend, like)}, like "
        f"{like_name}."
    )


def _leaves_like(treedef: Any, tree: Any) -> list[Any] | None:
    """What stands in `tree` at treedef's leaves, whatever the order of its dicts.

    None if it has another structure.
    """
    try:
        leaves = treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        return None
    return None if any(isinstance(x, tuple | list | dict) for x in leaves) else leaves


def describe(backend: Backend, x: Any) -> str:
    """What x is, in a few words, for messages."""
    if backend.is_array(x) or (hasattr(x, "shape") and hasattr(x, "dtype")):
        return f"an array of shape {tuple(x.shape)} and dtype {backend.dtype_name(x)}"
    if isinstance(x, tuple | list | dict):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else with_article(type(x).__name__)


def in_words(treedef: Any) -> str:
    """A structure for messages: in brackets as a program writes it, * for an array."""
    text = " ".join(str(treedef).split())
    text = text.removeprefix("PyTreeDef(").removesuffix(")") if text[:9] == "PyTreeDef" else text
    return "one array" if text == "*" else text


def is_numeric(backend: Backend, x: Any) -> bool:
    """Whether x is an array of the framework, a number, or NumPy's array of numbers."""
    if backend.is_array(x) or isinstance(x, bool | int | float | complex):
        return True
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fciub"


def like_function(prefix: str, f: Any, call: Any, suffix: str = "") -> Any:
    """The call under a name like f's and with f's signature; it can be pickled if f can."""
    name = f"{prefix}{getattr(f, '__name__', type(f).__name__)}{suffix}"
    known = {"__name__": name, "__qualname__": name, "__wrapped__": f}
    try:
        call.__dict__.update(known)
    except AttributeError:  # dynamo's stand-in for a partial has no attributes
        return call
    if type(call) is partial:
        call = _Method(call.func, *call.args, **call.keywords)
        call.__dict__.update(known)
    return call


class _Method(partial[Any]):
    """A partial that a class may hold as a method, as it may a function: as from Python 3.14 on."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)


def with_article(name: str) -> str:
    """The name of a type after "a" or "an"; None as it is written."""
    if name == "NoneType":
        return "None"
    return f"{'an' if name[0].lower() in 'aeio' or name == 'ndarray' else 'a'} {name}"


def _over(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the call is over")
