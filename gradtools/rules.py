"""Defines `Rule`, a function of flat arrays with custom jvp and vjp maps, for both frameworks.

Every operation with a custom derivative is a function with a tangent and a cotangent map:

    y = f(x)        dy = J(x) dx        x' = J(x)^H y'

Both maps are linear, in dx and in y', and adjoint to each other under Re<u, v>. If one map is
omitted, the transpose of the other map is used. The maps receive their residuals as arguments:
inputs, outputs, or *extras*, which are further results of the forward pass. Extras are hidden
outputs, differentiated through the code that computed them, so a rule that saves an intermediate
result is correct at second order.

This module is the same for every framework: it defines `Rule`, and batches a rule under vmap. Each
backend's `rules/installing.py` registers a rule with the framework's automatic differentiation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from gradtools.errors import GradtoolsError

if TYPE_CHECKING:
    from gradtools.host_kernels import ArraySpec
    from gradtools.rule_contract import Contract

Array = Any
R = TypeVar("R", bound="Rule")
Entries = Sequence[Any]  # arrays, or None for zero
Map = Callable[[Entries, Entries], list[Any]]
Jvp = Callable[[Entries, Entries], tuple[list[Any], list[Any]]]
Matrix = Sequence[Sequence[bool]]


KEYS = map(str, itertools.count())  # keys are strings, since dynamo makes integers symbolic
_BY_KEY: weakref.WeakValueDictionary[str, Rule] = weakref.WeakValueDictionary()


def by_key(key: str) -> Rule:
    """Returns the rule with the given key."""
    return _BY_KEY[key]


@dataclass(slots=True)
class Linearized:
    """One evaluation of a function, and its linear maps at that point.

    Attributes:
        ys: The outputs.
        extras: Further results of the forward pass that the maps use.
        saves: The residuals, as positions in `[*xs, *ys, *extras]`.
        tangent: The tangent map, called as `tangent(saved, dxs)`, or None if missing.
        cotangent: The cotangent map, called as `cotangent(saved, cts)`, or None if missing.
        opaque_residuals: Whether the user's fwd saved non-arrays that may depend on x, so that a
            second derivative must evaluate the function again.
        tangent_only: The number of residuals, at the end of `saves`, that only the tangent map
            uses.
        example: For an evaluation of a batch, the maps of one example.
        written: The user's cotangent map, if `cotangent` is another map that supports forward mode.
            The user's map uses only the residuals at the start of `saves`.
        key: Evaluations with equal keys have the same maps, as functions of the residuals; None if
            unknown.
    """

    ys: list[Array]
    extras: list[Array]
    saves: tuple[int, ...]
    tangent: Map | None = None
    cotangent: Map | None = None
    opaque_residuals: bool = False
    tangent_only: int = 0
    example: Linearized | None = None
    key: Any = None
    written: Map | None = None

    def without_arrays(self) -> Linearized:
        """Returns a copy without the arrays, so that no array leaks from a trace."""
        maps = self.saves, self.tangent, self.cotangent, self.opaque_residuals, self.tangent_only
        nothing = [None] * len(self.extras)
        return Linearized([], nothing, *maps, self.example, written=self.written)

    def saved(self, xs: Entries) -> list[Any]:
        """Returns the residuals that are passed to the linear maps."""
        everything = [*xs, *self.ys, *self.extras]
        return [everything[i] for i in self.saves]


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """A function on a flat list of arrays, with its tangent and cotangent maps.

    Attributes:
        name: The name for messages.
        primal: `primal(*xs)` returns the list of outputs.
        tangent: `tangent(saved, dxs)` returns one tangent for each output. Entries of `dxs` and
            of the result may be None, a symbolic zero. The tangent map must be linear in `dxs`.
        cotangent: `cotangent(saved, cts)` returns one cotangent for each input, in gradtools'
            complex convention. Entries of `cts` and of the result may be None, a symbolic zero.
        saves: The residuals, as positions in `[*xs, *ys]` (default: all inputs). Only these inputs
            and outputs are saved for the backward pass.
        linearize: `linearize(*xs)` returns a `Linearized`, for rules whose maps use residuals other
            than inputs and outputs; `tangent`, `cotangent` and `saves` are then omitted.
        nondifferentiable: Positions of inputs that are never differentiated; their derivative is
            zero.
        reverse_only: Whether the cotangent map is nonlinear, so that no tangent map exists.
        user_functions: The functions that the user wrote, which may close over tracers. If
            there are no user functions, no map closes over tracers.
        symbolic_zeros: The names of the maps ("tangent", "cotangent") that receive None instead of
            zeros, even if the rule has a contract. With "cotangent", `linearize` receives a mask of
            the differentiated inputs.
        contract: The checks that the user's maps must pass; with a contract, the maps receive
            arrays of zeros instead of None. If None, the rule belongs to gradtools and is not
            checked.
        reaches: The differentiable paths from inputs to outputs. "identity": the outputs are the
            inputs unchanged, and graphs show the rule as an identity. A function (for functions of
            another framework, whose graphs are drawn inline): `reaches(*specs)` takes the
            ArraySpecs of the inputs and returns `matrix[output][input]` of booleans. If the
            attribute or the function's result is None, every output may depend on every input.
        is_bridged: Whether the rule calls a function of another framework (`gradtools.bridge`).
        key: A string that compiled code embeds as a constant to refer to the rule; see `by_key`.
    """

    name: str
    primal: Callable[..., list[Array]]
    tangent: Map | None = None
    cotangent: Map | None = None
    saves: tuple[int, ...] | None = None
    linearize: Callable[..., Linearized] | None = None
    nondifferentiable: tuple[int, ...] = ()
    reverse_only: bool = False
    user_functions: tuple[Any, ...] = ()
    symbolic_zeros: frozenset[str] = frozenset()
    contract: Contract | None = None
    reaches: Literal["identity"] | Callable[..., Matrix | None] | None = None
    is_bridged: bool = False
    key: str = field(default_factory=lambda: next(KEYS), init=False)

    def __post_init__(self) -> None:
        _BY_KEY[self.key] = self
        if self.tangent is None and self.cotangent is None and self.linearize is None:
            raise GradtoolsError(
                f"rule {self.name!r}: neither a tangent nor a cotangent map was given. "
                "Pass at least one map; the other is derived by transposition."
            )

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, key=next(KEYS))  # a copy gets a new key
        _BY_KEY[self.key] = self

    @classmethod
    def of(cls, rule: Rule, **changes: Any) -> Self:
        """Converts a rule to this class: copies the common fields, and applies changes."""
        common = [f.name for f in fields(cls) if f.init and hasattr(rule, f.name)]
        return cls(**{name: getattr(rule, name) for name in common} | changes)

    @property
    def origin(self) -> Any:
        """The rule's contract, which derived rules share, or the rule itself if it has none."""
        return self.contract or self

    def fills(self, which: str) -> bool:
        """Returns whether zeros are instantiated as arrays for the "tangent" or "cotangent" map."""
        return self.contract is not None and which not in self.symbolic_zeros

    def at(self, *xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        """Evaluates the rule; returns the outputs with the linear maps at xs.

        perturbed: Whether each input is differentiated, for rules with `symbolic_zeros`; None if
            unknown.
        """
        if self.linearize is None:
            return self.linearized_from(xs, self.primal(*xs))
        if "cotangent" in self.symbolic_zeros:
            return self.linearize(*xs, perturbed=perturbed)
        return self.linearize(*xs)

    def linearized_from(self, xs: Entries, ys: list[Array]) -> Linearized:
        """Implements `at` for known outputs; the residuals must be inputs and outputs only."""
        saves = tuple(range(len(xs))) if self.saves is None else self.saves
        return Linearized(ys, [], saves, self.tangent, self.cotangent)

    def saved(self, xs: Entries, ys: Entries, extras: Entries = ()) -> list[Any]:
        """Returns the residuals that are passed to the linear maps."""
        if self.saves is None:
            return list(xs)
        everything = [*xs, *ys, *extras]
        return [everything[i] for i in self.saves]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class JvpRule(Rule):
    """A rule whose forward rule computes outputs and tangents together.

    Attributes:
        jvp: `jvp(xs, dxs)` returns outputs and tangents from one evaluation; `tangent`, if given,
            returns only the tangents.
    """

    jvp: Jvp


USE_REVERSE_MODE = (
    "Use reverse mode: grad, vjp, jacobian with mode='reverse' or, instead of jvp of grad, hvp "
    "with mode='reverse_over_reverse'."
)


def constant_error(caller: str, what: str, advice: str) -> GradtoolsError:
    """Returns the error for a derivative with respect to a constant of a frozen function."""
    fun = "G" if caller == "frozen" else "f"
    last = "call G without frozen" if fun == "G" else "leave out the mode"
    return GradtoolsError(
        f"{caller}: a derivative is needed with respect to {what} that {fun} reads and does not "
        f"take as an argument, so it is a constant. Pass it as an argument{advice}, or {last}."
    )


def closed_over_error(name: str, x: Any = None, fix: str = "") -> GradtoolsError:
    """Returns the error for a rule that closes over a differentiated array.

    x: The array, or None if the array is unknown.
    fix: Another possible cause.
    """
    which = "" if x is None else f" of shape {tuple(x.shape)} and dtype {x.dtype}"
    rule, _, caller = name.removesuffix("'s pullback").partition(": ")
    if rule == "frozen":  # "frozen", or "frozen: " and the operator with a mode
        return constant_error(caller or rule, f"an array{which}", "")
    return GradtoolsError(
        f"rule {name!r} closes over an array{which} that is differentiated or mapped; its "
        "derivative would be lost. Pass that array to the function as an argument. A method's "
        "self contains a module's parameters: write a function of the parameters instead of a "
        f"method.{fix}"
    )


def reverse_only_text(caller: str, name: str) -> str:
    """Returns the message of `caller` for forward mode through a reverse-only rule."""
    return (
        f"{caller}: f contains {name}, which has a reverse rule only, so it has no forward mode. "
        f"{USE_REVERSE_MODE}"
    )


def captured_objects(
    functions: Iterable[Any],
    wanted: Callable[[Any], bool],
    array: type | tuple[type, ...],
    attributes: bool = True,
) -> Iterator[Any]:
    """Yields each object x to which functions refer, directly or indirectly, if `wanted(x)`.

    The functions are not traced, because tracing a rule that calls itself would not terminate.

    array: The framework's array type or types; arrays are not searched.
    """
    leaves = (array, np.ndarray, np.generic, str, bytes, int, float, complex, type, ModuleType)
    todo: list[Any] = []
    for f in functions:
        plain = type(f) is FunctionType and not (
            f.__closure__ or f.__defaults__ or f.__kwdefaults__
        )
        if not plain or (attributes and f.__dict__):
            todo.append(f)
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if wanted(x):
            yield x
        if id(x) not in seen and not isinstance(x, leaves):
            seen.add(id(x))
            todo += _references(x, attributes)


def _references(x: Any, attributes: bool) -> list[Any]:
    """Returns the objects that x refers to: closure cells, contents, attributes.

    For gradtools' own objects, returns only attributes that the user set, which
    `__gradtools_holds__` lists.
    """
    names = getattr(type(x), "__gradtools_holds__", None)
    if names is not None:
        return [y for name in names if (y := getattr(x, name)) is not None]
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, (list, tuple, set, frozenset)):
        return list(x)
    found: list[Any] = []
    if isinstance(x, FunctionType):
        defaults = (x.__kwdefaults__ or {}).values()
        found += [x.__defaults__, *defaults, *(x.__closure__ or ())]
    elif isinstance(x, CellType):
        with suppress(ValueError):  # raised if the variable is not bound yet
            found.append(x.cell_contents)
    elif isinstance(x, partial):
        found += [x.func, x.args, *x.keywords.values()]
    elif isinstance(x, MethodType) and attributes:
        found += [x.__func__, x.__self__]
    if attributes:
        found.append(getattr(x, "__dict__", None))
        for kind in type(x).__mro__:
            slots = vars(kind).get("__slots__", ())
            slots = [slots] if isinstance(slots, str) else slots
            found += [getattr(x, name, None) for name in slots if not name.startswith("__")]
    return [y for y in found if y is not None]


