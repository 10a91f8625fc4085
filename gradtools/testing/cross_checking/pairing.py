"""Pairs the parameters of two models and converts their arrays to one layout.

Two models are compared in JAX's layout: all arrays that belong to PyTorch's parameters (values,
directions, gradients) are converted by the same linear map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.sides import Side, nested, tokens
from gradtools.testing.diverging.layouts import match_parameters
from gradtools.testing.flat import Arrays

ToJax = Callable[[Any], Any]


@dataclass(frozen=True)
class Pairing:
    """The map from PyTorch's parameters to JAX's.

    Attributes:
        paths: The names of JAX's parameters, in order; empty if nothing is paired.
        carry: Converts PyTorch's arrays to JAX's layout and order; None stays None.
        notes: Notes for the report.
    """

    paths: list[str]
    carry: Callable[[Sequence[np.ndarray | None]], list[np.ndarray | None]]
    notes: list[str] = field(default_factory=list)


def pair_parameters(first: Side, second: Side, mapping: Any) -> Pairing:
    """Pairs the parameters of two sides.

    Raises:
        GradtoolsError: A parameter of one model has no counterpart of its shape in the other.
    """
    if not (first.params and second.params):
        if mapping is not None:
            raise GradtoolsError(
                "cross_check: a mapping pairs the parameters of two models; there are none in "
                f"{' and '.join(side.name for side in (first, second) if not side.params)}."
            )
        notes = []
        for side in (first, second):
            side.paired = False
            if side.params:
                notes.append(
                    f"the parameters of the {side.name} model have no counterpart: constant"
                )
        return Pairing([], lambda arrays: [], notes)
    to_jax, words, notes = _to_jax(first, second, mapping)

    def carry(arrays: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        likes = first.free_params.values()
        pairs = list(zip(arrays, likes, strict=True))
        full = [np.zeros_like(like) if x is None else x for x, like in pairs]
        carried = _in_jax_layout(first, second, to_jax, full)
        if all(x is not None for x in arrays):
            return [*carried]
        marks = [np.full_like(like, x is not None) for x, like in pairs]
        connected = _in_jax_layout(first, second, to_jax, marks)
        return [x if mark.any() else None for x, mark in zip(carried, connected, strict=True)]

    carried = carry(list(first.free_params.values()))
    paths = []
    for x, (path, y) in zip(carried, second.free_params.items(), strict=True):
        paths.append(f"parameter {_dotted(path)}")
        if x is not None and x.shape != y.shape:
            raise GradtoolsError(
                f"cross_check: {paths[-1]} has shape {y.shape} in JAX, but PyTorch's has shape "
                f"{x.shape} after {words}. Give a mapping that transposes it, or correct the model."
            )
    return Pairing(paths, carry, notes)


def _in_jax_layout(first: Side, second: Side, to_jax: ToJax, arrays: Arrays) -> Arrays:
    """PyTorch's arrays in JAX's layout and order."""
    result = to_jax(first.params_tree(arrays))
    leaves, paths = second.waist.flatten(result)[0], second.waist.leaf_paths(result)
    wanted = [tokens(path) for path in second.free_params]
    by_name = {
        _within(tokens(path), wanted): np.asarray(x)
        for path, x in zip(paths, leaves, strict=True)
        if tokens(path)[0] != "batch_stats"
    }
    missing = [".".join(name) for name in wanted if name not in by_name]
    unknown = [".".join(name) for name in by_name if name not in wanted]
    if missing or unknown:
        raise GradtoolsError(
            "cross_check: the mapping does not give JAX's parameters: "
            f"missing {missing or 'none'}, unknown {unknown or 'none'}. JAX's names are "
            f"{['.'.join(name) for name in wanted]}."
        )
    return [by_name[name] for name in wanted]


def _within(name: tuple[str, ...], wanted: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The name without flax's collection, unless JAX's parameters include it."""
    return name[1:] if name[0] == "params" and name not in wanted else name


def _to_jax(first: Side, second: Side, mapping: Any) -> tuple[ToJax, str, list[str]]:
    """The map, its name in messages, and notes."""
    if mapping is None:
        return _same_names(first, second)
    if hasattr(mapping, "to_jax"):
        return mapping.to_jax, "the mapping", []
    if isinstance(mapping, Mapping):
        return _by_table(first, mapping), "the mapping", []
    if callable(mapping):
        return mapping, "the mapping", []
    raise GradtoolsError(
        f"cross_check: mapping is a {type(mapping).__name__}; expected None, a dictionary from "
        "PyTorch's names to JAX's, a function of PyTorch's parameters, or an object with to_jax."
    )


def _same_names(first: Side, second: Side) -> tuple[ToJax, str, list[str]]:
    """The map for equal names and shapes, or for the common layouts of the two libraries."""
    mine = {_dotted(path): x.shape for path, x in first.free_params.items()}
    theirs = {_dotted(path): x.shape for path, x in second.free_params.items()}
    if mine == theirs:
        names = {_dotted(path): tokens(path) for path in second.free_params}
        order = [names[_dotted(path)] for path in first.free_params]
        same = lambda tree: nested(dict(zip(order, first.params_list(tree), strict=True)))
        return same, "pairing", []
    variables = nested({tokens(path): x for path, x in second.params.items()})
    result = match_parameters(first.params_tree(list(first.free_params.values())), variables)
    return result.to_jax, "the common layouts", list(result.notes)


def _by_table(first: Side, table: Mapping[str, Any]) -> ToJax:
    names = [_dotted(path) for path in first.free_params]
    missing = [name for name in names if name not in table]
    unknown = [name for name in table if name not in names]
    if missing or unknown:
        raise GradtoolsError(
            f"cross_check: the mapping names {unknown or 'nothing'} that PyTorch's model does not "
            f"have, and leaves out {missing or 'nothing'}."
        )

    def to_jax(tree: Any) -> Any:
        arrays = dict(zip(names, first.params_list(tree), strict=True))
        return nested(dict(_entry(table[name], x) for name, x in arrays.items()))

    return to_jax


def _entry(target: Any, x: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    name, axes = target if isinstance(target, tuple) else (target, None)
    return tuple(name.replace("/", ".").split(".")), x if axes is None else x.transpose(axes)


def _dotted(path: str) -> str:
    return ".".join(tokens(path))
