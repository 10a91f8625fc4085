"""Implements `custom_rule`, which attaches a user-written jvp or vjp rule to a function.

The user writes a rule on pytrees, with the signatures of `jax.custom_vjp` and `jax.custom_jvp`.
`custom_rule` converts the user's rule to a `Rule` on flat lists of arrays, with one
`Specialization` for each combination of static arguments and tree structure.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, overload

import numpy as np

from gradtools.arguments.checks import check_function, tuple_of_names
from gradtools.arguments.static_arguments import Parameters
from gradtools.arguments.wording import describe, name_of
from gradtools.backend import Backend, F, Operators
from gradtools.boundary import trimmed, user_facing_methods
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError, TypeRefusal
from gradtools.host_kernels import type_key
from gradtools.rule_contract import Contract
from gradtools.rules import ARRAY, KEYS, JvpRule, Rule, avals_of, captured_objects

_MOST_SPECIALIZATIONS = 256


class CustomRules(Operators):
    """The operator `custom_rule`."""

    @overload
    def custom_rule(self, f: Callable[..., Any], static_argnames: Any = ()) -> CustomRule: ...
    @overload
    def custom_rule(
        self, f: None = None, static_argnames: Any = ()
    ) -> Callable[[Callable[..., Any]], CustomRule]: ...
    def custom_rule(self, f: Any = None, static_argnames: Any = ()) -> Any:
        """Gives the function `f` a custom derivative rule.

        Give a reverse rule, a forward rule, or both; a missing rule is derived by transposition:

            f.defvjp(fwd, bwd)     fwd(*args) -> (out, residuals)
                                   bwd(residuals, cotangent) -> one cotangent per argument
            f.defjvp(rule)         rule(primals, tangents) -> (out, tangent_out)

        With either rule, f supports forward and reverse mode, vmap, compilation, loops, and second
        derivatives in every combination of modes. `fwd` may save inputs, outputs, intermediates and
        non-arrays; second derivatives also differentiate the code of `fwd`. Cotangents are J^H v in
        both frameworks.

        Args:
            f: A function that takes and returns pytrees of arrays. Keyword arguments are bound to
                the signature of f; a rule receives every argument by position, including default
                values.
            static_argnames: The name or names of static arguments: hashable non-array values for
                which the rule is specialized. Static arguments come first in the arguments of fwd,
                bwd and rule. f cannot be differentiated with respect to an array that a static
                function captures.

        Returns:
            A function with f's arguments. `bwd` returns None for a zero cotangent and for an
            integer argument; `rule` receives None as the tangent of an integer argument. A Python
            float or complex number is treated like an array; its tangent is zero.

        Raises:
            GradtoolsError: (When called) there is no rule; the output of fwd or of the forward rule
                differs from f's in structure, shape or dtype; a cotangent differs from its
                argument, or a tangent differs from its output, in structure, shape or dtype; a rule
                that is transposed for the other mode is not linear; a rule closes over an array
                that is differentiated. `gradtools.testing.check_rule` finds other mistakes.

        Example:
            >>> @gt.custom_rule
            ... def sinh(x):
            ...     return (gt.xp.exp(x) - gt.xp.exp(-x)) / 2
            >>> def fwd(x):
            ...     e, i = gt.xp.exp(x), gt.xp.exp(-x)
            ...     return (e - i) / 2, (e, i)
            >>> sinh.defvjp(fwd, lambda res, ct: (ct * (res[0] + res[1]) / 2,))
            >>> x = gt.asarray(np.float32(1.0))
            >>> [round(float(g(x)), 4) for g in (sinh, gt.grad(sinh), gt.grad(gt.grad(sinh)))]
            [1.1752, 1.5431, 1.1752]

        Source: Griewank and Walther, Evaluating derivatives, 2008, chapter 3; Radul et al., You
        only linearize once, 2023.
        """
        if f is None:
            return partial(self.custom_rule, static_argnames=static_argnames)
        check_function("custom_rule", f)
        if isinstance(f, type) and hasattr(f, "backward"):
            raise GradtoolsError(
                f"custom_rule: f is the autograd Function {f.__name__}. Call its apply, or pass a "
                "function that computes its value, and define a rule with defvjp(fwd, bwd)."
            )
        return CustomRule(self._backend, f, static_argnames)


# --- the function ------------------------------------------------------------------------


_CACHES = frozenset(
    "_direct _specializations _version_key _by_key _transient _key_of _out_of".split()
)
_MAPS = ("fwd", "bwd", "jvp")
_SETTINGS = {"fun", *_MAPS, "symbolic_zeros", "static_argnames", "kernel"}


@user_facing_methods
class CustomRule:
    """A function with a custom rule; see `custom_rule`.

    Setting one of the attributes below after a call clears the caches of earlier calls.

    Attributes:
        fun: The function that computes the value.
        fwd: The rule's forward pass; None if not given.
        bwd: The rule's backward pass; None if not given.
        jvp: The forward rule; None if not given.
        static_argnames: The names of the static arguments.
        symbolic_zeros: The maps that use symbolic zeros, a subset of {"tangent", "cotangent"}.
    """

    __qualname__: str
    __gradtools_holds__: tuple[str, ...] = ("fun", *_MAPS)  # see `rules.captured_objects`

    def __init__(
        self,
        backend: Backend,
        fun: Callable[..., Any],
        static_argnames: Any,
    ) -> None:
        update_wrapper(self, fun)
        self.__name__ = name_of(fun)
        self.fun = fun
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.jvp: Callable[..., Any] | None = None
        self.symbolic_zeros: frozenset[str] = frozenset()
        self._backend = backend
        names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
        names = [*names] if isinstance(names, (set, frozenset)) else names
        self.static_argnames = tuple_of_names("custom_rule", "static_argnames", names)
        self._init_caches()

    def __repr__(self) -> str:
        given = [name for name, rule in (("vjp", self.bwd), ("jvp", self.jvp)) if rule]
        return f"<{self._kind} {self.__name__}, rules: {' and '.join(given) or 'none'}>"

    _kind = "custom_rule"
    _is_checked = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        named: Any = sys.modules.get(self.__module__)
        for name in getattr(self, "__qualname__", self.__name__).split("."):
            named = getattr(named, name, None)
        if named is self:  # a decorated function is pickled by name, like any function
            return getattr(self, "__qualname__", self.__name__)
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes to pickle, without the caches."""
        return {k: x for k, x in dict(self.__dict__).items() if k not in _CACHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_caches()

    def _init_caches(self) -> None:
        self._specializations: OrderedDict[Any, Specialization] = OrderedDict()
        self._by_key: dict[str, Specialization] = {}
        self._transient: dict[str, Any] = {}  # keys of specializations that only one call uses
        self._clear_caches()
        self._key_of = self._backend.compiler.constant_result(self._key)
        self._out_of = self._backend.compiler.constant_result(self._out)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _SETTINGS and "_specializations" in self.__dict__:
            self._clear_caches()

    def _clear_caches(self) -> None:
        self._binding = binding = self._make_binding()
        self._needs_binding = any((*binding.static, *binding.keyword_only, binding.star))
        self._version_key = next(KEYS)  # dynamo guards on this key
        self._specializations.clear()
        self._by_key.clear()
        self._direct = self._backend.direct_calls(self)

    def _make_binding(self) -> Parameters:
        return Parameters.of(self.__name__, self.fun, self.static_argnames)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Sets the reverse rule.

        Args:
            fwd: `fwd(*args)` returns the output and the residuals for bwd; the residuals may be any
                pytree.
            bwd: `bwd(residuals, cotangent)` returns a tuple with one entry for each argument that
                is not static. Static arguments come first in the arguments of fwd and bwd. bwd must
                not write into the residuals or the cotangent in place; clone them first.
            symbolic_zeros: Whether to pass symbolic zeros to fwd and bwd. Instead of each array
                and number, fwd then receives an object with `value` and `perturbed` (PyTorch's
                `needs_input_grad`), and bwd receives None for a zero cotangent.
            optimize_remat: Accepted for compatibility with `jax.custom_vjp`; has no effect. fwd is
                inlined, so residuals that a checkpoint recomputes are not computed in the first
                pass.
        """
        check_function(f"{self.__name__}.defvjp", fwd, "fwd", curried=False)
        check_function(f"{self.__name__}.defvjp", bwd, "bwd", curried=False)
        self._check_order(fwd)
        self._check_count(f"{self.__name__}.defvjp: bwd", bwd, "residuals", "cotangent")
        self.fwd, self.bwd = fwd, bwd
        self._is_symbolic("cotangent", symbolic_zeros)

    def _check_order(self, fwd: Callable[..., Any]) -> None:
        """Raises an error if fwd has f's parameter order and a static argument is not first."""
        statics, names = self._binding.statics, list(self._binding.names)
        expected = sorted(names, key=lambda name: name not in statics)
        try:
            taken = list(inspect.signature(fwd).parameters)
        except (TypeError, ValueError):
            return
        if taken[:1] == ["ctx"] and len(taken) > max(1, len(names)) and "ctx" not in names:
            raise GradtoolsError(
                f"{self.__name__}.defvjp: fwd takes ({', '.join(taken)}), but is called without a "
                f"ctx, unlike torch.autograd.Function. fwd takes only the arguments of f, fwd("
                f"{', '.join(names) or ', '.join(taken[1:])}), and returns (output, residuals); "
                "bwd(residuals, cotangent) receives these residuals."
            )
        if taken == names != expected:
            raise GradtoolsError(
                f"{self.__name__}.defvjp: fwd takes ({', '.join(taken)}) in the order of "
                f"jax.custom_vjp, but static arguments come first: it is called as "
                f"fwd({', '.join(expected)}). Reorder its parameters."
            )
        signature = self._binding.signature
        defaults = signature and [
            p for p in signature.parameters.values() if p.default is not p.empty
        ]
        if names and not defaults and self._binding.star is None:
            dynamic = [name for name in names if name not in statics]
            self._check_count(f"{self.__name__}.defvjp: fwd", fwd, *dynamic)

    def _check_count(self, who: str, rule: Callable[..., Any], *called: str) -> None:
        """Raises an error if the signature of a rule function does not accept `called`."""
        called = (*self._binding.statics, *called)
        try:
            taken = inspect.signature(rule, follow_wrapped=False)
        except (TypeError, ValueError):
            return
        try:
            taken.bind(*called)
        except TypeError:
            raise GradtoolsError(
                f"{who} takes {taken}, but it is called with ({', '.join(called)})."
            ) from None

    def _is_symbolic(self, which: str, yes: bool) -> None:
        self.symbolic_zeros = self.symbolic_zeros - {which} | ({which} if yes else set())

    def defjvp(self, rule: F, symbolic_zeros: bool = False) -> F:
        """Sets the forward rule: `rule(primals, tangents)` returns the output and its tangent.

        Args:
            rule: The forward rule; static arguments come first in its arguments.
            symbolic_zeros: Whether the tangent of an argument that is not differentiated is None
                instead of an array of zeros.

        Returns:
            The given rule, so that `defjvp` can be used as a decorator.
        """
        check_function(f"{self.__name__}.defjvp", rule, "the rule", curried=False)
        self._check_count(f"{self.__name__}.defjvp: the rule", rule, "primals", "tangents")
        self.jvp = rule
        self._is_symbolic("tangent", symbolic_zeros)
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates f; every derivative of the call uses the custom rule."""
        statics: tuple[Any, ...] = ()
        rest: tuple[Any, ...] = args
        try:  # the except clause replaces `user_facing`, which would add a call
            if kwargs or self._needs_binding:
                statics, rest = self._bound(args, kwargs)
            if self._direct is not None:
                result = self._direct(rest, statics)
                if result is not NotImplemented:
                    return result
            if not kwargs and not self._needs_binding:  # adds default values
                statics, rest = self._bound(args, kwargs)
            return self._applied(statics, rest)
        except Exception as error:
            hint = self._backend.hint_at_traced_value(error, "the function or its rule")
            if hint and not getattr(error, "__notes__", ()):
                error.add_note(f"{self._kind} {self.__name__}: {hint}")
            trimmed(error)
            raise

    def _applied(self, statics: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        """Evaluates f with the specialization for the structure of the arguments."""
        backend = self._backend
        leaves, structure = backend.flatten_static(rest)
        leaves = [x if backend.is_array(x) else backend.as_leaf(x) for x in leaves]
        arrays = tuple([backend.is_array(x) for x in leaves])
        xs = [x for x in leaves if backend.is_array(x)]
        others = tuple([x for x in leaves if not backend.is_array(x)])
        passing = set(self._transient)
        key = self._key_of(self._version_key, statics, structure, arrays, others)
        try:
            ys = backend.apply_rule_by_key(key, *xs)
            avals = () if backend.compiler.is_tracing() else avals_of(xs)
            return backend.unflatten_static(self._out_of(key, avals), ys)
        finally:
            if key in self._transient and key not in passing:
                self._by_key.pop(key, None)
                self._specializations.pop(self._transient.pop(key), None)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Splits the arguments into `(statics, rest)`; error messages name the function."""
        try:
            return self._binding.bound(args, kwargs)
        except TypeError as error:
            signature = f"{self.__name__}{self._binding.signature}"
            raise TypeRefusal(f"{self._kind} {signature}: {error}.") from error

    # Dynamo embeds the results of the following two methods as constants.

    def _key(self, own_key: str, statics: Any, structure: Any, arrays: Any, others: Any) -> str:
        left = iter(others)
        leaves = tuple([ARRAY if is_array else next(left) for is_array in arrays])
        return self._specialized(statics, structure, leaves).key

    def _out(self, key: str, avals: Any) -> Any:
        """Returns the structure of the output for inputs with the given avals."""
        specialized = self._by_key[key]
        if avals in specialized.outs:
            return specialized.outs[avals]
        if avals:  # a key of `outs` may contain None for a length that `avals` contains
            return specialized.newest
        return self._backend.static_treedef(specialized.newest)

    def _specialized(self, statics: Any, structure: Any, others: Any) -> Specialization:
        """Returns the specialization for static arguments and a structure with leaves `others`."""
        keys = tuple([_static_key(x) for x in statics])
        key = (keys, structure, others, type_key((*statics, *others)))
        try:
            result = self._specializations.get(key)
        except TypeError as error:
            raise self._unhashable(statics, others) from error
        if result is None:
            if self._arrays_in([x for x in statics if not callable(x)]):
                raise self._unhashable(statics, others)  # PyTorch's tensors are hashable
            treedef = self._backend.treedef_of_static(structure)
            result = self._specializations[key] = Specialization(self, statics, treedef, others)
            self._by_key[result.key] = result
            if self._is_transient(statics):
                self._transient[result.key] = key
            if len(self._specializations) > _MOST_SPECIALIZATIONS:
                del self._by_key[self._specializations.popitem(last=False)[1].key]
        return result

    def _is_transient(self, statics: tuple[Any, ...]) -> bool:
        """Returns whether a static argument captures a tracer, which a cache would leak."""
        kind, functions = self._backend.array_type or str, _functions_in(statics)
        return next(captured_objects(functions, self._backend.is_traced, kind), None) is not None

    def _arrays_in(self, tree: Any) -> list[Any]:
        backend = self._backend
        leaves = backend.flatten(tree)[0]
        return [x for x in leaves if backend.is_array(x) or isinstance(x, np.ndarray)]

    def _unhashable(self, statics: Any, others: Any) -> GradtoolsError:
        named = [*zip(self._binding.statics, statics, strict=True), *[(None, o) for o in others]]
        name, x = next(
            (name, x)
            for name, x in named
            if not (name and callable(x)) and (not _is_hashable(x) or self._arrays_in(x))
        )
        came = describe(self._backend, x)
        if name is None:
            return GradtoolsError(
                f"{self.__name__}: an argument contains {came}, which is neither an array "
                "nor hashable. Pass an array, or a hashable object."
            )
        return GradtoolsError(
            f"{self.__name__}: the static argument {name!r} is {came}; it must be hashable and "
            "contain no array. Leave arrays out of static_argnames; bwd may return None for them."
        )

    def _rule(self, specialized: Specialization) -> Rule:
        if self.bwd is None and self.jvp is None:
            raise GradtoolsError(
                f"{self.__name__} has no rule yet. Define a rule with defvjp(fwd, bwd) or "
                "defjvp(rule) before the first call."
            )
        if self.bwd is None:
            maps: dict[str, Any] = {"tangent": specialized.tangent}
        else:
            maps = {"linearize": specialized.linearize}
        kind = Rule if self.jvp is None else partial(JvpRule, jvp=specialized.pushforward)
        return kind(
            self.__name__,
            specialized.primal,
            user_functions=self._user_functions(specialized),
            symbolic_zeros=self.symbolic_zeros,
            contract=specialized.contract,
            **maps,
        )

    def _user_functions(self, specialized: Specialization) -> tuple[Any, ...]:
        """Returns f, static arguments and rule functions, which may contain arrays; see `Rule`."""
        return (self.fun, *_functions_in(specialized.statics), *self._maps().values())

    def _maps(self) -> dict[str, Callable[..., Any]]:
        """Returns the user's rule functions, with the keys "fwd", "bwd" and "jvp"."""
        return {role: f for role in _MAPS if (f := getattr(self, role)) is not None}

    def _contract(self) -> Contract:
        """Returns the `Contract` that checks a specialization's outputs and names the rule."""
        return Contract(f"{self._kind} {self.__name__}", checked=self._is_checked)


def _functions_in(statics: Sequence[Any]) -> list[Any]:
    """Returns the static arguments that may contain arrays."""
    return [x for x in statics if not isinstance(x, (bool, int, float, complex, str, type))]


def _static_key(x: Any) -> Any:
    """Returns the cache key of a static argument: x, or the id of an unhashable function."""
    return id(x) if callable(x) and not _is_hashable(x) else x


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
