"""`first_divergence`: finds the first layer at which a port differs from the original network.

Both models run once on the same inputs with hooks on every layer, and once backward from the same
random cotangent c. This gives two arrays at each layer: its output y, and the gradient of
Re<c, out> at y. Layers are paired by name. The first value that differs in forward order, or else
the first gradient that differs in backward order, is the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.sides import in_double_precision, nested
from gradtools.testing.diverging.layer_guesses import told_apart
from gradtools.testing.diverging.layouts import _joined, _key, _stripped, match_parameters
from gradtools.testing.diverging.patterns import relation
from gradtools.testing.diverging.traces import (
    CALLER,
    Layer,
    Name,
    Trace,
    check_arguments,
    jax_trace,
    split_name,
)
from gradtools.testing.diverging.traces import torch_trace as trace_torch
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
    model has is listed in `left_out`: the models may be cut into other grains. When a layer's
    values differ while what it was given agrees, its parameters are compared, and common
    alternatives are computed (other forms of GELU, another epsilon, a mask of the other sign).

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
            called inside a transform where it cannot be watched.

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
        in_torch = trace_torch(torch_model, inputs, torch_kwargs, dtype, cotangents.draw)
        in_jax = jax_trace(jax_model, inputs, jax_kwargs, dtype, cotangents.same)
    if mapping is None:
        mapping = match_parameters(torch_model, nested(in_jax.parameters), partial=True)
    return _TraceWalk(in_torch, in_jax, mapping, dict(layers or {}), dtype, tolerance).report()


class _Cotangents:
    """Random cotangents for PyTorch's outputs, and the same in JAX's layout."""

    def __init__(self, seed: int) -> None:
        self.rng, self.drawn, self.used = np.random.default_rng(seed), [], 0  # type: ignore[var-annotated]

    def draw(self, y: np.ndarray) -> np.ndarray:
        c = self.rng.normal(size=y.shape).astype(y.dtype)
        self.drawn.append(c)
        return c

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


@dataclass(frozen=True)
class _LayerPair:
    """One layer in both models."""

    mine: Layer
    theirs: Layer


class _TraceWalk:
    """The comparison of two traces."""

    def __init__(
        self,
        mine: Trace,
        theirs: Trace,
        mapping: Any,
        layers: dict[str, str],
        dtype: str,
        tolerance: float | None,
    ) -> None:
        self.mine, self.theirs, self.mapping = mine, theirs, mapping
        self.dtype, self.tolerance = dtype, tolerance
        self.names = _pair_names(mine, theirs, mapping.modules, layers)
        calls = {(layer.name, layer.call): layer for layer in theirs.layers}
        self.pairs: list[_LayerPair] = []
        for layer in mine.layers:
            other = calls.get((self.names.get(layer.name), layer.call))  # type: ignore[arg-type]
            if other is not None:
                self.pairs.append(_LayerPair(layer, other))

    def report(self) -> Report:
        """Compares values forward, gradients backward, then the parameters' gradients."""
        report = Report("first_divergence", left_out=self._unpaired())
        for pair in self.pairs:
            report.comparisons += self._values(pair)
        self._explain_value(report)
        values_agree = bool(report)
        biggest = [np.max(np.abs(g), initial=0.0) for g in self.mine.gradients.values()]
        noise = _ROUNDING * tolerances.epsilon(self.dtype) * float(max(biggest, default=0.0))
        for pair in reversed(self.pairs):
            report.comparisons += self._gradients(pair, noise, values_agree)
        report.comparisons += self._parameters(noise)
        return report

    def _unpaired(self) -> list[str]:
        mine = {p.mine.name for p in self.pairs}
        theirs = {p.theirs.name for p in self.pairs}
        one = dict.fromkeys(x.name for x in self.mine.layers if x.name not in mine)
        other = dict.fromkeys(x.name for x in self.theirs.layers if x.name not in theirs)
        result = [f"layer {_dotted(n)} of PyTorch: no layer of that name in JAX" for n in one]
        result += [f"layer {_dotted(n)} of JAX: no layer of that name in PyTorch" for n in other]
        mine_calls, theirs_calls = (
            {(x.name, x.call) for x in trace.layers} for trace in (self.mine, self.theirs)
        )
        for name, other_name in self.names.items():
            counts = [
                sum(n == wanted for n, _ in calls)
                for calls, wanted in ((mine_calls, name), (theirs_calls, other_name))
            ]
            if counts[0] != counts[1] and min(counts):
                result.append(
                    f"layer {_dotted(name)}: {counts[0]} calls in PyTorch, {counts[1]} in JAX"
                )
        for pair in self.pairs:
            ours, others = len(pair.mine.outputs), len(pair.theirs.outputs)
            if ours != others:
                result.append(f"layer {pair.mine}: {ours} outputs in PyTorch, {others} in JAX")
        return result + [f"parameter {x}" for x in self.mapping.left_out]

    # --- forward

    def _values(self, pair: _LayerPair) -> list[Comparison]:
        return [
            self._compare("value", pair, k, a, b, 0)
            for k, (a, b) in enumerate(zip(pair.mine.outputs, pair.theirs.outputs, strict=False))
        ]

    def _compare(
        self,
        quantity: str,
        pair: _LayerPair,
        k: int,
        a: Any,
        b: Any,
        order: int,
        noise: float = 0.0,
    ) -> Comparison:
        path = str(pair.mine) + (f" output {k}" if len(pair.mine.outputs) > 1 else "")
        return min(
            (
                compare_arrays(
                    quantity, path, moved, b, order, tolerance=self._limit(order), noise=noise
                )
                for moved in _layouts(a, b.shape, or_itself=True)
            ),
            key=lambda c: c.error,
        )

    def _explain_value(self, report: Report) -> None:
        """Adds the cause of the first differing value; later ones are its consequences."""
        for n, c in enumerate(report.comparisons):
            if c.agrees:
                continue
            if c is report.first:
                pair = next(p for p in self.pairs for x in self._values(p) if x == c)
                report.comparisons[n] = c.because(*self._why(pair))
            else:
                report.comparisons[n] = c.because("after the first divergence")

    def _why(self, pair: _LayerPair) -> tuple[str, str]:
        mine, theirs = pair.mine, pair.theirs
        wrong = self._wrong_parameters(mine.name)
        if wrong:
            return wrong
        a, b = mine.outputs[0], theirs.outputs[0]
        if a.dtype != b.dtype:
            return (
                f"its value is {a.dtype} in PyTorch and {b.dtype} in JAX",
                "It fell to the coarser one in the layer or on the way to it.",
            )
        given = [(_fitting(x, y), y) for x, y in zip(mine.inputs, theirs.inputs, strict=False)]
        differing = [k for k, (x, y) in enumerate(given) if not self._close(x, y)]
        inside = self._inside(mine.name)
        if differing and not inside:
            return self._before(pair, differing)
        a = _fitting(a, b)
        guess = None
        if a.shape == b.shape:
            weights = [x for n, x in self._own(mine.name).items() if n in ("weight", "bias")]
            guess = told_apart([x for x, _ in given], inside, a, b, weights)
        where = (
            "Its parts agree, so the difference arises in its own code."
            if inside
            else "Its inputs and its parameters agree, so the difference arises in it."
        )
        if guess is not None:
            return guess, where
        words = shape_words(mine.outputs[0], b) or relation(a, b, _NAMES)
        return words or "it computes something else", where

    def _before(self, pair: _LayerPair, differing: list[int]) -> tuple[str, str]:
        place = next(k for k, p in enumerate(self.pairs) if p is pair)
        last = str(self.pairs[place - 1].mine) if place else "the inputs"
        x, y = pair.mine.inputs[differing[0]], pair.theirs.inputs[differing[0]]
        words = shape_words(x, y)
        if words is None and place:
            before = self.pairs[place - 1]
            source = _fitting(before.mine.outputs[0], before.theirs.outputs[0])
            words = told_apart([source], {}, _fitting(x, y), y, [])
        words = words or (None if shape_words(x, y) else relation(_fitting(x, y), y, _NAMES))
        return (
            words or "what it is given differs already",
            f"What {pair.mine} is given differs already, and all layers before it agree: the "
            f"difference arises between {last} and it, in the code of "
            f"{_dotted(pair.mine.name[:-1])}.",
        )

    def _inside(self, name: Name) -> dict[str, np.ndarray]:
        """The outputs of a module's direct children, by the last part of their names."""
        depth = len(name) + 1
        return {
            p.mine.name[-1]: p.mine.outputs[0]
            for p in self.pairs
            if len(p.mine.name) == depth and p.mine.name[:-1] == name and p.mine.outputs
        }

    def _own(self, name: Name) -> dict[str, np.ndarray]:
        prefix = "".join(f"{part}." for part in name)
        named = ((n.removeprefix(prefix), x) for n, x in self.mine.parameters.items())
        known = {n for n in self.mine.parameters if n.startswith(prefix)}
        return {n: x for n, x in named if "." not in n and prefix + n in known}

    def _wrong_parameters(self, name: Name) -> tuple[str, str] | None:
        """The cause, if one of the layer's own parameters differs from PyTorch's."""
        for entry in self.mapping.entries:
            owner = tuple(entry.torch_name.split(".")[:-1])
            if owner != name:
                continue
            x = entry.layout.to_jax(self.mine.parameters[entry.torch_name])
            y = self._jax_array(self.theirs.parameters, entry.jax_path)
            if y is None or self._close(x, y, exact=True):
                continue
            words = _parameter_words(x, y)
            return (
                f"its parameter {entry.jax_path[-1]} {words}",
                f"{entry.torch_name} in PyTorch is {'.'.join(map(str, entry.jax_path))} in JAX "
                f"({entry.layout.name}); they do not hold the same numbers. "
                "mapping.to_jax(torch_model) gives what JAX should hold.",
            )
        return None

    def _jax_array(self, arrays: Mapping[Any, np.ndarray], path: Name) -> np.ndarray | None:
        wanted = _joined(_stripped(path))
        return next((x for p, x in arrays.items() if _joined(_stripped(p)) == wanted), None)

    def _close(self, x: np.ndarray, y: np.ndarray, exact: bool = False) -> bool:
        if x.shape != y.shape:
            return False
        if x.dtype.kind not in "fc" or y.dtype.kind not in "fc":
            return bool(np.array_equal(x, y))
        limit = self._limit(0) if not exact else 8 * tolerances.epsilon(self.dtype)
        return bool(compare_arrays("", "", x, y, 0, tolerance=limit).agrees)

    def _limit(self, order: int) -> float:
        return tolerances.tolerance(self.dtype, order) if self.tolerance is None else self.tolerance

    # --- backward

    def _gradients(self, pair: _LayerPair, noise: float, explain: bool) -> list[Comparison]:
        result = []
        both = zip(pair.mine.gradients, pair.theirs.gradients, pair.theirs.outputs, strict=False)
        for k, (a, b, y) in enumerate(both):
            if b is None or y.dtype.kind not in "fc":
                continue
            a = np.zeros_like(pair.mine.outputs[k]) if a is None else a
            c = self._compare("gradient", pair, k, a, b, 1, noise)
            if not c.agrees and explain:
                c = c.because(*self._why_gradient(pair, a, b))
            result.append(c)
        return result

    def _why_gradient(self, pair: _LayerPair, a: np.ndarray, b: np.ndarray) -> tuple[str, str]:
        detail = (
            f"All values agree; what comes back to the output of {pair.mine} does not: the "
            "difference arises after it, in what uses it"
        )
        users = [p.mine for p in self.pairs if self._uses(p.mine, pair.mine)]
        detail += f" ({', '.join(map(str, users[:3]))})." if users else "."
        return _gradient_words(_fitting(a, b), b), detail

    def _uses(self, user: Layer, layer: Layer) -> bool:
        return user is not layer and any(
            x.shape == y.shape and np.array_equal(x, y) for x in user.inputs for y in layer.outputs
        )

    def _parameters(self, noise: float) -> list[Comparison]:
        result = []
        for entry in self.mapping.entries:
            a = self.mine.gradients.get(entry.torch_name)
            b = self._jax_array(self.theirs.gradients, entry.jax_path)
            if b is None or entry.torch_name not in self.mine.parameters:
                continue
            a = np.zeros(entry.torch_shape, b.dtype) if a is None else a
            a, limit = entry.layout.to_jax(a), self._limit(1)
            c = compare_arrays(
                "parameter's gradient", entry.torch_name, a, b, 1, tolerance=limit, noise=noise
            )
            result.append(c if c.agrees else c.because(_gradient_words(a, b)))
        return result


