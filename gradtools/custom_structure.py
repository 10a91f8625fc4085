"""`Specialization` converts a `custom_rule` to functions of flat arrays for one tree structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gradtools.arguments.wording import describe, in_words
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import type_key
from gradtools.integrations.containers import is_same
from gradtools.rule_contract import Aval, Primal
from gradtools.rules import ARRAY, Entries, Linearized, avals_of, lengths_of, refilled

if TYPE_CHECKING:
    from gradtools.custom_rules import CustomRule

ARGUMENT_ERRORS = (TypeError, IndexError, AttributeError)  # raised by a rule with swapped arguments
_CALLS = {
    "fwd": (
        "with symbolic_zeros=True, each argument of fwd is an object with the attributes `value` "
        "and `perturbed`."
    ),
    "bwd": "bwd is called as bwd({}residuals, cotangent).",
    "jvp": (
        "the forward rule is called as rule({}primals, tangents), with two tuples that have one "
        "entry for each argument: (x,), (dx,) = primals, tangents. The tangent of an integer "
        "argument is None."
    ),
}


@dataclass(eq=False)
class Specialization:
    """A custom rule, converted to functions of flat arrays for one tree structure.

    Attributes:
        of: The custom rule.
        statics: The static arguments.
        treedef: The tree structure of the dynamic arguments.
        others: The leaves of the dynamic arguments, with ARRAY in place of each array.
        outs: Maps the avals of the inputs to the structure of the output.
        newest: The structure of the latest output.
        refined: Converts the linear maps of a host function to rules, which are differentiable.
        is_flat: Whether the arguments are only arrays, without containers.
        fun, fwd, bwd, jvp: The user's functions, converted to functions of flat arrays; None if not
            given.
    """

    of: CustomRule
    statics: tuple[Any, ...]
    treedef: Any
    others: tuple[Any, ...]
    outs: dict[Any, Any] = field(default_factory=dict)
    newest: Any = None
    refined: Callable[..., Linearized] | None = None

    def __post_init__(self) -> None:
        self.backend = self.of._backend
        self.contract = self.of._contract()
        self.values: dict[Any, tuple[Any, list[Aval]]] = {}
        self.is_flat = False
        self.entries = self.backend.entries_of(self.treedef, self.others)
        leaf = self.backend.flatten(ARRAY)[1]
        only_arrays = all(o is ARRAY for o in self.others)
        self.is_flat = only_arrays and all(is_same(treedef, leaf) for _, treedef in self.entries)
        of, statics, arguments = self.of, self.statics, self.arguments
        fun: Any = of.fun
        fwd: Any = of.fwd
        jvp: Any = of.jvp
        self.fun, self.fwd, self.jvp = fun, fwd, jvp
        self.bwd: Any = partial(of.bwd, *statics) if of.bwd and statics else of.bwd
        if not self.is_flat or of._needs_binding:
            self.fun = lambda *xs: of._binding.call(fun, statics, arguments(xs))
            self.fwd = fwd and (lambda *xs: fwd(*statics, *arguments(xs)))
            self.jvp = jvp and (lambda xs, ts: jvp(*statics, arguments(xs), self.tangents(ts)))
        self.rule = of._rule(self)
        self.key = self.rule.key

    def arguments(self, values: Sequence[Any]) -> Any:
        """Unflattens the arguments with `values` as their array leaves."""
        if self.is_flat:
            return tuple(values)
        return self.backend.unflatten(self.treedef, refilled(self.others, values))

    # --- values

    def primal(self, *xs: Array) -> list[Array]:
        """Evaluates f at flat arrays and returns the flat output."""
        return self.outputs(xs, self.fun(*xs), "it")

    def outputs(self, xs: Sequence[Array], out: Any, who: str) -> list[Array]:
        """Flattens and checks an output of f (`who` is "it"), of fwd or of the forward rule."""
        avals = avals_of(xs)
        if who != "it":
            same_avals = lambda: self._check_output(xs, avals, out, who)
            self.contract.check_once(who, avals, check=same_avals)
        ys, out_def = self._flat_output(avals, out, who)
        if who == "it":
            self.values[avals] = out_def, self._avals_of(ys)
        self.outs[avals] = self.newest = out_def
        return ys

    def _flat_output(self, avals: Any, out: Any, who: str) -> tuple[list[Array], Any]:
        """Flattens an output; dict keys are in the order of f's output."""
        backend, known = self.backend, self.values.get(avals)
        if who == "it" or known is None:
            leaves, out_def = backend.flatten(out)
        else:
            leaves, out_def = backend.flatten_like(known[0], out)
        return [y if backend.is_array(y) else self._as_array(y, who) for y in leaves], out_def

    def _avals_of(self, ys: Sequence[Array]) -> list[Aval]:
        return [Aval(lengths_of(y.shape), self.backend.dtype_name(y)) for y in ys]

    def _check_output(self, xs: Sequence[Array], avals: Any, out: Any, who: str) -> bool:
        """Raises an error if `out` does not match f's output in structure, shapes and dtypes.

        Returns False if f's output is unknown, so that `out` cannot be checked.
        """
        if avals not in self.values:
            self.backend.abstract_eval(self.primal, *xs)
        if avals not in self.values:
            return False
        expected, wanted = self.values[avals]
        ys, out_def = self._flat_output(avals, out, who)
        came = self._avals_of(ys)
        if any(None in aval.shape for aval in (*came, *wanted)):
            ranks = lambda avals: [Aval((None,) * len(a.shape), a.dtype) for a in avals]
            came, wanted = ranks(came), ranks(wanted)
        self.contract.check_outputs(who, out_def, came, expected, wanted)
        return True

    def _as_array(self, y: Any, who: str) -> Array:
        try:
            return self.backend.asarray(y)
        except (TypeError, ValueError, GradtoolsError) as error:
            came = describe(self.backend, y)
            raise self.contract.refusal(f"{who} returned {came}, expected arrays.") from error

    # --- the forward rule

    def pushforward(self, xs: Entries, dxs: Entries) -> tuple[list[Array], list[Any]]:
        """Returns outputs and their tangents, computed by the forward rule."""
        return self.pushed(xs, self._noted("jvp", self.jvp, tuple(xs), tuple(dxs)))

    def pushed(self, xs: Entries, result: Any) -> tuple[list[Array], list[Any]]:
        """Returns outputs and tangents from the pair that the forward rule returned."""
        out, dout = self.pair(result, "the forward rule", "(out, tangent_out)")
        ys = self.outputs(xs, out, "the forward rule")
        dys = self._like(dout, self.outs[avals_of(xs)], "the forward rule's tangent")
        return ys, [
            self._fitting(dy, y, f"the forward rule's tangent {i}")
            for i, (dy, y) in enumerate(zip(dys, ys, strict=True))
        ]

    def tangent(self, xs: Entries, dxs: Entries) -> list[Any]:
        """Returns the output tangents of the forward rule."""
        return self.pushforward(xs, dxs)[1]

    def tangents(self, dxs: Sequence[Any]) -> Any:
        """Builds the tree of tangents that is passed to the forward rule."""
        instantiated = "tangent" not in self.of.symbolic_zeros
        has_zero = lambda x: instantiated and isinstance(x, (float, complex))
        full = [o if o is ARRAY else 0.0 if has_zero(o) else None for o in self.others]
        return self.backend.unflatten(self.treedef, refilled(full, dxs))

    # --- the reverse rule

    def linearize(self, *xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        """Runs fwd; returns the outputs and the linear maps that use the residuals.

        perturbed: Whether each of xs is differentiated, or None if unknown.
        """
        if "cotangent" not in self.of.symbolic_zeros:
            return self.linearized(xs, self.fwd(*xs))
        args = *self.statics, *self._fwd_arguments(xs, perturbed)
        return self.linearized(xs, self._noted("fwd", self.of.fwd, *args))

    def linearized(self, xs: Sequence[Array], result: Any) -> Linearized:
        """Converts the pair that fwd returned to the outputs and the linear maps."""
        backend = self.backend
        like = [(tuple(x.shape), x.dtype, backend.is_inexact(x)) for x in xs]
        out, res = self.pair(result, "fwd", "(out, residuals)")
        ys = self.outputs(xs, out, "fwd")
        kept, extras = Residuals.of(backend, res, xs, ys)
        out_def = self.outs[avals_of(xs)]

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            residuals, ct = kept.restored(backend, saved), backend.unflatten(out_def, list(cts))
            try:
                return self.cotangents(self.bwd(residuals, ct), like)
            except ARGUMENT_ERRORS as error:
                self.note_call("bwd", error)
                raise

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            return self.tangent(saved[len(kept.places) :], dxs)

        forward = self.of.jvp is not None
        inputs = range(len(like)) if forward else ()
        saves = (*kept.places, *inputs)
        push, opaque = tangent if forward else None, kept.opaque_residuals
        key = tuple(like), out_def, kept, type_key(kept.others)
        maps = Linearized(ys, extras, saves, push, cotangent, opaque, len(inputs), key=key)
        if self.refined is None:
            return maps
        outs = [backend.aval(y) if backend.is_inexact(y) else None for y in ys]
        return self.refined(maps, [inexact for _, _, inexact in like], outs)

    def note_call(self, role: str, error: Exception) -> None:
        """Adds advice, or how the function is called, to an error that a user's rule raised."""
        if self.of._user_functions(self) and not getattr(error, "__notes__", ()):
            statics = "".join(f"{name}, " for name in self.of._binding.statics)
            note = self.backend.hint_at_traced_value(error, role.replace("jvp", "the forward rule"))
            error.add_note(f"{self.contract.name}: {note or _CALLS[role].format(statics)}")

    def _noted(self, role: str, rule: Any, *args: Any) -> Any:
        try:
            return rule(*args)
        except ARGUMENT_ERRORS as error:
            self.note_call(role, error)
            raise

    def _fwd_arguments(self, xs: Sequence[Array], perturbed: tuple[bool, ...] | None) -> Any:
        """Returns fwd's arguments; with symbolic zeros, each array is wrapped in a `Primal`."""
        if "cotangent" not in self.of.symbolic_zeros:
            return self.arguments(xs)
        if perturbed is None:
            perturbed = tuple([self.backend.is_inexact(x) for x in xs])
        primals = [Primal(x, p) for x, p in zip(xs, perturbed, strict=True)]
        numbers = int | complex | float
        full = [Primal(o, False) if isinstance(o, numbers) else o for o in self.others]
        return self.backend.unflatten(self.treedef, refilled(full, primals))

    def cotangents(self, cotangents: Any, like: Sequence[Any]) -> list[Any]:
        """Flattens bwd's cotangents, one for each array.

        Raises an error if a cotangent does not have the shape and dtype in `like`.
        """
        if not isinstance(cotangents, (tuple, list)) or len(cotangents) != len(self.entries):
            came = describe(self.backend, cotangents)
            names = [n for n in self.of._binding.names if n not in self.of.static_argnames]
            raise self.contract.refusal(
                f"bwd returned {came}, expected a tuple of {len(self.entries)}, one cotangent for "
                f"each argument{' (' + ', '.join(names) + ')' if names else ''}. Return None for "
                "an integer argument, and for a zero cotangent."
            )
        leaves: list[Any] = []
        for i, (entry, (own, treedef)) in enumerate(zip(cotangents, self.entries, strict=True)):
            if entry is None:
                leaves += [None] * len(own)
            else:
                leaves += self._like(entry, treedef, f"bwd's entry {i}")
        there = [x for x, o in zip(leaves, self.others, strict=True) if o is ARRAY]
        return [
            self._fits(x, shape, dtype, inexact, f"bwd's cotangent of array {i}")
            for i, (x, (shape, dtype, inexact)) in enumerate(zip(there, like, strict=True))
        ]

    # --- checks

    def pair(self, result: Any, who: str, what: str) -> Any:
        """Returns the result; raises an error if it is not a pair."""
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self.contract.refusal(
                f"{who} returned {describe(self.backend, result)}, expected a pair {what}."
            )
        return result

    def _like(self, tree: Any, treedef: Any, who: str) -> list[Any]:
        """Flattens tree up to the leaves of treedef; None means zeros for a leaf or a subtree."""
        backend = self.backend
        if tree is None:
            return [None] * treedef.num_leaves

        def with_zeros() -> list[Any]:
            whole = backend.unflatten(treedef, [_ZERO] * treedef.num_leaves)
            leaves = treedef.flatten_up_to(_without_none(tree, whole))
            return [None if x is _ZERO else x for x in leaves]

        for read in (lambda: treedef.flatten_up_to(tree), with_zeros):
            with suppress(ValueError, TypeError):
                leaves = list(read())
                if any(isinstance(x, (tuple, list, dict)) for x in leaves):
                    break
                return leaves
        came = in_words(backend.flatten(tree)[1])
        raise self.contract.refusal(
            f"{who} has the structure {came}, expected {in_words(treedef)}."
        )

    def _fitting(self, x: Any, like: Array, who: str) -> Any:
        return self._fits(x, tuple(like.shape), like.dtype, self.backend.is_inexact(like), who)

    def _fits(self, x: Any, shape: Any, dtype: Any, inexact: bool, who: str) -> Any:
        """Checks the shape and dtype of a tangent or cotangent; returns None in place of a zero."""
        if x is None or not inexact:
            return None
        zero = self.backend.is_symbolic_zero(x)
        if not (zero or self.backend.is_array(x)):
            x = self._as_array(x, who)
            x = self.backend.cast(x, str(dtype).removeprefix("torch."))
        if tuple(x.shape) != shape or x.dtype != dtype:
            name = str(dtype).removeprefix("torch.")
            raise self.contract.refusal(
                f"{who} has shape {tuple(x.shape)} and dtype {self.backend.dtype_name(x)}, "
                f"expected {shape} and {name}, like its primal. Reshape or cast the array."
            )
        return None if zero else x


_ZERO = object()


def _without_none(tree: Any, whole: Any) -> Any:
    """Replaces each None in the tree with the corresponding subtree of `whole`."""
    if tree is None:
        return whole
    if type(tree) is type(whole) and type(tree) in (dict, list, tuple) and len(tree) == len(whole):
        if isinstance(tree, dict):
            return {k: _without_none(x, whole.get(k)) for k, x in tree.items()}
        return type(tree)(map(_without_none, tree, whole))
    return tree


_PLAIN = (str, bytes, bool, int, float, complex, type)


@dataclass(frozen=True)
class Residuals:
    """The structure of the pytree that fwd saved: positions of arrays, and other leaves."""

    treedef: Any
    places: tuple[int, ...]  # the positions of the residuals in [*xs, *ys, *extras]
    others: tuple[Any, ...]

    @property
    def opaque_residuals(self) -> bool:
        """Whether a residual that is not an array may depend on the inputs."""
        return any(o is not ARRAY and not isinstance(o, _PLAIN) for o in self.others)

    @classmethod
    def of(cls, backend: Backend, res: Any, xs: Sequence[Array], ys: Sequence[Array]) -> Any:
        """Returns the `Residuals` of a pytree, and its arrays that are not inputs or outputs."""
        leaves, treedef = backend.flatten(res)
        known = {id(x): i for i, x in reversed(list(enumerate([*xs, *ys])))}
        start = len(xs) + len(ys)
        extras: list[Array] = []
        places: list[int] = []
        others: list[Any] = []
        for leaf in leaves:
            if not backend.is_array(leaf):
                others.append(leaf)
                continue
            others.append(ARRAY)
            if id(leaf) not in known:
                known[id(leaf)] = start + len(extras)
                extras.append(leaf)
            places.append(known[id(leaf)])
        return cls(treedef, tuple(places), tuple(others)), extras

    def restored(self, backend: Backend, saved: Entries) -> Any:
        """Unflattens the saved arrays to the pytree of residuals that fwd returned."""
        return backend.unflatten(self.treedef, refilled(self.others, saved))
