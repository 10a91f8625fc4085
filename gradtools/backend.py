"""The backend interface: the abstract members of a framework, and defaults for the others.

The operators are written once, on flat lists of arrays. A function that is passed to a backend,
`fun`, takes the differentiated leaves and returns two lists, `(outs, extras)`: the arrays that are
differentiated, and those that are only passed through.

A backend implements the abstract members: arrays and pytrees, the vjp of a function, and a function
with its own pullback. The other members have defaults in terms of these, or raise an error that
names the operator. PyTorch's and JAX's backends override many of them with the framework's own way.
`docs/adding_a_backend.md` walks through a new backend.

All members use gradtools' complex convention: a pullback is J^H v. A backend converts where its
framework's convention differs.
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
from gradtools.boundary import Linear, user_facing_methods
from gradtools.errors import GradtoolsError
from gradtools.rules import Entries, Map, Rule, by_key, reverse_only_text, spread

if TYPE_CHECKING:
    from gradtools.arguments.chunks import Chunks
    from gradtools.arguments.marks import Mark
    from gradtools.intermediate_gradients import MarkedCall

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Any)  # with this bound, type checkers accept a lambda
Fun = Callable[..., tuple[list[Array], list[Array]]]
_PUSHING: ContextVar[str | None] = ContextVar("pushing", default=None)
"""The operator whose forward mode `linearize` computes by transposing a pullback, for messages."""


@dataclass(slots=True, eq=False, repr=False)
class Evaluation:
    """One evaluation of a function, and its derivative there.

    Attributes:
        outs: The differentiated outputs.
        extras: The outputs that were only passed through.
        pullback: Maps cotangents of outs (None: zero) to cotangents of the leaves (None: the leaf
            does not reach the outputs).
        nested: Whether fun took a derivative itself, which may be constant in a leaf: None in the
            pullback's result then means a zero.
        checked: Whether None in the pullback's result means that a leaf does not reach the
            outputs; False if the framework returns zeros, or None for other reasons.
    """

    outs: list[Array]
    extras: list[Array]
    pullback: Callable[[Sequence[Array | None]], list[Array | None]]
    nested: bool = False
    checked: bool = True


@dataclass(frozen=True, eq=False, repr=False)
class Staged:
    """A function after tracing, in a framework that traces (JAX).

    Attributes:
        run: Evaluates the trace. Called instead of the function, so that the user's code runs once.
        reverse_only: Whether it contains a rule without forward mode.
        jacobian_mode: The mode that takes fewer passes; "auto" if only an evaluation can decide.
    """

    run: Fun
    reverse_only: bool = False
    jacobian_mode: str = "auto"


class LazyMember:
    """A descriptor for a backend's member in a submodule, which is imported at first use.

    This keeps an import of gradtools fast. On a backend without submodules it raises an error that
    names the operator: `operator`, by default the member's own name. With an empty `name` the
    member is the submodule itself.
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
    """One abstract member, the vjp; forward mode and the tools of rules follow from it."""

    hvp_mode = "reverse_over_reverse"  # what mode="auto" means for hvp and hessian

    @abstractmethod
    def vjp(
        self, fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool
    ) -> Evaluation:
        """Evaluates fun, and returns its pullback.

        groups: The sizes of consecutive groups of leaves, one for each argument, if a group that
            does not reach the outputs will be an error; None if not.
        once: Whether the pullback is called only once, so that it may free the graph.
        """

    def jvp(
        self, fun: Fun, leaves: list[Array], tangents: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """`(outs, extras, pushed)`."""
        outs, extras, push = self.linearize(fun, leaves)
        return outs, extras, push(tangents)

    def jvps(
        self, fun: Fun, leaves: list[Array], many: Sequence[list[Array]]
    ) -> tuple[list[Array], list[Array], list[list[Array]]]:
        """`jvp` along many tangents, and the outputs of one evaluation. Keeps no graph.

        Fused attention is replaced by plain operations; another operation without forward mode
        raises.
        """
        outs, extras, push = self.linearize(fun, leaves)
        return outs, extras, [push(tangents) for tangents in many]

    def linearize(
        self, fun: Fun, leaves: list[Array]
    ) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]:
        """`(outs, extras, pushforward)`: by default the transpose of the pullback."""
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
        """The values, with zeros for None."""
        pairs = zip(values, likes, strict=True)
        return [self.zeros_like(x) if v is None else v for v, x in pairs]

    def apart(self, fun: Callable[..., T], /, *args: Any) -> T:
        """`fun(*args)`, whose stopped gradients belong to gradtools, not to the user's program."""
        return fun(*args)

    def closure_converted(
        self, f: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Callable[..., Any], list[Array]]:
        """`converted(captured, *args, **kwargs)` and the arrays that f captures at these arguments.

        These are the arrays that a derivative may be taken of. By default there are no such arrays.
        """
        return lambda captured, *args, **kwargs: f(*args, **kwargs), []

    def pull(self, fun: Any, xs: Sequence[Array], cts: Sequence[Any]) -> list[Array]:
        """The pullback of fun at xs, of cotangents (None: zero)."""
        result = self.vjp(lambda *a: (list(fun(*a)), []), list(xs), groups=None, once=False)
        return self.filled(result.pullback(cts), xs)

    def push(self, fun: Any, xs: Sequence[Array], dxs: Sequence[Any]) -> list[Array]:
        """The tangents of fun at xs along dxs."""
        return self.jvp(lambda *a: (list(fun(*a)), []), list(xs), list(dxs))[2]

    def attempt(self, fun: Callable[..., list[Array]], *xs: Array) -> list[Array]:
        """`fun(*xs)`, which raises now, not when the result is used, if it has no derivative."""
        return fun(*xs)

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged:
        return Staged(fun)

    def no_tangent(self, x: Any) -> Any:
        """The tangent of an integer: None, or the framework's own zero."""
        return None

    def outliving(
        self, call: Any, outs: Sequence[Array], out: Any = None
    ) -> tuple[Any, Sequence[Any]]:
        """A `Call` and its outputs for a pullback to keep, with avals instead of traced arrays.

        out: f's output, of which a pullback names the leaves.
        """
        return call, outs

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        """`run(native, *args)` as a function of args, which in JAX is a pytree."""
        return Linear(run, native)

    def opened(
        self,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
    ) -> Any:
        """The call of f as a function of pytrees of arrays, if an argument holds a module.

        None if none does. The returned object replaces f, and its `args` replace the arguments.
        `effects()` returns the arrays that a call changes in the modules, and `settle(extras)`
        writes them to the user's modules.
        """
        return None

    def attaching(
        self, opened: Any, /, caller: str, again: Callable[[], Any]
    ) -> Callable[..., Any]:
        """The `attach(results, select)` of `Call.attaching` for a call that `opened` returned."""
        return lambda results, select=None: results

    traces_marks = False
    """Whether a mark is an operation of traces, also outside of `retained_gradients`."""

    def marked(self, xs: list[Array], mark: Mark) -> list[Array]:
        """The leaves of a value that `retain_gradient` marks, plus the arrays of the tape."""
        make = lambda: [-self.zeros_like(x) for x in xs]
        arrays = here.tape.arrays_of(mark, make)  # type: ignore[union-attr]
        return [x + d for x, d in zip(xs, arrays, strict=True)]

    def retaining(self, call: MarkedCall) -> tuple[Evaluation, list[Mark], list[Array]]:
        """An evaluation of the call at its leaves and at one array for each marked leaf.

        Returns the marks, and arrays like these, as well. By default the shapes are found by an
        evaluation.
        """
        if not hasattr(call, "tape"):
            call.tape = MarkedValues()
        call(*call.leaves)
        arrays = call.tape.arrays
        evaluation = self.vjp(call, [*call.leaves, *arrays], groups=None, once=True)
        return evaluation, call.tape.marks, arrays

    def part_of(self, tree: Any) -> Any:
        """The tree with each module replaced by its differentiated part."""
        return tree

    def restarting(self, fun: Fun, leaves: Sequence[Array], count: int) -> Callable[[], None]:
        """A function to call before each of `count` evaluations, which resets random state."""
        return lambda: None

    def map_batches(
        self, f: Any, batch: list[Array], chunk_size: int | None, one_draw: bool = False
    ) -> list[Array]:
        """f at each row of the batch, its outputs stacked.

        one_draw: Whether the rows share the random numbers that f draws, as one evaluation would.
        """
        rows = [f(*example) for example in zip(*batch, strict=True)]
        return [self.xp.stack(column) for column in zip(*rows, strict=True)]


