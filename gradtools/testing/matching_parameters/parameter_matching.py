"""`match_parameters`: pairs the parameters of a torch.nn model with those of its port to JAX.

The libraries store the same numbers under other names and with another order of axes:

    layer                  torch.nn                       flax.linen and flax.nnx
    linear                 weight (out, in)               kernel (in, out)
    the same, several axes weight (out, in)               kernel (*in, *out)
    convolution            weight (out, in, *window)      kernel (*window, in, out)
    transposed             weight (in, out, *window)      kernel (*reversed window, in, out)
    with transpose_kernel  weight (in, out, *window)      kernel (*window, out, in)
    embedding              weight (number, width)         embedding (number, width)
    normalisation          weight, bias                   scale, bias
    running statistics     running_mean, running_var      mean, var
    attention              in_proj_weight (3 width, in)   query, key, value: kernel (in, heads, d)
    LSTM, GRU, RNN         weight_ih (gates h, in)        a kernel for each gate, or for all
                           bias_ih + bias_hh              one bias
    weight normalization   norm (out, 1), direction       scale (out), kernel

`match_parameters` pairs by name and shape and lists what it cannot pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

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
    Path,
    joined,
    name_key,
    read_jax,
    read_torch,
    split_name,
    without_collection,
)
from gradtools.testing.matching_parameters.recurrent_layers import cells_of, recurrent_pairs

_RENAMED = {"running_mean": "mean", "running_var": "var"}
_WEIGHTS = ("kernel", "scale", "embedding")
_NORMED = "parametrizations.weight.original"  # torch.nn.utils.parametrizations.weight_norm
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def match_parameters(
    torch_params: Any,
    jax_params: Any,
    overrides: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
) -> ParameterMapping:
    """Pairs the parameters of a torch.nn model with those of its port to flax or equinox.

    Modules are paired by name, ignoring the spelling ("layer.0.LayerNorm", "layer_0/layer_norm"),
    then by a common end of their names if only one pair has it, then, among those of equal kind and
    shapes, by order. Within a pair of modules the arrays' names and shapes tell the layout; a
    transposed convolution with as many channels in as out is recognized by its class or name, and
    is assumed not to use flax's transpose_kernel.

    Args:
        torch_params: A `torch.nn.Module`, or a dictionary from names to arrays (a state_dict).
            Names ending in running_mean and running_var are found in JAX's batch statistics.
        jax_params: flax.linen's variables or its "params" alone, or a pair `(module, variables)`;
            an `nnx.Module` or `nnx.State`; an `equinox.Module`; nested dictionaries of arrays.
        overrides: Pairs that take precedence over the names: PyTorch's name of a module or an array
            to JAX's (with "." or "/" between its parts), or to a pair of JAX's name and a `Layout`
            or a permutation of the axes; to None to leave the array out.
        partial: True returns what could be paired and lists the rest in `left_out`.

    Returns:
        A `ParameterMapping`, with `to_jax` and `into`.

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
    return paired(torch_params, jax_params, overrides or {}, partial)


def paired(
    torch_params: Any,
    jax_params: Any,
    overrides: Mapping[str, Any],
    partial: bool = False,
    names: tuple[str, str] = (CALLER, "overrides"),
) -> ParameterMapping:
    """`match_parameters`; `names` are those of the operator and of its overrides, for messages."""
    modules = [*getattr(torch_params, "named_modules", lambda: ())()]
    transposed = {name for name, m in modules if "Transpose" in type(m).__name__}
    in_torch, in_jax = read_torch(torch_params), read_jax(jax_params)
    return _Matching(in_torch, in_jax, overrides, transposed, names).run(partial)


