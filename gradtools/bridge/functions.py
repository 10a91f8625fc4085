"""Wraps a function f of one framework (the guest) as a custom rule of the other (the host).

The rule of f calls the guest's `gradtools.vjp` and `jvp`; the derivatives are bridged functions:

    y = f(x)      dy = jvp_f(x, dx)      x' = vjp_f(x, y')

Derivatives of any order are therefore bridged functions. Both backends compute J^H y' as the
pullback, so nothing is conjugated here. If the host's arrays are concrete, f is called directly on
the same memory; in a traced program, f runs as a host kernel. Each derivative evaluates f again,
because the guest's graph is freed after each call.

`torch_guest.py` and `jax_guest.py` implement the two guests.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np

from gradtools.arguments.static_arguments import Parameters
from gradtools.arguments.wording import describe
from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import ArraySpec, Kernel, carrier, remember
from gradtools.integrations.containers import OpenedTree
from gradtools.rules import Entries, Rule, replaced_where, spread

Array = Any
Mask = tuple[bool, ...]
Run = Callable[..., list[Array]]


class Foreign:
    """A function of flat lists of the guest's arrays, and its rule in the host.

    Attributes:
        guest: The framework of the function: a `TorchGuest` or a `JaxGuest`.
        name: The function's name in messages.
        run: The function of the guest's arrays.
        outs: A function from the inputs' ArraySpecs to the outputs' ArraySpecs.
        base: The original function if this function is a derivative, otherwise this function.
    """

    def __init__(
        self,
        guest: Any,
        name: str,
        run: Run,
        outs: Callable[..., Any],
        base: FlatBridged | None = None,
    ) -> None:
        self.guest, self.name, self.run, self.outs = guest, name, run, outs
        self.base: Any = base or self
        self.entry = guest.entry(run)
        self._derived: dict[Any, Foreign] = {}
        self._signatures: dict[Any, ForeignSignature] = {}
        self._mapped: dict[Any, Run] = {}

    def signature(self, xs: Sequence[Array]) -> ForeignSignature:
        """Returns the memoized specialization for the given host arrays' shapes and dtypes."""
        key = tuple([(x.shape, x.dtype) for x in xs])
        if key not in self._signatures:
            made = ForeignSignature(self, self.guest.specs_of(self.name, xs))
            remember(self._signatures, key, made)
        return self._signatures[key]

    def applied(self, *xs: Array) -> list[Array]:
        """Returns the outputs, with derivatives defined by `rule`."""
        if self.guest.are_plain(xs):
            return self.value(*xs)
        return self.guest.host.apply_rule(self.rule, *xs)

    def value(self, *xs: Array) -> list[Array]:
        """Returns the outputs as host arrays, without derivatives."""
        signature, host = self.signature(xs), self.guest.host
        if self.guest.are_plain(xs):
            return self.guest.called(signature, self.entry, xs)
        call, arrays = signature.kernel.bind(host, xs)
        return list(host.call_kernel(call, arrays))

    @cached_property
    def rule(self) -> Rule:
        """The function as a custom rule of the host framework."""

        def tangent(xs: Entries, dxs: Entries) -> list[Any]:
            moving = tuple([dx is not None for dx in dxs])
            pushed = self.jvp(moving).applied(*xs, *_present(dxs))
            return spread(pushed, self.signature(xs).inexact)

        def cotangent(xs: Entries, cts: Entries) -> list[Any]:
            moving = tuple(map(_is_inexact, self.signature(xs).ins))
            given = tuple([ct is not None for ct in cts])
            if not any(moving) or not any(given):
                return [None] * len(xs)
            return spread(self.vjp(moving, given).applied(*xs, *_present(cts)), moving)

        return Rule(self.name, self.value, tangent, cotangent, is_bridged=True)

    def jvp(self, moving: Mask) -> Foreign:
        """Returns a function of the inputs and their tangents that returns output tangents."""
        n, backend = len(moving), self.guest.backend

        def pushed(*operands: Array) -> list[Array]:
            inexact = lambda ys: list(filter(backend.is_inexact, ys))
            fun, at = self._restricted(operands[:n], moving, inexact)
            return list(backend.jvp(fun, at, list(operands[n:]))[2])

        def outs(specs: Sequence[ArraySpec]) -> list[ArraySpec]:
            return list(filter(_is_inexact, self.outs(specs[:n])))

        return self._of("jvp", (moving,), pushed, outs)

    def vjp(self, moving: Mask, given: Mask) -> Foreign:
        """Returns a function of the inputs and output cotangents that returns input cotangents."""
        n, backend = len(moving), self.guest.backend

        def pulled(*operands: Array) -> list[Array]:
            chosen = lambda ys: [y for y, g in zip(ys, given, strict=True) if g]
            fun, at = self._restricted(operands[:n], moving, chosen)
            evaluation = backend.vjp(fun, at, groups=None, once=True)
            pulled = evaluation.pullback(list(operands[n:]))
            return list(backend.filled(pulled, at))

        def outs(specs: Sequence[ArraySpec]) -> list[ArraySpec]:
            return [s for s, m in zip(specs[:n], moving, strict=True) if m]

        return self._of("vjp", (moving, given), pulled, outs)

    def _restricted(self, xs: Sequence[Array], moving: Mask, select: Any) -> tuple[Any, Any]:
        """Returns the function of the differentiated inputs only, and the differentiated inputs."""

        def fun(*at: Array) -> tuple[list[Array], list[Array]]:
            ys = self.run(*replaced_where(xs, moving, at))
            if chosen := select(ys):
                self.guest.refuse_constants(self.name, ys)
            return chosen, []

        fun.caller = self.guest.operator  # type: ignore[attr-defined]
        return fun, [x for x, m in zip(xs, moving, strict=True) if m]

    def mapped(self, shared: Any, depth: int) -> Run:
        """Returns the function mapped over `depth` batch axes; `_shared` computes `shared`."""
        if shared not in self._mapped:
            run = self.run
            for level in reversed(range(depth)):
                run = self.guest.vmap(run, tuple([None if s[level] else 0 for s in shared]))
            remember(self._mapped, shared, self.guest.entry(run))
        return self._mapped[shared]

    def _of(self, which: str, masks: Any, run: Run, outs: Callable[..., Any]) -> Foreign:
        if (which, masks) not in self._derived:
            made = Foreign(self.guest, f"{self.name}'s {which}", run, outs, self.base)
            remember(self._derived, (which, masks), made)
        return self._derived[which, masks]


