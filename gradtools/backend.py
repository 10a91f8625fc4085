"""Defines the backend interface: abstract members, and defaults for all other members.

The operators are written once, on flat lists of arrays. A function that is passed to a backend,
`fun`, takes the differentiated leaves and returns two lists, `(outs, extras)`: arrays that are
differentiated, and arrays that are only passed through.

A backend implements the abstract members: operations on arrays and pytrees, the vjp of a function,
and functions with custom pullbacks. The other members have defaults in terms of the abstract
members, or raise an error that names the operator. PyTorch's and JAX's backends override many
defaults with functions of the framework. `docs/adding_a_backend.md` explains how to add a backend.

All members use gradtools' complex convention: a pullback is J^H v. A backend converts cotangents if
its framework uses a different convention.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from gradtools.arguments.marks import MarkedValues, here
from gradtools.backend_arrays import Array as Array
from gradtools.backend_arrays import Arrays
from gradtools.boundary import LinearFunction, user_facing_methods
from gradtools.errors import GradtoolsError
from gradtools.rules import Entries, Map, Rule, by_key, reverse_only_text, spread

if TYPE_CHECKING:
    from gradtools.arguments.chunks import Chunks
    from gradtools.arguments.marks import Mark
    from gradtools.intermediate_gradients import MarkedCall

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Any)  # this bound lets type checkers accept a lambda
Fun = Callable[..., tuple[list[Array], list[Array]]]
_PUSHING: ContextVar[str | None] = ContextVar("pushing", default=None)
"""The operator that calls the default `linearize`, for error messages; None outside of a call."""


@dataclass(slots=True, eq=False, repr=False)
class Evaluation:
    """The outputs of a function at one point, and its pullback at that point.

    Attributes:
        outs: The differentiated outputs.
        extras: The outputs that were only passed through.
        pullback: Maps the cotangents of outs (each may be None, for zero) to the cotangents of the
            leaves (None for a leaf on which the outputs do not depend).
        nested: Whether fun itself computed a derivative. This derivative may be constant with
            respect to a leaf, so None in the pullback's result then means zero.
        checked: Whether None in the pullback's result means that the outputs do not depend on a
            leaf; False if the framework returns zeros, or returns None for other reasons.
    """

    outs: list[Array]
    extras: list[Array]
    pullback: Callable[[Sequence[Array | None]], list[Array | None]]
    nested: bool = False
    checked: bool = True


@dataclass(frozen=True, eq=False, repr=False)
class Staged:
    """A traced function (in JAX), or the function itself in a framework that does not trace.

    Attributes:
        run: Evaluates the trace. Calling `run` instead of the function executes the user's code
            only once.
        reverse_only: Whether the function contains a rule without forward mode.
        jacobian_mode: The mode that computes a Jacobian in fewer passes; "auto" if the mode is
            known only after an evaluation.
    """

    run: Fun
    reverse_only: bool = False
    jacobian_mode: str = "auto"


class LazyMember:
    """A descriptor for a backend's member in a submodule, which is imported on first use.

    Lazy imports keep ``import gradtools`` fast. On a backend without submodules, access raises an
    error that names the operator: `operator`, by default the member's own name. If `name` is empty,
    the member is the submodule itself.
    """

    def __init__(
        self, submodule: str, name: str | None = None, *, operator: str | None = None
    ) -> None:
        self._submodule, self._name, self._operator = submodule, name, operator

    def __set_name__(self, owner: type, name: str) -> None:
        self._member = name

    def __get__(self, backend: Any, owner: type) -> Any:
        if backend is None:
            return self
        module = backend.submodule(self._submodule, self._operator or self._member)
        name = self._member if self._name is None else self._name
        member = getattr(module, name) if name else module
        return backend.__dict__.setdefault(self._member, member)


# --- the interface -------------------------------------------------------------------------------


class Differentiation(Arrays):
    """Defines the abstract method `vjp`, and defaults for methods that can be derived from it."""

    hvp_mode = "reverse_over_reverse"  # the mode for mode="auto" in hvp and hessian

    @abstractmethod
    def vjp(
        self, fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool
    ) -> Evaluation:
        """Evaluates fun and returns its pullback.

        groups: The sizes of consecutive groups of leaves, one per argument. If given, the caller
            raises an error for a group on which the outputs do not depend.
        once: Whether the pullback is called only once, so that it may free the graph.
        """

    def jvp(
        self, fun: Fun, leaves: list[Array], tangents: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Computes the tangents of the outputs of fun; returns `(outs, extras, pushed)`."""
        outs, extras, push = self.linearize(fun, leaves)
        return outs, extras, push(tangents)

    def jvps(
        self, fun: Fun, leaves: list[Array], many: Sequence[list[Array]]
    ) -> tuple[list[Array], list[Array], list[list[Array]]]:
        """Returns `(outs, extras, pushed)`, with one list of output tangents per entry of `many`.

        PyTorch's implementation stores no graph, replaces fused attention with plain operations,
        and raises an error for other operations without forward mode.
        """
        outs, extras, push = self.linearize(fun, leaves)
        return outs, extras, [push(tangents) for tangents in many]

    def linearize(
        self, fun: Fun, leaves: list[Array]
    ) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]:
        """Returns `(outs, extras, pushforward)`; the default transposes the pullback of fun."""
        caller = getattr(fun, "caller", "jvp")
        token = _PUSHING.set(caller)
        try:
            result = self.vjp(fun, leaves, groups=None, once=False)
        finally:
            _PUSHING.reset(token)

        def pulled(*cts: Array) -> tuple[list[Array], list[Array]]:
            return self.filled(result.pullback(cts), leaves), []

        zeros = [self.zeros_like(y) for y in result.outs]
        again = self.vjp(pulled, zeros, groups=None, once=False)
        return (
            result.outs,
            result.extras,
            lambda tangents: self.filled(again.pullback(tangents), zeros),
        )

    def filled(self, values: Sequence[Array | None], likes: Sequence[Array]) -> list[Array]:
        """Replaces each None in `values` with zeros like the corresponding entry of `likes`."""
        pairs = zip(values, likes, strict=True)
        return [self.zeros_like(x) if v is None else v for v, x in pairs]

    def apart(self, fun: Callable[..., T], /, *args: Any) -> T:
        """Calls `fun(*args)`; a backend may mark fun's stop_gradient operations as internal."""
        return fun(*args)

    def reached(self, fun: Fun, leaves: list[Array]) -> list[bool]:
        """Returns, for each leaf, whether fun's outputs depend on the leaf; True if unknown."""
        result = self.vjp(fun, leaves, groups=[1] * len(leaves), once=True)
        grads = result.pullback([self.ones_like(y) for y in result.outs])
        return [not result.checked or g is not None for g in grads]

    def closure_converted(
        self, f: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Callable[..., Any], list[Array]]:
        """Returns `converted(captured, *args, **kwargs)` and the arrays that f captures.

        f can then be differentiated with respect to the captured arrays. The default returns no
        arrays.
        """
        return lambda captured, *args, **kwargs: f(*args, **kwargs), []

    def pull(self, fun: Any, xs: Sequence[Array], cts: Sequence[Any]) -> list[Array]:
        """Applies the pullback of fun at xs to the cotangents `cts`, where None means zero."""
        result = self.vjp(lambda *a: (list(fun(*a)), []), list(xs), groups=None, once=False)
        return self.filled(result.pullback(cts), xs)

    def push(self, fun: Any, xs: Sequence[Array], dxs: Sequence[Any]) -> list[Array]:
        """Computes the tangents of fun at xs along dxs."""
        return self.jvp(lambda *a: (list(fun(*a)), []), list(xs), list(dxs))[2]

    def attempt(self, fun: Callable[..., list[Array]], *xs: Array) -> list[Array]:
        """Calls `fun(*xs)`; a backend may raise an error immediately if fun has no derivative."""
        return fun(*xs)

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged:
        return Staged(fun)

    def no_tangent(self, x: Any) -> Any:
        """Returns the tangent of an integer array: None, or the framework's symbolic zero."""
        return None

    def outliving(
        self, call: Any, outs: Sequence[Array], out: Any = None
    ) -> tuple[Any, Sequence[Any]]:
        """Returns the `Call` and its outputs for use in a pullback, with avals in place of tracers.

        out: The output of f, from which the pullback takes the names of leaves.
        """
        return call, outs

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        """Returns a function that maps args to `run(native, *args)` and is a pytree in JAX."""
        return LinearFunction(run, native)

    def opened(
        self,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
    ) -> Any:
        """Converts a call whose arguments contain modules to a function of pytrees of arrays.

        Returns None if no argument contains a module. The returned object replaces f, and its
        `args` replace the arguments. `effects()` returns the arrays that a call changes in the
        modules, and `settle(extras)` writes these arrays to the user's modules.
        """
        return None

    def attaching(
        self, opened: Any, /, caller: str, again: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Implements `Call.attaching` for a call whose modules `opened` has replaced."""
        return lambda results, select=None: results

    traces_marks = False
    """Whether `retain_gradient` is traced as an operation even outside of `retained_gradients`."""

    def marked(self, xs: list[Array], mark: Mark) -> list[Array]:
        """Adds zero arrays, whose gradients are retained, to the leaves of a marked value."""
        make = lambda: [-self.zeros_like(x) for x in xs]
        arrays = here.tape.arrays_of(mark, make)  # type: ignore[union-attr]
        return [x + d for x, d in zip(xs, arrays, strict=True)]

    def retaining(self, call: MarkedCall) -> tuple[Evaluation, list[Mark], list[Array]]:
        """Evaluates the call at its leaves and at one array for each marked leaf.

        Also returns the marks and the arrays of the marked leaves. By default, an additional
        evaluation of the call determines the shapes of the arrays.
        """
        if not hasattr(call, "tape"):
            call.tape = MarkedValues()
        call(*call.leaves)
        arrays = call.tape.arrays
        evaluation = self.vjp(call, [*call.leaves, *arrays], groups=None, once=True)
        return evaluation, call.tape.marks, arrays

    def part_of(self, tree: Any) -> Any:
        """Replaces each module in the tree with the pytree of its differentiated parameters."""
        return tree

    def restarting(self, fun: Fun, leaves: Sequence[Array], count: int) -> Callable[[], None]:
        """Returns a function that resets random state; it is called before each evaluation."""
        return lambda: None

    def map_batches(
        self, f: Any, batch: list[Array], chunk_size: int | None, one_draw: bool = False
    ) -> list[Array]:
        """Applies f to each row of the batch and stacks the outputs.

        one_draw: Whether f draws the same random numbers for every row.
        """
        rows = [f(*example) for example in zip(*batch, strict=True)]
        return [self.xp.stack(column) for column in zip(*rows, strict=True)]


class Rules(Differentiation):
    """Methods for custom derivatives; a backend implements `with_pullback` or `apply_rule`."""

    def with_pullback(
        self,
        fun: Callable[..., list[Array]],
        pullback: Callable[[Sequence[Array], Sequence[Array], Entries], Entries],
        xs: Sequence[Array],
    ) -> list[Array]:
        """Calls `fun(*xs)` and uses `pullback(xs, ys, cotangents)` for derivatives of any order.

        Entries of cotangents and of the pullback's result may be None for zero. The pullback
        consists of differentiable operations on xs and ys.
        """
        raise NotImplementedError

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        """Applies a custom rule to xs; the pullback recomputes the residuals."""
        caller = _PUSHING.get()
        if rule.reverse_only and caller is not None:
            raise GradtoolsError(reverse_only_text(caller, rule.name))
        return self.with_pullback(rule.primal, partial(self._pulled, rule), xs)

    def _pulled(self, rule: Rule, xs: Entries, ys: Entries, cts: Entries) -> Entries:
        known = rule.linearize is None
        linearized = rule.linearized_from(xs, list(ys)) if known else rule.at(*xs)
        saved = [[*xs, *ys, *linearized.extras][i] for i in linearized.saves]
        if linearized.cotangent is not None:
            filled = self.filled(cts, ys) if rule.fills("cotangent") else cts
            return linearized.cotangent(saved, filled)
        assert linearized.tangent is not None
        push, moving = linearized.tangent, [self.is_inexact(x) for x in xs]
        zeros = [self.zeros_like(x) for x, m in zip(xs, moving, strict=True) if m]

        def pushed(*dxs: Array) -> list[Array]:
            return self.filled(push(saved, spread(dxs, moving)), ys)

        return spread(self.pull(pushed, zeros, cts), moving)

    cg = LazyMember("linear_solvers", operator="implicit_solution")
    gmres = LazyMember("linear_solvers", operator="implicit_solution")
    dense = LazyMember("linear_solvers", operator="implicit_solution")
    """Linear solvers for real vectors: `cg(matvec, b)` returns x with `matvec(x) = b`."""

    compiles_rules = False
    """Whether a rule's maps are compiled only once; numbers that vary must then be arguments."""

    def edited(
        self, rule: Rule, x: Any, cotangent: Map | None = None, value: Array | None = None
    ) -> Array | None:
        """Applies an edit to one array, if the backend can do so faster than `apply_rule`.

        `edited` is not called in compiled code.

        Args:
            rule: A rule with one input; all calls share this rule.
            x: The input; the result is None if x is not an array.
            cotangent: The cotangent map for this call; the default is the rule's cotangent map.
            value: The output, an array of x's shape and dtype; the default is x.
        """
        return None

    def tied(self, x: Any, function: Callable[..., Any]) -> Any:
        """Marks x as computed from the arrays that a function captures."""
        return x

    def apply_rule_by_key(self, key: str, *xs: Array) -> list[Array]:
        return self.apply_rule(by_key(key), *xs)

    def transpose(
        self,
        rule: Rule,
        which: str,
        linear: Any,
        at: list[Array],
        examples: list[Array],
        values: list[Array],
    ) -> list[Array]:
        """Applies the transpose of `vs -> linear(at, *vs)`, with vs like `examples`, to values."""
        return self.pull(lambda *vs: linear(at, *vs), examples, values)


class Compiler:
    """The interface to a compiler that traces Python (dynamo); by default, none is active."""

    def is_tracing(self) -> bool:
        """Returns whether the compiler is tracing the caller."""
        return False

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Makes fun's result a constant of the compiled graph."""
        return fun

    def refuse(self, reason: str) -> None:
        """Breaks the compiled graph at this call, for the given reason."""

    def uncompiled(self, fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `fun(*args, **kwargs)` in Python, outside of the compiled graph."""
        return fun(*args, **kwargs)


class Programs(Rules):
    """Backend members for compilers, modules, vmap and host kernels."""

    compiler = Compiler()

    def direct_calls(self, of: Any) -> Callable[[Any, Any], Any] | None:
        """Returns a fast path for calls of a custom rule or host function, or None by default.

        The fast path takes the dynamic and the static arguments, as `Parameters.bound` splits them,
        and returns NotImplemented for a call that it does not support. For a host function, the
        fast path calls the kernel directly if the arguments are concrete arrays and no trace,
        transform or derivative is active.
        """
        return None

    def abstract_eval(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        """Traces fun at the shapes and dtypes of xs; does nothing if tracing is unsafe."""

    compile, vmap = LazyMember("", operator="compile"), LazyMember("", operator="vmap")

    def like_module(self, f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
        """Returns `make(f)`; if f is a module, returns a module that calls `make(f)`."""
        return make(f)

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        return f(args)

    def hint_at_traced_value(self, error: Exception, who: str = "f") -> str:
        """Returns advice if `who` failed because it reads a traced array's value; otherwise ""."""
        return ""

    call_kernel = LazyMember("host", operator="host_function")
    """Calls a host kernel in the framework's program; the kernel's results have no derivative."""

    all_gather = LazyMember("gathering")
    random_key, split_key = LazyMember("arrays"), LazyMember("arrays")

    def as_number(self, x: Any) -> Any:
        """Converts an array of shape () to a Python number; returns any other x unchanged."""
        return self.to_numpy(x).item() if self.is_array(x) and tuple(x.shape) == () else x


class Recomputation(Programs):
    """Backend members for checkpoints, chunked calls and frozen functions."""

    checkpoint = LazyMember("recomputing", operator="checkpoint")
    """`checkpoint(f, options)` returns a function that recomputes f when it is differentiated."""

    run_chunks = LazyMember("chunking", operator="chunked")
    """Runs `Chunks`; returns the concatenated, differentiable output leaves and the last carry."""

    weighs_sums = False
    """Whether `sum_chunks` itself multiplies the terms by their weights."""

    def sum_chunks(
        self, chunks: Chunks, weigh: Callable[[Array, Array], Array] | None = None
    ) -> tuple[list[Array], list[Array]]:
        """Sums the output leaves over chunks, without recomputation; returns `(sums, carry)`.

        weigh: If `weighs_sums`, each term is `weigh(w, x)`. The first leaf of each chunk is its
            weight, and the result is the sum of the weights and the weighted means.
        """
        terms, carry = [], chunks.carry
        for i, pieces in enumerate(self._pieces(chunks)):
            outs, carry = chunks.call(i, i, pieces, chunks.shared, carry)
            terms.append(outs)
        return [sum(column[1:], column[0]) for column in zip(*terms, strict=True)], carry

    def _pieces(self, chunks: Chunks) -> list[list[Array]]:
        """Returns the slices of all split arrays and then of all lists, for each chunk."""
        part = lambda x, axis, r: x[
            (slice(None),) * (axis % x.ndim) + (slice(r.start, r.stop, r.step),)
        ]
        return [
            [*[part(x, axis, rows) for x, axis in chunks.splits], *lists]
            for rows, lists in zip(chunks.cut.rows, chunks.lists, strict=True)
        ]

    def frozen_uses(self) -> Any:
        """Creates the state that all calls of one frozen function share."""
        return None

    run_frozen = LazyMember("freezing", operator="frozen")
    """Calls a frozen function, given as `Chunks` with a single chunk; returns the output leaves."""

    def is_recomputing(self) -> bool:
        return False


class Backend(Recomputation):
    """Base class of all backends, which combines the parts of the interface."""

    def __reduce__(self) -> Any:
        return backend_of, (self.name,)


class FrameworkBackend(Backend):
    """Base class of the PyTorch and JAX backends, whose submodules have the same names."""

    instances: ClassVar[list[FrameworkBackend]] = []
    on_creation: ClassVar[list[Callable[[FrameworkBackend], None]]] = []

    def __init__(self) -> None:
        self.instances.append(self)
        for notify in self.on_creation:
            notify(self)

    def as_number(self, x: Any) -> Any:
        if self.is_traced(x):
            x = self.stop_gradient(x)
            narrow = x.dtype.itemsize < 4  # sums in narrow dtypes are rounded or overflow
            return None if tuple(x.shape) else self.cast(x, "float32") if narrow else x
        if getattr(x, "shape", None) == () and hasattr(x, "item"):
            return x.item()
        return x if isinstance(x, (int, float)) else None

    run_chunks, sum_chunks = LazyMember("chunking"), LazyMember("chunking")
    run_frozen = LazyMember("freezing")


class Operators:
    """Public operators, bound to one backend."""

    def __init_subclass__(cls) -> None:
        user_facing_methods(cls)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __reduce__(self) -> Any:  # unpickling by name returns the same object
        return _operators_of, (self._backend.name, f"{type(self).__module__}:{type(self).__name__}")

    def __repr__(self) -> str:
        return f"<gradtools for {self._backend.name}>"


def _operators_of(backend: str, path: str) -> Any:
    """Returns the `Operators` object of a backend at "module:class"."""
    return _namespace(backend)._api.operators(path)


def backend_of(name: str) -> Any:
    """Returns the backend with the given name."""
    return _namespace(name)._api._backend


def _namespace(name: str) -> Any:
    return import_module(f"gradtools.{name}" if name in ("torch", "jax") else name)
