"""`match_parameters`: pairs the parameters of a torch.nn model and of its port to JAX.

The libraries store the same numbers under different names and in different axis orders:

    layer                  torch.nn                       flax.linen and flax.nnx
    linear                 weight (out, in)               kernel (in, out)
    the same, several axes weight (out, in)               kernel (*in, *out)
    convolution            weight (out, in, *window)      kernel (*window, in, out)
    transposed             weight (in, out, *window)      kernel (*reversed window, in, out)
    with transpose_kernel  weight (in, out, *window)      kernel (*window, out, in)
    embedding              weight (number, width)         embedding (number, width)
    normalization          weight, bias                   scale, bias
    running statistics     running_mean, running_var      mean, var
    attention              in_proj_weight (3 width, in)   query, key, value: kernel (in, heads, d)
    LSTM, GRU, RNN         weight_ih (gates h, in)        a kernel for each gate, or for all
                           bias_ih + bias_hh              one bias
    weight normalization   norm (out, 1), direction       scale (out), kernel

`match_parameters` pairs the parameters by name and shape, and lists unpaired arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.matching_parameters.mapping import (
    Layout,
    ParameterMapping,
    ParameterPair,
    Shape,
)
from gradtools.testing.matching_parameters.parameter_names import (
    CALLER,
    STATISTICS,
    Path,
    joined,
    name_key,
    natural_key,
    read_jax,
    read_torch,
    split_name,
    without_collection,
)
from gradtools.testing.matching_parameters.recurrent_layers import (
    cell_pairs,
    gate_of,
    leaf_of_cell,
)

_LEAVES = {  # PyTorch's name of an array, and the names in JAX
    "weight": ("kernel", "scale", "embedding", "weight"),
    "running_mean": ("mean",),
    "running_var": ("var",),
    "weight_g": ("g",),
}
_NORMED = "parametrizations.weight.original"  # torch.nn.utils.parametrizations.weight_norm


def match_parameters(
    torch_params: Any,
    jax_params: Any,
    overrides: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
) -> ParameterMapping:
    """Pairs the parameters of a torch.nn model and of its port to flax or equinox.

    Modules are paired by name, ignoring case and separators ("layer.0.LayerNorm",
    "layer_0/layer_norm"), then by a unique common suffix of their names, then, among modules of
    equal kind and shapes, by order. Within a pair of modules the arrays' names and shapes determine
    the layout; a transposed convolution with as many input channels as output channels is
    recognized by its class or name, and is assumed not to use flax's transpose_kernel.

    Args:
        torch_params: A `torch.nn.Module`, or a dictionary from names to arrays (a state_dict).
            Arrays named running_mean and running_var are paired with JAX's batch statistics.
        jax_params: All variables or only the "params" of flax.linen, or `(module, variables)`;
            an `nnx.Module` or `nnx.State`; an `equinox.Module`; nested dictionaries of arrays.
        overrides: Pairs that take precedence over pairing by name. The keys are PyTorch's names of
            modules or arrays. A value is the name in JAX (its parts joined by "." or "/"), a pair
            of this name and a `Layout` or a permutation of the axes, or None to omit the array.
        partial: If True, unpaired arrays are listed in `left_out` and do not raise an error.

    Returns:
        A `ParameterMapping`, whose methods `to_jax` and `into` convert the parameters.

    Raises:
        GradtoolsError: A parameter has no counterpart, or a name in overrides is unknown.

    Example:
        >>> import numpy as np
        >>> from gradtools.testing import match_parameters
        >>> mine = {"fc1.weight": np.ones((3, 2)), "fc1.bias": np.ones(3)}
        >>> theirs = {"fc_1": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}}
        >>> mapping = match_parameters(mine, theirs)
        >>> print(mapping)
        fc1.weight -> fc_1/kernel (linear)
        fc1.bias -> fc_1/bias (as it is)
        >>> mapping.to_jax(mine)["fc_1"]["kernel"].shape
        (2, 3)
    """
    return matched(CALLER, torch_params, jax_params, overrides, partial)


def matched(
    caller: str, torch_params: Any, jax_params: Any, overrides: Any, partial: bool
) -> ParameterMapping:
    """Implements `match_parameters`; `caller` is the name of the operator in error messages."""
    modules = [*getattr(torch_params, "named_modules", lambda: ())()]
    transposed = {name for name, m in modules if "Transpose" in type(m).__name__}
    search = _Matching(read_torch(caller, torch_params), read_jax(caller, jax_params), transposed)
    for name, target in (overrides or {}).items():
        search.override(name, target)
    search.by_name()
    search.by_order()
    return search.result(caller, partial)


class _Matching:
    """The state of the search: the unpaired arrays, and the pairs found so far.

    Attributes:
        torch: PyTorch's unpaired arrays, keyed by name.
        jax: JAX's unpaired arrays, keyed by path.
        renamed: Maps names of PyTorch modules to the JAX names that the overrides give them.
    """

    def __init__(
        self, torch: dict[str, np.ndarray], jax: dict[Path, np.ndarray], transposed: set[str]
    ) -> None:
        self.torch, self.jax, self.transposed, self.source = {**torch}, {**jax}, transposed, torch
        self.renamed, self.entries = dict[str, str](), list[ParameterPair]()
        self.left_out, self.notes = list[str](), list[str]()

    def override(self, name: str, target: Any) -> None:
        """Applies one override: pairs an array, omits the array, or renames a module."""
        if name not in self.torch:
            if not any(n.startswith(f"{name}.") for n in self.torch) or not isinstance(target, str):
                raise GradtoolsError(
                    f"{CALLER}: overrides (mapping) names {name!r}, which is neither an array nor "
                    f"a module of the PyTorch model. The model's names begin with "
                    f"{', '.join([*self.source][:4])}."
                )
            self.renamed[name] = target
            return
        x = self.torch.pop(name)
        if target is None:
            self.left_out.append(f"{name} (as in overrides)")
            return
        jax_name, how = target if isinstance(target, tuple) else (target, None)
        path = next((p for p in self.jax if joined(p) == joined(split_name(jax_name))), None)
        if path is None:
            known = ", ".join(joined(p) for p in list(self.jax)[:4])
            raise GradtoolsError(
                f"{CALLER}: overrides (mapping) pairs {name} with {jax_name!r}, which the JAX "
                f"model does not have. The model's names begin with {known}."
            )
        y = self.jax.pop(path)
        if how is None:
            layout = _layout(x.shape, path, y.shape)
        else:
            layout = how if isinstance(how, Layout) else Layout(f"axes {how}", tuple(how))
        if layout is None or layout.to_jax(x).shape != y.shape:
            raise GradtoolsError(
                f"{CALLER}: overrides (mapping) pairs {name} of shape {x.shape} with {jax_name} "
                f"of shape {y.shape}. Give the permutation of axes that makes the shapes "
                "equal, as a pair (name, axes)."
            )
        self.entries.append(ParameterPair(name, path, layout, x.shape))

    # --- pairs of modules

    def by_name(self) -> None:
        """Pairs modules with equal names or a unique common suffix of names, longest first."""
        self.ours = _torch_modules(self.torch)
        self.theirs = _jax_modules(self.jax, self.ours)
        groups: dict[tuple[str, ...], tuple[list[str], list[Path]]] = {}
        named: list[tuple[Any, int, Any]] = [(self._spelled(m), 0, m) for m in self.ours]
        for parts, k, module in [*named, *((m, 1, m) for m in self.theirs)]:
            ends = {name_key(("whole", *parts)), *(name_key(parts[i:]) for i in range(len(parts)))}
            for end in (end for end in ends if not all(part.isdigit() for part in end)):
                groups.setdefault(end, ([], []))[k].append(module)
        for end in sorted(groups, key=lambda end: len("".join(end)), reverse=True):
            mine = [m for m in groups[end][0] if m in self.ours]
            theirs = [m for m in groups[end][1] if m in self.theirs]
            if len(mine) == len(theirs) == 1:
                self._pair(mine[0], theirs[0])

    def by_order(self) -> None:
        """Pairs the remaining modules with equal leaves and shapes in order."""
        groups: dict[Any, tuple[list[str], list[Path]]] = {}
        for module, leaves in self.ours.items():
            kind = sorted((leaf, part.shape) for leaf, part in leaves.items())
            groups.setdefault((_role(module, leaves), *kind), ([], []))[0].append(module)
        for jax_module in sorted(self.theirs, key=natural_key):
            fitting = (g for g in groups.values() if self._fits(g[0][0], jax_module))
            next(fitting, ([], []))[1].append(jax_module)
        for mine, theirs in groups.values():
            for pair in zip(mine, theirs, strict=True) if len(mine) == len(theirs) else ():
                if self._pair(*pair):
                    name = joined(pair[1]) or "the model"
                    self.notes.append(f"paired by order: {pair[0]} with {name}")

    def _pair(self, module: str, jax_module: Path) -> bool:
        """Pairs the arrays of two modules if their shapes match; returns whether they match."""
        if not (pairs := self._fits(module, jax_module)):
            return False
        self.entries += pairs
        del self.ours[module], self.theirs[jax_module]
        names = {e.torch_name for e in pairs}
        for e in pairs:
            del self.jax[e.jax_path]
            whole = e.layout.rows is None and e.added not in {"", *names}
            if whole and e.added_rows[1] < e.torch_shape[0]:  # nnx.GRUCell: one bias for the gate n
                self.left_out.append(f"{e.added} (its last rows have no counterpart)")
        for name in names | {e.added for e in pairs}:
            self.torch.pop(name, None)
        return True

    def _fits(self, module: str, jax_module: Path) -> list[ParameterPair]:
        """Returns the pairs of two modules' arrays, or [] if a parameter cannot be paired."""
        ours, theirs = self.ours[module], self.theirs[jax_module]
        if "weight_hh" in ours:
            pairs = cell_pairs(ours, theirs)
            shape = lambda e: e.layout.to_jax(np.empty(e.torch_shape)).shape
            fit = all(shape(e) == self.jax[e.jax_path].shape for e in pairs)
            weights = {ours[leaf].name for leaf in ("weight_ih", "weight_hh")}
            return pairs if fit and weights <= {e.torch_name for e in pairs} else []
        if _role(module, ours) not in ("", *map(str, jax_module[-1:])):
            return []
        found: dict[str, ParameterPair] = {}
        for leaf, part in ours.items():
            for path in (theirs[n] for n in _LEAVES.get(leaf, (leaf,)) if n in theirs):
                transposed = module in self.transposed
                layout = _layout(part.shape, path, self.jax[path].shape, transposed)
                if layout is not None:
                    layout, shape = replace(layout, rows=part.rows), self.source[part.name].shape
                    found[leaf] = ParameterPair(part.name, path, layout, shape)
                    break
        trained = [{*leaves} - {*STATISTICS} for leaves in (ours, found)]
        complete = trained[0] == trained[1] and len(trained[0]) == len({*theirs} - {"mean", "var"})
        return [*found.values()] if complete else []

    def result(self, caller: str, partial: bool) -> ParameterMapping:
        """Returns the mapping; raises an error if an array is unpaired and `partial` is false."""
        rest: list[str] = []
        for name, x in self.torch.items():
            if x.dtype.kind in "iub":
                self.left_out.append(f"{name} (an integer buffer)")
            elif name.endswith(STATISTICS):
                self.left_out.append(f"{name} (no statistics in JAX's parameters)")
            else:
                rest.append(f"{name} {x.shape} (no counterpart in JAX)")
        rest += [f"{joined(p)} {y.shape} (no counterpart in PyTorch)" for p, y in self.jax.items()]
        if rest and not partial:
            option = "overrides" if caller == CALLER else "mapping"
            all_of_them = ", and partial=True omits all of them" if caller == CALLER else ""
            raise GradtoolsError(
                f"{caller}: unpaired parameters: {', '.join(rest)}.{self._unequal()} Pair these "
                f"with {option}={{torch name: jax name}}; None in place of JAX's name omits a "
                f"PyTorch parameter{all_of_them}."
            )
        order = [*self.source]
        entries = sorted(self.entries, key=lambda e: order.index(e.torch_name))
        left_out = (*self.left_out, *rest)
        return ParameterMapping(tuple(entries), left_out, tuple(self.notes), self.source)

    def _unequal(self) -> str:
        """Returns a sentence that lists unpaired arrays with equal names but different shapes."""
        found = []
        for name, x in self.torch.items():
            module, _, leaf = name.rpartition(".")
            for path, y in self.jax.items():
                is_pair = joined(path[:-1]) == module and path[-1] in _LEAVES.get(leaf, (leaf,))
                if is_pair and _layout(x.shape, path, y.shape) is None:
                    found.append(f"{name} {x.shape} and {joined(path)} {y.shape}")
        return f" The shapes of {', '.join(found)} do not correspond." if found else ""

    def _spelled(self, module: str) -> tuple[str, ...]:
        """Returns the path of a PyTorch module, renamed by the overrides."""
        for prefix in sorted(self.renamed, key=len, reverse=True):
            if module == prefix or module.startswith(f"{prefix}."):
                module = self.renamed[prefix] + module[len(prefix) :]
                break
        return split_name(module)


