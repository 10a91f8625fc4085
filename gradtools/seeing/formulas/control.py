"""Loops, branches, functions with rules of their own, and operations of unknown meaning.

The adjoint of a loop is a loop that runs backward over what the loop went through::

    for t = 1..T:  h_t, y_t = body(c, h_{t-1}, x_t)
    for t = T..1:  dh_{t-1}, dx_t, dc_t = adjoint of body at (c, h_{t-1}, x_t), of (dh_t, dy_t)
    dc = sum over t of dc_t

A custom rule is what its forward program says, with the cotangents that its backward program
says; residuals are differentiated through the forward program. An opaque operation has a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtools.seeing.formulas.primitives.record import Form
from gradtools.seeing.formulas.typesetting import SUM, Written, join

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter

import weakref
from collections.abc import Sequence
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.algebra import (
    add,
    conj,
    imag,
    is_zero,
    power,
    product,
    real,
    reshape,
    total,
    ufunc,
    zeros,
)
from gradtools.seeing.formulas.expressions import (
    Expr,
    Program,
    expr,
    order,
    placeholder,
    several,
    signature,
    substitute,
)
from gradtools.seeing.formulas.primitives.elementwise import FUNCTIONS


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation of other arguments, simplified again."""
    if node.op == "einsum":
        coefficient = node["coefficient"]
        return product(args, node["labels"], range(node.rank), node.shape, coefficient)
    if node.op == "power":
        return power(args[0], node["exponent"])
    if node.op == "add":
        return add(args)
    if node.op == "reshape":
        return reshape(args[0], node.shape)
    if node.op in _PARTS:
        return _PARTS[node.op](args[0])
    if node.op in FUNCTIONS:
        kind = FUNCTIONS[node.op].result_kind(args)
        return ufunc(node.op, args, kind, **dict(node.attributes))
    return expr(node.op, args, node.shape, node.kind, **dict(node.attributes))


_PARTS = {"conj": conj, "real": real, "imag": imag}


def inline(program: Program, args: Sequence[Expr]) -> list[Expr]:
    """The program's outputs, of these arguments."""
    known = dict(zip(program.inputs, args, strict=True))
    return substitute(program.outputs, known, rebuild)


# Loops.


def scan(
    body: Program,
    args: Sequence[Expr],
    consts: int,
    carries: int,
    length: int,
    reverse: bool,
    tells: Sequence[Expr] = (),
) -> list[Expr]:
    """A loop: final carries, and what each round gives, stacked.

    In an adjoint loop ``tells`` says of which inputs of the loop the stacked outputs are the
    cotangents.
    """
    shapes = [
        (o.shape if k < carries else (length, *o.shape), o.kind) for k, o in enumerate(body.outputs)
    ]
    return several(
        "scan",
        args,
        shapes,
        body=body,
        consts=consts,
        carries=carries,
        length=length,
        reverse=reverse,
        tells=tuple(tells),
    )


def _scan_pullback(y: Expr, cotangents: Sequence[Expr], adjoint_of: Any) -> list[Expr | None]:
    """The loop that runs backward."""
    body, consts, carries = y["body"], y["consts"], y["carries"]
    length, reverse = y["length"], y["reverse"]
    history = _history(y)
    xs = y.args[consts + carries :]
    given = _given(body, consts, carries)
    wrt = [p for p in body.inputs if p.is_inexact]
    silent = [k >= carries and is_zero(g) for k, g in enumerate(cotangents)]
    known = [zeros(g.shape) if s else g for g, s in zip(given, silent, strict=True)]
    result = dict(zip(wrt, adjoint_of(body.outputs, known, wrt), strict=True))
    c_in, h_in, x_in = _split(body.inputs, consts, carries)
    outputs = [result[p] if p in result else zeros(p.shape) for p in h_in]
    outputs += [result[p] for p in (*c_in, *x_in) if p in result]
    inputs = [*c_in, *given[:carries], *h_in, *x_in, *given[carries:]]
    program = Program(tuple(inputs), tuple(outputs))
    args = [*y.args[:consts], *cotangents[:carries], *history, *xs, *cotangents[carries:]]
    program, args, kept = _pruned(program, args, consts, carries)
    told = [p for p in (*c_in, *x_in) if p in result]
    results = scan(program, args, kept, carries, length, not reverse, told)
    carried = dict(zip(h_in, results[:carries], strict=True))
    stacked = dict(zip(told, results[carries:], strict=True))
    return [_finish(p, carried, stacked, summed=k < consts) for k, p in enumerate(body.inputs)]


