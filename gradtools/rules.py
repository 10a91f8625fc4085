"""`Rule`: a function of flat arrays with its own jvp and vjp maps, the same in both frameworks.

Everything that bends a gradient is one thing, a value with its own tangent and cotangent map:

    y = f(x)        dy = J(x) dx        x' = J(x)^H y'

Both maps are linear, in dx and in y', and adjoint to each other under Re<u, v>. One of them
may be left out: it then is the transpose of the other. The maps get their residuals as arguments:
inputs, outputs, or *extras*, which are further results of the evaluation that made the outputs.
Extras are hidden outputs, differentiated through the code that made them, so a residual that is
an intermediate result is right at second order.

This module holds what is the same in every framework: the record and the rule under vmap. How
a rule enters a framework's own differentiation stands in each wing's `rules/installing.py`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from gradtools.errors import GradtoolsError

if TYPE_CHECKING:
    from gradtools.host_kernels import ArraySpec
    from gradtools.rule_contract import Contract

Array = Any
R = TypeVar("R", bound="Rule")
Entries = Sequence[Any]  # arrays, or None for a zero
Map = Callable[[Entries, Entries], list[Any]]
Jvp = Callable[[Entries, Entries], tuple[list[Any], list[Any]]]
Matrix = Sequence[Sequence[bool]]


KEYS = map(str, itertools.count())  # text: dynamo makes integers symbolic
_BY_KEY: weakref.WeakValueDictionary[str, Rule] = weakref.WeakValueDictionary()
_KEYS_OF: weakref.WeakKeyDictionary[Rule, str] = weakref.WeakKeyDictionary()


def key_of(rule: Rule) -> str:
    """A text by which compiled code finds the rule again, see `by_key`."""
    key = _KEYS_OF.setdefault(rule, next(KEYS))
    _BY_KEY[key] = rule
    return key


def by_key(key: str) -> Rule:
    """The rule with this key."""
    return _BY_KEY[key]


@dataclass(slots=True)
class Linearized:
    """One evaluation of a function, and its linear maps there.

    Attributes:
        ys: The outputs.
        extras: Further results that the maps read.
        saves: The residuals: positions in `[*xs, *ys, *extras]`.
        tangent: `tangent(saved, dxs)`, or None.
        cotangent: `cotangent(saved, cts)`, or None.
        opaque_residuals: Whether the author saved something besides arrays that may depend on x,
            so that a second derivative has to evaluate the function again.
        tangent_only: How many of the last residuals only the tangent map reads.
    """

    ys: list[Array]
    extras: list[Array]
    saves: tuple[int, ...]
    tangent: Map | None = None
    cotangent: Map | None = None
    opaque_residuals: bool = False
    tangent_only: int = 0

    def without_arrays(self) -> Linearized:
        """The same without arrays, which would not outlive their trace: maps and counts."""
        maps = self.saves, self.tangent, self.cotangent, self.opaque_residuals, self.tangent_only
        return Linearized([], [None] * len(self.extras), *maps)

    def saved(self, xs: Entries) -> list[Any]:
        """What the linear maps are handed."""
        everything = [*xs, *self.ys, *self.extras]
        return [everything[i] for i in self.saves]


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """A function on a flat list of arrays, with its tangent and its cotangent map.

    Attributes:
        name: What messages call it.
        primal: `primal(*xs)` gives the list of outputs.
        tangent: `tangent(saved, dxs)` gives one tangent for each output. Entries of `dxs`, and
            of what is returned, may be None, a zero. It must be linear in `dxs`.
        cotangent: `cotangent(saved, cts)` gives one cotangent for each input, in gradtools'
            complex convention. Entries may be None, a zero.
        saves: What the maps are handed, positions in `[*xs, *ys]` (default: all inputs). Only
            these are kept for the backward pass.
        linearize: `linearize(*xs)` gives a `Linearized`, for rules whose maps read more than
            inputs and outputs; `tangent`, `cotangent` and `saves` then are left out.
        nondifferentiable: Positions of inputs that are never differentiated; their derivative is
            zero.
        reverse_only: Whether the cotangent map is not linear, so that no tangent map exists.
        user_functions: The functions that the rule's author wrote, which may close over arrays
            of a running trace. If there are none, no map closes over any.
        symbolic_zeros: Which of the maps "tangent" and "cotangent" get None for a zero although
            the rule has a contract. With "cotangent", `linearize` is told what is differentiated.
        contract: The checks that the author's maps must pass; such maps get arrays of zeros, and
            not None. None: a rule of gradtools' own, which is trusted.
        reaches: Which inputs reach which outputs by a differentiable path. "identity": the
            outputs are the inputs unchanged, and pictures say so. A function (for a function of
            another framework, which pictures show opened): `reaches(*specs)` takes the ArraySpecs
            of the inputs and gives `matrix[output][input]` of booleans. None, as the attribute or
            as the function's result: every input may reach every output.
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

    def __post_init__(self) -> None:
        if self.tangent is None and self.cotangent is None and self.linearize is None:
            raise GradtoolsError(
                f"rule {self.name!r}: neither a tangent nor a cotangent map was given; "
                "give at least one, the other follows by transposition."
            )

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    @classmethod
    def of(cls, rule: Rule, **changes: Any) -> Self:
        """The rule with these changes, as one of this class: what both classes have is kept."""
        both = [f.name for f in fields(cls) if hasattr(rule, f.name)]
        return cls(**{name: getattr(rule, name) for name in both} | changes)

    @property
    def origin(self) -> Any:
        """An object that all rules derived from this one share: if one is linear, all are."""
        return self.contract or self

    def fills(self, which: str) -> bool:
        """Whether the "tangent" or "cotangent" map is handed zeros, and not None."""
        return self.contract is not None and which not in self.symbolic_zeros

    def at(self, *xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        """One evaluation with the maps there.

        perturbed: Which inputs are differentiated, where that is known and the rule asks for it
            (`symbolic_zeros`); None: each may be.
        """
        if self.linearize is None:
            return self.reading(xs, self.primal(*xs))
        if "cotangent" in self.symbolic_zeros:
            return self.linearize(*xs, perturbed=perturbed)
        return self.linearize(*xs)

    def reading(self, xs: Entries, ys: list[Array]) -> Linearized:
        """The same where the outputs are known and the maps read nothing else."""
        saves = tuple(range(len(xs))) if self.saves is None else self.saves
        return Linearized(ys, [], saves, self.tangent, self.cotangent)

    def saved(self, xs: Entries, ys: Entries, extras: Entries = ()) -> list[Any]:
        """What the linear maps are handed."""
        if self.saves is None:
            return list(xs)
        everything = [*xs, *ys, *extras]
        return [everything[i] for i in self.saves]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class JvpRule(Rule):
    """A rule whose author gave a forward rule: outputs and tangents in one.

    Attributes:
        jvp: `jvp(xs, dxs)` gives outputs and tangents of one evaluation; `tangent`, if there is
            one, is its second half.
    """

    jvp: Jvp


USE_REVERSE_MODE = (
    "Use reverse mode: grad, vjp, jacobian with mode='reverse' or hvp with "
    "mode='reverse_over_reverse'."
)


def closed_over_error(name: str) -> GradtoolsError:
    """The error of a rule that closes over an array that is differentiated."""
    return GradtoolsError(
        f"rule {name!r} closes over an array with respect to which you differentiate; its "
        "derivative would be lost. Pass that array to the function as an argument."
    )


def reverse_only_text(caller: str, name: str) -> str:
    """Why a rule with a reverse rule that is not linear cannot be entered."""
    return (
        f"{caller}: f holds {name}, which has a reverse rule only, so it has no forward mode. "
        f"{USE_REVERSE_MODE}"
    )


def closes_over(
    rule: Rule, wanted: Callable[[Any], bool], array: type, attributes: bool = True
) -> bool:
    """Whether a rule's user functions hold such an array, in closures, defaults or attributes.

    They are searched and not traced: a rule may use itself, so that tracing would not end.
    """
    return next(held_by(rule.user_functions, wanted, array, attributes), None) is not None


def held_by(
    functions: Iterable[Any], wanted: Callable[[Any], bool], array: type, attributes: bool = True
) -> Iterator[Any]:
    """The arrays of a kind in closures, defaults, containers and, if asked, objects' attributes."""
    leaves = (array, np.ndarray, np.generic, str, bytes, int, float, complex, type, ModuleType)
    todo: list[Any] = [f for f in functions if _holds(f, attributes)]
    seen: set[int] = set()
    while todo:
        x = todo.pop()
        if wanted(x):
            yield x
        if id(x) not in seen and not isinstance(x, leaves):
            seen.add(id(x))
            todo += _held(x, attributes)


def _holds(f: Any, attributes: bool) -> bool:
    """Whether a function holds anything at all."""
    if type(f) is not FunctionType:
        return True
    return bool(f.__closure__ or f.__defaults__ or f.__kwdefaults__ or (attributes and f.__dict__))


def _held(x: Any, attributes: bool) -> list[Any]:
    """What an object holds: a closure's variables, a container's entries, its attributes.

    An object of gradtools names in `__gradtools_holds__` the attributes that its user gave it.
    """
    names = getattr(type(x), "__gradtools_holds__", None)
    if names is not None:
        return [h for name in names if (h := getattr(x, name)) is not None]
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset):
        return list(x)
    held: list[Any] = []
    if isinstance(x, FunctionType):
        held += [x.__defaults__, x.__kwdefaults__]
        for cell in x.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a name that is not bound yet
                continue
    elif isinstance(x, partial):
        held += [x.func, x.args, x.keywords]
    elif isinstance(x, MethodType) and attributes:
        held += [x.__func__, x.__self__]
    if attributes:
        held.append(getattr(x, "__dict__", None))
        held += [getattr(x, name, None) for kind in type(x).__mro__ for name in _slots(kind)]
    return [h for h in held if h is not None]