@dataclass(eq=False)
class ForeignSignature:
    """A foreign function specialized to the shapes and dtypes of its inputs.

    Attributes:
        of: The `Foreign` function.
        ins: The inputs' ArraySpecs.
    """

    of: Foreign
    ins: tuple[ArraySpec, ...]

    @cached_property
    def outs(self) -> list[ArraySpec]:
        """The outputs' ArraySpecs, from the first call or inferred without running the function."""
        return self.of.outs(self.ins)

    def record(self, run: Run, outs: list[ArraySpec]) -> None:
        """Records the outputs' ArraySpecs after a call, unless `run` is a mapped function."""
        if run is self.of.entry:
            vars(self).setdefault("outs", outs)

    @cached_property
    def inexact(self) -> Mask:
        """Whether each output is floating or complex."""
        return tuple(map(_is_inexact, self.outs))

    @cached_property
    def kernel(self) -> Kernel:
        """The function as a host kernel."""
        return Kernel(self._on_host, lambda *_: self.outs, True, self.of.name, True, self)

    @property
    def name(self) -> str:
        """The function's name and framework, for messages."""
        return f"{self.of.name} in {self.of.guest.title}"

    @property
    def fun(self) -> Any:
        """The user's function."""
        return self.of.base.fun

    def _on_host(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Calls the function on NumPy arrays, each with leading batch axes."""
        guest = self.of.guest
        depth = arrays[0].ndim - len(self.ins[0].shape) if arrays else 0
        if not depth:
            return guest.called_on_host(self, self.of.entry, arrays)
        if 0 in arrays[0].shape[:depth]:
            sizes = arrays[0].shape[:depth]
            return [np.empty((*sizes, *s.shape), carrier(s.dtype)) for s in self.outs]
        shared = _shared(arrays, depth)
        # Index 0 removes each broadcast axis; `...` ensures that a result without axes is an array.
        arrays = [
            a[(*[0 if s else slice(None) for s in of], ...)] if any(of) else a
            for a, of in zip(arrays, shared, strict=True)
        ]
        return guest.called_on_host(self, self.of.mapped(tuple(map(tuple, shared)), depth), arrays)


def _shared(arrays: Sequence[np.ndarray], depth: int) -> list[list[bool]]:
    """Returns, for each array, a mask of the batch axes along which the array is broadcast.

    If all arrays are broadcast along an axis, the first array counts as not broadcast.
    """
    result = [[a.strides[i] == 0 and a.shape[i] > 1 for i in range(depth)] for a in arrays]
    for level in range(depth):
        if all(s[level] for s in result):
            result[0][level] = False
    return result


def _present(xs: Entries) -> list[Array]:
    return [x for x in xs if x is not None]


def _is_inexact(spec: ArraySpec) -> bool:
    return spec.dtype.startswith(("float", "bfloat", "complex"))


# --- the function of pytrees -------------------------------------------------------------


class Bridged(CustomRule):
    """A guest framework's function as a function of the host; see `gradtools.bridge`."""

    _kind = "bridged function"
    _is_checked = False
    __gradtools_holds__ = ("fun", "out")

    def __init__(self, guest: Any, f: Callable[..., Any], out: Any) -> None:
        super().__init__(guest.host, f, ())
        self.guest, self.out = guest, out

    def _make_binding(self) -> Parameters:
        return Parameters(None, (), (), ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; derivatives in the host are computed by the guest framework."""
        try:
            return super().__call__(args, kwargs)
        except GradtoolsError:
            self._refuse_guest_arrays(args, kwargs)
            raise

    def _refuse_guest_arrays(self, *given: Any) -> None:
        """Raises an error if an argument that the host rejected is an array of the guest."""
        guest, leaves = self.guest, list[Any]()
        with suppress(GradtoolsError):  # `flatten` rejects arrays of the host
            leaves = guest.backend.flatten(given)[0]
        x = next(filter(guest.backend.is_array, leaves), None)
        if x is not None:
            raise GradtoolsError(
                f"{guest.operator}: the function that {guest.operator} returns takes arrays of "
                f"{guest.host_title}; got {describe(guest.backend, x)} of {guest.title}. Convert "
                f"the array: gradtools.{guest.host.name}.asarray(gradtools.{guest.name}.to_numpy("
                "x)), or call the original function."
            ) from None

    def _rule(self, specialized: Specialization) -> Rule:
        flat = FlatBridged(self, specialized)
        return replace(flat.rule, primal=flat.primal)


class FlatBridged(Foreign):
    """A bridged function of flat lists, for one structure of its arguments."""

    def __init__(self, of: Bridged, specialized: Specialization) -> None:
        self.of, self.specialized, self.host = of, specialized, of._backend
        self.fun = of.fun
        # The indices of arguments that fun writes to and receives as copies; None before the first
        # call.
        self.written: set[int] | None = None
        self.structures: dict[Any, Any] = {}  # maps shapes to the host's output treedef
        super().__init__(of.guest, of.__name__, self._run, self._outs)

    def _run(self, *arrays: Array) -> list[Array]:
        """Calls the function; returns the leaves of its output in the host's order."""
        arrays = self.guest.protected(arrays, self.written)
        args, kwargs = self.specialized.arguments(arrays)
        try:
            out = self.of.fun(*args, **kwargs)
        except TypeError as error:
            guest, name = self.guest, self.name
            given = ", ".join([describe(guest.backend, x) for x in [*args, *kwargs.values()]])
            error.add_note(
                f"{guest.operator} converts functions of {guest.title} (for functions of "
                f"{guest.host_title} use to_{guest.name}), and calls {name} with arrays of "
                f"{guest.title}: {name}({given})."
            )
            raise
        leaves, treedef = self.guest.backend.flatten(out)
        structure, order = self._arranged(treedef, len(leaves))
        self.structures[_shapes(arrays)] = structure
        return [self.guest.as_array(self.name, leaves[i]) for i in order]

    def _arranged(self, treedef: Any, count: int) -> tuple[Any, list[int]]:
        """Returns the host's treedef for a guest treedef, and the order of its leaves."""
        marks = [np.zeros(()) for _ in range(count)]
        places = {id(mark): i for i, mark in enumerate(marks)}
        leaves, structure = self._in_host(self.guest.backend.unflatten(treedef, marks))
        other = next((x for x in leaves if id(x) not in places), None)
        if other is not None:
            kind = f"{type(other).__module__}.{type(other).__qualname__}"
            raise GradtoolsError(
                f"{self.guest.operator}: {self.name} returned a {kind}, which is not a pytree "
                f"in {self.guest.host_title}. Return a tuple, a list or a dict."
            )
        return structure, [places[id(x)] for x in leaves]

    def _in_host(self, tree: Any) -> tuple[list[Any], Any]:
        """Flattens an output; dicts and tuples that only the guest can flatten become plain types.

        For example, the host flattens a ModelOutput of transformers as a plain dict.
        """
        while True:
            leaves, structure = self.host.flatten(tree)
            whole, outer = leaves, structure
            if type(structure) is OpenedTree:
                outer = structure.treedef
                whole = outer.flatten_up_to(tree)
            plain = list(map(_plain, whole))
            if all(map(is_, plain, whole)):
                return leaves, structure
            tree = self.host.unflatten(outer, plain)

    def primal(self, *xs: Array) -> list[Array]:
        """Returns the flat outputs; stores the structure of the output in `specialized`."""
        ys, shapes = self.value(*xs), _shapes(xs)
        if shapes not in self.structures:
            ins = self.signature(xs).ins
            self._outs(ins)
            shapes = _shapes(ins)
        tree = self.host.unflatten(self.structures[shapes], ys)
        return self.specialized.outputs(xs, tree, "it")

    def _outs(self, specs: Sequence[ArraySpec]) -> list[ArraySpec]:
        """Returns the outputs' ArraySpecs from `out` or from the guest's abstract evaluation."""
        out = self.of.out
        if out is None:
            return self.guest.abstract(self, specs)
        if callable(out):
            args, kwargs = self.specialized.arguments(specs)
            out = out(*args, **kwargs)
        result, self.structures[_shapes(specs)] = self._in_host(out)
        for spec in result:
            if not isinstance(spec, ArraySpec):
                raise GradtoolsError(
                    f"{self.guest.operator}: out contains {spec!r}; it must be a pytree of "
                    "ArraySpec(shape, dtype), or a function that returns such a pytree."
                )
        return result


def _plain(x: Any) -> Any:
    """Converts a dict or tuple of any class to a plain dict or tuple, for the host to flatten."""
    if isinstance(x, tuple):
        return tuple(x)
    return dict(x) if isinstance(x, dict | UserDict) else x


def _shapes(arrays: Sequence[Array]) -> Any:
    return tuple([tuple(x.shape) for x in arrays])