class Rules(Differentiation):
    """Functions with their own derivative. A backend implements `with_pullback` or `apply_rule`."""

    def with_pullback(
        self,
        fun: Callable[..., list[Array]],
        pullback: Callable[[Sequence[Array], Sequence[Array], Entries], Entries],
        xs: Sequence[Array],
    ) -> list[Array]:
        """`fun(*xs)`, whose derivative is `pullback(xs, ys, cotangents)`, at any order.

        Entries of cotangents and of the pullback's result may be None, a zero. The pullback
        consists of differentiable operations on xs and ys.
        """
        raise NotImplementedError

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        """The rule's outputs, with its derivative; the pullback recomputes the residuals."""
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
    """Linear solvers: `cg(matvec, b)` is x with `matvec(x) = b`, vectors of real numbers."""

    compiles_rules = False
    """Whether a rule's maps are compiled for it, so that changing numbers should be arguments."""

    def edited(
        self, rule: Rule, x: Any, cotangent: Map | None = None, value: Array | None = None
    ) -> Array | None:
        """An edit of one array, if the backend has a shorter way than `apply_rule`.

        It is not called in compiled code.

        Args:
            rule: A rule of one input that all calls share.
            x: The input; None is returned if it is not an array.
            cotangent: This call's cotangent map, in place of the rule's.
            value: The output, of x's shape and dtype, in place of x.
        """
        return None

    def tied(self, x: Any, function: Callable[..., Any]) -> Any:
        """x, marked as computed from the arrays that a function captures."""
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
        """The transpose of `vs -> linear(at, *vs)`, of vectors like the examples, at values."""
        return self.pull(lambda *vs: linear(at, *vs), examples, values)


