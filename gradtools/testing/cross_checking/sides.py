"""Defines `Side`, a program in one framework with values and derivatives as NumPy arrays.

A `Side` wraps a function, a module or the triple of `make_functional`, so the code of `cross_check`
does not depend on the framework. Both sides receive the same `Inputs`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.integrations import kind_of_module
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.flat import Arrays, FlatFunction

Path = tuple[str, ...]
Output = dict[str, np.ndarray]  # the leaves of an output, keyed by path
_BOTH = "Pass NumPy arrays, which each side converts to its own arrays."


class Side(FlatFunction):
    """A program in one framework.

    Attributes:
        params: The program's parameters as NumPy arrays, keyed by path; empty for a function.
        constant: The paths of parameters that the other program does not have.
    """

    def __init__(self, caller: str, name: str, subject: Any, dtype: str | None = None) -> None:
        super().__init__(caller, name)
        self.apply, params, state = resolve(self.gt, caller, name, subject)
        self.constant = set[str]()
        self._own, self._tree = self.waist.flatten(params)
        arrays = [cast(self.gt.to_numpy(x), dtype) for x in self._own]
        self.params = dict(zip(self.waist.leaf_paths(params), arrays, strict=True))
        leaves, tree = self.waist.flatten(state)
        converted = lambda x: self.array(cast(self.gt.to_numpy(x), dtype))
        leaves = [converted(x) if dtype and self.differentiable(x) else x for x in leaves]
        self._state = self.waist.unflatten(tree, leaves)

    def array(self, x: Any) -> Any:
        """Converts x to an array of the framework; a tensor is moved to the parameters' device."""
        x = np.asarray(x)
        if self.name == "jax":
            return self.gt.asarray(x.astype(narrowed(x.dtype.name)))
        return self.gt.asarray(x).to(self._own[0].device if self._own else None)

    def bound(self, inputs: Inputs, differentiated: Mapping[str, Any]) -> Callable[..., Any]:
        """Returns the program as a function of the differentiated parameters and inputs."""
        is_array = lambda x: isinstance(x, np.ndarray | np.generic)
        given = [self.array(x) if is_array(x) else x for x in inputs.leaves]
        own = [*map(self.array, self.params.values())]

        def program(*leaves: Any) -> Any:
            moving = iter(leaves)
            free = (path in differentiated for path in self.params)
            params = [next(moving) if f else x for f, x in zip(free, own, strict=True)]
            args = inputs.rebuilt(given, moving)
            return self.apply(self.waist.unflatten(self._tree, params), self._state, *args)[0]

        return program

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """The floating and complex parameters."""
        return inexact(self.params)

    @property
    def free_params(self) -> dict[str, np.ndarray]:
        """The parameters that are differentiated."""
        return {path: x for path, x in self.numbers.items() if path not in self.constant}

    def named_arrays(self, out: Any) -> dict[str, Any]:
        """Returns a dictionary from paths to the arrays of an output."""
        pairs = zip(self.waist.leaf_paths(out), self.waist.flatten(out)[0], strict=True)
        return {normal(path): x for path, x in pairs if self.waist.is_array(x)}

    def output(self, leaves: Arrays) -> Output:
        """Returns all arrays and numbers of the output as NumPy arrays, keyed by path."""
        out = self.run(lambda xs: self.program(*xs), leaves)
        paths = map(normal, self.waist.leaf_paths(out))
        return dict(zip(paths, self.numpy(self.waist.flatten(out)[0]), strict=True))

    def pullback(self, leaves: Arrays, cotangents: Arrays) -> list[np.ndarray | None]:
        """Returns J^H c for each leaf, or None if the output does not depend on the leaf."""

        def pulled(xs: Any, cts: Any) -> Any:
            fun: Any = lambda *xs: (self.flat(*xs), [])
            result = self.waist.vjp(fun, list(xs), groups=[1] * len(xs), once=True)
            return result.pullback(self.like(cts, result.outs))

        found = self.run(pulled, leaves, cotangents)
        return [None if g is None else self.gt.to_numpy(g) for g in found]


@dataclass(frozen=True)
class Inputs:
    """The flattened arguments of both programs.

    Attributes:
        trees: PyTorch's backend, which flattened the arguments.
        treedef: The treedef of the argument tuple.
        leaves: The leaves of the arguments: NumPy arrays, and other values that are passed on
            unchanged.
        names: Maps the index of each differentiated leaf to its path, such as "argument 0[x]".
        integers: A text for messages that names the integer and boolean arrays.
    """

    trees: Any
    treedef: Any
    leaves: list[Any]
    names: dict[int, str]
    integers: str

    @classmethod
    def read(cls, caller: str, args: Sequence[Any], dtype: str | None) -> Inputs:
        """Flattens `args`, and casts the arrays to `dtype`."""
        trees = import_module("gradtools.torch")._api._backend
        try:
            leaves, treedef = trees.flatten(tuple(args))
        except GradtoolsError as error:  # a JAX array
            raise GradtoolsError(f"{caller}: {error} {_BOTH}") from None
        names, integers = dict[int, str](), list[str]()
        for i, path in enumerate(map(tokens, trees.leaf_paths(tuple(args)))):
            name = f"argument {path[0]}" + "".join(f"[{token}]" for token in path[1:])
            kind = type(leaves[i])
            if kind.__module__.split(".")[0] == "torch":
                raise GradtoolsError(
                    f"{caller}: {name} is a {kind.__name__}, which only one framework accepts. "
                    f"{_BOTH}"
                )
            if not isinstance(leaves[i], np.ndarray | np.generic | float | complex):
                continue
            leaves[i] = cast(np.asarray(leaves[i]), dtype)
            if is_inexact(leaves[i]):
                names[i] = name
            else:
                integers.append(f"{name} is {leaves[i].dtype.name}")
        words = f" ({', '.join(integers)})" if integers else ""
        return cls(trees, treedef, leaves, names, words)

    @property
    def moving(self) -> dict[str, np.ndarray]:
        """The differentiated leaves, keyed by path."""
        return {name: self.leaves[i] for i, name in self.names.items()}

    def rebuilt(self, leaves: Sequence[Any], moving: Iterator[Any]) -> tuple[Any, ...]:
        """Builds the arguments from `leaves`; `moving` yields the differentiated leaves."""
        full = [next(moving) if i in self.names else x for i, x in enumerate(leaves)]
        return self.trees.unflatten(self.treedef, full)  # type: ignore[no-any-return]


