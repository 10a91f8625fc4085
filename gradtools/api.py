"""The public operators, collected. Each is documented where it is written.

`Api(backend)` binds them to a backend; the namespaces `gradtools.torch` and `gradtools.jax`
export its methods under their names.
"""

from __future__ import annotations

from gradtools.accumulate import Accumulation
from gradtools.chunking import Chunking
from gradtools.custom import CustomRules
from gradtools.derivatives import Derivatives
from gradtools.edits import Edits
from gradtools.frozen import Freezing
from gradtools.kernels import HostFunctions
from gradtools.models import Models
from gradtools.pairs import Pairs
from gradtools.seeing.formulating import Formulating
from gradtools.seeing.graphing import Graphing
from gradtools.seeing.measures import Measures
from gradtools.seeing.operators import Seeing
from gradtools.tiled import Tiling


class Api(
    Derivatives,
    Edits,
    CustomRules,
    HostFunctions,
    Freezing,
    Chunking,
    Tiling,
    Pairs,
    Accumulation,
    Models,
    Seeing,
    Graphing,
    Formulating,
    Measures,
):
    """Every public operator, bound to one backend."""