class Compiler:
    """The interface to a compiler that traces Python itself (dynamo); by default no-ops."""

    def is_tracing(self) -> bool:
        """Whether the compiler traces the line that calls this."""
        return False

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """fun, whose result becomes a constant of the compiled graph."""
        return fun

    def refuse(self, reason: str) -> None:
        """Breaks the compiled graph here, with this reason."""

    def uncompiled(self, fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`fun(*args, **kwargs)`, run by Python outside of the compiled graph."""
        return fun(*args, **kwargs)


class Programs(Rules):
    """Whole programs: compilers, modules, vmap, kernels. The defaults do nothing."""

    compiler = Compiler()

    def direct_calls(self, of: Any) -> Callable[[Any, Any], Any] | None:
        """A fast path for calls of a custom rule or host function, or None.

        It takes the dynamic and the static arguments, as `Parameters.bound` splits them, and
        returns NotImplemented for a call that it does not cover. It calls a host function's kernel
        directly if the arguments are concrete arrays and no trace, transform or derivative is
        active.
        """
        return None

    def abstract_eval(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        """Traces fun at the shapes and dtypes of xs; does nothing if that is unsafe."""

    compile, vmap = LazyMember("", operator="compile"), LazyMember("", operator="vmap")

    def like_module(self, f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
        """`make(f)`; if f is a module of the framework, as a module that calls it."""
        return make(f)

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        return f(args)

    call_kernel = LazyMember("host", operator="host_function")
    """Calls a host kernel inside the framework's program; its results have no derivative."""

    all_gather = LazyMember("gathering")
    random_key, split_key = LazyMember("arrays"), LazyMember("arrays")

    def as_number(self, x: Any) -> Any:
        """x as a Python number if it is concrete, x itself if it is traced, else None."""
        return self.to_numpy(x).item() if self.is_array(x) and tuple(x.shape) == () else x


class Recomputation(Programs):
    """Chunks and frozen functions."""

    checkpoint = LazyMember("recomputing", operator="checkpoint")
    """`checkpoint(f, options)`: f, which is recomputed when it is differentiated."""

    run_chunks = LazyMember("chunking", operator="chunked")
    """The joined output leaves of `Chunks`, differentiable, and the last carry."""

    weighs_sums = False
    """Whether `sum_chunks` multiplies the terms by their weights itself."""

    def sum_chunks(
        self, chunks: Chunks, weigh: Callable[[Array, Array], Array] | None = None
    ) -> tuple[list[Array], list[Array]]:
        """The sums over chunks of the output leaves, without recomputation, and the carry.

        weigh: If `weighs_sums`: `weigh(w, x)` is a term. The first leaf of each chunk is its
            weight, and the result is the sum of the weights, and the weighted means.
        """
        terms, carry = [], chunks.carry
        for i, pieces in enumerate(self._pieces(chunks)):
            outs, carry = chunks.call(i, i, pieces, chunks.shared, carry)
            terms.append(outs)
        return [sum(column[1:], column[0]) for column in zip(*terms, strict=True)], carry

    def _pieces(self, chunks: Chunks) -> list[list[Array]]:
        """Each chunk's part of every array that is split, then its part of lists."""
        part = lambda x, axis, r: x[
            (slice(None),) * (axis % x.ndim) + (slice(r.start, r.stop, r.step),)
        ]
        return [
            [*[part(x, axis, rows) for x, axis in chunks.splits], *lists]
            for rows, lists in zip(chunks.cut.rows, chunks.lists, strict=True)
        ]

    def frozen_uses(self) -> Any:
        """The state that all uses of one frozen function share."""
        return None

    run_frozen = LazyMember("freezing", operator="frozen")
    """The output leaves of one use, given as `Chunks` with a single chunk."""

    def is_recomputing(self) -> bool:
        return False


class Backend(Recomputation):
    """The whole backend interface."""

    def __reduce__(self) -> Any:
        return backend_of, (self.name,)


class FrameworkBackend(Backend):
    """The base of the PyTorch and JAX backends, with members in submodules of equal names."""

    instances: ClassVar[list[FrameworkBackend]] = []
    on_creation: ClassVar[list[Callable[[FrameworkBackend], None]]] = []

    def __init__(self) -> None:
        self.instances.append(self)
        for notify in self.on_creation:
            notify(self)

    def as_number(self, x: Any) -> Any:
        if self.is_traced(x):
            x = self.stop_gradient(x)
            narrow = x.dtype.itemsize < 4  # sums of small dtypes round or overflow
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

    def __reduce__(self) -> Any:  # pickled by name, so that unpickling gives the same object
        return _operators_of, (self._backend.name, f"{type(self).__module__}:{type(self).__name__}")

    def __repr__(self) -> str:
        return f"<gradtools for {self._backend.name}>"


def _operators_of(backend: str, path: str) -> Any:
    """The `Operators` object of a backend at "module:class"."""
    return _namespace(backend)._api.operators(path)


def backend_of(name: str) -> Any:
    """The backend of this name."""
    return _namespace(name)._api._backend


def _namespace(name: str) -> Any:
    return import_module(f"gradtools.{name}" if name in ("torch", "jax") else name)
