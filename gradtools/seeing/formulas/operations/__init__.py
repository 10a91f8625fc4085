"""The operations, one record each, by family: importing it fills the table `OPERATIONS`.

Every cotangent is written with operations of this house again, so that it can be differentiated
like any other expression.
"""

from gradtools.seeing.formulas.operations import arrays as arrays
from gradtools.seeing.formulas.operations import elementwise as elementwise
from gradtools.seeing.formulas.operations import opaque as opaque
from gradtools.seeing.formulas.operations import reductions as reductions