# --- arrays by module, under the names of torch.nn


class Part(NamedTuple):
    """An array of PyTorch, or a range of its rows."""

    name: str
    shape: Shape
    rows: tuple[int, int] | None = None


def _role(module: str, leaves: Mapping[str, Part]) -> str:
    """Returns "query", "key" or "value" if the arrays are rows of a joint matrix, else ""."""
    return module.rpartition(".")[2] if any(part.rows for part in leaves.values()) else ""


Modules = dict[str, dict[str, Part]]
JaxModules = dict[Path, dict[str, Path]]


def _torch_modules(arrays: Mapping[str, np.ndarray]) -> Modules:
    """Groups PyTorch's arrays by module and leaf.

    A joint matrix of query, key and value is split into three modules. Each cell of a recurrent
    layer is a module. A layer with weight normalization has the leaves "weight" (the direction) and
    "weight_g" (the norm).
    """
    modules: Modules = {}
    for name, x in arrays.items():
        owner, _, leaf = name.replace(_NORMED + "0", "weight_g").rpartition(".")
        if leaf == "original1":
            owner, leaf = name.removesuffix(_NORMED + "1").rstrip("."), "weight"
        elif leaf == "weight_v":
            leaf = "weight"
        if leaf.startswith("in_proj_"):
            n, prefix = len(x) // 3, f"{owner}." if owner else ""
            for k, role in enumerate(("query", "key", "value")):
                part = Part(name, (n, *x.shape[1:]), (k * n, (k + 1) * n))
                modules.setdefault(prefix + role, {})[leaf.removeprefix("in_proj_")] = part
            continue
        if f"{owner.removesuffix('out_proj')}in_proj_weight" in arrays:
            owner = owner.removesuffix("_proj")
        if cell := leaf_of_cell(leaf):
            leaf, end = cell
            owner = owner if end in ("", "_l0") else f"{owner}.{end[2:]}"
        modules.setdefault(owner, {})[leaf] = Part(name, x.shape)
    return modules


