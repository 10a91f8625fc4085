"""Pairs the parameters of two models, and converts PyTorch's arrays to JAX's layout.

Two models are compared in JAX's layout: all arrays that belong to PyTorch's parameters (values,
directions, gradients) are converted by the linear maps of a `ParameterMapping`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.sides import Side, nested, tokens
from gradtools.testing.matching_parameters.mapping import Layout, ParameterMapping, ParameterPair
from gradtools.testing.matching_parameters.parameter_matching import paired
from gradtools.testing.matching_parameters.parameter_names import joined, without_collection


@dataclass(frozen=True)
class Pairing:
    """For each of JAX's parameters the PyTorch parameter that corresponds to it.

    Attributes:
        paths: The names of JAX's parameters, in order; empty if nothing is paired.
        names: The names of PyTorch's parameters, in order.
        pairs: For each of JAX's parameters the pair.
        notes: Notes for the report.
    """

    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    pairs: list[ParameterPair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def in_jax_layout(
        self, arrays: Sequence[np.ndarray | None], gradients: bool = False
    ) -> list[np.ndarray | None]:
        """One array for each of PyTorch's parameters, as those of JAX's; None stays None.

        gradients: Whether the arrays are gradients. Two parameters whose sum is one parameter in
            JAX have the same gradient; their values and directions are added.
        """
        known = dict(zip(self.names, arrays, strict=True))
        convert = lambda e: e.layout.to_jax(known[e.torch_name]) if gradients else e.to_jax(known)
        return [None if known[e.torch_name] is None else convert(e) for e in self.pairs]


def pair_parameters(
    caller: str, first: Side, second: Side, mapping: Any, partial: bool = False
) -> Pairing:
    """Pairs the parameters of two sides; what has no counterpart becomes constant.

    partial: Whether a parameter of the JAX model may lack a counterpart.

    Raises:
        GradtoolsError: A parameter of the JAX model has no counterpart of its shape.
    """
    without = [side for side in (first, second) if not side.params]
    if without and mapping is not None:
        raise GradtoolsError(
            f"{caller}: a mapping pairs the parameters of two models; there are none in "
            f"{' and '.join(side.name for side in without)}."
        )
    notes: list[str] = []
    if without:
        for side in (first, second):
            side.constant.update(side.params)
            if side.params:
                notes.append(
                    f"the parameters of the {side.name} model have no counterpart: constant"
                )
        return Pairing(notes=notes)
    mine = {joined(tokens(path)): x for path, x in first.free_params.items()}
    theirs = {tokens(path): x for path, x in second.free_params.items()}
    mapping = _mapping(caller, mine, theirs, mapping, partial)
    known = {joined(path) for path in theirs}
    entries: dict[str, ParameterPair] = {}
    for entry in mapping.entries:
        name = joined(entry.jax_path)
        name = name if name in known else joined(without_collection(entry.jax_path))
        if entry.torch_name not in mine:
            continue  # a buffer
        entries[name] = entry
        if (shape := mine[entry.torch_name].shape) != entry.torch_shape:
            raise GradtoolsError(
                f"{caller}: parameter {entry.torch_name} has shape {shape} in PyTorch, and "
                f"{entry.torch_shape} in the mapping. Make the mapping from the same models."
            )
    used = {name for entry in entries.values() for name in (entry.torch_name, entry.added)}
    names = {first: dict(zip(first.free_params, mine, strict=True))}
    names[second] = dict(zip(second.free_params, map(joined, theirs), strict=True))
    notes += mapping.notes
    for side, counterparts in ((second, entries if partial else known), (first, used)):
        for path, name in names[side].items():
            if name not in counterparts:
                side.constant.add(path)
                notes.append(
                    f"parameter {name} of the {side.name} model has no counterpart: constant"
                )
    wanted = {joined(tokens(path)): x for path, x in second.free_params.items()}
    missing, unknown = (
        [n for n in wanted if n not in entries],
        [n for n in entries if n not in wanted],
    )
    if missing or unknown:
        raise GradtoolsError(
            f"{caller}: the mapping does not give JAX's parameters: missing {missing or 'none'}, "
            f"unknown {unknown or 'none'}. JAX's names are {[*wanted]}."
        )
    pairs = [entries[name] for name in wanted]
    for pair, (name, y) in zip(pairs, wanted.items(), strict=True):
        shape = pair.layout.to_jax(mine[pair.torch_name]).shape
        if shape != y.shape:
            raise GradtoolsError(
                f"{caller}: parameter {name} has shape {y.shape} in JAX, but PyTorch's has "
                f"shape {shape} after the mapping. Correct the mapping or the model."
            )
    order = [name for name in mine if name in used]
    return Pairing([f"parameter {name}" for name in wanted], order, pairs, notes)


def _mapping(
    caller: str,
    mine: dict[str, np.ndarray],
    theirs: dict[tuple[str, ...], np.ndarray],
    mapping: Any,
    partial: bool,
) -> ParameterMapping:
    """The mapping; made from equal names and shapes, or by `match_parameters`."""
    if isinstance(mapping, ParameterMapping):
        return mapping
    if not isinstance(mapping, Mapping | None):
        raise GradtoolsError(
            f"{caller}: mapping is a {type(mapping).__name__}; expected None, what "
            "match_parameters made, or its overrides (a dictionary from PyTorch's names to JAX's)."
        )
    paths = {joined(path): path for path in theirs}
    shapes = {name: x.shape for name, x in mine.items()}
    if mapping is None and shapes == {name: theirs[path].shape for name, path in paths.items()}:
        same = Layout("as it is")
        return ParameterMapping(
            tuple([ParameterPair(name, paths[name], same, shape) for name, shape in shapes.items()])
        )
    names = (caller, "mapping")
    return paired(mine, nested(theirs), mapping or {}, partial, names=names)
