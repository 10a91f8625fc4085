"""`formula` expresses a program and its derivatives as formulas, which are checked numerically.

Each framework's translator converts a recorded run to expressions. Each operation is in the
vocabulary (`words.py`) or opaque (`opaque.py`)::

    run --names (words), patterns--> expressions --reverse_mode--> the adjoint, and its adjoint
        --statements, writing--> text --typesetting--> LaTeX;  --evaluate--> numbers

Programs, adjoints and constants are `Expr` objects (`expressions.py`), which are simplified on
construction (`algebra.py`). `operations.py` is the table of operations; each entry defines the
value in NumPy, the pullback and the notation. Opaque operations are written by name, and the
framework evaluates and differentiates them. `formulating.py` compares each `Formula` with the
framework's derivatives, and compares the user's manual derivations with the framework's vjps.
"""

from gradtools.seeing.formulas.derivation import Agreement as Agreement
from gradtools.seeing.formulas.derivation import Formula as Formula

__all__ = ["Agreement", "Formula"]
