"""Reads `in_axes`, the batch axis of each argument of a call, for all operators.

As in `jax.vmap`, an integer or a tuple applies to positional arguments, and keyword arguments are
split along axis 0. A dictionary applies to f's parameters by name, for both positional and keyword
arguments. Arguments that `in_axes` does not name are split along axis 0; arrays of shape () are
shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from inspect import Parameter, signature, unwrap
from typing import Any, NamedTuple

from gradtools.errors import GradtoolsError

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Argument(NamedTuple):
    """A positional or keyword argument of a call, with its batch axes."""

    key: int | str  # The argument's position or keyword.
    value: Any
    axes: Any = None  # The batch axis, None if the argument is shared, or a tree of axes.
    named: bool = False  # Whether `in_axes` has an entry for this argument.
    label: str | None = None  # The name in messages of a value that is not an argument of f.

    @property
    def name(self) -> str:
        """The argument's name in messages."""
        kind = "argument" if isinstance(self.key, int) else "keyword argument"
        return self.label or f"{kind} {self.key}"


def arguments_of_call(
    caller: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    in_axes: Any,
    shared: Collection[int] | None = None,
) -> list[Argument]:
    """Returns the positional and then the keyword arguments of a call, each with its batch axes.

    shared: Positions of arguments that are shared unless in_axes names them. If `shared` is given,
        in_axes may be None.
    """
    arguments = [Argument(i, x, None if i in (shared or ()) else 0) for i, x in enumerate(args)]
    arguments += [Argument(key, x, 0) for key, x in kwargs.items()]
    if type(in_axes) is dict:
        named = _named(caller, f, arguments, in_axes)
        return [
            a._replace(axes=named[a.key], named=True) if a.key in named else a for a in arguments
        ]
    if in_axes is None and shared is not None:
        return arguments
    count = len(args)
    if isinstance(in_axes, int):
        return [a._replace(axes=in_axes) for a in arguments[:count]] + arguments[count:]
    if not isinstance(in_axes, (tuple, list)) or len(in_axes) != count:
        raise GradtoolsError(
            f"{caller}: in_axes is {in_axes!r}; expected one entry for each of the {count} "
            "positional arguments, an integer, or a dictionary from f's parameters to axes."
        )
    by_position = zip(arguments, in_axes, strict=False)
    return [a._replace(axes=axes, named=True) for a, axes in by_position] + arguments[count:]


def takes(f: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `kwargs` for which f has parameters."""
    known = _parameters(f)
    if any(p.kind is Parameter.VAR_KEYWORD for p in known):
        return kwargs
    names = {p.name for p in known if p.kind is not Parameter.POSITIONAL_ONLY}
    return {key: x for key, x in kwargs.items() if key in names}


def accepts(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether the signature of f, if known, accepts the arguments."""
    try:
        signature(f).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _named(
    caller: str, f: Callable[..., Any], given: list[Argument], in_axes: dict[Any, Any]
) -> dict[int | str, Any]:
    """Returns a dict from positions and keywords of arguments to the axes given in `in_axes`."""
    parameters = [p for p in _parameters(f) if p.kind not in _VARIADIC]
    keys: dict[Any, Any] = {a.key: a.key for a in given}
    by_position = [p.name for p in parameters if p.kind in _BY_POSITION]
    keys |= {name: i for i, name in enumerate(by_position) if i in keys}
    known = [*[p.name for p in parameters], *[a.key for a in given if isinstance(a.key, str)]]
    for name in in_axes:
        if name not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise GradtoolsError(
                f"{caller}: in_axes names {name!r}, which is neither a parameter of "
                f"{getattr(f, '__name__', type(f).__name__)} nor a keyword of this call. "
                f"{f'The parameters are {listed}' if known else 'f has no named parameters'}; "
                "name one of them, or pass the argument by keyword."
            )
    return {keys[name]: axes for name, axes in in_axes.items() if name in keys}


def _parameters(f: Callable[..., Any]) -> list[Parameter]:
    """Returns f's parameters; for a torch.nn.Module, the parameters of `forward`."""
    f, parameters = unwrap(f), list[Parameter]()
    for g in (f, getattr(f, "forward", None)):
        if not callable(g):
            continue
        try:
            parameters = list(signature(g).parameters.values())
        except (TypeError, ValueError):
            continue
        if any(p.kind not in _VARIADIC for p in parameters):
            break
    return parameters
