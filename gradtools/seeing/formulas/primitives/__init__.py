"""The primitives of formulas on whole arrays, one record each, by family.

Every cotangent is written with operations of this house again, so that it can be differentiated
like any other expression. Linear operations come in adjoint pairs: slice and pad, index and
index_add, one discrete Fourier transform and the other. Functions of each place stand in
`elementwise.py`, which the others use.
"""

from gradtools.seeing.formulas.primitives.arrays import ARRAYS
from gradtools.seeing.formulas.primitives.indexing import INDEXING
from gradtools.seeing.formulas.primitives.layers import LAYERS
from gradtools.seeing.formulas.primitives.linalg import LINALG
from gradtools.seeing.formulas.primitives.record import Primitive
from gradtools.seeing.formulas.primitives.reductions import REDUCTIONS

PRIMITIVES: dict[str, Primitive] = {**ARRAYS, **INDEXING, **REDUCTIONS, **LAYERS, **LINALG}
