"""Reading jaxprs: an equation's inner jaxprs, what it writes, dead-code elimination.

The one list of the primitives that run jaxprs: calls, loops, branches, and functions with rules of
JAX's. How data flows is read in `reachability.py`, what an equation costs in `seeing/jax/flops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.interpreters import partial_eval

from gradtools.jax._upstream import Literal, bind_again
from gradtools.jax.rules.kept_alive import LIFE

Jaxpr = Any  # jax 0.12 merged ClosedJaxpr into Jaxpr, so neither name serves on both sides
Eqn = Any


def without_consts(closed: Jaxpr) -> Any:
    """The open jaxpr of a closed one; from JAX 0.12 on it would hold the constants as well."""
    jaxpr = open_jaxpr(closed)
    return jaxpr.replace(constvars=jaxpr.constvars)


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr itself, which before jax 0.12 stands in another with its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def sub_jaxprs(value: Any) -> Iterator[Jaxpr]:
    """The jaxprs in a parameter of an equation, or in all of them."""
    if hasattr(open_jaxpr(value), "eqns"):
        yield open_jaxpr(value)
    elif isinstance(value, dict):
        yield from sub_jaxprs(tuple(v for key, v in value.items() if key != LIFE))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sub_jaxprs(item)


def is_inexact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_ref(var: Any) -> bool:
    return hasattr(var.aval, "inner_aval")


def inexact(variables: Sequence[Any]) -> list[bool]:
    """Which of these are floating or complex."""
    return [*map(is_inexact, variables)]


def targets(eqn: Eqn) -> list[Any]:
    """What an equation writes: its outputs, and the mutable references it is given."""
    return [*eqn.outvars, *filter(_is_ref, eqn.invars)]


def uses_primitive(closed_jaxpr: Jaxpr, predicate: Callable[[Eqn], bool]) -> bool:
    """Is there an equation, at any depth, for which the predicate holds?

    Args:
        closed_jaxpr: What ``jax.make_jaxpr(f)(*args)`` returns.
        predicate: Called with equations until it is true; each sub-jaxpr is visited once.

    Returns:
        Whether it was true for one.
    """
    return any(map(predicate, equations(closed_jaxpr)))


def equations(closed_jaxpr: Jaxpr) -> list[Eqn]:
    """The equations at any depth; each sub-jaxpr is read once."""
    pending, seen, result = [open_jaxpr(closed_jaxpr)], set[int](), list[Eqn]()
    while pending:
        jaxpr = pending.pop()
        if id(jaxpr) not in seen:
            seen.add(id(jaxpr))
            result += jaxpr.eqns
            for eqn in jaxpr.eqns:
                pending += sub_jaxprs(eqn.params)
    return result


def bound(eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation, run at these operands in the settings that it was traced in."""
    with eqn.ctx.manager:
        result = bind_again(eqn, xs)
    return list(result) if eqn.primitive.multiple_results else [result]


def read(env: dict[Any, Any], atom: Any) -> Any:
    """The value of an atom, a literal or a variable, while a jaxpr is evaluated."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def interpreted(
    jaxpr: Jaxpr,
    entries: Sequence[Any],
    step: Callable[[int, Eqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda literal: literal.val,
) -> list[Any]:
    """A jaxpr run on what stands for arrays: what stands for its outputs.

    step: Of an equation's number, the equation, and its operands. constant: Of a literal.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], entries, strict=True))
    at = lambda atom: constant(atom) if isinstance(atom, Literal) else env[atom]
    for i, eqn in enumerate(jaxpr.eqns):
        env.update(zip(eqn.outvars, step(i, eqn, [at(v) for v in eqn.invars]), strict=True))
    return [at(v) for v in jaxpr.outvars]


def overwrites(eqn: Eqn) -> bool:
    """Whether an equation sets every entry of its first operand."""
    name, atoms = eqn.primitive.name, eqn.invars
    if name == "dynamic_update_slice":
        return bool(atoms[0].aval.shape == atoms[1].aval.shape)
    if name != "scatter" or atoms[1].aval.size:
        return False
    return bool(atoms[0].aval.size == atoms[2].aval.size)


