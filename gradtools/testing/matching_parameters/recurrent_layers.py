"""Pairs the parameters of LSTM, GRU and RNN cells in PyTorch, flax and equinox.

PyTorch stacks the gates' rows (i, f, g, o for an LSTM; r, z, n for a GRU) and has two biases. flax
has a kernel and perhaps a bias for each gate ("ii", "hf") or for all gates ("dense_i", "dense_h");
equinox has PyTorch's matrices and one bias. The bias in JAX is the sum of PyTorch's two biases,
except for a GRU's gate n, whose second bias is multiplied by the gate r.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradtools.testing.matching_parameters.mapping import Layout, ParameterPair
from gradtools.testing.matching_parameters.parameter_names import Path

_GATES = {4: "ifgo", 3: "rzn"}


def leaf_of_cell(name: str) -> tuple[str, str] | None:
    """Splits the name of a PyTorch cell's parameter into a leaf and a suffix ("_l0_reverse")."""
    found = re.fullmatch(r"((?:weight|bias)_[ih]h)(_l\d+\w*)?", name)
    return None if found is None else (found[1], found[2] or "")


def gate_of(name: Any = "") -> str | None:
    """Returns the side (input or hidden) and gate in a flax name: "hf", or "h" for all gates."""
    found = re.fullmatch(r"(?:dense_)?([ih][ifgorzn]?)_?", str(name))
    return found and found[1]


def cell_pairs(ours: Mapping[str, Any], cell: Mapping[str, Path]) -> list[ParameterPair]:
    """Returns the pairs of one cell's parameters.

    Args:
        ours: PyTorch's parameters, keyed by leaf, each with a `name` and a `shape`.
        cell: Maps the gate and leaf of each JAX parameter, "hf.kernel" in flax, to its path.
    """
    rows, width = ours["weight_hh"].shape
    gates, every, pairs = rows // width, (0, rows), list[ParameterPair]()
    sums = rows - width if gates == 3 else rows  # the number of rows with summed biases

    def add(leaf: str, path: Path, part: tuple[int, int], summed: int = 0, **layout: Any) -> None:
        """Adds a pair for the rows `part`; the second bias is added to the rows up to `summed`."""
        if leaf in ours:
            how = Layout("recurrent", rows=None if part == every else part, **layout)
            extra = (ours["bias_hh"].name, (part[0], summed)) if summed > part[0] else ()
            pairs.append(ParameterPair(ours[leaf].name, path, how, ours[leaf].shape, *extra))

    for key, path in cell.items():
        gate, _, leaf = key.rpartition(".")
        k = _GATES.get(gates, "").find(gate[1:])
        part = (k * width, (k + 1) * width) if gate[1:] else every
        has_both = gate and {f"{side}{gate[1:]}.bias" for side in "ih"} <= {*cell}
        if gate and leaf == "kernel":
            add(f"weight_{gate[0]}h", path, part, axes=(1, 0))
        elif leaf == "bias_n":
            add("bias_hh", path, (sums, rows))
        elif leaf == "bias" and not has_both:
            add("bias_ih", path, part, min(part[1], sums))
        else:  # equinox uses PyTorch's names
            add(f"bias_{gate[0]}h" if has_both else leaf, path, part)
    return pairs
