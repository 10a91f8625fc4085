"""The operations, one record each, by family: importing it fills the table `OPERATIONS`.

Every cotangent is written with operations of this house again, so that it can be differentiated
like any other expression.
"""

from gradtools.seeing.formulas.operations import arrays as arrays
from gradtools.seeing.formulas.operations import control as control
from gradtools.seeing.formulas.operations import convolutions as convolutions
from gradtools.seeing.formulas.operations import elementwise as elementwise
from gradtools.seeing.formulas.operations import fourier as fourier
from gradtools.seeing.formulas.operations import functions as functions
from gradtools.seeing.formulas.operations import indexing as indexing
from gradtools.seeing.formulas.operations import layers as layers
from gradtools.seeing.formulas.operations import linalg as linalg
from gradtools.seeing.formulas.operations import reductions as reductions
from gradtools.seeing.formulas.operations import slicing as slicing