def resolve(gt: Any, caller: str, name: str, subject: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Returns `(apply, params, state)`, with empty params and state for a function."""
    if library(one := getattr(subject, "__wrapped__", None)) == "equinox":  # jax.vmap(module)
        apply_one, params, state = gt.make_functional(one)
        example = lambda params, state: lambda *xs: apply_one(params, state, *xs)[0]
        apply = lambda params, state, *args: (gt.vmap(example(params, state))(*args), state)
        return apply, params, state
    size = len(subject) if isinstance(subject, tuple) else 0
    module, variables = subject if size == 2 and library(subject[0]) else (subject, None)
    kind = library(module)
    if kind is not None and (kind == "torch.nn") != (name == "torch"):
        raise GradtoolsError(
            f"{caller}: {name} is a {kind} module, {type(module).__name__}. Pass the PyTorch "
            "program as torch= and its port as jax=."
        )
    if kind == "flax.linen" and variables is None:
        raise GradtoolsError(
            f"{caller}: {name} is a flax.linen module, {type(module).__name__}, without its "
            f"variables. Pass the pair {name}=(module, variables), where variables is the "
            "result of module.init(key, *args)."
        )
    if kind == "torch.nn":  # includes frozen parameters, which the other side also has
        make_functional = import_module("gradtools.torch.modules").make_functional
        return make_functional(module, variables=variables, frozen_too=True)
    if kind is not None:
        return gt.make_functional(module, variables=variables)
    if size == 3 and callable(subject[0]):
        apply, params, state = subject
        return apply, {} if params is None else params, state
    if callable(subject):
        return (lambda params, state, *args: (subject(*args), state)), {}, {}
    words = f"a tuple of {size}" if size else f"a {type(subject).__name__}"
    raise GradtoolsError(
        f"{caller}: {name} is {words}; expected a function, a module, for flax.linen "
        "the pair (module, variables), or the triple (apply, params, state) of make_functional."
    )


def library(x: Any) -> str | None:
    """Returns the name of a module's library, or None if x is not a module."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(x, linen.Module):
        return "flax.linen"
    found = kind_of_module(x)
    return found[1] if found else None


@contextlib.contextmanager
def in_double_precision(wanted: bool) -> Iterator[None]:
    """Context manager that enables JAX's 64-bit types if `wanted` is true."""
    if not wanted:
        yield
        return
    import jax

    home = jax if hasattr(jax, "enable_x64") else import_module("jax.experimental")
    with home.enable_x64(True):
        yield


def narrowed(dtype: str) -> str:
    """Returns JAX's dtype for an integer dtype; without x64, 64 bits become 32 bits."""
    import jax

    wide = jax.config.read("jax_enable_x64")
    return dtype if wide else {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)


# --- trees of NumPy arrays


def nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Builds nested dictionaries from a dictionary of leaves that is keyed by path."""
    tree: dict[Any, Any] = {}
    for path, x in flat.items():
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = x
    return tree


def is_inexact(x: np.ndarray) -> bool:
    """Returns whether x is floating or complex."""
    return tolerances.real_name(x.dtype) in tolerances.EPSILONS


def inexact(arrays: Output) -> Output:
    """Returns the floating and complex arrays."""
    return {path: x for path, x in arrays.items() if is_inexact(x)}


def cast(x: np.ndarray, dtype: str | None) -> np.ndarray:
    """Casts x to another precision; complex arrays stay complex, and integers are unchanged."""
    if dtype is None or not is_inexact(x):
        return x
    if x.dtype.kind == "c":
        if dtype not in ("float64", "float32"):
            raise GradtoolsError(f"cross_check: no complex dtype has the precision of {dtype}.")
        return x.astype({"float64": "complex128", "float32": "complex64"}[dtype])
    bfloat16 = dtype == "bfloat16"
    return x.astype(import_module("ml_dtypes").bfloat16 if bfloat16 else dtype)


def normal(path: str) -> str:
    """Normalizes a leaf's path, so that the paths ['a'], .a and .a.value are equal."""
    return "".join(f"[{token}]" for token in tokens(path))


def tokens(path: str) -> Path:
    """Splits a leaf's path into names and indices."""
    result = re.findall(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[([^\]]*)\]|\.?([^\[\].]+)", path)
    names = tuple(next(part for part in parts if part) for parts in result if any(parts))
    return names[:-1] if len(names) > 1 and names[-1] == "value" else names
