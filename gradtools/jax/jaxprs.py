"""Traces and interprets jaxprs, finds their inner jaxprs, and eliminates dead code.

Only this module lists the primitives with inner jaxprs: calls, loops, branches, and functions with
JAX's custom rules. `reachability.py` analyzes the data flow of jaxprs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from gradtools.jax._upstream import Literal, bind_again, constants_of, name_of
from gradtools.jax.known_errors import NO_VALUES, READS_A_VALUE

Jaxpr = Any  # JAX 0.12 merged ClosedJaxpr into Jaxpr
Eqn = Any
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """A traced function of pytrees of arrays. Closed-over arrays are passed as arguments.

    Attributes:
        jaxpr: The open jaxpr, in which constants are variables.
        treedef: The treedef of the output.
        avals: The avals of the output leaves.
    """

    jaxpr: Jaxpr
    treedef: Any
    avals: list[Any]

    def __call__(self, consts: Sequence[Any], *args: Any) -> Any:
        flat = jax.core.eval_jaxpr(self.jaxpr, consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(self.treedef, flat)


def traced(fun: Callable[..., Any], *args: Any) -> tuple[TracedProgram, list[Any]]:
    """Returns fun as a `TracedProgram`, and the arrays that fun closes over (closure conversion).

    Closed-over NumPy arrays are copied, because users may overwrite them before the backward pass.
    """
    try:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    except READS_A_VALUE as error:
        if not any(NO_VALUES in note for note in getattr(error, "__notes__", ())):
            error.add_note(NO_VALUES)
        raise
    program = TracedProgram(open_jaxpr(closed), jax.tree.structure(shapes), closed.out_avals)
    return program, [own(c) for c in constants_of(closed)]


def own(x: Any) -> Any:
    """Converts a NumPy array to a JAX array in new memory. Other values are returned unchanged."""
    # NumPy copies x, because in a trace `jnp.array(x)` shares x's memory.
    return jnp.asarray(np.array(x)) if isinstance(x, np.ndarray) else x


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the jaxpr inside of a ClosedJaxpr. Since JAX 0.12, both types are the same class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def sub_jaxprs(value: Any) -> Iterator[Jaxpr]:
    """Yields the jaxprs in a parameter of an equation, or in a dictionary of all parameters."""
    if hasattr(open_jaxpr(value), "eqns"):
        yield open_jaxpr(value)
    elif isinstance(value, dict):
        yield from sub_jaxprs(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sub_jaxprs(item)


def is_inexact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_ref(var: Any) -> bool:
    """Returns whether a variable is a mutable reference."""
    return hasattr(var.aval, "inner_aval")


def inexact(variables: Sequence[Any]) -> list[bool]:
    """Returns, for each variable, whether its dtype is floating-point or complex."""
    return [*map(is_inexact, variables)]


def targets(eqn: Eqn) -> list[Any]:
    """Returns the variables that an equation writes: its outputs, and mutable references."""
    return [*eqn.outvars, *filter(is_ref, eqn.invars)]


def equations(closed_jaxpr: Jaxpr, within_rules: bool = False) -> Iterator[Eqn]:
    """Yields the equations of a jaxpr and of its sub-jaxprs. Each sub-jaxpr is visited once.

    within_rules: Whether to also trace and read the functions that gradtools' primitives evaluate.
    """
    pending, seen = [open_jaxpr(closed_jaxpr)], dict[int, Jaxpr]()  # references keep ids unique
    while pending:
        jaxpr = pending.pop()
        if id(jaxpr) in seen:
            continue
        seen[id(jaxpr)] = jaxpr
        for eqn in jaxpr.eqns:
            yield eqn
            pending += sub_jaxprs(eqn.params)
            program = getattr(eqn.primitive, "gradtools_program", None)
            if within_rules and program is not None:
                pending.append(open_jaxpr(program(eqn)))


def holds(jaxpr: Jaxpr, *names: str) -> bool:
    """Returns whether a jaxpr contains at least one of the given primitives, at any depth."""
    return any(eqn.primitive.name in names for eqn in equations(jaxpr))


def bound(eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Evaluates an equation at the given operands, in the context in which it was traced."""
    with eqn.ctx.manager:
        out = bind_again(eqn, xs)
    return list(out) if eqn.primitive.multiple_results else [out]


