"""Splits a call's arguments into static (`static_argnames`) and dynamic arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError


def _signature(fun: Any) -> inspect.Signature | None:
    """Returns the signature of `fun`, or None if `fun` is a ufunc or has no signature."""
    if isinstance(inspect.unwrap(fun), np.ufunc):
        return None
    try:
        signature = inspect.signature(fun)
        if isinstance(fun, partial):  # drops the parameters that the partial fixes by keyword
            free = [p for p in signature.parameters.values() if p.name not in fun.keywords]
            return signature.replace(parameters=free)
        return signature
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Parameters:
    """Splits a call's arguments into static and dynamic arguments, in the signature's order."""

    # The function's signature; None if unknown, or if the function takes only *args.
    signature: inspect.Signature | None
    names: tuple[str, ...]  # The names of the parameters.
    static: tuple[bool, ...]  # Whether each parameter is static.
    keyword_only: tuple[bool, ...]  # Whether each parameter is keyword-only.
    star: str | None = None  # The name of *args, which precede the keyword-only arguments.

    @classmethod
    def positional(cls, fun: Any) -> Parameters:
        """Returns the parameters of a kernel, which is called with positional arguments."""
        signature = _signature(fun)
        every = list(signature.parameters.values()) if signature else []
        kept = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if signature is None or len(kept) < len([p for p in every if p.kind is not p.KEYWORD_ONLY]):
            return cls(None, (), (), ())
        count = len(kept)
        names = tuple([p.name for p in kept])
        return cls(signature.replace(parameters=kept), names, (False,) * count, (False,) * count)

    @classmethod
    def of(cls, name: str, fun: Any, static_argnames: tuple[str, ...]) -> Parameters:
        """Returns a function's parameters without **kwargs (rules take positional arguments)."""
        signature = _signature(fun)
        if signature:
            kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
            signature = signature.replace(parameters=kept)
        parameters = list(signature.parameters.values()) if signature else []
        unknown = [s for s in static_argnames if s not in [p.name for p in parameters]]
        if unknown:
            raise GradtoolsError(
                f"custom_rule: static_argnames names {unknown[0]!r}, but {name} has the "
                f"arguments {', '.join(p.name for p in parameters) or 'none'}."
            )
        fixed = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
        rest = [i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL]
        if signature is None or (rest and not fixed):
            return cls(signature, (), (), ())
        return cls(
            signature,
            tuple([p.name for p in fixed]),
            tuple([p.name in static_argnames for p in fixed]),
            tuple([p.kind is p.KEYWORD_ONLY for p in fixed]),
            parameters[rest[0]].name if rest else None,
        )

    @property
    def statics(self) -> list[str]:
        """The names of the static arguments, in order."""
        return [name for name, s in zip(self.names, self.static, strict=True) if s]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Splits the arguments of a call into `(statics, rest)`."""
        if not self.names:
            if kwargs and self.signature is not None:
                call = self.signature.bind(*args, **kwargs)
                return (), call.args
            return (), args
        more: tuple[Any, ...] = ()
        if kwargs or len(args) != len(self.names) or any(self.keyword_only) or self.star:
            assert self.signature is not None
            call = self.signature.bind(*args, **kwargs)
            call.apply_defaults()
            args = tuple([call.arguments[name] for name in self.names])
            more = call.arguments[self.star] if self.star else ()
        if not more and not any(self.static):
            return (), args
        every = list(zip(args, self.static, self.keyword_only, strict=True))
        first, last = ([a for a, s, o in every if not s and o is only] for only in (False, True))
        return tuple([a for a, s, _ in every if s]), (*first, *more, *last)

    def call(self, fun: Callable[..., Any], statics: Sequence[Any], rest: Sequence[Any]) -> Any:
        """Calls `fun` with the arguments that `bound` split."""
        if not self.names:
            return fun(*rest)
        moving = [k for s, k in zip(self.static, self.keyword_only, strict=True) if not s]
        first, stop = moving.count(False), len(rest) - moving.count(True)
        own, more = iter([*rest[:first], *rest[stop:]]), rest[first:stop]
        fixed = iter(statics)
        values = [next(fixed) if s else next(own) for s in self.static]
        named = list(zip(self.names, values, self.keyword_only, strict=True))
        positional = [v for _, v, k in named if not k]
        return fun(*positional, *more, **{n: v for n, v, k in named if k})
