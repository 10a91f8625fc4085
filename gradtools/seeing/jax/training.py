"""Lists the arrays of a JAX model, and the arrays that its optimizer changes.

A loss function that captures a model is traced once. The arrays of the model are constants of the
jaxpr, which are identified by id and replaced by variables. An optax optimizer is called twice with
constant gradients; an array whose updates are zero counts as unchanged if other updates are
nonzero. If all updates are zero, an array counts as unchanged if its update is a constant.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.function_variables import held_in
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal
from gradtools.jax.module_arguments import module_kinds, opened, part_of
from gradtools.jax.recomputing import stateful
from gradtools.jax.trees import is_inexact
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.diagnostics.training import HeldArray, Optimised
from gradtools.seeing.jax.passes import with_its_line
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
        def swapped(consts: Sequence[Any]) -> list[Any]:
            return [xs[places[id(c)]] if id(c) in places else c for c in consts]

        def step(_: int, eqn: Any, operands: list[Any]) -> list[Any]:
            if eqn.primitive.name not in jaxprs.CALLS:
                return with_its_line(eqn, operands)
            (program,) = jaxprs.programs_of(eqn)
            consts = swapped(program.consts)
            return jaxprs.interpreted(program.jaxpr, [*consts, *operands], step)

        closed = trace(outputs, []).closed
        calls = (eqn for eqn in jaxprs.equations(closed) if eqn.primitive.name in jaxprs.CALLS)
        inner = [c for eqn in calls for program in jaxprs.programs_of(eqn) for c in program.consts]
        if any(id(c) in places for c in inner):  # a jitted function captures the arrays
            return jaxprs.interpreted(closed.jaxpr, swapped(closed.consts), step)
        return jax.core.eval_jaxpr(closed.jaxpr, swapped(closed.consts))

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
    """Finds the arrays that two steps of an optimizer change if all gradients are constant.

    The optimizer is an optax transformation or an `nnx.Optimizer`. The learning rate may be zero in
    the first step. The gradients of the second step are too small to be clipped by norm, so an
    update that is equal to the gradient shows that the optimizer passes the gradient through.
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
                f"{caller}: the optimizer's init(params), called with this model's parameters, "
                f"raised {came}. Pass the model or submodule for which the optimizer was created."
            ) from error
    else:
        raise GradtoolsError(
            f"{caller}: optimizer is {with_article(type(optimizer).__name__)}; expected an "
            "optax.GradientTransformation or an nnx.Optimizer."
        )
    leaves = jax.tree.leaves(part)
    treedef: Any = jax.tree.structure(part)
    optax = sys.modules.get("optax")
    is_given_the_loss = optax is not None and isinstance(
        optimizer, optax.GradientTransformationExtraArgs
    )

    def step(size: Any, state: Any, part: Any) -> tuple[list[Any], Any]:
        """Returns the updates and the next state for gradients that are equal to `size`."""
        grads = jax.tree.map(lambda x: jnp.full_like(x, size), part)
        total = lambda part: size * sum(map(jnp.sum, jax.tree.leaves(part)))
        more = {"value": total(part), "grad": grads, "value_fn": total}
        updates, state = optimizer.update(grads, state, part, **(more if is_given_the_loss else {}))
        updates = treedef.flatten_up_to(updates)
        return [u if hasattr(u, "dtype") else jnp.zeros(()) for u in updates], state

    small = 2.0 ** -(8 + math.ceil(math.log2(1 + sum(x.size for x in leaves)) / 2))
    first, after = step(1.0, state, part)
    second, _ = step(small, after, part)
    trained, raw = set[int](), set[int]()
    for x, *updates in zip(leaves, first, second, strict=True):
        if any(bool(jnp.any(u != 0)) for u in updates):
            passes_through = bool(jnp.all((updates[1] == small) & (updates[1] != 0)))
            (raw if passes_through else trained).add(id(x))
    if not trained and not _is_masked(state):
        trained, raw = raw, set()
    if not trained and not raw:  # a schedule or gradient accumulation may start with zero updates
        constant = _constant_outputs(jax.make_jaxpr(step)(1.0, state, part))
        trained = {id(x) for x, same in zip(leaves, constant, strict=False) if not same}

    def fault(one: HeldArray) -> Finding | None:
        kind = "raw_update" if id(one.array) in raw else "not_optimized"
        return None if id(one.array) in trained else Finding(one.name, kind, "optimizer")

    return Optimised(lambda one: id(one.array) in trained, fault)


def _is_masked(state: Any) -> bool:
    """Returns whether a part of an optimizer's state belongs to `optax.masked`."""
    optax = sys.modules.get("optax")
    is_mask = lambda x: optax is not None and isinstance(x, optax.MaskedState)
    return any(map(is_mask, jax.tree.leaves(state, is_leaf=is_mask)))


def _constant_outputs(closed: Any) -> list[bool]:
    """Returns for each output of a jaxpr whether it is constant, such as a product with 0."""
    constant = set(closed.jaxpr.constvars)
    is_constant = lambda x: isinstance(x, Literal) or x in constant
    is_zero = lambda x: isinstance(x, Literal) and not np.any(x.val)
    for eqn in closed.jaxpr.eqns:
        is_product = eqn.primitive.name == "mul"
        if all(map(is_constant, eqn.invars)) or (is_product and any(map(is_zero, eqn.invars))):
            constant.update(eqn.outvars)
    return [*map(is_constant, closed.jaxpr.outvars)]


def _is_an_optimizer(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Optimizer)


def _pure(nnx: Any, state: Any) -> Any:
    """Replaces the Variables in an nnx state with arrays."""
    return (nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure)(state)
