"""flax.nnx modules inside of loops and rules: split, carried and merged.

A module of flax.nnx changes itself when it is called: dropout counts its draws, batch
normalisation its statistics. flax refuses that inside of a trace that the module does not belong
to, such as the body of a scan. So a copy of the module is made there from its parameters, which
are constants of the body as they would be without, and from all else that it holds, which goes
from chunk to chunk as a carry does and is not differentiated; afterwards the module itself is
given what its copy came to.

Modules are looked for in f (itself, the owner of a method, `partial`, closures, the globals that
it names, containers of these) and in its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.function_variables import cells_of, globals_of, parts_of, with_parts
from gradtools.jax import jaxprs, reachability, trees
from gradtools.jax._upstream import ClosedJaxpr, with_variables
from gradtools.jax.jaxpr_equality import derived
from gradtools.jax.known_errors import NO_EFFECTS, says

_NEW_REFS = ("new_ref", "ref", "mutable_array", "empty_ref")


def stateful(caller: str, f: Callable[..., Any], args: Any) -> Stateful | None:
    """What of f and its arguments holds state; None where there are no such modules."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    own, given = _modules(nnx, f), _modules(nnx, args)
    return Stateful(caller, nnx, f, own, given) if own or given else None


def rematerialized(f: Callable[..., Any], prevent_cse: bool = True) -> Callable[..., Any]:
    """`jax.checkpoint(f)` which keeps what the host gave to callbacks and does not ask again.

    All else that is computed again is the same program over the same arrays, so it is the same.
    """
    return jax.checkpoint(f, prevent_cse=prevent_cse, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == "pure_callback"


def checkpointed(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """f, computed again in the backward pass; its modules stand afterwards as after one call."""
    if not reachability.within_a_trace():
        return f(*args, **kwargs)  # nothing differentiates it
    held = stateful("checkpoint", f, (args, kwargs))
    if held is None:
        return _run_again(f, args, kwargs)

    def run(state: list[Array], args: Any, kwargs: Any) -> Any:
        held.now = [jax.lax.stop_gradient(x) for x in state]
        return held(*args, **kwargs), held.after

    out, after = _run_again(run, (held.leaves, args, kwargs), {})
    held.write(after)
    return out


def _run_again(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """f once, computed again in the backward pass from arrays that nobody writes to."""
    with explained_again("checkpoint"):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        # what else a module holds, such as functions and strings, is no input of a program
        xs = {
            i: _own(x)
            for i, x in enumerate(leaves)
            if isinstance(x, bool | int | float | complex) or hasattr(x, "dtype")
        }

        def fresh(*xs_now: Any) -> Any:  # JAX keeps traces of a function, stale ones as well
            moving = dict(zip(xs, xs_now, strict=True))
            full = [moving.get(i, x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(treedef, full)
            outs, out_def[:] = _parted(f(*args, **kwargs))
            return outs

        out_def: list[Any] = []
        closed, shapes = jax.make_jaxpr(fresh, return_shape=True)(*xs.values())
        closed = owning(closed)
        refuse_to_repeat("checkpoint", closed)
        result = derived(closed, rematerialized)(closed.consts, list(xs.values()))
        outs = jax.tree.unflatten(jax.tree.structure(shapes), result)
        treedef, texts = out_def
        full = [y if text is None else text for y, text in zip(outs, texts, strict=True)]
        return trees.unflatten(treedef, full)


def _parted(out: Any) -> tuple[list[Any], tuple[Any, list[str | None]]]:
    """The arrays of an output; its structure, and at each leaf the text that stands there."""
    leaves, treedef = trees.flatten(out)
    for x, path in zip(leaves, trees.leaf_paths(out), strict=True):
        if not (hasattr(x, "dtype") or isinstance(x, bool | int | float | complex | str)):
            came = with_article(type(x).__name__)
            raise GradtoolsError(f"checkpoint: f returned {came} at output{path}; expected arrays.")
    texts = [x if isinstance(x, str) else None for x in leaves]
    arrays = [None if isinstance(x, str) else x for x in leaves]
    return arrays, (treedef, texts)


def owning(closed: Any) -> Any:
    """A program with arrays of its own in the place of NumPy's that it captured.

    They are the caller's, who may write to them before the backward pass.
    """
    return ClosedJaxpr(closed.jaxpr, [_own(c) for c in closed.consts])


def _own(x: Any) -> Any:
    return jnp.array(x) if isinstance(x, np.ndarray) else x


def refuse_to_repeat(caller: str, closed: Any) -> None:
    """Raises if a program holds what JAX 0.10 cannot repeat.

    `jax.checkpoint` dies of a mutable array that is made inside of it with a bare KeyError, and
    the value of a scan over one is wrong in silence when reverse mode runs it.
    """
    if jaxprs.uses_primitive(closed, lambda eqn: eqn.primitive.name in _NEW_REFS):
        raise GradtoolsError(
            f"{caller}: f makes a mutable array (jax.new_ref), which JAX does not differentiate in "
            "what is repeated. Write x = x.at[i].set(y) instead."
        )


@contextmanager
def explained_again(caller: str) -> Iterator[None]:
    """What JAX and flax cannot compute again, in our words."""
    try:
        with explained(caller):
            yield
    except NotImplementedError as error:
        if not says(error, NO_EFFECTS):
            raise
        raise GradtoolsError(
            f"{caller}: f holds an operation with effects (jax.experimental.io_callback, or "
            "jax.lax.dce_sink), which jax.checkpoint does not compute again. Use "
            "jax.pure_callback, whose results are kept, or jax.debug.callback for what is only "
            "looked at; in chunked also retain=n, for all "
            f"chunks to be kept. JAX says: {error}"
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise GradtoolsError(
            f"{caller}: a value of f is used outside of the trace that made it: f keeps it in "
            "Python state, or the fwd or bwd of a jax.custom_vjp in f closes over it. Return it, "
            f"or pass it through the rule's arguments and residuals. JAX says: {error}"
        ) from error


class Stateful:
    """f with its modules' state as flat arrays, before and after a call.

    Attributes:
        leaves: The state as it stands, as the caller's modules hold it.
        now: What the next call starts from.
        after: What the last call came to.
        changed: Which leaves any call has changed.
    """

    def __init__(self, caller: str, nnx: Any, f: Any, own: list[Any], given: list[Any]) -> None:
        self.caller, self.nnx, self.f = caller, nnx, f
        self._own, self._given = tuple(own), tuple(given)
        self._graph, self._params, rest = nnx.split(self._own, nnx.Param, ...)
        states = rest, self._state(self._given)
        self._known = [set(nnx.to_flat_state(s).paths) for s in states]
        self.leaves, self._treedef = jax.tree.flatten(states)
        self.now, self.after = list(self.leaves), list(self.leaves)
        self.changed = [False] * len(self.leaves)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """f with copies of its modules, which start at `now`."""
        rest, of_given = jax.tree.unflatten(self._treedef, self.now)
        own = self.nnx.merge(self._graph, self._params, rest, copy=True)
        given = tuple(_modules(self.nnx, (args, kwargs)))
        copies = {id(old): new for old, new in zip(self._own, own, strict=True)}
        with self.explained():
            self.nnx.update(given, of_given)
            out = _Copies(copies).of(self.f)(*args, **kwargs)
        result = self._kept(self._state(own), 0), self._kept(self._state(given), 1)
        self.after = jax.tree.leaves(result)
        pairs = zip(self.changed, self.after, self.now, strict=True)
        self.changed = [c or new is not old for c, new, old in pairs]
        return out

    def write(self, leaves: Sequence[Array]) -> None:
        if not any(self.changed):
            return
        numbered = jax.tree.unflatten(self._treedef, list(range(len(leaves))))
        with self.explained():
            for modules, state in zip((self._own, self._given), numbered, strict=True):
                flat = self.nnx.to_flat_state(state)
                new = [
                    (path, variable.replace(leaves[k]))
                    for path, variable in flat
                    if self.changed[k := jax.tree.leaves(variable)[0]]
                ]
                self.nnx.update(modules, self.nnx.from_flat_state(new))

    def _state(self, modules: Any) -> Any:
        return self.nnx.state(modules, self.nnx.Not(self.nnx.Param))

    def _kept(self, state: Any, which: int) -> Any:
        """Without what a call added, as intermediate values: it has no place in the carry."""
        flat = self.nnx.to_flat_state(state)
        return self.nnx.from_flat_state([(p, v) for p, v in flat if p in self._known[which]])

    @contextmanager
    def explained(self) -> Iterator[None]:
        with explained(self.caller):
            yield


@contextmanager
def explained(caller: str) -> Iterator[None]:
    """flax's refusal to change a module inside of another trace, in our words."""
    errors = sys.modules.get("flax.errors")
    try:
        yield
    except Exception as error:
        if errors is None or not isinstance(error, errors.TraceContextError):
            raise
        raise GradtoolsError(
            f"{caller}: the function changes a flax.nnx module that belongs to another trace "
            f"(flax.errors.TraceContextError: {str(error).partition(' (')[0]}). Pass the module "
            "through flax's own transforms (nnx.jit, nnx.grad) or as an argument, or use "
            "gt.functionalize and hand its state on."
        ) from error


def _modules(nnx: Any, x: Any) -> list[Any]:
    """The nnx modules in a function or a container, each once."""
    return held_in(x, (nnx.Pytree, nnx.Variable))


def held_in(x: Any, kinds: tuple[type, ...]) -> list[Any]:
    """What of these classes a function or a container holds, each once."""
    result: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [x]
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, kinds):
            result[id(x)] = x
        else:
            todo += _parts(x)
    return list(result.values())


def _parts(x: Any) -> list[Any]:
    if not isinstance(x, FunctionType):
        return parts_of(x)
    if _is_a_library(x):
        return []
    wrapped = [x.__wrapped__] if hasattr(x, "__wrapped__") else []
    return [*cells_of(x).values(), *globals_of(x).values(), *(x.__defaults__ or ()), *wrapped]


def _is_a_library(f: FunctionType) -> bool:
    return (f.__module__ or "").partition(".")[0] in ("jax", "flax")


class _Copies:
    def __init__(self, copies: dict[int, Any]) -> None:
        self.made, self.open = dict(copies), set[int]()

    def of(self, x: Any) -> Any:
        if id(x) in self.made:
            return self.made[id(x)]
        if id(x) in self.open:  # a function that uses itself
            return x
        self.open.add(id(x))
        new = self._function(x) if isinstance(x, FunctionType) else with_parts(x, self.of)
        self.open.discard(id(x))
        return new

    def _function(self, f: FunctionType) -> Any:
        """The function over variables of its own, if anything in it is replaced."""
        if _is_a_library(f):
            return f
        cells, named = self._replaced(cells_of(f)), self._replaced(globals_of(f))
        defaults = self.of(f.__defaults__)
        same = not cells and not named and defaults is f.__defaults__
        return f if same else with_variables(f, cells, named, defaults)

    def _replaced(self, held: dict[str, Any]) -> dict[str, Any]:
        """What of these has a copy, or holds what has one."""
        return {name: new for name, x in held.items() if (new := self.of(x)) is not x}