def _slots(kind: type) -> list[str]:
    """The attributes of instances that have no `__dict__`."""
    names = vars(kind).get("__slots__", ())
    return [n for n in ([names] if isinstance(names, str) else names) if not n.startswith("__")]


def batched(
    rule: R, backend: Any, x_axes: Entries, saved_axes: Entries | None, size: int, **more: Any
) -> R:
    """The rule of `vmap(rule)`.

    Args:
        rule: The rule of one example.
        backend: Whose `vmap_list`, `vmap_extras` and `sum_leading` are used.
        x_axes: 0 or None for each input: whether it carries the batch in front. An input without
            it gets its cotangent summed over the batch.
        saved_axes: The same for what the linear maps are handed; None where they read inputs
            and outputs alone, or where a rule is yet to be linearized.
        size: The batch size.
        more: The fields that a wing's own record of a rule adds.
    """
    x_axes = tuple(x_axes)

    def tangent_of(one: Map | None, axes: tuple[Any, ...]) -> Map | None:
        if one is None:
            return None
        return lambda saved, dxs: _mapped(one, backend, axes, x_axes, size)(saved, dxs)

    def cotangent_of(one: Map | None, axes: tuple[Any, ...]) -> Map | None:
        if one is None:
            return None

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            given = axes[: len(saved)]  # without what the tangent map alone reads
            result = _mapped(one, backend, given, (0,) * len(cts), size)(saved, cts)
            return [
                ct if ct is None or axis == 0 else backend.sum_leading(ct)
                for ct, axis in zip(result, x_axes, strict=True)
            ]

        return cotangent

    def linearize(*xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        one, counts = list[Linearized](), list[int]()

        def example(*x: Array) -> list[Array]:
            result = rule.at(*x, perturbed=perturbed)
            counts[:] = len(result.ys), len(result.extras)
            one[:] = [result.without_arrays()]
            return [*result.ys, *result.extras]

        run = backend.vmap_extras(example, x_axes, size, lambda: counts[1])
        out, out_axes = run(*xs)
        result, (count, _) = one[0], counts
        axes = saved_from(result.saves, x_axes, out_axes)
        return replace(
            result,
            ys=out[:count],
            extras=out[count:],
            tangent=tangent_of(result.tangent, axes),
            cotangent=cotangent_of(result.cotangent, axes),
        )

    def jvp(xs: Entries, dxs: Entries) -> tuple[list[Array], list[Any]]:
        assert isinstance(rule, JvpRule)
        one, counts = rule.jvp, list[int]()

        def example(x: Entries, dx: Entries) -> list[Any]:
            ys, dys = one(x, dx)
            counts[:] = [len(ys)]
            return [*ys, *dys]

        out = _mapped(example, backend, x_axes, x_axes, size)(xs, dxs)
        return out[: counts[0]], out[counts[0] :]

    def reaches(*specs: ArraySpec) -> Matrix | None:
        assert callable(rule.reaches)
        pairs = zip(specs, x_axes, strict=True)
        return rule.reaches(*[s if a is None else replace(s, shape=s.shape[1:]) for s, a in pairs])

    if isinstance(rule, JvpRule):
        more["jvp"] = jvp
    axes = tuple(saved_from(rule.saves, x_axes) if saved_axes is None else saved_axes)
    return replace(
        rule,
        primal=lambda *xs: backend.vmap_list(lambda *x: rule.primal(*x), x_axes, size)(*xs),
        tangent=tangent_of(rule.tangent, axes),
        cotangent=cotangent_of(rule.cotangent, axes),
        linearize=None if rule.linearize is None else linearize,
        reaches=reaches if callable(rule.reaches) else rule.reaches,
        **more,
    )


def saved_from(saves: tuple[int, ...] | None, x_axes: Entries, out_axes: Entries = ()) -> Any:
    """The batch axes of the residuals. Outputs whose axes are not given carry the batch."""
    everything = [*x_axes, *out_axes]
    if saves is None:
        return tuple(x_axes)
    return tuple([everything[i] if i < len(everything) else 0 for i in saves])


def _mapped(linear: Any, backend: Any, x_axes: Entries, v_axes: Entries, size: int) -> Any:
    """`vmap` of a linear map whose entries, in and out, may be None."""

    def run(xs: Entries, vs: Entries) -> list[Any]:
        entries, axes = [*xs, *vs], [*x_axes, *v_axes]
        mask = [e is not None for e in entries]
        came_out: list[bool] = []

        def one(*flat: Array) -> list[Array]:
            full = spread(flat, mask)
            out = linear(full[: len(xs)], full[len(xs) :])
            came_out[:] = [o is not None for o in out]
            return [o for o in out if o is not None]

        in_axes = tuple(a for a, t in zip(axes, mask, strict=True) if t)
        result = backend.vmap_list(one, in_axes, size)(*(e for e in entries if e is not None))
        return spread(result, came_out)

    return run


def total(terms: Iterable[Any]) -> Any:
    """The sum of the terms that are not None; None if all are."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], present[0]) if present else None


def spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """`values` at the places where mask is true, None elsewhere."""
    if len(values) == len(mask):
        return list(values)
    left = iter(values)
    return [next(left) if m else None for m in mask]


def replaced_where(xs: Sequence[Any], mask: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """xs with new entries at the places where mask is true."""
    left = iter(new)
    return [next(left) if m else x for x, m in zip(xs, mask, strict=True)]


def replaced_at(xs: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """xs with new entries at some places."""
    full = list(xs)
    for i, x in zip(places, new, strict=True):
        full[i] = x
    return full
