"""`first_divergence`: finds the first layer at which a port differs from the original network.

Both models run once on the same inputs with hooks on every layer, and once backward from the same
random cotangent c. This gives two arrays at each layer: its output y, and the gradient of
Re<c, out> at y. Layers are paired by name. The first value that differs in forward order, or else
the first gradient that differs in backward order, is the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.sides import in_double_precision, nested
from gradtools.testing.diverging.layouts import match_parameters
from gradtools.testing.diverging.parameters import joined, name_key, split_name, without_collection
from gradtools.testing.diverging.traces import (
    CALLER,
    Layer,
    Name,
    Trace,
    check_arguments,
    jax_trace,
    torch_trace,
)
from gradtools.testing.relations import relation
from gradtools.testing.report import Comparison, Report, compare_arrays

_NAMES = ("PyTorch", "JAX")
_ROUNDING = 256  # gradients below this many epsilons of the largest one are rounding


@user_facing
def first_divergence(
    torch_model: Any,
    jax_model: Any,
    mapping: Any = None,
    inputs: Sequence[Any] = (),
    *,
    layers: Mapping[str, str] | None = None,
    torch_kwargs: Mapping[str, Any] | None = None,
    jax_kwargs: Mapping[str, Any] | None = None,
    dtype: str = "float64",
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Names the first layer of a ported network whose value or gradient differs.

    Compared are, layer by layer: the outputs, in the order in which PyTorch's layers return (a
    module's parts before it); the gradients at the outputs, in reverse; the parameters'
    gradients. Channels may be second in one model and last in the other. A layer that only one
    model has is listed in `left_out`: the models may be divided differently. At the first layer
    whose values differ, its parameters and inputs are compared too, so that the report says whether
    the weights, the code before the layer or the layer itself is wrong.

    Args:
        torch_model: A `torch.nn.Module`, in the mode (train or eval) in which it is to run. It is
            copied: nothing of it changes.
        jax_model: The pair (module, variables) of flax.linen, an `nnx.Module`, or an
            `equinox.Module`, with its own parameters, which should be those of
            `mapping.to_jax(torch_model)`. An equinox module that takes one example is given as
            `jax.vmap(module)`: it is then run over axis 0 of all inputs. Layers that it maps itself
            are not observed.
        mapping: A `ParameterMapping`, or None to let `match_parameters` find it.
        inputs: A tuple of NumPy arrays, both models' positional arguments.
        layers: Names of modules in PyTorch to names in JAX, where they differ.
        torch_kwargs: Keyword arguments of PyTorch's forward.
        jax_kwargs: Keyword arguments of the JAX model.
        dtype: What parameters, buffers and floating inputs are cast to: "float64" or "float32".
            float64 is on in JAX for the check alone.
        tolerance: A relative error in place of the table's.
        seed: Chooses c.

    Returns:
        A `Report`, true if nothing differs. Its `first` is the first divergence: the layer's name
        is its `path`, its `quantity` is "value", "gradient" or "parameter's gradient", and
        `cause` and `detail` say what is likely. `require()` raises if there is one.

    Raises:
        GradtoolsError: A model is of another class, the outputs cannot be paired, or a layer is
            called inside a transform, where it cannot be observed.

    Example:
        >>> import flax.linen as nn, jax, numpy as np, torch
        >>> from gradtools.testing import first_divergence, match_parameters
        >>> mine, x = torch.nn.Sequential(torch.nn.Linear(3, 4)), np.ones((2, 3))
        >>> port = nn.Sequential([nn.Dense(4)])
        >>> variables = port.init(jax.random.key(0), np.ones((2, 3), np.float32))
        >>> mapping = match_parameters(mine, variables)
        >>> bool(first_divergence(mine, (port, mapping.to_jax(mine)), mapping, (x,)))
        True
        >>> first_divergence(mine, (port, variables), mapping, (x,)).first.path
        '0'
    """
    check_arguments(torch_model, jax_model, inputs, mapping)
    if dtype not in ("float64", "float32"):
        raise GradtoolsError(f"{CALLER}: dtype is {dtype!r}; expected 'float64' or 'float32'.")
    cotangents = _Cotangents(seed)
    with in_double_precision(dtype == "float64"):  # PyTorch's model may hold parts in JAX
        in_torch = torch_trace(torch_model, inputs, torch_kwargs, dtype, cotangents.draw)
        in_jax = jax_trace(jax_model, inputs, jax_kwargs, dtype, cotangents.same)
    if mapping is None:
        mapping = match_parameters(torch_model, nested(in_jax.parameters), partial=True)
    names = _pair_names(in_torch, in_jax, mapping.modules, dict(layers or {}))
    return _TraceComparison(in_torch, in_jax, mapping, names, dtype, tolerance).report()


