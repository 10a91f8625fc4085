"""The operations by family; importing this package fills the registry `OPERATIONS`.

Every pullback is an expression in these same operations, so that it can be differentiated again.
"""

from gradtools.seeing.formulas.operations import arrays as arrays
from gradtools.seeing.formulas.operations import elementwise as elementwise
from gradtools.seeing.formulas.operations import opaque as opaque
from gradtools.seeing.formulas.operations import reductions as reductions
