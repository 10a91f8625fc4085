"""The formula of a program and of its derivatives, as mathematics that can be read and checked.

A wing records a program as a `Graph` in the vocabulary of `operations.py`; no framework is needed
from there on::

    graph --lowering--> expressions --recognition--> the same, patterns named
          --reverse--> the adjoint program --reverse--> the adjoint of that
          --statements, writing--> text and LaTeX;  --evaluation--> numbers

Everything is an `Expr` (`expressions.py`), simplified as it is made (`algebra.py`); an operation
has its value in NumPy (`functions.py`, `kernels.py`), its pullback (`functions.py`,
`pullbacks.py`) and its written form (`forms_elementwise.py`, `forms_arrays.py`). A new operation
of the vocabulary needs a line in `operations.py` and a lowering; a new primitive needs all three.

`derive` is the entrance. What it returns, a `Formula`, is compared with a framework's numbers by
`Formula.verified` before it is shown, and with a derivation by hand by `Formula.agrees_with`.
"""

from gradtools.seeing.formula.comparing import Agreement as Agreement
from gradtools.seeing.formula.comparing import Differs as Differs
from gradtools.seeing.formula.comparing import Outside as Outside
from gradtools.seeing.formula.formula import Check as Check
from gradtools.seeing.formula.formula import Formula as Formula
from gradtools.seeing.formula.formula import Values as Values
from gradtools.seeing.formula.formula import derive as derive

__all__ = ["Agreement", "Check", "Differs", "Formula", "Outside", "Values", "derive"]
