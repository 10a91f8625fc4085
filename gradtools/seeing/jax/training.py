"""Lists the arrays of a JAX model, and the arrays that its optimizer changes.

A loss function that captures a model is traced once. The arrays of the model are constants of the
jaxpr, which are identified by id and replaced by variables. An optax optimizer is called with
gradients equal to one; an array whose update is zero counts as unchanged if other updates are
nonzero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.function_variables import held_in
from gradtools.jax.module_arguments import module_kinds, opened, part_of
from gradtools.jax.recomputing import stateful
from gradtools.jax.trees import is_inexact
from gradtools.seeing.diagnostics.training import HeldArray, Optimised
from gradtools.seeing.jax.tracing import trace


def lifted(
    caller: str, f: Any, args: Sequence[Any], kwargs: dict[str, Any], arrays: list[Any]
) -> Callable[[list[Any]], Any]:
    """Converts `f(*args, **kwargs)` to a function of `arrays`, which f captures."""
    if not arrays:
        raise GradtoolsError(
            f"{caller}: f has no argument and captures no module. Pass its arguments, "
            f"{caller}(f, x), or the trained model, {caller}(f, model=...): a module or a "
            "pytree of the arrays that f reads."
        )
    if not callable(f):
        raise GradtoolsError(f"{caller}: f is {with_article(type(f).__name__)}, not a function.")
    whole = opened(caller, f, args, kwargs, ())
    if whole is not None:
        f, args = whole, whole.args
    run = stateful(caller, f, ()) or f  # restores the model's state after each run
    places = {id(x): k for k, x in enumerate(arrays)}

    def outputs(_: Any) -> list[Any]:
        out = run(*args, **kwargs)
        return [x for x in jax.tree.leaves(out) if hasattr(x, "dtype")]

    def at(xs: list[Any]) -> list[Any]:
        closed = trace(outputs, []).closed
        consts = [xs[places[id(c)]] if id(c) in places else c for c in closed.consts]
        return jax.core.eval_jaxpr(closed.jaxpr, consts)

    return at


def model_of(f: Any) -> Any:
    """Returns f if f is a module, otherwise the captured modules, or None if f captures none."""
    kinds = module_kinds()
    if not kinds:
        return None
    if isinstance(f, kinds):
        return f
    result = [x for x in held_in(f, kinds) if not _is_an_optimizer(x)]
    return result[0] if len(result) == 1 else (result or None)


def are_parameters(f: Any, x: Any) -> bool:
    """Returns whether f captures no module, in which case the arguments are the parameters."""
    return model_of(f) is None


def held(caller: str, model: Any) -> list[HeldArray]:
    """Lists the floating arrays of a model, or of a pytree of models and arrays."""
    name_of = partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree.leaves_with_path(part_of(model))
    result = [
        HeldArray(name_of(path).removesuffix(".value") or "model", x)
        for path, x in leaves
        if _is_floating(x)
    ]
    if not result:
        raise GradtoolsError(
            f"{caller}: model is {with_article(type(model).__name__)} without floating arrays; "
            "expected a module of equinox or flax.nnx, or a pytree of parameters."
        )
    return list({id(one.array): one for one in reversed(result)}.values())[::-1]


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and is_inexact(x)


# --- optimizers --------------------------------------------------------------------------


def optimised(caller: str, optimizer: Any, model: Any, held: Sequence[HeldArray]) -> Optimised:
    """Finds the arrays that an optimizer step changes if all gradients are equal to one.

    The optimizer is an optax transformation or an `nnx.Optimizer`.
    """
    nnx, part = sys.modules.get("flax.nnx"), part_of(model)
    if nnx is not None and _is_an_optimizer(optimizer):
        part = _pure(nnx, nnx.state(model, optimizer.wrt))
        optimizer, state = optimizer.tx, _pure(nnx, optimizer.opt_state)
    elif hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        try:
            state = optimizer.init(part)
        except Exception as error:
            came = f"{type(error).__name__}: {error}"
            raise GradtoolsError(
                f"{caller}: the optimizer's init(params) of this model's parameters raised {came}. "
                "Pass the model, or the part of the model, for which the optimizer was created."
            ) from error
    else:
        raise GradtoolsError(
            f"{caller}: optimizer is {with_article(type(optimizer).__name__)}; expected an "
            "optax.GradientTransformation or an nnx.Optimizer."
        )
    leaves = jax.tree.leaves(part)
    treedef: Any = jax.tree.structure(part)
    ones = jax.tree.unflatten(treedef, [jnp.ones_like(x) for x in leaves])
    total = lambda part: sum(map(jnp.sum, jax.tree.leaves(part)))  # a loss whose gradients are ones
    optax, more = sys.modules.get("optax"), dict[str, Any]()
    if optax is not None and isinstance(optimizer, optax.GradientTransformationExtraArgs):
        more = {"value": total(part), "grad": ones, "value_fn": total}
    updates = treedef.flatten_up_to(optimizer.update(ones, state, part, **more)[0])
    moved, raw = set[int](), set[int]()  # `raw`: ids of arrays whose update is the gradient
    for x, update in zip(leaves, updates, strict=True):
        if hasattr(update, "dtype") and bool(jnp.any(update != 0)):
            moved.add(id(x))
            raw |= {id(x)} if bool(jnp.all(update == 1)) else set()
    if not moved:  # the learning rate may start at zero
        return Optimised(lambda one: None)
    as_is = raw if len(raw) < len(leaves) else set()  # a mask passes these gradients unchanged
    return Optimised(lambda one: id(one.array) in moved - as_is)


def _is_an_optimizer(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Optimizer)


def _pure(nnx: Any, state: Any) -> Any:
    """Replaces the Variables in an nnx state by arrays."""
    return (nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure)(state)
