"""`Call` represents one call of a user's function as a function of flat arrays.

Derivative operators take arguments that are pytrees; backends take lists of arrays. A `Call`
flattens the differentiated arguments, names each leaf by its argument and path, and unflattens
results. `Call` also validates the user's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradtools.arguments.checks import as_array, check_function, differentiable_leaf, matching
from gradtools.arguments.wording import NO_RETURN, describe, in_words
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError

NOT_NAMED = "pass the value in an argument that is not in argnums"
_FLOATS = "Return a floating-point number: a cast to an integer or boolean has no derivative"
_TREES = (tuple, list, dict)
_INEXACT = ("real", "complex")  # the kinds of leaves that can be differentiated
Attach = Callable[..., Any]


@dataclass(frozen=True)
class GradientSpec:
    """The options of a gradient operator."""

    operator: str  # the name of the public function, for messages
    f: Callable[..., Any]
    argnums: int | Sequence[int]
    has_aux: bool | None = None  # None if the operator does not take has_aux
    disconnected_inputs: str = "raise"
    minimizing: int | None = None  # The number of players that minimize f.
    opened: Any = None  # The call as rewritten by `Backend.opened`.
    frozen: Any = None  # The result of `frozen(f)`; None if mode is "auto".


class Call:
    """`f(*args, **kwargs)`, differentiated with respect to the arguments in `argnums`."""

    returns_output = True  # Whether the operator returns the detached output of f.
    # Whether f runs with kernels that support vmap and second derivatives.
    plain_kernels = False
    function = "f"  # The function's name in messages.
    needs_floats = False  # Whether f must return a floating or complex array.
    own: frozenset[int] = frozenset()  # The ids of the leaves that are module parameters.
    # Returns, after an evaluation, whether `attaching` attaches the results to the leaves, so that
    # the graph of the evaluation need not be kept.
    is_deferred: Callable[[], bool] = staticmethod(bool)

    def __init__(
        self,
        backend: Backend,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: tuple[int, ...],
        has_aux: bool | None = None,
        elsewhere: str = NOT_NAMED,
        names: Sequence[str] = (),
        keeps_exact: bool = False,
    ) -> None:
        self.backend, self.caller = backend, caller
        self.names = names  # Names in messages; by default "argument 0" and so on.
        # Whether f returns `(output, aux)`, and whether the operator has the argument has_aux.
        self.has_aux, self.takes_aux = bool(has_aux), has_aux is not None
        self.f: Any = f
        self.args, self.kwargs, self.argnums = tuple(args), kwargs, argnums
        self.opened: Any = None
        self.leaves: list[Array]
        self._is_leaf: bool
        kinds = self._flatten()
        alone = self._is_leaf and kinds[0] is not None and len(self.args) == 1 and not kwargs
        if not alone:  # a single array is not a module
            self._check_others()
            self.opened = backend.opened(caller, f, args, kwargs, argnums)
        if self.opened is not None:
            self.f, self.args = self.opened, tuple(self.opened.args)
            self.at_parameters_of(self.opened)
            kinds = self._flatten()
        # The integer leaves by position, if the operator keeps them constant.
        self._exact: dict[int, Any] = {}
        for k, kind in enumerate(kinds):
            if kind in _INEXACT:
                continue
            leaf = self.leaves[k]
            if keeps_exact and (kind == "exact" or _is_integer(leaf)):
                self._exact[k] = leaf
            else:
                path = self.paths[k]
                self.leaves[k] = differentiable_leaf(backend, caller, leaf, path, elsewhere)
        if self._exact:
            self._is_leaf = False
            self.leaves = [x for k, x in enumerate(self.leaves) if k not in self._exact]

    def _flatten(self) -> list[str | None]:
        """Flattens the differentiated arguments into `leaves`; returns the kind of each leaf."""
        self.leaves = []
        self.treedefs: list[Any] = []
        self.counts: list[int] = []
        kinds: list[str | None] = []
        for i in self.argnums:
            leaves, treedef, of_leaves = self.backend.flatten_arrays(self.args[i])
            self.leaves += leaves
            self.treedefs.append(treedef)
            self.counts.append(len(leaves))
            kinds += of_leaves
        # In the common case of one array, no tree is rebuilt.
        self._is_leaf = self.counts == [1] and leaves[0] is self.args[i]
        return kinds

    def _check_others(self) -> None:
        """Raises an error if any argument contains an array of the other framework.

        In compiled code, dynamo itself rejects such an array.
        """
        others = len(self.args) > len(self.argnums) or self.kwargs
        if others and not self.backend.compiler.is_tracing():
            self.backend.check_arrays(*self.args, *self.kwargs.values())

    def at_parameters_of(self, opened: Any) -> None:
        """Copies the ids of the module parameters, and `is_deferred`, from `opened`."""
        self.own, self.is_deferred = opened.own, opened.is_deferred

    @property
    def paths(self) -> list[str]:
        """The names of the differentiated leaves, computed only for error messages."""
        return [x for k, x in enumerate(self._all_paths()) if k not in self._exact]

    def _all_paths(self) -> list[str]:
        return [
            f"{self._name(i)}{path}"
            for i in self.argnums
            for path in self.backend.leaf_paths(self.args[i])
        ]

    def _name(self, i: int) -> str:
        return self.names[i] if self.names else f"argument {i}"

    def without_values(self, aval: Callable[[Array], Any], out: Any = None) -> Call:
        """Returns a copy for pullbacks, which contains names, structures and avals, but no arrays.

        out: The output of f, whose leaf paths appear in messages.
        """
        bare = copy(self)
        bare.leaves, bare._exact = [aval(x) for x in self.leaves], self.exact_tangents
        paths, out_paths = self._all_paths(), self.backend.leaf_paths(out)
        vars(bare).update(_all_paths=lambda: paths, _paths_of_output=lambda: out_paths)
        bare.f, bare.args, bare.kwargs, bare.opened = None, (), {}, None
        return bare

    @property
    def exact_tangents(self) -> dict[int, Any]:
        """The tangents of the integer leaves."""
        return {k: self.backend.no_tangent(x) for k, x in self._exact.items()}

    # --- the function of flat arrays

    def __call__(self, *leaves: Array) -> tuple[list[Array], list[Array]]:
        """Returns `(outs, extras)` of f at the given leaves; stores the structure of f's output."""
        args, backend = list(self.args), self.backend
        trees = leaves if self._is_leaf else self.to_trees(leaves)
        for i, tree in zip(self.argnums, trees, strict=True):
            args[i] = tree
        out, aux = self.f(*args, **self.kwargs), None
        if self.has_aux:
            if not isinstance(out, tuple) or len(out) != 2:
                raise GradtoolsError(
                    f"{self.caller}: with has_aux=True f must return a pair (output, aux), got "
                    f"{describe(backend, out)}. Return both, or leave has_aux out."
                )
            out, aux = out
        # Stores only the structure, because stored arrays would leak tracers and memory.
        self._out_is_leaf = not isinstance(out, _TREES)
        out_leaves, self._out_def, self._kinds = backend.flatten_arrays(out)
        outs: list[Array] = []
        extras: list[Array] = []
        for k, y in enumerate(out_leaves):
            if self._kinds[k] is None:
                name, fix = f"f's output{backend.leaf_paths(out)[k]}", ""
                if self.takes_aux and not self.has_aux:
                    fix = " Leave it out, or pass has_aux=True and return (output, aux)."
                y = as_array(backend, self.caller, y, name, fix=fix)
                self._kinds[k] = backend.flatten_arrays(y)[2][0]
            (outs if self._kinds[k] in _INEXACT else extras).append(y)
        if self.needs_floats and not outs:
            raise GradtoolsError(
                f"{self.caller}: f must return a floating or complex array; got "
                f"{describe(backend, out)}. {NO_RETURN if out is None else f'{_FLOATS}.'}"
            )
        self.no_tangents = [*map(backend.no_tangent, extras)]  # the tangents of f's integer outputs
        self._aux_static: list[tuple[Any] | None] = []
        if self.has_aux:
            aux_leaves, self._aux_def = backend.flatten(aux)
            self._aux_static = [None if backend.is_array(x) else (x,) for x in aux_leaves]
            extras += [x for x in aux_leaves if backend.is_array(x)]
        return outs, extras if self.opened is None else extras + self.opened.effects()

    def _paths_of_output(self) -> list[str]:
        like = [self.backend.asarray(0.0)] * len(self._kinds)
        return self.backend.leaf_paths(self.backend.unflatten(self._out_def, like))

    # --- back into trees

    def to_trees(self, leaves: Sequence[Any], exact: dict[int, Any] | None = None) -> Any:
        """Builds one tree per differentiated argument from `leaves`.

        exact: Replacements for the integer leaves, by position; if None, the integers are kept.
        """
        if self._is_leaf:
            return tuple(leaves)
        if self._exact:
            kept, left = self._exact if exact is None else exact, iter(leaves)
            leaves = [kept[k] if k in kept else next(left) for k in range(sum(self.counts))]
        trees, start = [], 0
        for treedef, count in zip(self.treedefs, self.counts, strict=True):
            trees.append(self.backend.unflatten(treedef, leaves[start : start + count]))
            start += count
        return tuple(trees)

    def from_trees(self, trees: Sequence[Any], what: str) -> list[Array]:
        """Flattens one tree per differentiated argument; raises an error if a tree does not match.

        what: The name of the trees in messages. For "tangent", messages name the trees "tangent 0"
            and so on; if the arguments have names, `what` is the name of the single tree.
        """
        own = self.names[0] if self.names else "argument"
        flat: list[Array] = []
        for i, tree, treedef in zip(self.argnums, trees, self.treedefs, strict=True):
            leaves = _leaves_like(treedef, tree)
            if leaves is None:
                leaves = _leaves_like(treedef, self.backend.part_of(tree))
            if leaves is None:
                came = in_words(self.backend.flatten(tree)[1])
                raise GradtoolsError(
                    f"{self.caller}: {what if self.names else f'{what} {i}'} has the structure "
                    f"{came}; expected the structure of {self._name(i)}, {in_words(treedef)}. Pass "
                    "a tree of the same structure."
                )
            flat += leaves
        if self._exact:
            self._check_exact(flat, what)
            flat = [x for k, x in enumerate(flat) if k not in self._exact]
        names = lambda k: (self.paths[k].replace(own, what, 1), self.paths[k])
        return [
            matching(self.backend, self.caller, x, like, partial(names, k))
            for k, (x, like) in enumerate(zip(flat, self.leaves, strict=True))
        ]

    def _check_exact(self, tangents: Sequence[Any], what: str) -> None:
        """Raises an error if an integer leaf has a tangent other than None or float0 zeros."""
        for k, none in self.exact_tangents.items():
            x = tangents[k]
            if x is not None and getattr(x, "dtype", x) != getattr(none, "dtype", None):
                name = self._all_paths()[k].replace("argument", what, 1)
                raise GradtoolsError(
                    f"{self.caller}: {name} is {describe(self.backend, x)}, but its primal is an "
                    "integer, which has no tangent. Pass None."
                )

    def output(self, outs: Sequence[Array], extras: Sequence[Array]) -> tuple[Any, Any]:
        """Builds `(out, aux)` from the flat lists; updates the user's modules (see `settle`)."""
        self.settle(extras)
        diff, rest = iter(outs), iter(extras)
        leaves = [next(diff if kind in _INEXACT else rest) for kind in self._kinds]
        aux = [static[0] if static else next(rest) for static in self._aux_static]
        out = self.backend.unflatten(self._out_def, leaves)
        return out, self.backend.unflatten(self._aux_def, aux) if self.has_aux else None

    def settle(self, extras: Sequence[Array]) -> None:
        """Writes the changes that f made to its module arguments to the user's modules."""
        if self.opened is not None:
            self.opened.settle(extras)

    def attaching(self, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Attach:
        """Returns `attach(results, select)`, which attaches results to the graph of the parameters.

        In JAX, or if no argument contains a module, `attach` returns the results unchanged. The
        attached graph may call `operator(*args, **kwargs)` again, and `select` extracts the results
        from the output of this call.
        """
        if self.opened is None:
            return lambda results, select=None: results
        return self.backend.attaching(self.opened, self.caller, partial(operator, *args, **kwargs))

    def refuse_changes(self) -> None:
        """Raises an error if f changed a module argument, because the change would be discarded."""
        if self.opened is not None:
            self.opened.refuse_changes()

    def tangent_output(self, tangents: Sequence[Array], exact: Sequence[Any] = ()) -> Any:
        """Builds the tree of f's output from tangents, with `exact` or None at integer leaves."""
        left, none = iter(tangents), iter(exact)
        leaves = [next(left) if k in _INEXACT else next(none, None) for k in self._kinds]
        return self.backend.unflatten(self._out_def, leaves)

    def cotangents(self, tree: Any, outs: Sequence[Array]) -> list[Array]:
        """Returns the leaves of a cotangent tree that belong to `outs`.

        Raises an error if the structure of the tree or a leaf does not match f's output.
        """
        leaves = _leaves_like(self._out_def, tree)
        if leaves is None:
            came = in_words(self.backend.flatten(tree)[1])
            raise GradtoolsError(
                f"{self.caller}: the cotangent has the structure {came}; expected the structure of "
                f"f's output, {in_words(self._out_def)}. Pass a tree of the same structure."
            )
        places = [k for k, kind in enumerate(self._kinds) if kind in _INEXACT]
        path = lambda k: self._paths_of_output()[k]
        names = lambda k: (f"cotangent{path(k)}", f"output{path(k)}")
        return [
            matching(self.backend, self.caller, leaves[k], y, partial(names, k))
            for k, y in zip(places, outs, strict=True)
        ]

    def scalar(self, outs: Sequence[Array], extras: Sequence[Array]) -> Array:
        """Returns the output of f; raises an error if the output is not a single real scalar."""
        single = len(self._kinds) == 1 and self._out_is_leaf
        out = outs[0] if single and outs else None
        if out is not None and tuple(out.shape) == () and self._kinds[0] == "real":
            return out
        output = self.output(outs, extras)[0]
        came = describe(self.backend, output)
        fix = "Reduce the output, for instance with .sum() or .mean()"
        if out is not None and self._kinds[0] == "complex":
            fix = "Take the real part, or a norm"
        elif single and not outs:
            fix = _FLOATS
        if not single and self.takes_aux:
            fix += ", or return (loss, aux) with has_aux=True"
            fix = "Return (loss, aux), in this order" if self.has_aux else fix
        elif not single:
            fix = f"Return only the loss, since {self.caller} has no has_aux"
        elif self.has_aux:
            fix += "; with has_aux=True f returns (loss, aux), in this order"
        derivative, parenthesis, _ = str(getattr(self.f, "__name__", "")).partition("(")
        if parenthesis and derivative in ("grad", "value_and_grad", "jacobian", "hessian"):
            fix = (
                f"f is itself a derivative, the result of {derivative}; for second derivatives of "
                "a real scalar function pass it to hessian or hvp, otherwise use jacobian(f)"
            )
        fix = NO_RETURN if output is None else f"{fix}."
        kernel = getattr(self.f, "kernel", None)  # f is a host function
        if out is not None and kernel is not None and getattr(kernel, "out", 0) is None:
            fix = "The result of a host function without out= has the shape of its first argument; "
            fix += "for another shape pass out=ArraySpec(shape, dtype)."
        if not single and self.caller == "minimax_value_and_grad":
            fix += " For a loss of each player, use vjp."
        raise GradtoolsError(
            f"{self.caller}: f must return one real number, an array of shape (); got {came}. {fix}"
        )


def call_of_primals(
    backend: Backend,
    caller: str,
    f: Any,
    primals: Sequence[Any],
    has_aux: bool | None = None,
    names: Sequence[str] = (),
    keeps_exact: bool = False,
) -> Call:
    """Returns the call `f(*primals)`, differentiated with respect to all primals.

    keeps_exact: Whether integer leaves are constants; otherwise they are rejected.
    """
    check_function(caller, f, curried=False)
    if not primals:
        raise GradtoolsError(f"{caller}: no primals were given; pass f's arguments after f.")
    argnums = tuple(range(len(primals)))
    fix = "let f close over the value"
    return Call(backend, caller, f, primals, {}, argnums, has_aux, fix, names, keeps_exact)


def _is_integer(x: Any) -> bool:
    """Returns whether x is a Python or NumPy integer or bool, or a NumPy array of these types."""
    return isinstance(x, (int, np.integer, np.bool_)) or (
        isinstance(x, np.ndarray) and x.dtype.kind in "biu"
    )


def _leaves_like(treedef: Any, tree: Any) -> list[Any] | None:
    """Returns the leaves of `tree` in the order of treedef, or None if the structures differ."""
    try:
        leaves = treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        return None
    return None if any(isinstance(x, (tuple, list, dict)) for x in leaves) else leaves
