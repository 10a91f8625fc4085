"""`formula`: a program and its derivatives as readable mathematics, checked numerically.

A backend records a run as expressions, of operations in the vocabulary or opaque ones::

    run --calls, recorded--> expressions, with names such as softplus
        --derivation--> the adjoint program --derivation--> the adjoint of that
        --statements, writing--> text --typesetting--> LaTeX;  --evaluate--> numbers

Everything is an `Expr` (`expressions.py`), simplified on construction (`algebra.py`). An
`Operation` has a value in NumPy, a pullback, a notation and labels of axes: `elementwise.py`,
`arrays.py`, `reductions.py`. Other operations keep their name and are computed and differentiated
by the framework (`opaque.py`). `formulating.py` compares a `Formula` with the framework's numbers
before it is returned, and derivations by hand with the framework's.
"""

from gradtools.seeing.formulas.derivation import Check as Check
from gradtools.seeing.formulas.derivation import Formula as Formula
from gradtools.seeing.formulas.derivation import Values as Values
from gradtools.seeing.formulas.formulating import Agreement as Agreement
from gradtools.seeing.formulas.formulating import Differs as Differs
from gradtools.seeing.formulas.formulating import Outside as Outside

__all__ = ["Agreement", "Check", "Differs", "Formula", "Outside", "Values"]