def interpreted(
    jaxpr: Jaxpr,
    entries: Sequence[Any],
    step: Callable[[int, Eqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda literal: literal.val,
) -> list[Any]:
    """Interprets a jaxpr abstractly: computes abstract outputs from abstract inputs.

    step: Called as `step(index, eqn, operands)`; returns the abstract results of an equation.
    constant: A function from a literal to its abstract value.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], entries, strict=True))
    at = lambda atom: constant(atom) if isinstance(atom, Literal) else env[atom]
    for i, eqn in enumerate(jaxpr.eqns):
        env.update(zip(eqn.outvars, step(i, eqn, [at(v) for v in eqn.invars]), strict=True))
    return [at(v) for v in jaxpr.outvars]


def live(jaxpr: Jaxpr) -> Jaxpr:
    """Eliminates dead code, also in inner jaxprs. No inputs are removed."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


DRAWS = ("random_bits", "random_split", "rng_bit_generator", "rng_uniform")


def named_after(f: Any, program: F) -> F:
    """Makes JAX's errors about traced values report the location of f, not of `program`."""
    program.__signature__ = _ARGS  # type: ignore[attr-defined]
    program.__wrapped__ = f  # type: ignore[attr-defined]
    return program


_ARGS = Signature([Parameter("args", Parameter.VAR_POSITIONAL)])  # replaces f's signature


# --- marks that identify gradtools' own operations to recorders -------------------------
#
# The function's name is the only settable field that a jaxpr retains.

_CHUNK = "gradtools_chunk_"


def marked_as_chunk(f: F) -> F:
    """Marks a function as a wrapper that gradtools created around the user's function."""
    f.__name__ = f"{_CHUNK}{f.__name__}"
    return f


def is_chunk(jaxpr: Any) -> bool:
    """Returns whether a jaxpr belongs to a function marked by `marked_as_chunk`."""
    return name_of(jaxpr).startswith(_CHUNK)


def function_name(jaxpr: Any) -> str:
    """Returns the name of a jaxpr's function in the source, without the mark."""
    return name_of(jaxpr).removeprefix(_CHUNK)


# --- inner jaxprs ------------------------------------------------------------------------


class HeldJaxpr(NamedTuple):
    """An open jaxpr and the values of its constants."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]


def programs_of(eqn: Eqn) -> list[HeldJaxpr]:
    """Returns the inner jaxprs of an equation: condition and body of a loop, branches of a cond."""
    keys = {"while": ("cond_jaxpr", "body_jaxpr"), "custom_vmap_call": ("call",)}.get(
        eqn.primitive.name, ("jaxpr", "call_jaxpr", "fun_jaxpr", "branches")
    )
    found = [eqn.params[key] for key in keys if key in eqn.params]
    if eqn.primitive.name != "while":
        found = found[:1]
    inner = found[0] if eqn.primitive.name == "cond" else found
    return [HeldJaxpr(open_jaxpr(x), tuple(getattr(x, "consts", ()))) for x in inner]


CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "core_closed_call", "call", "xla_call"),
    *("remat", "remat2", "remat_call", "checkpoint", "named_call", "composite"),
)
"""Primitives that only call their inner jaxpr."""

RULED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
"""Primitives that call a function with a custom_jvp or custom_vjp rule."""


def is_ruled(eqn: Eqn) -> bool:
    """Returns whether an equation calls a function with one of JAX's custom rules."""
    return eqn.primitive.name in RULED


def may_not_run(eqn: Eqn) -> bool:
    """Returns whether a loop may have zero iterations."""
    name = eqn.primitive.name
    return name == "while" or (name == "scan" and not eqn.params["length"])


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a scan, which JAX 0.12 stores in a tree."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts.vals)), len(list(carry.vals))


@dataclass(frozen=True)
class InnerJaxpr:
    """A jaxpr inside of an equation, and the mapping of its variables to the equation's variables.

    Input i of the jaxpr is the equation's input ``inputs[i]``. Output k of the jaxpr is the
    equation's output k, unless the body is a ``gate`` (the condition of a while). A carry (k, i)
    means that output k of an iteration is input i of the next iteration.
    """

    jaxpr: Jaxpr
    inputs: Sequence[int]
    carries: tuple[tuple[int, int], ...] = ()
    gate: bool = False


def bodies(eqn: Eqn) -> list[InnerJaxpr]:
    """Returns the inner jaxprs of an equation, or an empty list if the equation is opaque.

    The body of a gradtools primitive is the jaxpr that its `gradtools_flow` returns.
    """
    name, count = eqn.primitive.name, len(eqn.invars)
    if any(map(is_ref, eqn.invars)):
        return []
    if name == "cond":
        return [InnerJaxpr(branch.jaxpr, range(1, count)) for branch in programs_of(eqn)]
    if name == "scan":
        consts, carried = scan_counts(eqn)
        carries = tuple((k, consts + k) for k in range(carried))
        return [InnerJaxpr(programs_of(eqn)[0].jaxpr, range(count), carries)]
    if name == "while":  # inputs: constants of the condition, constants of the body, carry
        gates, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = range(gates + consts, count)
        inner = []
        owned = range(gates), range(gates, gates + consts)
        for program, own, gate in zip(programs_of(eqn), owned, (True, False), strict=True):
            carries = tuple((k, len(own) + k) for k in range(len(carry)))
            inner.append(InnerJaxpr(program.jaxpr, [*own, *carry], carries, gate))
        return inner
    flow = getattr(eqn.primitive, "gradtools_flow", None)
    if flow is not None:
        jaxpr = flow(eqn)
        called = [] if jaxpr is None else [open_jaxpr(jaxpr)]
    elif name in (*CALLS, *RULED, "shard_map", "custom_vmap_call"):
        called = [program.jaxpr for program in programs_of(eqn)]
    else:
        return []
    sizes = count, len(eqn.outvars)
    fitting = [x for x in called if (len(x.invars), len(x.outvars)) == sizes]
    return [InnerJaxpr(jaxpr, range(count)) for jaxpr in fitting]