class _Cotangents:
    """Random cotangents for PyTorch's outputs, and the same in JAX's layout."""

    def __init__(self, seed: int) -> None:
        self.rng, self.used = np.random.default_rng(seed), 0
        self.drawn: list[np.ndarray] = []

    def draw(self, y: np.ndarray) -> np.ndarray:
        self.drawn.append(self.rng.normal(size=y.shape).astype(y.dtype))
        return self.drawn[-1]

    def same(self, y: np.ndarray) -> np.ndarray:
        if self.used >= len(self.drawn):
            raise GradtoolsError(f"{CALLER}: the JAX model returns more arrays than PyTorch's.")
        c = self.drawn[self.used]
        self.used += 1
        for moved in _layouts(c, y.shape):
            return np.ascontiguousarray(moved).astype(y.dtype)
        raise GradtoolsError(
            f"{CALLER}: output {self.used - 1} has shape {c.shape} in PyTorch and {y.shape} in JAX."
        )


class _TraceComparison:
    """The comparison of two traces."""

    def __init__(
        self,
        torch: Trace,
        jax: Trace,
        mapping: Any,
        names: dict[Name, Name],
        dtype: str,
        tolerance: float | None,
    ) -> None:
        self.torch, self.jax, self.mapping, self.names = torch, jax, mapping, names
        self.dtype, self.tolerance = dtype, tolerance
        calls = {(layer.name, layer.call): layer for layer in jax.layers}
        self.pairs: list[tuple[Layer, Layer]] = []  # one call of a layer in both models
        for layer in torch.layers:
            if layer.name in names and (names[layer.name], layer.call) in calls:
                self.pairs.append((layer, calls[names[layer.name], layer.call]))

    def report(self) -> Report:
        """Compares values forward, gradients backward, then the parameters' gradients."""
        report = Report(CALLER, left_out=self._unpaired())
        label = lambda x, k: str(x) + (f" output {k}" if len(x.outputs) > 1 else "")
        for i, (ours, theirs) in enumerate(self.pairs):
            for k, (a, b) in enumerate(zip(ours.outputs, theirs.outputs, strict=False)):
                c, first = self._compared("value", label(ours, k), a, b, 0), bool(report)
                if not c.agrees:
                    later = ("after the first divergence", "")
                    cause = self._cause(i, a, b) if first else later
                    c = c.because(*cause)
                report.comparisons.append(c)
        values_agree = bool(report)
        biggest = [np.max(np.abs(g), initial=0.0) for g in self.torch.gradients.values()]
        noise = _ROUNDING * tolerances.epsilon(self.dtype) * float(max(biggest, default=0.0))
        for ours, theirs in reversed(self.pairs):
            both = zip(ours.gradients, theirs.gradients, theirs.outputs, strict=False)
            for k, (g, b, y) in enumerate(both):
                if b is None or y.dtype.kind not in "fc":
                    continue
                a = np.zeros_like(ours.outputs[k]) if g is None else g
                c = self._compared("gradient", label(ours, k), a, b, 1, noise)
                if not c.agrees and values_agree:
                    c = c.because(
                        relation(_fitting(a, b), b, _NAMES) or "another derivative",
                        f"All values agree; the gradient at the output of {ours} does not: "
                        "the difference arises after it, in what uses it.",
                    )
                report.comparisons.append(c)
        for entry in self.mapping.entries:
            name, b = entry.torch_name, self._jax_array(self.jax.gradients, entry.jax_path)
            if b is None or name not in self.torch.parameters:
                continue
            g = self.torch.gradients.get(name)
            a = entry.layout.to_jax(np.zeros(entry.torch_shape, b.dtype) if g is None else g)
            limit = self._limit(1)
            c = compare_arrays("parameter's gradient", name, a, b, 1, tolerance=limit, noise=noise)
            if not c.agrees:
                c = c.because(relation(a, b, _NAMES) or "another derivative")
            report.comparisons.append(c)
        return report

    def _unpaired(self) -> list[str]:
        """What only one model has: layers, calls, outputs, parameters."""
        paired = [{pair[k].name for pair in self.pairs} for k in (0, 1)]
        result = []
        sides = (("PyTorch", "JAX", self.torch), ("JAX", "PyTorch", self.jax))
        for known, (side, other, trace) in zip(paired, sides, strict=True):
            alone = dict.fromkeys(x.name for x in trace.layers if x.name not in known)
            result += [
                f"layer {_dotted(n)} of {side}: no layer of that name in {other}" for n in alone
            ]
        for name, other_name in self.names.items():
            ours = sum(layer.name == name for layer in self.torch.layers)
            theirs = sum(layer.name == other_name for layer in self.jax.layers)
            if ours != theirs and min(ours, theirs):
                result.append(f"layer {_dotted(name)}: {ours} calls in PyTorch, {theirs} in JAX")
        for layer, other_layer in self.pairs:
            ours, theirs = len(layer.outputs), len(other_layer.outputs)
            if ours != theirs:
                result.append(f"layer {layer}: {ours} outputs in PyTorch, {theirs} in JAX")
        return result + [f"parameter {x}" for x in self.mapping.left_out]

    def _compared(
        self, quantity: str, path: str, a: Any, b: Any, order: int, noise: float = 0.0
    ) -> Comparison:
        """The comparison in the layout of PyTorch's array that is nearest to JAX's."""
        limit = self._limit(order)
        every = [
            compare_arrays(quantity, path, moved, b, order, tolerance=limit, noise=noise)
            for moved in _layouts(a, b.shape, or_itself=True)
        ]
        return min(every, key=lambda c: c.error)

    def _limit(self, order: int) -> float:
        return tolerances.tolerance(self.dtype, order) if self.tolerance is None else self.tolerance

    # --- the cause of the first value that differs

    def _cause(self, i: int, a: np.ndarray, b: np.ndarray) -> tuple[str, str]:
        """Why the outputs a and b of the i-th pair differ: its weights, its inputs, or itself."""
        layer, port = self.pairs[i]
        wrong = self._wrong_parameter(layer.name)
        if wrong:
            return wrong
        if a.dtype != b.dtype:
            return (
                f"its value is {a.dtype} in PyTorch and {b.dtype} in JAX",
                "It was cast to the coarser one in the layer or before it.",
            )
        depth, names = len(layer.name), [other.name for other, _ in self.pairs]
        has_parts = any(len(name) > depth and name[:depth] == layer.name for name in names)
        inputs = zip(layer.inputs, port.inputs, strict=False)
        differing = [(x, y) for x, y in inputs if not self._close(_fitting(x, y), y)]
        if differing and not has_parts:
            last = str(self.pairs[i - 1][0]) if i else "the inputs"
            return (
                _value_words(*differing[0]) or "its inputs differ already",
                f"The inputs of {layer} differ already, and all layers before it agree: the "
                f"difference arises between {last} and it, in the code of "
                f"{_dotted(layer.name[:-1])}.",
            )
        where = (
            "Its parts agree, so the difference arises in its own code."
            if has_parts
            else "Its inputs and its parameters agree, so the difference arises in it: compare "
            "its settings (epsilon, an approximation, a mask)."
        )
        return _value_words(a, b) or "it computes something else", where

    def _wrong_parameter(self, name: Name) -> tuple[str, str] | None:
        """The cause, if one of the layer's own parameters differs from PyTorch's."""
        for entry in self.mapping.entries:
            if tuple(entry.torch_name.split(".")[:-1]) != name:
                continue
            x = entry.layout.to_jax(self.torch.parameters[entry.torch_name])
            y = self._jax_array(self.jax.parameters, entry.jax_path)
            if y is None or self._close(x, y, exact=True):
                continue
            how = relation(y, x, _NAMES[::-1], 0) or "other numbers"
            transposed = how == "transposed layout"
            return (
                f"its parameter {entry.jax_path[-1]} "
                + ("is transposed" if transposed else f"differs ({how})"),
                f"{entry.torch_name} in PyTorch is {'.'.join(map(str, entry.jax_path))} in JAX "
                f"({entry.layout.name}); they do not hold the same numbers. "
                "mapping.to_jax(torch_model) gives what JAX should hold.",
            )
        return None

    def _jax_array(self, arrays: Mapping[Any, np.ndarray], path: Name) -> np.ndarray | None:
        wanted = joined(without_collection(path))
        return next((x for p, x in arrays.items() if joined(without_collection(p)) == wanted), None)

    def _close(self, x: np.ndarray, y: np.ndarray, exact: bool = False) -> bool:
        if x.shape != y.shape:
            return False
        if x.dtype.kind not in "fc" or y.dtype.kind not in "fc":
            return bool(np.array_equal(x, y))
        limit = self._limit(0) if not exact else 8 * tolerances.epsilon(self.dtype)
        return bool(compare_arrays("", "", x, y, 0, tolerance=limit).agrees)


