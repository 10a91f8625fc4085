"""`formula`: a program and its derivatives as readable mathematics, checked numerically.

The translator of each framework turns a recorded run into expressions. Their operations are in the
vocabulary or opaque::

    run --names (words), patterns--> expressions --reverse_mode--> the adjoint, and its adjoint
        --statements, writing--> text --typesetting--> LaTeX;  --evaluate--> numbers

Everything is an `Expr` (`expressions.py`), simplified on construction (`algebra.py`).
`operations.py` is the table of operations: each defines a value in NumPy, a pullback and a
notation. Other operations keep their name, and the framework computes and differentiates them
(`opaque.py`). `formulating.py` compares a `Formula` with the framework's derivatives before it is
returned; it also compares derivations by hand with the framework's vjps.
"""

from gradtools.seeing.formulas.derivation import Agreement as Agreement
from gradtools.seeing.formulas.derivation import Formula as Formula

__all__ = ["Agreement", "Formula"]