def _given(body: Program, consts: int, carries: int) -> list[Expr]:
    """A placeholder for the cotangent of each output; that of a carry belongs to the carry."""
    entering = body.inputs[consts : consts + carries]
    owners = (*entering, *body.outputs[carries:])
    return [
        placeholder("", o.shape, o.kind, role="cotangent", of=owner)
        for o, owner in zip(body.outputs, owners, strict=True)
    ]


def _finish(p: Expr, carried: dict, stacked: dict, summed: bool) -> Expr | None:
    if not p.is_inexact:
        return None
    if p in carried:
        return carried[p]
    return total(stacked[p], [0]) if summed else stacked[p]


def _split(values: Sequence[Any], consts: int, carries: int) -> tuple:
    return values[:consts], values[consts : consts + carries], values[consts + carries :]


def _history(y: Expr) -> list[Expr]:
    """Each carry as it entered each round."""
    body, consts, carries = y["body"], y["consts"], y["carries"]
    entering = body.inputs[consts : consts + carries]
    longer = _with_history(body, entering)
    outputs = scan(longer, y.args, consts, carries, y["length"], y["reverse"], y["tells"])
    return outputs[len(outputs) - len(entering) :]


_longer: weakref.WeakKeyDictionary[Program, Program] = weakref.WeakKeyDictionary()


def _with_history(body: Program, entering: Sequence[Expr]) -> Program:
    """One program for one body, so that equal loops stay equal."""
    if body.outputs[len(body.outputs) - len(entering) :] == tuple(entering):
        return body
    if body not in _longer:
        _longer[body] = Program(body.inputs, (*body.outputs, *entering))
    return _longer[body]


def _pruned(program: Program, args: list[Expr], consts: int, carries: int):
    """Without the constants and slices that no output reads."""
    used = set(order(program.outputs))
    keep = [consts <= k < consts + carries or p in used for k, p in enumerate(program.inputs)]
    inputs = tuple(p for p, k in zip(program.inputs, keep, strict=True) if k)
    left = [a for a, k in zip(args, keep, strict=True) if k]
    return Program(inputs, program.outputs), left, sum(keep[:consts])


def loop(
    condition: Program, body: Program, args: Sequence[Expr], condition_consts: int, body_consts: int
) -> list[Expr]:
    """Rounds for as long as a condition holds."""
    return several(
        "while",
        args,
        signature(body.outputs),
        condition=condition,
        body=body,
        condition_consts=condition_consts,
        body_consts=body_consts,
    )


def _while_pullback(y: Expr, cotangents: Any, adjoint_of: Any) -> list[Expr | None]:
    raise GradtoolsError(
        "formula: a while loop whose number of rounds depends on values has no adjoint program; "
        "give it a fixed number of rounds (scan, or a loop with fixed bounds)"
    )


# Branches.


def cond(branches: Sequence[Program], args: Sequence[Expr]) -> list[Expr]:
    """One of the branches, by an index."""
    return several("cond", args, signature(branches[0].outputs), branches=tuple(branches))


def _cond_pullback(y: Expr, cotangents: Sequence[Expr], adjoint_of: Any) -> list[Expr | None]:
    branches, operands = y["branches"], y.args[1:]
    active = [k for k, a in enumerate(operands) if a.is_inexact]
    if not active:
        return [None] * len(y.args)
    adjoints = [_adjoint_branch(b, active, adjoint_of) for b in branches]
    result = iter(cond(adjoints, [*y.args, *cotangents]))
    return [None] + [next(result) if k in active else None for k in range(len(operands))]


