"""The formula of a program and of its derivatives, as mathematics that can be read and checked.

A wing records a program as a `Graph` in the words of `operation_record.py`; no framework is needed
from there on::

    graph --lowering--> expressions --recognition--> the same, patterns named
          --reverse--> the adjoint program --reverse--> the adjoint of that
          --statements, writing--> text and LaTeX;  --evaluation--> numbers

Everything is an `Expr` (`expressions.py`), simplified as it is made (`algebra/`). An operation is
one record (`operation_record.py`): what a program says, its lowering, its value in NumPy, its
cotangents, its notation and its axes. The records stand in `operations/`, by family.

`derive` is the entrance. What it returns, a `Formula`, is compared with a framework's numbers by
`Formula.verified` before it is shown, and with a derivation by hand by `Formula.agrees_with`.
"""

from gradtools.seeing.formulas.comparing import Agreement as Agreement
from gradtools.seeing.formulas.comparing import Differs as Differs
from gradtools.seeing.formulas.comparing import Outside as Outside
from gradtools.seeing.formulas.derivation import Check as Check
from gradtools.seeing.formulas.derivation import Formula as Formula
from gradtools.seeing.formulas.derivation import Values as Values
from gradtools.seeing.formulas.derivation import derive as derive

__all__ = ["Agreement", "Check", "Differs", "Formula", "Outside", "Values", "derive"]