def needed(jaxpr: Jaxpr, effects: bool = True) -> list[Eqn]:
    """The equations of which a result is read, or that have effects; see `live`."""
    read, kept = {id(v) for v in jaxpr.outvars}, []
    for eqn in reversed(jaxpr.eqns):
        if (effects and eqn.effects) or any(id(v) in read for v in eqn.outvars):
            kept.append(eqn)
            read.update(map(id, eqn.invars))
    return kept[::-1]


def live(jaxpr: Jaxpr) -> Jaxpr:
    """Dead-code elimination, in inner jaxprs too; the inputs stay."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


DRAWS = ("random_bits", "random_split", "rng_bit_generator", "rng_uniform")


def draws(closed: Jaxpr, flow: Callable[[Jaxpr, list[int]], dict[Any, int]]) -> set[Any]:
    """What a program draws by keys that do not depend on its inputs: the operation and the shape.

    flow: Gives for each variable whether data of the inputs flows to it (`Flow.propagate`).
    """
    result = set[Any]()

    def visit(jaxpr: Jaxpr, inputs: list[int]) -> None:
        env = flow(jaxpr, inputs)
        at = lambda atom: 0 if isinstance(atom, Literal) else env.get(atom, 0)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in DRAWS and not any(map(at, eqn.invars)):
                result.add((name, eqn.params["shape"]))
            for body in bodies(eqn):
                entering = [at(eqn.invars[i]) for i in body.inputs]
                for k, i in body.carries:
                    entering[i] |= at(eqn.outvars[k])
                visit(body.jaxpr, entering)

    jaxpr = open_jaxpr(closed)
    visit(jaxpr, [1] * len(jaxpr.invars))
    return result


# --- what an equation runs ---------------------------------------------------------------


@dataclass(frozen=True)
class HeldJaxpr:
    """A jaxpr and the arrays that it holds."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...] = ()

    @classmethod
    def of(cls, found: Any) -> HeldJaxpr:
        """Of a jaxpr with its constants or without."""
        return cls(open_jaxpr(found), tuple(getattr(found, "consts", ())))


def programs_of(eqn: Eqn) -> list[HeldJaxpr]:
    """What an equation runs: of a while its condition and body, of a cond its branches."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        return [HeldJaxpr.of(params["cond_jaxpr"]), HeldJaxpr.of(params["body_jaxpr"])]
    if name == "cond":
        return [HeldJaxpr.of(branch) for branch in params["branches"]]
    keys = ("call",) if name == "custom_vmap_call" else ("jaxpr", "call_jaxpr", "fun_jaxpr")
    result = next((params[key] for key in keys if key in params), None)
    return [] if result is None else [HeldJaxpr.of(result)]


CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "core_closed_call", "call", "xla_call"),
    *("remat", "remat2", "remat_call", "checkpoint", "named_call", "composite"),
)
"""Primitives that only call their inner jaxpr."""

RULED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
"""Calls of functions with a custom_jvp or custom_vjp rule."""

_OTHERS = ("shard_map", "custom_vmap_call")  # a device runs a part; no reverse mode leads through


def is_ruled(eqn: Eqn) -> bool:
    """Whether an equation is a function with a custom rule of JAX's."""
    return eqn.primitive.name in RULED


def moves_a_while(jaxpr: Jaxpr, moved: Sequence[bool] | None = None) -> bool:
    """Whether a `while` depends on inputs by inexact numbers: it has no reverse mode.

    One that only draws random numbers, or that has a rule around it, is none.

    moved: Which of the inputs count; all by default.
    """
    pairs = zip(jaxpr.invars, moved or [True] * len(jaxpr.invars), strict=True)
    moving = {var for var, moves in pairs if moves and is_inexact(var)}
    for eqn in jaxpr.eqns:
        enters = [not isinstance(x, Literal) and x in moving for x in eqn.invars]
        outs = [y for y in eqn.outvars if is_inexact(y)]
        if not (any(enters) and outs):
            continue
        if eqn.primitive.name == "while":
            return True
        if not (is_ruled(eqn) or eqn.primitive.name == "custom_linear_solve"):
            for inner in sub_jaxprs(eqn.params):
                fits = len(inner.invars) == len(enters)
                if moves_a_while(inner, enters if fits else None):
                    return True
        moving.update(outs)
    return False


