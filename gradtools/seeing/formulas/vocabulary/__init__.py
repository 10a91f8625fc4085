"""The framework-neutral operations of a recorded program, by family, and how each is lowered."""

from __future__ import annotations

from gradtools.seeing.formulas.vocabulary.arrays import ARRAYS
from gradtools.seeing.formulas.vocabulary.elementwise import ELEMENTWISE
from gradtools.seeing.formulas.vocabulary.layers import LAYERS
from gradtools.seeing.formulas.vocabulary.linalg import LINALG
from gradtools.seeing.formulas.vocabulary.record import Operation, words

_CONTROL = """
random        |         | name? value?   | a draw, seen as a named constant; value as it was drawn
scan | *const *carry *xs | consts carries length reverse? |
    bodies[0]: (consts, carries, one slice of each xs) to (carries, ys) | carry* ys*
while | *const *carry | condition_consts body_consts |
    bodies[0]: (condition consts, carries) to a boolean; bodies[1]: (body consts, carries)
    to carries | carry*
cond | index *operand |  |
    bodies[index] of the operands; a boolean index takes bodies[1] when true | out*
call          | *x      |                | bodies[0] of the operands, written out | out*
custom_rule | *x | name residuals once? |
    bodies[0]: x to (out*, residual*); bodies[1]: (residual*, cotangent of out*) to
    cotangents of x; once: in a derivative the out* are what bodies[0] says, no rule any more
    | out*
opaque | *x | function? adjoint? |
    any other name: out = function(*x); the cotangents = adjoint(*x, *cotangents), both in
    NumPy | out*
"""

OPERATIONS: dict[str, Operation] = {
    **ELEMENTWISE,
    **ARRAYS,
    **LAYERS,
    **LINALG,
    **words(_CONTROL, {}),
}
