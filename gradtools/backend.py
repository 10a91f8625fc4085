"""The narrow waist: what a framework must be able to do.

Everything above is written once, on flat lists of arrays. A function handed to the waist, `fun`,
takes the differentiated leaves and returns two lists, `(outs, extras)`: the arrays that are
differentiated, and those that are only handed through. A third backend is one more folder with
this Protocol in it.

Gradtools' complex convention holds on this side: a pullback is J^H v. Where a framework's own
convention is another, its wing converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from gradtools.chunking import Options
    from gradtools.host import Kernel, KernelCall, Results
    from gradtools.rules import Rule
    from gradtools.seeing.graph import Graph
    from gradtools.seeing.passes import Differentiated, Live
    from gradtools.seeing.program import Program
    from gradtools.seeing.recording import Recording, Run, Vanished
    from gradtools.seeing.training import Held, Optimised
    from gradtools.tiled import Sweep

Array = Any
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Any)  # so bound, a lambda's own parameter may be anything for a checker
Fun = Callable[..., tuple[list[Array], list[Array]]]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a function, and its derivative there.

    Attributes:
        outs: The differentiated outputs.
        extras: The outputs that were only handed through.
        pullback: Cotangents of outs (None: zero) to cotangents of the leaves (None: not reached).
            A leaf that reaches a derivative taken inside, which is constant, is reached.
        cut: Of what a pullback gave, the leaves that reach a derivative taken inside, and whose
            path is cut after it: these are no constants.
        checked: Whether None in a pullback's result can be relied on.
        where_lost: Where the path from leaf i to the output is cut, for messages.
    """

    outs: list[Array]
    extras: list[Array]
    pullback: Callable[[Sequence[Array | None]], list[Array | None]]
    cut: Callable[[Sequence[Array | None]], list[int]] = lambda cotangents: []
    checked: bool = True
    where_lost: Callable[[int], list[str]] = lambda i: []


@dataclass(frozen=True)
class Staged:
    """A function that was looked at before it runs, where the framework can do that.

    Attributes:
        run: Evaluates it; with `run` in its place the user's function runs once.
        reverse_only: Whether it holds something that forward mode cannot enter.
        cut: As in `Evaluation`.
        jacobian_mode: Which mode takes fewer passes.
    """

    run: Fun
    reverse_only: bool = False
    jacobian_mode: str = "reverse"
    cut: Callable[[], list[int]] = list


