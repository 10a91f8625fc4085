"""Holding a derivation made by hand against the formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.errors import GradtoolsError

if TYPE_CHECKING:
    from gradtools.seeing.formula.formula import Agreement, Formula
