"""Validates arguments: counts, argnums, and arrays of equal shape and dtype."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.arguments.wording import describe, is_numeric, shown, type_in_words, with_article
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError
from gradtools.integrations import kind_of_module, refusal


def check_function(
    caller: str, f: Any, name: str = "f", curried: bool = True, order: str = ""
) -> None:
    """Raises an error if f is not callable.

    curried: Whether `caller(f)` returns a function of f's arguments; the message then suggests the
        call `caller(f)(x)`.
    order: The advice if f and another argument are swapped.
    """
    if callable(f):
        return
    plain = isinstance(f, (str, int, float, complex, type(None)))
    came = repr(f) if plain else with_article(type(f).__name__)
    call = f": {caller}({name})(x)" if curried else ""
    hint = f" Pass the function, not its result{call}." if hasattr(f, "dtype") else ""
    hint = f" {order}" if order else hint
    raise GradtoolsError(f"{caller}: {name} must be a function, got {came}.{hint}")


def check_choice(caller: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raises an error if the value of an option is not one of the allowed values."""
    if value not in allowed:
        raise GradtoolsError(f"{caller}: {name} is {value!r}; expected one of {allowed}.")


def tuple_of_names(caller: str, name: str, value: Any) -> tuple[str, ...]:
    """Returns the value of an option as a tuple; raises an error if an entry is not a string."""
    if isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value):
        return tuple(value)
    like = (value if isinstance(value, str) else "x",)
    raise GradtoolsError(
        f"{caller}: {name} is {value!r}; expected a tuple of names, such as {like}."
    )


