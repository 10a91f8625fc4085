"""`checkpoint`, and what else computes a function again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from gradtools.arguments.wording import with_article
from gradtools.backend import Array
from gradtools.errors import GradtoolsError, NotImplementedRefusal
from gradtools.integrations import integration
from gradtools.jax import jaxprs, reachability, trees
from gradtools.jax._upstream import ClosedJaxpr, Primitive, constants_of
from gradtools.jax.compiled_once import compiled, own
from gradtools.jax.known_errors import NO_EFFECTS, flax_explained, says

_NEW_REFS = ("new_ref", "ref", "mutable_array", "empty_ref")


def stateful(caller: str, f: Callable[..., Any], args: Any) -> Any:
    """What of f and its arguments holds state of flax.nnx; None where there are no such modules."""
    nnx = integration("flax.nnx")
    return None if nnx is None else nnx.stateful(caller, f, args)


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
            i: own(x)
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
        result = compiled(f, closed, rematerialized)(closed.consts, list(xs.values()))
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
    return ClosedJaxpr(closed.jaxpr, [own(c) for c in constants_of(closed)])


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
        with flax_explained(caller):
            yield
    except NotImplementedError as error:
        if not says(error, NO_EFFECTS):
            raise
        raise GradtoolsError(
            f"{caller}: f holds an operation with effects (jax.experimental.io_callback, or "
            "jax.lax.dce_sink), which jax.checkpoint does not compute again. Use "
            "jax.pure_callback, whose results are kept, or jax.debug.callback for what is only "
            "looked at; in chunked also keep_graphs=n, for all "
            f"chunks to be kept. JAX says: {error}"
        ) from error
    except KeyError as error:
        if not (error.args and isinstance(error.args[0], Primitive)):
            raise
        raise NotImplementedRefusal(
            f"{caller}: jax.experimental.jet has no rule for {error.args[0].name}, which {caller} "
            "uses (neither has it one for jax.checkpoint, nor for scan). gradtools' jet has."
        ) from error
    except jax.errors.UnexpectedTracerError as error:
        raise GradtoolsError(
            f"{caller}: a value of f is used outside of the trace that made it: f keeps it in "
            "Python state, or the fwd or bwd of a jax.custom_vjp in f closes over it. Return it, "
            f"or pass it through the rule's arguments and residuals. JAX says: {error}"
        ) from error