class _Matching:
    """One run of the search, with the unpaired arrays and the pairs so far.

    Attributes:
        torch: PyTorch's unpaired arrays by name.
        jax: JAX's by path.
        torch_modules: For each module of PyTorch the names of its unpaired arrays, by leaf.
        jax_modules: The same in JAX, paths without flax's collection.
        renamed: Modules of PyTorch that the overrides rename.
    """

    def __init__(
        self,
        torch: dict[str, np.ndarray],
        jax: dict[Path, np.ndarray],
        overrides: Mapping[str, Any],
        transposed: set[str],
        names: tuple[str, str],
    ) -> None:
        self.caller, self.argument = names
        self.torch, self.jax, self.transposed, self.source = {**torch}, {**jax}, transposed, torch
        self.order, self.renamed = list(torch), dict[str, str]()
        self.entries, self.left_out, self.notes = list[ParameterPair](), list[str](), list[str]()
        for name, target in overrides.items():
            self._override(name, target)

    def run(self, partial: bool) -> ParameterMapping:
        self._attention()
        self._recurrent()
        self._weight_norm()
        for pairs in (self._by_name, self._by_end, self._by_order):
            self._group()
            for torch_module, jax_module in list(pairs()):
                self._pair(torch_module, jax_module)
        for name, x in list(self.torch.items()):  # buffers that need no counterpart
            counter = x.dtype.kind in "iub"
            if counter or name.endswith(_STATISTICS):
                why = "a buffer of integers" if counter else "no statistics in JAX's parameters"
                self.left_out.append(f"{name} ({why})")
                del self.torch[name]
        self._rest(partial)
        self.entries.sort(key=lambda e: self.order.index(e.torch_name))
        rest = tuple(self.left_out), tuple(self.notes), self.source
        return ParameterMapping(tuple(self.entries), *rest)

    def _group(self) -> None:
        """Groups the unpaired arrays by module."""
        self.torch_modules: dict[str, dict[str, str]] = {}
        self.jax_modules: dict[Path, dict[str, Path]] = {}
        for name in self.torch:
            owner, _, leaf = name.rpartition(".")
            self.torch_modules.setdefault(owner, {})[leaf] = name
        for path in self.jax:
            module = without_collection(path[:-1])
            self.jax_modules.setdefault(module, {})[str(path[-1])] = path

    # --- overrides

    def _override(self, name: str, target: Any) -> None:
        if name not in self.torch:
            if not any(n.startswith(f"{name}.") for n in self.torch) or not isinstance(target, str):
                raise GradtoolsError(
                    f"{self.caller}: {self.argument} names {name!r}, which is neither an array nor "
                    f"a module of the PyTorch model. Its names begin with "
                    f"{', '.join(self.order[:4])}."
                )
            self.renamed[name] = target
            return
        if target is None:
            del self.torch[name]
            self.left_out.append(f"{name} (as in {self.argument})")
            return
        jax_name, how = target if isinstance(target, tuple) else (target, None)
        path = next((p for p in self.jax if joined(p) == joined(split_name(jax_name))), None)
        if path is None:
            known = ", ".join(joined(p) for p in list(self.jax)[:4])
            raise GradtoolsError(
                f"{self.caller}: {self.argument} pairs {name} with {jax_name!r}, which the JAX "
                f"model does not have. Its names begin with {known}."
            )
        x, y = self.torch[name], self.jax[path]
        layout = how if isinstance(how, Layout) else None
        if layout is None and how is not None:
            layout = Layout(f"axes {tuple(how)}", tuple(how))
        layout = layout or _layout(x.shape, path, y.shape)
        if layout is None or layout.to_jax(x).shape != y.shape:
            raise GradtoolsError(
                f"{self.caller}: {self.argument} pairs {name} of shape {x.shape} with {jax_name} "
                f"of shape {y.shape}. Give the permutation of axes that makes them equal, as a "
                "pair (name, axes)."
            )
        self._add(name, path, layout)

    # --- pairs of modules

    def _by_name(self) -> Iterator[tuple[str, Path]]:
        in_jax = {name_key(module): module for module in self.jax_modules}
        for module in self.torch_modules:
            jax_module = in_jax.get(name_key(self._spelled(module)))
            if jax_module is not None and self._fits(module, jax_module):
                yield module, jax_module

    def _by_end(self) -> Iterator[tuple[str, Path]]:
        """Pairs of modules whose names have a common end with letters that is unique."""
        ends = lambda parts: [name_key(parts[k:]) for k in range(len(parts))]  # the longest first
        in_jax = {module: ends(module) for module in self.jax_modules}
        in_torch = {module: ends(self._spelled(module)) for module in self.torch_modules}
        for module, own in in_torch.items():
            for end in own:
                matches = [j for j, others in in_jax.items() if end in others]
                rivals = [m for m, others in in_torch.items() if end in others]
                has_letters = any(not part.isdigit() for part in end)
                unique = len(matches) == len(rivals) == 1 and has_letters
                if unique and self._fits(module, matches[0]):
                    yield module, matches[0]
                    break

    def _by_order(self) -> Iterator[tuple[str, Path]]:
        """Pairs the k-th modules of equal leaves and shapes."""
        groups: dict[Any, tuple[list[str], list[Path]]] = {}
        for module, leaves in self.torch_modules.items():
            kind = tuple(sorted((leaf, self.torch[name].shape) for leaf, name in leaves.items()))
            groups.setdefault(kind, ([], []))[0].append(module)
        for jax_module in sorted(self.jax_modules, key=_natural):
            fitting = (g for g in groups.values() if self._fits(g[0][0], jax_module))
            next(fitting, ([], []))[1].append(jax_module)
        for in_torch, in_jax in groups.values():
            if len(in_torch) == len(in_jax):
                for module, jax_module in zip(in_torch, in_jax, strict=True):
                    self.notes.append(f"paired by order: {module} with {joined(jax_module)}")
                    yield module, jax_module

    def _fits(self, module: str, jax_module: Path) -> bool:
        """Whether all arrays of two modules can be paired."""
        pairs = self._paired_leaves(module, jax_module)
        in_torch = [leaf for leaf in self.torch_modules[module] if leaf not in _STATISTICS]
        in_jax = [leaf for leaf in self.jax_modules[jax_module] if leaf not in ("mean", "var")]
        trained = [leaf for leaf, _, _ in pairs if leaf not in _STATISTICS]
        return bool(pairs) and len(trained) == len(in_torch) == len(in_jax)

    def _pair(self, module: str, jax_module: Path) -> None:
        for leaf, path, layout in self._paired_leaves(module, jax_module):
            self._add(self.torch_modules[module][leaf], path, layout)

    def _paired_leaves(self, module: str, jax_module: Path) -> list[tuple[str, Path, Layout]]:
        """The unpaired arrays of two modules that fit, with their layout."""
        in_jax, result = self.jax_modules.get(jax_module, {}), []
        for leaf, name in self.torch_modules.get(module, {}).items():
            names = (*_WEIGHTS, "weight") if leaf == "weight" else (_RENAMED.get(leaf, leaf),)
            paths = [in_jax[other] for other in names if other in in_jax]
            for path in paths if name in self.torch else ():
                if path not in self.jax:
                    continue
                shapes = self.torch[name].shape, self.jax[path].shape
                layout = _layout(shapes[0], path, shapes[1], module in self.transposed)
                if layout is not None:
                    result.append((leaf, path, layout))
                    break
        return result

    # --- attention with one matrix for query, key and value

    def _attention(self) -> None:
        modules = [n.removesuffix(".in_proj_weight") for n in self.torch if "in_proj_weight" in n]
        owners = {p[:-2] for p in self.jax if p[-2:] == ("query", "kernel")}
        spelled = {name_key(without_collection(owner)): owner for owner in owners}
        left = sorted(owners, key=_natural)
        for i, module in enumerate(modules):
            owner = spelled.get(name_key(self._spelled(module)))
            if owner is None and len(left) == len(modules):
                owner = left[i]
                self.notes.append(f"paired by order: {module} with {joined(owner)}")
            if owner is None:
                continue
            for ours, theirs in (("in_proj_weight", "kernel"), ("in_proj_bias", "bias")):
                whole = self.torch.get(f"{module}.{ours}")
                third = 0 if whole is None else whole.shape[0] // 3
                for k, part in enumerate(("query", "key", "value") if third else ()):
                    shape = self.jax[*owner, part, theirs].shape
                    axes = (1, 0) if theirs == "kernel" else None
                    rows = (k * third, (k + 1) * third)
                    layout = Layout(f"attention, {part}", axes, shape=shape, rows=rows)
                    self._add(f"{module}.{ours}", (*owner, part, theirs), layout, keep=k < 2)
            self._group()
            self._pair(f"{module}.out_proj", without_collection((*owner, "out")))

    # --- recurrent layers and weight normalization

    def _recurrent(self) -> None:
        """Pairs cells of equal sizes: by the ends of their names, the rest in order."""
        for sizes, ours in cells_of(self.torch, True).items():
            theirs = sorted(cells_of(self.jax, False).get(sizes, []), key=_natural)
            if len(ours) != len(theirs):
                continue
            named = {name_key(self._spelled(str(owner[0]))): owner for owner in ours}
            keys = [name_key(without_collection(path)) for path in theirs]
            by_name = len(named) == len(ours) and sorted(keys) == sorted(named)
            order = [named[key] for key in keys] if by_name else ours
            for (module, end), path in zip(order, theirs, strict=True):
                prefix = f"{module}." if module else ""
                entries = recurrent_pairs(prefix, end, path, self.torch, self.jax)
                names = {e.torch_name for e in entries}
                for e in entries:  # nnx.GRUCell has no second bias for the gate n
                    whole = e.layout.rows is None and e.added not in {"", *names}
                    if whole and e.added_rows[1] < e.torch_shape[0]:
                        self.left_out.append(f"{e.added} (no counterpart of its last rows)")
                    del self.jax[e.jax_path]
                for name in names | {e.added for e in entries} - {""}:
                    del self.torch[name]
                self.entries += entries
                if not by_name:
                    self.notes.append(f"paired by order: {prefix}*{end} with {joined(path)}")

    def _weight_norm(self) -> None:
        """Pairs norms and directions: equinox's g and layer.weight, linen's scale and kernel."""
        for ends in (("weight_g", "weight_v"), (f"{_NORMED}0", f"{_NORMED}1")):
            for name in [n for n in self.torch if n.endswith(ends[0])]:
                module = name.removesuffix(ends[0]).rstrip(".")
                direction = name.removesuffix(ends[0]) + ends[1]
                owner = self._spelled(module)
                for path, y in list(self.jax.items()):
                    own = without_collection(path)
                    if own[-1] == "g" and name_key(own[:-1]) == name_key(owner):
                        kernel: Path = (*path[:-1], "layer", "weight")
                    elif str(own[-1]) == joined((*owner, "kernel", "scale")).replace(".", "/"):
                        kernel = (*path[:-2], *owner, "kernel")
                    else:
                        continue
                    self._add(name, path, Layout("norms", shape=y.shape))
                    shapes = self.torch[direction].shape, self.jax[kernel].shape
                    if layout := _layout(shapes[0], kernel, shapes[1], module in self.transposed):
                        self._add(direction, kernel, layout)

    # --- bookkeeping

    def _add(self, name: str, path: Path, layout: Layout, keep: bool = False) -> None:
        self.entries.append(ParameterPair(name, path, layout, self.torch[name].shape))
        del self.jax[path]
        if not keep:
            del self.torch[name]

    def _rest(self, partial: bool) -> None:
        if not self.torch and not self.jax:
            return
        mine = [f"{n} {x.shape}" for n, x in self.torch.items()]
        theirs = [f"{joined(p)} {y.shape}" for p, y in self.jax.items()]
        if partial:
            self.left_out += [f"{x} (no counterpart in JAX)" for x in mine]
            self.left_out += [f"{y} (no counterpart in PyTorch)" for y in theirs]
            return
        rest = "partial=True leaves them out"
        if self.argument != "overrides":
            rest = "None in place of JAX's name leaves one of PyTorch's out"
        raise GradtoolsError(
            f"{self.caller}: no counterpart was found for {', '.join(mine) or 'nothing'} in "
            f"PyTorch and {', '.join(theirs) or 'nothing'} in JAX. Pair them by {self.argument}="
            f"{{torch name: jax name}}; {rest}."
        )

    def _spelled(self, module: str) -> tuple[str, ...]:
        """PyTorch's module path, renamed by the overrides."""
        for prefix in sorted(self.renamed, key=len, reverse=True):
            if module == prefix or module.startswith(f"{prefix}."):
                module = self.renamed[prefix] + module[len(prefix) :]
                break
        return split_name(module)


