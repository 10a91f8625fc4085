"""Maps keyword arguments of other libraries to their replacements in gradtools.

Error messages suggest the keywords of gradtools; docs/coming-from.md contains the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import Signature, signature
from typing import Any

from gradtools.code_origin import is_our_frame, lines_of
from gradtools.errors import TypeRefusal

_STATIC = "name the parameters in static_argnames=; static arguments come first in fwd and in bwd"
_WHOLE = "call checkpoint only on the parts to recompute, because it recomputes all of f"
_NESTS = "omit the keyword; derivatives nest, and results have a graph if the inputs require grad"
_COMPLEX = (
    "omit the keyword; grad of a real f takes complex arguments, and vjp and jvp accept a complex f"
)
_RANKS = "add each rank's gradients to a GradientAccumulator; its mean takes group= and axis_name="
_HINTS: dict[str, str | dict[str, str]] = {
    "nondiff_argnums": _STATIC,
    "nondiff_argnames": _STATIC,
    "static_argnums": {"custom_rule": _STATIC, "checkpoint": "close over static values"},
    "argnames": "pass positions: argnums=0, or a tuple of positions",
    "argnum": "write argnums=",
    "wrt": "write argnums=",
    "holomorphic": _COMPLEX,
    "allow_int": "leave integer arguments out of argnums",
    "create_graph": _NESTS,
    "retain_graph": "omit the keyword; the pullback of vjp may be called many times",
    "allow_unused": 'write disconnected_inputs="zeros"',
    "materialize_grads": 'write disconnected_inputs="zeros"',
    "vectorize": "omit the keyword; chunk_size= limits the number of passes that run together",
    "strict": 'use grad or value_and_grad with disconnected_inputs="strict"',
    "in_dims": "write in_axes=",
    "out_dims": "write out_axes=",
    "randomness": "omit the keyword; each example draws its own numbers",
    "policy": f"{_WHOLE}, or use jax.checkpoint(f, policy=...), which composes with gradtools",
    "prevent_cse": _WHOLE,
    "use_reentrant": f"omit the keyword; {_WHOLE}",
    "concrete": _WHOLE,
    "batch_size": "write chunk_size=",
    "chunks": "write chunk_size=, the number of examples in a chunk",
    "group": {"microbatched_value_and_grad": _RANKS},
    "axis_name": {"microbatched_value_and_grad": _RANKS, "vmap": "call jax.vmap(f, axis_name=...)"},
    "verify": "omit the keyword; this operator recomputes nothing",
    "solver": {"implicit_solution": "write linear_solve="},
    "result_shape_dtypes": "write out=ArraySpec(shape, dtype)",
    "vmap_method": "write vectorized=True, or omit the keyword to call the kernel once per example",
}


def passed_on(error: Exception, options: Sequence[str] = ()) -> str:
    """Returns a suggested replacement if `error` reports an unknown keyword of f; otherwise "".

    options: The keywords of the operator.
    """
    unknown = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    hint = _HINTS.get(unknown[1]) if unknown else None
    if unknown and (near := get_close_matches(unknown[1], options, 1)):
        hint = f"write {near[0]}="
    return f" Instead of {unknown[1]}=, {hint}." if unknown and isinstance(hint, str) else ""


def wrong_call(
    operator: Callable[..., Any], args: Sequence[Any], error: Exception
) -> TypeRefusal | None:
    """Returns an error that explains how a call differs from the signature of the operator or of f.

    Python's message names the operator's private class, but not its parameters. Returns None if the
    error was raised inside the call, unless the primals of f were passed as one tuple.
    """
    trace, name = error.__traceback__, _name(operator)
    if not isinstance(error, TypeError) or trace is None:
        return None
    if trace.tb_next is not None:
        last = lines_of(error)[0][0]
        missing = "required positional argument" in str(error) and is_our_frame(last)
        if not (missing and name in ("vjp", "linearize") and isinstance(args[-1], (tuple, list))):
            return None
        return TypeRefusal(
            f"{name}: {error}. Pass the arguments of f one by one: {name}(f, *primals)."
        )
    said = str(error).partition("() ")[2]
    unknown = _UNKNOWN.search(said)
    if unknown is None:
        said = said if said.startswith("missing") else "too many positional arguments"
        return TypeRefusal(
            f"{name}: {said}. Expected {_usage(operator)}.{_decorator(operator, said)}"
        )
    keyword = unknown[1]
    known = [*signature(operator).parameters]
    near = get_close_matches(keyword, known, 1)
    hint = _HINTS.get(keyword) or (f"write {near[0]}=" if near else "")
    if isinstance(hint, dict):
        hint = hint.get(name, "leave it out")
    instead = f"Instead, {hint}." if hint else f"Expected {_usage(operator)}."
    return TypeRefusal(f"{name}: there is no argument {keyword}=. {instead}")


_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")


def _name(operator: Callable[..., Any]) -> str:
    """Returns the public name of an operator; for `__init__`, the name of the class."""
    owner, _, name = operator.__qualname__.rpartition(".")
    return owner if name == "__init__" else name


def _decorator(operator: Callable[..., Any], said: str) -> str:
    """Returns how to decorate a function, for calls such as `@checkpoint()`; otherwise ""."""
    if said not in [f"missing 1 required positional argument: {f!r}" for f in ("f", "G")]:
        return ""
    own, *options = signature(operator).parameters.values()
    direct = any(p.kind is p.VAR_POSITIONAL or p.name == "primals" for p in options)
    if direct or own.name != "self":  # the operator returns no function
        return ""
    name, options = _name(operator), [p for p in options[1:] if p.kind is not p.VAR_KEYWORD]
    required = [p for p in options if p.default is p.empty]
    given = ", ".join(f"{p.name}=..." for p in required or options[:1]) or "..."
    plain = "" if required else f"@{name} without parentheses, or with options "
    return f" To decorate a function, write {plain}@functools.partial({name}, {given})."


def _usage(operator: Callable[..., Any]) -> str:
    """Formats the operator's signature without annotations."""
    parameters = [p.replace(annotation=p.empty) for p in signature(operator).parameters.values()]
    plain = Signature([p for p in parameters if p.name != "self"])
    return f"{_name(operator)}{plain}"