def _gradient_words(a: np.ndarray, b: np.ndarray) -> str:
    """The relation of two gradients in one layout."""
    for side, x, y in (("JAX", b, a), ("PyTorch", a, b)):
        if not np.any(x) and np.any(y):
            return f"stopped gradient in {side}"
    return relation(a, b, _NAMES) or "another derivative"


def shape_words(a: np.ndarray, b: np.ndarray) -> str | None:
    """The cause, if two shapes do not fit."""
    if _fitting(a, b).shape == b.shape:
        return None
    return f"another shape: {a.shape} in PyTorch, {b.shape} in JAX"


def _parameter_words(x: np.ndarray, y: np.ndarray) -> str:
    if x.shape == y.shape and x.ndim == 2 and np.array_equal(x, y.T):
        return "is transposed"
    if x.shape == y.shape and np.allclose(x, y, rtol=1e-5):
        return f"differs by rounding (held in {'float32' if np.allclose(x, y, 1e-6) else 'less'})"
    return f"differs ({relation(y, x, _NAMES[::-1]) or 'other numbers'})"


# --- pairing layers


def _pair_names(
    mine: Trace, theirs: Trace, modules: Mapping[str, str], layers: dict[str, str]
) -> dict[Name, Name]:
    """A map from PyTorch's module names to JAX's."""
    ours = list(dict.fromkeys(x.name for x in mine.layers))
    others = list(dict.fromkeys(x.name for x in theirs.layers))
    spelled = {_key(name): name for name in others}
    result: dict[Name, Name] = {(): ()}
    for one, other in {**modules, **layers}.items():
        name, target = split_name(one), spelled.get(_key(split_name(other)))
        if one in layers and (target is None or name not in ours):
            raise GradtoolsError(
                f"{CALLER}: layers pairs {one!r} with {other!r}; the layers that ran are "
                f"{', '.join(map(_dotted, ours[:6]))}, and {', '.join(map(_dotted, others[:6]))}."
            )
        if target is not None and name in ours:
            result[name] = target
    for name in ours:
        target = spelled.get(_key(name))
        if name not in result and target is not None and target not in result.values():
            result[name] = target
    _pair_owners(result, ours, others)
    return result


def _pair_owners(paired: dict[Name, Name], ours: list[Name], others: list[Name]) -> None:
    """Pairs modules whose children are paired, and children of equal name in paired modules."""
    count = -1
    while count != len(paired):
        count = len(paired)
        owners = _owners(paired)
        for name in ours:
            near = [other for owner, other in owners if owner == name]
            near += [(*other, name[-1]) for owner, other in owners if name and owner == name[:-1]]
            keys = [_key(n) for n in near]
            match = next((o for o in others if _key(o) in keys and o not in paired.values()), None)
            if name not in paired and match is not None:
                paired[name] = match


def _owners(paired: dict[Name, Name]) -> list[tuple[Name, Name]]:
    """Pairs of modules that have paired children of equal name."""
    alike = [
        (name[:-1], target[:-1])
        for name, target in paired.items()
        if name and target and _key(name[-1:]) == _key(target[-1:])
    ]
    return list(dict.fromkeys(alike))


def _dotted(name: Name) -> str:
    return _joined(name) or "the model"


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