def _adjoint_branch(branch: Program, active: Sequence[int], adjoint_of: Any) -> Program:
    given = [placeholder(f"cotangent {k}", o.shape, o.kind) for k, o in enumerate(branch.outputs)]
    wrt = [branch.inputs[k] for k in active]
    return Program((*branch.inputs, *given), tuple(adjoint_of(branch.outputs, given, wrt)))


# Rules and unknowns.


def ruled(
    outputs: Sequence[Expr],
    residuals: Sequence[Expr],
    inputs: Sequence[Expr],
    backward: Program,
    name: str,
    once: bool = False,
) -> list[Expr]:
    """The outputs, with cotangents of the inputs by a rule of their own.

    once: In what is made by that rule they are what their program says (`without_rules`).
    """
    return several(
        "ruled",
        (*outputs, *residuals, *inputs),
        signature(outputs),
        backward=backward,
        name=name,
        residuals=len(residuals),
        once=once,
    )


def without_rules(roots: Sequence[Expr]) -> list[Expr]:
    """The same, with what has a rule once as what its program says."""
    program_of = lambda x: x.args[x["output"]] if x.op == "ruled" and x["once"] else x
    return substitute(roots, {}, rebuild, program_of)


def _ruled_pullback(y: Expr, cotangents: Sequence[Expr], adjoint_of: Any) -> list[Expr | None]:
    outputs, residuals = len(y["signature"]), y["residuals"]
    kept = y.args[outputs : outputs + residuals]
    result = inline(y["backward"], [*kept, *cotangents])
    return [None] * (outputs + residuals) + list(result)


def opaque(
    name: str, args: Sequence[Expr], outputs: Sequence[tuple], function=None, adjoint=None
) -> list[Expr]:
    """An operation of which only the name is known, and perhaps how to compute it."""
    return several("opaque", args, outputs, name=name, function=function, adjoint=adjoint)


def _opaque_pullback(y: Expr, cotangents: Sequence[Expr], adjoint_of: Any) -> list[Expr | None]:
    result = opaque(
        y["name"] + "^*", (*y.args, *cotangents), signature(y.args), function=y["adjoint"]
    )
    return [f if a.is_inexact else None for f, a in zip(result, y.args, strict=True)]


PULLBACKS = {
    "scan": _scan_pullback,
    "while": _while_pullback,
    "cond": _cond_pullback,
    "ruled": _ruled_pullback,
    "opaque": _opaque_pullback,
}


# --- notation


def _opaque_form(w: ExpressionWriter, x: Expr) -> Written:
    name = x["name"]
    inside = join([w.whole(a) for a in x.args], ", ", ", ", SUM)
    which = f"[{x['output']}]" if len(x["signature"]) > 1 else ""
    latex = name.replace("_", r"\_").replace("^*", "")
    star = "^{*}" * name.count("^*")
    return Written(
        f"⚠{name}({inside.text}){which}",
        rf"\operatorname{{{latex}}}{star}\left({inside.latex}\right){which}",
    )


def _cond_form(w: ExpressionWriter, x: Expr) -> Written:
    """One case for each branch, the operands written in."""
    cases = []
    for branch in x["branches"]:
        w.names.update(zip(branch.inputs, [w.whole(a) for a in x.args[1:]], strict=True))
        cases.append(w.whole(branch.outputs[x["output"]]))
    index = w.whole(x.args[0])
    boolean = x.args[0].kind == "boolean"
    shown = list(enumerate(cases))[::-1] if boolean else list(enumerate(cases))
    said = [index.text if boolean else f"{index.text} = {k}" for k, _ in shown[:-1]]
    text = "; ".join(f"{c.text} if {s}" for (_, c), s in zip(shown, said, strict=False))
    rows = [rf"{c.latex} & {s}" for (_, c), s in zip(shown, said, strict=False)]
    rows.append(rf"{shown[-1][1].latex} & \text{{otherwise}}")
    return Written(
        f"{{{text}; {shown[-1][1].text} otherwise}}",
        r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}",
    )


FORMS: dict[str, Form] = {
    "opaque": _opaque_form,
    "cond": _cond_form,
    "ruled": lambda w, x: w.whole(x.args[x["output"]]),
}
