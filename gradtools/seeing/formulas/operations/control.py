"""Loops, branches, functions with rules of their own, and operations of unknown meaning.

The adjoint of a loop is a loop that runs backward over what the loop went through::

    for t = 1..T:  h_t, y_t = body(c, h_{t-1}, x_t)
    for t = T..1:  dh_{t-1}, dx_t, dc_t = adjoint of body at (c, h_{t-1}, x_t), of (dh_t, dy_t)
    dc = sum over t of dc_t

A custom rule is what its forward program says, with the cotangents that its backward program
says; residuals are differentiated through the forward program. An opaque operation has a name.
What lowers the programs inside stands in `lowering.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, is_zero, rebuild, total, zeros
from gradtools.seeing.formulas.evaluation import evaluate
from gradtools.seeing.formulas.expressions import (
    Expr,
    Program,
    order,
    placeholder,
    several,
    signature,
    substitute,
)
from gradtools.seeing.formulas.operation_record import Cotangents, Outputs
from gradtools.seeing.formulas.operations.entering import operation, word
from gradtools.seeing.formulas.reverse import adjoint

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

Pruned = tuple[Program, list[Expr], int]  # with what enters it, and how many are constants
Kernel = Callable[..., Any] | None  # of NumPy arrays


def inline(program: Program, args: Sequence[Expr]) -> list[Expr]:
    """The program's outputs, of these arguments."""
    known = dict(zip(program.inputs, args, strict=True))
    return substitute(program.outputs, known, rebuild)


