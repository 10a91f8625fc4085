"""`LeafProgram` represents a user's call as a function of its array leaves.

`LeafProgram` flattens ``f(*args, **kwargs)``: its leaves are the arrays among the arguments, each
named after its argument and path, and ``run(leaves)`` returns the leaves of the result of f. The
constructor also validates the user's arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.arguments.checks import check_function, differentiable_leaf, normalized_argnums
from gradtools.arguments.keyword_hints import passed_on
from gradtools.arguments.wording import describe, is_numeric
from gradtools.backend import Backend
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError
from gradtools.rules import replaced_at

_WHOLE = ("gradient_graph", "formula")  # operators that require every output of f to be an array


class Framework:
    """Lazily imports the PyTorch or JAX modules that implement `gradtools.seeing`.

    `seeing/torch` and `seeing/jax` contain `recorded_run`, `training`, `passes` and `translating`.

    Args:
        backend: The backend of the user's program.
        caller: The name of the operator, for error messages.

    Raises:
        GradtoolsError: The backend is not PyTorch or JAX.
    """

    def __init__(self, backend: Backend, caller: str) -> None:
        if backend.name not in ("torch", "jax"):
            raise GradtoolsError(
                f"{caller}: the backend {backend.name!r} does not provide this operator."
            )
        self._package = f"gradtools.seeing.{backend.name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return import_module(f"{self._package}.{name}")


class LeafProgram:
    """The call ``f(*args, **kwargs)``, represented as a function of its array leaves.

    Attributes:
        framework: The PyTorch or JAX modules that implement `gradtools.seeing`.
        leaves: The arrays among the leaves of the arguments; NumPy arrays are converted.
        statics: A pair (leaf, name) for each leaf that is not an array, such as a module.
        names: The name of each leaf, such as "argument 0['w']" or "argument 'scale'".
        out_names: The name of each leaf of the result of the latest run.
    """

    def __init__(
        self,
        backend: Backend,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Any = (),
    ) -> None:
        check_function(caller, f, curried=False)
        self.backend, self.caller, self.f = backend, caller, f
        self.argnums = normalized_argnums(caller, argnums, len(args)) if argnums != () else ()
        self.framework = Framework(backend, caller)
        runs = self.framework.recorded_run
        self._called = runs.repeatable(caller, f)
        opened = None
        if self.argnums:
            opened = backend.opened(caller, self._called, args, kwargs, self.argnums)
        self._models = {i for i in self.argnums if runs.is_model(args[i])} if opened else set()
        if opened is not None:
            self._called, args = opened, opened.args
        self.out_names: list[str] = []
        self.leaves: list[Any] = []
        self.statics: list[tuple[Any, str]] = []
        self.names: list[str] = []
        self._owners: list[int] = []  # argument index of each leaf; keyword arguments come last
        self._places: list[int] = []  # positions of the arrays among all leaves of the arguments
        self._count, self._keywords = len(args), list(kwargs)
        called, whole = [*map(str, range(len(args))), *map(repr, kwargs)], [*args, *kwargs.values()]
        self._held, self._treedef = backend.flatten(whole)
        for k, path in enumerate(backend.leaf_paths(whole)):
            owner, _, below = path[1:].partition("]")  # such as [0]['w']
            i, leaf = int(owner), self._held[k]
            name = f"argument {called[i]}{below}"
            if i in self.argnums:
                elsewhere = "keep it in an argument that argnums does not name"
                if callable(leaf):
                    elsewhere += f"; f comes first: {caller}(f, *args)"
                leaf = differentiable_leaf(backend, caller, leaf, name, elsewhere)
            elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fciub":
                leaf = backend.asarray(leaf)
            self._held[k] = leaf
            if not backend.is_array(leaf):
                self.statics.append((leaf, name))
            else:
                self._places.append(k)
                self.leaves.append(leaf)
                self.names.append(name)
                self._owners.append(i)

    def with_values(self) -> LeafProgram:
        """Returns the program; raises GradtoolsError if a leaf is a tracer, which has no values."""
        if any(map(self.backend.is_traced, self.leaves)):
            raise GradtoolsError(
                f"{self.caller}: called inside of a transform (jit, vmap, grad), where arrays have "
                "no values. Call the operator outside of the transform."
            )
        return self

    @contextmanager
    def running(self, how: str = "") -> Iterator[None]:
        """Context manager that raises GradtoolsError with the source line if the program fails."""
        try:
            yield
        except GradtoolsError:
            raise
        except Exception as error:
            options = ("argnums", "model", "optimizer") if self.caller == "why_zero" else ()
            optimizer = ""
            if options and any(hasattr(x, "param_groups") for x, _ in self.statics):
                optimizer = " Pass the optimizer as optimizer=."
            what = f"{type(error).__name__}: {str(error).strip().rstrip('.')}{place_of(error)}"
            raise GradtoolsError(
                f"{self.caller}: f{how} raised {what}. f must run at the given arguments."
                + (passed_on(error, options) or optimizer)
            ) from error

    @property
    def wrt(self) -> list[int]:
        """Returns the indices of the differentiable leaves of the arguments in `argnums`."""
        positions = [k for k, owner in enumerate(self._owners) if owner in self.argnums]
        return [k for k in positions if self.backend.is_inexact(self.leaves[k])]

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Calls the function with the array leaves `leaves`; returns the leaves of the result."""
        held = replaced_at(self._held, self._places, leaves)
        args = list(self.backend.unflatten(self._treedef, held))
        kwargs = dict(zip(self._keywords, args[self._count :], strict=True))
        result = self._called(*args[: self._count], **kwargs)
        outs, _ = self.backend.flatten(result)
        converted = any(is_numeric(self.backend, x) for x in outs)
        if not converted or (self.caller in _WHOLE and not any(map(self.backend.is_array, outs))):
            hint = " Do not convert the result to NumPy or Python." * converted
            hint += " Is a return statement missing?" * (result is None)
            raise GradtoolsError(
                f"{self.caller}: f returned {describe(self.backend, result)}; it must return "
                f"arrays.{hint}"
            )
        self.out_names = [f"output{path}" for path in self.backend.leaf_paths(result)]
        for name, out in zip(self.out_names, outs, strict=True):
            if self.caller in _WHOLE and not is_numeric(self.backend, out):
                raise GradtoolsError(
                    f"{self.caller}: f returned {describe(self.backend, out)} at {name}; expected "
                    "an array. Return arrays."
                )
        return outs

    @property
    def spoken(self) -> list[str]:
        """Returns the leaf names with the names of f's parameters, such as ``params['w']``."""
        called = spoken(self.f, self.names)
        for k, i in enumerate(self._owners):
            if i in self._models:  # write model.weight, not model['weight']
                called[k] = re.sub(r"\['([^']*)'\]", r".\1", called[k], count=1)
        return called


def spoken(f: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Replaces argument positions in leaf names with the names of f's parameters, if known.

    ``argument 0['w']`` becomes ``params['w']``, and ``argument 'x'`` becomes ``x``.
    """
    try:
        parameters = list(inspect.signature(getattr(f, "forward", f)).parameters.values())
    except (TypeError, ValueError):  # built-in functions may lack a signature
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")

    def renamed(name: str) -> str:
        match = re.fullmatch(r"argument (?:(\d+)|'(.*?)')((?:[\[.].*)?)", name)
        if match is None:
            return name
        position, owner, path = match.groups()
        if position and int(position) < len(plain):
            owner = plain[int(position)]
        elif position and rest:
            owner = f"{rest}[{int(position) - len(plain)}]"
        return f"{owner}{path}" if owner else name

    return [*map(renamed, names)]