def batched(
    rule: R, backend: Any, x_axes: Entries, saved_axes: Entries | None, size: int, **more: Any
) -> R:
    """Returns a rule whose maps are the maps of `rule` under vmap.

    Args:
        rule: The rule of one example.
        backend: An object with the methods `vmap_list` and `vmap_extras`.
        x_axes: The batch axis of each input, 0 or None. The cotangent of an input without a batch
            axis is summed over the batch.
        saved_axes: The batch axes of the residuals; None if all residuals are inputs and outputs,
            or if the rule is not linearized yet.
        size: The batch size.
        more: The values of fields that a backend's subclass of `Rule` adds.
    """
    x_axes = tuple(x_axes)

    def mapped(one: Any, axes: tuple[Any, ...]) -> dict[str, Any]:
        """Vectorizes the maps of a rule or an evaluation; `axes` are the residuals' batch axes."""
        push, pull = one.tangent, one.cotangent

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            return _mapped(push, backend, (saved, axes), (dxs, x_axes), size)

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            own_axes = axes[: len(saved)]  # omits residuals that only the tangent map uses
            pulled = _mapped(pull, backend, (saved, own_axes), (cts, (0,) * len(cts)), size)
            return [
                ct if ct is None or axis == 0 else ct.sum(0)
                for ct, axis in zip(pulled, x_axes, strict=True)
            ]

        return {"tangent": push and tangent, "cotangent": pull and cotangent}

    def linearize(*xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        one, counts = list[Linearized](), list[int]()

        def example(*x: Array) -> list[Array]:
            linearized = rule.at(*x, perturbed=perturbed)
            if linearized.opaque_residuals:
                linearized = evaluating_again(rule, linearized, len(x), perturbed)
            counts[:] = len(linearized.ys), len(linearized.extras)
            one[:] = [linearized.without_arrays()]
            return [*linearized.ys, *linearized.extras]

        run = backend.vmap_extras(example, x_axes, size, lambda: counts[1])
        out, out_axes = run(*xs)
        linearized, (count, _) = one[0], counts
        maps = mapped(linearized, saved_from(linearized.saves, x_axes, out_axes))
        linearized = replace(linearized, written=None)  # `written` supports a single example
        outs = {"ys": out[:count], "extras": out[count:]}
        return replace(linearized, example=linearized, **outs, **maps)

    def jvp(xs: Entries, dxs: Entries) -> tuple[list[Array], list[Any]]:
        assert isinstance(rule, JvpRule)
        one, counts = rule.jvp, list[int]()

        def example(x: Entries, dx: Entries) -> list[Any]:
            ys, dys = one(x, dx)
            counts[:] = [len(ys)]
            return [*ys, *dys]

        out = _mapped(example, backend, (xs, x_axes), (dxs, x_axes), size)
        return out[: counts[0]], out[counts[0] :]

    def reaches(*specs: ArraySpec) -> Matrix | None:
        assert callable(rule.reaches)
        pairs = zip(specs, x_axes, strict=True)
        return rule.reaches(*[s if a is None else replace(s, shape=s.shape[1:]) for s, a in pairs])

    if isinstance(rule, JvpRule):
        more["jvp"] = jvp
    more |= mapped(
        rule, tuple(saved_from(rule.saves, x_axes) if saved_axes is None else saved_axes)
    )
    return replace(
        rule,
        primal=lambda *xs: backend.vmap_list(lambda *x: rule.primal(*x), x_axes, size)(*xs),
        linearize=None if rule.linearize is None else linearize,
        reaches=reaches if callable(rule.reaches) else rule.reaches,
        **more,
    )


def evaluating_again(
    rule: Rule, first: Linearized, count: int, perturbed: tuple[bool, ...] | None
) -> Linearized:
    """Returns a `Linearized` whose maps evaluate the rule again, for opaque residuals.

    Opaque residuals are constants in a derivative, and may contain arrays of a transform that has
    ended.
    """

    def again(which: Literal["tangent", "cotangent"]) -> Map | None:
        if getattr(first, which) is None:
            return None

        def run(xs: Entries, vs: Entries) -> list[Any]:
            linearized = rule.at(*xs, perturbed=perturbed)
            return list(getattr(linearized, which)(linearized.saved(xs), vs))

        return run

    maps = again("tangent"), again("cotangent")
    return Linearized(first.ys, [], tuple(range(count)), *maps, True, example=first.example)


def saved_from(saves: tuple[int, ...] | None, x_axes: Entries, out_axes: Entries = ()) -> Any:
    """Returns the batch axes of the residuals; outputs without `out_axes` have batch axis 0."""
    everything = [*x_axes, *out_axes]
    if saves is None:
        return tuple(x_axes)
    return tuple([everything[i] if i < len(everything) else 0 for i in saves])


def _mapped(linear: Any, backend: Any, at: Any, vectors: Any, size: int) -> list[Any]:
    """Evaluates a map of residuals and vectors under vmap; entries may be None.

    at, vectors: Pairs of the entries and their batch axes.
    """
    (xs, x_axes), (vs, v_axes) = at, vectors
    entries, axes = [*xs, *vs], [*x_axes, *v_axes]
    mask = [e is not None for e in entries]
    out_mask: list[bool] = []

    def one(*flat: Array) -> list[Array]:
        full = spread(flat, mask)
        out = linear(full[: len(xs)], full[len(xs) :])
        out_mask[:] = [o is not None for o in out]
        return [o for o in out if o is not None]

    in_axes = tuple(a for a, m in zip(axes, mask, strict=True) if m)
    outs = backend.vmap_list(one, in_axes, size)(*(e for e in entries if e is not None))
    return spread(outs, out_mask)


def total(terms: Iterable[Any]) -> Any:
    """Sums the terms that are not None; returns None if all are None."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Places `values` where mask is true, and None elsewhere."""
    if len(values) == len(mask):
        return list(values)
    left = iter(values)
    return [next(left) if m else None for m in mask]


class _Array:
    __gradtools_array__ = True  # see `integrations.containers`

    def __repr__(self) -> str:
        return "*"


ARRAY = _Array()
"""A placeholder for an array among the leaves of a tree."""


def refilled(leaves: Sequence[Any], arrays: Iterable[Any]) -> list[Any]:
    """Replaces each ARRAY among the leaves with the next array in `arrays`."""
    left = iter(arrays)
    return [next(left) if x is ARRAY else x for x in leaves]


def replaced_where(xs: Sequence[Any], mask: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """Returns a copy of xs in which the entries where mask is true are replaced by `new`."""
    left = iter(new)
    return [next(left) if m else x for x, m in zip(xs, mask, strict=True)]


def replaced_at(xs: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Returns a copy of xs in which the entries at the positions `places` are replaced by `new`."""
    full = list(xs)
    for i, x in zip(places, new, strict=True):
        full[i] = x
    return full


def avals_of(xs: Sequence[Array]) -> Any:
    """Returns shapes and dtypes, as a key for caches and checks."""
    return tuple([(lengths_of(x.shape), x.dtype) for x in xs])


def lengths_of(shape: Any) -> tuple[Any, ...]:
    """Returns the lengths of the axes, with None in place of PyTorch's symbolic sizes."""
    return tuple([n if isinstance(n, int) else None for n in shape])