def may_not_run(eqn: Eqn) -> bool:
    """Whether a loop may run no time at all."""
    name = eqn.primitive.name
    return name == "while" or (name == "scan" and not eqn.params["length"])


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """How many constants and carries a scan has; jax 0.12 keeps them as a tree of its inputs."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts.vals)), len(list(carry.vals))


@dataclass(frozen=True)
class InnerJaxpr:
    """A jaxpr inside an equation, and how its ends are tied to those of the equation.

    ``inputs[i]`` is the equation's input that enters as input i. Output k leaves as output k,
    unless the body is a ``gate``, which only decides (the condition of a while). A carry
    (k, i) is the output k of the equation that comes back as input i.
    """

    jaxpr: Jaxpr
    inputs: Sequence[int]
    carries: tuple[tuple[int, int], ...] = ()
    gate: bool = False


class Step(NamedTuple):
    """An equation as data flows through it.

    Attributes:
        eqn: It itself.
        targets: What it writes.
        inexact: Which of these are floating or complex.
        is_leaf: Whether it runs no jaxpr.
    """

    eqn: Eqn
    targets: list[Any]
    inexact: list[bool]
    is_leaf: bool


def steps(eqns: Sequence[Eqn]) -> list[Step]:
    """Equations as data flows through them."""
    result = []
    for eqn in eqns:
        primitive, written = eqn.primitive, targets(eqn)
        opaque = len(written) > len(eqn.outvars)
        inner = primitive.name in _STRUCTURED or hasattr(primitive, "gradtools_flow")
        result.append(Step(eqn, written, inexact(written), opaque or not inner))
    return result


def bodies(eqn: Eqn) -> list[InnerJaxpr]:
    """The bodies of an equation; none if it is opaque: every input may flow anywhere."""
    if any(map(_is_ref, eqn.invars)):
        return []
    return _STRUCTURED.get(eqn.primitive.name, _own_body)(eqn)


def _own_body(eqn: Eqn) -> list[InnerJaxpr]:
    """The body of a primitive that says by `gradtools_flow` how data flows in an equation."""
    jaxpr = getattr(eqn.primitive, "gradtools_flow", lambda _: None)(eqn)
    return [] if jaxpr is None else [InnerJaxpr(open_jaxpr(jaxpr), range(len(eqn.invars)))]


def _call_body(eqn: Eqn) -> list[InnerJaxpr]:
    inner = [program.jaxpr for program in programs_of(eqn)]
    return [InnerJaxpr(jaxpr, range(len(eqn.invars))) for jaxpr in inner if _fits(jaxpr, eqn)]


def _fits(jaxpr: Jaxpr, eqn: Eqn) -> bool:
    return (len(jaxpr.invars), len(jaxpr.outvars)) == (len(eqn.invars), len(eqn.outvars))


def _cond_bodies(eqn: Eqn) -> list[InnerJaxpr]:
    inputs = range(1, len(eqn.invars))
    return [InnerJaxpr(branch.jaxpr, inputs) for branch in programs_of(eqn)]


def _scan_body(eqn: Eqn) -> list[InnerJaxpr]:
    consts, carried = scan_counts(eqn)
    carries = tuple((k, consts + k) for k in range(carried))
    return [InnerJaxpr(programs_of(eqn)[0].jaxpr, range(len(eqn.invars)), carries)]


def _while_bodies(eqn: Eqn) -> list[InnerJaxpr]:
    """The condition, then the body: an equation's inputs are their constants, then the carry."""
    gates, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = range(gates + consts, len(eqn.invars))

    owned = range(gates), range(gates, gates + consts)

    def body(program: HeldJaxpr, own: range, gate: bool) -> InnerJaxpr:
        carries = tuple((k, len(own) + k) for k in range(len(carry)))
        return InnerJaxpr(program.jaxpr, [*own, *carry], carries, gate)

    return list(map(body, programs_of(eqn), owned, (True, False)))


_STRUCTURED: dict[str, Callable[[Eqn], list[InnerJaxpr]]] = {
    **dict.fromkeys((*CALLS, *RULED, *_OTHERS), _call_body),
    "cond": _cond_bodies,
    "scan": _scan_body,
    "while": _while_bodies,
}