class Backend(Protocol):
    """What a wing provides."""

    name: str
    hvp_mode: str  # what mode="auto" means for hvp and hessian

    @property
    def xp(self) -> Any:
        """The array-API namespace."""

    @property
    def accumulation(self) -> Any:
        """The wing's room for what writes."""

    # Pytrees. None is an empty tree.
    def flatten(self, tree: Any) -> tuple[list[Any], Any]: ...
    def unflatten(self, treedef: Any, leaves: Sequence[Any]) -> Any: ...
    def leaf_paths(self, tree: Any) -> list[str]: ...
    def sketch(self, tree: Any) -> tuple[list[Any], Any]:
        """The leaves, and the structure as something hashable, in compiled code a constant."""

    def from_sketch(self, structure: Any) -> Any: ...
    def sketch_of(self, treedef: Any) -> Any: ...
    def draw(self, structure: Any, leaves: Sequence[Any]) -> Any: ...

    # Arrays.
    def is_array(self, x: Any) -> bool: ...
    def is_inexact(self, x: Array) -> bool: ...
    def is_complex(self, x: Array) -> bool: ...
    def dtype_name(self, x: Array) -> str: ...
    def asarray(self, x: Any, beside: Array | None = None) -> Array:
        """beside: Where to make it, other than by default; JAX's new arrays go with any."""
        ...

    def as_leaf(self, x: Any) -> Any:
        """An argument of a rule that is no array, as an array where it is to be one."""
        ...

    def cast(self, x: Any, like: Array | str) -> Array: ...
    def real_scalar(self, x: Any, like: Array) -> Array: ...
    def zeros_like(self, x: Array) -> Array: ...
    def look(self, x: Array) -> Any:
        """What x looks like: shape, dtype, and what else its type says; no array."""

    def zeros(self, look: Any, beside: Array) -> Array:
        """Zeros that look so, on the device of the array beside them."""

    def ones_like(self, x: Array) -> Array:
        """Ones with x's shape, dtype and device."""
        ...

    def unit_basis(self, x: Array) -> Array: ...
    def is_known_zero(self, x: Array) -> bool: ...
    def is_symbolic_zero(self, x: Any) -> bool:
        """Whether x is the framework's own object for a zero, with a shape and a dtype."""
        ...

    # Derivatives.
    def vjp(
        self, fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool
    ) -> Evaluation:
        """One evaluation, and its pullback.

        groups: Sizes of the groups of leaves of which it is asked whether they reach the output.
        once: The pullback is called once, and may free what it needs.
        """
        ...

    def jvp(
        self, fun: Fun, leaves: list[Array], tangents: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]: ...
    def jvps(
        self, fun: Fun, leaves: list[Array], many: Sequence[list[Array]]
    ) -> tuple[list[Array], list[Array], list[list[Array]]]:
        """`jvp` along many tangents, and the outputs of one evaluation.

        Where a kernel has no forward mode, the framework's own alternative takes its place, and
        that is said once. No graph is kept.
        """
        ...

    def linearize(
        self, fun: Fun, leaves: list[Array]
    ) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]: ...
    def direct_calls(self, of: Any) -> Callable[[tuple[Any, ...]], Any] | None:
        """A shorter way through the commonest calls of a custom rule, where there is one.

        It takes the positional arguments, and gives NotImplemented for what is not of these.
        """
        ...

    def sketch_values(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        """Runs fun on what looks like xs, without computing; not at all where that is unsafe."""
        ...

    def outliving(self, call: Any, outs: Sequence[Array]) -> tuple[Any, Sequence[Any]]:
        """A `Call` and its outputs as a pullback remembers them: without traced arrays."""
        ...

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        """`run(native, *args)` as a function of args; a pytree where functions can be."""
        ...

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged: ...
    def constant(self, x: Array, message: str, *sources: Any) -> Array: ...
    def compiling(self) -> bool: ...
    def apply_rule_by_key(self, key: str, *xs: Array) -> list[Array]: ...
    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]: ...
    def transpose(
        self,
        rule: Rule,
        which: str,
        linear: Any,
        at: list[Array],
        examples: list[Array],
        values: list[Array],
    ) -> list[Array]: ...
    def pull(self, fun: Any, xs: Sequence[Array], cts: Any) -> list[Array]:
        """The pullback at xs of `cts` (None: zero), or of what they give at fun's outputs."""
        ...

    def push(self, fun: Any, xs: Sequence[Array], dxs: Sequence[Any]) -> list[Array]: ...
    def value_and_push(
        self, fun: Any, xs: Sequence[Array], dxs: Sequence[Any]
    ) -> tuple[list[Array], list[Array]]:
        """The outputs and their tangents, of one evaluation."""
        ...

    def attempt(self, fun: Callable[..., list[Array]], *xs: Array) -> list[Array]: ...
    def stop_gradient(self, x: Array) -> Array: ...
    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any: ...
    def call_kernel(self, call: KernelCall, xs: Sequence[Array]) -> list[Array]:
        """The results of a host kernel, inside the framework's program; without a derivative."""
        ...

    def call_now(self, kernel: Kernel, args: Sequence[Any]) -> tuple[Results, list[Array]] | None:
        """The same where nothing but arrays with values go in, and nothing follows what is done.

        None where anything does: a trace, a transform, a mode, autograd.
        """
        ...

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]: ...
    def refuse_to_compile(self, reason: str) -> None: ...

    # The framework's own transforms.
    def vmap(self, f: Any, in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]: ...
    def map_batches(self, f: Any, batch: list[Array], chunk_size: int | None) -> list[Array]: ...
    def checkpoint(self, f: Any, options: Options) -> Callable[..., Any]: ...
    def opened(
        self,
        asked: str,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Sequence[int],
    ) -> Any:
        """The call as one of pytrees of arrays, if an argument is or holds a module; else None.

        Its `args` take the arguments' place, and it f's; `effects()` are arrays that a call hands
        out besides f's results, and `settle(extras)` writes them to the caller's modules.
        """

    def part_of(self, tree: Any) -> Any:
        """The tree with the part that is differentiated in the place of each module."""

    def like_module(self, f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
        """`make(f)`, and where f is a module of the framework a module that calls it."""
        ...

    # Chunks.
    def run_chunks(self, chunks: Any) -> tuple[list[Array], list[Array]]:
        """The joined output leaves of a `chunking.Chunks`, differentiable, and the last carry."""
        ...

    def sum_chunks(self, chunks: Any) -> list[Array]:
        """The sums over chunks of the output leaves, each chunk's graph as it is."""
        ...

    def uncompiled(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fun(*args, **kwargs)`, that the framework's compiler does not look into."""
        ...

    def frozen_uses(self, budget: int | None) -> Any:
        """What the uses of one frozen function share."""
        ...

    def run_frozen(self, whole: Any, uses: Any) -> list[Array]:
        """The output leaves of one use, a `chunking.Chunks` of one chunk that shares all."""
        ...

    # Tiles.
    def explicit(
        self, asked: str, fun: Any, own: Sequence[Any], xs: Sequence[Array], sides: Sequence[Any]
    ) -> tuple[Callable[[list[Array]], Any], list[Array]]:
        """A function of a tile and of what it closes over, and that.

        fun: Of a list of arrays, those of a tile.
        own: The user's other functions, which must close over no array of a running trace.
        sides: The length of each array's first axis (None: as it is), for each kind of tile.
        """
        ...

    def sweep(self, sweep: Sweep, xs: Sequence[Array]) -> list[list[Array]]:
        """The merged states of all tiles, group by group; blocks of rows and columns joined."""
        ...

    def fold(self, step: Any, state: list[Array], xs: Sequence[Array], count: int) -> list[Array]:
        """`state = step(state, block)` over so many blocks of the arrays' first axis."""
        ...

    def sharded_like(self, x: Array, other: Array) -> Array:
        """x, over a mesh of devices as another array of its shape, if that is over one."""
        ...

    def tile_bytes(self, fun: Any, xs: Sequence[Array], sides: Sequence[int | None]) -> int:
        """The peak of `fun` at arrays like xs, with another length of the first axis or None."""
        ...

    def is_replaying(self) -> bool: ...
    def gather(self, x: Any, axis_name: Any, group: Any) -> Any: ...
    def compile(self, f: Any, **options: Any) -> Callable[..., Any]: ...

    # Seeing.
    def record(self, run: Run, leaves: Sequence[Any], names: Sequence[str]) -> Recording:
        """One run of a function of flat leaves, as a graph. Its effects are undone."""
        ...

    def vanishing(
        self, run: Run, leaves: Sequence[Any], index: int, held: Sequence[Any] = ()
    ) -> list[Vanished] | None:
        """Where the cotangent of a connected leaf becomes zero; None if its gradient is not zero.

        The cotangents of the inexact outputs are random, that of a single number is one.
        """
        ...

    def repeatable(self, asked: str, f: Any) -> Any:
        """f, which leaves the modules that it holds as they are, where the wing sees to that."""

    def is_model(self, x: Any) -> bool:
        """Whether x is a module of a library."""
        ...

    def model_of(self, f: Any) -> Any:
        """The model that f is, or holds if the wing looks for one; None if there is none."""

    def held(self, asked: str, model: Any) -> list[Held]:
        """The arrays of a model, or of a tree of models and arrays."""

    def optimised(self, asked: str, optimizer: Any, model: Any, held: Sequence[Held]) -> Optimised:
        """What an optimiser changes."""

    def lifted(
        self, asked: str, f: Any, args: Sequence[Any], kwargs: dict[str, Any], arrays: list[Any]
    ) -> Callable[[list[Any]], Any] | None:
        """`f(*args, **kwargs)` as a function of arrays that f reads from outside.

        None where the wing tells by a recording what is read.
        """

    def watchable(self) -> bool:
        """Whether `record` may be called here: not inside a transform that it cannot see into."""
        ...

    def rerun(self, run: Run, leaves: Sequence[Any]) -> Sequence[Any]:
        """`run(leaves)` without a graph, from the state of now, which is put back afterwards."""
        ...

    def gradient_graph(self, asked: Differentiated | Live) -> Graph:
        """The passes of a program as one graph, its effects undone; or what is held of results."""
        ...

    def formula_graph(self, program: Program) -> Graph:
        """One run of a program, forward only, in the vocabulary of `formula/operations.py`.

        ``graph.inputs`` are the program's leaves. What it captures is held by a `Recorded`. What
        has no word in the vocabulary keeps its native name. Its effects are undone.
        """
        ...

    def trying(self, program: Program, wide: bool) -> AbstractContextManager[Any]:
        """Inside, f may run as if it had never run: what it changes is undone at the end.

        wide: Arrays of 64 bits may be made, and what f holds is read in float64 and complex128.
        """
        ...

    def measure(self, f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What one call costs, a `seeing.measures.Measurement`. Its effects are undone."""
        ...

    # Models and writing.
    def functionalize(
        self, module: Any, *, variables: Any, train: bool | None, rng_names: tuple[str, ...]
    ) -> tuple[Callable[..., Any], Any, Any]: ...
    def to_numpy(self, x: Array) -> Any: ...
    def key(self, seed: int) -> Array: ...
    def split(self, key: Array, n: int = 2) -> Array: ...
    def fold_in(self, key: Array, index: Any) -> Array:
        """The key of one of many, by an index that may be traced."""
        ...


class Operators:
    """Public operators, bound to one backend."""

    never_changes = True  # what f holds of them is no state that a second run of f would meet

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __reduce__(self) -> Any:  # what is pickled by name is the same object again
        return _room_of, (self._backend.name, f"{type(self).__module__}:{type(self).__name__}")

    def __repr__(self) -> str:
        return f"<gradtools for {self._backend.name}>"


def _room_of(name: str, room: str) -> Any:
    """The public operators of a wing that one room holds."""
    return import_module(f"gradtools.{name}")._api.room(room)


def backend_of(name: str) -> Any:
    """A wing's backend."""
    return import_module(f"gradtools.{name}")._api._backend