def _run(program: Program, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    return evaluate(program.outputs, dict(zip(program.inputs, args, strict=True)))


# A draw, seen as a named constant; value as it was drawn.
word("random(; name?, value?)")
# bodies[0] of the operands, written out.
word("call(*x) -> out*")

# Loops.


def _scan_result(*args: Expr, body: Program, carries: int, length: int, **more: Any) -> list:
    """Final carries, and what each round gives, stacked."""
    outputs = enumerate(body.outputs)
    return [(o.shape if k < carries else (length, *o.shape), o.kind) for k, o in outputs]


def _scan_value(y: Expr, *args: np.ndarray) -> list[np.ndarray]:
    consts, carries, length = y["consts"], y["carries"], y["length"]
    carry, xs = args[consts : consts + carries], args[consts + carries :]
    rounds: list[Any] = [None] * length
    for t in range(length)[:: -1 if y["reverse"] else 1]:
        results = _run(y["body"], [*args[:consts], *carry, *(x[t] for x in xs)])
        carry, rounds[t] = results[:carries], results[carries:]
    bodies = y["body"].outputs[carries:]
    stacked = [
        np.stack([r[k] for r in rounds]) if length else np.zeros((0, *o.shape))
        for k, o in enumerate(bodies)
    ]
    return [*carry, *stacked]


def _scan_pullback(outputs: Outputs, cotangents: Outputs, *args: Expr) -> Cotangents:
    """The loop that runs backward."""
    y = outputs[0]
    body, consts, carries = y["body"], y["consts"], y["carries"]
    length, reverse = y["length"], y["reverse"]
    history = _history(y)
    xs = args[consts + carries :]
    given = _given(body, consts, carries)
    wrt = [p for p in body.inputs if p.is_inexact]
    silent = [k >= carries and is_zero(g) for k, g in enumerate(cotangents)]
    known = [zeros(g.shape) if s else g for g, s in zip(given, silent, strict=True)]
    result = dict(zip(wrt, adjoint(body.outputs, known, wrt)[0], strict=True))
    c_in, h_in, x_in = _split(body.inputs, consts, carries)
    made = [result[p] if p in result else zeros(p.shape) for p in h_in]
    made += [result[p] for p in (*c_in, *x_in) if p in result]
    inputs = [*c_in, *given[:carries], *h_in, *x_in, *given[carries:]]
    program = Program(tuple(inputs), tuple(made))
    entering = [*args[:consts], *cotangents[:carries], *history, *xs, *cotangents[carries:]]
    program, entering, kept = _pruned(program, entering, consts, carries)
    told = [p for p in (*c_in, *x_in) if p in result]
    given = {"consts": kept, "carries": carries, "length": length, "reverse": not reverse}
    results = apply("scan", *entering, body=program, tells=tuple(told), **given)
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
    outputs = apply("scan", *y.args, **{**y.parameters, "body": longer})
    return outputs[len(outputs) - len(entering) :]


_longer: weakref.WeakKeyDictionary[Program, Program] = weakref.WeakKeyDictionary()


def _with_history(body: Program, entering: Sequence[Expr]) -> Program:
    """One program for one body, so that equal loops stay equal."""
    if body.outputs[len(body.outputs) - len(entering) :] == tuple(entering):
        return body
    if body not in _longer:
        _longer[body] = Program(body.inputs, (*body.outputs, *entering))
    return _longer[body]


def _pruned(program: Program, args: list[Expr], consts: int, carries: int) -> Pruned:
    """Without the constants and slices that no output reads."""
    used = set(order(program.outputs))
    keep = [consts <= k < consts + carries or p in used for k, p in enumerate(program.inputs)]
    inputs = tuple(p for p, k in zip(program.inputs, keep, strict=True) if k)
    left = [a for a, k in zip(args, keep, strict=True) if k]
    return Program(inputs, program.outputs), left, sum(keep[:consts])


def _tie_scan(axes: Axes, y: Expr) -> None:
    body, consts, carries, k = y["body"], y["consts"], y["carries"], y["output"]
    for n, (p, a) in enumerate(zip(body.inputs, y.args, strict=True)):
        shift = int(n >= consts + carries)
        for axis in range(p.rank):
            axes.tie((p, axis), (a, axis + shift))
    inner, shift = body.outputs[k], int(k >= carries)
    for axis in range(inner.rank):
        axes.tie((inner, axis), (y, axis + shift))
    for p, out in zip(body.inputs[consts : consts + carries], body.outputs, strict=False):
        axes.tie_all(p, out)


# bodies[0]: (consts, carries, one slice of each xs) to (carries, ys). In an adjoint loop ``tells``
# says of which inputs of the loop the stacked outputs are the cotangents.
word(
    "scan(*const, *carry, *xs; consts, carries, length, reverse?) -> carry* ys*",
    evaluate=_scan_value,
    result=_scan_result,
    pullback=_scan_pullback,
    ties=_tie_scan,
)


_MOST_ROUNDS = 1_000_000


def _while_value(y: Expr, *args: np.ndarray) -> Sequence[np.ndarray]:
    first, second = y["condition_consts"], y["body_consts"]
    for_condition, for_body = args[:first], args[first : first + second]
    carry: Sequence[np.ndarray] = args[first + second :]
    for _ in range(_MOST_ROUNDS):
        if not _run(y["condition"], [*for_condition, *carry])[0]:
            return carry
        carry = _run(y["body"], [*for_body, *carry])
    raise GradtoolsError(f"formula: a while loop did not end within {_MOST_ROUNDS} rounds")


def _while_pullback(outputs: Outputs, cotangents: Outputs, *args: Expr) -> Cotangents:
    raise GradtoolsError(
        "formula: a while loop whose number of rounds depends on values has no adjoint program; "
        "give it a fixed number of rounds (scan, or a loop with fixed bounds)"
    )


# bodies[0]: (condition consts, carries) to a boolean; bodies[1]: (body consts, carries) to
# carries.
word(
    "while(*const, *carry; condition_consts, body_consts) -> carry*",
    evaluate=_while_value,
    result=lambda *args, body, **_: signature(body.outputs),
    pullback=_while_pullback,
)

# Branches.


def _cond_value(y: Expr, *args: np.ndarray) -> list[np.ndarray]:
    branches = y["branches"]
    k = min(max(int(args[0]), 0), len(branches) - 1)
    return _run(branches[k], args[1:])


def _cond_pullback(outputs: Outputs, cotangents: Outputs, *args: Expr) -> Cotangents:
    branches, operands = outputs[0]["branches"], args[1:]
    active = [k for k, a in enumerate(operands) if a.is_inexact]
    if not active:
        return [None] * len(args)
    adjoints = [_adjoint_branch(b, active) for b in branches]
    result = iter(apply("cond", *args, *cotangents, branches=tuple(adjoints)))
    return [None, *(next(result) if k in active else None for k in range(len(operands)))]


def _adjoint_branch(branch: Program, active: Sequence[int]) -> Program:
    given = [placeholder(f"cotangent {k}", o.shape, o.kind) for k, o in enumerate(branch.outputs)]
    wrt = [branch.inputs[k] for k in active]
    return Program((*branch.inputs, *given), tuple(adjoint(branch.outputs, given, wrt)[0]))


def _cond_form(w: ExpressionWriter, x: Expr) -> ts.Written:
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
    return ts.Written(
        f"{{{text}; {shown[-1][1].text} otherwise}}",
        r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}",
    )