def _layout(shape: Shape, path: Path, target: Shape, transposed: bool = False) -> Layout | None:
    """The layout that converts one shape to the other; None if there is none."""
    leaf, rank = str(path[-1]), len(shape)
    if leaf != "kernel":
        if shape == target:
            return Layout("as it is")
        if leaf == "bias" and prod(shape) == prod(target):
            return Layout("as it is, several axes", shape=target)
        square = rank == 2 and shape[::-1] == target
        return Layout("transposed", (1, 0)) if square and leaf != "embedding" else None
    if rank <= 2:
        return _linear(shape, target) if rank == 2 else None
    window = tuple(range(2, rank))
    usual = tuple(shape[a] for a in (*window, 1, 0)) == target
    other = tuple(shape[a] for a in (*window, 0, 1)) == target
    transposed = transposed or "transpose" in "".join(map(str, path)).lower()
    if other and (transposed or not usual):
        return Layout("transposed convolution", (*window, 0, 1), tuple(range(rank - 2)))
    return Layout("convolution", (*window, 1, 0)) if usual else None


def _linear(shape: Shape, target: Shape) -> Layout | None:
    if target == shape[::-1]:
        return Layout("linear", (1, 0))
    ends = [prod(target[:k]) for k in range(1, len(target))]
    if prod(target) == prod(shape) and shape[1] in ends and len(target) > 2:
        return Layout("linear, several axes", (1, 0), shape=target)
    return None


# --- names


def _natural(path: Path) -> list[tuple[int, Any]]:
    """A natural sort key: Dense_2 before Dense_10."""
    parts = re.findall(r"\d+|\D+", ".".join(map(str, path)))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