def same_length(
    caller: str, primals: Any, tangents: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns primals and tangents as tuples; raises an error if their lengths differ."""
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise GradtoolsError(
                f"{caller}: {name} must be a tuple with one entry for each argument of f, got "
                f"{with_article(type(given).__name__)}. For one argument write (x,)."
            )
    if len(primals) != len(tangents) or not primals:
        raise GradtoolsError(
            f"{caller}: got {len(primals)} primals and {len(tangents)} tangents; expected one "
            "tangent for each primal, and at least one primal."
        )
    return tuple(primals), tuple(tangents)


def whole_number(caller: str, name: str, value: Any, least: int, unit: str = "") -> int:
    """Converts a count to an integer; raises an error if it is below `least` or not an integer."""
    try:
        number = least - 1 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        is_array, is_tree = hasattr(value, "shape"), isinstance(value, (tuple, list))
        is_data = is_tree or _is_data(value)
        came = type_in_words(value) if is_data and not is_array else shown(value)
        hint = f" {_curried(caller)}" if is_data and unit == "examples" else ""
        of = f" of {unit}" if unit else ""
        raise GradtoolsError(
            f"{caller}: {name} is {came}; expected a whole number{of}, {least} or more.{hint}"
        )
    return number


def whole_or_none(caller: str, name: str, value: Any, least: int, unit: str = "") -> int | None:
    """Returns None if the value is None; otherwise returns the result of `whole_number`."""
    return None if value is None else whole_number(caller, name, value, least, unit)


def as_float(caller: str, name: str, value: Any) -> float:
    """Converts a Python number to a float; raises an error if an integer is too large."""
    try:
        return float(value)
    except OverflowError:
        raise GradtoolsError(
            f"{caller}: {name} is an integer of {value.bit_length()} bits, which is too large "
            "for a floating-point number."
        ) from None


def check_tolerance(caller: str, value: Any) -> None:
    """Raises an error if the option `tolerance` is neither None nor a number in [0, 1)."""
    try:
        fits = value is None or 0 <= value < 1
    except (TypeError, ValueError, RuntimeError):  # a string; an array of several numbers
        fits = False
    if not fits:
        raise GradtoolsError(
            f"{caller}: tolerance is {shown(value)}; expected None or a relative error, at least 0 "
            "and less than 1."
        )


def order_among(
    caller: str, order: Any, known: Sequence[int], expected: str, name: str = "order"
) -> int:
    """Converts the argument `order` to an integer; raises an error if it is not in `known`."""
    try:
        number = None if isinstance(order, (bool, np.bool_)) else operator.index(order)
    except TypeError:
        number = None
    if number is None or number not in known:
        raise GradtoolsError(f"{caller}: {name} is {shown(order)}; expected {expected}.")
    return number


def normalized_argnums(
    caller: str, argnums: Any, count: int, name: str = "argnums"
) -> tuple[int, ...]:
    """Returns argnums as a tuple of nonnegative positions.

    Raises an error if a position is out of range for `count` arguments, or occurs twice.
    """
    if type(argnums) is int and argnums == 0 and count:
        return (0,)
    given = tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)
    positions = []
    for i in given:
        i = _as_position(caller, i, name)
        if not -count <= i < count:
            few = ("no positional arguments", "one positional argument, number 0")
            called = few[count] if count < 2 else f"{count} arguments, numbers 0 to {count - 1}"
            fix = "Keyword arguments are not differentiated; pass the argument by position."
            if not count and caller in ("formula", "gradient_graph", "why_zero"):
                fix = f"Pass the arguments of f: {caller}(f, *args)."
            if name in ("key_argnums", "carry_argnums"):
                fix = f"{name} cannot name keyword arguments; pass them by position."
            raise GradtoolsError(
                f"{caller}: {name} contains {i}, but f was called with {called}. {fix}"
            )
        positions.append(i % count)
    if len(set(positions)) < len(positions):
        twice = next(i for i in positions if positions.count(i) > 1)
        raise GradtoolsError(
            f"{caller}: {name} {given} names argument {twice} twice. Name each argument once."
        )
    if not positions:
        raise GradtoolsError(f"{caller}: {name} is empty; name at least one argument.")
    return tuple(positions)


def _as_position(caller: str, i: Any, name: str) -> int:
    # Dynamo makes integers symbolic; hasattr does not work on symbolic integers.
    if not isinstance(i, (bool, type)) and (isinstance(i, int) or hasattr(i, "__index__")):
        try:
            return operator.index(i)
        except TypeError:  # raised by an array that is not an integer
            pass
    raise GradtoolsError(
        f"{caller}: {name} must be integers, got {shown(i)}. Pass the position of an argument, "
        "counted from 0, or a tuple of positions."
    )


def refuse_arguments(
    caller: str, given: Any, name: str = "argnums", expected: str = "positions"
) -> None:
    """Raises an error if an option contains arrays, dicts or modules, as in `grad(f, x)`.

    The user probably intended the call `grad(f)(x)`.
    """
    for x in given if isinstance(given, (tuple, list)) else (given,):
        if _is_data(x):
            came = shown(x) if getattr(x, "shape", None) is not None else type_in_words(x)
            raise GradtoolsError(
                f"{caller}: got {came} in {name}; expected {expected}. {_curried(caller)}"
            )


def refuse_axes(backend: Backend, caller: str, in_axes: Any, out_axes: Any = 0) -> None:
    """Raises an error if in_axes or out_axes contains arrays or modules, as in `vmap(f, x)`."""
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        if axes is not None and not isinstance(axes, int):
            refuse_arguments(caller, backend.flatten(axes)[0], name, "axes")


def _is_data(x: Any) -> bool:
    """Returns whether x is data, such as an array, a dict or a module, and not an option."""
    if isinstance(x, (int, float, complex, str, type, tuple, list)) or x is None:
        return False
    try:
        operator.index(x)
    except TypeError:
        return True
    return getattr(x, "shape", ()) != ()


_OPTIONS = {
    "chunked": "chunk_size",
    "microbatched_value_and_grad": "chunk_size",
    "minimax_value_and_grad": "minimize, maximize",
}


def _curried(caller: str) -> str:
    options = f", {_OPTIONS[caller]}" if caller in _OPTIONS else ""
    return f"{caller} returns a function, which takes f's arguments: {caller}(f{options})(x)."


def as_array(
    backend: Backend,
    caller: str,
    x: Any,
    name: str,
    device_of: Array | None = None,
    fix: str = "",
) -> Array:
    """Converts x to a framework array on the device of `device_of`.

    name: The name of x in error messages.
    fix: The advice at the end of an error message.
    """
    if backend.is_array(x):
        return x
    backend.check_array(x, name)
    try:
        return backend.asarray(x, device_of)
    except GradtoolsError as error:
        if is_numeric(backend, x):  # x has an unsupported dtype
            raise GradtoolsError(f"{caller}: {name}: {error}") from error
        came = describe(backend, x)
        raise GradtoolsError(
            f"{caller}: {name} is {came}; expected an array of numbers.{fix}"
        ) from error


def differentiable_leaf(
    backend: Backend, caller: str, leaf: Any, name: str, elsewhere: str
) -> Array:
    """Returns the leaf as a differentiable array; otherwise raises an error that names the leaf.

    elsewhere: The advice at the end of an error message.
    """
    came, fix = "", "Cast the value"
    if isinstance(leaf, (bool, int)):
        came = f"the Python {type(leaf).__name__} {leaf!r}"
    elif not backend.is_array(leaf):
        if isinstance(leaf, (float, complex)) or hasattr(leaf, "__array__"):
            leaf = as_array(backend, caller, leaf, name)
        elif (error := refusal(caller, name, leaf)) is not None:
            raise error
        else:
            came = f"an object of type {type(leaf).__name__}"
            fix = "Pass the object's arrays in a list or a dictionary"
            if isinstance(leaf, Iterator):
                fix = "Pass the module to differentiate its parameters; pass other arrays in a list"
            if found := kind_of_module(leaf):
                kind = leaf.__name__ if isinstance(leaf, type) else type(leaf).__name__
                if isinstance(leaf, type):
                    came, fix = f"the class {kind}, not an instance", f"Pass {kind}(...)"
                elif found[0] != backend.name:
                    came = f"the {found[1]} module {kind}"
                    fix = f"Import gradtools.{found[0]}, which takes such modules"
    if not came and not backend.is_inexact(leaf):
        came = f"an array of dtype {backend.dtype_name(leaf)} and shape {tuple(leaf.shape)}"
    if came:
        raise GradtoolsError(
            f"{caller}: {name} is {came}; expected a floating or complex array. "
            f"{fix}, or {elsewhere}."
        )
    return leaf


def matching(
    backend: Backend,
    caller: str,
    x: Any,
    like: Array,
    names: Callable[[], tuple[str, str]],
    fix: str = "Reshape or cast the array.",
) -> Array:
    """Returns x as an array; raises an error if its shape or dtype does not match `like`."""
    if isinstance(x, complex) and not backend.is_complex(like):
        name, like_name = names()
        raise GradtoolsError(
            f"{caller}: {name} is the complex number {x}, but {like_name} is real "
            f"({backend.dtype_name(like)}). Pass a real number."
        )
    if isinstance(x, (bool, int, float, complex)):
        x = backend.cast(x, like)
    elif not backend.is_array(x):
        name, like_name = names()
        if not hasattr(x, "__array__"):
            raise GradtoolsError(
                f"{caller}: {name} is {describe(backend, x)}, expected {describe(backend, like)}, "
                f"like {like_name}."
            )
        x = as_array(backend, caller, x, name, like)
    if x.shape != like.shape or x.dtype != like.dtype:
        came = (tuple(x.shape), backend.dtype_name(x))
        wanted = (tuple(like.shape), backend.dtype_name(like))
        name, like_name = names()
        raise GradtoolsError(
            f"{caller}: {name} has shape {came[0]} and dtype {came[1]}; expected {wanted[0]} and "
            f"{wanted[1]}, like {like_name}. {fix}"
        )
    return x


def check_kind(what: str, given: Any, kinds: Any, expected: str) -> None:
    """Raises an error if `given`, params or state of `apply`, is not an instance of `kinds`."""
    if not isinstance(given, kinds):
        raise GradtoolsError(
            f"apply: {what} must be {expected}, as returned with apply; got "
            f"{with_article(type(given).__name__)}. Call apply(params, state, *args)."
        )


def note_of_apply(error: TypeError) -> None:
    """Adds a note to an error of a module that apply calls with other arguments than it takes."""
    if "argument" in str(error):
        hint = "pass the eqx.nn.State to make_functional as variables="
        hint = hint if "'state'" in str(error) else "pass a random key as key="
        error.add_note(f"apply(params, state, *args, key=None) calls the module with args; {hint}.")


def check_names(
    what: str, given: Any, names: Collection[str], pairs: str = "paths to arrays"
) -> None:
    """Raises an error if `given` is not a dictionary with the keys `names`."""
    check_kind(what, given, Mapping, f"a dictionary from {pairs}")
    missing = [name for name in names if name not in given]
    unexpected = [name for name in given if name not in names]
    if missing or unexpected:
        raise wrong_names(what, missing, unexpected)


def wrong_names(what: str, missing: list[str], unexpected: list[str]) -> GradtoolsError:
    """Returns the error for params or state with other names than make_functional returned."""
    return GradtoolsError(
        f"apply: {what} must contain the names that were returned with apply; missing: "
        f"{missing or 'none'}, unexpected: {unexpected or 'none'}. "
        "Call apply(params, state, *args)."
    )
