"""`measure` in JAX: FLOPs of the jaxpr, bytes by XLA, seconds of the compiled program.

f is traced as by `jax.jit`, without dead code, as in XLA. Peak bytes are XLA's own figures;
operations are counted in `flops.py`. The saved bytes are those of the residuals of `jax.vjp` in its
jaxpr that are not arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.jax import trees
from gradtools.jax.jaxprs import Jaxpr, interpreted, live
from gradtools.rules import replaced_at
from gradtools.seeing import measures as costs
from gradtools.seeing.jax.flops import bodies, counted, is_call
from gradtools.seeing.jax.recorded_run import LEAVING
from gradtools.seeing.measures import Measurement


def measure(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Measurement:
    given, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(given) if _is_array(x)]
    leaves = [given[i] for i in places]
    costs.check_outside(any(isinstance(x, jax.core.Tracer) for x in leaves))

    def run(*xs: Any) -> list[Any]:
        """The arrays among the results of f, for these array leaves of its arguments."""
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, replaced_at(given, places, xs))
        out = f(*inner_args, **inner_kwargs)
        arrays = [x for x in trees.flatten(out)[0] if _is_array(x)]
        if leaves and not arrays:
            kind = "None" if out is None else with_article(type(out).__name__)
            raise GradtoolsError(
                f"measure: f returned {kind}, and in JAX what no result needs "
                "is left out: nothing would be counted. Return arrays."
            )
        return arrays

    try:
        closed = jax.make_jaxpr(run)(*leaves)
    except LEAVING as error:
        raise GradtoolsError(
            "measure: f cannot be traced by jax.jit, and in JAX it is the compiled program "
            "that is measured. What decides on Python values must not be an array: pass it as "
            f"a Python number or bind it with functools.partial. JAX says: {error}"
        ) from error
    jaxpr, consts = live(closed.jaxpr), list(closed.consts)
    # captured arrays are arguments: XLA would copy and fold constants
    evaluated = jax.jit(lambda consts, xs: jax.core.eval_jaxpr(jaxpr, consts, *xs))
    compiled = evaluated.lower(consts, leaves).compile()
    jax.block_until_ready(compiled(consts, leaves))
    count = counted(jaxpr, consts, leaves)
    memory = compiled.memory_analysis()
    if memory is None:
        raise GradtoolsError("measure: this platform's XLA does not say how many bytes it takes.")
    saved, notes = _saved_bytes(run, leaves)
    return costs.measurement(
        costs.timed(lambda: jax.block_until_ready(compiled(consts, leaves))),
        count.unknown,
        [*sorted(count.notes), *_libraries(compiled.as_text()), *notes],
        flops=count.flops,
        peak_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes,
        saved_bytes=saved,
        backend="jax",
    )


def _libraries(text: str | None) -> list[str]:
    """The note on library kernels, whose memory XLA's figures leave out.

    On the CPU XLA may fuse whole chains of products into one (seen: 4 bytes for eight layers).
    """
    names = ", ".join(sorted(set(re.findall(r'"kind":"__(\w+?)_fusion"', text or ""))))
    note = f"peak bytes leave out what library kernels hold inside ({names}, chosen by XLA)"
    return [note] if names else []


def _saved_bytes(
    run: Callable[..., list[Any]], leaves: Sequence[Any]
) -> tuple[int | None, list[str]]:
    """The bytes of jax.vjp's residuals along all inexact leaves, or None and a note."""
    moving = [i for i, x in enumerate(leaves) if trees.is_inexact(x)]
    if not moving:
        return 0, []

    def kept(*xs: Any) -> list[Any]:
        def outs(*moved: Any) -> list[Any]:
            return [y for y in run(*replaced_at(xs, moving, moved)) if trees.is_inexact(y)]

        ys, pull = jax.vjp(outs, *[xs[i] for i in moving])
        pull(ys)  # raises for a loop that cannot be transposed
        return [x for x in jax.tree.leaves(pull) if _is_array(x)]

    try:
        closed = jax.make_jaxpr(kept)(*leaves)
        origins = _origins(closed.jaxpr, range(len(leaves)))
        own = dict(zip(origins, closed.jaxpr.outvars, strict=True))
    except Exception as error:  # f cannot be differentiated
        return costs.without_saved(error)
    made = [var for origin, var in own.items() if not isinstance(origin, int)]
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in made), []


def _origins(jaxpr: Jaxpr, entering: Sequence[Any]) -> list[Any]:
    """For each output its origin, equal for several names of one array: that of an input, or new.

    Calls may return their inputs unchanged. The origin of a captured array is -1.
    """

    def step(i: int, eqn: Any, operands: list[Any]) -> list[Any]:
        if not is_call(eqn.primitive.name):
            return [object() for _ in eqn.outvars]
        (body,) = bodies(eqn)
        return _origins(body.jaxpr, operands)

    entries = [*[-1 for _ in jaxpr.constvars], *entering]
    return interpreted(jaxpr, entries, step, lambda literal: -1)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or (
        isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fciub"
    )
