"""`formula`: a program and its derivatives as readable mathematics, checked numerically.

A backend records a run as expressions, of operations in the vocabulary or opaque ones::

    run --translating, recorded--> expressions, with names such as softplus
        --adjoint--> the adjoint program --adjoint--> the adjoint of that
        --statements, writing--> text --typesetting--> LaTeX;  --evaluation--> numbers

Everything is an `Expr` (`expressions.py`), simplified on construction (`algebra.py`).
An `Operation` (`operation_record.py`) has a constructor, a value in NumPy, a pullback, a notation
and labels of axes; the records are in `operations/`, by family. Other operations keep their name
and are computed and differentiated by the framework (`operations/opaque.py`).

`derive` makes a `Formula` (`derivation.py`). `formulating.py` compares it with the framework's
numbers before it is returned, and derivations by hand with the framework's.
"""

from gradtools.seeing.formulas.derivation import Check as Check
from gradtools.seeing.formulas.derivation import Formula as Formula
from gradtools.seeing.formulas.derivation import Values as Values
from gradtools.seeing.formulas.derivation import derive as derive
from gradtools.seeing.formulas.formulating import Agreement as Agreement
from gradtools.seeing.formulas.formulating import Differs as Differs
from gradtools.seeing.formulas.formulating import Outside as Outside

__all__ = ["Agreement", "Check", "Differs", "Formula", "Outside", "Values", "derive"]