def _value_words(a: np.ndarray, b: np.ndarray) -> str | None:
    """How two values differ, in a few words; None if unknown."""
    a_like_b = _fitting(a, b)
    if a_like_b.shape != b.shape:
        return f"another shape: {a.shape} in PyTorch, {b.shape} in JAX"
    return relation(a_like_b, b, _NAMES, 0)


# --- pairing layers


def _pair_names(
    torch: Trace, jax: Trace, modules: Mapping[str, str], layers: dict[str, str]
) -> dict[Name, Name]:
    """A map from PyTorch's module names to JAX's.

    First by `modules` and `layers`, then by equal names, then modules whose children are paired,
    and children of equal name in paired modules.
    """
    in_torch = list(dict.fromkeys(layer.name for layer in torch.layers))
    in_jax = {name_key(layer.name): layer.name for layer in jax.layers}
    paired: dict[Name, Name] = {(): ()}
    for one, other in {**modules, **layers}.items():
        name, target = split_name(one), in_jax.get(name_key(split_name(other)))
        if target is not None and name in in_torch:
            paired[name] = target
        elif one in layers:
            raise GradtoolsError(
                f"{CALLER}: layers pairs {one!r} with {other!r}; the layers that ran are "
                f"{', '.join(map(_dotted, in_torch[:6]))}, and "
                f"{', '.join(map(_dotted, [*in_jax.values()][:6]))}."
            )

    def pair(name: Name, candidates: list[Name]) -> None:
        targets = (in_jax.get(name_key(candidate)) for candidate in candidates)
        free = [t for t in targets if t is not None and t not in paired.values()]
        if name not in paired and free:
            paired[name] = free[0]

    for name in in_torch:
        pair(name, [name])
    count = -1
    while count != len(paired):
        count = len(paired)
        owners = [
            (name[:-1], target[:-1])
            for name, target in paired.items()
            if name and target and name_key(name[-1:]) == name_key(target[-1:])
        ]
        for name in in_torch:
            near = [other for owner, other in owners if owner == name]
            near += [(*other, name[-1]) for owner, other in owners if name and owner == name[:-1]]
            pair(name, near)
    return paired


def _dotted(name: Name) -> str:
    return joined(name) or "the model"


# --- layouts of activations


def _layouts(a: np.ndarray, shape: tuple[int, ...], or_itself: bool = False) -> list[np.ndarray]:
    """PyTorch's array in all layouts with JAX's shape: unchanged, channels last, reshaped."""
    result = [a] if a.shape == shape else []
    if a.ndim >= 3:
        moved = np.moveaxis(a, 1, -1)
        result += [moved] if moved.shape == shape else []
    if not result and a.size == math.prod(shape) and a.ndim != len(shape):
        result = [a.reshape(shape)]
    return result or ([a] if or_itself else [])


def _fitting(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The layout of a that is nearest to b."""
    result = _layouts(a, b.shape, or_itself=True)
    if len(result) == 1 or a.dtype.kind not in "fc":
        return result[0]
    return min(result, key=lambda x: float(np.max(np.abs(x - b), initial=0)))
