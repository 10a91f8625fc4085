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
from gradtools.testing.matching_parameters.parameter_matching import matched
from gradtools.testing.matching_parameters.parameter_names import joined, without_collection


@dataclass(frozen=True)
class Pairing:
    """Maps each JAX parameter to the corresponding PyTorch parameter.

    Attributes:
        paths: The names of JAX's parameters, in order. The list is empty if no parameters are
            paired.
        names: The names of PyTorch's parameters, in order.
        pairs: For each JAX parameter, the mapping entry that converts PyTorch's array to this
            parameter.
        notes: Notes for the report.
    """

    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    pairs: list[ParameterPair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def in_jax_layout(
        self, arrays: Sequence[np.ndarray | None], gradients: bool = False
    ) -> list[np.ndarray | None]:
        """Converts one array per PyTorch parameter to one array per JAX parameter.

        gradients: Whether the arrays are gradients. If a JAX parameter is the sum of two PyTorch
            parameters, their values or directions are added, but their gradients, which are equal,
            are not added.
        """
        known = dict(zip(self.names, arrays, strict=True))
        convert = lambda e: e.layout.to_jax(known[e.torch_name]) if gradients else e.to_jax(known)
        return [None if known[e.torch_name] is None else convert(e) for e in self.pairs]


def pair_parameters(caller: str, first: Side, second: Side, mapping: Any, partial: bool) -> Pairing:
    """Pairs the parameters of two programs; unpaired parameters are treated as constants.

    partial: Whether parameters of the JAX model may remain unpaired.

    Raises:
        GradtoolsError: The parameters of the two models cannot be paired by names and shapes.
    """
    without = [side for side in (first, second) if not side.params]
    if without and mapping is not None:
        raise GradtoolsError(
            f"{caller}: a mapping pairs the parameters of two models; there are no parameters in "
            f"{' and '.join(side.name for side in without)}."
        )
    constants = "parameter{} of the {} model {} no counterpart: not differentiated"
    if without:
        for side in (first, second):
            side.constant.update(side.params)
        models = [side.name for side in (first, second) if side.params]
        return Pairing(notes=[f"the {constants.format('s', name, 'have')}" for name in models])
    mine, theirs = (
        {joined(tokens(path)): (path, x) for path, x in side.free_params.items()}
        for side in (first, second)
    )
    mapping = _mapping(caller, first, second, mapping, partial)
    entries: dict[str, ParameterPair] = {}
    for e in mapping.entries:
        if e.torch_name in mine:  # buffers are not compared
            name = joined(e.jax_path)
            entries[name if name in theirs else joined(without_collection(e.jax_path))] = e
    missing = [] if partial else [name for name in theirs if name not in entries]
    unknown = [name for name in entries if name not in theirs]
    if missing or unknown:
        raise GradtoolsError(
            f"{caller}: the mapping's names differ from JAX's parameter names: missing "
            f"{missing or 'none'}, unknown {unknown or 'none'}. JAX's names are {[*theirs]}."
        )
    for name, e in entries.items():
        shape, expected = mine[e.torch_name][1].shape, theirs[name][1].shape
        if shape != e.torch_shape or e.layout.to_jax(np.empty(shape)).shape != expected:
            raise GradtoolsError(
                f"{caller}: parameter {e.torch_name} has shape {shape} in PyTorch, and {name} has "
                f"shape {expected} in JAX, but the mapping is {e} for PyTorch's shape "
                f"{e.torch_shape}. Make the mapping from the same models, or correct the model."
            )
    used = {name for e in entries.values() for name in (e.torch_name, e.added)}
    notes = [*mapping.notes]
    for side, names, counterparts in ((second, theirs, entries), (first, mine, used)):
        for name, (path, _) in names.items():
            if name not in counterparts:
                side.constant.add(path)
                notes.append(constants.format(f" {name}", side.name, "has"))
    names = [name for name in theirs if name in entries]
    order = [name for name in mine if name in used]
    pairs = [entries[name] for name in names]
    return Pairing([f"parameter {name}" for name in names], order, pairs, notes)


def _mapping(caller: str, first: Side, second: Side, mapping: Any, partial: bool) -> Any:
    """Returns `mapping`, or a mapping from equal names and shapes or from `match_parameters`."""
    if isinstance(mapping, ParameterMapping):
        return mapping
    if not isinstance(mapping, Mapping | None):
        raise GradtoolsError(
            f"{caller}: mapping is a {type(mapping).__name__}; expected None, the "
            "result of match_parameters, or its overrides (a dictionary from PyTorch's names to "
            "JAX's)."
        )
    mine = {joined(tokens(path)): x for path, x in first.free_params.items()}
    theirs = {tokens(path): x for path, x in second.free_params.items()}
    paths = {joined(path): path for path in theirs}
    shapes = {name: x.shape for name, x in mine.items()}
    if mapping is None and shapes == {joined(path): x.shape for path, x in theirs.items()}:
        same = Layout("as it is")
        pairs = [ParameterPair(name, paths[name], same, shape) for name, shape in shapes.items()]
        return ParameterMapping(tuple(pairs))
    return matched(caller, mine, nested(theirs), mapping, partial)
