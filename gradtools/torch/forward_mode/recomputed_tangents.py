"""The passes in forward mode of a frozen function: its tangents, and those of its pullback.

Both recompute the function at dual numbers. The first keeps no graph; the second one differentiates
the graph of one recomputation (forward over reverse).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradtools.torch.autograd_graph import nodes_made, scripts_refused
from gradtools.torch.compiling import left_to_python
from gradtools.torch.double_backward import gate_graph
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents
from gradtools.torch.forward_mode.one_tangent import OneTangent, tangent_of
from gradtools.torch.forward_mode.symbolic_zeros import ComplexNumbers, NoProductsOfZero
from gradtools.torch.functorch_wrappers import is_inexact, unshared
from gradtools.torch.modes import NOTHING, dual_level, dual_of, unpacked
from gradtools.torch.operation_marks import CHUNK, detached
from gradtools.torch.replaying.nodes import pulled_back
from gradtools.torch.replaying.recomputing import first_pass_state, without_hooks

Tensor = torch.Tensor
Entries = Sequence[Any]
left_to_python(__name__)


def tangents(use: Any, zs: Entries, dzs: Entries) -> list[Any]:
    """Tangents of the outputs of a use of a frozen function, without any graph."""
    recorded = nodes_made() - use.nodes_of_comparison[0]
    dys = _tangents(use, zs, dzs)
    if nodes_made() - use.nodes_of_comparison[0] != recorded:  # by TorchScript, which no mode sees
        with scripts_refused(use.caller):
            _tangents(use, zs, dzs)
    return dys


def _tangents(use: Any, zs: Entries, dzs: Entries) -> list[Any]:
    fixed = use.start.reached.tensors
    use = use.with_modes(use.modes)
    use.within = lambda: OneTangent(fixed)
    with first_pass_state(use), dual_level():
        duals = [_dual(z, dz) for z, dz in zip(zs, dzs, strict=True)]
        ys, _ = use.one(0, [], duals)
        return [_tangent(y) for y in ys]


def pullback_tangents(use: Any, zs: Entries, dzs: Entries, cts: Entries) -> list[Any]:
    """The tangent of a use's pullback of cts along dzs: forward over reverse."""
    try:
        if not use.uses.is_complex:
            products = NoProductsOfZero(refuses_complex=True)
            return _pullback_tangents(use, zs, dzs, cts, products)
    except ComplexNumbers:
        use.uses.is_complex = True
    return _pullback_tangents(use, zs, dzs, cts, NOTHING)


def _pullback_tangents(
    use: Any, zs: Entries, dzs: Entries, cts: Entries, products: Any
) -> list[Any]:
    # Users' saved tensors hooks cannot pack symbolic zeros; rules may use torch.func only if
    # no hooks are set.
    own = unpacked()
    use = use.with_modes(use.modes)
    use.within = stops = lambda: NoGradStopsTangents(hidden=False)
    level, graph = dual_level(), torch.enable_grad()
    with without_hooks(use.leaves), first_pass_state(use), own, level, graph, products:
        duals = [_dual(z, dz) for z, dz in zip(zs, dzs, strict=True)]
        duals = [x.requires_grad_() if is_inexact(x) else x for x in duals]
        ys, _ = use.one(0, [], duals)
        run: Any
        run, tried = use.rerunnable(0, [], duals)
        gate_graph(use.caller, run, tried, ys, duals)
        # With create_graph=True, without which some gradients have wrong tangents.
        with stops():
            grads = pulled_back(ys, duals, cts, True, True)
        return [_tangent(g) for g in grads]


def _dual(z: Tensor, dz: Tensor | None) -> Tensor:
    z = detached(z, CHUNK)
    return z if dz is None else dual_of(unshared(z), detached(dz, CHUNK))


def _tangent(y: Any) -> Tensor | None:
    tangent = tangent_of(y) if isinstance(y, Tensor) and is_inexact(y) else None
    return None if tangent is None else detached(tangent, CHUNK)
