"""Parameters of LSTM, GRU and RNN cells in PyTorch, flax and equinox.

PyTorch stacks the gates' rows (i, f, g, o for an LSTM; r, z, n for a GRU) and has two biases. flax
has a kernel and perhaps a bias for each gate ("ii", "hf"), or one for all gates ("dense_i",
"dense_h"); equinox has PyTorch's matrices and one bias. JAX's bias is the sum of PyTorch's two, but
for a GRU's gate n, whose second bias is multiplied by the gate r.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradtools.testing.matching_parameters.mapping import Layout, ParameterPair
from gradtools.testing.matching_parameters.parameter_names import Path

_GATES = {4: "ifgo", 3: "rzn", 1: ("",)}


def cells_of(arrays: Mapping[Any, np.ndarray], is_torch: bool) -> dict[Any, list[Any]]:
    """The cells of a model by (gates, inputs, width).

    In PyTorch a cell is a module and the end of its parameters' names ("_l0_reverse"); in JAX it is
    the path of the module.
    """
    cells: dict[Any, list[Any]] = {}
    for name, x in arrays.items():
        if is_torch:
            module, _, leaf = name.rpartition(".")
            if leaf.startswith("weight_ih"):
                end = leaf.removeprefix("weight_ih")
                prefix = f"{module}." if module else ""
                width = arrays[f"{prefix}weight_hh{end}"].shape[1]
                cells.setdefault((len(x) // width, x.shape[1], width), []).append((module, end))
        elif name[-1] == "weight_hh" and (*name[:-1], "weight_ih") in arrays:
            inputs = arrays[*name[:-1], "weight_ih"].shape[1]
            cells.setdefault((len(x) // x.shape[1], inputs, x.shape[1]), []).append(name[:-1])
        elif name[-1] == "kernel" and len(name) > 1 and name[-2] in ("dense_h", "ho", "hn", "h"):
            cell = name[:-2]
            first = {"dense_h": "dense_i", "ho": "io", "hn": "in", "h": "i"}[name[-2]]
            if (*cell, first, "kernel") in arrays:
                gates = {"ho": 4, "hn": 3}.get(name[-2], x.shape[1] // len(x))
                inputs = len(arrays[*cell, first, "kernel"])
                cells.setdefault((gates, inputs, len(x)), []).append(cell)
    return cells


def recurrent_pairs(
    prefix: str, end: str, cell: Path, torch: Mapping[str, Any], jax: Mapping[Path, Any]
) -> list[ParameterPair]:
    """The pairs of one cell's parameters.

    Args:
        prefix: The module's name in PyTorch, with its dot.
        end: The end of its parameters' names.
        cell: The cell's path in JAX.
        torch: PyTorch's arrays.
        jax: JAX's arrays.
    """
    weights = {"i": f"{prefix}weight_ih{end}", "h": f"{prefix}weight_hh{end}"}
    first, second = (f"{prefix}bias_{side}{end}" for side in ("ih", "hh"))
    width = torch[weights["h"]].shape[1]
    rows = len(torch[weights["h"]])
    gates = rows // width
    pairs = []

    def add(name: str, path: Path, part: tuple[int, int], summed: int = 0, **layout: Any) -> None:
        """Adds a pair. part: The rows; the second bias is added to them up to `summed`."""
        whole = part == (0, rows)
        how = Layout("recurrent", rows=None if whole else part, **layout)
        extra = (second, (part[0], summed)) if summed > part[0] else ("", (0, 0))
        pairs.append(ParameterPair(name, (*cell, *path), how, torch[name].shape, *extra))

    every = 0, rows
    sums = rows - width if gates == 3 else rows  # the rows in which the biases are summed
    if (*cell, "weight_ih") in jax:  # equinox
        add(weights["i"], ("weight_ih",), every)
        add(weights["h"], ("weight_hh",), every)
        if (*cell, "bias") in jax:
            add(first, ("bias",), every, sums)
        if (*cell, "bias_n") in jax:
            add(second, ("bias_n",), (sums, rows))
        return pairs
    if (*cell, "dense_i", "kernel") in jax:
        parts = {"dense_": every}
    else:
        parts = {g: (k * width, (k + 1) * width) for k, g in enumerate(_GATES[gates])}
    for gate, part in parts.items():
        paths = {}
        for side in ("i", "h"):
            names = (gate + side,) if gate == "dense_" else (side + gate, f"{side}{gate}_")
            paths[side] = next(n for n in names if (*cell, n, "kernel") in jax)
            add(weights[side], (paths[side], "kernel"), part, axes=(1, 0))
        biases = {side for side in paths if (*cell, paths[side], "bias") in jax}
        if first in torch and biases:
            summed = 0 if len(biases) == 2 else min(part[1], sums) if gate == "dense_" else part[1]
            side = min(biases, key="ih".index)
            add(first, (paths[side], "bias"), part, summed)
            if len(biases) == 2:
                add(second, (paths["h"], "bias"), part)
    return pairs
