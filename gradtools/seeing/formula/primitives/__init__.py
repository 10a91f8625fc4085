"""The primitives of formulas on whole arrays, one record each, by family.

Every cotangent is written with operations of this house again, so that it can be differentiated
like any other expression. Linear operations come in adjoint pairs: slice and pad, index and
index_add, one discrete Fourier transform and the other. Functions of each place stand in
`elementwise.py`, which the others use.
"""

from gradtools.seeing.formula.primitives.arrays import ARRAYS
from gradtools.seeing.formula.primitives.indexing import INDEXING
from gradtools.seeing.formula.primitives.layers import LAYERS
from gradtools.seeing.formula.primitives.linalg import LINALG
from gradtools.seeing.formula.primitives.record import Primitive
from gradtools.seeing.formula.primitives.reductions import REDUCTIONS

PRIMITIVES: dict[str, Primitive] = {**ARRAYS, **INDEXING, **REDUCTIONS, **LAYERS, **LINALG}