def _jax_modules(arrays: Mapping[Path, np.ndarray], ours: Modules) -> JaxModules:
    """Groups JAX's arrays by module and leaf.

    The leaf "g" is the norm of a layer with weight normalization. If PyTorch's model has a
    recurrent cell, modules that are named like gates become leaves of their cell, such as
    "hf.kernel".
    """
    modules: JaxModules = {}
    has_cells = any("weight_hh" in leaves for leaves in ours.values())
    for path in arrays:
        module, leaf = without_collection(path[:-1]), str(path[-1])
        if has_cells and (gate := gate_of(*path[-2:-1])):
            module, leaf = module[:-1], f"{gate}.{leaf}"
            module = module[:-1] if module[-1:] == ("cell",) else module  # for an RNN
        elif "/" in leaf:  # linen's WeightNorm has "layer/kernel/scale"
            module, leaf = (*module[:-1], *leaf.split("/")[:-2]), "g"
        elif (*path[:-2], "g") in arrays:  # equinox's WeightNorm has g, layer.weight, layer.bias
            module = module[:-1]
        modules.setdefault(module, {})[leaf] = path
    return modules


def _layout(shape: Shape, path: Path, target: Shape, transposed: bool = False) -> Layout | None:
    """Returns the layout that converts one shape to the other, or None if no layout does."""
    leaf, rank, window = str(path[-1]), len(shape), range(2, len(shape))
    if leaf != "kernel":
        tried = [Layout("as it is")]
        if leaf in ("bias", "g") or "/" in leaf:
            tried.append(Layout("as it is, several axes", shape=target))
        elif rank == 2 and leaf != "embedding":
            tried.append(Layout("transposed", (1, 0)))
    elif rank <= 2:
        tried = [Layout("linear", (1, 0))] if rank == 2 else []
        if rank == 2 < len(target) and shape[1] in [*accumulate(target, mul)][:-1]:
            tried.append(Layout("linear, several axes", (1, 0), shape=target))
    else:
        usual = Layout("convolution", (*window, 1, 0))
        other = Layout("transposed convolution", (*window, 0, 1), tuple(range(rank - 2)))
        transposed = transposed or "transpose" in "".join(map(str, path)).lower()
        tried = [other, usual] if transposed else [usual, other]
    empty, alike = np.empty(shape), prod(shape) == prod(target)
    return next((x for x in tried if alike and x.to_jax(empty).shape == target), None)
