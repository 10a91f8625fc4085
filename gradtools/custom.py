"""Own rules: a function with a derivative that its author gives.

The author writes a rule on pytrees, with the signatures of `jax.custom_vjp` and
`jax.custom_jvp`; here it becomes a `Rule` on flat lists of arrays. For each way of calling the
function (its static arguments, the structure of the others) there is one such Rule.

A host function is the same with a kernel as its value. Its kernels cannot be differentiated, so
where the double backward is the last one given, the symmetry of the Hessian gives the rest:

    bwd(x, c) = J(x)^H c is the gradient of Re<c, f(x)> in x. Its derivative along dx is a
    product with that function's Hessian, and so equals its own pullback, of dx.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from typing import Any, TypeVar, overload

from gradtools.backend import Array, Backend, Operators
from gradtools.calls import describe
from gradtools.errors import GradtoolsError, MissingRuleError
from gradtools.host import Kernel, Spec
from gradtools.rules import KEYS, Entries, Linearized, Rule, spread

F = TypeVar("F", bound=Callable[..., Any])
_MOST_SHAPES = 256


class CustomRules(Operators):
    """The operators that make a function with a rule of its own."""

    Spec = Spec

    @overload
    def custom_rule(self, f: Callable[..., Any], static_argnames: Any = ()) -> CustomRule: ...
    @overload
    def custom_rule(
        self, f: None = None, static_argnames: Any = ()
    ) -> Callable[[Callable[..., Any]], CustomRule]: ...
    def custom_rule(self, f: Any = None, static_argnames: Any = ()) -> Any:
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

        Returns:
            A function with f's arguments. In `bwd`, None is a zero cotangent, and what belongs
            to an integer argument; in `rule`, None is the tangent of an integer argument.

        Raises:
            GradtoolsError: (on call) there is no rule; a rule returns another structure, shape or
                dtype than the argument or output it belongs to; a rule whose transpose is asked
                for is not linear; what a rule closes over is differentiated.

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
        if not callable(f):
            raise GradtoolsError(f"custom_rule: f must be a function, got {f!r}.")
        return CustomRule(self._backend, f, static_argnames)

    @overload
    def host_function(
        self, kernel: Callable[..., Any], out: Any = None, vectorized: bool = False
    ) -> HostFunction: ...
    @overload
    def host_function(
        self, kernel: None = None, out: Any = None, vectorized: bool = False
    ) -> Callable[[Callable[..., Any]], HostFunction]: ...
    def host_function(self, kernel: Any = None, out: Any = None, vectorized: bool = False) -> Any:
        """A kernel of NumPy arrays (NumPy, SciPy, ctypes, C++) inside the framework's program.

        It runs in eager and compiled code, under vmap and in loops. It takes rules like a
        `custom_rule`; they may call the function itself, and other host functions with rules of
        their own: a bwd that is a host function with a bwd is double backward. From these two
        forward mode and forward over reverse follow by the symmetry of the Hessian.

        Args:
            kernel: Gets read-only NumPy arrays (bfloat16 as float32) and returns NumPy arrays.
                Arguments that are no arrays come as they are.
            out: What the kernel returns: None (one array like the first array argument), a pytree
                of `Spec`s, or a function from the arguments, arrays replaced by their Specs, to
                one. Under vmap these are the specs of one example.
            vectorized: False: under vmap one call for each example. True: one call, each array
                argument with the batch axes in front. Elementwise kernels allow it.

        Returns:
            A function of arrays. Without a rule, differentiating it raises.

        Raises:
            GradtoolsError: (on call) the kernel returns another number, shape or dtype than `out`
                says, or a framework's array; it calls JAX in a JAX program, which would wait for
                itself forever. The kernel's own exceptions reach you with their message.

        Example:
            >>> cube = gt.host_function(lambda x: x ** 3)
            >>> back = gt.host_function(lambda x, c: 3 * x ** 2 * c)
            >>> twice = gt.host_function(
            ...     lambda x, c, v: (6 * x * c * v, 3 * x ** 2 * v), out=lambda x, c, v: (x, c))
            >>> cube.defvjp(lambda x: (cube(x), x), lambda x, c: (back(x, c),))
            >>> back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda res, v: twice(*res, v))
            >>> x = gt.asarray(np.float64(2.0) if gt.xp.asarray(2.0).itemsize == 8
            ...                else np.float32(2.0))
            >>> [float(g(x)) for g in (cube, gt.grad(cube), gt.grad(gt.grad(cube)))]
            [8.0, 12.0, 12.0]
        """
        if kernel is None:
            return partial(self.host_function, out=out, vectorized=vectorized)
        return HostFunction(self._backend, kernel, out, vectorized)


# --- the function ------------------------------------------------------------------------


class CustomRule:
    """A function and its rule; see `custom_rule`.

    Attributes:
        fun: The function that gives the value.
        fwd: The rule's forward pass, None if not given.
        bwd: The rule's backward pass, None if not given.
        jvp: The forward rule, None if not given.
        static_argnames: The names of the static arguments.
    """

    def __init__(self, backend: Backend, fun: Callable[..., Any], static_argnames: Any) -> None:
        update_wrapper(self, fun)
        self.__name__ = _name(fun)
        self.fun, self.fwd, self.bwd, self.jvp = fun, None, None, None
        self._backend = backend
        names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
        self.static_argnames: tuple[str, ...] = tuple(names)
        self._parameters = _Parameters.of(self.__name__, fun, self.static_argnames)
        self._shapes: OrderedDict[Any, _Shape] = OrderedDict()
        self._own_key = next(KEYS)  # compiled code looks at it to tell one rule from another
        self._by_key: dict[str, _Shape] = {}
        self._key_of = backend.constant_result(self._key)
        self._out_of = backend.constant_result(self._out)

    def __repr__(self) -> str:
        given = [name for name, rule in (("vjp", self.bwd), ("jvp", self.jvp)) if rule]
        return f"<{self._kind} {self.__name__}, rules: {' and '.join(given) or 'none'}>"

    _kind = "custom_rule"

    def _forget(self) -> None:
        self._own_key = next(KEYS)
        self._shapes.clear()
        self._by_key.clear()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Gives the reverse rule.

        Args:
            fwd: `fwd(*args)` returns the output and what bwd needs, any pytree.
            bwd: `bwd(residuals, cotangent)` returns a tuple, one entry for each argument that is
                not static. Static arguments lead the arguments of both.
        """
        for name, rule in (("fwd", fwd), ("bwd", bwd)):
            if not callable(rule):
                raise GradtoolsError(
                    f"{self.__name__}.defvjp: {name} must be a function, got {rule!r}."
                )
        self.fwd, self.bwd = fwd, bwd
        self._forget()

    def defjvp(self, rule: F) -> F:
        """Gives the forward rule: `rule(primals, tangents)` returns the output and its tangent.

        Static arguments lead its arguments. Returns the rule, so it may be used as a decorator.
        """
        if not callable(rule):
            raise GradtoolsError(
                f"{self.__name__}.defjvp: the rule must be a function, got {rule!r}."
            )
        self.jvp = rule
        self._forget()
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value; differentiated by the rule wherever a derivative is taken."""
        backend = self._backend
        statics, rest = self._parameters.bound(args, kwargs)
        leaves, structure = backend.sketch(rest)
        leaves = [
            backend.asarray(x) if hasattr(x, "__array__") and not backend.is_array(x) else x
            for x in leaves
        ]
        arrays = tuple([backend.is_array(x) for x in leaves])
        xs = [x for x in leaves if backend.is_array(x)]
        others = tuple([x for x in leaves if not backend.is_array(x)])
        key = self._key_of(self._own_key, statics, structure, arrays, others)
        ys = backend.apply_rule_by_key(key, *xs)
        return backend.draw(self._out_of(key, () if backend.compiling() else _looks(xs)), ys)

    # Compiled code takes what these two return for constants.

    def _key(self, own_key: str, statics: Any, structure: Any, arrays: Any, others: Any) -> str:
        shape = self._shape(statics, structure, arrays, others)
        return shape.rule.key

    def _out(self, key: str, looks: Any) -> Any:
        """The structure that came out where arrays like these went in."""
        shape = self._by_key[key]
        if looks:
            return shape.outs[looks]
        return self._backend.sketch_of(next(reversed(shape.outs.values())))

    def _shape(self, statics: Any, structure: Any, arrays: Any, others: Any) -> _Shape:
        """The Rule for this way of calling."""
        key = (statics, structure, arrays, others, *[type(o) for o in (*statics, *others)])
        try:
            found = self._shapes.get(key)
        except TypeError as error:
            unhashable = [o for o in (*statics, *others) if not _is_hashable(o)]
            raise GradtoolsError(
                f"{self.__name__}: an argument holds {describe(self._backend, unhashable[0])}, "
                "which is neither an array nor hashable. Pass arrays, or make it hashable."
            ) from error
        if found is None:
            full = _marked(iter(others), arrays)
            treedef = self._backend.from_sketch(structure)
            found = self._shapes[key] = _Shape(self, statics, treedef, full)
            self._by_key[found.rule.key] = found
            if len(self._shapes) > _MOST_SHAPES:
                del self._by_key[self._shapes.popitem(last=False)[1].rule.key]
        return found

    def _rule(self, shape: _Shape) -> Rule:
        if self.bwd is None and self.jvp is None:
            raise GradtoolsError(
                f"{self.__name__} has no rule yet. Give it one with defvjp(fwd, bwd) or "
                "defjvp(rule) before it is called."
            )
        if self.bwd is None:
            return self._new_rule(shape.primal, tangent=shape.tangent, joint=shape.joint)
        return self._new_rule(shape.primal, linearize=shape.linearize)

    def _new_rule(self, primal: Any, **maps: Any) -> Rule:
        written = tuple([f for f in (self.fun, self.fwd, self.bwd, self.jvp) if f is not None])
        return Rule(self.__name__, primal, written=written, dense=True, **maps)


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


@dataclass(frozen=True)
class _Parameters:
    """How a call's arguments part into static ones and the rest, each in the signature's order."""

    signature: inspect.Signature | None
    names: tuple[str, ...]
    static: tuple[bool, ...]
    keyword_only: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, fun: Any, static_argnames: tuple[str, ...]) -> _Parameters:
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):  # a builtin, which takes what it takes by position
            signature = None
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
        if signature is None or any(p.kind is p.VAR_POSITIONAL for p in found):
            found = [p for p in found if p.kind is not p.VAR_POSITIONAL]
            if static_argnames or any(p.kind is p.KEYWORD_ONLY for p in found):
                raise GradtoolsError(
                    f"custom_rule: {name} takes *args beside static or keyword-only arguments. "
                    "Pass a tuple as one argument instead of *args."
                )
            return cls(signature, (), (), ())
        return cls(
            signature,
            tuple([p.name for p in found]),
            tuple([p.name in static_argnames for p in found]),
            tuple([p.kind is p.KEYWORD_ONLY for p in found]),
        )

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """`(statics, rest)` of a call."""
        if not self.names:
            if kwargs and self.signature is not None:
                call = self.signature.bind(*args, **kwargs)
                return (), call.args
            return (), args
        if kwargs or len(args) != len(self.names) or any(self.keyword_only):
            assert self.signature is not None
            call = self.signature.bind(*args, **kwargs)
            call.apply_defaults()
            args = tuple([call.arguments[name] for name in self.names])
        if not any(self.static):
            return (), args
        pairs = list(zip(args, self.static, strict=True))
        return tuple([a for a, s in pairs if s]), tuple([a for a, s in pairs if not s])

    def call(self, fun: Callable[..., Any], statics: Sequence[Any], rest: Sequence[Any]) -> Any:
        """`fun` with the arguments of `bound`."""
        if not self.names:
            return fun(*rest)
        first, second = iter(statics), iter(rest)
        values = [next(first) if s else next(second) for s in self.static]
        named = list(zip(self.names, values, self.keyword_only, strict=True))
        return fun(*[v for _, v, k in named if not k], **{n: v for n, v, k in named if k})


# --- one way of calling it ---------------------------------------------------------------


@dataclass(eq=False)
class _Shape:
    """A custom rule at fixed static arguments and structure: functions on flat lists of arrays."""

    of: CustomRule
    statics: tuple[Any, ...]
    treedef: Any
    others: tuple[Any, ...]
    outs: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend = self.of._backend
        self.name = self.of.__name__
        self.rule = self.of._rule(self)

    def arguments(self, values: Sequence[Any]) -> Any:
        """The arguments, with these values where arrays stand."""
        left = iter(values)
        full = [next(left) if o is _ARRAY else o for o in self.others]
        return self.backend.unflatten(self.treedef, full)

    # --- values

    def primal(self, *xs: Array) -> list[Array]:
        """The function itself."""
        out = self.of._parameters.call(self.of.fun, self.statics, self.arguments(xs))
        return self._outputs(xs, out, "it")

    def _outputs(self, xs: Sequence[Array], out: Any, who: str) -> list[Array]:
        backend = self.backend
        leaves, out_def = backend.flatten(out)
        looks = _looks(xs)
        self.outs.pop(looks, None)  # so that the last one is the newest
        self.outs[looks] = out_def
        return [y if backend.is_array(y) else self._as_array(y, who) for y in leaves]

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
        result = self.of.jvp(*self.statics, rest, self._tangents(dxs))
        out, dout = self._pair(result, "the forward rule", "(out, tangent_out)")
        ys = self._outputs(xs, out, "the forward rule")
        dys = self._like(dout, self.outs[_looks(xs)], "the forward rule's tangent")
        return ys, [
            self._fitting(dy, y, f"the forward rule's tangent {i}")
            for i, (dy, y) in enumerate(zip(dys, ys, strict=True))
        ]

    def tangent(self, xs: Entries, dxs: Entries) -> list[Any]:
        """The tangents alone."""
        return self.joint(xs, dxs)[1]

    def _tangents(self, dxs: Sequence[Any]) -> Any:
        left = iter(dxs)
        full = [next(left) if o is _ARRAY else None for o in self.others]
        return self.backend.unflatten(self.treedef, full)

    # --- the reverse rule

    def linearize(self, *xs: Array) -> Linearized:
        """One run of fwd, and the maps that read what it saved."""
        backend, looks = self.backend, _looks(xs)
        like = [(tuple(x.shape), x.dtype, backend.is_inexact(x)) for x in xs]
        result = self.of.fwd(*self.statics, *self.arguments(xs))
        out, res = self._pair(result, "fwd", "(out, residuals)")
        ys = self._outputs(xs, out, "fwd")
        out_def = self.outs[looks]
        kept, extras = _Residuals.of(backend, res, xs, ys)

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            ct = backend.unflatten(out_def, list(cts))
            found = self.of.bwd(*self.statics, kept.restored(backend, saved), ct)
            return self._cotangents(found, like)

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            return self.tangent(saved[len(kept.places) :], dxs)

        saves = kept.places
        if self.of.jvp is not None:
            saves = (*saves, *range(len(xs)))
        return Linearized(
            ys,
            extras,
            saves,
            None if self.of.jvp is None else tangent,
            cotangent,
            rerun=kept.rerun,
        )

    def _cotangents(self, found: Any, like: Sequence[Any]) -> list[Any]:
        """What bwd returned, as one flat entry for each array."""
        trees = self.arguments([_ARRAY] * len(like))
        if not isinstance(found, tuple | list) or len(found) != len(trees):
            came = describe(self.backend, found)
            names = [
                n for n, s in zip(self.of._parameters.names, self.of._parameters.static) if not s
            ]
            raise self._error(
                f"bwd returned {came}, expected a tuple of {len(trees)}, one cotangent for each "
                f"argument{' (' + ', '.join(names) + ')' if names else ''}."
            )
        leaves: list[Any] = []
        for i, (entry, tree) in enumerate(zip(found, trees, strict=True)):
            own, treedef = self.backend.flatten(tree)
            if entry is None:
                leaves += [None] * len(own)
            else:
                leaves += self._like(entry, treedef, f"bwd's entry {i}")
        there = [x for x, o in zip(leaves, self.others, strict=True) if o is _ARRAY]
        return [
            self._fits(x, *l, f"bwd's cotangent of array {i}")
            for i, (x, l) in enumerate(zip(there, like, strict=True))
        ]

    # --- checks

    def _pair(self, result: Any, who: str, what: str) -> Any:
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
            leaves = None
        if leaves is None or any(isinstance(x, tuple | list | dict) for x in leaves):
            came = self.backend.flatten(tree)[1]
            raise self._error(f"{who} has the structure {came}, expected {treedef}.")
        return list(leaves)

    def _fitting(self, x: Any, like: Array, who: str) -> Any:
        return self._fits(x, tuple(like.shape), like.dtype, self.backend.is_inexact(like), who)

    def _fits(self, x: Any, shape: Any, dtype: Any, inexact: bool, who: str) -> Any:
        """x held to a shape and dtype; None where nothing is differentiated."""
        if x is None or not inexact:
            return None
        if not self.backend.is_array(x):
            x = self._as_array(x, who)
            x = self.backend.cast(x, str(dtype).removeprefix("torch."))
        if tuple(x.shape) != shape or x.dtype != dtype:
            name = str(dtype).removeprefix("torch.")
            raise self._error(
                f"{who} has shape {tuple(x.shape)} and dtype {self.backend.dtype_name(x)}, "
                f"expected {shape} and {name}, those of what it belongs to."
            )
        return x


def _looks(xs: Sequence[Array]) -> Any:
    return tuple([(x.shape, x.dtype) for x in xs])


_PLAIN = (str, bytes, bool, int, float, complex, type)


@dataclass(frozen=True)
class _Residuals:
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

    def restored(self, backend: Backend, saved: Entries) -> Any:
        """What fwd saved, from its arrays."""
        left = iter(saved)
        return backend.unflatten(
            self.treedef, [next(left) if o is _ARRAY else o for o in self.others]
        )


# --- host functions ----------------------------------------------------------------------


class HostFunction(CustomRule):
    """A kernel in the framework's program, and its rule; see `host_function`.

    Attributes:
        kernel: The kernel, and what it returns.
    """

    _kind = "host function"

    def __init__(self, backend: Backend, kernel: Any, out: Any, vectorized: bool) -> None:
        self.kernel = Kernel(kernel, out, vectorized)
        super().__init__(backend, kernel, ())
        if any(self._parameters.keyword_only):
            raise GradtoolsError(
                f"host_function: {self.__name__} has keyword-only arguments, and a kernel gets its "
                "arguments by position. Wrap it in a function that takes them so."
            )
        self.fun = self._value
        self.opaque = False  # known, once a derivative of bwd in forward mode was missing

    def _value(self, *args: Any) -> Any:
        backend = self._backend
        call, xs = self.kernel.bind(backend, args)
        ys = backend.call_kernel(call, xs)
        specs = [Spec(tuple(x.shape), backend.dtype_name(x)) for x in xs]
        return backend.unflatten(call.results(specs).treedef, ys)

    def _rule(self, shape: _Shape) -> Rule:
        if self.bwd is None and self.jvp is None:

            def missing(saved: Entries, moving: Entries) -> Any:
                raise MissingRuleError(
                    f"host function {self.__name__!r} has no rule, so its derivative is unknown. "
                    "Give it one with defvjp(fwd, bwd) or defjvp(rule), or stop the gradient of "
                    "its arguments."
                )

            return Rule(
                self.__name__, shape.primal, missing, missing, saves=(), captures=False, dense=True
            )
        if self.bwd is None:
            return super()._rule(shape)
        return self._new_rule(shape.primal, linearize=_OfKernels(self, shape).linearize)


@dataclass(eq=False)
class _OfKernels:
    """The maps of a host function with a reverse rule, as rules themselves.

    `pull` is bwd as a function of x, of what fwd saved, and of the cotangents. It is linear in
    the cotangents, and a gradient in x. `push` is its transpose in the cotangents.
    """

    of: HostFunction
    shape: _Shape

    def __post_init__(self) -> None:
        self.backend = self.of._backend

    def linearize(self, *xs: Array) -> Linearized:
        """Like `_Shape.linearize`, with what is needed to differentiate the maps again."""
        backend = self.backend
        found = self.shape.linearize(*xs)
        n, k = len(xs), len(found.saves)
        outs = [(tuple(y.shape), y.dtype) if backend.is_inexact(y) else None for y in found.ys]
        maps = _KernelMaps(
            self,
            saves=found.saves,
            bwd=found.cotangent,
            moving=tuple([backend.is_inexact(x) for x in xs]),
            outs=tuple(outs),
        )

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            if found.tangent is not None:
                return found.tangent(saved[:k], dxs)
            pushed = backend.apply_rule(
                maps.push, *saved[k:], *saved[:k], *[dx for dx in dxs if dx is not None]
            )
            return spread(pushed, [o is not None for o in outs])

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            pulled = backend.apply_rule(
                maps.pull, *saved[k:], *saved[:k], *[ct for ct in cts if ct is not None]
            )
            return spread(pulled, maps.moving)

        return replace(
            found,
            saves=(*found.saves, *range(n)),
            tangent=tangent,
            cotangent=cotangent,
        )


@dataclass(eq=False)
class _KernelMaps:
    """bwd and its transpose at one structure, as rules on `[*xs, *saved, *what they move]`."""

    of: _OfKernels
    saves: tuple[int, ...]
    bwd: Any
    moving: tuple[bool, ...]
    outs: tuple[Any, ...]

    def __post_init__(self) -> None:
        host = self.of.of
        self.backend = self.of.backend
        self.n, self.k = len(self.moving), len(self.saves)
        saved = tuple(range(self.n, self.n + self.k))
        common = {"passive": saved, "written": (host.fwd, host.bwd)}
        name = host.__name__
        self.pull = Rule(f"{name}'s vjp", self.pulled, self.d_pulled, self.of_pulled, **common)
        self.push = Rule(f"{name}'s jvp", self.pushed, self.d_pushed, self.of_pushed, **common)

    def parted(self, operands: Entries) -> tuple[Any, Any, Any]:
        """xs, what fwd saved, and what is moved linearly."""
        n, k = self.n, self.k
        return operands[:n], operands[n : n + k], operands[n + k :]

    def moved(self, xs: Entries) -> list[Any]:
        """Those of the inputs that are differentiated."""
        return [x for x, m in zip(xs, self.moving, strict=True) if m]

    # --- pull: cotangents of y to cotangents of x

    def pulled(self, *operands: Array) -> list[Array]:
        xs, saved, cts = self.parted(operands)
        found = self.bwd(saved, spread(cts, [o is not None for o in self.outs]))
        return [
            self.backend.zeros_like(x) if ct is None else ct
            for x, ct in zip(self.moved(xs), self.moved(found), strict=True)
        ]

    def evaluated(self, xs: Entries, values: Entries, cts: Entries) -> list[Array]:
        """The same as a function of the differentiated inputs: what fwd saves follows them."""
        new = iter(values)
        at = [next(new) if m else x for x, m in zip(xs, self.moving, strict=True)]
        if all(i < self.n for i in self.saves):
            return self.pulled(*at, *[at[i] for i in self.saves], *cts)
        found = self.of.shape.linearize(*at)
        everything = [*at, *found.ys, *found.extras]
        return self.pulled(*at, *[everything[i] for i in self.saves], *cts)

    def d_pulled(self, operands: Entries, moved: Entries) -> list[Any]:
        xs, saved, cts = self.parted(operands)
        dxs, _, dcts = self.parted(moved)
        terms = []
        if any(ct is not None for ct in dcts):
            filled = _filled(self.backend, dcts, cts)
            terms.append(self.backend.apply_rule(self.pull, *xs, *saved, *filled))
        if any(dx is not None for dx in dxs):
            terms.append(self.along(xs, cts, dxs))
        return [_total(parts) for parts in zip(*terms, strict=True)]

    def along(self, xs: Entries, cts: Entries, dxs: Entries) -> list[Array]:
        """How the pulled cotangents change along dxs."""
        at = self.moved(xs)
        along = _filled(self.backend, self.moved(dxs), at)

        def run(*values: Array) -> list[Array]:
            return self.evaluated(xs, values, cts)

        if not self.of.of.opaque:
            try:
                return self.backend.attempt(partial(self._pushed, run), *at, *along)
            except MissingRuleError:
                self.of.of.opaque = True
        return self.backend.pull(run, at, along)

    def _pushed(self, run: Any, *both: Array) -> list[Array]:
        half = len(both) // 2
        return self.backend.push(run, both[:half], both[half:])

    def of_pulled(self, operands: Entries, cotangents: Entries) -> list[Any]:
        xs, _, cts = self.parted(operands)
        at = self.moved(xs)
        dxs, dcts = self.back(xs, at, cts, cotangents)
        return [*spread(dxs, self.moving), *[None] * self.k, *dcts]

    def back(self, xs: Entries, at: Entries, cts: Entries, vs: Entries) -> Any:
        """The pullback of `pulled`, to the inputs and to the cotangents."""

        def run(*values: Array) -> list[Array]:
            return self.evaluated(xs, values[: len(at)], values[len(at) :])

        found = self.backend.pull(run, [*at, *cts], vs)
        return found[: len(at)], found[len(at) :]

    # --- push: tangents of x to tangents of y

    def pushed(self, *operands: Array) -> list[Array]:
        xs, saved, dxs = self.parted(operands)

        def pull(*cts: Array) -> list[Array]:
            return self.backend.apply_rule(self.pull, *xs, *saved, *cts)

        return self.transposed(pull, dxs)

    def transposed(self, pull: Any, dxs: Entries) -> list[Array]:
        zeros = [self.backend.zeros(*out, like=dxs[0]) for out in self.outs if out is not None]
        return self.backend.transpose(self.push, "cotangent", pull, zeros, list(dxs))

    def d_pushed(self, operands: Entries, moved: Entries) -> list[Any]:
        xs, saved, dxs = self.parted(operands)
        along, _, ddxs = self.parted(moved)
        terms = []
        if any(d is not None for d in ddxs):
            filled = _filled(self.backend, ddxs, dxs)
            terms.append(self.backend.apply_rule(self.push, *xs, *saved, *filled))
        if any(d is not None for d in along):
            at = self.moved(xs)

            def run(*values: Array) -> list[Array]:
                return self.transposed(lambda *cts: self.evaluated(xs, values, cts), dxs)

            steps = _filled(self.backend, self.moved(along), at)
            terms.append(self.backend.attempt(partial(self._pushed, run), *at, *steps))
        return [_total(parts) for parts in zip(*terms, strict=True)]

    def of_pushed(self, operands: Entries, cotangents: Entries) -> list[Any]:
        """<v, J dx> = <bwd(x, v), dx>: its gradient in x is the pullback of bwd, of dx."""
        xs, saved, dxs = self.parted(operands)
        likes = [self.backend.zeros(*out, like=dxs[0]) for out in self.outs if out is not None]
        vs = _filled(self.backend, cotangents, likes)
        at = self.moved(xs)
        of_xs, _ = self.back(xs, at, vs, dxs)
        of_dxs = self.backend.apply_rule(self.pull, *xs, *saved, *vs)
        return [*spread(of_xs, self.moving), *[None] * self.k, *of_dxs]


def _filled(backend: Backend, values: Entries, like: Entries) -> list[Array]:
    """`values` with zeros for None."""
    return [backend.zeros_like(x) if v is None else v for v, x in zip(values, like, strict=True)]


def _total(terms: Sequence[Any]) -> Any:
    there = [t for t in terms if t is not None]
    return sum(there[1:], there[0]) if there else None
