"""Own rules: a function with a derivative that its author gives.

The author writes a rule on pytrees, with the signatures of `jax.custom_vjp` and
`jax.custom_jvp`; here it becomes a `Rule` on flat lists of arrays. For each way of calling the
function (its static arguments, the structure of the others) there is one such Rule.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, overload

import numpy as np

from gradtools.backend import Array, Backend, F, Operators
from gradtools.calls import describe
from gradtools.contract import Contract, Look, Primal, checked_word
from gradtools.errors import GradtoolsError, TypeRefusal
from gradtools.host import told_apart
from gradtools.rules import KEYS, Entries, Linearized, Rule

_MOST_SHAPES = 256


class CustomRules(Operators):
    """The operator that gives a function its own rule."""

    @overload
    def custom_rule(
        self, f: Callable[..., Any], static_argnames: Any = (), check: str = "first"
    ) -> CustomRule: ...
    @overload
    def custom_rule(
        self, f: None = None, static_argnames: Any = (), check: str = "first"
    ) -> Callable[[Callable[..., Any]], CustomRule]: ...
    def custom_rule(self, f: Any = None, static_argnames: Any = (), check: str = "first") -> Any:
        """A function with the value of `f` and a derivative that you give.

        Give a reverse rule, a forward rule, or both; the missing one follows by transposing:

            f.defvjp(fwd, bwd)     fwd(*args) -> (out, residuals)
                                   bwd(residuals, cotangent) -> one cotangent per argument
            f.defjvp(rule)         rule(primals, tangents) -> (out, tangent_out)

        Either gives forward and reverse mode, second order in every mix, vmap, compiled code and
        loops. What `fwd` saves, be it an input, an output, an intermediate or no array at all, is
        differentiated through `fwd` at second order. Cotangents are J^H v in both backends.

        Args:
            f: Takes and returns pytrees of arrays. Keyword arguments are bound to its signature,
                and a rule gets every argument by position, defaults included.
            static_argnames: A name or names of arguments that are no arrays and select the
                program; they must be hashable, and lead the arguments of fwd, bwd and rule.
            check: When the rule is held to what a rule must be: "first" (once for each shape and
                dtype), "always", or "never", for whoever measures or means what is refused.

        Returns:
            A function with f's arguments. In `bwd`, None is a zero cotangent, and what belongs
            to an integer argument; in `rule`, None is the tangent of an integer argument. A
            float or complex number is an argument like an array; its tangent is a zero.

        Raises:
            GradtoolsError: (on call) there is no rule; fwd's output, or that of the forward
                rule, differs from f's in structure, shape or dtype; a cotangent or tangent from
                what it belongs to; a map is not zero at zero, as where the tangent was
                forgotten; a rule whose transpose is asked for is not linear; what a rule closes
                over is differentiated.

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
            return partial(self.custom_rule, static_argnames=static_argnames, check=check)
        if not callable(f):
            raise GradtoolsError(f"custom_rule: f must be a function, got {f!r}.")
        return CustomRule(self._backend, f, static_argnames, check)


# --- the function ------------------------------------------------------------------------


_KNOWN = {"_direct", "_shapes", "_own_key", "_by_key", "_key_of", "_out_of"}
_GIVEN = {"fun", "fwd", "bwd", "jvp", "remat", "check", "symbolic", "static_argnames", "kernel"}


