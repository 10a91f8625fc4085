"""The formula of a program and of its derivatives, as mathematics that can be read and checked.

A wing records a run as expressions, of operations that the house knows or by their names::

    run --translating--> expressions --recognition--> the same, patterns named
        --reverse--> the adjoint program --reverse--> the adjoint of that
        --statements, writing--> text and LaTeX;  --evaluation--> numbers

Everything is an `Expr` (`expressions.py`), simplified as it is made (`algebra/`). An operation is
one record (`operation_record.py`): how it is made, its value in NumPy, its cotangents, its notation
and its axes. The records stand in `operations/`, by family. What is not among them keeps its name,
and the framework computes and differentiates it (`operations/opaque.py`).

`derive` is the entrance; `compared_run.py` compares what it returns, a `Formula`, with a
framework's numbers before `formulating.py` shows it, and derivations by hand with these.
"""

from gradtools.seeing.formulas.comparing import Agreement as Agreement
from gradtools.seeing.formulas.comparing import Differs as Differs
from gradtools.seeing.formulas.comparing import Outside as Outside
from gradtools.seeing.formulas.derivation import Check as Check
from gradtools.seeing.formulas.derivation import Formula as Formula
from gradtools.seeing.formulas.derivation import Values as Values
from gradtools.seeing.formulas.derivation import derive as derive

__all__ = ["Agreement", "Check", "Differs", "Formula", "Outside", "Values", "derive"]
