"""`checkpoint`: a function is recomputed in the backward pass (rematerialization)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.integrations import integration
from gradtools.jax import jaxprs, reachability, trees
from gradtools.jax.compiled_once import compiled
from gradtools.jax.jaxprs import own
from gradtools.jax.known_errors import flax_explained


def stateful(caller: str, f: Callable[..., Any], args: Any) -> Any:
    """f with the state of the flax.nnx modules in it and in its arguments; None without any."""
    nnx = integration("flax.nnx")
    return None if nnx is None else nnx.stateful(caller, f, args)


def rematerialized(f: Callable[..., Any], prevent_cse: bool = True) -> Callable[..., Any]:
    """`jax.checkpoint(f)` that saves the results of host callbacks instead of repeating the calls.

    Everything else is recomputed by the same program from the same arrays, with equal results.
    """
    return jax.checkpoint(f, prevent_cse=prevent_cse, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == "pure_callback"


def checkpointed(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """f(*args, **kwargs), recomputed in the backward pass; the modules' state changes once."""
    if not reachability.within_a_trace():
        return f(*args, **kwargs)  # nothing differentiates it
    modules = stateful("checkpoint", f, (args, kwargs))
    if modules is None:
        return _recomputed(f, args, kwargs)

    def run(state: list[Array], args: Any, kwargs: Any) -> Any:
        modules.now = [jax.lax.stop_gradient(x) for x in state]
        return modules(*args, **kwargs), modules.after

    out, after = _recomputed(run, (modules.leaves, args, kwargs), {})
    modules.write(after)
    return out


def _recomputed(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """f(*args, **kwargs), recomputed in the backward pass; captured NumPy arrays are copied.

    Integers, bools and whatever is no number are constants of the program: f may branch on them,
    count loops by them or shape arrays. A float is an input, so that another one compiles nothing
    anew, unless f reads its value.
    """
    with flax_explained("checkpoint"):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        numbers = {i: own(x) for i, x in enumerate(leaves) if _is_input(x)}
        scalars = np.generic | float | complex
        arrays = {i: x for i, x in numbers.items() if not isinstance(x, scalars)}
        out_def: list[Any] = []

        def program_of(xs: dict[int, Any]) -> Any:
            def fresh(*xs_now: Any) -> Any:  # new, for JAX caches the traces of a function
                moving = dict(zip(xs, xs_now, strict=True))
                full = [moving.get(i, x) for i, x in enumerate(leaves)]
                args, kwargs = jax.tree.unflatten(treedef, full)
                outs, out_def[:] = _split_texts(f(*args, **kwargs))
                return outs

            return xs, *jaxprs.traced(jaxprs.named_after(f, fresh), *xs.values())

        try:
            xs, program, consts = program_of(numbers)
        except jax.errors.JAXTypeError:
            if len(arrays) == len(numbers):
                raise
            xs, program, consts = program_of(arrays)
        refuse_to_repeat("checkpoint", program.jaxpr)
        run = compiled(f, program.jaxpr, rematerialized)
        outs = jax.tree.unflatten(program.treedef, run([*map(own, consts)], list(xs.values())))
        treedef, texts = out_def
        full = [y if text is None else text for y, text in zip(outs, texts, strict=True)]
        return trees.unflatten(treedef, full)


def _is_input(x: Any) -> bool:
    whole = isinstance(x, np.integer | np.bool_)
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and not whole)


def _split_texts(out: Any) -> tuple[list[Any], tuple[Any, list[str | None]]]:
    """Splits an output: its arrays, and its structure with the strings among its leaves."""
    leaves, treedef = trees.flatten(out)
    for x, path in zip(leaves, trees.leaf_paths(out), strict=True):
        if not (hasattr(x, "dtype") or isinstance(x, bool | int | float | complex | str)):
            came = with_article(type(x).__name__)
            raise GradtoolsError(f"checkpoint: f returned {came} at output{path}; expected arrays.")
    texts = [x if isinstance(x, str) else None for x in leaves]
    arrays = [None if isinstance(x, str) else x for x in leaves]
    return arrays, (treedef, texts)


def refuse_to_repeat(caller: str, jaxpr: Any) -> None:
    """Raises if a program makes a mutable array, which JAX 0.10 cannot recompute.

    `jax.checkpoint` fails on one with a bare KeyError, and a scan over one returns a wrong value
    without an error in reverse mode.
    """
    if jaxprs.holds(jaxpr, "new_ref", "ref", "mutable_array", "empty_ref"):
        raise GradtoolsError(
            f"{caller}: f makes a mutable array (jax.new_ref), which JAX does not differentiate in "
            "what is repeated. Write x = x.at[i].set(y) instead."
        )