# bodies[index] of the operands; a boolean index takes bodies[1] when true.
word(
    "cond(index, *operand) -> out*",
    evaluate=_cond_value,
    pullback=_cond_pullback,
    result=lambda *args, branches: signature(branches[0].outputs),
    form=_cond_form,
)

# Rules and unknowns.


def without_rules(roots: Sequence[Expr]) -> list[Expr]:
    """The same, with what has a rule once as what its program says."""
    program_of = lambda x: x.args[x["output"]] if x.op == "ruled" and x["once"] else x
    return substitute(roots, {}, rebuild, program_of)


def _ruled_pullback(outputs: Outputs, cotangents: Outputs, *args: Expr) -> Cotangents:
    first = len(outputs) + outputs[0]["residuals"]
    kept = args[len(outputs) : first]
    return [None] * first + inline(outputs[0]["backward"], [*kept, *cotangents])


def _tie_ruled(axes: Axes, y: Expr) -> None:
    axes.tie_all(y, y.args[y["output"]])


# bodies[0]: x to (out*, residual*); bodies[1]: (residual*, cotangent of out*) to cotangents of x;
# once: in a derivative the out* are what bodies[0] says, no rule any more.
word("custom_rule(*x; name, residuals, once?) -> out*")
# Outputs, with cotangents of the inputs by a rule of their own; of outputs, residuals and inputs.
# once: in what is made by that rule they are what their program says (`without_rules`).
operation(
    "ruled",
    lambda y, *args: args[: y["outputs"]],
    _ruled_pullback,
    result=lambda *args, outputs, **_: signature(args[:outputs]),
    form=lambda w, x: w.whole(x.args[x["output"]]),
    ties=_tie_ruled,
)


def opaque(
    name: str,
    args: Sequence[Expr],
    outputs: Sequence[tuple],
    function: Kernel = None,
    adjoint: Kernel = None,
) -> list[Expr]:
    """An operation of which only the name is known, and perhaps how to compute it."""
    return several("opaque", args, outputs, name=name, function=function, adjoint=adjoint)


def _opaque_value(y: Expr, *args: np.ndarray) -> list[np.ndarray]:
    if y["function"] is None:
        raise GradtoolsError(
            f"formula: {y['name']} has no translation, so its value cannot be computed; "
            "the formula is shown with a mark and is not checked"
        )
    result = y["function"](*args)
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    return [np.asarray(r) for r in found]


def _opaque_pullback(outputs: Outputs, cotangents: Outputs, *args: Expr) -> Cotangents:
    y = outputs[0]
    result = opaque(y["name"] + "^*", (*args, *cotangents), signature(args), function=y["adjoint"])
    return [f if a.is_inexact else None for f, a in zip(result, args, strict=True)]


def _opaque_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    name = x["name"]
    inside = ts.join([w.whole(a) for a in x.args], ", ", ", ", ts.SUM)
    which = f"[{x['output']}]" if len(x["signature"]) > 1 else ""
    latex = name.replace("_", r"\_").replace("^*", "")
    star = "^{*}" * name.count("^*")
    return ts.Written(
        f"⚠{name}({inside.text}){which}",
        rf"\operatorname{{{latex}}}{star}\left({inside.latex}\right){which}",
    )


# Any other name: out = function(*x); the cotangents = adjoint(*x, *cotangents), both in NumPy.
word(
    "opaque(*x; function?, adjoint?) -> out*",
    evaluate=_opaque_value,
    pullback=_opaque_pullback,
    form=_opaque_form,
)
