"""The waist, gradtools' backend interface: what a framework must give, and defaults for the rest.

Everything above is written once, on flat lists of arrays. A function handed to the waist, `fun`,
takes the differentiated leaves and returns two lists, `(outs, extras)`: the arrays that are
differentiated, and those that are only handed through.

A backend gives the abstract members: arrays and pytrees, the vjp of a function and a function with
a pullback of its own. All else has a default in terms of these, or is refused by its name. What is
better in a framework's own way, its wing says. `docs/adding_a_backend.md` walks through one.

Gradtools' complex convention holds on this side: a pullback is J^H v. Where a framework's own
convention is another, its wing converts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import compress
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from gradtools.boundary import called, user_facing_methods
from gradtools.errors import GradtoolsError
from gradtools.rules import Entries, Rule, by_key, reverse_only_text, spread

if TYPE_CHECKING:
    from gradtools.arguments.chunks import ChunkOptions, Chunks

Array = Any
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Any)  # so bound, a lambda's own parameter may be anything for a checker
Fun = Callable[..., tuple[list[Array], list[Array]]]
_PUSHING: ContextVar[str | None] = ContextVar("pushing", default=None)
"""The operator that wants forward mode while `linearize` transposes a pullback, for messages."""


@dataclass(slots=True, eq=False, repr=False)
class Evaluation:
    """One evaluation of a function, and its derivative there.

    Attributes:
        outs: The differentiated outputs.
        extras: The outputs that were only handed through.
        pullback: Cotangents of outs (None: zero) to cotangents of the leaves (None: the leaf does
            not reach the outputs). A leaf that only a derivative inside of fun reads, and on which
            that derivative does not depend, counts as one that reaches them: with a zero.
        cut: Takes what the pullback gave. The indices of leaves that a derivative inside of fun
            reads, and whose path is cut after it (detached, no_grad): lost, and not constant. It
            raises for parameters that fun reads by another reference than the leaf.
        checked: Whether None in a pullback's result means what is said above; False where the
            framework gives zeros, or None for other reasons.
        where_lost: Where the path from leaf i to the output is cut, for messages.
        transposed: The pushforward by the transposed pullback, which evaluates fun no second time;
            it may raise `CannotPush`. None where the pullback cannot be transposed.
    """

    outs: list[Array]
    extras: list[Array]
    pullback: Callable[[Sequence[Array | None]], list[Array | None]]
    cut: Callable[[Sequence[Array | None]], list[int]] = lambda cotangents: []
    checked: bool = True
    where_lost: Callable[[int], list[str]] = lambda i: []
    transposed: Callable[[], Callable[[list[Array]], list[Array]] | None] = lambda: None


class CannotPush(Exception):
    """A transposed pullback met an operation whose backward pass has no derivative."""


@dataclass(frozen=True, eq=False, repr=False)
class Staged:
    """A function that was traced before it runs, where the framework can trace (JAX).

    Attributes:
        run: Evaluates what was traced. Call it in place of the function, so that the user's code
            runs once.
        reverse_only: Whether it holds a rule without forward mode.
        cut: As in `Evaluation`.
        jacobian_mode: Which mode takes fewer passes; "auto" if only an evaluation can tell.
        forward_only: Whether it holds a loop that has no reverse mode.
    """

    run: Fun
    reverse_only: bool = False
    jacobian_mode: str = "auto"
    forward_only: bool = False
    cut: Callable[[], list[int]] = list


class Lazily:
    """A member of a backend that stands in another module of its wing, imported at first use.

    So an import of gradtools stays light. A backend without such modules refuses it, by the name
    of the operator that the user called: `lacking`, by default the member's own name. With an
    empty `name` the member is the module itself.
    """

    def __init__(self, room: str, name: str | None = None, *, lacking: str | None = None) -> None:
        self._room, self._name, self._lacking = room, name, lacking

    def __set_name__(self, owner: type, name: str) -> None:
        self._member = name

    def __get__(self, backend: Any, owner: type) -> Any:
        if backend is None:
            return self
        room = backend.room(self._room, self._lacking or self._member)
        name = self._member if self._name is None else self._name
        result = getattr(room, name) if name else room
        return backend.__dict__.setdefault(self._member, result)


# --- what a backend must give ------------------------------------------------------------------


class Arrays(ABC):
    """Arrays and pytrees: the abstract members, and the others in terms of `xp`."""

    name: str  # the module whose `_api` is made of it; of a wing, what follows "gradtools."
    rooms: str | None = None  # the package whose modules hold members

    def room(self, name: str, caller: str) -> Any:
        """A module of a wing, for what a user called."""
        if self.rooms is None:
            raise GradtoolsError(f"{caller}: the backend {self.name!r} does not provide it.")
        return import_module(f"{self.rooms}.{name}")

    @property
    @abstractmethod
    def xp(self) -> Any:
        """A namespace of functions of arrays, by the names of the array-API standard."""

    # Pytrees. None is an empty tree.
    @abstractmethod
    def flatten(self, tree: Any) -> tuple[list[Any], Any]: ...
    @abstractmethod
    def unflatten(self, treedef: Any, leaves: Sequence[Any]) -> Any: ...
    @abstractmethod
    def leaf_paths(self, tree: Any) -> list[str]: ...

    def flatten_arrays(self, tree: Any) -> tuple[list[Any], Any, list[str | None]]:
        """The leaves, the structure, and the kind of each leaf.

        "real" or "complex" for floating and complex arrays, "exact" for integers and booleans,
        None for what is no array.
        """
        leaves, treedef = self.flatten(tree)
        return leaves, treedef, [self._kind(x) if self.is_array(x) else None for x in leaves]

    def _kind(self, x: Array) -> str:
        return "complex" if self.is_complex(x) else "real" if self.is_inexact(x) else "exact"

    def flatten_static(self, tree: Any) -> tuple[list[Any], Any]:
        """The leaves, and the structure as something hashable, in compiled code a constant."""
        return self.flatten(tree)

    def treedef_of_static(self, structure: Any) -> Any:
        return structure

    def static_treedef(self, treedef: Any) -> Any:
        return treedef

    def unflatten_static(self, structure: Any, leaves: Sequence[Any]) -> Any:
        return self.unflatten(structure, leaves)

    def is_traced(self, x: Any) -> bool:
        """Whether x is an array of a transform that is still running."""
        return False

    # Arrays.
    array_type: type | None = None
    """The commonest class of arrays: if `type(x)` is this one, `is_array(x)` need not be called."""

    @abstractmethod
    def is_array(self, x: Any, /) -> bool: ...
    @abstractmethod
    def asarray(self, x: Any, device_of: Array | None = None) -> Array:
        """device_of: An array on whose device x is created; JAX ignores it."""

    @abstractmethod
    def to_numpy(self, x: Array) -> Any: ...
    @abstractmethod
    def stop_gradient(self, x: Array) -> Array: ...

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype)

    def is_inexact(self, x: Array) -> bool:
        return self.dtype_name(x).startswith(("float", "bfloat", "complex"))

    def is_complex(self, x: Array) -> bool:
        return self.dtype_name(x).startswith("complex")

    def as_leaf(self, x: Any) -> Any:
        """An argument of a rule: floats, complex numbers and NumPy's arrays as arrays."""
        return self.asarray(x) if isinstance(x, float | complex) or hasattr(x, "dtype") else x

    def cast(self, x: Any, like: Array | str) -> Array:
        return self.asarray(x).astype(like if isinstance(like, str) else like.dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        return self.asarray(x).real.astype(np.finfo(self.dtype_name(like)).dtype)

    def zeros_like(self, x: Array) -> Array:
        return self.xp.zeros_like(x)

    def aval(self, x: Array) -> Any:
        """The abstract value of x: shape, dtype, and what else its type says; no array."""
        return tuple(x.shape), x.dtype

    def zeros(self, aval: Any, device_of: Array) -> Array:
        """Zeros of this abstract value, on the device of another array."""
        return self.xp.zeros(aval[0], dtype=aval[1])

    def ones_like(self, x: Array) -> Array:
        """Ones with x's shape, dtype and device."""
        return self.xp.ones_like(x)

    def unit_basis(self, x: Array, before: int = 0, after: int = 0) -> Array:
        """The unit vectors of x's shape, with this many zeros before and after them."""
        count = before + x.size + after
        return self.xp.eye(count, x.size, k=-before, dtype=x.dtype).reshape((count, *x.shape))

    def is_known_zero(self, x: Array) -> bool:
        return False

    def is_symbolic_zero(self, x: Any) -> bool:
        """Whether x is the framework's own object for a zero, with a shape and a dtype."""
        return False


class Differentiation(Arrays):
    """One abstract member, the vjp; forward mode and what a rule's maps need follow from it."""

    hvp_mode = "reverse_over_reverse"  # what mode="auto" means for hvp and hessian

    @abstractmethod
    def vjp(
        self, fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool
    ) -> Evaluation:
        """One evaluation, and its pullback.

        groups: The sizes of consecutive groups of leaves, one for each argument, if the caller
            will raise for a group that does not reach the outputs; None if it will not.
        once: The pullback is called once, and may free the graph.
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
        """`jvp` along many tangents, and the outputs of one evaluation.

        Where a kernel has no forward mode, the framework's own alternative takes its place, and
        that is reported once. No graph is kept.
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

    def pull(
        self, fun: Any, xs: Sequence[Array], cts: Any, reached: list[bool] | None = None
    ) -> list[Array]:
        """The pullback at xs of `cts` (None: zero), or of what they give at fun's outputs.

        reached: Is filled, if it is empty, with whether each of xs may reach the outputs.
        """
        result = self.vjp(lambda *a: (list(fun(*a)), []), list(xs), groups=None, once=False)
        grads = result.pullback(cts(result.outs) if callable(cts) else cts)
        if reached == []:
            reached += [g is not None for g in grads]
        return self.filled(grads, xs)

    def push(self, fun: Any, xs: Sequence[Array], dxs: Sequence[Any]) -> list[Array]:
        return self.value_and_push(fun, xs, dxs)[1]

    def value_and_push(
        self, fun: Any, xs: Sequence[Array], dxs: Sequence[Any]
    ) -> tuple[list[Array], list[Array]]:
        """The outputs and their tangents, of one evaluation."""
        outs, _, pushed = self.jvp(lambda *a: (list(fun(*a)), []), list(xs), list(dxs))
        return outs, pushed

    def attempt(self, fun: Callable[..., list[Array]], *xs: Array) -> list[Array]:
        """`fun(*xs)`, which raises at once if a derivative inside of it is missing."""
        return fun(*xs)

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged:
        return Staged(fun)

    def outliving(self, call: Any, outs: Sequence[Array]) -> tuple[Any, Sequence[Any]]:
        """What a pullback keeps of a `Call` and its outputs: shapes in place of traced arrays."""
        return call, outs

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        """`run(native, *args)` as a function of args; a pytree where functions can be."""
        return partial(called, run, native)

    def opened(
        self,
        caller: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
    ) -> Any:
        """If an argument is or holds a module, the call on pytrees of arrays; else None.

        The result is called in place of f, with its `args` in place of the arguments. `effects()`
        gives the arrays that a call changes in the modules, and `settle(extras)` writes them to
        the caller's modules.
        """
        return None

    def attaching(
        self, opened: Any, /, caller: str, again: Callable[[], Any]
    ) -> Callable[..., Any]:
        """`attach(results, select)` of a call that `opened` gave, as `Call.attaching` says."""
        return lambda results, select=None: results

    def part_of(self, tree: Any) -> Any:
        """The tree with the part that is differentiated in the place of each module."""
        return tree

    def restarting(self, fun: Fun, leaves: Sequence[Array], count: int) -> Callable[[], None]:
        """What to call before each of many evaluations: all start from what stood before them."""
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
    """Functions with a derivative of their own. A backend gives `with_pullback` or `apply_rule`."""

    def with_pullback(
        self,
        fun: Callable[..., list[Array]],
        pullback: Callable[[Sequence[Array], Sequence[Array], Entries], Entries],
        xs: Sequence[Array],
    ) -> list[Array]:
        """`fun(*xs)`, whose derivative is `pullback(xs, ys, cotangents)`, at any order.

        Entries of cotangents and of what comes back may be None, a zero. The pullback is made of
        differentiable operations on xs and ys.
        """
        raise NotImplementedError

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        """The rule's outputs, with its derivative; the pullback computes the residuals again."""
        caller = _PUSHING.get()
        if rule.reverse_only and caller is not None:
            raise GradtoolsError(reverse_only_text(caller, rule.name))
        return self.with_pullback(rule.primal, partial(self._pulled, rule), xs)

    def _pulled(self, rule: Rule, xs: Entries, ys: Entries, cts: Entries) -> Entries:
        result = rule.linearized_from(xs, list(ys)) if rule.linearize is None else rule.at(*xs)
        saved = [[*xs, *ys, *result.extras][i] for i in result.saves]
        given = result.cotangent
        if given is not None:
            return given(saved, self.filled(cts, ys) if rule.fills("cotangent") else cts)
        assert result.tangent is not None
        push, moving = result.tangent, [self.is_inexact(x) for x in xs]
        zeros = [self.zeros_like(x) for x, m in zip(xs, moving, strict=True) if m]

        def pushed(*dxs: Array) -> list[Array]:
            return self.filled(push(saved, spread(dxs, moving)), ys)

        return spread(self.pull(pushed, zeros, cts), moving)

    def scaled(self, x: Any, factor: float) -> Array | None:
        """x with its derivative times a number, where there is a shorter way than a rule."""
        return None

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
    """What gradtools asks of a compiler that traces Python itself (dynamo); by default no-ops."""

    def is_tracing(self) -> bool:
        """Whether the compiler traces the line that calls this."""
        return False

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """fun, whose result becomes a constant of the compiled graph."""
        return fun

    def refuse(self, reason: str) -> None:
        """Breaks the compiled graph here, for this reason: Python runs the call."""

    def uncompiled(self, fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`fun(*args, **kwargs)`, run by Python outside of the compiled graph."""
        return fun(*args, **kwargs)


class Programs(Rules):
    """What a framework does with whole programs: compilers, modules, vmap. By default nothing."""

    compiler = Compiler()

    def lets_shapes_pass(self) -> bool:
        """Whether the user switched off the framework's check of a rule's cotangent shapes."""
        return False

    def direct_calls(self, of: Any) -> Callable[[Any, Any], Any] | None:
        """What calls of a custom rule or host function are tried by first, or None.

        It takes the arguments and the static ones, as `Parameters.bound` parts them, and returns
        NotImplemented for a call that it does not cover. It calls a host function's kernel at once
        where the arguments are arrays with values and nothing traces, transforms or differentiates
        the call.
        """
        return None

    def abstract_eval(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        """Traces fun at the shapes and dtypes of xs; does nothing where that is unsafe."""

    def value_pairs(
        self, fun: Any, xs: Sequence[Array], ys: Sequence[Array], twin: Any = None
    ) -> list[tuple[Any, Any]]:
        """`fun(*xs)` and ys in pairs of NumPy arrays; empty where they are not both known.

        They are not in a trace, nor where fun draws random numbers or calls a host kernel.

        twin: The function that returned ys; in a trace both may run at made-up numbers.
        """
        return []

    compile, vmap = Lazily("", lacking="compile"), Lazily("", lacking="vmap")

    def like_module(self, f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
        """`make(f)`, and where f is a module of the framework a module that calls it."""
        return make(f)

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        return f(args)

    call_kernel = Lazily("host", lacking="host_function")
    """The results of a host kernel, inside the framework's program; without a derivative."""

    all_gather = Lazily("gathering")
    sum_over_ranks, per_rank = Lazily("gathering"), Lazily("gathering")
    random_key, split_key = Lazily("arrays"), Lazily("arrays")

    def as_number(self, x: Any) -> Any:
        """A Python number where x holds a known one, x itself where it is traced, else None."""
        return self.to_numpy(x).item() if self.is_array(x) and tuple(x.shape) == () else x


class Recomputation(Programs):
    """Chunks and frozen functions: by default a loop, each chunk computed again; f as it is."""

    def checkpoint(self, f: Any, options: ChunkOptions) -> Callable[..., Any]:
        """f, which is computed again where its derivative is taken."""

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = self.flatten((args, kwargs))
            out_def: list[Any] = []

            def fun(leaves: list[Any]) -> list[Array]:
                args, kwargs = self.unflatten(treedef, leaves)
                out, out_def[:] = (result := self.flatten(f(*args, **kwargs)))[0], result[1:]
                return out

            outs = self._again(fun, leaves)
            return self.unflatten(out_def[0], outs)

        return checkpointed

    def _again(self, fun: Callable[[list[Any]], list[Array]], leaves: list[Any]) -> list[Array]:
        """`fun(leaves)`, which is computed again for derivatives to the arrays among them."""
        moving = [self.is_array(x) and self.is_inexact(x) for x in leaves]

        def of_arrays(*xs: Array) -> list[Array]:
            new = iter(xs)
            return fun([next(new) if m else x for x, m in zip(leaves, moving, strict=True)])

        pull = lambda xs, ys, cts: self.pull(of_arrays, xs, cts)
        return self.with_pullback(of_arrays, pull, [*compress(leaves, moving)])

    def run_chunks(self, chunks: Chunks) -> tuple[list[Array], list[Array]]:
        """The joined output leaves, differentiable, and the last carry."""
        rows, carry = [], chunks.carry
        for i, pieces in enumerate(self._pieces(chunks)):
            row, carry = self._chunk(chunks, i, pieces, carry)
            rows.append(row)
        axes = chunks.outputs.axes
        if axes is None:
            return [x for row in rows for x in row], carry
        shapes = [[x.shape for x in row] for row in rows]
        chunks.check_rows([*zip(chunks.cut.sizes, shapes, strict=True)])
        columns = zip(zip(*rows, strict=True), axes, strict=True)
        joined = [self.xp.concatenate(column, axis=axis) for column, axis in columns]
        if chunks.cut.interleaved:
            order = np.argsort([row for rows in chunks.cut.rows for row in rows])
            pairs = zip(joined, axes, strict=True)
            joined = [y[(slice(None),) * (axis % y.ndim) + (order,)] for y, axis in pairs]
        return joined, carry

    def _chunk(
        self, chunks: Chunks, i: int, pieces: list[Array], carry: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        after: list[Array] = []
        count = len(pieces)

        def fun(leaves: list[Any]) -> list[Array]:
            outs, after[:] = chunks.call(i, i, leaves[:count], leaves[count:], carry)
            return outs

        return self._again(fun, [*pieces, *chunks.shared]), list(after)

    weighs_sums = False
    """Whether `sum_chunks` takes terms without their weight, and returns means."""

    def sum_chunks(
        self, chunks: Chunks, weigh: Callable[[Array, Array], Array] | None = None
    ) -> tuple[list[Array], list[Array]]:
        """The sums over chunks of the output leaves, each chunk's graph as it is, and the carry.

        weigh: Where the backend weighs sums, `weigh(w, x)` is a term. The first leaf of each chunk
            is its weight, and the result is the sum of the weights, and the weighted means.
        """
        result, carry = [], chunks.carry
        for i, pieces in enumerate(self._pieces(chunks)):
            outs, carry = chunks.call(i, i, pieces, chunks.shared, carry)
            result.append(outs)
        return [sum(column[1:], column[0]) for column in zip(*result, strict=True)], carry

    def _pieces(self, chunks: Chunks) -> list[list[Array]]:
        """Each chunk's part of every array that is split, then its part of lists."""
        part = lambda x, axis, r: x[
            (slice(None),) * (axis % x.ndim) + (slice(r.start, r.stop, r.step),)
        ]
        return [
            [*[part(x, axis, rows) for x, axis in chunks.splits], *lists]
            for rows, lists in zip(chunks.cut.rows, chunks.lists, strict=True)
        ]

    carry_series = Lazily("taylor", lacking="jet")
    tiles = Lazily("tiling", "", lacking="pairwise_reduce")
    """A wing's room for reductions over all pairs of rows: `sweep`, `fold` and what they need."""

    def frozen_uses(self, budget: int | None) -> Any:
        """What the uses of one frozen function share."""
        return None

    def run_frozen(self, whole: Chunks, uses: Any) -> list[Array]:
        """The output leaves of one use, a `chunks.Chunks` of one chunk that shares all."""
        return whole.call(0, 0, [], whole.shared, [])[0]

    def is_recomputing(self) -> bool:
        return False


class Backend(Recomputation):
    """All that a wing may provide."""

    never_changes = True  # for a walk over what a function holds

    def __reduce__(self) -> Any:
        return backend_of, (self.name,)


class Wing(Backend):
    """What both wings have in rooms of the same names."""

    def as_number(self, x: Any) -> Any:
        if self.is_traced(x):
            x = self.stop_gradient(x)
            narrow = x.dtype.itemsize < 4  # sums of small dtypes round or overflow
            return None if tuple(x.shape) else self.cast(x, "float32") if narrow else x
        if getattr(x, "shape", None) == () and hasattr(x, "item"):
            return x.item()
        return x if isinstance(x, (int, float)) else None

    run_chunks, sum_chunks = Lazily("chunking"), Lazily("chunking")
    run_frozen = Lazily("freezing")


class Operators:
    """Public operators, bound to one backend."""

    never_changes = True  # what f holds of them is no state that a second run of f would meet

    def __init_subclass__(cls) -> None:
        user_facing_methods(cls)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __reduce__(self) -> Any:  # what is pickled by name is the same object again
        return _room_of, (self._backend.name, f"{type(self).__module__}:{type(self).__name__}")

    def __repr__(self) -> str:
        return f"<gradtools for {self._backend.name}>"


def _room_of(name: str, room: str) -> Any:
    """The public operators of a wing that one room holds."""
    return _home(name)._api.room(room)


def backend_of(name: str) -> Any:
    """A wing's backend."""
    return _home(name)._api._backend


def _home(name: str) -> Any:
    return import_module(f"gradtools.{name}" if name in ("torch", "jax") else name)