class CustomRule:
    """A function and its rule; see `custom_rule`.

    To set one of these after a call is like giving the rule anew.

    Attributes:
        fun: The function that gives the value.
        fwd: The rule's forward pass, None if not given.
        bwd: The rule's backward pass, None if not given.
        jvp: The forward rule, None if not given.
        remat: Whether before a recomputation f runs in the place of fwd (`optimize_remat`).
        static_argnames: The names of the static arguments.
        check: When the rule is held to its contract: "first", "always" or "never".
        symbolic: Which maps have symbolic zeros: any of "tangent" and "cotangent".
    """

    __qualname__: str
    __gradtools_holds__: tuple[str, ...] = ("fun", "fwd", "bwd", "jvp")  # see `rules.captured`

    def __init__(
        self,
        backend: Backend,
        fun: Callable[..., Any],
        static_argnames: Any,
        check: str = "first",
    ) -> None:
        update_wrapper(self, fun)
        self.__name__ = _name(fun)
        self.fun = fun
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.jvp: Callable[..., Any] | None = None
        self.remat = False
        self.check = checked_word("custom_rule", check)
        self.symbolic: frozenset[str] = frozenset()
        self._backend = backend
        self.static_argnames = _static_names(static_argnames)
        self._begin()

    def __repr__(self) -> str:
        given = [name for name, rule in (("vjp", self.bwd), ("jvp", self.jvp)) if rule]
        return f"<{self._kind} {self.__name__}, rules: {' and '.join(given) or 'none'}>"

    _kind = "custom_rule"

    def __reduce_ex__(self, protocol: Any) -> Any:
        named: Any = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            named = getattr(named, name, None)
        if named is self:  # a decorated function is pickled by its name, as any function
            return self.__qualname__
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is known of earlier calls."""
        return {k: x for k, x in self.__dict__.items() if k not in _KNOWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._shapes: OrderedDict[Any, Shaped] = OrderedDict()
        self._by_key: dict[str, Shaped] = {}
        self._forget()
        self._key_of = self._backend.constant_result(self._key)
        self._out_of = self._backend.constant_result(self._out)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("fun", "fwd", "bwd", "jvp") and not (callable(value) or value is None):
            raise GradtoolsError(f"{self.__name__}.{name} must be a function, got {value!r}.")
        super().__setattr__(name, value)
        if name in _GIVEN and "_shapes" in self.__dict__:
            self._forget()

    def _forget(self) -> None:
        self._taken = self._taking()
        self._own_key = next(KEYS)  # compiled code looks at it to tell one rule from another
        self._shapes.clear()
        self._by_key.clear()
        self._direct = self._backend.direct_calls(self)

    def _taking(self) -> Parameters:
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
        """Gives the reverse rule.

        Args:
            fwd: `fwd(*args)` returns the output and what bwd needs, any pytree.
            bwd: `bwd(residuals, cotangent)` returns a tuple, one entry for each argument that is
                not static. Static arguments lead the arguments of both.
            symbolic_zeros: Whether fwd and bwd are told what is not differentiated. In the place
                of each array and number fwd then gets an object with `value` and `perturbed`
                (PyTorch's `needs_input_grad`), and bwd gets None for a cotangent that is zero.
            optimize_remat: As in `jax.custom_vjp`, whether under `jax.checkpoint` the forward pass
                that is computed again later runs f, and not fwd: of use where what fwd saves comes
                from a kernel that computes it anyway. Without effect with symbolic_zeros, and in
                PyTorch, whose checkpoint runs the forward pass as it stands.
        """
        for name, rule in (("fwd", fwd), ("bwd", bwd)):
            if not callable(rule):
                raise GradtoolsError(
                    f"{self.__name__}.defvjp: {name} must be a function, got {rule!r}."
                )
        self.fwd, self.bwd, self.remat = fwd, bwd, optimize_remat
        self._is_symbolic("cotangent", symbolic_zeros)

    def _is_symbolic(self, which: str, yes: bool) -> None:
        self.symbolic = self.symbolic | {which} if yes else self.symbolic - {which}

    def defjvp(self, rule: F, symbolic_zeros: bool = False) -> F:
        """Gives the forward rule: `rule(primals, tangents)` returns the output and its tangent.

        Args:
            rule: Static arguments lead its arguments.
            symbolic_zeros: Whether the tangent of what is not differentiated is None, and not an
                array of zeros.

        Returns:
            The rule, so this may be used as a decorator.
        """
        if not callable(rule):
            raise GradtoolsError(
                f"{self.__name__}.defjvp: the rule must be a function, got {rule!r}."
            )
        self.jvp = rule
        self._is_symbolic("tangent", symbolic_zeros)
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Gives the forward rule of a function with one output, a part for each argument.

        Args:
            rules: One for each argument that is not static: `rule(tangent, out, *args)` returns
                what the output's tangent owes to that argument; None stands for nothing.
                Static arguments lead the arguments of each.
        """
        for i, rule in enumerate(rules):
            if rule is not None and not callable(rule):
                raise GradtoolsError(
                    f"{self.__name__}.defjvps: rule {i} must be a function or None, got {rule!r}."
                )

        def summed(*args: Any) -> Any:
            *statics, primals, tangents = args
            if len(rules) != len(primals):
                raise GradtoolsError(
                    f"{self.__name__}.defjvps: {len(rules)} rules for {len(primals)} arguments; "
                    "give one for each, None where it adds nothing."
                )
            out = self._taken.call(self, statics, primals)
            parts = [
                rule(*statics, t, out, *primals)
                for rule, t in zip(rules, tangents, strict=True)
                if rule is not None and t is not None
            ]
            return out, sum(parts[1:], parts[0]) if parts else None

        self.defjvp(summed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value; differentiated by the rule wherever a derivative is taken."""
        backend = self._backend
        if not (kwargs or self._direct is None or backend.compiling()):
            found = self._direct(args)
            if found is not NotImplemented:
                return found
        statics, rest = self._bound(args, kwargs)
        leaves, structure = backend.sketch(rest)
        leaves = [x if backend.is_array(x) else backend.as_leaf(x) for x in leaves]
        arrays = tuple([backend.is_array(x) for x in leaves])
        xs = [x for x in leaves if backend.is_array(x)]
        others = tuple([x for x in leaves if not backend.is_array(x)])
        key = self._key_of(self._own_key, statics, structure, arrays, others)
        ys = backend.apply_rule_by_key(key, *xs)
        return backend.draw(self._out_of(key, () if backend.compiling() else _looks(xs)), ys)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """`(statics, rest)` of a call, or an error that names the function."""
        try:
            return self._taken.bound(args, kwargs)
        except TypeError as error:
            taken = f"{self.__name__}{self._taken.signature}"
            raise TypeRefusal(f"{self._kind} {taken}: {error}.") from error

    # Compiled code takes what these two return for constants.

    def _key(self, own_key: str, statics: Any, structure: Any, arrays: Any, others: Any) -> str:
        shape = self._shape(statics, structure, arrays, others)
        return shape.rule.key

    def _out(self, key: str, looks: Any) -> Any:
        """The structure that came out where arrays like these went in."""
        shape = self._by_key[key]
        if looks in shape.outs:
            return shape.outs[looks]
        if looks:  # lengths that are open where a rule is traced may be known where it is called
            return shape.newest
        return self._backend.sketch_of(shape.newest)

    def _shape(self, statics: Any, structure: Any, arrays: Any, others: Any) -> Shaped:
        """The Rule for this way of calling."""
        key = (statics, structure, arrays, others, told_apart((*statics, *others)))
        try:
            found = self._shapes.get(key)
        except TypeError as error:
            raise self._unhashable(statics, others) from error
        if found is None:
            if self._arrays_in(statics):
                raise self._unhashable(statics, others)  # PyTorch's tensors are hashable
            full = _marked(iter(others), arrays)
            treedef = self._backend.from_sketch(structure)
            found = self._shapes[key] = Shaped(self, statics, treedef, full)
            self._by_key[found.rule.key] = found
            if len(self._shapes) > _MOST_SHAPES:
                del self._by_key[self._shapes.popitem(last=False)[1].rule.key]
        return found

    def _arrays_in(self, tree: Any) -> list[Any]:
        backend = self._backend
        leaves = backend.flatten(tree)[0]
        return [x for x in leaves if backend.is_array(x) or isinstance(x, np.ndarray)]

    def _unhashable(self, statics: Any, others: Any) -> GradtoolsError:
        backend = self._backend
        name, x = next(
            (name, x)
            for name, x in [*zip(self._taken.statics, statics, strict=True)]
            + [(None, o) for o in others]
            if not _is_hashable(x) or self._arrays_in(x)
        )
        came, held = describe(backend, x), self._arrays_in(x)
        if name is None:
            return GradtoolsError(
                f"{self.__name__}: an argument holds {came}, which is neither an array nor "
                "hashable. Pass arrays, or make it hashable."
            )
        if held:
            what = f"is {came}" if held[0] is x else f"holds {describe(backend, held[0])}"
            return GradtoolsError(
                f"{self.__name__}: the static argument {name!r} {what}, and an array selects no "
                "program. Take it out of static_argnames; bwd may return None for it."
            )
        return GradtoolsError(
            f"{self.__name__}: the static argument {name!r} is {came}, which is neither an array "
            "nor hashable. Make it hashable (a tuple, a frozen dataclass)."
        )

    def _rule(self, shape: Shaped) -> Rule:
        if self.bwd is None and self.jvp is None:
            raise GradtoolsError(
                f"{self.__name__} has no rule yet. Give it one with defvjp(fwd, bwd) or "
                "defjvp(rule) before it is called."
            )
        if self.bwd is None:
            return self._new_rule(shape, tangent=shape.tangent, joint=shape.joint)
        joint = None if self.jvp is None else shape.joint
        return self._new_rule(shape, linearize=shape.linearize, joint=joint)

    def _new_rule(self, shape: Shaped, **maps: Any) -> Rule:
        maps_of = {"fwd": self.fwd, "bwd": self.bwd, "jvp": self.jvp}
        given = {name: f for name, f in maps_of.items() if f is not None}
        return Rule(
            self.__name__,
            shape.primal,
            written=(self.fun, *given.values()),
            called=tuple([(name, _name(f)) for name, f in given.items()]),
            dense=True,
            symbolic=self.symbolic,
            contract=shape.contract,
            remat=self.remat and "cotangent" not in self.symbolic,
            **maps,
        )


def _marked(others: Any, arrays: Sequence[bool]) -> tuple[Any, ...]:
    """Marks where arrays stand, and what else there is where they do not."""
    return tuple([_ARRAY if a else next(others) for a in arrays])


class _Array:
    def __repr__(self) -> str:
        return "*"


_ARRAY = _Array()
"""Stands where an array is."""


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _name(f: Any) -> str:
    return getattr(f, "__name__", None) or type(f).__name__


def _static_names(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple | list | set | frozenset) or not all(
        isinstance(name, str) for name in names
    ):
        raise GradtoolsError(
            f"custom_rule: static_argnames is {given!r}; expected an argument's name, or a tuple "
            "of names."
        )
    return tuple(names)


def _signature(fun: Any) -> inspect.Signature | None:
    """None for what takes its arguments by position: a builtin, one of NumPy's ufuncs."""
    if isinstance(inspect.unwrap(fun), np.ufunc):
        return None
    try:
        found = inspect.signature(fun)
        if isinstance(fun, partial):  # what it has fixed by name is no argument any more
            free = [p for p in found.parameters.values() if p.name not in fun.keywords]
            return found.replace(parameters=free)
        return found
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Parameters:
    """How a call's arguments part into static ones and the rest, each in the signature's order."""

    signature: inspect.Signature | None
    names: tuple[str, ...]
    static: tuple[bool, ...]
    keyword_only: tuple[bool, ...]
    star: str | None = None  # the name of *args, which stand before the keyword-only ones

    @classmethod
    def positional(cls, name: str, fun: Any) -> Parameters:
        """Those of a kernel, which is called by position; its keyword-only ones keep a default."""
        found = _signature(fun)
        every = list(found.parameters.values()) if found else []
        unset = [p.name for p in every if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        if unset:
            raise GradtoolsError(
                f"host_function: {name} has the keyword-only argument {unset[0]!r}, and a kernel "
                "gets its arguments by position. Wrap it in a function that takes it so."
            )
        kept = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if found is None or len(kept) < len([p for p in every if p.kind is not p.KEYWORD_ONLY]):
            return cls(None, (), (), ())
        count = len(kept)
        names = tuple([p.name for p in kept])
        return cls(found.replace(parameters=kept), names, (False,) * count, (False,) * count)

    @classmethod
    def of(cls, name: str, fun: Any, static_argnames: tuple[str, ...]) -> Parameters:
        """Those of a function."""
        signature = _signature(fun)
        found = list(signature.parameters.values()) if signature else []
        unknown = [s for s in static_argnames if s not in [p.name for p in found]]
        if unknown:
            raise GradtoolsError(
                f"custom_rule: static_argnames names {unknown[0]!r}, but {name} has the "
                f"arguments {', '.join(p.name for p in found) or 'none'}."
            )
        if any(p.kind is p.VAR_KEYWORD for p in found):
            raise GradtoolsError(
                f"custom_rule: {name} takes **{found[-1].name}, and a rule gets its arguments by "
                "position. Name them in the signature, or pass a dict as one argument."
            )
        fixed = [p for p in found if p.kind is not p.VAR_POSITIONAL]
        rest = [i for i, p in enumerate(found) if p.kind is p.VAR_POSITIONAL]
        if signature is None or (rest and not fixed):
            return cls(signature, (), (), ())
        return cls(
            signature,
            tuple([p.name for p in fixed]),
            tuple([p.name in static_argnames for p in fixed]),
            tuple([p.kind is p.KEYWORD_ONLY for p in fixed]),
            found[rest[0]].name if rest else None,
        )

    @property
    def statics(self) -> list[str]:
        """The names of the static arguments, in order."""
        return [name for name, s in zip(self.names, self.static, strict=True) if s]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """`(statics, rest)` of a call."""
        if not self.names:
            if kwargs and self.signature is not None:
                call = self.signature.bind(*args, **kwargs)
                return (), call.args
            return (), args
        more: tuple[Any, ...] = ()
        if kwargs or len(args) != len(self.names) or any(self.keyword_only) or self.star:
            assert self.signature is not None
            call = self.signature.bind(*args, **kwargs)
            call.apply_defaults()
            args = tuple([call.arguments[name] for name in self.names])
            more = call.arguments[self.star] if self.star else ()
        if not more and not any(self.static):
            return (), args
        every = list(zip(args, self.static, self.keyword_only, strict=True))
        first, last = ([a for a, s, o in every if not s and o is only] for only in (False, True))
        return tuple([a for a, s, _ in every if s]), (*first, *more, *last)

    def call(self, fun: Callable[..., Any], statics: Sequence[Any], rest: Sequence[Any]) -> Any:
        """`fun` with the arguments of `bound`."""
        if not self.names:
            return fun(*rest)
        moving = [k for s, k in zip(self.static, self.keyword_only, strict=True) if not s]
        first, stop = moving.count(False), len(rest) - moving.count(True)
        own, more = iter([*rest[:first], *rest[stop:]]), rest[first:stop]
        fixed = iter(statics)
        values = [next(fixed) if s else next(own) for s in self.static]
        named = list(zip(self.names, values, self.keyword_only, strict=True))
        positional = [v for _, v, k in named if not k]
        return fun(*positional, *more, **{n: v for n, v, k in named if k})


# --- one way of calling it ---------------------------------------------------------------


@dataclass(eq=False)
class Shaped:
    """A custom rule at fixed static arguments and structure: functions on flat lists of arrays."""

    of: CustomRule
    statics: tuple[Any, ...]
    treedef: Any
    others: tuple[Any, ...]
    outs: dict[Any, Any] = field(default_factory=dict)
    newest: Any = None  # of outs
    refined: Callable[..., Linearized] | None = None  # its maps, differentiable again; see kernels

    def __post_init__(self) -> None:
        self.backend = self.of._backend
        self.name = self.of.__name__
        self.contract = Contract(f"{self.of._kind} {self.name}", self.of.check)
        self.values: dict[Any, tuple[Any, list[Look]]] = {}
        self.rule = self.of._rule(self)
        self.entries = [
            self.backend.flatten(tree)
            for tree in self.arguments([_ARRAY] * self.others.count(_ARRAY))
        ]

    def arguments(self, values: Sequence[Any]) -> Any:
        """The arguments, with these values where arrays stand."""
        left = iter(values)
        full = [next(left) if o is _ARRAY else o for o in self.others]
        return self.backend.unflatten(self.treedef, full)

    # --- values

    def primal(self, *xs: Array) -> list[Array]:
        """The function itself."""
        out = self.of._taken.call(self.of.fun, self.statics, self.arguments(xs))
        return self.outputs(xs, out, "it")

    def outputs(self, xs: Sequence[Array], out: Any, who: str) -> list[Array]:
        """The arrays of what f ("it"), fwd or the forward rule returned, held to the contract."""
        backend = self.backend
        leaves, out_def = backend.flatten(out)
        looks = _looks(xs)
        ys = [y if backend.is_array(y) else self._as_array(y, who) for y in leaves]
        if who == "it":
            self.values[looks] = out_def, self._looks_of(ys)
        else:
            self.contract.ask(who, looks, of=lambda: self._hold(xs, looks, out_def, ys, who))
        self.outs[looks] = self.newest = out_def
        return ys

    def _looks_of(self, ys: Sequence[Array]) -> list[Look]:
        lengths = [tuple([_length(n) for n in y.shape]) for y in ys]  # a symbol is of its trace
        return [Look(n, self.backend.dtype_name(y)) for n, y in zip(lengths, ys, strict=True)]

    def _hold(self, xs: Sequence[Array], looks: Any, out_def: Any, ys: Any, who: str) -> bool:
        """Holds what the forward pass returned to what the function returns, once that is known."""
        if looks not in self.values:
            self.backend.sketch_values(self.primal, *xs)
        if looks not in self.values:
            return False
        expected, wanted = self.values[looks]
        came = self._looks_of(ys)
        if any(None in look.shape for look in (*came, *wanted)):
            came, wanted = _without_lengths(came), _without_lengths(wanted)
        self.contract.same_outputs(who, out_def, came, expected, wanted)
        return True

    def _as_array(self, y: Any, who: str) -> Array:
        try:
            return self.backend.asarray(y)
        except (TypeError, ValueError, GradtoolsError) as error:
            came = describe(self.backend, y)
            raise self._error(f"{who} returned {came}, expected arrays.") from error

    def _error(self, text: str) -> GradtoolsError:
        return GradtoolsError(f"{self.of._kind} {self.name}: {text}")

    # --- the forward rule

    def joint(self, xs: Entries, dxs: Entries) -> tuple[list[Array], list[Any]]:
        """Outputs and their tangents by the forward rule."""
        rest = self.arguments(xs)
        assert self.of.jvp is not None
        return self.pushed(xs, self.of.jvp(*self.statics, rest, self._tangents(dxs)))

    def pushed(self, xs: Entries, result: Any) -> tuple[list[Array], list[Any]]:
        """The same from what the forward rule returned."""
        out, dout = self.pair(result, "the forward rule", "(out, tangent_out)")
        ys = self.outputs(xs, out, "the forward rule")
        dys = self._like(dout, self.outs[_looks(xs)], "the forward rule's tangent")
        return ys, [
            self._fitting(dy, y, f"the forward rule's tangent {i}")
            for i, (dy, y) in enumerate(zip(dys, ys, strict=True))
        ]

    def tangent(self, xs: Entries, dxs: Entries) -> list[Any]:
        """The tangents alone."""
        return self.joint(xs, dxs)[1]

    def _tangents(self, dxs: Sequence[Any]) -> Any:
        left, symbolic = iter(dxs), "tangent" in self.of.symbolic
        full = [
            next(left) if o is _ARRAY else None if symbolic or not _is_number(o) else 0.0
            for o in self.others
        ]
        return self.backend.unflatten(self.treedef, full)

    # --- the reverse rule

    def linearize(self, *xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        """One run of fwd, and the maps that read what it saved.

        perturbed: Which of xs are differentiated, where that is known.
        """
        backend, looks = self.backend, _looks(xs)
        like = [(tuple(x.shape), x.dtype, backend.is_inexact(x)) for x in xs]
        assert self.of.fwd is not None
        result = self.of.fwd(*self.statics, *self._told(xs, perturbed))
        out, res = self.pair(result, "fwd", "(out, residuals)")
        ys = self.outputs(xs, out, "fwd")
        kept, extras = Residuals.of(backend, res, xs, ys)
        return self.maps(ys, extras, kept, self.outs[looks], like)

    def maps(
        self, ys: list[Array], extras: list[Array], kept: Residuals, out_def: Any, like: Any
    ) -> Linearized:
        """The maps that read what a run of fwd saved, at arrays like `like`."""
        backend = self.backend

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            ct = backend.unflatten(out_def, list(cts))
            assert self.of.bwd is not None
            found = self.of.bwd(*self.statics, kept.restored(backend, saved), ct)
            return self.cotangents(found, like)

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            return self.tangent(saved[len(kept.places) :], dxs)

        saves = kept.places
        if self.of.jvp is not None:
            saves = (*saves, *range(len(like)))
        return Linearized(
            ys,
            extras,
            saves,
            None if self.of.jvp is None else tangent,
            cotangent,
            rerun=kept.rerun,
            pushing=len(saves) - len(kept.places),
            key=(tuple(like), out_def, kept, told_apart(kept.others)),
        )

    def _told(self, xs: Sequence[Array], perturbed: tuple[bool, ...] | None) -> Any:
        """fwd's arguments; with symbolic zeros each with whether it is differentiated."""
        if "cotangent" not in self.of.symbolic:
            return self.arguments(xs)
        if perturbed is None:
            perturbed = tuple([self.backend.is_inexact(x) for x in xs])
        told = iter([Primal(x, p) for x, p in zip(xs, perturbed, strict=True)])
        full = [
            next(told)
            if o is _ARRAY
            else Primal(o, False)
            if isinstance(o, int | complex | float)
            else o
            for o in self.others
        ]
        return self.backend.unflatten(self.treedef, full)

    def cotangents(self, found: Any, like: Sequence[Any]) -> list[Any]:
        """What bwd returned, as one flat entry for each array."""
        if not isinstance(found, tuple | list) or len(found) != len(self.entries):
            came = describe(self.backend, found)
            names = [n for n in self.of._taken.names if n not in self.of.static_argnames]
            raise self._error(
                f"bwd returned {came}, expected a tuple of {len(self.entries)}, one cotangent for "
                f"each argument{' (' + ', '.join(names) + ')' if names else ''}."
            )
        leaves: list[Any] = []
        for i, (entry, (own, treedef)) in enumerate(zip(found, self.entries, strict=True)):
            if entry is None:
                leaves += [None] * len(own)
            else:
                leaves += self._like(entry, treedef, f"bwd's entry {i}")
        there = [x for x, o in zip(leaves, self.others, strict=True) if o is _ARRAY]
        return [
            self._fits(x, shape, dtype, inexact, f"bwd's cotangent of array {i}")
            for i, (x, (shape, dtype, inexact)) in enumerate(zip(there, like, strict=True))
        ]

    # --- checks

    def pair(self, result: Any, who: str, what: str) -> Any:
        """The result, which must be two things."""
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._error(
                f"{who} returned {describe(self.backend, result)}, expected a pair {what}."
            )
        return result

    def _like(self, tree: Any, treedef: Any, who: str) -> list[Any]:
        """What stands in tree at treedef's leaves; None is a zero at any of them."""
        if tree is None:
            return [None] * treedef.num_leaves
        try:
            leaves = treedef.flatten_up_to(tree)
        except (ValueError, TypeError):
            leaves = self._bare(tree, treedef)
        if leaves is None or any(isinstance(x, tuple | list | dict) for x in leaves):
            came = self.backend.flatten(tree)[1]
            raise self._error(f"{who} has the structure {came}, expected {treedef}.")
        return list(leaves)

    def _bare(self, tree: Any, treedef: Any) -> list[Any] | None:
        """The same where an array stands for a container that holds one; None for another tree."""
        backend = self.backend
        leaves, came = backend.flatten(tree)
        try:
            inside = came.flatten_up_to(backend.unflatten(treedef, [_ARRAY] * treedef.num_leaves))
        except (ValueError, TypeError):
            return None
        alone = all(backend.flatten(one)[0] == [_ARRAY] for one in inside)
        return leaves if alone and len(leaves) == treedef.num_leaves else None

    def _fitting(self, x: Any, like: Array, who: str) -> Any:
        return self._fits(x, tuple(like.shape), like.dtype, self.backend.is_inexact(like), who)

    def _fits(self, x: Any, shape: Any, dtype: Any, inexact: bool, who: str) -> Any:
        """x held to a shape and dtype; None where nothing is differentiated."""
        if x is None or not inexact:
            return None
        zero = self.backend.is_symbolic_zero(x)
        if not (zero or self.backend.is_array(x)):
            x = self._as_array(x, who)
            x = self.backend.cast(x, str(dtype).removeprefix("torch."))
        other_shape = tuple(x.shape) != shape and self.contract.check != "never"
        if other_shape or x.dtype != dtype:
            name = str(dtype).removeprefix("torch.")
            raise self._error(
                f"{who} has shape {tuple(x.shape)} and dtype {self.backend.dtype_name(x)}, "
                f"expected {shape} and {name}, those of what it belongs to."
            )
        return None if zero else x


def _looks(xs: Sequence[Array]) -> Any:
    return tuple([(tuple([_length(n) for n in x.shape]), x.dtype) for x in xs])


def _without_lengths(looks: Sequence[Look]) -> list[Look]:
    return [Look((None,) * len(look.shape), look.dtype) for look in looks]


def _is_number(x: Any) -> bool:
    """Whether x is a number that has a tangent."""
    return isinstance(x, float | complex)


def _length(n: Any) -> Any:
    """The length of an axis; those that PyTorch's compiler keeps open look alike, unhashable."""
    return n if isinstance(n, int) else None


_PLAIN = (str, bytes, bool, int, float, complex, type)


@dataclass(frozen=True)
class Residuals:
    """What fwd saved: where each array comes from, and all that is no array."""

    treedef: Any
    places: tuple[int, ...]  # in [*xs, *ys, *extras]
    others: tuple[Any, ...]

    @property
    def rerun(self) -> bool:
        """Whether anything saved may depend on x without being an array."""
        return any(o is not _ARRAY and not isinstance(o, _PLAIN) for o in self.others)

    @classmethod
    def of(cls, backend: Backend, res: Any, xs: Sequence[Array], ys: Sequence[Array]) -> Any:
        """The record, and the extras."""
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
            others.append(_ARRAY)
            if id(leaf) not in known:
                known[id(leaf)] = start + len(extras)
                extras.append(leaf)
            places.append(known[id(leaf)])
        return cls(treedef, tuple(places), tuple(others)), extras

    @classmethod
    def of_arrays(cls, treedef: Any, places: tuple[int, ...]) -> Residuals:
        """The record of arrays alone."""
        return cls(treedef, places, (_ARRAY,) * len(places))

    def restored(self, backend: Backend, saved: Entries) -> Any:
        """What fwd saved, from its arrays."""
        left = iter(saved)
        return backend.unflatten(
            self.treedef, [next(left) if o is _ARRAY else o for o in self.others]
        )
