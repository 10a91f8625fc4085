"""Smart constructors of expressions: they canonicalize on construction.

`product` (einsum) is the core, with which everything that moves axes is written (`products.py`).
It uses `**`, `reshape` and `squeeze` in turn, which `functions.py` sets as methods of `Expr`.
"""

from gradtools.seeing.formulas.algebra.functions import add as add
from gradtools.seeing.formulas.algebra.functions import apply as apply
from gradtools.seeing.formulas.algebra.functions import conj as conj
from gradtools.seeing.formulas.algebra.functions import imag as imag
from gradtools.seeing.formulas.algebra.functions import plus as plus
from gradtools.seeing.formulas.algebra.functions import power as power
from gradtools.seeing.formulas.algebra.functions import real as real
from gradtools.seeing.formulas.algebra.functions import summands as summands
from gradtools.seeing.formulas.algebra.products import Entry as Entry
from gradtools.seeing.formulas.algebra.products import Labels as Labels
from gradtools.seeing.formulas.algebra.products import array as array
from gradtools.seeing.formulas.algebra.products import broadcast as broadcast
from gradtools.seeing.formulas.algebra.products import broadcast_shape as broadcast_shape
from gradtools.seeing.formulas.algebra.products import constant_of as constant_of
from gradtools.seeing.formulas.algebra.products import contracts as contracts
from gradtools.seeing.formulas.algebra.products import drop_axes as drop_axes
from gradtools.seeing.formulas.algebra.products import einsum as einsum
from gradtools.seeing.formulas.algebra.products import full as full
from gradtools.seeing.formulas.algebra.products import is_wrapper as is_wrapper
from gradtools.seeing.formulas.algebra.products import is_zero as is_zero
from gradtools.seeing.formulas.algebra.products import lifted as lifted
from gradtools.seeing.formulas.algebra.products import matmul as matmul
from gradtools.seeing.formulas.algebra.products import mean as mean
from gradtools.seeing.formulas.algebra.products import negate as negate
from gradtools.seeing.formulas.algebra.products import number as number
from gradtools.seeing.formulas.algebra.products import opened as opened
from gradtools.seeing.formulas.algebra.products import parts as parts
from gradtools.seeing.formulas.algebra.products import product as product
from gradtools.seeing.formulas.algebra.products import reshape as reshape
from gradtools.seeing.formulas.algebra.products import scale as scale
from gradtools.seeing.formulas.algebra.products import spread as spread
from gradtools.seeing.formulas.algebra.products import swap as swap
from gradtools.seeing.formulas.algebra.products import times as times
from gradtools.seeing.formulas.algebra.products import total as total
from gradtools.seeing.formulas.algebra.products import transpose as transpose
from gradtools.seeing.formulas.algebra.products import unsqueeze as unsqueeze
from gradtools.seeing.formulas.algebra.products import varying as varying
from gradtools.seeing.formulas.algebra.products import zeros as zeros
